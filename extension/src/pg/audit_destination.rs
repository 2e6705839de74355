//! The value of `pagevault.audit_destination`.

/// Where audit lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Destination {
    /// The server's log.
    pub(crate) log: bool,
    pub(crate) file: bool,
    pub(crate) syslog: bool,
}

impl Destination {
    /// Parses a list of names; `None` if it is empty or contains an unknown name.
    pub(crate) fn parse(text: &str) -> Option<Destination> {
        let mut destination = Destination::default();
        for name in text.split(',') {
            match name.trim().to_ascii_lowercase().as_str() {
                "log" => destination.log = true,
                "file" => destination.file = true,
                "syslog" => destination.syslog = true,
                _ => return None,
            }
        }
        Some(destination)
    }
}
