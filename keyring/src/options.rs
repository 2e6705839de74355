//! Reading a provider's options. Unknown names are refused: a misspelt option must not silently
//! switch off a security setting.

use crate::failure::Failure;
use std::path::{Component, Path, PathBuf};

use pagevault_keystore::protocol::ErrorClass;
#[cfg(feature = "network")]
use reqwest::Url;
use serde_json::{Map, Value};

/// The options of one provider, with known names only.
pub struct Options<'a> {
    /// Whose options they are, for messages.
    whose: String,
    values: &'a Map<String, Value>,
}

impl<'a> Options<'a> {
    /// Accepts the options of a provider if each of their names is in `known`.
    pub fn new(
        kind: &str,
        values: &'a Map<String, Value>,
        known: &[&str],
    ) -> Result<Options<'a>, Failure> {
        Options::of(format!("a provider of kind \"{kind}\""), values, known)
    }

    /// Like [`Options::new`], for a store of notes.
    pub fn of_store(
        kind: &str,
        values: &'a Map<String, Value>,
        known: &[&str],
    ) -> Result<Options<'a>, Failure> {
        Options::of(format!("a store of kind \"{kind}\""), values, known)
    }

    fn of(
        whose: String,
        values: &'a Map<String, Value>,
        known: &[&str],
    ) -> Result<Options<'a>, Failure> {
        match values.keys().find(|name| !known.contains(&name.as_str())) {
            None => Ok(Options { whose, values }),
            Some(name) => Err(bad(format!("unknown option \"{}\" for {whose}", printable(name)))
                .with_hint(format!("Known options: {}.", known.join(", ")))),
        }
    }

    /// A program and its arguments, if given: an array of strings, the first an absolute path.
    /// Checks the form only, not the file system.
    pub fn program(&self, name: &str) -> Result<Option<(PathBuf, Vec<String>)>, Failure> {
        let Some(value) = self.values.get(name) else { return Ok(None) };
        let texts: Option<Vec<String>> = value.as_array().and_then(|values| {
            values.iter().map(|value| value.as_str().map(str::to_owned)).collect()
        });
        let mut texts = texts.filter(|texts| !texts.is_empty()).ok_or_else(|| {
            bad(format!(
                "option \"{name}\" must be an array of strings: a program and its arguments"
            ))
            .with_hint(format!("Specify it as {{\"{name}\": [\"/absolute/path\", \"argument\"]}}."))
        })?;
        if texts.iter().any(|text| text.len() > 4095 || text.chars().any(char::is_control)) {
            return Err(bad(format!(
                "option \"{name}\" contains a control character or is longer than 4095 bytes"
            )));
        }
        let path = absolute_path(&texts.remove(0)).map_err(|error| Failure {
            message: format!("option \"{name}\": {}", error.message),
            ..error
        })?;
        Ok(Some((path, texts)))
    }

    /// A required absolute path of a file. Checks the form only, not the file system.
    pub fn absolute_path(&self, name: &str) -> Result<PathBuf, Failure> {
        self.optional_path(name)?.ok_or_else(|| self.missing(name, "\"/absolute/path\""))
    }

    /// An absolute path of a file, if given.
    pub fn optional_path(&self, name: &str) -> Result<Option<PathBuf>, Failure> {
        let path = self.text(name)?.map(absolute_path).transpose();
        path.map_err(|error| Failure {
            message: format!("option \"{name}\": {}", error.message),
            ..error
        })
    }

    /// A required string.
    pub fn required_text(&self, name: &str) -> Result<&'a str, Failure> {
        self.text(name)?.ok_or_else(|| self.missing(name, "\"...\""))
    }

    /// A string, if given: not empty, at most 4095 bytes, no control characters.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, Failure> {
        match self.values.get(name) {
            None => Ok(None),
            Some(Value::String(text))
                if !text.is_empty() && text.len() < 4096 && !text.chars().any(char::is_control) =>
            {
                Ok(Some(text))
            }
            Some(Value::String(_)) => Err(bad(format!(
                "option \"{name}\" is empty, is too long or contains a control character"
            ))),
            Some(_) => Err(bad(format!("option \"{name}\" must be a string"))),
        }
    }

    /// An array of strings, if given; each as [`text`](Options::text) requires.
    pub fn texts(&self, name: &str) -> Result<Option<Vec<&'a str>>, Failure> {
        let Some(value) = self.values.get(name) else { return Ok(None) };
        let is_text = |text: &&str| {
            !text.is_empty() && text.len() < 4096 && !text.chars().any(char::is_control)
        };
        let texts: Option<Vec<&str>> = value
            .as_array()
            .and_then(|values| values.iter().map(|value| value.as_str().filter(is_text)).collect());
        texts.map(Some).ok_or_else(|| {
            bad(format!("option \"{name}\" must be an array of strings without control characters"))
        })
    }

    /// A boolean; false if not given.
    pub fn flag(&self, name: &str) -> Result<bool, Failure> {
        match self.values.get(name) {
            None => Ok(false),
            Some(Value::Bool(on)) => Ok(*on),
            Some(_) => Err(bad(format!("option \"{name}\" must be true or false"))),
        }
    }

    /// A nested object, if given.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, Failure> {
        match self.values.get(name) {
            None => Ok(None),
            Some(Value::Object(values)) => Ok(Some(values)),
            Some(_) => Err(bad(format!("option \"{name}\" must be an object"))),
        }
    }

    /// The failure for a required option that is not given.
    pub(crate) fn missing(&self, name: &str, example: &str) -> Failure {
        bad(format!("option \"{name}\" is missing for {}", self.whose))
            .with_hint(format!("Specify it as {{\"{name}\": {example}}}."))
    }
}

