//! Direct calls in machine code.

use crate::elf::Machine;

/// How many direct calls of, and jumps to, `function` the code contains whose first byte has this
/// address.
///
/// x86-64 has no boundaries of instructions that can be found without decoding all, so every byte
/// is taken for the first of one. That the four bytes after it are the distance to the function by
/// chance happens in one of 2^32 places.
pub(crate) fn direct(machine: Machine, code: &[u8], address: u64, function: u64) -> usize {
    match machine {
        Machine::X86_64 => code
            .windows(5)
            .zip(address..)
            .filter(|(bytes, at)| {
                // CALL rel32, JMP rel32 (Intel SDM, volume 2); the distance counts from the next
                // instruction.
                let distance = i32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
                matches!(bytes[0], 0xe8 | 0xe9)
                    && at.wrapping_add(5).wrapping_add_signed(distance.into()) == function
            })
            .count(),
        Machine::Aarch64 => code
            .chunks_exact(4)
            .zip((address..).step_by(4))
            .filter(|(bytes, at)| {
                // B and BL imm26 (Arm ARM, C6.2): a signed distance in words.
                let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let distance = (word << 6).cast_signed() >> 4;
                matches!(word >> 26, 0b00_0101 | 0b10_0101)
                    && at.wrapping_add_signed(distance.into()) == function
            })
            .count(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_jumps_are_counted_forward_and_backward() {
        // nop; call +0x100; jmp -0x10 from its end; call elsewhere
        let mut code = vec![0x90, 0xe8, 0x00, 0x01, 0, 0, 0xe9, 0xf0, 0xff, 0xff, 0xff];
        code.extend([0xe8, 0, 0, 0, 0]);
        assert_eq!(direct(Machine::X86_64, &code, 0x1000, 0x1106), 1);
        assert_eq!(direct(Machine::X86_64, &code, 0x1000, 0x0ffb), 1);
        assert_eq!(direct(Machine::X86_64, &code, 0x1000, 0x2000), 0);
    }

    #[test]
    fn the_same_on_aarch64() {
        // nop; bl +8; b -4; ldr (which is no call)
        let words: [u32; 4] = [0xd503_201f, 0x9400_0002, 0x17ff_ffff, 0xf940_0000];
        let code: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(direct(Machine::Aarch64, &code, 0x1000, 0x100c), 1);
        assert_eq!(direct(Machine::Aarch64, &code, 0x1000, 0x1004), 1);
        assert_eq!(direct(Machine::Aarch64, &code, 0x1000, 0x1000), 0);
    }
}
