//! The options of the provider, checked for their form only.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::options::{Options, bad, printable};

/// Names of all options.
pub const OPTIONS: &[&str] =
    &["module", "module_sha256", "token", "serial", "pin_file", "pin_command", "environment"];

/// Options that decide which PIN is read, and which module and token receive it.
pub const CREDENTIAL_OPTIONS: &[&str] =
    &["module", "token", "serial", "pin_file", "pin_command", "environment"];

/// Length of a token's label in bytes (PKCS#11 3.0 section 3.2, `CK_TOKEN_INFO`).
const LABEL_LENGTH: usize = 32;

/// The options.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Settings {
    /// The module: a shared library.
    pub(super) module: PathBuf,
    /// SHA-256 of the module's file, in lower-case hexadecimal.
    pub(super) module_sha256: Option<String>,
    /// Label of the token.
    pub(super) token: String,
    /// Serial number of the token.
    pub(super) serial: Option<String>,
    /// Where the user PIN is.
    pub(super) pin: Pin,
    /// Environment variables for the module.
    pub(super) environment: BTreeMap<String, String>,
}

/// Where the user PIN is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Pin {
    /// In a file.
    File(PathBuf),
    /// A program prints it: its path and its arguments.
    Program(PathBuf, Vec<String>),
    /// Nowhere: for a token that needs no login.
    None,
}

impl Settings {
    /// Reads the options.
    ///
    /// # Errors
    /// `bad_options` if one has the wrong form.
    pub(super) fn of(options: &Options<'_>) -> Result<Settings, Failure> {
        let pin = match (options.optional_path("pin_file")?, options.program("pin_command")?) {
            (None, None) => Pin::None,
            (Some(file), None) => Pin::File(file),
            (None, Some((path, arguments))) => Pin::Program(path, arguments),
            (Some(_), Some(_)) => {
                return Err(bad("options \"pin_file\" and \"pin_command\" exclude each other")
                    .with_hint("Specify one of them."));
            }
        };
        Ok(Settings {
            module: options.absolute_path("module")?,
            module_sha256: options.text("module_sha256")?.map(hash).transpose()?,
            token: token_label(options.required_text("token")?)?,
            serial: options.text("serial")?.map(str::to_owned),
            pin,
            environment: environment(options)?,
        })
    }
}

fn hash(text: &str) -> Result<String, Failure> {
    if text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(text.to_ascii_lowercase());
    }
    Err(bad("option \"module_sha256\" is not a SHA-256 hash")
        .with_detail("It must consist of 64 hexadecimal digits.")
        .with_hint("Use the output of: sha256sum MODULE"))
}

fn token_label(text: &str) -> Result<String, Failure> {
    if text.len() <= LABEL_LENGTH {
        return Ok(text.to_owned());
    }
    Err(bad(format!("option \"token\" is longer than {LABEL_LENGTH} bytes"))
        .with_detail("A token's label cannot be longer.")
        .with_hint("Specify the label that is shown by: pkcs11-tool --module MODULE --list-slots"))
}

fn environment(options: &Options<'_>) -> Result<BTreeMap<String, String>, Failure> {
    let mut variables = BTreeMap::new();
    for (name, value) in options.object("environment")?.into_iter().flatten() {
        let shown = printable(name);
        let well_formed = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && name.bytes().next().is_some_and(|first| !first.is_ascii_digit());
        if !well_formed || name.len() > 255 {
            return Err(bad(format!("\"{shown}\" is not a name of an environment variable"))
                .with_hint("Use letters, digits and underscores."));
        }
        // They make the dynamic linker load other code than the module that was checked.
        if name.starts_with("LD_") {
            return Err(bad(format!("environment variable \"{shown}\" is not allowed"))
                .with_detail("It would load other code than the module.")
                .with_hint("Make libraries known to the system with ldconfig."));
        }
        let text =
            value.as_str().filter(|text| text.len() < 4096 && !text.chars().any(char::is_control));
        let text = text.ok_or_else(|| {
            bad(format!("value of environment variable \"{shown}\" cannot be used"))
                .with_detail("It is not a string, is too long, or contains a control character.")
        })?;
        variables.insert(name.clone(), text.to_owned());
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagevault_keystore::protocol::ErrorClass;
    use serde_json::{Value, json};

    fn read(more: &Value) -> Result<Settings, Failure> {
        let mut values = json!({"module": "/usr/lib/m.so", "token": "t", "pin_file": "/etc/pin"});
        let map = values.as_object_mut().unwrap();
        for (name, value) in more.as_object().unwrap() {
            match value {
                Value::Null => drop(map.remove(name)),
                value => drop(map.insert(name.clone(), value.clone())),
            }
        }
        Settings::of(&Options::new("pkcs11", map, OPTIONS)?)
    }

    #[test]
    fn options_are_read() {
        let settings = read(&json!({"module_sha256": "AB".repeat(32), "serial": "7",
            "environment": {"SOFTHSM2_CONF": "/etc/softhsm2.conf", "EMPTY": ""}}))
        .unwrap();
        assert_eq!(settings.module_sha256, Some("ab".repeat(32)));
        assert_eq!(settings.pin, Pin::File("/etc/pin".into()));
        assert_eq!(settings.environment.len(), 2);
        let settings = read(&json!({"pin_file": null, "pin_command": ["/bin/pin", "x"]})).unwrap();
        assert_eq!(settings.pin, Pin::Program("/bin/pin".into(), vec!["x".to_owned()]));
        assert_eq!(read(&json!({"pin_file": null})).unwrap().pin, Pin::None);
    }

    #[test]
    fn options_of_another_form_are_refused() {
        for wrong in [
            json!({"module": null}),
            json!({"module": "libsofthsm2.so"}),
            json!({"module": "/usr/../m.so"}),
            json!({"module": "/usr/m\u{0}.so"}),
            json!({"module": ["/usr/m.so"]}),
            json!({"module_sha256": "ab"}),
            json!({"module_sha256": "g".repeat(64)}),
            json!({"token": null}),
            json!({"token": ""}),
            json!({"token": "a\nb"}),
            json!({"token": "x".repeat(33)}),
            json!({"serial": 7}),
            json!({"pin": "1234"}),
            json!({"pin_file": "pin"}),
            json!({"pin_command": ["/bin/pin"]}),
            json!({"pin_file": null, "pin_command": "/bin/pin"}),
            json!({"environment": ["A"]}),
            json!({"environment": {"A B": "x"}}),
            json!({"environment": {"": "x"}}),
            json!({"environment": {"1A": "x"}}),
            json!({"environment": {"A=B": "x"}}),
            json!({"environment": {"A": 1}}),
            json!({"environment": {"A": "x\u{0}y"}}),
            json!({"environment": {"LD_PRELOAD": "/tmp/x.so"}}),
        ] {
            let error = read(&wrong).err().unwrap_or_else(|| panic!("accepted: {wrong}"));
            assert_eq!(error.class, ErrorClass::BadOptions, "{wrong}");
            assert!(!error.message.contains("1234"), "{}", error.message);
        }
    }
}
