//! `pagevault-keyring init`: from an installed server to one that can encrypt.

use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use nix::unistd::geteuid;
use serde_json::{Value, json};

use super::connection::Connection;
use super::{check, file};
use crate::failure::{Failure, refuse, unprintable};
use crate::init::{self, Action, Held, Step, Wanted, plan};
use crate::keyfile::place::Place;
use crate::keyfile::store;
use crate::options::absolute_path;
use crate::quoting::shell_word;
use crate::server::{self, Psql, text};
use crate::visible::visible;

const KEY_FILE: &str = "/etc/pagevault/keys";
/// The owner of a database may have set another one.
const SEARCH_PATH: &str = "SET search_path = pg_catalog, pg_temp;\n";
/// What the plan does not know, the next plan finds.
const ROUNDS: usize = 20;

#[derive(Args)]
pub(super) struct Init {
    #[command(flatten)]
    connection: Connection,
    /// Make or use this key file, with a provider of kind "file"; an absolute path
    #[arg(long, value_name = "FILE", conflicts_with = "provider_kind")]
    key_file: Option<String>,
    /// Kind of the provider, such as "vault"
    #[arg(long, value_name = "KIND", requires = "options")]
    provider_kind: Option<String>,
    /// Options of the provider, as JSON
    #[arg(long, value_name = "JSON", requires = "provider_kind")]
    options: Option<String>,
    /// Name of the provider
    #[arg(long, value_name = "NAME", default_value = "local")]
    provider: String,
    /// Name of the master key
    #[arg(long, value_name = "NAME", default_value = "main")]
    key: String,
    /// Do it; without, print the statements
    #[arg(long)]
    apply: bool,
}

impl Init {
    /// Prints or does what is missing; 2 if the server has to be restarted first.
    pub(super) fn run(self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        let wanted = self.wanted(out)?;
        let psql = self.connection.psql()?;
        let (found, steps) = look(&psql, &wanted)?;
        let all_there = steps.iter().all(|step| step.action.is_none());
        if all_there {
            for step in &steps {
                writeln!(out, "there    {}", visible(&step.what)).map_err(unprintable)?;
            }
            writeln!(out, "\nEverything is there; nothing was changed.").map_err(unprintable)?;
            if let Some(another) = init::stays_with_another(&found, &wanted) {
                writeln!(out, "{}", visible(&another)).map_err(unprintable)?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let apply = self.apply || {
            script(&steps, &wanted, out).map_err(unprintable)?;
            is_terminal() && ask(out, "\nDo this now? (yes or no)", "no")? == "yes"
        };
        if !apply {
            return Ok(ExitCode::SUCCESS);
        }
        carry_out(&psql, &wanted, (found, steps), out)
    }

    /// From the options, or by asking.
    fn wanted(&self, out: &mut impl Write) -> Result<Wanted, Failure> {
        let (provider, key) = (self.provider.clone(), self.key.clone());
        if let (Some(kind), Some(options)) = (&self.provider_kind, &self.options) {
            let options = check::options(options)?;
            return Ok(Wanted { provider, kind: kind.clone(), options, key });
        }
        let path = match &self.key_file {
            Some(path) => path.clone(),
            None if is_terminal() => ask(out, "Key file", KEY_FILE)?,
            None => {
                return Err(refuse("no provider is given").with_hint(
                    "Specify --key-file FILE, or --provider-kind KIND and --options JSON.",
                ));
            }
        };
        let options = json!({"path": absolute_path(&path)?}).as_object().cloned();
        let options = options.unwrap_or_default();
        Ok(Wanted { provider, kind: "file".to_owned(), options, key })
    }
}

fn is_terminal() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// An answer, or what is proposed.
fn ask(out: &mut impl Write, question: &str, proposed: &str) -> Result<String, Failure> {
    write!(out, "{question} [{proposed}]: ").and_then(|()| out.flush()).map_err(unprintable)?;
    let mut answer = String::new();
    io::stdin()
        .lock()
        .read_line(&mut answer)
        .map_err(|error| refuse(format!("could not read the answer: {error}")))?;
    let answer = answer.trim();
    Ok(if answer.is_empty() { proposed } else { answer }.to_owned())
}

/// What the server tells, and the steps by it.
fn look(psql: &Psql, wanted: &Wanted) -> Result<(Value, Vec<Step>), Failure> {
    let found = server::look(psql, false)?;
    let held = match wanted.key_file() {
        None => Held::Key,
        Some(path) => held(path, &wanted.key)?,
    };
    let steps = plan(&found, wanted, held)?;
    Ok((found, steps))
}

/// Whether there is a key file, with the key. One that cannot be looked at is an error.
fn held(path: &str, key: &str) -> Result<Held, Failure> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Held::NoFile),
        _ => {}
    }
    let place = Place::resolve(&absolute_path(path)?)?;
    Ok(if store::load(&place)?.key(key).is_some() { Held::Key } else { Held::NoKey })
}

