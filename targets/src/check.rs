//! Whether pagevault will work in a server, from its file alone.

use pagevault_interpose::elf::{Facts, Machine};
use pagevault_interpose::{Error, ProgramFile};
use serde::Serialize;

use crate::replaced::{
    ASYNCHRONOUS_IO, CALLS, Callbacks, DIRECT_CALLS, OTHER_COMPILER, READS_OF_FILES,
    READS_OF_LOCAL_BUFFERS, REPORT_OF_READS, storage_manager, sync_handlers,
};
use crate::version::{MAJORS, major_of, version};

/// One condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The condition.
    pub what: String,
    /// Whether it is met.
    pub met: bool,
    /// What was found.
    pub seen: String,
    /// The remedy, if it is not met and there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// A server, and what was found in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Its version; empty if it is no server.
    pub version: String,
    /// Instruction set.
    pub machine: &'static str,
    /// C library, and the newest of its versions that the server requires.
    pub c_library: String,
    /// The compilers that its parts name.
    pub compilers: Vec<String>,
    /// Whether it can be loaded at any address, and when its imports are bound.
    pub linking: String,
    /// Every condition.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether all conditions are met.
    #[must_use]
    pub fn works(&self) -> bool {
        self.findings.iter().all(|finding| finding.met)
    }
}

/// Examines the file of a server; the path is for messages.
///
/// # Errors
///
/// [`Error::Elf`] if it is not an executable with dynamic linking for a supported processor: not
/// even the conditions can be looked for.
pub fn check(path: &str, file: Vec<u8>) -> Result<Report, Error> {
    let program = ProgramFile::new(path, file)?;
    let version = version(program.bytes()).unwrap_or_default();
    let major = major_of(&version).filter(|major| MAJORS.contains(major));
    let mut findings = Findings::default();
    let supported = format!("PostgreSQL {} to {}", MAJORS.start(), MAJORS.end());
    let seen = if version.is_empty() { "not a PostgreSQL server" } else { version.as_str() };
    findings.add(&format!("the program is a server of {supported}"), major.is_some(), seen, None);
    if let Some(major) = major {
        tables(&program, major, &mut findings);
        if major >= 18 {
            asynchronous_io(&program, &mut findings);
        }
        calls(&program, &mut findings);
    }
    let facts = program.facts();
    Ok(Report {
        version,
        machine: match facts.machine {
            Machine::X86_64 => "x86-64",
            Machine::Aarch64 => "aarch64",
        },
        c_library: c_library(facts),
        compilers: facts.compilers.iter().cloned().collect(),
        linking: linking(facts),
        findings: findings.0,
    })
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, what: &str, met: bool, seen: &str, hint: Option<&str>) {
        let hint = hint.filter(|_| !met).map(str::to_owned);
        self.0.push(Finding { what: what.to_owned(), met, seen: seen.to_owned(), hint });
    }

    fn note(&mut self, what: &str, found: Result<(), Error>, hint: Option<&str>) -> bool {
        let met = found.is_ok();
        let seen = found.map_or_else(|error| error.to_string(), |()| "found".to_owned());
        self.add(what, met, &seen, hint);
        met
    }
}

fn tables(program: &ProgramFile, major: u32, findings: &mut Findings) {
    const EXPORTS: &str = "Ask for a server that exports its functions, as PostgreSQL's makefiles link it \
         (-Wl,-E), and that is not stripped of them.";
    let compiler = format!("{DIRECT_CALLS} {OTHER_COMPILER}");
    let compiler = Some(compiler.as_str());
    for table in [storage_manager(major), sync_handlers()] {
        let members = [table.replaced.clone(), table.anchors].concat();
        let hidden = members.iter().find_map(|name| program.has_function(name).err());
        let exported = hidden.map_or(Ok(()), Err);
        let what = format!("the functions of \"{}\" are exported", table.name);
        if findings.note(&what, exported, Some(EXPORTS)) {
            let what = format!("the table \"{}\" exists once", table.name);
            let found = program.has_table(table.name, &members);
            let absent = matches!(found, Err(Error::TableNotOnce { places: 0, .. }));
            findings.note(&what, found, compiler.filter(|_| absent));
        }
        direct_calls(program, table.name, &table.replaced, findings, compiler);
    }
}

/// `mdextend` is called directly by md.c itself (`_mdfd_getseg`), for the segments before the one
/// that is extended.
const CALLED_BY_ITS_OWN: &[&str] = &["mdextend"];

fn direct_calls(
    program: &ProgramFile,
    table: &str,
    names: &[&str],
    findings: &mut Findings,
    hint: Option<&str>,
) {
    let mut seen = Vec::new();
    for name in names.iter().filter(|name| !CALLED_BY_ITS_OWN.contains(name)) {
        match program.direct_calls(name) {
            Ok(0) | Err(_) => {}
            Ok(count) => seen.push(format!("\"{name}\" {count} times")),
        }
    }
    let what = format!("the functions of \"{table}\" are called only through it");
    let text = if seen.is_empty() {
        "no direct calls".to_owned()
    } else {
        format!("called directly: {}", seen.join(", "))
    };
    findings.add(&what, seen.is_empty(), &text, hint);
}

fn asynchronous_io(program: &ProgramFile, findings: &mut Findings) {
    for Callbacks { object, replaced, null } in [READS_OF_FILES, READS_OF_LOCAL_BUFFERS] {
        let found = program
            .has_own_function(object, replaced)
            .and_then(|()| program.has_null(object, null))
            .and_then(|()| match object == READS_OF_FILES.object {
                true => program.has_own_function(object, REPORT_OF_READS),
                false => Ok(()),
            });
        findings.note(&format!("the callbacks \"{object}\" are as in PostgreSQL 18"), found, None);
    }
    let missing = ASYNCHRONOUS_IO.iter().find_map(|name| program.has_function(name).err());
    let found = missing.map_or(Ok(()), Err);
    findings.note("the functions of asynchronous I/O are exported", found, None);
}

fn calls(program: &ProgramFile, findings: &mut Findings) {
    const HINT: &str = "Ask for a server that is linked dynamically with its C library.";
    let missing: Vec<&str> = CALLS
        .iter()
        .filter(|call| call.required)
        .filter(|call| !call.names.iter().chain(call.checked).any(|name| program.imports(name)))
        .map(|call| call.names[0])
        .collect();
    let seen = if missing.is_empty() {
        "found".to_owned()
    } else {
        format!("no GOT slot for {}", missing.join(", "))
    };
    let what = "calls on files go through the global offset table";
    findings.add(what, missing.is_empty(), &seen, Some(HINT));
}

fn c_library(facts: &Facts) -> String {
    let loader = facts.interpreter.as_deref().unwrap_or_default();
    if loader.contains("musl") {
        return "musl".to_owned();
    }
    let number = |name: &str| -> Option<Vec<u32>> {
        name.strip_prefix("GLIBC_")?.split('.').map(|part| part.parse().ok()).collect()
    };
    let newest = facts.versions.iter().filter_map(|name| number(name)).max();
    let Some(newest) = newest else { return "unknown".to_owned() };
    let newest: Vec<String> = newest.iter().map(u32::to_string).collect();
    format!("glibc {}", newest.join("."))
}

fn linking(facts: &Facts) -> String {
    let position = if facts.position_independent { "PIE" } else { "not PIE" };
    let binding = if facts.bound_at_start { "bound at start" } else { "bound lazily" };
    format!("{position}, {binding}")
}
