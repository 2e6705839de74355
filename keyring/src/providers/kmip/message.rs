//! Requests and replies: a header, and one operation (KMIP 1.4 section 7, KMIP 2.1 section 8).

use zeroize::Zeroizing;

use super::names::{self, Operation, tag};
use super::ttlv::{Items, Malformed, Value, Writer, parse};
use crate::net::REPLY_LIMIT;

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// KMIP 1.4.
    V1_4,
    /// KMIP 2.0.
    V2_0,
    /// KMIP 2.1.
    V2_1,
}

impl Version {
    /// All versions, the newest first.
    pub const ALL: [Version; 3] = [Version::V2_1, Version::V2_0, Version::V1_4];

    /// As in messages and in options.
    pub(super) fn name(self) -> &'static str {
        match self {
            Version::V1_4 => "1.4",
            Version::V2_0 => "2.0",
            Version::V2_1 => "2.1",
        }
    }

    fn numbers(self) -> (i32, i32) {
        match self {
            Version::V1_4 => (1, 4),
            Version::V2_0 => (2, 0),
            Version::V2_1 => (2, 1),
        }
    }

    /// Whether attributes are fields of their own, and not pairs of a name and a value.
    pub(super) fn has_fields(self) -> bool {
        self >= Version::V2_0
    }

    pub(super) fn write(self, writer: &mut Writer) {
        let (major, minor) = self.numbers();
        writer.structure(tag::PROTOCOL_VERSION, |version| {
            version.put(tag::PROTOCOL_VERSION_MAJOR, Value::Integer(major));
            version.put(tag::PROTOCOL_VERSION_MINOR, Value::Integer(minor));
        });
    }

    /// `None` also for a version that is not supported.
    pub(super) fn read(version: Items<'_>) -> Option<Version> {
        let numbers = (
            version.integer(tag::PROTOCOL_VERSION_MAJOR)?,
            version.integer(tag::PROTOCOL_VERSION_MINOR)?,
        );
        Version::ALL.into_iter().find(|version| version.numbers() == numbers)
    }
}

/// A user name and a password, for servers that want them in addition to the certificate.
pub(super) struct Login {
    pub(super) username: String,
    pub(super) password: Zeroizing<String>,
}

/// A request for one operation, with the payload that `fill` writes.
pub(super) fn request(
    version: Version,
    login: Option<&Login>,
    operation: Operation,
    fill: impl FnOnce(&mut Writer),
) -> Zeroizing<Vec<u8>> {
    let mut writer = Writer::default();
    writer.structure(tag::REQUEST_MESSAGE, |message| {
        message.structure(tag::REQUEST_HEADER, |header| {
            version.write(header);
            header.put(tag::MAXIMUM_RESPONSE_SIZE, Value::Integer(REPLY_LIMIT as i32));
            if let Some(login) = login {
                write_login(header, login);
            }
            header.put(tag::BATCH_COUNT, Value::Integer(1));
        });
        message.structure(tag::BATCH_ITEM, |item| {
            item.put(tag::OPERATION, Value::Enumeration(operation as u32));
            item.structure(tag::REQUEST_PAYLOAD, fill);
        });
    });
    writer.into_bytes()
}

fn write_login(header: &mut Writer, login: &Login) {
    header.structure(tag::AUTHENTICATION, |authentication| {
        authentication.structure(tag::CREDENTIAL, |credential| {
            credential.put(tag::CREDENTIAL_TYPE, Value::Enumeration(names::BY_PASSWORD));
            credential.structure(tag::CREDENTIAL_VALUE, |value| {
                value.put(tag::USERNAME, Value::Text(&login.username));
                value.put(tag::PASSWORD, Value::Text(&login.password));
            });
        });
    });
}

/// A reply: when it was made, and the operation's result.
#[derive(Debug, PartialEq)]
pub struct Reply<'a> {
    /// The server's time, in seconds since 1970.
    pub time: Option<i64>,
    /// The payload, or why there is none.
    pub result: Result<Items<'a>, Refusal>,
}

/// The server's refusal of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its Result Reason; 0 if it says none.
    pub reason: u32,
    /// Its Result Message, possibly empty.
    pub message: String,
}

