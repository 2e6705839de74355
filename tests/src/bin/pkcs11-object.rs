//! Makes, changes and removes keys in a PKCS#11 token, with attributes that `pkcs11-tool` cannot
//! set: `pkcs11-object MODULE TOKEN make|pair|set|drop LABEL ID [ATTRIBUTE=true|false ...]
//! [value=HEX]`. `make` makes an AES key, `pair` an RSA key pair that can never leave the token.
//! The PIN is in the variable `PIN`; the id is hexadecimal, or `none`.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use cryptoki::context::{CInitializeArgs, CInitializeFlags, Pkcs11};
use cryptoki::mechanism::Mechanism;
use cryptoki::object::{Attribute, KeyType, ObjectClass};
use cryptoki::session::UserType;
use cryptoki::slot::Slot;
use cryptoki::types::AuthPin;
use pagevault_token_info::token_info;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [module, token, action, label, id, attributes @ ..] = arguments.as_slice() else {
        bail!("usage: MODULE TOKEN make|pair|set|drop LABEL ID [ATTRIBUTE=VALUE ...]");
    };
    let context = Pkcs11::new(module)?;
    context.initialize(CInitializeArgs::new(CInitializeFlags::OS_LOCKING_OK))?;
    let mut slots = context.get_slots_with_token()?.into_iter();
    // Not by `cryptoki`, which cannot describe all tokens.
    let is_meant = |slot: &Slot| {
        token_info(Path::new(module), slot.id()).is_ok_and(|info| info.label == *token)
    };
    let slot = slots.find(is_meant).context("no such token")?;
    let session = context.open_rw_session(slot)?;
    session.login(UserType::User, Some(&AuthPin::new(std::env::var("PIN")?.into())))?;

    let id = if id == "none" { Vec::new() } else { bytes(id)? };
    let mut name =
        vec![Attribute::Class(ObjectClass::SECRET_KEY), Attribute::Label(label.clone().into())];
    if !id.is_empty() {
        name.push(Attribute::Id(id));
    }
    let attributes: Vec<Attribute> =
        attributes.iter().map(|text| attribute(text)).collect::<Result<_>>()?;
    match action.as_str() {
        "make" => {
            let mut template = name;
            template.extend([Attribute::KeyType(KeyType::AES), Attribute::Token(true)]);
            template.push(Attribute::Private(true));
            let is_given = attributes.iter().any(|one| matches!(one, Attribute::Value(_)));
            template.extend(attributes);
            if is_given {
                session.create_object(&template)?;
            } else {
                template.push(Attribute::ValueLen(32.into()));
                session.generate_key(&Mechanism::AesKeyGen, &template)?;
            }
        }
        "pair" => {
            let common = &name[1..];
            let mut public = common.to_vec();
            public.extend([Attribute::Token(true), Attribute::Encrypt(true)]);
            public.push(Attribute::ModulusBits(2048.into()));
            public.push(Attribute::PublicExponent(vec![1, 0, 1]));
            let mut private = common.to_vec();
            private.extend([Attribute::Token(true), Attribute::Private(true)]);
            private.extend([Attribute::Sensitive(true), Attribute::Extractable(false)]);
            private.push(Attribute::Decrypt(true));
            session.generate_key_pair(&Mechanism::RsaPkcsKeyPairGen, &public, &private)?;
        }
        "set" | "drop" => {
            let found = session.find_objects(&name)?;
            ensure!(!found.is_empty(), "no such key");
            for object in found {
                if action == "set" {
                    session.update_attributes(object, &attributes)?;
                } else {
                    session.destroy_object(object)?;
                }
            }
        }
        other => bail!("no such action: {other}"),
    }
    Ok(())
}

fn attribute(text: &str) -> Result<Attribute> {
    let (name, value) = text.split_once('=').context("not ATTRIBUTE=VALUE")?;
    if name == "value" {
        return Ok(Attribute::Value(bytes(value)?));
    }
    let value = value.parse()?;
    Ok(match name {
        "sensitive" => Attribute::Sensitive(value),
        "extractable" => Attribute::Extractable(value),
        "encrypt" => Attribute::Encrypt(value),
        "decrypt" => Attribute::Decrypt(value),
        "wrap" => Attribute::Wrap(value),
        "unwrap" => Attribute::Unwrap(value),
        other => bail!("no such attribute: {other}"),
    })
}

fn bytes(hexadecimal: &str) -> Result<Vec<u8>> {
    let digits = hexadecimal.as_bytes();
    digits.chunks(2).map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}