/// The steps as a script for psql. Each is on a line of its own, whatever names contain.
fn script(steps: &[Step], wanted: &Wanted, out: &mut impl Write) -> io::Result<()> {
    // What follows relies on what is before: only the extension makes its schema trustworthy.
    writeln!(out, "\\set ON_ERROR_STOP on")?;
    for step in steps {
        match &step.action {
            None => writeln!(out, "-- there: {}", visible(&step.what))?,
            Some(Action::Restart) => {
                writeln!(out, "-- Restart the server here.")?;
            }
            Some(Action::KeyFile) => {
                writeln!(
                    out,
                    "-- As the server's user: pagevault-keyring file create {} --key {}",
                    shell_word(wanted.key_file().unwrap_or_default()),
                    shell_word(&wanted.key)
                )?;
            }
            Some(Action::Sql(statement)) => {
                writeln!(out, "{statement};")?;
                writeln!(out, "--   undo: {}", visible(&step.undo))?;
            }
        }
    }
    Ok(())
}

/// Does the first step that is to do, and looks again, until none is left.
fn carry_out(
    psql: &Psql,
    wanted: &Wanted,
    (mut found, mut steps): (Value, Vec<Step>),
    out: &mut impl Write,
) -> Result<ExitCode, Failure> {
    for _ in 0..ROUNDS {
        let Some(step) = steps.iter().find(|step| step.action.is_some()).cloned() else {
            let verdict = init::stays_with_another(&found, wanted).unwrap_or_else(|| {
                "The server can encrypt: SELECT pagevault.encrypt('TABLE')".to_owned()
            });
            writeln!(out, "\n{}", visible(&verdict)).map_err(unprintable)?;
            return Ok(ExitCode::SUCCESS);
        };
        match step.action.as_ref() {
            Some(Action::Sql(statement)) => {
                psql.run(None, &format!("{SEARCH_PATH}{statement};\n"), &[])?;
                writeln!(out, "did      {}", visible(statement)).map_err(unprintable)?;
                writeln!(out, "         undo: {}", visible(&step.undo)).map_err(unprintable)?;
            }
            Some(Action::KeyFile) => make_key(&found, wanted, out)?,
            Some(Action::Restart) | None => {
                writeln!(out, "\nRestart the server, then run this command again.")
                    .map_err(unprintable)?;
                return Ok(ExitCode::from(2));
            }
        }
        (found, steps) = look(psql, wanted)?;
        let done = |again: &Step| again.what == step.what && again.action == step.action;
        if steps.iter().any(done) {
            return Err(
                refuse("a step had no effect").with_detail(format!("It was: {}.", step.what))
            );
        }
    }
    Err(refuse("the server does not come to rest"))
}

/// The key, and the file if it does not exist.
fn make_key(found: &Value, wanted: &Wanted, out: &mut impl Write) -> Result<(), Failure> {
    let path = wanted.key_file().unwrap_or_default();
    if geteuid().is_root() {
        return Err(refuse("the key file would belong to root").with_hint(
            "Run this command as the user that runs the server, for example: sudo -u postgres pagevault-keyring init ...",
        ));
    }
    if found["server"]["is_local"] != true {
        return Err(refuse("the server may be on another machine").with_hint(
            "Run this command on the machine of the server, and connect by its Unix socket.",
        ));
    }
    let directory = Path::new(path).parent().unwrap_or(Path::new("/"));
    if !directory.exists() {
        return Err(refuse(format!("directory \"{}\" does not exist", directory.display()))
            .with_hint(format!("Create it for the user that runs the server, for example: sudo install -d -o postgres -g postgres -m 700 {}", directory.display())));
    }
    let data_directory = text(&found["server"]["settings"]["data_directory"]);
    let data_directory = (!data_directory.is_empty()).then(|| Path::new(data_directory));
    file::create(out, path, &wanted.key, data_directory).map(drop)
}
