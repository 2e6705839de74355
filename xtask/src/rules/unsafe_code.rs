//! `unsafe` is only used behind the fences, where it is reviewed specially.

use anyhow::Result;

use super::Finding;
use crate::tree::walk;
use crate::workspace::Workspace;

/// The fences (CONTRIBUTING.md, "Unsafe code").
const FENCES: &[&str] = &[
    "interpose",
    "preload",
    "keyring/token-info",
    "powercut/recorder",
    "injection/injector",
    "extension/src/pg",
    "extension/src/hooks",
    // calls of functions for CPU features that were just detected
    "cipher/src/checksum.rs",
    "cipher/src/xts/arm.rs",
    "cipher/src/xts/x86.rs",
    "cipher/src/xts/hashed/vaes512/fused.rs",
    // functions of a C library
    "cipher/src/primitives/ffi.rs",
    // instructions without intrinsics
    "cipher/src/residue/registers.rs",
];

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in workspace.rust().filter(|file| !file.is_below(FENCES)) {
        walk(&file.trees, &mut |_, here| {
            if here[0].is("unsafe") {
                findings.push(Finding::new(
                    &file.path,
                    here[0].line(),
                    "unsafe code beyond the fences (give it a safe face in extension/src/pg)",
                ));
            }
        });
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::super::places;
    use super::*;

    #[test]
    fn unsafe_code_is_for_the_fences() {
        let source = "fn f() {\n    // unsafe\n    unsafe { g() }\n    m!(unsafe { h() });\n}\n#[unsafe(no_mangle)]\nfn g() {}\n";
        let files = [
            ("extension/src/pg/x.rs", source),
            ("extension/src/pgx.rs", source),
            ("keystore/src/x.rs", "#![forbid(unsafe_code)]\nfn unsafely() {}\n"),
        ];
        let expected = [3, 4, 6].map(|line| format!("extension/src/pgx.rs:{line}"));
        assert_eq!(places(check, &files), expected);
    }
}
