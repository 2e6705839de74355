//! The version is defined once, in the root `Cargo.toml`; documents that name it must agree.
//! Container builds include the whole workspace.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap()
}

/// The directories in `members` of the root `Cargo.toml`.
fn members() -> Vec<String> {
    let manifest = read("Cargo.toml");
    let line = manifest.lines().find_map(|line| line.strip_prefix("members = [")).unwrap();
    let names = line.trim_end_matches(']').split(", ");
    names.map(|name| name.trim_matches('"').to_owned()).collect()
}

#[test]
fn documents_name_this_version() {
    for (document, before) in [
        ("README.md", "Version "),
        ("SECURITY.md", "**Version "),
        ("docs/README.md", "For version "),
        ("CHANGELOG.md", ""),
    ] {
        let named = format!("{before}{}", env!("CARGO_PKG_VERSION"));
        assert!(read(document).contains(&named), "{document} does not say \"{named}\"");
    }
}

/// PGXN has the version of the distribution, and that of the extension in it.
#[test]
fn pgxn_is_told_this_version() {
    let meta: serde_json::Value = serde_json::from_str(&read("META.json")).unwrap();
    for at in ["/version", "/provides/pagevault/version"] {
        let told = meta.pointer(at).and_then(serde_json::Value::as_str);
        assert_eq!(told, Some(env!("CARGO_PKG_VERSION")), "{at}");
    }
    let file = meta.pointer("/provides/pagevault/file").and_then(serde_json::Value::as_str);
    assert!(file.is_some_and(|file| root().join(file).is_file()), "{file:?}");
}

#[test]
fn the_extension_takes_its_version_from_cargo() {
    assert!(read("extension/pagevault.control").contains("default_version = '@CARGO_VERSION@'"));
    for member in members() {
        let own = !read(&format!("{member}/Cargo.toml")).contains("\nversion.workspace = true\n");
        assert!(!own, "{member} has a version of its own");
    }
}

#[test]
fn every_member_goes_into_a_container_build() {
    let ignored = read(".dockerignore");
    for member in members() {
        let directory = member.split('/').next().unwrap();
        assert!(ignored.contains(&format!("\n!{directory}\n")), ".dockerignore lacks !{directory}");
    }
}

/// `ALTER EXTENSION pagevault UPDATE` needs a path of scripts from each released version to this
/// one. Scripts are where cargo-pgrx looks for them.
#[test]
fn scripts_lead_from_each_released_version_to_this_one() {
    const FIRST: &str = "0.1.0";
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut steps = Vec::new();
    for entry in std::fs::read_dir(root.join("extension/sql")).into_iter().flatten() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let step = name.strip_prefix("pagevault--").and_then(|rest| rest.strip_suffix(".sql"));
        let step = step.and_then(|step| step.split_once("--"));
        let (from, to) =
            step.unwrap_or_else(|| panic!("extension/sql/{name} is not a script of upgrades"));
        steps.push((from.to_owned(), to.to_owned()));
    }
    let changes = std::fs::read_to_string(root.join("CHANGELOG.md")).unwrap();
    let headings = changes.lines().filter_map(|line| line.strip_prefix("## [")?.split_once(']'));
    let released = headings.map(|(version, _)| version).filter(|version| *version != "Unreleased");
    for version in released.chain([FIRST]) {
        let mut reached = vec![version.to_owned()];
        let mut at = 0;
        while let Some(here) = reached.get(at).cloned() {
            let next = steps.iter().filter(|(from, _)| *from == here).map(|(_, to)| to.clone());
            let new: Vec<String> = next.filter(|to| !reached.contains(to)).collect();
            reached.extend(new);
            at += 1;
        }
        let this = env!("CARGO_PKG_VERSION");
        assert!(
            reached.iter().any(|there| there == this),
            "no script extension/sql/pagevault--{version}--{this}.sql, nor several that lead there"
        );
    }
    assert!(
        !root.join("sql").read_dir().unwrap().any(|entry| {
            entry.unwrap().file_name().to_string_lossy().starts_with("pagevault--")
        }),
        "scripts of upgrades in sql/ are not installed: they belong into extension/sql/"
    );
}
