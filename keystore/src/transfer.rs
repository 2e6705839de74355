//! `read`, `write`, `preadv` and `pwritev` in terms of `pread` and `pwrite`.

/// Transfers the parts of a vector one after the other, until one is incomplete. `transfer` gets a
/// part and the number of bytes before it, and returns what `pread` does. An error counts only if
/// nothing was transferred before.
pub fn each_part<T>(
    parts: impl IntoIterator<Item = T>,
    length: impl Fn(&T) -> usize,
    mut transfer: impl FnMut(&T, usize) -> isize,
) -> isize {
    let mut total = 0;
    for part in parts {
        let Ok(done) = usize::try_from(transfer(&part, total)) else {
            return if total > 0 { total as isize } else { -1 };
        };
        total += done;
        if done < length(&part) {
            break;
        }
    }
    total as isize
}

/// Transfers at the position of a file descriptor, and advances it. `tell` and `seek` return what
/// `lseek` does.
pub fn at_position(
    tell: impl FnOnce() -> i64,
    seek: impl FnOnce(i64) -> i64,
    transfer: impl FnOnce(i64) -> isize,
) -> isize {
    let position = tell();
    if position < 0 {
        return -1;
    }
    let done = transfer(position);
    if done > 0 && seek(position + done as i64) < 0 {
        return -1;
    }
    done
}
