//! Files of pagevault that its other parts run or load: where they are, and whether anybody else
//! could have put them there.
//!
//! The server and the library for PostgreSQL's programs start `pagevault-keyring`, which gets keys
//! from providers. So it must be as trustworthy as they are: it, and each directory and link on the
//! way to it, belongs to root, to the current user, or to the owner of the file that asks, and
//! nobody else can write to it. As everywhere (`trust` in `keyring/`), a sticky directory is
//! accepted on the way. Directories that also contain the file that asks are not examined: whoever
//! can write there can replace that file as well.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// The program that talks to key providers.
pub const HELPER: &str = "pagevault-keyring";

/// Linux has the same limit.
const MAX_LINKS: usize = 40;
/// Mode bits that let others than the owner write.
const WRITABLE: u32 = 0o022;
const STICKY: u32 = 0o1000;
const EXECUTABLE: u32 = 0o111;

/// Who asks for a file.
#[derive(Debug, Clone, Copy)]
pub struct Asking<'a> {
    /// The file that asks, a library or a program. `None` if files near it count like any other.
    pub file: Option<&'a Path>,
    /// The effective user ID of this process.
    pub user: u32,
}

/// Why a file is not used.
#[derive(Debug)]
pub enum Unfit {
    /// There is none.
    Absent,
    /// It could not be examined.
    Io(PathBuf, io::Error),
    /// Another user owns it, a directory above it, or a link to it.
    Owner(PathBuf, u32),
    /// Other users can write to it, or to a directory above it; with the mode.
    Writable(PathBuf, u32),
    /// It is not a regular file, or not a program where that is required.
    Kind(PathBuf),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unfit::Absent => f.write_str("there is none"),
            Unfit::Io(path, error) => write!(f, "\"{}\": {error}", path.display()),
            Unfit::Owner(path, owner) => {
                write!(f, "\"{}\" belongs to user ID {owner}", path.display())
            }
            Unfit::Writable(path, mode) => {
                write!(f, "other users can write to \"{}\" (mode {mode:04o})", path.display())
            }
            Unfit::Kind(path) => write!(f, "\"{}\" is not a program", path.display()),
        }
    }
}

/// No place has the file. Displays as whole sentences.
#[derive(Debug)]
pub struct NotFound {
    tried: Vec<(PathBuf, Unfit)>,
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_absent = |unfit: &Unfit| matches!(unfit, Unfit::Absent);
        let absent = self.tried.iter().filter(|(_, unfit)| is_absent(unfit));
        let absent = absent.map(|(place, _)| format!("\"{}\"", place.display()));
        let absent = absent.collect::<Vec<_>>().join(", ");
        let mut sentences = Vec::new();
        if !absent.is_empty() {
            sentences.push(format!("There is none in {absent}."));
        }
        for (place, unfit) in self.tried.iter().filter(|(_, unfit)| !is_absent(unfit)) {
            sentences.push(format!("That in \"{}\" is refused: {unfit}.", place.display()));
        }
        if sentences.is_empty() {
            sentences.push("There is no place to look for it.".into());
        }
        f.write_str(&sentences.join(" "))
    }
}

/// Finds [`HELPER`]: in `../bin` from the directory of `library`, beside `program`, in the
/// directories of `path` (`PATH`). A file that is refused in one place does not hide those of later
/// ones.
///
/// # Errors
/// If no place has one that can be trusted.
pub fn find_helper(
    library: Option<&Path>,
    program: Option<&Path>,
    path: Option<&OsStr>,
    user: u32,
) -> Result<PathBuf, NotFound> {
    let mut places = Vec::new();
    // Directories are those of the files themselves, not of links to them.
    let library = library.and_then(|file| fs::canonicalize(file).ok());
    let program = program.and_then(|file| fs::canonicalize(file).ok());
    if let Some(file) = &library
        && let Some(prefix) = file.parent().and_then(Path::parent)
    {
        places.push((prefix.join("bin"), Some(file.as_path())));
    }
    if let Some(file) = &program
        && let Some(directory) = file.parent()
        && places.iter().all(|(place, _)| place != directory)
    {
        places.push((directory.to_owned(), Some(file.as_path())));
    }
    // An empty or relative element would be in the current directory, which is the data directory.
    let elements = std::env::split_paths(path.unwrap_or_default()).filter(|e| e.is_absolute());
    for element in elements {
        if places.iter().all(|(place, _)| *place != element) {
            places.push((element, None));
        }
    }
    let mut tried = Vec::new();
    for (place, file) in places {
        match require_program(&place.join(HELPER), Asking { file, user }) {
            Ok(found) => return Ok(found),
            Err(unfit) => tried.push((place, unfit)),
        }
    }
    Err(NotFound { tried })
}

/// Requires a program that nobody else can change. Returns its path without links.
///
/// # Errors
/// If it is absent, not a program, or not trusted.
pub fn require_program(path: &Path, asking: Asking<'_>) -> Result<PathBuf, Unfit> {
    let (found, metadata) = require(path, asking)?;
    if metadata.mode() & EXECUTABLE == 0 {
        return Err(Unfit::Kind(found));
    }
    Ok(found)
}

