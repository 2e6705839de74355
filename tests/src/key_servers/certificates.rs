//! Certificates for servers and clients of tests. Their authority exists only during the test.

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// A new authority.
    ///
    /// # Errors
    /// When random numbers are unavailable.
    pub fn new() -> Result<Authority> {
        let mut params = named("pagevault tests")?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Authority { issuer: Issuer::new(params, key), pem })
    }

    /// Its certificate in PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate and its key in PEM, for servers called `hosts` and for clients.
    ///
    /// # Errors
    /// When a name is not valid.
    pub fn sign(&self, name: &str, hosts: &[&str]) -> Result<(String, String)> {
        let mut params = named(name)?;
        for host in hosts {
            params
                .subject_alt_names
                .extend(CertificateParams::new([(*host).to_owned()])?.subject_alt_names);
        }
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok((certificate.pem(), key.serialize_pem()))
    }
}

fn named(name: &str) -> Result<CertificateParams> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, name);
    Ok(params)
}
