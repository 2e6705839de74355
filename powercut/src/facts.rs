//! What a server says of itself, and only commands change: noted after each step of a scenario,
//! and compared after the cut.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::cluster::{column, text};
use postgres::SimpleQueryMessage;

/// Names of facts that are numbers, and never become less.
const GROWS: &str = "version of ";

/// Relations, databases and labels.
const OF_POSTGRESQL: &str = "
    SELECT 'relation ' || c.oid::regclass, concat_ws(' ', relkind, relpersistence, spcname)
      FROM pg_class c LEFT JOIN pg_tablespace t ON t.oid = reltablespace
     WHERE c.oid >= 16384 AND relnamespace::regnamespace::text !~ '^pg_'
       AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = c.oid AND deptype = 'e')
    UNION ALL SELECT 'extension ' || extname, '' FROM pg_extension WHERE extname <> 'amcheck'
    UNION ALL SELECT concat_ws(' ', 'label of', objtype, objname), label FROM pg_seclabels";

/// Keys and jobs. Data keys of files that are gone do not matter.
const OF_PAGEVAULT: &str = "
    SELECT 'provider ' || provider, kind FROM pagevault.providers
    UNION ALL SELECT 'key group ' || key_group, state FROM pagevault.key_groups
    UNION ALL SELECT 'setting ' || name, setting FROM pg_settings
     WHERE name LIKE 'pagevault.%' AND source = 'configuration file' AND name <> 'pagevault.rekey_threshold'
    UNION ALL SELECT concat_ws(' ', 'version of database key', scope, database, key_group), max(version)::text
      FROM pagevault.database_keys GROUP BY scope, database, key_group
    UNION ALL SELECT DISTINCT ON (scope, database, key_group) concat_ws(' ', 'master key', scope, database, key_group), provider || ' ' || master_key
      FROM (SELECT * FROM pagevault.database_keys ORDER BY scope, database, key_group, version DESC) newest
    UNION ALL SELECT concat_ws(' ', 'version of master key of', scope, database, key_group, version, provider, master_key), master_key_version::text
      FROM pagevault.database_keys
    UNION ALL SELECT concat_ws(' ', 'version of data key', relation, filenode), max(version)::text
      FROM pagevault.data_keys WHERE relation IS NOT NULL GROUP BY relation, filenode
    UNION ALL SELECT 'group of ' || relation, key_group FROM pagevault.relations WHERE key_group IS NOT NULL
    UNION ALL SELECT concat_ws(' ', 'job', job, kind, relation), state
      FROM pagevault.rekey_jobs WHERE relation IS NOT NULL";

const DRIFT: &str = "SELECT 'drift ' || relation, expected || ' ' || regexp_replace(reason, 'rekey job \\d+', 'a job')
    FROM pagevault.drift(true)";

/// Facts of a server by their names, which begin with that of a database.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts(BTreeMap<String, String>);

impl Facts {
    /// What holds at once.
    pub(crate) fn of(cluster: &Cluster) -> Result<Facts> {
        let mut facts = Facts::default();
        for database in databases(cluster)? {
            facts.0.insert(format!("{database}: it is there"), String::new());
            facts.add(cluster, &database, OF_POSTGRESQL)?;
            if has_extension(cluster, &database)? {
                facts.add(cluster, &database, OF_PAGEVAULT)?;
            }
        }
        Ok(facts)
    }

    /// Where files differ from the policy.
    pub(crate) fn drift(cluster: &Cluster) -> Result<Facts> {
        let mut facts = Facts::default();
        for database in databases(cluster)? {
            if has_extension(cluster, &database)? {
                facts.add(cluster, &database, DRIFT)?;
            }
        }
        Ok(facts)
    }

    fn add(&mut self, cluster: &Cluster, database: &str, query: &str) -> Result<()> {
        for message in cluster.client_to(database)?.simple_query(query)? {
            if let SimpleQueryMessage::Row(row) = message {
                let word = |n| row.get(n).unwrap_or_default().to_owned();
                self.0.insert(format!("{database}: {}", word(0)), word(1));
            }
        }
        Ok(())
    }

    pub(crate) fn joined(mut self, other: Facts) -> Facts {
        self.0.extend(other.0);
        self
    }

    /// One line for each, as a mark of a journal.
    pub(crate) fn written(&self) -> String {
        self.0.iter().map(|(name, value)| format!("{name}\t{value}\n")).collect()
    }

    pub(crate) fn read(written: &str) -> Facts {
        let lines = written.lines().filter_map(|line| line.split_once('\t'));
        Facts(lines.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    /// These were found after a cut. What was acknowledged last has left `before`; a command that
    /// was under way would have left `after`, and may be anywhere between.
    pub(crate) fn judge(&self, before: &Facts, after: Option<&Facts>) -> Result<()> {
        let names = [Some(before), after, Some(self)].into_iter().flatten();
        let names: std::collections::BTreeSet<_> =
            names.flat_map(|facts| facts.0.keys()).filter(|name| !is_drift(name)).collect();
        let mut wrong = Vec::new();
        for name in names {
            let [found, old] = [self, before].map(|facts| facts.0.get(name));
            let new = after.and_then(|after| after.0.get(name));
            let number = |text: Option<&String>| text?.parse::<u64>().ok();
            let is_right = if name.contains(GROWS) {
                // Of a file that is being replaced there may be none.
                let gone =
                    found.is_none() && after.is_some_and(|after| !after.0.contains_key(name));
                number(found) >= number(old) || gone
            } else if is_job(name) {
                job_may_be(found, old) || after.is_some() && (job_may_be(found, new) || old == new)
            } else {
                found == old || after.is_some() && (found == new || old == new)
            };
            if !is_right {
                wrong.push(format!("{name}: {found:?}, and was {old:?}, to become {new:?}"));
            }
        }
        ensure!(wrong.is_empty(), "what was acknowledged does not hold: {wrong:#?}");
        Ok(())
    }

    /// As [`Facts::judge`], for drift: it may become less.
    pub(crate) fn judge_drift(&self, before: &Facts) -> Result<()> {
        let new: Vec<_> =
            self.0.iter().filter(|(name, value)| before.0.get(*name) != Some(*value)).collect();
        ensure!(new.is_empty(), "drift without any repair: {new:?}");
        Ok(())
    }
}

/// Those that can be connected to.
pub(crate) fn databases(cluster: &Cluster) -> Result<Vec<String>> {
    column(
        &mut cluster.client()?,
        "SELECT datname FROM pg_database WHERE datallowconn AND datconnlimit <> -2 AND datname <> 'template1'",
    )
}

/// Whether pagevault is installed in a database.
pub(crate) fn has_extension(cluster: &Cluster, database: &str) -> Result<bool> {
    let query = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'pagevault')";
    Ok(text(&mut cluster.client_to(database)?, query)? == "t")
}

fn is_drift(name: &str) -> bool {
    name.contains(": drift ")
}

fn is_job(name: &str) -> bool {
    name.contains(": job ")
}

/// Jobs go on, and end, by themselves; what has ended may be forgotten.
fn job_may_be(found: Option<&String>, old: Option<&String>) -> bool {
    match (old.map(String::as_str), found.map(String::as_str)) {
        (None | Some("done"), _) => true,
        (Some("waiting" | "running"), Some(found)) => {
            ["waiting", "running", "done"].contains(&found)
        }
        (old, found) => old == found,
    }
}