/// Requires a regular file, named by an absolute path, that nobody else can change. Returns its
/// path without links.
///
/// # Errors
/// If it is absent, not a regular file, or not trusted.
pub fn require(path: &Path, asking: Asking<'_>) -> Result<(PathBuf, Metadata), Unfit> {
    if !path.is_absolute() {
        return Err(Unfit::Kind(path.to_owned()));
    }
    let trusted = Trusted::new(asking);
    let mut at = PathBuf::from("/");
    trusted.directory(&at)?;
    let mut left = steps(path);
    let mut links = 0;
    while let Some(step) = left.pop_front() {
        if step == ".." {
            at.pop();
            continue;
        }
        let next = at.join(step);
        let metadata = examine(&next, fs::symlink_metadata(&next))?;
        if metadata.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(Unfit::Io(next, io::ErrorKind::TooManyLinks.into()));
            }
            trusted.owner(&next, &metadata)?;
            let target = examine(&next, fs::read_link(&next))?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            let mut target = steps(&target);
            target.append(&mut left);
            left = target;
            continue;
        }
        if !left.is_empty() {
            trusted.directory(&next)?;
        }
        at = next;
    }
    let metadata = examine(&at, fs::symlink_metadata(&at))?;
    trusted.owner(&at, &metadata)?;
    if !metadata.is_file() {
        return Err(Unfit::Kind(at));
    }
    let mode = metadata.mode() & 0o7777;
    if mode & WRITABLE != 0 {
        return Err(Unfit::Writable(at, mode));
    }
    Ok((at, metadata))
}

fn steps(path: &Path) -> VecDeque<OsString> {
    let step = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().filter_map(step).collect()
}

fn examine<T>(path: &Path, result: io::Result<T>) -> Result<T, Unfit> {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Unfit::Absent,
        _ => Unfit::Io(path.to_owned(), error),
    })
}

/// Whose files are trusted.
struct Trusted {
    /// The file that asks, without links.
    file: Option<PathBuf>,
    owner: Option<u32>,
    user: u32,
}

impl Trusted {
    fn new(asking: Asking<'_>) -> Trusted {
        let file = asking.file.and_then(|file| fs::canonicalize(file).ok());
        let owner = file.as_ref().and_then(|file| Some(fs::metadata(file).ok()?.uid()));
        Trusted { file, owner, user: asking.user }
    }

    fn owner(&self, path: &Path, metadata: &Metadata) -> Result<(), Unfit> {
        let owner = metadata.uid();
        if owner == 0 || owner == self.user || Some(owner) == self.owner {
            return Ok(());
        }
        Err(Unfit::Owner(path.to_owned(), owner))
    }

