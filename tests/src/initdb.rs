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

/// Creates the data directory `target`. Returns a copy of it as it is now, which nobody changes.
///
/// # Errors
/// When `initdb` fails, or its result has an unknown layout.
pub(crate) fn initdb(
    installation: &Installation,
    target: &Path,
    checksums: bool,
    wal_segment_size: Option<u32>,
) -> Result<PathBuf> {
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
    let Some(templates) = std::env::var_os("PAGEVAULT_TEMPLATES").map(PathBuf::from) else {
        make(target)?;
        let origin = target.with_file_name("origin");
        run(installation.command("/bin/cp").arg("-a").arg(target).arg(&origin))?;
        return Ok(origin);
    };
    let size = wal_segment_size.map(|size| format!("-{size}MB")).unwrap_or_default();
    let name = format!("{}-{checksums}{size}", installation.version);
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
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let identifier = (since.as_secs() << 32)
        | u64::from(since.subsec_nanos()) ^ (u64::from(process::id()) << 12);
    set_system_identifier(target, identifier.to_le_bytes())
        .with_context(|| format!("make {} distinct", target.display()))?;
    Ok(template)
}

/// Copies what [`initdb`] returned for the data directory `of` to `target`.
///
/// # Errors
/// When it cannot.
pub(crate) fn copy_of(
    installation: &Installation,
    origin: &Path,
    of: &Path,
    target: &Path,
) -> Result<()> {
    run(installation.command("/bin/cp").arg("-a").arg(origin).arg(target))?;
    let control = fs::read(of.join("global/pg_control"))?;
    let identifier = control.first_chunk().context("pg_control is empty")?;
    set_system_identifier(target, *identifier)
}

/// Gives a copy its own system identifier: in the control file, which has a checksum, and in the
/// header of each WAL segment, which has none (`XLogLongPageHeaderData`).
fn set_system_identifier(data: &Path, identifier: [u8; 8]) -> Result<()> {
    let file = data.join("global/pg_control");
    let mut control = fs::read(&file)?;
    // `ControlFileData` begins with the identifier and ends with the checksum; its size differs by
    // major.
    let is_end = |end: &usize| {
        control.get(*end..end + 4) == Some(&crc32c::crc32c(&control[..*end]).to_le_bytes())
    };
    let end = (64..control.len()).step_by(4).find(is_end).context("no checksum in pg_control")?;
    let former = control[..8].to_vec();
    control[..8].copy_from_slice(&identifier);
    let checksum = crc32c::crc32c(&control[..end]).to_le_bytes();
    control[end..end + 4].copy_from_slice(&checksum);
    fs::write(&file, control)?;

    for segment in fs::read_dir(data.join("pg_wal"))? {
        let segment = segment?;
        if !segment.file_type()?.is_file() {
            continue;
        }
        let segment = fs::File::options().read(true).write(true).open(segment.path())?;
        let mut found = [0; 8];
        segment.read_exact_at(&mut found, 24)?;
        // What has not been written yet has none.
        if found == *former {
            segment.write_all_at(&identifier, 24)?;
        }
    }
    Ok(())
}