/// The option that permits http to this machine. It is named for its risk: any user of the machine
/// can listen at a free port, and would receive keys.
pub(crate) const INSECURE_HTTP: &str = "insecure_loopback_http";

/// Accepts `https://host[:port]` as the value of `option`, and `http` to this machine if
/// `allow_http` ([`INSECURE_HTTP`]) is set.
#[cfg(feature = "network")]
pub(crate) fn server_address(option: &str, text: &str, allow_http: bool) -> Result<Url, Failure> {
    let wrong = |detail: &str| {
        // The value is not repeated: it may contain a credential by mistake.
        bad(format!("option \"{option}\" is not a server address"))
            .with_detail(detail)
            .with_hint("Specify it as \"https://keys.example.com\", with a port if necessary.")
    };
    let url = Url::parse(text).map_err(|error| wrong(&format!("{error}.")))?;
    let host = url.host_str().ok_or_else(|| wrong("It does not contain a host name."))?;
    let here = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
    match url.scheme() {
        "https" => {}
        "http" if here && allow_http => {}
        "http" if here => {
            return Err(Failure::new(
                ErrorClass::Insecure,
                "keys could be sent to any user of this machine",
            )
            .with_detail(format!(
                "Option \"{option}\" begins with http://, so the key server is not authenticated; while it is down, any user can listen at its port."
            ))
            .with_hint(format!(
                "Use https, or a Unix socket if the provider supports it. For tests, set the option \"{INSECURE_HTTP}\"."
            )));
        }
        "http" => {
            return Err(Failure::new(ErrorClass::Insecure, "keys would be sent unencrypted")
                .with_detail(format!(
                    "Option \"{option}\" begins with http://, and is the address of another machine."
                ))
                .with_hint("Use https."));
        }
        _ => return Err(wrong("It begins with neither https:// nor http://.")),
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong("It contains a user name or password."));
    }
    if !matches!(url.path(), "" | "/") || url.query().is_some() || url.fragment().is_some() {
        return Err(wrong("It contains more than a host and a port."));
    }
    Ok(url)
}

/// Accepts an absolute path that names a file and contains no `..`.
pub fn absolute_path(text: &str) -> Result<PathBuf, Failure> {
    let path = Path::new(text);
    let shown = printable(text);
    if !path.is_absolute() {
        return Err(bad(format!("path \"{shown}\" is not absolute")).with_hint(
            "Specify an absolute path: the server and the helper may run in different directories.",
        ));
    }
    if text.len() > 4095 || text.chars().any(char::is_control) {
        return Err(bad("path contains a control character or is longer than 4095 bytes"));
    }
    if path.file_name().is_none() || text.ends_with('/') {
        return Err(bad(format!("path \"{shown}\" does not contain a file name")));
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(bad(format!("path \"{shown}\" contains \"..\""))
            .with_hint("Specify the path without \"..\"."));
    }
    Ok(path.to_owned())
}

/// `text` as messages may show it: control characters escaped, truncated after 200 characters.
pub fn printable(text: &str) -> String {
    let mut shown: String = text.chars().take(200).flat_map(escape_control).collect();
    if text.chars().nth(200).is_some() {
        shown.push_str("...");
    }
    shown
}

fn escape_control(c: char) -> impl Iterator<Item = char> {
    let (plain, escaped) =
        if c.is_control() { (None, Some(c.escape_default())) } else { (Some(c), None) };
    plain.into_iter().chain(escaped.into_iter().flatten())
}

pub(crate) fn bad(message: impl Into<String>) -> Failure {
    Failure::new(ErrorClass::BadOptions, message)
}

#[cfg(all(test, feature = "network"))]
mod tests {
    use super::*;

    #[test]
    fn only_safe_addresses_are_accepted() {
        for good in [
            "https://vault:8200",
            "https://10.0.0.1/",
            "https://vpce-1.kms.eu-central-1.vpce.amazonaws.com",
        ] {
            assert!(server_address("address", good, false).is_ok(), "{good}");
        }
        for here in ["http://127.0.0.1:8200", "http://localhost:1", "http://[::1]"] {
            let refused = server_address("address", here, false).unwrap_err();
            assert_eq!(refused.class, ErrorClass::Insecure, "{here}");
            assert!(server_address("address", here, true).is_ok(), "{here}");
        }
        for bad in [
            "",
            "vault:8200",
            "https://",
            "ftp://vault",
            "https://u:p@vault",
            "https://vault/v1",
            "https://vault?token=x",
            "https://vault#x",
            "http://vault:8200",
            "http://10.0.0.1",
            "http://127.0.0.1.evil.org",
        ] {
            let error =
                server_address("address", bad, true).err().unwrap_or_else(|| panic!("{bad}"));
            let text = format!("{error:?}");
            assert!(!text.contains("u:p") && !text.contains("token"), "{text}");
        }
    }
}
