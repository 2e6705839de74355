//! The published XTS vectors (cipher/vectors/), on every backend that this CPU can run.

use super::{Backend, Block, Direction, KeySize, Schedule};

/// One record of a NIST response file.
#[derive(Default)]
struct Vector {
    encrypt: bool,
    key: Vec<u8>,
    tweak: Vec<u8>,
    plain: Vec<u8>,
    cipher: Vec<u8>,
}

fn hex(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().as_chunks::<2>().0;
    pairs.iter().map(|p| u8::from_str_radix(str::from_utf8(p).unwrap(), 16).unwrap()).collect()
}

fn parse(text: &str) -> Vec<Vector> {
    let mut vectors: Vec<Vector> = Vec::new();
    let mut encrypt = None;
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        match line.split_once(" = ") {
            None if line == "[ENCRYPT]" => encrypt = Some(true),
            None if line == "[DECRYPT]" => encrypt = Some(false),
            None => assert_eq!(line, ""),
            Some(("COUNT", _)) => {
                vectors.push(Vector { encrypt: encrypt.unwrap(), ..Vector::default() });
            }
            Some(("DataUnitLen", _)) => {}
            Some((name, value)) => {
                let vector = vectors.last_mut().unwrap();
                let field = match name {
                    "Key" => &mut vector.key,
                    "i" => &mut vector.tweak,
                    "PT" => &mut vector.plain,
                    "CT" => &mut vector.cipher,
                    _ => panic!("unknown field {name}"),
                };
                *field = hex(value);
            }
        }
    }
    vectors
}

fn check(text: &str, count: usize) {
    let vectors = parse(text);
    assert_eq!(vectors.len(), count);
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        for (number, vector) in vectors.iter().enumerate() {
            let size = match vector.key.len() {
                64 => KeySize::Aes256,
                32 => KeySize::Aes128,
                other => panic!("a key of {other} bytes"),
            };
            let mut key = [0; 64];
            key[..vector.key.len()].copy_from_slice(&vector.key);
            // The module has no such keys, and refuses those whose halves are the same.
            let (data, tweak) = vector.key.split_at(vector.key.len() / 2);
            if backend == Backend::AwsLc && (size == KeySize::Aes128 || data == tweak) {
                continue;
            }
            let schedule = Schedule::new(size, &key, backend).unwrap();
            let (direction, from, to) = if vector.encrypt {
                (Direction::Encrypt, &vector.plain, &vector.cipher)
            } else {
                (Direction::Decrypt, &vector.cipher, &vector.plain)
            };
            let (blocks, rest) = from.as_chunks::<16>();
            assert!(rest.is_empty() && !blocks.is_empty());
            let mut unit: Vec<Block> = blocks.to_vec();
            let tweak = u128::from_le_bytes(vector.tweak[..].try_into().unwrap());
            schedule.run(direction, tweak, &mut unit);
            assert_eq!(unit.as_flattened(), to, "{backend}, record {number}");
        }
    }
}

#[test]
fn nist_cavp_aes_128() {
    check(include_str!("../../vectors/XTSGenAES128.rsp"), 600);
}

#[test]
fn nist_cavp_aes_256() {
    check(include_str!("../../vectors/XTSGenAES256.rsp"), 600);
}

#[test]
fn ieee_1619() {
    check(include_str!("../../vectors/ieee-1619.rsp"), 14);
}
