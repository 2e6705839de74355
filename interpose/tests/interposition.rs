//! Interposition in a test program, built in each way that moves tables and GOT slots.
//!
//! Needs a C compiler and the example `interposer`, which `cargo test` builds. `cargo test --test`
//! uses the one it finds.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests, helpers included, may panic")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use pagevault_interpose::ProgramFile;
use pagevault_interpose::elf::Elf;
use tempfile::TempDir;

const PIE: [&str; 2] = ["-fPIE", "-pie"];
const NO_PIE: [&str; 2] = ["-fno-pie", "-no-pie"];
const NOW: &str = "-Wl,-z,relro,-z,now";
const LAZY: &str = "-Wl,-z,relro,-z,lazy";

const UNTOUCHED: &str =
    "shelf 101 102 103 104 twin 211 complete 108 report 108 wrote 4 read 4 wxyz end 8";
const REPLACED: &str =
    "shelf 101 1102 1103 104 twin 211 complete 1108 report 108 wrote 5 read 4 WXYZ end 2008";

struct Program {
    folder: TempDir,
    path: PathBuf,
}

struct Outcome {
    before: Option<String>,
    after: String,
    error: Option<String>,
    rights_before: BTreeMap<usize, String>,
    rights_after: BTreeMap<usize, String>,
}

fn compile(source: &str, flags: &[&str], output: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-O2", "-Wall"]).args(flags).arg("-o").arg(output);
    let result = command.arg(sources.join(source)).arg("-ldl").output();
    let result = result.expect("a C compiler, as cc or by the variable CC");
    let errors = String::from_utf8_lossy(&result.stderr);
    assert!(result.status.success(), "{flags:?}: {errors}");
}

impl Program {
    fn build(flags: &[&str]) -> Program {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        compile("program.c", &[&["-rdynamic"], flags].concat(), &path);
        Program { folder, path }
    }

    fn run(&self, scenario: &str, early: bool) -> Outcome {
        self.run_with(scenario, early, None)
    }

    fn run_with(&self, scenario: &str, early: bool, preload: Option<&Path>) -> Outcome {
        let file = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(&self.path);
        command.arg(library()).arg(scenario).args([file("before"), file("after")]);
        if early {
            command.env("EARLY", "1");
        }
        if let Some(preload) = preload {
            command.env("LD_PRELOAD", preload);
        }
        let output = command.env_remove("LD_BIND_NOW").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{scenario}: {} {text}{errors}", output.status);
        let line = |word: &str| {
            let prefix = format!("{word} ");
            text.lines().find_map(|line| Some(line.strip_prefix(&prefix)?.to_owned()))
        };
        assert_eq!(line("after"), line("later"), "{scenario}");
        Outcome {
            before: line("before"),
            after: line("after").unwrap(),
            error: line("error"),
            rights_before: self.rights(&file("before")),
            rights_after: self.rights(&file("after")),
        }
    }

    /// The rights of every page of the program's own image.
    fn rights(&self, maps: &Path) -> BTreeMap<usize, String> {
        let maps = std::fs::read_to_string(maps).unwrap();
        let mut rights = BTreeMap::new();
        for line in maps.lines().filter(|line| line.ends_with(self.path.to_str().unwrap())) {
            let mut fields = line.split(' ');
            let (start, end) = fields.next().unwrap().split_once('-').unwrap();
            let number = |digits| usize::from_str_radix(digits, 16).unwrap();
            let right = fields.next().unwrap();
            for page in (number(start)..number(end)).step_by(4096) {
                rights.insert(page, right.to_owned());
            }
        }
        assert!(!rights.is_empty());
        rights
    }
}

/// The example library, which Cargo builds along with the tests.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("examples/libinterposer.so");
    assert!(path.exists(), "{}: build it with cargo build --example interposer", path.display());
    path
}

fn assert_replaced(program: &Program, scenario: &str, early: bool) {
    let outcome = program.run(scenario, early);
    assert_eq!(outcome.error, None);
    assert_eq!(outcome.before.as_deref(), if early { None } else { Some(UNTOUCHED) });
    assert_eq!(outcome.after, REPLACED);
    assert_eq!(outcome.rights_before, outcome.rights_after);
    let relro = outcome.rights_after.values().any(|rights| rights == "r--p");
    assert!(relro, "nothing is read-only");
}

