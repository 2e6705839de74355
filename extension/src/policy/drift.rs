//! What differs from the policy: labels decide for storage that is made after them.

use pgrx::pg_sys::Oid;

use super::decision::{self, Decision, Source};
use super::label::Label;
use crate::keys::shared;
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::report::Result;
use crate::verify::{self, PageState};

/// A relation that is not as it should be.
pub(crate) struct Drift {
    pub(crate) relation: Oid,
    pub(crate) wanted: String,
    /// The label or setting that decides.
    pub(crate) why: String,
    pub(crate) actual: String,
    /// SQL that puts it right.
    pub(crate) heal: String,
}

/// Every relation of this database that differs from the policy; with `check_files` also those that hold
/// pages which are not what they should be, and for that all files are read.
pub(crate) fn find(check_files: bool) -> Result<Vec<Drift>> {
    let mut found = Vec::new();
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        if facts.is_stored() {
            found.extend(drift_of(&facts, check_files)?);
        }
    }
    Ok(found)
}

fn drift_of(facts: &Facts, check_files: bool) -> Result<Option<Drift>> {
    let current = shared::current_cipher(facts.file);
    let Some(decision) = decision::wanted(facts)?.or_else(|| Decision::as_it_is(facts)) else {
        return Ok(None);
    };
    let stray = if check_files { stray_pages(facts, &decision)? } else { 0 };
    if decision.is_met_by(current) && stray == 0 {
        return Ok(None);
    }
    let mut actual = current.map_or_else(|| "plain".to_owned(), |c| format!("encrypted {c}"));
    if stray > 0 {
        let kind = if decision.is_encrypted() { "plaintext" } else { "sealed" };
        actual.push_str(&format!(", {stray} {kind} pages"));
    }
    Ok(Some(Drift {
        relation: facts.oid,
        wanted: decision.label.to_string(),
        why: decision.source.describe(),
        actual,
        heal: heal(facts, &decision)?,
    }))
}

/// The number of pages on disk that are in plaintext where they should be sealed, or the other way round.
fn stray_pages(facts: &Facts, decision: &Decision) -> Result<i64> {
    let is_stray = |state: PageState| match state {
        PageState::Empty => false,
        PageState::Plaintext => decision.is_encrypted(),
        PageState::Sealed(_) => !decision.is_encrypted(),
    };
    let counts = verify::count_pages(facts.file)?;
    Ok(counts.iter().filter(|count| is_stray(count.state)).map(|count| count.pages).sum())
}

/// New storage for what is to be encrypted: that leaves no label behind. Catalogs have none anyway, sequences
/// no such command, and encryption is taken away by labels alone.
fn heal(facts: &Facts, decision: &Decision) -> Result<String> {
    let name = relation::quoted_name(facts);
    let encrypt = |name: &str| format!("SELECT pagevault.encrypt('{}')", name.replace('\'', "''"));
    Ok(match facts.kind {
        _ if !facts.user_made => encrypt(&relation::quoted_name(&root_of(facts)?)),
        _ if !decision.is_encrypted() => {
            let root = root_of(facts)?;
            let keyword = relation::label_keyword(root.kind);
            let name = relation::quoted_name(&root);
            format!("SECURITY LABEL FOR pagevault ON {keyword} {name} IS 'plain'")
        }
        Kind::Index => format!("REINDEX INDEX {name}"),
        Kind::Sequence => encrypt(&name),
        _ => format!("VACUUM FULL {}", relation::quoted_name(&root_of(facts)?)),
    })
}

/// The relation that an index or TOAST table belongs to in the end.
fn root_of(facts: &Facts) -> Result<Facts> {
    let mut root = facts.clone();
    while matches!(root.kind, Kind::Index | Kind::Toast) {
        let leader = decision::leader_of(&root)?.and_then(relation::facts);
        let Some(leader) = leader else { break };
        root = leader;
    }
    Ok(root)
}

impl Decision {
    /// Where nothing is wanted, a relation that is encrypted is to be so throughout.
    fn as_it_is(facts: &Facts) -> Option<Decision> {
        shared::is_sealed(facts.file)
            .then(|| Decision::new(Label::Encrypted(None), Source::Own(facts.oid)))
    }
}
