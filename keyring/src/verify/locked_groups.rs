//! Key groups whose pages were not verified, in the report.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Failure;
use crate::offline::{Keystore, Locked};
use crate::visible::{visible, visible_lines};

/// For each key group.
const ALL: &str = "all";

/// A key group whose key could not be unwrapped.
#[derive(Serialize)]
pub(super) struct LockedGroup {
    key_group: String,
    reason: String,
    detail: Option<String>,
    hint: Option<String>,
    /// An option says that its pages need not be verified.
    pub(super) accepted: bool,
}

impl LockedGroup {
    /// All of them; `accepted`: names in options.
    pub(super) fn all(
        keystore: &Keystore,
        locked: &Locked,
        accepted: &[String],
    ) -> Vec<LockedGroup> {
        let one = |(scope, failure): (_, &Failure)| {
            let name = keystore.name_of_group(scope).unwrap_or_default();
            LockedGroup {
                key_group: visible(name),
                reason: failure.message.clone(),
                detail: failure.detail.clone(),
                hint: failure.hint.clone(),
                accepted: accepted.iter().any(|one| one == name || one == ALL),
            }
        };
        locked.groups().into_iter().map(one).collect()
    }

    pub(super) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { key_group, reason, .. } = self;
        writeln!(out, "locked       key group \"{key_group}\": {}", visible_lines(reason))?;
        for text in [&self.detail, &self.hint].into_iter().flatten() {
            writeln!(out, "             {}", visible_lines(text))?;
        }
        Ok(())
    }
}

/// The last line of the report.
pub(super) fn conclude(
    groups: &[LockedGroup],
    damages: u64,
    out: &mut impl Write,
) -> io::Result<()> {
    let found = match damages {
        0 => "No damage found".to_owned(),
        count => format!("Damage found: {count}"),
    };
    let names: Vec<_> = groups.iter().map(|group| format!("\"{}\"", group.key_group)).collect();
    match &names[..] {
        [] => writeln!(out, "\n{found}."),
        names => writeln!(
            out,
            "\n{found} in what was verified. Pages of locked key groups were not: {}.",
            names.join(", ")
        ),
    }
}
