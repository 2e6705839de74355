//! Orders to the library under a server.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pagevault_tests::Cluster;

use crate::order::{self, at};

const LIBRARY: &str = "libpagevault_injector.so";

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this cause.
    Fails(i32),
    /// It and all later ones of its name fail with this cause.
    FailsFromThere(i32),
    /// It transfers half of the bytes.
    Short,
    /// From there on the time of day is another one.
    Jumps(i64),
}

const CAUSES: &[(&str, i32)] = &[
    ("EIO", libc::EIO),
    ("ENOSPC", libc::ENOSPC),
    ("EINTR", libc::EINTR),
    ("EMFILE", libc::EMFILE),
    ("ENFILE", libc::ENFILE),
    ("EACCES", libc::EACCES),
    ("EROFS", libc::EROFS),
    ("EPERM", libc::EPERM),
    ("ENOMEM", libc::ENOMEM),
    ("EAGAIN", libc::EAGAIN),
    ("ENOENT", libc::ENOENT),
    ("E2BIG", libc::E2BIG),
    ("ECHILD", libc::ECHILD),
    ("EINVAL", libc::EINVAL),
];

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |cause: &i32| CAUSES.iter().find(|(_, code)| code == cause).map_or("?", |c| c.0);
        match self {
            Fault::Fails(cause) => f.write_str(name(cause)),
            Fault::FailsFromThere(cause) => write!(f, "{}+", name(cause)),
            Fault::Short => f.write_str("short"),
            Fault::Jumps(seconds) => write!(f, "{seconds}s"),
        }
    }
}

impl std::str::FromStr for Fault {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Fault> {
        if text == "short" {
            return Ok(Fault::Short);
        }
        if let Some(Ok(seconds)) = text.strip_suffix('s').map(str::parse) {
            return Ok(Fault::Jumps(seconds));
        }
        let (name, always) = text.strip_suffix('+').map_or((text, false), |name| (name, true));
        let cause = CAUSES.iter().find(|(known, _)| *known == name).context("no such error")?.1;
        Ok(if always { Fault::FailsFromThere(cause) } else { Fault::Fails(cause) })
    }
}

/// Which call, and what happens to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Its name: function, path, process.
    pub call: String,
    /// Which of that name, from 1 on.
    pub number: u32,
    /// What happens.
    pub fault: Fault,
}

impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--call '{}' --number {} --fault {}", self.call, self.number, self.fault)
    }
}

/// The library under a server.
#[derive(Debug)]
pub struct Injector {
    orders: File,
}

impl Injector {
    /// Puts the library under a cluster, from the next start of its server on.
    ///
    /// # Errors
    /// When files cannot be written, or the library was not built.
    pub fn under(cluster: &mut Cluster, keys: &Path) -> Result<Injector> {
        let path = cluster.directory().join("orders");
        let orders =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
        orders.set_len(order::LENGTH as u64)?;
        cluster.installation().give(&path)?;
        let library = cluster.directory().join(LIBRARY);
        std::fs::copy(built()?, &library)?;
        cluster.installation().give(&library)?;
        let data = cluster.data_directory().canonicalize()?;
        cluster.set_environment("LD_PRELOAD", library);
        cluster.set_environment("PAGEVAULT_INJECTOR", path);
        cluster.set_environment("PAGEVAULT_INJECTOR_ROOT", data);
        cluster.set_environment("PAGEVAULT_INJECTOR_KEYS", keys);
        Ok(Injector { orders })
    }

    fn put(&self, at: usize, number: u32) -> Result<()> {
        Ok(self.orders.write_all_at(&number.to_le_bytes(), at as u64)?)
    }

    fn get(&self, at: usize) -> Result<u32> {
        let mut bytes = [0; 4];
        self.orders.read_exact_at(&mut bytes, at as u64)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// From now on calls are written down.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn watch(&self) -> Result<()> {
        self.put(at::MODE, order::OFF)?;
        self.put(at::CALLS, 0)?;
        self.put(at::SEEN, 0)?;
        self.put(at::FIRED, 0)?;
        self.put(at::MODE, order::WATCH)
    }

    /// From now on that call fails.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn arm(&self, injection: &Injection) -> Result<()> {
        self.watch()?;
        let (action, cause, always, jump) = match injection.fault {
            Fault::Fails(cause) => (order::FAIL, cause, false, 0),
            Fault::FailsFromThere(cause) => (order::FAIL, cause, true, 0),
            Fault::Short => (order::SHORTEN, 0, false, 0),
            Fault::Jumps(seconds) => (order::SHIFT, 0, true, seconds),
        };
        self.put(at::ACTION, action)?;
        self.put(at::ERRNO, cause.cast_unsigned())?;
        self.put(at::NUMBER, injection.number)?;
        self.put(at::ALWAYS, always.into())?;
        let name = order::hash(injection.call.as_bytes());
        self.orders.write_all_at(&name.to_le_bytes(), at::NAME as u64)?;
        self.orders.write_all_at(&jump.to_le_bytes(), at::JUMP as u64)?;
        self.put(at::MODE, order::ACT)
    }

    /// From now on all calls go through. Returns how many did not.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn disarm(&self) -> Result<u32> {
        self.put(at::MODE, order::OFF)?;
        self.get(at::FIRED)
    }

    /// The calls that were written down, in their order.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn calls(&self) -> Result<Vec<String>> {
        let count = (self.get(at::CALLS)? as usize).min(order::ROOM);
        let mut bytes = vec![0; count * order::ENTRY];
        self.orders.read_exact_at(&mut bytes, at::LIST as u64)?;
        let text = |entry: &[u8]| {
            let length = usize::from(entry[0]).min(order::ENTRY - 1);
            String::from_utf8_lossy(&entry[1..=length]).into_owned()
        };
        Ok(bytes.chunks(order::ENTRY).map(text).filter(|call| !call.is_empty()).collect())
    }
}

/// The library, beside the program that runs.
fn built() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let found = program.ancestors().skip(1).map(|directory| directory.join(LIBRARY));
    found
        .clone()
        .find(|path| path.exists())
        .with_context(|| format!("{LIBRARY} is not there: cargo build -p pagevault-injector"))
}
