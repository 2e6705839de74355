//! SIGKILL to the whole server at every step of a rotation, and of a move to another provider:
//! before and after each request to the provider, and when keys are written. Afterwards either the
//! old key or the new one is in use, and the operation can be repeated. The same holds for a
//! standby, and for restores of backups from before and during the operation.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::witnesses::Witnesses;
use pagevault_tests::{Cluster, Settings};

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id int PRIMARY KEY, name text);
    INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 2000) i";

/// Runs in place of the real helper and counts its runs. In the run that the file `.at` names it
/// lets the server wait, before or after it runs the real helper, and writes a marker.
const WRAPPER: &str = r#"
run=$(($(cat "$0.runs") + 1))
echo $run > "$0.runs"
hang() { touch "$0.reached"; exec sleep 600; }
[ "$(cat "$0.at")" = "$run before" ] && hang
reply=$(KEYRING "$@") || exit
[ "$(cat "$0.at")" = "$run after" ] && hang
printf '%s' "$reply"
"#;

/// Queries for witnesses: the wrapping of database keys, and tables sealed under their data keys.
const QUESTIONS: [&str; 3] = [
    "SELECT string_agg(concat_ws(' ', provider, master_key, master_key_version), ', ' ORDER BY provider, master_key, master_key_version)
       FROM pagevault.database_keys",
    "SELECT concat(count(name), ' ', sum(hashtext(name))) FROM t",
    "SELECT concat(count(name), ' ', sum(hashtext(name))) FROM u",
];

/// A cluster with three versions of its database key.
fn rotated() -> Result<Cluster> {
    // Key files must be correct at several moments, with fsync and without.
    let settings = Settings::default().conf("fsync = on").conf("wal_keep_size = 1GB");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(TABLE)?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE u AS SELECT * FROM t")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    Ok(cluster)
}

/// A standby and restores, without fsync and with the real helper.
fn witnesses(cluster: &Cluster) -> Result<Witnesses> {
    let keyring = cluster.installation().program("pagevault-keyring");
    let helper = format!("pagevault.keyring_command = '{}'", keyring.display());
    Witnesses::with(cluster, &["fsync = off", &helper])
}

/// A cluster whose helper is the wrapper, and its witnesses.
fn wrapped() -> Result<(Cluster, Witnesses)> {
    let cluster = rotated()?;
    let keyring = cluster.installation().program("pagevault-keyring");
    let body = WRAPPER.replace("KEYRING", &keyring.to_string_lossy());
    let wrapper = cluster.script("wrapper", &body)?;
    stop_at(&cluster, "never")?;
    let witnesses = witnesses(&cluster)?;
    cluster.append_conf(&format!("pagevault.keyring_command = '{wrapper}'"))?;
    cluster.sql("SELECT pg_reload_conf()")?;
    cluster.eventually("SHOW pagevault.keyring_command", &wrapper)?;
    Ok((cluster, witnesses))
}

/// Makes the wrapper count from now on, and stop `at` that moment.
fn stop_at(cluster: &Cluster, at: &str) -> Result<()> {
    for (name, content) in [("wrapper.at", at), ("wrapper.runs", "0")] {
        let path = cluster.directory().join(name);
        std::fs::write(&path, content)?;
        cluster.installation().give(&path)?;
    }
    let _ = std::fs::remove_file(cluster.directory().join("wrapper.reached"));
    Ok(())
}

fn runs(cluster: &Cluster) -> Result<u32> {
    let runs = std::fs::read_to_string(cluster.directory().join("wrapper.runs"))?;
    runs.trim().parse().context("a number")
}

/// The keys that wrap the versions of the database key; one line if it is the same for all.
fn wrapped_by(cluster: &Cluster) -> Result<Vec<String>> {
    column(
        &mut cluster.client()?,
        "SELECT DISTINCT concat_ws(' ', provider, master_key, master_key_version) FROM pagevault.database_keys",
    )
}

