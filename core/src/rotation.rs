//! Rotation by age: when the server may rotate keys by itself.

use std::str::FromStr;

const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
const MINUTES_OF_DAY: u16 = 24 * 60;

/// When keys may be rotated: always, or in any of these spans of local time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Window(Vec<Span>);

/// From a minute of a day to another, which may be on the next day. Belongs to the day on which it
/// begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    /// By weekday: bit 0 is Sunday.
    days: u8,
    /// Minutes after midnight; the second is not included.
    from: u16,
    to: u16,
}

/// What is wrong with the text of a window.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// Neither days nor a time.
    #[error(
        "\"{0}\" is neither a day such as Mon, nor days such as Mon-Fri, nor a time such as 22:00-06:00"
    )]
    Part(String),
    /// More than days and a time, or nothing.
    #[error("\"{0}\" is not days, a time, or days and a time")]
    Span(String),
    /// It would never be open.
    #[error("\"{0}\" begins and ends at the same time; a whole day is 00:00-24:00")]
    Empty(String),
}

impl Window {
    /// Whether it is open at this minute (after midnight) of this weekday (0: Sunday).
    #[must_use]
    pub fn is_open(&self, weekday: u8, minute: u16) -> bool {
        self.0.is_empty() || self.0.iter().any(|span| span.contains(weekday % 7, minute))
    }
}

impl Span {
    fn contains(&self, weekday: u8, minute: u16) -> bool {
        let begins_on = |day: u8| self.days & 1 << day != 0;
        if self.from < self.to {
            return begins_on(weekday) && (self.from..self.to).contains(&minute);
        }
        let yesterday = (weekday + 6) % 7;
        begins_on(weekday) && minute >= self.from || begins_on(yesterday) && minute < self.to
    }
}

impl FromStr for Window {
    type Err = WindowError;

    /// Spans are separated by commas: `22:00-06:00`, `Sat-Sun`, `Mon-Fri 01:00-05:00, Sun`. An
    /// empty text means always.
    fn from_str(text: &str) -> Result<Self, WindowError> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for Span {
    type Err = WindowError;

    fn from_str(text: &str) -> Result<Self, WindowError> {
        let parts: Vec<&str> = text.split_whitespace().collect();
        let wrong = |part: &str| WindowError::Part(part.to_owned());
        let days_of = |part: &str| days(part).ok_or_else(|| wrong(part));
        let times_of = |part: &str| times(part).ok_or_else(|| wrong(part));
        const EVERY_DAY: u8 = 0x7F;
        let (days, (from, to)) = match *parts.as_slice() {
            [part] => match days(part) {
                Some(days) => (days, (0, MINUTES_OF_DAY)),
                None => (EVERY_DAY, times_of(part)?),
            },
            [days, times] => (days_of(days)?, times_of(times)?),
            _ => return Err(WindowError::Span(text.trim().to_owned())),
        };
        if from == to {
            return Err(WindowError::Empty(text.trim().to_owned()));
        }
        Ok(Self { days, from, to })
    }
}

/// Weekdays, as bits: `Mon`, `Fri-Mon`.
fn days(part: &str) -> Option<u8> {
    let day = |name: &str| DAYS.iter().position(|day| name.eq_ignore_ascii_case(day));
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let (first, last) = (day(first)?, day(last)?);
    let count = (last + 7 - first) % 7;
    Some((0..=count).fold(0, |days, next| days | 1 << ((first + next) % 7)))
}

/// Minutes of a day: `22:00-06:00`.
fn times(part: &str) -> Option<(u16, u16)> {
    let (from, to) = part.split_once('-')?;
    let (from, to) = (minute(from)?, minute(to)?);
    (from < MINUTES_OF_DAY).then_some((from, to))
}

fn minute(text: &str) -> Option<u16> {
    let (hours, minutes) = text.split_once(':')?;
    let number = |text: &str| {
        let is_number = matches!(text.len(), 1 | 2) && text.bytes().all(|c| c.is_ascii_digit());
        is_number.then(|| text.parse::<u16>().ok()).flatten()
    };
    let (hours, minutes) = (number(hours)?, number(minutes).filter(|_| minutes.len() == 2)?);
    let minute = hours * 60 + minutes;
    (minutes < 60 && minute <= MINUTES_OF_DAY).then_some(minute)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUN: u8 = 0;
    const MON: u8 = 1;
    const SAT: u8 = 6;

    fn is_open(window: &str, weekday: u8, hour: u16, minute: u16) -> bool {
        window.parse::<Window>().unwrap().is_open(weekday, hour * 60 + minute)
    }

    /// Every minute of a week in which it is open.
    fn minutes(window: &str) -> usize {
        let window: Window = window.parse().unwrap();
        let open = |day| (0..24 * 60).filter(|minute| window.is_open(day, *minute)).count();
        (0..7).map(open).sum()
    }

    #[test]
    fn without_spans_it_is_always_open() {
        assert_eq!(minutes(""), 7 * 24 * 60);
        assert_eq!(minutes("  "), 7 * 24 * 60);
        assert_eq!(minutes("00:00-24:00"), 7 * 24 * 60);
    }

    #[test]
    fn a_span_ends_before_its_end() {
        assert!(!is_open("01:30-05:00", MON, 1, 29));
        assert!(is_open("01:30-05:00", MON, 1, 30));
        assert!(is_open("01:30-05:00", SUN, 4, 59));
        assert!(!is_open("01:30-05:00", SUN, 5, 0));
        assert_eq!(minutes("1:30-5:00"), 7 * 210);
    }

    #[test]
    fn a_span_over_midnight_belongs_to_the_day_on_which_it_begins() {
        assert!(is_open("Sat 22:00-06:00", SAT, 22, 0));
        assert!(is_open("Sat 22:00-06:00", SUN, 5, 59));
        assert!(!is_open("Sat 22:00-06:00", SUN, 6, 0));
        assert!(!is_open("Sat 22:00-06:00", SUN, 22, 0));
        assert!(!is_open("Sat 22:00-06:00", SAT, 5, 0));
        assert_eq!(minutes("22:00-06:00"), 7 * 480);
        assert_eq!(minutes("Sat 22:00-00:00"), 120);
        assert_eq!(minutes("Sat 22:00-24:00"), 120);
    }

    #[test]
    fn days_may_pass_the_end_of_the_week() {
        assert!(is_open("fri-MON", SUN, 12, 0));
        assert!(is_open("Fri-Mon", MON, 23, 59));
        assert!(!is_open("Fri-Mon", 2, 0, 0));
        assert_eq!(minutes("Fri-Mon"), 4 * 24 * 60);
        assert_eq!(minutes("Sun"), 24 * 60);
        assert_eq!(minutes("Mon-Fri 01:00-02:00, Sun"), 5 * 60 + 24 * 60);
    }

    #[test]
    fn other_texts_are_refused() {
        for (text, found) in [
            ("daily", "neither a day"),
            ("22:00", "neither a day"),
            ("22:00-25:00", "neither a day"),
            ("24:00-06:00", "neither a day"),
            ("22:60-23:00", "neither a day"),
            ("22:0-23:00", "neither a day"),
            ("+2:00-23:00", "neither a day"),
            ("Mon-Xxx 01:00-02:00", "neither a day"),
            ("Mon 01:00-02:00 UTC", "is not days"),
            ("Mon,", "is not days"),
            ("05:00-05:00", "same time"),
        ] {
            let error = text.parse::<Window>().unwrap_err().to_string();
            assert!(error.contains(found), "{text}: {error}");
        }
    }
}
