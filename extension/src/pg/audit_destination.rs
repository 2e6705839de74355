//! The value of `pagevault.audit_destination`.

/// Where lines go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Destination {
    /// The server's log.
    pub(crate) log: bool,
    pub(crate) file: bool,
    pub(crate) syslog: bool,
}

impl Destination {
    /// A list of names; `None` if it names something else, or nothing.
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
