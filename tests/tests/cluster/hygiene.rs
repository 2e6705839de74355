//! What must not be linked into the server's processes, and what the library must not need.

use anyhow::{Context, Result, ensure};
use pagevault_interpose::elf::Elf;
use pagevault_tests::Installation;

/// Crates that must not be linked. Panic messages contain source paths, so linked crates show.
const FOREIGN: [&str; 7] =
    ["rustls", "tokio", "hyper", "reqwest", "ring", "vaultrs", "aws-sdk-kms"];

/// The crates of `FOREIGN` whose source paths, such as `/tokio-1.48.0/src/`, a binary contains.
fn linked(binary: &[u8]) -> Vec<&'static str> {
    let mut found = FOREIGN.map(|_| false);
    for part in binary.split(|byte| *byte == b'/') {
        for (name, found) in FOREIGN.iter().zip(&mut found) {
            let version =
                part.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"-"));
            *found |= version.is_some_and(|text| text.first().is_some_and(u8::is_ascii_digit));
        }
    }
    FOREIGN.into_iter().zip(found).filter_map(|(name, found)| found.then_some(name)).collect()
}

#[test]
fn the_library_links_no_network_code() -> Result<()> {
    let installation = Installation::get()?;
    let library = installation.library_directory().join("pagevault.so");
    let helper = installation.program("pagevault-keyring");
    let read = |path: &std::path::Path| {
        std::fs::read(path).with_context(|| format!("read {}", path.display()))
    };
    let seen = linked(&read(&helper)?);
    ensure!(seen.contains(&"rustls") && seen.contains(&"tokio"), "the test sees only {seen:?}");
    let found = linked(&read(&library)?);
    ensure!(found.is_empty(), "{} holds {found:?}", library.display());
    Ok(())
}

/// A library that was built beside the newest minor release must load in older ones.
#[test]
fn the_library_needs_nothing_that_older_minor_releases_lack() -> Result<()> {
    let installation = Installation::get()?;
    let library = std::fs::read(installation.library_directory().join("pagevault.so"))?;
    let library = Elf::parse_file(&library)?;
    let needs = |name: &str| library.imports(name.as_bytes()).next().is_some();
    ensure!(needs("LWLockAcquire"), "the test does not see what the library needs");
    let majors = include_str!("../../added-in-minors").split("\n\n").skip(1);
    let major = format!("{} #", installation.major);
    let Some(added) = majors.into_iter().find(|names| names.starts_with(&major)) else {
        eprintln!("skipped: nothing is known of minor releases of {}", installation.version);
        return Ok(());
    };
    let needed: Vec<_> = added.lines().skip(1).filter(|name| needs(name)).collect();
    ensure!(needed.is_empty(), "it does not load everywhere: {needed:?}");
    Ok(())
}
