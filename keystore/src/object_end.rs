//! Where a JSON object in a pipe ends, so that nobody waits for the pipe to be closed: the other
//! side may keep it open.

/// Finds the brace that closes the first one.
#[derive(Default)]
pub struct ObjectEnd {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl ObjectEnd {
    /// Takes the next byte. Whether the object ends with it, or it is not the beginning of an
    /// object but should be.
    pub fn is_at(&mut self, byte: u8) -> bool {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'{' => self.depth += 1,
            b' ' | b'\t' | b'\r' | b'\n' => return false,
            _ if self.depth == 0 => return true,
            b'"' => self.in_string = true,
            b'}' => self.depth -= 1,
            _ => {}
        }
        self.depth == 0
    }
}