/// Kills the server at every step of `statement`, which sends `steps` requests to the provider.
fn kill_at_every_step(
    cluster: &Cluster,
    mut witnesses: Witnesses,
    steps: u32,
    statement: impl Fn(u32) -> String,
) -> Result<()> {
    let mut round = 0;
    for step in 1..=steps {
        for side in ["before", "after"] {
            let at = format!("{step} {side}");
            let old = wrapped_by(cluster)?;
            ensure!(old.len() == 1, "{at}: {old:?}");
            let statement = statement(round);
            round += 1;
            stop_at(cluster, &at)?;
            let mut client = cluster.client()?;
            let session = {
                let statement = statement.clone();
                std::thread::spawn(move || client.batch_execute(&statement))
            };
            cluster.eventually_that("wrapper", || {
                ensure!(cluster.directory().join("wrapper.reached").exists(), "{at}: not reached");
                Ok(())
            })?;
            cluster.kill()?;
            ensure!(session.join().is_ok_and(|ended| ended.is_err()), "{at}: it ended");
            stop_at(cluster, "never")?;
            cluster.start_server()?;
            // Nothing was written yet: the last request to the provider is the proof of the new
            // wrapping.
            ensure!(wrapped_by(cluster)? == old, "{at}: {:?}, not {old:?}", wrapped_by(cluster)?);
            for table in ["t", "u"] {
                let rows = cluster.text(&format!("SELECT count(name) FROM {table}"))?;
                ensure!(rows == "2000", "{at}: {table} has {rows} rows");
            }
            stop_at(cluster, "never")?;
            cluster.sql(&statement)?;
            ensure!(
                runs(cluster)? == steps,
                "{at}: the provider was asked {} times",
                runs(cluster)?
            );
            let new = wrapped_by(cluster)?;
            ensure!(new.len() == 1 && new != old, "{at}: {old:?}, then {new:?}");
            if at == "2 before" {
                witnesses.back_up(cluster, &at)?;
            }
        }
    }
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    witnesses.judge(cluster, &QUESTIONS, &["t", "u"])
}

#[test]
fn a_kill_at_any_step_of_a_rotation_leaves_the_old_key_in_use() -> Result<()> {
    let (cluster, witnesses) = wrapped()?;
    kill_at_every_step(&cluster, witnesses, 3, |_| {
        "SELECT pagevault.rotate_cluster_master_key()".to_owned()
    })?;
    cluster.finish()
}

#[test]
fn a_kill_at_any_step_of_a_move_leaves_the_old_provider_in_use() -> Result<()> {
    let (cluster, witnesses) = wrapped()?;
    let other = cluster.key_file("other", "elsewhere")?;
    cluster.sql(&other.add_provider("other"))?;
    kill_at_every_step(&cluster, witnesses, 2, |round| {
        let (provider, key) =
            if round % 2 == 0 { ("other", "elsewhere") } else { ("local", "main") };
        format!("SELECT pagevault.set_cluster_master_key('{provider}', '{key}')")
    })?;
    cluster.finish()
}

/// First the new key is written, then this database's data keys, wrapped with it.
#[test]
fn a_kill_while_database_keys_are_written_loses_nothing() -> Result<()> {
    let cluster = rotated()?;
    let mut witnesses = witnesses(&cluster)?;
    let before: Vec<_> =
        QUESTIONS[1..].iter().map(|question| cluster.text(question)).collect::<Result<_>>()?;
    let steps = ["keys.in_file", "keys.in_wal", "keys.in_file", "keys.in_wal"];
    for last in 0..steps.len() {
        cluster.stop_at(steps[0])?;
        let mut client = cluster.client()?;
        let session = std::thread::spawn(move || {
            client.batch_execute("SELECT pagevault.rotate_database_key()")
        });
        for (at, step) in steps[..=last].iter().enumerate() {
            if at > 0 {
                cluster.stop_at(step)?;
            }
            cluster.stopped_at(step)?;
        }
        cluster.kill()?;
        cluster.resume();
        ensure!(session.join().is_ok_and(|ended| ended.is_err()), "step {last}: it ended");
        cluster.start_server()?;
        for (question, before) in QUESTIONS[1..].iter().zip(&before) {
            ensure!(cluster.text(question)? == *before, "step {last}: {question}");
        }
        cluster.sql(&format!(
            "SET pagevault.default_encryption = on; CREATE TABLE u_{last} AS SELECT * FROM t"
        ))?;
        if last == 2 {
            witnesses.back_up(&cluster, "between the new key and what it wraps")?;
        }
    }
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.crash()?;
    let made: Vec<_> = (0..steps.len()).map(|n| format!("SELECT count(name) FROM u_{n}")).collect();
    let questions: Vec<_> = QUESTIONS.into_iter().chain(made.iter().map(String::as_str)).collect();
    witnesses.judge(&cluster, &questions, &["t", "u", "u_0", "u_3"])?;
    cluster.finish()
}
