//! Servers that the user names: other builds of PostgreSQL, with a set-up of their own.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;

/// `NAME=PG_CONFIG[,SCRIPT...]` of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Argument {
    name: String,
    pg_config: PathBuf,
    scripts: Vec<PathBuf>,
}

impl FromStr for Argument {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Argument> {
        let form = "NAME=PG_CONFIG[,SCRIPT...]";
        let (name, rest) = text.split_once('=').context(form)?;
        let mut paths = rest.split(',').map(PathBuf::from);
        let pg_config = paths.next().filter(|path| !path.as_os_str().is_empty()).context(form)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        ensure!(
            !name.is_empty() && name.chars().all(plain),
            "{form}: a name of letters and digits"
        );
        Ok(Argument { name: name.to_owned(), pg_config, scripts: paths.collect() })
    }
}

/// A server of the user's.
#[derive(Debug)]
pub(crate) struct Other {
    pub(crate) name: String,
    pub(crate) installation: &'static Installation,
    /// Names and contents of the scripts that set it up.
    pub(crate) scripts: Vec<(String, String)>,
}

impl Other {
    /// Reads the scripts, so that a mistake shows before hours of measuring.
    pub(crate) fn open(argument: &Argument) -> Result<&'static Other> {
        let installation = Installation::of_pg_config(&argument.pg_config)
            .with_context(|| format!("the variant {}", argument.name))?;
        let read = |path: &PathBuf| -> Result<(String, String)> {
            let name = path.display().to_string();
            Ok((name.clone(), std::fs::read_to_string(path).context(name)?))
        };
        let scripts = argument.scripts.iter().map(read).collect::<Result<_>>()?;
        Ok(Box::leak(Box::new(Other { name: argument.name.clone(), installation, scripts })))
    }
}

/// What the report says of a server of the user's.
pub(crate) fn note(other: &Other) -> String {
    let scripts: Vec<&str> = other
        .scripts
        .iter()
        .map(|(name, _)| Path::new(name).file_name().and_then(|name| name.to_str()).unwrap_or(name))
        .collect();
    format!(
        "variant {}: {}, set up by {}; whether its files are encrypted is not verified",
        other.name,
        other.installation.version,
        if scripts.is_empty() { "nothing".into() } else { scripts.join(", ") }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_has_a_name_a_program_and_scripts() {
        let argument: Argument =
            "peer=/opt/x/bin/pg_config,a.sql,b.sql".parse().expect("a variant");
        assert_eq!(argument.name, "peer");
        assert_eq!(argument.pg_config, Path::new("/opt/x/bin/pg_config"));
        assert_eq!(argument.scripts, [Path::new("a.sql"), Path::new("b.sql")]);
        assert!("peer=/x".parse::<Argument>().expect("no script").scripts.is_empty());
        for wrong in ["peer", "peer=", "=/x", "a b=/x", "a/b=/x"] {
            assert!(wrong.parse::<Argument>().is_err(), "{wrong}");
        }
    }
}
