//! Links nothing into the library that it does not use.
//!
//! pgrx has wrappers of all inline functions in the server's headers, and those of a newer minor
//! release call functions that older ones lack. A library with such a call does not load there.
//! rustc drops unused sections only with optimization.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,--gc-sections");
}
