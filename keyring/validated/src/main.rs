//! The program `pagevault-keyring` of the packages for FIPS: TLS is that of the validated module,
//! with the versions and suites that are approved.

use std::process::ExitCode;

use aws_lc_rs as _;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use pagevault_keyring::tls::{self, Cryptography};

fn main() -> ExitCode {
    tls::choose(Cryptography {
        provider: rustls::crypto::default_fips_provider(),
        aws: CryptoMode::AwsLcFips,
    });
    pagevault_keyring::cli::main()
}
