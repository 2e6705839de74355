//! The module: a shared library that is loaded only if nobody but root and the current user could
//! have written it, and, with `module_sha256`, only if it has that hash.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use cryptoki::context::{CInitializeArgs, CInitializeFlags, Info, Pkcs11};
use pagevault_keystore::protocol::ErrorClass;
use sha2::{Digest, Sha256};

use super::failure::{self, Doing};
use super::settings::Settings;
use crate::failure::Failure;
use crate::keyfile::place::Place;
use crate::providers::file::outside;
use crate::trust::{FileKind, insecure, io_error, read};

/// A module that is safe to load.
pub(super) struct Module {
    /// The path, without symbolic links.
    pub(super) path: PathBuf,
    /// SHA-256 of the file, in hexadecimal.
    pub(super) sha256: String,
    file: File,
    /// The hash is required.
    pinned: bool,
}

impl Module {
    /// Opens the module that the options name and computes its hash.
    ///
    /// # Errors
    /// `unreachable` if it cannot be read, `insecure` if it must not be loaded.
    pub(super) fn open(
        settings: &Settings,
        data_directory: Option<&Path>,
    ) -> Result<Module, Failure> {
        let shown = settings.module.display();
        let mut file = read::open(&settings.module, FileKind::Module)?;
        let path = settings.module.canonicalize();
        let path = path.map_err(|error| unreadable(&error, &settings.module))?;
        outside(&Place::resolve_as(FileKind::Module, &path)?, data_directory)?;
        let sha256 = hash(&mut file).map_err(|error| unreadable(&error, &path))?;
        match &settings.module_sha256 {
            Some(required) if *required != sha256 => {
                Err(insecure(format!("module \"{shown}\" is not the one that was approved"))
                    .with_detail(format!(
                        "Its SHA-256 hash is {sha256}; option \"module_sha256\" requires {required}."
                    ))
                    .with_hint("If the module was updated on purpose, set the new hash with alter_provider(). Otherwise find out who replaced it."))
            }
            required => Ok(Module { path, sha256, file, pinned: required.is_some() }),
        }
    }

    /// Loads and initializes the module. It runs code of the module.
    ///
    /// A module whose hash is required is loaded from the open file, so that it is the file whose
    /// hash was computed. Others are loaded by their path, because some modules find their parts
    /// relative to it (`$ORIGIN`, ld.so(8)).
    ///
    /// # Errors
    /// `unreachable` if it is not a PKCS#11 module, or does not initialize.
    pub(super) fn load(&self) -> Result<(Pkcs11, Info), Failure> {
        let context = Pkcs11::new(self.loaded_path());
        let context = context.map_err(|error| self.unusable(&error))?;
        // Threads of the module itself may call it, so it has to lock (PKCS#11 3.0 section 5.4.1).
        context
            .initialize(CInitializeArgs::new(CInitializeFlags::OS_LOCKING_OK))
            .map_err(|error| failure::of(&error, Doing::Initialize))?;
        let info = context.get_library_info();
        let info = info.map_err(|error| failure::of(&error, Doing::Initialize))?;
        Ok((context, info))
    }

    /// The path by which the module is loaded.
    pub(super) fn loaded_path(&self) -> PathBuf {
        if self.pinned {
            PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
        } else {
            self.path.clone()
        }
    }

    fn unusable(&self, error: &cryptoki::error::Error) -> Failure {
        let shown = self.path.display();
        Failure::new(ErrorClass::Unreachable, format!("module \"{shown}\" cannot be loaded"))
            .with_detail(format!("{error}."))
            .with_hint("Specify the PKCS#11 module of the token's vendor: a shared library for this machine's architecture. The libraries that it needs must be installed.")
    }
}

/// Refuses a path in the data directory, also of a module that does not exist.
pub(super) fn outside_by_name(path: &Path, data_directory: Option<&Path>) -> Result<(), Failure> {
    match data_directory {
        Some(root) if path.starts_with(root) => {
            Err(insecure(format!("module \"{}\" is inside the data directory", path.display()))
                .with_detail("Anyone who can restore or write the data directory could replace it.")
                .with_hint(
                    "Install the module in a directory of the system, for example /usr/lib.",
                ))
        }
        _ => Ok(()),
    }
}

fn hash(file: &mut File) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut piece = vec![0; 64 * 1024];
    loop {
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => hash.update(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn unreadable(error: &io::Error, path: &Path) -> Failure {
    io_error(error, &format!("could not read module \"{}\"", path.display()))
        .with_hint("The server's operating system user must be able to read the module.")
}