/// Reads the reply to a request for `operation`, made in `version`.
///
/// # Errors
/// If it is not the reply to such a request.
pub(super) fn read_reply(
    bytes: &[u8],
    version: Version,
    operation: Operation,
) -> Result<Reply<'_>, Malformed> {
    let message = parse(bytes)?;
    let Value::Structure(parts) = message.value else {
        return Err(Malformed("it is not a message"));
    };
    if message.tag != tag::RESPONSE_MESSAGE {
        return Err(Malformed("it is not a reply"));
    }
    let header = parts.structure(tag::RESPONSE_HEADER);
    let header = header.ok_or(Malformed("it does not have one header"))?;
    let item = parts.structure(tag::BATCH_ITEM).ok_or(Malformed("it does not have one result"))?;
    let time = match header.one(tag::TIME_STAMP) {
        Some(Value::DateTime(seconds)) => Some(seconds),
        _ => None,
    };
    let status =
        item.enumeration(tag::RESULT_STATUS).ok_or(Malformed("it does not say a status"))?;
    if status != names::SUCCESS {
        let reason = item.enumeration(tag::RESULT_REASON).unwrap_or_default();
        let message = item.text(tag::RESULT_MESSAGE).unwrap_or_default().to_owned();
        return Ok(Reply { time, result: Err(Refusal { reason, message }) });
    }
    // A refusal may be in another version, and name no operation.
    if header.structure(tag::PROTOCOL_VERSION).and_then(Version::read) != Some(version) {
        return Err(Malformed("it is in another version of the protocol"));
    }
    if item.enumeration(tag::OPERATION) != Some(operation as u32) {
        return Err(Malformed("it is the result of another operation"));
    }
    let payload = item.structure(tag::RESPONSE_PAYLOAD).unwrap_or(Items::NONE);
    Ok(Reply { time, result: Ok(payload) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply with these parts, as a server writes it.
    fn reply(
        version: Version,
        operation: Operation,
        status: u32,
        twice: bool,
    ) -> Zeroizing<Vec<u8>> {
        let mut writer = Writer::default();
        writer.structure(tag::RESPONSE_MESSAGE, |message| {
            message.structure(tag::RESPONSE_HEADER, |header| {
                version.write(header);
                header.put(tag::TIME_STAMP, Value::DateTime(1_800_000_000));
                header.put(tag::BATCH_COUNT, Value::Integer(1));
            });
            for _ in 0..if twice { 2 } else { 1 } {
                message.structure(tag::BATCH_ITEM, |item| {
                    item.put(tag::OPERATION, Value::Enumeration(operation as u32));
                    item.put(tag::RESULT_STATUS, Value::Enumeration(status));
                    if status != 0 {
                        item.put(tag::RESULT_REASON, Value::Enumeration(12));
                        item.put(tag::RESULT_MESSAGE, Value::Text("no"));
                    }
                });
            }
        });
        writer.into_bytes()
    }

    #[test]
    fn replies_are_those_to_the_request() {
        let read = |bytes: &[u8]| {
            read_reply(bytes, Version::V2_0, Operation::Query)
                .map(|reply| (reply.time, reply.result.map(|_| ())))
        };
        let time = Some(1_800_000_000);
        assert_eq!(read(&reply(Version::V2_0, Operation::Query, 0, false)), Ok((time, Ok(()))));
        let refusal = Err(Refusal { reason: 12, message: "no".to_owned() });
        for version in [Version::V2_0, Version::V1_4] {
            let refused = reply(version, Operation::Query, 1, false);
            assert_eq!(read(&refused), Ok((time, refusal.clone())));
        }
        for (bytes, why) in [
            (reply(Version::V1_4, Operation::Query, 0, false), "another version"),
            (reply(Version::V2_0, Operation::Locate, 0, false), "another operation"),
            (reply(Version::V2_0, Operation::Query, 0, true), "one result"),
            (request(Version::V2_0, None, Operation::Query, |_| {}), "not a reply"),
        ] {
            let Malformed(told) = read(&bytes).unwrap_err();
            assert!(told.contains(why), "{told}");
        }
        assert!(read(b"HTTP/1.1 400 Bad Request\r\n\r\n").is_err());
    }

    #[test]
    fn a_request_says_who_asks_for_what() {
        let login = Login { username: "db".to_owned(), password: "hunter2".to_owned().into() };
        let bytes = request(Version::V1_4, Some(&login), Operation::Locate, |payload| {
            payload.put(tag::MAXIMUM_ITEMS, Value::Integer(7));
        });
        let Value::Structure(parts) = parse(&bytes).unwrap().value else { panic!() };
        let header = parts.structure(tag::REQUEST_HEADER).unwrap();
        let version = header.structure(tag::PROTOCOL_VERSION).and_then(Version::read);
        assert_eq!(version, Some(Version::V1_4));
        let value = header
            .structure(tag::AUTHENTICATION)
            .and_then(|part| part.structure(tag::CREDENTIAL))
            .and_then(|part| part.structure(tag::CREDENTIAL_VALUE))
            .unwrap();
        assert_eq!(
            (value.text(tag::USERNAME), value.text(tag::PASSWORD)),
            (Some("db"), Some("hunter2"))
        );
        let item = parts.structure(tag::BATCH_ITEM).unwrap();
        assert_eq!(item.enumeration(tag::OPERATION), Some(8));
        let payload = item.structure(tag::REQUEST_PAYLOAD).unwrap();
        assert_eq!(payload.integer(tag::MAXIMUM_ITEMS), Some(7));
    }
}
