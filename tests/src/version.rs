//! The version stands once, in the root `Cargo.toml`; prose that names it must agree.

use std::path::Path;

#[test]
fn documents_name_this_version() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (document, before) in [
        ("README.md", "Version "),
        ("SECURITY.md", "**Version "),
        ("docs/README.md", "For version "),
        ("CHANGELOG.md", ""),
    ] {
        let text = std::fs::read_to_string(root.join(document)).unwrap();
        let named = format!("{before}{}", env!("CARGO_PKG_VERSION"));
        assert!(text.contains(&named), "{document} does not say \"{named}\"");
    }
}

#[test]
fn the_extension_takes_it_from_cargo() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let control = std::fs::read_to_string(root.join("extension/pagevault.control")).unwrap();
    assert!(control.contains("default_version = '@CARGO_VERSION@'"));
    for member in
        ["cipher", "keystore", "interpose", "keyring", "extension", "tests", "benches", "fuzz"]
    {
        let manifest = std::fs::read_to_string(root.join(member).join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains("\nversion.workspace = true\n"),
            "{member} has a version of its own"
        );
    }
}