fn builds() -> [(&'static str, Vec<&'static str>); 4] {
    let with = |pie: [&'static str; 2], binding| [&pie[..], &[binding]].concat();
    [
        ("PIE, BIND_NOW", with(PIE, NOW)),
        ("PIE, lazy", with(PIE, LAZY)),
        ("non-PIE, BIND_NOW", with(NO_PIE, NOW)),
        ("non-PIE, lazy", with(NO_PIE, LAZY)),
    ]
}

#[test]
fn forwards_and_restores_protections_in_every_build() {
    for (name, flags) in builds() {
        println!("{name}");
        let program = Program::build(&flags);
        assert_replaced(&program, "", false);
        assert_replaced(&program, "", true);
        assert_replaced(&program, "slot optional", false);
        assert_replaced(&program, "verify in a child", true);
    }
}

#[test]
fn works_with_unusual_linker_options() {
    let odd: [&[&str]; 6] = [
        &["-fno-pie", "-no-pie", "-Wl,-z,noseparate-code", LAZY],
        &["-fno-pie", "-no-pie", "-Wl,-z,noseparate-code", NOW],
        &["-fPIE", "-pie", "-fno-plt", NOW],
        &["-fPIE", "-pie", "-Wl,--hash-style=sysv", LAZY],
        &["-fPIE", "-pie", "-Wl,--hash-style=gnu", LAZY],
        &["-fno-pie", "-no-pie", "-Wl,--hash-style=gnu,-z,norelro", LAZY],
    ];
    for flags in odd {
        println!("{flags:?}");
        let program = Program::build(flags);
        assert_replaced(&program, "", false);
        assert_replaced(&program, "", true);
    }
}

#[test]
fn forwards_to_a_preloaded_library() {
    for (name, flags) in builds() {
        let program = Program::build(&flags);
        let preload = program.folder.path().join("preload.so");
        compile("preload.c", &["-shared", "-fPIC"], &preload);
        for early in [false, true] {
            let outcome = program.run_with("", early, Some(&preload));
            assert_eq!(outcome.error, None, "{name}");
            assert_eq!(outcome.after, REPLACED.replace("wrote 5", "wrote 105"), "{name}");
        }
    }
}

/// Each scenario adds one impossible step to a correct plan; the error names it and the reason.
const REFUSED: [(&str, &[&str]); 13] = [
    ("symbol missing", &["cannot find function", "\"shelf_lend\"", "/program"]),
    ("not an export", &["cannot find function", "\"on_complete\"", "/program"]),
    ("library symbol", &["cannot find function", "\"getenv\"", "/program"]),
    (
        "table twice",
        // 2, or 3 with .dynsym, where neighbours look like a table of two members without PIE.
        &["\"twins\"", " places hold all its members", "\"twin_left\" ", "\"twin_right\" "],
    ),
    ("table absent", &["\"shelves\"", "0 places", "\"lonely\" ", "\"shelf_open\" ", "/program"]),
    ("slot missing", &["cannot find a GOT slot of \"preadv2\"", "/program"]),
    ("object missing", &["cannot find object \"completions\"", "/program"]),
    ("not an object", &["cannot find object \"shelf_read\"", "/program"]),
    ("field outside", &["\"completion\" has 24 bytes", "offset 24"]),
    ("field null", &["\"completion\" offset 8", "holds 0x0", "expected a function of"]),
    ("field not null", &["\"completion\" offset 16", "expected null"]),
    ("wrong value", &["\"completion\" offset 16", "holds 0x", "expected 0x"]),
    ("planned twice", &["GOT slot of \"read\"", "twice"]),
];

#[test]
fn a_plan_that_fails_leaves_the_process_untouched() {
    for (name, flags) in builds() {
        let program = Program::build(&flags);
        for (scenario, facts) in REFUSED {
            let outcome = program.run(scenario, false);
            let error = outcome.error.unwrap_or_else(|| panic!("{name}: {scenario}: no error"));
            println!("{name}: {scenario}: {error}");
            for fact in facts {
                assert!(error.contains(fact), "{name}: {scenario}: {error}: {fact} not in it");
            }
            assert_eq!(outcome.after, UNTOUCHED, "{name}: {scenario}");
            assert_eq!(outcome.rights_before, outcome.rights_after, "{name}: {scenario}");
        }
    }
}

#[test]
fn a_null_replacement_is_refused() {
    let outcome = Program::build(&builds()[0].1).run("null replacement", false);
    assert!(outcome.error.unwrap().contains("the GOT slot of \"close\" is null"));
    assert_eq!(outcome.after, UNTOUCHED);
}

#[test]
fn a_word_that_changed_after_planning_stops_the_whole_plan() {
    for (name, flags) in builds() {
        let outcome = Program::build(&flags).run("changed meanwhile", false);
        let error = outcome.error.unwrap();
        assert!(error.contains("the GOT slot of \"pwrite\""), "{name}: {error}");
        // Only what the other plan replaced.
        assert_eq!(outcome.after, UNTOUCHED.replace("wrote 4", "wrote 5"), "{name}");
        assert_eq!(outcome.rights_before, outcome.rights_after, "{name}");
    }
}

#[test]
fn a_second_installation_is_told_who_was_there_first() {
    for (name, flags) in builds() {
        let outcome = Program::build(&flags).run("again", false);
        let error = outcome.error.unwrap();
        let first = library();
        let first = format!("was replaced by {}", first.display());
        assert!(
            error.contains("in table \"shelves\"") && error.contains(&first),
            "{name}: {error}"
        );
        assert_eq!(outcome.after, REPLACED, "{name}");
    }
}

/// The parser on real files, and on the same files cut short and with bytes flipped.
#[test]
fn parses_the_files_it_was_built_from() {
    for (name, flags) in builds() {
        let file = std::fs::read(Program::build(&flags).path).unwrap();
        let elf = Elf::parse_file(&file).unwrap();
        assert_eq!(elf.exports(b"shelf_read").count(), 1, "{name}");
        assert_eq!(elf.exports(b"on_complete").count(), 0, "{name}");
        let version = elf.imports(b"pwrite").next().unwrap().version.unwrap();
        assert!(elf.name(version.name).starts_with(b"GLIBC_"), "{name}");
        assert!(elf.name(version.library).starts_with(b"libc.so"), "{name}");
        for len in (0..file.len()).step_by(61) {
            let _ = Elf::parse_file(&file[..len]);
        }
        let mut damaged = file.clone();
        for (at, &byte) in file.iter().enumerate().take(0x1000) {
            damaged[at] = !byte;
            let _ = Elf::parse_file(&damaged);
            damaged[at] = byte;
        }
    }
}

const SHELF: [&str; 4] = ["shelf_read", "shelf_write", "shelf_open", "shelf_close"];

fn file_of(flags: &[&str]) -> ProgramFile {
    let program = Program::build(flags);
    let bytes = std::fs::read(&program.path).unwrap();
    ProgramFile::new(program.path.to_str().unwrap(), bytes).unwrap()
}

#[test]
fn a_file_shows_what_the_running_program_has() {
    let relr =
        ("PIE, compact relocations", [&PIE[..], &[NOW, "-Wl,-z,pack-relative-relocs"]].concat());
    for (name, flags) in builds().into_iter().chain([relr]) {
        println!("{name}");
        let file = file_of(&flags);
        file.has_table("shelves", &SHELF).unwrap();
        let twins = file.has_table("twins", &["twin_left", "twin_right"]).unwrap_err().to_string();
        // Without PIE, the symbol table is a place too, if it has them near each other.
        let is_place_too = name.starts_with("non-PIE") && twins.contains("3 places");
        assert!(twins.contains("2 places") || is_place_too, "{twins}");
        file.has_own_function("completion", 0).unwrap();
        file.has_null("completion", 8).unwrap();
        file.has_own_function("completion", 16).unwrap();
        let null = file.has_own_function("completion", 8).unwrap_err().to_string();
        assert!(null.contains("holds 0x0"), "{null}");
        file.has_null("completion", 16).unwrap_err();
        file.has_function("lonely").unwrap();
        file.has_function("observe").unwrap_err();
        assert!(file.imports("pwrite") && !file.imports("preadv"));
        let facts = file.facts();
        assert_eq!(facts.position_independent, !name.starts_with("non-PIE"));
        assert_eq!(facts.bound_at_start, !name.ends_with("lazy"));
        assert!(facts.interpreter.as_deref().unwrap().contains("ld-"), "{facts:?}");
        assert!(!facts.compilers.is_empty());
    }
}

#[test]
fn direct_calls_are_counted_in_a_file() {
    let file = file_of(&["-fno-inline", "-fno-ipa-icf"]);
    assert_eq!(file.direct_calls("lonely").unwrap(), 1);
    assert_eq!(file.direct_calls("shelf_read").unwrap(), 0);
}

#[test]
fn a_static_program_has_nothing_to_find() {
    for flags in [&["-static"][..], &["-static-pie"]] {
        let program = Program::build(flags);
        let file = std::fs::read(&program.path).unwrap();
        let file = ProgramFile::new("program", file);
        assert!(file.map_or(true, |file| !file.imports("pwrite")), "{flags:?}");
    }
}
