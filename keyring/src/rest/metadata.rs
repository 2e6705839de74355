//! The address of the metadata service of a cloud's machine.
//!
//! It is reached without TLS, at an address that leads to the machine's own host. A variable of the
//! cloud's tools can name another one, which must not be on the network either.

use std::net::{IpAddr, Ipv6Addr};

use pagevault_keystore::protocol::ErrorClass;
use reqwest::Url;

use crate::failure::Failure;
use crate::options::{bad, printable};

/// The address of both Google's and Azure's service.
pub(crate) const LINK_LOCAL: &str = "169.254.169.254";

/// Google's service in networks of IPv6 only.
const UNIQUE_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254);

/// `http://<host>/`, or the address in the environment `variable`: a host with or without a port,
/// and with or without `http://`.
///
/// # Errors
/// `insecure` if that is neither this machine nor link-local.
pub(crate) fn address(variable: &str) -> Result<Url, Failure> {
    let named = std::env::var(variable).ok().filter(|text| !text.is_empty());
    parse(variable, named.as_deref().unwrap_or(LINK_LOCAL))
}

fn parse(variable: &str, text: &str) -> Result<Url, Failure> {
    let host = text.trim_end_matches('/');
    let host = host.strip_prefix("http://").unwrap_or(host);
    let url = Url::parse(&format!("http://{host}/"))
        .ok()
        .filter(|url| url.path() == "/" && url.username().is_empty() && url.password().is_none())
        .filter(|url| url.query().is_none() && url.fragment().is_none());
    let wrong = || bad(format!("{variable} is not the address of a metadata service"));
    let url =
        url.ok_or_else(|| wrong().with_hint("Set it to a host, with a port if necessary."))?;
    let name = url.host_str().unwrap_or_default();
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok();
    let is_near = match address {
        Some(IpAddr::V4(address)) => address.is_loopback() || address.is_link_local(),
        Some(IpAddr::V6(address)) => address.is_loopback() || address == UNIQUE_LOCAL,
        None => matches!(name, "localhost" | "metadata.google.internal"),
    };
    if is_near {
        return Ok(url);
    }
    Err(Failure::new(
        ErrorClass::Insecure,
        format!("{variable} names a metadata service on the network"),
    )
    .with_detail(format!(
        "\"{}\" is neither this machine nor a link-local address; the connection is not encrypted.",
        printable(text)
    ))
    .with_hint("Unset the variable, or set it to a link-local address or to one of this machine."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_is_near() {
        for (text, url) in [
            (LINK_LOCAL, "http://169.254.169.254/"),
            ("127.0.0.1:8080", "http://127.0.0.1:8080/"),
            ("http://127.0.0.1:8080/", "http://127.0.0.1:8080/"),
            ("[::1]:80", "http://[::1]/"),
            ("[fd20:ce::254]", "http://[fd20:ce::254]/"),
            ("metadata.google.internal", "http://metadata.google.internal/"),
        ] {
            assert_eq!(parse("V", text).unwrap().as_str(), url);
        }
        for text in
            ["10.0.0.1", "evil.example.com", "169.254.169.254.evil.org", "fd00::1", "[fd00::1]"]
        {
            assert!(parse("V", text).is_err(), "{text}");
        }
        for text in ["127.0.0.1/x", "127.0.0.1?x", "a@127.0.0.1", "https://127.0.0.1", "a b"] {
            assert_eq!(parse("V", text).unwrap_err().class, ErrorClass::BadOptions, "{text}");
        }
    }
}
