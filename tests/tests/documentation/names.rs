//! Names in prose: `pagevault.something`, `something()` and `SELECT ...` in code font exist.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::{Cluster, Settings};
use pulldown_cmark::{Event, Options, Parser};

/// Names of files that begin with `pagevault.`.
const FILES: &[&str] = &[
    "pagevault.so",
    "pagevault.control",
    "pagevault.spec",
    "pagevault.hcl",
    "pagevault.files",
    "pagevault.rewinding",
];

pub(crate) fn exist() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let mut client = cluster.client()?;
    let known: BTreeSet<String> = column(
        &mut client,
        "SELECT name FROM pg_settings WHERE name LIKE 'pagevault.%'
         UNION SELECT 'pagevault.' || proname FROM pg_proc WHERE pronamespace = 'pagevault'::regnamespace
         UNION SELECT 'pagevault.' || relname FROM pg_class WHERE relnamespace = 'pagevault'::regnamespace
         UNION SELECT 'pagevault.' || relname || '.' || attname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
                WHERE relnamespace = 'pagevault'::regnamespace AND attnum > 0",
    )?
    .into_iter()
    .collect();
    let functions: BTreeSet<String> =
        column(&mut client, "SELECT DISTINCT proname FROM pg_proc")?.into_iter().collect();

    let mut strange = Vec::new();
    let mut pages = crate::pages();
    pages.extend(["SECURITY.md", "CHANGELOG.md"].map(|name| crate::root().join(name)));
    for page in pages {
        let text = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
        let name = page.file_name().unwrap_or_default().to_string_lossy();
        for code in inline_code(&text) {
            for word in words(&code, "pagevault.") {
                if !known.contains(&word) && !FILES.contains(&word.as_str()) {
                    strange.push(format!("{name}: {word}"));
                }
            }
            if let Some(call) = code.strip_suffix("()")
                && call.chars().all(|c| c.is_ascii_lowercase() || c == '_')
                && !functions.contains(call)
            {
                strange.push(format!("{name}: {code}"));
            }
            // Planned, not run: the names in it must exist, except for relations of the reader.
            if code.starts_with("SELECT ") && !code.contains("...") {
                let query = code.trim_end_matches(';').split(" \\gexec").next().unwrap_or("");
                let planned = client.batch_execute(&format!("EXPLAIN {query}"));
                let output = planned.err().and_then(|error| error.as_db_error().cloned());
                if let Some(output) = output
                    && (output.code().code() != "42P01" || output.message().contains("pagevault."))
                {
                    strange.push(format!("{name}: {code}: {}", output.message()));
                }
            }
        }
    }
    ensure!(strange.is_empty(), "there is no such thing:\n{}", strange.join("\n"));
    cluster.finish()
}

fn inline_code(text: &str) -> Vec<String> {
    Parser::new_ext(text, Options::ENABLE_TABLES)
        .filter_map(|event| match event {
            Event::Code(code) => Some(code.into_string()),
            _ => None,
        })
        .collect()
}

/// The names in `code` that begin with `prefix`.
fn words(code: &str, prefix: &str) -> Vec<String> {
    code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'))
        .filter(|word| word.starts_with(prefix))
        .map(|word| word.trim_end_matches('.').to_owned())
        .filter(|word| word.len() > prefix.len())
        .collect()
}
