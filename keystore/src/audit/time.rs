//! Time as text.

/// Formats a time, in microseconds since 1970, in ISO 8601, UTC.
#[must_use]
pub fn utc(us_since_1970: u64) -> String {
    let (seconds, us) = (us_since_1970 / 1_000_000, us_since_1970 % 1_000_000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{us:06}Z")
}

/// Year, month and day of the Gregorian calendar, from the number of days since 1970-01-01. The
/// computation uses eras of 400 years, and years that begin in March, so that the leap day is the
/// last day.
fn civil(days: u64) -> (u64, u64, u64) {
    const DAYS_OF_ERA: u64 = 146_097;
    /// From 0000-03-01 to 1970-01-01.
    const BEFORE_1970: u64 = 719_468;
    let days = days + BEFORE_1970;
    let (era, day) = (days / DAYS_OF_ERA, days % DAYS_OF_ERA);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (400 * era + year + next_year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_as_by_date() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000007Z"),
            (951_782_399, "2000-02-28T23:59:59.000007Z"),
            (951_868_799, "2000-02-29T23:59:59.000007Z"),
            (951_868_800, "2000-03-01T00:00:00.000007Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000007Z"),
        ] {
            assert_eq!(utc(seconds * 1_000_000 + 7), text);
        }
    }
}
