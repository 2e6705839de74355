//! The documentation is true. Every command block of README.md and docs/ is run, in the order of
//! its page, against a real server. Parts generated or copied from the code agree with the code.
//!
//! `page` describes the conventions of a page. A chapter whose key servers are not installed counts
//! as ignored and is named on standard error; with `PAGEVAULT_REQUIRE_KEY_SERVERS` set, as in CI,
//! it fails.

mod cloudnativepg;
mod formats;
mod messages;
mod monitoring;
mod names;
mod output;
mod page;
mod reference;
mod sandbox;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use pagevault_tests::key_servers::missing;

use page::Page;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = vec![
        trial("messages::are_in_the_code", messages::are_in_the_code),
        trial("names::exist", names::exist),
        trial("reference::is_what_server_and_code_say", reference::is_up_to_date),
        trial("formats::are_those_of_the_golden_files", formats::are_golden),
        trial("cloudnativepg::examples_fit_together", cloudnativepg::fit_together),
        trial("cloudnativepg::schemas_are_the_operators", cloudnativepg::schemas_are_the_operators),
        trial("cloudnativepg::mistakes_are_noticed", cloudnativepg::mistakes_are_noticed),
        trial("monitoring::examples_fit_together", monitoring::fit_together),
    ];
    for path in pages() {
        trials.push(match std::fs::read_to_string(&path) {
            Ok(text) => chapter(Page::parse(&path, &text)),
            Err(error) => trial("pages::can_be_read", move || Err(error.into())),
        });
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// README.md and the pages in docs/.
fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> = std::fs::read_dir(root().join("docs"))
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    pages.sort();
    pages.insert(0, root().join("README.md"));
    pages
}

fn trial(name: &str, run: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    Trial::test(name, move || run().map_err(|error| Failed::from(format!("{error:#}"))))
}

fn chapter(page: Page) -> Trial {
    let required = std::env::var_os("PAGEVAULT_REQUIRE_KEY_SERVERS").is_some();
    let lacking = missing(&page.needs);
    let ignored = lacking.is_some() && !required;
    let name = format!("chapters::{}", page.name);
    if let Some(lacking) = &lacking {
        eprintln!("SKIPPED {name}: {lacking} is not on this machine (tools/key-servers)");
    }
    Trial::test(name, move || match lacking {
        Some(lacking) => Err(Failed::from(format!("{lacking} is not on this machine"))),
        None => sandbox::run(&page).map_err(|error| Failed::from(format!("{error:#}"))),
    })
    .with_ignored_flag(ignored)
}