    fn directory(&self, path: &Path) -> Result<(), Unfit> {
        if self.file.as_ref().is_some_and(|file| file.starts_with(path)) {
            return Ok(());
        }
        let metadata = examine(path, fs::metadata(path))?;
        if !metadata.is_dir() {
            return Err(Unfit::Absent);
        }
        self.owner(path, &metadata)?;
        let mode = metadata.mode() & 0o7777;
        if mode & WRITABLE != 0 && mode & STICKY == 0 {
            return Err(Unfit::Writable(path.to_owned(), mode));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    /// A prefix with `lib/library.so` and `bin/pagevault-keyring`.
    struct Prefix {
        root: tempfile::TempDir,
        path: PathBuf,
        user: u32,
    }

    impl Prefix {
        fn new() -> Prefix {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().canonicalize().unwrap();
            let user = fs::metadata(&path).unwrap().uid();
            let prefix = Prefix { root, path, user };
            for directory in ["lib", "bin", "other"] {
                fs::create_dir(prefix.at(directory)).unwrap();
                prefix.mode(directory, 0o755);
            }
            for (file, mode) in [("lib/library.so", 0o644), ("bin/pagevault-keyring", 0o755)] {
                fs::write(prefix.at(file), "x").unwrap();
                prefix.mode(file, mode);
            }
            prefix
        }

        fn at(&self, name: &str) -> PathBuf {
            self.path.join(name)
        }

        fn mode(&self, name: &str, mode: u32) {
            fs::set_permissions(self.at(name), fs::Permissions::from_mode(mode)).unwrap();
        }

        fn find(&self) -> Result<PathBuf, NotFound> {
            find_helper(Some(&self.at("lib/library.so")), None, None, self.user)
        }

        /// Why the only place is refused.
        fn refused(&self) -> Unfit {
            self.find().unwrap_err().tried.pop().unwrap().1
        }
    }

    #[test]
    fn it_is_found_in_the_directory_bin_beside_that_of_the_library() {
        let prefix = Prefix::new();
        let helper = prefix.at("bin/pagevault-keyring");
        assert_eq!(prefix.find().unwrap(), helper);
        // Also if the library was loaded by a link, as from a profile of Nix.
        symlink(prefix.at("lib/library.so"), prefix.at("other/library.so")).unwrap();
        let linked = find_helper(Some(&prefix.at("other/library.so")), None, None, prefix.user);
        assert_eq!(linked.unwrap(), helper);
    }

    #[test]
    fn the_order_is_library_program_path() {
        let (first, second, third) = (Prefix::new(), Prefix::new(), Prefix::new());
        fs::write(second.at("bin/postgres"), "x").unwrap();
        let path = std::env::join_paths([third.at("other"), third.at("bin")]).unwrap();
        let find = || {
            let (library, program) = (first.at("lib/library.so"), second.at("bin/postgres"));
            find_helper(Some(&library), Some(&program), Some(&path), first.user)
        };
        for prefix in [&first, &second, &third] {
            let helper = prefix.at("bin/pagevault-keyring");
            assert_eq!(find().unwrap(), helper);
            fs::remove_file(helper).unwrap();
        }
        let said = find().unwrap_err().to_string();
        for place in [first.at("bin"), second.at("bin"), third.at("other"), third.at("bin")] {
            assert!(said.contains(&format!("\"{}\"", place.display())), "{said}");
        }
    }

    #[test]
    fn nothing_is_looked_for_in_the_current_directory() {
        let path = OsStr::new(":.:bin::");
        assert!(find_helper(None, None, Some(path), 0).unwrap_err().tried.is_empty());
    }

    #[test]
    fn what_others_can_write_is_refused() {
        let prefix = Prefix::new();
        for mode in 0..0o1000 {
            prefix.mode("bin/pagevault-keyring", mode);
            let fits = mode & 0o022 == 0 && mode & 0o111 != 0;
            assert_eq!(prefix.find().is_ok(), fits, "{mode:o}");
        }
        prefix.mode("bin/pagevault-keyring", 0o755);
        for (mode, fits) in [(0o775, false), (0o757, false), (0o1777, true), (0o755, true)] {
            prefix.mode("bin", mode);
            assert_eq!(prefix.find().is_ok(), fits, "{mode:o}");
        }
        // A directory that contains the library too says nothing new.
        fs::set_permissions(prefix.root.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(prefix.find().is_ok());
        // Found by PATH it does.
        let path = prefix.at("bin");
        let found = find_helper(None, None, Some(path.as_os_str()), prefix.user);
        assert!(matches!(found.unwrap_err().tried[0].1, Unfit::Writable(_, 0o777)));
    }

    #[test]
    fn links_are_followed_and_each_step_is_examined() {
        let prefix = Prefix::new();
        let helper = prefix.at("bin/pagevault-keyring");
        fs::rename(&helper, prefix.at("other/helper")).unwrap();
        symlink("../other/helper", &helper).unwrap();
        assert_eq!(prefix.find().unwrap(), prefix.at("other/helper"));
        prefix.mode("other", 0o777);
        assert!(matches!(prefix.refused(), Unfit::Writable(at, _) if at == prefix.at("other")));
        fs::remove_file(&helper).unwrap();
        symlink("pagevault-keyring", &helper).unwrap();
        assert!(matches!(prefix.refused(), Unfit::Io(..)));
        fs::remove_file(&helper).unwrap();
        fs::create_dir(&helper).unwrap();
        prefix.mode("bin/pagevault-keyring", 0o755);
        assert!(matches!(prefix.refused(), Unfit::Kind(_)));
    }

    #[test]
    fn what_belongs_to_others_is_refused() {
        let mut prefix = Prefix::new();
        // As user 1 this process's own files are another user's, unless the library is theirs too.
        if prefix.user != 0 {
            let helper = prefix.at("bin/pagevault-keyring");
            let path = prefix.at("bin");
            prefix.user += 1;
            assert_eq!(prefix.find().unwrap(), helper);
            let found = find_helper(None, None, Some(path.as_os_str()), prefix.user);
            assert!(found.is_err());
            return;
        }
        for name in ["bin/pagevault-keyring", "bin"] {
            chown(prefix.at(name), Some(65534), None).unwrap();
            assert!(matches!(prefix.refused(), Unfit::Owner(_, 65534)), "{name}");
            // The library's owner could change the library.
            chown(prefix.at("lib/library.so"), Some(65534), None).unwrap();
            assert!(prefix.find().is_ok(), "{name}");
            chown(prefix.at("lib/library.so"), Some(0), None).unwrap();
            chown(prefix.at(name), Some(0), None).unwrap();
        }
    }

    #[test]
    fn what_is_refused_is_named_with_the_reason() {
        let prefix = Prefix::new();
        prefix.mode("bin/pagevault-keyring", 0o777);
        let bin = prefix.at("bin");
        let expected = format!(
            "That in \"{0}\" is refused: other users can write to \"{0}/pagevault-keyring\" (mode 0777).",
            bin.display()
        );
        assert_eq!(prefix.find().unwrap_err().to_string(), expected);
        fs::remove_file(prefix.at("bin/pagevault-keyring")).unwrap();
        let expected = format!("There is none in \"{}\".", bin.display());
        assert_eq!(prefix.find().unwrap_err().to_string(), expected);
    }
}
