//! TLS for all providers: rustls, its cryptography, and the certificates that are trusted.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once, OnceLock};

#[cfg(feature = "aws_kms")]
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use pagevault_keystore::protocol::ErrorClass;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::SigningKey;
use rustls::{ClientConfig, RootCertStore};
use zeroize::Zeroizing;

use crate::failure::Failure;
use crate::trust::{FileKind, check_directory, read, resolve};

/// Trusted authorities, and the certificate of this client.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trust {
    /// PEM file of certificate authorities, used instead of the system's.
    pub(crate) ca_file: Option<PathBuf>,
    /// PEM files of the client's certificate chain and its key.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

/// The cryptography of TLS, and of tokens that this program signs.
pub struct Cryptography {
    /// For rustls.
    pub provider: CryptoProvider,
    /// The same for the AWS SDK.
    #[cfg(feature = "aws_kms")]
    pub aws: CryptoMode,
}

static CHOSEN: OnceLock<Cryptography> = OnceLock::new();

/// Selects another cryptography than ring, before anything else is done.
pub fn choose(cryptography: Cryptography) {
    // Fails only if one was selected already, which the caller knows.
    let _ = CHOSEN.set(cryptography);
}

fn chosen() -> &'static Cryptography {
    CHOSEN.get_or_init(|| Cryptography {
        provider: rustls::crypto::ring::default_provider(),
        #[cfg(feature = "aws_kms")]
        aws: CryptoMode::Ring,
    })
}

/// Whether TLS is that of a validated module.
pub(crate) fn is_validated() -> bool {
    chosen().provider.fips()
}

/// The cryptography of the AWS SDK's connections.
#[cfg(feature = "aws_kms")]
pub(crate) fn aws_mode() -> CryptoMode {
    chosen().aws.clone()
}

/// Selects the cryptography for all rustls connections of this process.
pub(crate) fn use_cryptography() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only if one is installed already, which nothing else here does.
        let _ = chosen().provider.clone().install_default();
    });
}

/// A private key that signs; `None` if it is of no known kind.
pub(crate) fn signing_key(key: PrivateKeyDer<'static>) -> Option<Arc<dyn SigningKey>> {
    chosen().provider.key_provider.load_private_key(key).ok()
}

/// A client configuration that always verifies servers against `trust`.
///
/// # Errors
/// `bad_options` for a file that cannot be read or contains no certificate, `tls` if rustls
/// refuses.
pub(crate) fn client_config(trust: &Trust) -> Result<ClientConfig, Failure> {
    use_cryptography();
    let builder = ClientConfig::builder().with_root_certificates(roots(trust.ca_file.as_deref())?);
    let Some((certificate, key)) = &trust.identity else {
        return Ok(builder.with_no_client_auth());
    };
    let chain = read_certificates(certificate)?;
    let secret = PrivateKeyDer::from_pem_slice(&pem(key, FileKind::Credentials)?)
        .map_err(|error| unreadable(key, &error))?;
    builder.with_client_auth_cert(chain, secret).map_err(|error| {
        Failure::new(
            ErrorClass::Tls,
            format!(
                "certificate \"{}\" and key \"{}\" cannot be used",
                certificate.display(),
                key.display()
            ),
        )
        .with_detail(format!("{error}."))
    })
}

fn roots(ca_file: Option<&Path>) -> Result<Arc<RootCertStore>, Failure> {
    let Some(path) = ca_file else { return native_roots() };
    let mut store = RootCertStore::empty();
    for certificate in read_certificates(path)? {
        store.add(certificate).map_err(|error| unreadable(path, &error))?;
    }
    Ok(Arc::new(store))
}

/// The system's authorities. All providers share them: reading some hundred files takes long, and a
/// request may have a thousand providers.
fn native_roots() -> Result<Arc<RootCertStore>, Failure> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    check_native()?;
    let roots = ROOTS.get_or_init(|| {
        // Certificates that cannot be parsed are left out. Without any, no server is trusted, and
        // the error says so.
        let mut store = RootCertStore::empty();
        store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Arc::new(store)
    });
    Ok(Arc::clone(roots))
}

/// Whether the system has trusted authorities.
///
/// # Errors
/// `insecure` if other users can write them.
pub(crate) fn has_native_roots() -> Result<bool, Failure> {
    native_roots().map(|store| !store.is_empty())
}

/// Refuses authorities in files that the environment names instead of the system's, if other users
/// can write them (`rustls-native-certs` reads these variables).
fn check_native() -> Result<(), Failure> {
    if let Some(path) = env::var_os("SSL_CERT_FILE").map(PathBuf::from) {
        pem(&path, FileKind::Trusted)?;
    }
    let directories = env::var_os("SSL_CERT_DIR").unwrap_or_default();
    for directory in env::split_paths(&directories).filter(|path| path.is_dir()) {
        let found = resolve::follow(FileKind::Trusted, &directory)
            .map_err(|unresolved| unresolved.or(|error| unreadable(&directory, error)))?;
        check_directory(FileKind::Trusted, &found)?;
    }
    Ok(())
}

/// The certificates of a PEM file, at least one.
fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&pem(path, FileKind::Trusted)?)
        .collect::<Result<_, _>>()
        .map_err(|error| unreadable(path, &error))?;
    if certificates.is_empty() {
        return Err(unreadable(path, &"it contains no certificate"));
    }
    Ok(certificates)
}

/// Reads a PEM file that other users cannot write.
pub(crate) fn pem(path: &Path, what: FileKind) -> Result<Zeroizing<Vec<u8>>, Failure> {
    read::read_whole(path, what).map_err(|error| match error.class {
        ErrorClass::Insecure => error,
        _ => unreadable(path, &error.detail().trim_end_matches('.')),
    })
}

fn unreadable(path: &Path, cause: &dyn std::fmt::Display) -> Failure {
    Failure::new(ErrorClass::BadOptions, format!("could not use \"{}\"", path.display()))
        .with_detail(format!("{cause}."))
        .with_hint("It must be a PEM file that the server's operating system user can read.")
}
