//! What `read`, `write`, `preadv` and `pwritev` are for who has `pread` and `pwrite` only.

/// Transfers the parts of a vector one after the other, until one is not done whole. `transfer`
/// gets a part and how much was done before it, and answers as `pread` does. A failure counts only
/// if nothing was transferred before.
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

/// Transfers at the position of a descriptor, and moves it behind what was transferred. `tell` and
/// `seek` answer as `lseek` does.
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
