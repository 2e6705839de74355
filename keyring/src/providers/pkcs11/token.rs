//! The token: found by its label, used by a session that is logged in as its normal user.

use std::path::Path;

use cryptoki::context::Pkcs11;
use cryptoki::error::{Error, RvError};
use cryptoki::session::{Session, UserType};
use cryptoki::slot::Slot;
use cryptoki::types::AuthPin;
use pagevault_keystore::protocol::ErrorClass;
use pagevault_token_info::{NoInfo, TokenInfo, token_info};

use super::failure::{self, Doing};
use super::settings::Settings;
use crate::failure::Failure;
use crate::options::{bad, printable};

// Flags of a token (PKCS#11 3.0 section 3.2, `CK_TOKEN_INFO`).
const CKF_LOGIN_REQUIRED: u64 = 0x4;
const CKF_TOKEN_INITIALIZED: u64 = 0x400;
pub(super) const CKF_USER_PIN_COUNT_LOW: u64 = 0x1_0000;
const CKF_USER_PIN_FINAL_TRY: u64 = 0x2_0000;
const CKF_USER_PIN_LOCKED: u64 = 0x4_0000;

/// A token in its slot.
pub(super) struct Token {
    pub(super) context: Pkcs11,
    pub(super) slot: Slot,
    pub(super) info: TokenInfo,
}

impl Token {
    /// Finds the only token with the label, and the serial number if it is given.
    ///
    /// # Errors
    /// `unreachable` if there is none, `bad_options` if there are several.
    pub(super) fn find(
        context: &Pkcs11,
        module: &Path,
        settings: &Settings,
    ) -> Result<Token, Failure> {
        let slots = context.get_slots_with_token();
        let slots = slots.map_err(|error| failure::of(&error, Doing::FindToken))?;
        let mut present: Vec<(Slot, TokenInfo)> = Vec::new();
        for slot in slots {
            match token_info(module, slot.id()) {
                Ok(info) => present.push((slot, info)),
                // Removed or replaced at this moment, or in a slot that does not concern us.
                Err(NoInfo::Value(_)) => {}
                Err(NoInfo::Module(text)) => {
                    let message = "could not look for the token";
                    return Err(Failure::new(ErrorClass::Unreachable, message)
                        .with_detail(format!("{text}."))
                        .with_hint("The module is probably defective."));
                }
            }
        }
        let serial = settings.serial.as_deref();
        let is_meant = |info: &TokenInfo| {
            info.label == settings.token.trim_end()
                && serial.is_none_or(|serial| info.serial == serial)
        };
        let meant: Vec<&(Slot, TokenInfo)> =
            present.iter().filter(|(_, info)| is_meant(info)).collect();
        match meant.as_slice() {
            [(slot, info)] => {
                Ok(Token { context: context.clone(), slot: *slot, info: info.clone() })
            }
            [] => Err(absent(settings, &present)),
            several => {
                let serials: Vec<String> =
                    several.iter().map(|(_, info)| quoted(&info.serial)).collect();
                Err(bad(format!("several tokens have the label \"{}\"", settings.token))
                    .with_detail(format!("Their serial numbers are {}.", serials.join(", ")))
                    .with_hint("Name one of them with the option \"serial\"."))
            }
        }
    }

    /// Opens a session, and logs in if there is a PIN.
    ///
    /// # Errors
    /// `unauthenticated` if the PIN is refused, or only one attempt is left.
    pub(super) fn open(&self, pin: Option<&str>) -> Result<Session, Failure> {
        let session = self.context.open_ro_session(self.slot);
        let session = session.map_err(|error| failure::of(&error, Doing::OpenSession))?;
        let Some(pin) = pin else {
            if self.has(CKF_LOGIN_REQUIRED) {
                return Err(bad("the token requires a login")
                    .with_detail("The options name no PIN.")
                    .with_hint("Specify the option \"pin_file\" or \"pin_command\"."));
            }
            return Ok(session);
        };
        if let Some(refused) = self.refused_before() {
            return Err(refused);
        }
        match session.login(UserType::User, Some(&AuthPin::new(pin.into()))) {
            // Only this process knows about this login, so it is ours: some modules log in by
            // themselves.
            Ok(()) | Err(Error::Pkcs11(RvError::UserAlreadyLoggedIn, _)) => Ok(session),
            Err(error) => Err(failure::of(&error, Doing::Login)),
        }
    }

    /// Refuses to use the last attempt that the token permits: if the PIN is wrong, the token would
    /// be locked.
    fn refused_before(&self) -> Option<Failure> {
        let unauthenticated = |message: &str| Failure::new(ErrorClass::Unauthenticated, message);
        if self.has(CKF_USER_PIN_LOCKED) {
            return Some(unauthenticated("the token's user PIN is locked")
                .with_detail("Too many wrong PINs were used. No attempt was made.")
                .with_hint("Correct the PIN where the options say that it is, then have the security officer unlock the token's user PIN."));
        }
        self.has(CKF_USER_PIN_FINAL_TRY).then(|| {
            unauthenticated("the token permits only one more attempt to log in")
                .with_detail("Wrong PINs were used before. pagevault does not use the last attempt, after which the token would be locked. No attempt was made.")
                .with_hint("Correct the PIN where the options say that it is, then log in once with other tools, which resets the token's counter: pkcs11-tool --module MODULE --token-label TOKEN --login --list-objects")
        })
    }

    /// Whether it has a flag.
    pub(super) fn has(&self, flag: u64) -> bool {
        self.info.flags & flag != 0
    }

    /// Label, model and serial number, in one line.
    pub(super) fn name(&self) -> String {
        format!(
            "token {} ({}, serial number {})",
            quoted(&self.info.label),
            printable(&self.info.model),
            printable(&self.info.serial)
        )
    }
}

fn absent(settings: &Settings, present: &[(Slot, TokenInfo)]) -> Failure {
    let label = &settings.token;
    let named = settings
        .serial
        .as_ref()
        .map_or(String::new(), |serial| format!(" and serial number \"{serial}\""));
    let others: Vec<String> = present
        .iter()
        .filter(|(_, info)| info.flags & CKF_TOKEN_INITIALIZED != 0)
        .take(10)
        .map(|(_, info)| {
            format!("{} (serial number {})", quoted(&info.label), quoted(&info.serial))
        })
        .collect();
    let detail = match others.as_slice() {
        [] => "The module shows no token.".to_owned(),
        others => format!("The module shows {}.", others.join(", ")),
    };
    let message = format!("there is no token with label \"{label}\"{named}");
    Failure::new(ErrorClass::Unreachable, message)
        .with_detail(detail)
        .with_hint("Connect the token, or correct the option. The module may need its configuration: see the option \"environment\", and whether the server's user may access the device or service.")
        .transient()
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", printable(text))
}
