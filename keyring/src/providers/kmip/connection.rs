//! A TLS connection, on which requests and replies follow each other.
//!
//! Not asynchronous: there is one connection, and one request at a time. Each read and write of the
//! socket has the time that is left, so a server that sends single bytes gains nothing.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagevault_keystore::protocol::ErrorClass;
use rustls::{AlertDescription, ClientConfig, ClientConnection, StreamOwned};
use zeroize::Zeroizing;

use super::failure::NoAnswer;
use super::names::tag;
use super::settings::Address;
use super::ttlv::{HEADER, Malformed};
use crate::net::{CONNECT_TIME, Cause, REPLY_LIMIT, REQUEST_TIME, cause_of};

/// Shortest time limit of a socket; zero would mean none.
const SHORTEST: Duration = Duration::from_millis(1);

/// A connection to a server whose certificate has been verified.
pub(super) struct Connection(StreamOwned<ClientConnection, Timed>);

/// A socket that can be used until a time.
struct Timed {
    socket: TcpStream,
    until: Instant,
}

impl Connection {
    /// Connects to the first address of the host that accepts.
    ///
    /// # Errors
    /// [`NoAnswer::Unconnected`], [`NoAnswer::Certificate`].
    pub(super) fn open(
        address: &Address,
        config: &Arc<ClientConfig>,
        deadline: Option<Instant>,
    ) -> Result<Connection, NoAnswer> {
        let unconnected = |error: &io::Error| reject(error, NoAnswer::Unconnected);
        let socket = connect(address, deadline).map_err(|error| unconnected(&error))?;
        let client = ClientConnection::new(Arc::clone(config), address.name.clone());
        let client = client.map_err(|error| NoAnswer::Unconnected(cause_of(&error)))?;
        let socket = Timed { socket, until: limit(deadline, CONNECT_TIME) };
        let mut stream = StreamOwned::new(client, socket);
        while stream.conn.is_handshaking() {
            match stream.conn.complete_io(&mut stream.sock) {
                Ok((0, 0)) => return Err(unconnected(&io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) => return Err(unconnected(&error)),
            }
        }
        Ok(Connection(stream))
    }

    /// The version of TLS, for messages.
    pub(super) fn protocol(&self) -> &'static str {
        match self.0.conn.protocol_version() {
            Some(rustls::ProtocolVersion::TLSv1_3) => "TLS 1.3",
            _ => "TLS 1.2",
        }
    }

    /// Sends a request and reads the reply.
    ///
    /// # Errors
    /// If there is none, or one that cannot be of a KMIP server.
    pub(super) fn exchange(
        &mut self,
        request: &[u8],
        deadline: Option<Instant>,
    ) -> Result<Zeroizing<Vec<u8>>, NoAnswer> {
        self.0.sock.until = limit(deadline, REQUEST_TIME);
        let lost = |error: io::Error| reject(&error, NoAnswer::Lost);
        self.0.write_all(request).map_err(lost)?;
        self.0.flush().map_err(lost)?;
        let mut header = [0; HEADER];
        self.0.read_exact(&mut header).map_err(lost)?;
        let [a, b, c, kind, length @ ..] = header;
        if u32::from_be_bytes([0, a, b, c]) != tag::RESPONSE_MESSAGE.0 || kind != 1 {
            return Err(NoAnswer::Foreign(Malformed("it is not a message of KMIP")));
        }
        let length = u32::from_be_bytes(length) as usize;
        if length > REPLY_LIMIT {
            return Err(NoAnswer::Foreign(Malformed("it is longer than any reply")));
        }
        let mut reply = Zeroizing::new(vec![0; HEADER + length]);
        reply[..HEADER].copy_from_slice(&header);
        self.0.read_exact(&mut reply[HEADER..]).map_err(lost)?;
        Ok(reply)
    }
}

fn connect(address: &Address, deadline: Option<Instant>) -> io::Result<TcpStream> {
    let mut failed = None;
    for place in (address.host.as_str(), address.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&place, left(limit(deadline, CONNECT_TIME))?) {
            Ok(socket) => {
                socket.set_nodelay(true)?;
                return Ok(socket);
            }
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| io::Error::other("the name has no address")))
}

/// When something must end that may take `longest`.
fn limit(deadline: Option<Instant>, longest: Duration) -> Instant {
    let end = Instant::now() + longest;
    deadline.map_or(end, |deadline| deadline.min(end))
}

fn left(until: Instant) -> io::Result<Duration> {
    match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left.max(SHORTEST)),
    }
}

/// An expired time limit of a socket is reported as this.
fn late(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(left(self.until)?))?;
        self.socket.read(buffer).map_err(late)
    }
}

impl Write for Timed {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(Some(left(self.until)?))?;
        self.socket.write(buffer).map_err(late)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

/// What an error of the connection means. With TLS 1.3 the server's refusal of a certificate
/// arrives only with the first reply.
fn reject(error: &io::Error, otherwise: impl FnOnce(Cause) -> NoAnswer) -> NoAnswer {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    if let Some(rustls::Error::AlertReceived(alert)) = inner
        && is_about_certificate(*alert)
    {
        return NoAnswer::Certificate(format!("The server's TLS alert is {alert:?}."));
    }
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return otherwise(Cause {
            class: ErrorClass::Unreachable,
            detail: "The server closed the connection.".to_owned(),
            retry: true,
        });
    }
    otherwise(cause_of(error))
}

/// Alerts by which a server refuses the client's certificate (RFC 8446 section 6.2).
fn is_about_certificate(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::NoCertificate
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::CertificateRequired
            | AlertDescription::DecryptError
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_certificate_is_no_outage() {
        let alert = |alert| {
            let error = io::Error::other(rustls::Error::AlertReceived(alert));
            reject(&error, NoAnswer::Lost)
        };
        for about in [
            AlertDescription::UnknownCA,
            AlertDescription::CertificateExpired,
            AlertDescription::CertificateRequired,
            // A certificate that another authority of the same name has signed.
            AlertDescription::DecryptError,
        ] {
            assert!(matches!(alert(about), NoAnswer::Certificate(_)), "{about:?}");
        }
        for (other, class) in [
            (rustls::Error::AlertReceived(AlertDescription::HandshakeFailure), ErrorClass::Tls),
            (rustls::CertificateError::UnknownIssuer.into(), ErrorClass::Tls),
        ] {
            match reject(&io::Error::other(other), NoAnswer::Lost) {
                NoAnswer::Lost(cause) => assert_eq!(cause.class, class),
                answer => panic!("{answer:?}"),
            }
        }
        let classes = [
            (io::ErrorKind::UnexpectedEof, ErrorClass::Unreachable),
            (io::ErrorKind::ConnectionReset, ErrorClass::Unreachable),
            (io::ErrorKind::TimedOut, ErrorClass::Deadline),
        ];
        for (kind, class) in classes {
            match reject(&kind.into(), NoAnswer::Unconnected) {
                NoAnswer::Unconnected(cause) => {
                    assert_eq!((cause.class, cause.retry), (class, true))
                }
                answer => panic!("{answer:?}"),
            }
        }
    }

    #[test]
    fn times_are_limited_by_the_deadline() {
        let now = Instant::now();
        assert!(limit(None, CONNECT_TIME) >= now + CONNECT_TIME);
        assert_eq!(limit(Some(now), CONNECT_TIME), now);
        assert_eq!(left(now).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(late(io::ErrorKind::WouldBlock.into()).kind(), io::ErrorKind::TimedOut);
    }
}
