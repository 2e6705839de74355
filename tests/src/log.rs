//! The server log is part of a test's result: an unexpected warning fails the test.

/// Severities that a healthy server does not write.
const ALARMING: [&str; 3] = ["WARNING:  ", "FATAL:  ", "PANIC:  "];

/// Normal messages about clients, start and stop; harmless in any test.
const ORDINARY: [&str; 11] = [
    "the database system is starting up",
    "the database system is shutting down",
    "the database system is in recovery mode",
    "the database system is not yet accepting connections",
    "terminating connection due to administrator command",
    // The same during authentication (ProcessInterrupts, postgres.c).
    "canceling authentication due to timeout",
    "terminating connection due to unexpected postmaster exit",
    "terminating background worker",
    "connection to client lost",
    // Which of the two a standby logs depends on its activity when the primary stops.
    "could not receive data from WAL stream",
    "could not send data to WAL stream",
];

/// The lines of `log` with severity WARNING or worse that contain none of `allowed`.
#[must_use]
pub fn alarms<'log>(log: &'log str, allowed: &[String]) -> Vec<&'log str> {
    log.lines()
        .filter(|line| ALARMING.iter().any(|severity| line.contains(severity)))
        .filter(|line| !ORDINARY.iter().any(|text| line.contains(text)))
        .filter(|line| !allowed.iter().any(|text| line.contains(text.as_str())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::alarms;

    #[test]
    fn unexpected_warnings_are_alarms() {
        let log = "12:00 [1] LOG:  ready\n12:00 [2] WARNING:  odd\n12:00 [3] FATAL:  the database \
                   system is starting up\n12:00 [4] PANIC:  bad";
        assert_eq!(alarms(log, &[]), ["12:00 [2] WARNING:  odd", "12:00 [4] PANIC:  bad"]);
        assert_eq!(alarms(log, &["odd".into(), "bad".into()]), [""; 0]);
    }
}
