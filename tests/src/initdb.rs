//! New data directories. `initdb` takes longer than many tests. If `PAGEVAULT_TEMPLATES` names a
//! directory of the server user, `initdb` runs once with checksums and once without, and the
//! results are copied from there.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use anyhow::{Context, Result};

use crate::Installation;
use crate::installation::run;

static MAKING: Mutex<()> = Mutex::new(());

/// Creates the data directory `target`.
///
/// # Errors
/// When `initdb` fails, or its result has an unknown layout.
pub(crate) fn initdb(
    installation: &Installation,
    target: &Path,
    checksums: bool,
    wal_segment_size: Option<u32>,
) -> Result<()> {
    let make = |target: &Path| -> Result<()> {
        let mut initdb = installation.command("initdb");
        initdb.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]);
        match (checksums, installation.major) {
            (true, _) => initdb.arg("--data-checksums"),
            (false, 18..) => initdb.arg("--no-data-checksums"),
            (false, _) => &mut initdb,
        };
        if let Some(size) = wal_segment_size {
            initdb.arg(format!("--wal-segsize={size}"));
        }
        run(initdb.arg("-D").arg(target)).map(drop)
    };
    let templates = std::env::var_os("PAGEVAULT_TEMPLATES").map(PathBuf::from);
    // With smaller segments there are several of them.
    let Some(templates) = templates.filter(|_| wal_segment_size.is_none()) else {
        return make(target);
    };
    let name = format!("{}-{checksums}", installation.version);
    let template = templates.join(&name);
    {
        let _one = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if !template.exists() {
            let unfinished = templates.join(format!("{name}.new"));
            make(&unfinished)?;
            fs::rename(&unfinished, &template)?;
        }
    }
    run(installation.command("/bin/cp").arg("-a").arg(&template).arg(target))?;
    set_system_identifier(target).with_context(|| format!("make {} distinct", target.display()))
}

/// Gives a copy its own system identifier: in the control file, which has a checksum, and in the
/// header of the only WAL segment, which has none (`XLogLongPageHeaderData`).
fn set_system_identifier(data: &Path) -> Result<()> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let identifier = (since.as_secs() << 32)
        | u64::from(since.subsec_nanos()) ^ (u64::from(process::id()) << 12);
    let identifier = identifier.to_le_bytes();

    let file = data.join("global/pg_control");
    let mut control = fs::read(&file)?;
    // `ControlFileData` begins with the identifier and ends with the checksum; its size differs by
    // major.
    let is_end = |end: &usize| {
        control.get(*end..end + 4) == Some(&crc32c::crc32c(&control[..*end]).to_le_bytes())
    };
    let end = (64..control.len()).step_by(4).find(is_end).context("no checksum in pg_control")?;
    control[..8].copy_from_slice(&identifier);
    let checksum = crc32c::crc32c(&control[..end]).to_le_bytes();
    control[end..end + 4].copy_from_slice(&checksum);
    fs::write(&file, control)?;

    let file = data.join("pg_wal/000000010000000000000001");
    let segment = fs::File::options().write(true).open(file)?;
    Ok(segment.write_all_at(&identifier, 24)?)
}
