//! WAL segments on disk, read without the server.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// `XLOG_BLCKSZ`.
pub const PAGE: usize = 8192;

/// One segment.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Its path.
    pub path: PathBuf,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// State of a WAL page, from its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalPage {
    /// Not written since the segment was created or recycled.
    Unused,
    /// Without a mark: plaintext.
    Plain,
    /// Sealed with the key that the mark names.
    Sealed(u16),
}

impl Segment {
    /// The segments in a directory, by name.
    ///
    /// # Errors
    /// When the directory or a file cannot be read.
    pub fn all(directory: &Path) -> Result<Vec<Segment>> {
        let mut segments = Vec::new();
        let entries = std::fs::read_dir(directory)
            .with_context(|| format!("read {}", directory.display()))?;
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.len() == 24 && name.bytes().all(|c| c.is_ascii_hexdigit()) {
                let bytes = std::fs::read(&path)?;
                segments.push(Segment { path, bytes });
            }
        }
        segments.sort_by(|a, b| a.path.file_name().cmp(&b.path.file_name()));
        Ok(segments)
    }

    /// Address of the first byte, from name and size.
    ///
    /// # Errors
    /// When the name is not that of a segment.
    pub fn address(&self) -> Result<u64> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        ensure!(name.len() == 24, "{name} is not the name of a segment");
        let part = |from: usize| u64::from_str_radix(&name[from..from + 8], 16);
        Ok((part(8)? << 32) + part(16)? * self.bytes.len() as u64)
    }

    /// The states of its pages.
    ///
    /// # Errors
    /// As [`Segment::address`].
    pub fn pages(&self) -> Result<Vec<WalPage>> {
        let base = self.address()?;
        let pages = self.bytes.chunks_exact(PAGE).zip((base..).step_by(PAGE));
        Ok(pages.map(|(page, address)| state(page, address)).collect())
    }
}

fn state(page: &[u8], address: u64) -> WalPage {
    let (Some(info), Some(found)) = (page[2..].first_chunk(), page[8..].first_chunk()) else {
        return WalPage::Unused;
    };
    if u64::from_le_bytes(*found) != address {
        return WalPage::Unused;
    }
    match u16::from_le_bytes(*info) >> 4 {
        0 => WalPage::Plain,
        mark => WalPage::Sealed(mark),
    }
}
