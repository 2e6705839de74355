//! The encodings in which a value may get to disk.

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Every spelling of `bytes`, with its name.
pub(super) fn of(bytes: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let reversed: Vec<u8> = bytes.iter().rev().copied().collect();
    let hex = |upper: bool| -> Vec<u8> {
        let digits = bytes.iter().map(|byte| match upper {
            true => format!("{byte:02X}"),
            false => format!("{byte:02x}"),
        });
        digits.collect::<String>().into_bytes()
    };
    let mut all = vec![
        ("as stored", bytes.to_vec()),
        ("backwards", reversed),
        ("hexadecimal", hex(false)),
        ("hexadecimal", hex(true)),
        ("base64", base64(bytes, 0)),
        ("base64", base64(bytes, 1)),
        ("base64", base64(bytes, 2)),
    ];
    let decimal: Vec<_> = bytes.iter().map(|byte| byte.cast_signed().to_string()).collect();
    all.push(("decimal", decimal.join(" ").into_bytes()));
    if bytes.is_ascii() {
        all.push(("UTF-16", bytes.iter().flat_map(|byte| [*byte, 0]).collect()));
        all.push(("UTF-16", bytes.iter().flat_map(|byte| [0, *byte]).collect()));
    }
    all
}

/// The digits of a base64 text that depend only on `bytes`, if they begin `shift` bytes after a
/// multiple of three.
fn base64(bytes: &[u8], shift: usize) -> Vec<u8> {
    let mut padded = vec![0; shift];
    padded.extend_from_slice(bytes);
    let digits = padded.len() * 8 / 6;
    let digit = |at: usize| {
        let bit = at * 6;
        let pair = u16::from(padded[bit / 8]) << 8
            | u16::from(padded.get(bit / 8 + 1).copied().unwrap_or_default());
        BASE64[usize::from(pair >> (10 - bit % 8)) & 63]
    };
    // Digits that share bits with the preceding bytes are left out.
    (((shift * 8).div_ceil(6))..digits).map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_found_at_each_alignment() {
        let engine = |bytes: &[u8]| {
            use ::base64::Engine;
            ::base64::engine::general_purpose::STANDARD.encode(bytes).into_bytes()
        };
        for length in 9..14 {
            let value: Vec<u8> = (1..=length).map(|i| i ^ 0xf1).collect();
            for shift in 0..3 {
                let mut whole = vec![0x5a; 3 + shift];
                whole.extend_from_slice(&value);
                whole.extend_from_slice(b"and more");
                let (whole, part) = (engine(&whole), base64(&value, shift));
                assert!(part.len() >= value.len());
                assert!(whole.windows(part.len()).any(|window| window == part), "{length} {shift}");
            }
        }
    }
}
