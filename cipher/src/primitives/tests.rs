//! The validated module, as this crate uses it.

use super::{ffi, fill_random, hkdf, hmac, module, reserve, sha256};
use crate::layout::PAGE_SIZE;
use crate::wrap::{self, WrapKey};
use crate::xts::Backend;
use crate::{CipherId, DataKey, DataKeyVersion, Fork, PageKey, page};

#[test]
fn the_module_is_in_fips_mode() {
    let module = module().unwrap();
    assert!(module.is_in_fips_mode);
    // Of the branch that the certificate is for.
    assert!(module.name.starts_with("AWS-LC FIPS 3."), "{}", module.name);
}

/// What the module itself says of each call.
#[test]
fn each_service_is_an_approved_one() {
    let key = DataKey::random(CipherId::Aes256Xts).unwrap();
    let page_key = PageKey::new(&key);
    assert_eq!(page_key.backend(), Backend::AwsLc);
    let mut sealed = [1; PAGE_SIZE];
    assert!(ffi::is_approved(|| {
        page::seal(&mut sealed, &page_key, DataKeyVersion::FIRST, 1, Fork::Main, false);
    }));
    assert!(ffi::is_approved(|| {
        page::open(&mut sealed, &page_key, 1, Fork::Main, false).unwrap();
    }));
    assert!(ffi::is_approved(|| fill_random(&mut [0; 32]).unwrap()));
    assert!(ffi::is_approved(|| assert_ne!(sha256(b"abc"), [0; 32])));
    assert!(ffi::is_approved(|| assert_ne!(hmac(&[1; 32], b"abc"), [0; 32])));
    assert!(ffi::is_approved(|| hkdf(&[1; 32], &[b"label", b"context"], &mut [0; 64])));
    let (wrap_key, mut wrapped) = (WrapKey::new(&[1; 32]), [0; 32 + wrap::OVERHEAD]);
    assert!(ffi::is_approved(|| {
        wrap::wrap(&wrap_key, b"context", &[2; 32], &mut wrapped).unwrap();
    }));
    assert!(ffi::is_approved(|| {
        wrap::unwrap(&wrap_key, b"context", &wrapped, &mut [0; 32]).unwrap();
    }));
    // Proof that the question has another answer, too.
    assert!(!ffi::is_approved(|| ()));
    let legacy = PageKey::new(&DataKey::random(CipherId::Aes128Xts).unwrap());
    assert_ne!(legacy.backend(), Backend::AwsLc);
    assert!(!ffi::is_approved(|| {
        page::seal(&mut sealed, &legacy, DataKeyVersion::FIRST, 1, Fork::Main, false);
    }));
}

#[test]
fn a_derivation_with_a_long_context_is_the_same() {
    let (mut short, mut long) = ([0; 64], [0; 64]);
    let context = [7; 5000];
    hkdf(&[1; 32], &[b"label", &context], &mut long);
    hkdf(&[1; 32], &[&[&b"label"[..], &context].concat()], &mut short);
    assert_eq!(short, long);
}

#[test]
fn contexts_made_in_advance_are_used_again() {
    let mut memory = Vec::new();
    reserve(2, |at, length| memory.push(at.addr()..at.addr() + length));
    assert_eq!(memory.len(), 8);
    let key = |byte: u8| {
        let bytes: [u8; 64] = core::array::from_fn(|at| byte ^ at as u8);
        PageKey::new(&DataKey::from_bytes(CipherId::Aes256Xts, &bytes).unwrap())
    };
    let sealed = |key: &PageKey| {
        let mut page = [1; PAGE_SIZE];
        page::seal(&mut page, key, DataKeyVersion::FIRST, 1, Fork::Main, false);
        page
    };
    let expected = sealed(&key(1));
    for _ in 0..3 {
        let (one, two, three) = (key(1), key(2), key(1));
        assert!(sealed(&one) == expected && sealed(&three) == expected);
        assert!(sealed(&two) != expected);
    }
}
