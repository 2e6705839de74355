//! Other people's builds of PostgreSQL: pagevault works in each of them, and
//! `pagevault-keyring check-server` has said so before. Of those that differ in their release only,
//! the oldest and the newest of a major take turns with one data directory, and are primary and
//! standby.
//!
//! `tools/builds` fetches what tests/builds lists, puts pagevault into it, and names it here:
//! `PAGEVAULT_TRIED_BUILDS` are directories below `PAGEVAULT_BUILDS`. Without them there is nothing
//! to test. With `PAGEVAULT_BLESS` the results become the table in docs/compatibility.md; otherwise
//! the table must contain them already.

mod described;
mod minors;
mod smoke;
mod table;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use pagevault_tests::Installation;

use described::Described;
use table::Line;

/// A test of an older and a newer release.
type OfTwo = fn(&Path, &Path) -> Result<()>;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let tried = std::env::var("PAGEVAULT_TRIED_BUILDS").unwrap_or_default();
    let Some(builds) = std::env::var_os("PAGEVAULT_BUILDS").filter(|_| !tried.is_empty()) else {
        eprintln!("SKIPPED the tests of other people's builds: tools/builds fetches them");
        return ExitCode::SUCCESS;
    };
    let builds = PathBuf::from(builds);
    let names: Vec<&str> = tried.split(' ').collect();
    let lines: Arc<Mutex<Vec<Line>>> = Arc::default();
    let each = names.iter().map(|name| (*name).to_owned()).map(|name| {
        let (prefix, lines) = (builds.join(&name), Arc::clone(&lines));
        Trial::test(name.clone(), move || {
            let tested =
                test(&name, &prefix).map_err(|error| Failed::from(format!("{error:#}")))?;
            lines.lock().unwrap_or_else(PoisonError::into_inner).push(tested);
            Ok(())
        })
    });
    let pairs = minors::pairs(&names).into_iter().flat_map(|[old, new]| {
        let (from, to) = (builds.join(&old), builds.join(&new));
        let tests: [(&str, OfTwo); 3] = [
            ("take turns", minors::take_turns),
            ("are primary and standby", minors::stand_by),
            ("before one that is unknown", |_, new| minors::unknown(new)),
        ];
        tests.map(|(what, test)| {
            let (from, to) = (from.clone(), to.clone());
            Trial::test(format!("{old} and {new} {what}"), move || {
                test(&from, &to).map_err(|error| Failed::from(format!("{error:#}")))
            })
        })
    });
    let ended = libtest_mimic::run(&arguments, each.chain(pairs).collect());
    if ended.has_failed() {
        return ended.exit_code();
    }
    let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
    match table::keep(&mut lines) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Tests one build. What `check-server` says comes first, and must be what happens. tools/builds
/// marks those that pagevault must refuse by a file.
fn test(name: &str, prefix: &Path) -> Result<Line> {
    let installation = Installation::of_prefix(prefix)?;
    let described = Described::of(installation)?;
    if prefix.join("must-be-refused").exists() {
        ensure!(!described.works(), "check-server does not refuse it");
        smoke::refused(installation).context("with pagevault")?;
        return Ok(Line::of(name, &described, "refused"));
    }
    ensure!(described.works(), "check-server: {}", described.unmet());
    let [server, helper] = ["postgres", "pagevault-keyring"].map(|p| installation.program(p));
    // An emulated server could start one for this machine.
    ensure!(processor(&server)? == processor(&helper)?, "the key helper is for another processor");
    smoke::encrypted_through_kill(installation).context("with pagevault")?;
    let emulated = if described.is_emulated() { ", emulated" } else { "" };
    Ok(Line::of(name, &described, &format!("encrypted through two crashes{emulated}")))
}

/// The processor that a program is for (`e_machine` in `elf.h`).
fn processor(program: &Path) -> Result<u16> {
    let mut header = [0; 20];
    File::open(program)?.read_exact(&mut header)?;
    Ok(u16::from_le_bytes([header[18], header[19]]))
}
