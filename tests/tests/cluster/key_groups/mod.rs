//! Key groups: relations under a key of their own, whose master key another party holds.

mod attacks;
mod interim;
mod labels;
mod moving;
mod partitions;
mod recovery;
mod shredding;
mod verified;

use std::fs;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

/// A cluster with two groups, each with a key file of its own, and a schema for each.
fn with_groups(settings: &Settings) -> Result<(Cluster, [KeyFile; 3])> {
    let (cluster, of_cluster) = Cluster::with_keys(settings)?;
    let group = |name: &str| -> Result<KeyFile> {
        let file = cluster.key_file(name, "main")?;
        cluster.sql(&file.add_provider(&format!("of_{name}")))?;
        cluster.sql(&format!(
            "SELECT pagevault.create_key_group('{name}');
             SELECT pagevault.set_key_group_master_key('{name}', 'of_{name}', 'main');
             CREATE SCHEMA {name};
             SECURITY LABEL FOR pagevault ON SCHEMA {name} IS 'encrypted key_group={name}'"
        ))?;
        Ok(file)
    };
    let (acme, umbrella) = (group("acme")?, group("umbrella")?);
    Ok((cluster, [of_cluster, acme, umbrella]))
}

const ROWS: &str = "SELECT i, md5(i::text) || repeat('x', 300) FROM generate_series(1, 300) i";

/// A table with an index, a TOAST table and a sequence in each schema, and one outside.
fn tables(cluster: &Cluster) -> Result<()> {
    for schema in ["acme", "umbrella", "public"] {
        cluster.sql(&format!(
            "CREATE TABLE {schema}.t (id serial PRIMARY KEY, name text);
             INSERT INTO {schema}.t (name) SELECT name FROM ({ROWS}) r (i, name)"
        ))?;
    }
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE public.t IS 'encrypted'")
}

/// Waits until a query gives this, with a checkpoint before each attempt.
fn after_checkpoints(cluster: &Cluster, query: &str, expected: &str) -> Result<()> {
    cluster.eventually_that(query, || {
        cluster.sql("CHECKPOINT")?;
        let found = cluster.text(query)?;
        ensure!(found == expected, "{found}, not {expected}");
        Ok(())
    })
}

/// A start that a fault point stops; then all processes are killed.
fn kill_in_start(server: &Cluster, point: &str) -> Result<()> {
    server.stop_at(point)?;
    std::thread::scope(|scope| -> Result<()> {
        let start = scope.spawn(|| server.start_server());
        server.stopped_at(point)?;
        server.kill()?;
        let _ = start.join();
        Ok(())
    })?;
    server.resume();
    Ok(())
}

/// The number of relations of a schema by key group.
fn groups_in(cluster: &Cluster, schema: &str) -> Result<String> {
    cluster.text(&format!(
        "SELECT string_agg(g || ' ' || n, ', ' ORDER BY g) FROM (
            SELECT coalesce(r.key_group, '-') AS g, count(*) AS n
              FROM pagevault.relations r JOIN pg_class c ON c.oid = r.relation
             WHERE c.relnamespace = '{schema}'::regnamespace AND r.encrypted GROUP BY 1) x"
    ))
}

const COUNT: &str = "SELECT count(*) || ' ' || sum(length(name)) FROM";

fn count(cluster: &Cluster, table: &str) -> Result<String> {
    cluster.text(&format!("{COUNT} {table}"))
}

fn is_locked(cluster: &Cluster, table: &str, group: &str) -> Result<()> {
    let error = cluster.error(&format!("{COUNT} {table}"))?;
    ensure!(error.sqlstate == "55000", "{error}");
    ensure!(error.text().contains(&format!("key group \"{group}\"")), "{error}");
    ensure!(!error.hint.is_empty(), "{error}");
    Ok(())
}

/// Waits until no file is marked as one that may have pages under interim keys.
fn no_marks(cluster: &Cluster) -> Result<()> {
    cluster.eventually_that("no marks", || {
        let marks = fs::read_dir(cluster.data_directory().join("pagevault/interim"))?.count();
        ensure!(marks == 0, "{marks} files are marked");
        Ok(())
    })
}

#[test]
fn what_is_in_a_group_follows_its_schema() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    // The table, its index and sequence; the TOAST table and its index are in another schema.
    ensure!(groups_in(&cluster, "acme")? == "acme 3", "{}", groups_in(&cluster, "acme")?);
    ensure!(groups_in(&cluster, "umbrella")? == "umbrella 3");
    ensure!(groups_in(&cluster, "public")? == "- 3");
    let toast = "SELECT string_agg(DISTINCT key_group, ',' ORDER BY key_group)
        FROM pagevault.relations WHERE relation::text LIKE 'pg_toast.%' AND encrypted";
    ensure!(cluster.text(toast)? == "acme,umbrella");
    // Catalogs with values of all of them are under the cluster's key.
    let catalogs = "SELECT count(*) FROM pagevault.relations
        WHERE relation = 'pg_statistic'::regclass AND encrypted AND key_group IS NULL";
    ensure!(cluster.text(catalogs)? == "1");
    // Storage that replaces other storage.
    cluster.sql("TRUNCATE acme.t; INSERT INTO acme.t SELECT 1, 'x'")?;
    cluster.sql("VACUUM FULL acme.t")?;
    cluster.sql(
        "REINDEX TABLE acme.t;
         ALTER TABLE acme.t ALTER id TYPE bigint; CREATE INDEX ON acme.t (name);
         CREATE MATERIALIZED VIEW acme.m AS SELECT * FROM acme.t; REFRESH MATERIALIZED VIEW acme.m;
         CREATE TABLE acme.p (id int, a text) PARTITION BY LIST (id);
         CREATE TABLE acme.p1 PARTITION OF acme.p FOR VALUES IN (1);
         ALTER SEQUENCE acme.t_id_seq RESTART WITH 7; CLUSTER acme.t USING t_pkey",
    )?;
    ensure!(groups_in(&cluster, "acme")? == "acme 6", "{}", groups_in(&cluster, "acme")?);
    let group = "SELECT key_group || ' ' || state || ' ' || key_version || ' ' || array_to_string(databases, ',')
        FROM pagevault.key_groups ORDER BY key_group LIMIT 1";
    ensure!(cluster.text(group)? == "acme unlocked 1 postgres");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift")? == "0");
    cluster.crash()?;
    ensure!(count(&cluster, "umbrella.t")? == count(&cluster, "public.t")?);
    cluster.finish()
}

/// The start has one deadline for the keys of all groups: it asks all their master keys together,
/// so none of them takes the time of the others.
#[test]
fn the_start_asks_all_master_keys_of_groups_together() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    cluster.allow_log("key group");
    tables(&cluster)?;
    let all = count(&cluster, "public.t")?;
    let add = |name: &str| -> Result<KeyFile> {
        let file = cluster.key_file(name, "main")?;
        cluster.sql(&file.add_provider(name))?;
        cluster
            .sql(&format!("SELECT pagevault.add_key_group_master_key('acme', '{name}', 'main')"))?;
        Ok(file)
    };
    let of_acme = [&keys[1], &add("second")?, &add("third")?];
    let program = cluster.program("pagevault-keyring");
    let helper = format!("echo $PPID >> \"$0.runs\"; exec {:?} \"$@\"", program.get_program());
    let helper = cluster.script("counting", &helper)?;
    cluster.set(&[("pagevault.keyring_command", &helper)])?;
    // The worker asks, too.
    let runs_of_start = |cluster: &Cluster| -> Result<usize> {
        let pid = fs::read_to_string(cluster.data_directory().join("postmaster.pid"))?;
        let runs = fs::read_to_string(format!("{helper}.runs"))?;
        Ok(runs.lines().filter(|by| Some(*by) == pid.lines().next()).count())
    };
    // That of the cluster, and then those of the groups.
    const RUNS: usize = 2;
    cluster.stop(StopMode::Fast)?;
    of_acme.iter().try_for_each(|file| file.take_away())?;
    cluster.start_server()?;
    is_locked(&cluster, "acme.t", "acme")?;
    ensure!(count(&cluster, "umbrella.t")? == all);
    ensure!(runs_of_start(&cluster)? == RUNS, "{} runs", runs_of_start(&cluster)?);
    cluster.stop(StopMode::Fast)?;
    of_acme[2].bring_back()?;
    cluster.start_server()?;
    ensure!(runs_of_start(&cluster)? == RUNS, "{} runs", runs_of_start(&cluster)?);
    ensure!(count(&cluster, "acme.t")? == all);
    cluster.finish()
}

/// The key of one tenant is gone at a clean start: the others do not notice.
#[test]
fn a_revoked_key_locks_its_group_alone() -> Result<()> {
    let (mut cluster, keys) =
        with_groups(&Settings::default().conf("pagevault.unlock_timeout = 60"))?;
    cluster.allow_log("key group");
    tables(&cluster)?;
    let all = count(&cluster, "public.t")?;
    cluster.stop(StopMode::Fast)?;
    keys[1].take_away()?;
    cluster.start_server()?;
    is_locked(&cluster, "acme.t", "acme")?;
    ensure!(count(&cluster, "umbrella.t")? == all && count(&cluster, "public.t")? == all);
    cluster.sql("INSERT INTO umbrella.t (name) SELECT 'x'; CREATE TABLE umbrella.u (id int)")?;
    let error = cluster.error("CREATE TABLE acme.u (id int)")?;
    ensure!(error.text().contains("key group \"acme\""), "{error}");
    let states = "SELECT string_agg(key_group || ' ' || state, ', ' ORDER BY key_group) FROM pagevault.key_groups";
    ensure!(cluster.text(states)? == "acme locked, umbrella unlocked");
    // A crash does not need it either: nothing of it was changed since the last checkpoint.
    cluster.kill()?;
    cluster.start_server()?;
    is_locked(&cluster, "acme.t", "acme")?;
    ensure!(count(&cluster, "public.t")? == all);
    // What is locked can be dropped, and the group with it.
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(count(&cluster, "acme.t")? == all);
    ensure!(cluster.text(states)? == "acme unlocked, umbrella unlocked");
    cluster.finish()
}

/// Master keys and the key of a group are rotated like those of databases.
#[test]
fn keys_of_groups_are_rotated() -> Result<()> {
    let (cluster, keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    let all = count(&cluster, "acme.t")?;
    ensure!(cluster.text("SELECT pagevault.rotate_key_group_master_key('acme')")? == "2");
    ensure!(cluster.text("SELECT pagevault.rotate_key_group_key('acme')")? == "2");
    let under =
        "SELECT string_agg(DISTINCT scope || ' ' || key_group || ' ' || database_key_version, ', ')
        FROM pagevault.data_keys WHERE key_group IS NOT NULL AND key_group = 'acme'";
    ensure!(cluster.text(under)? == "key group acme 2", "{}", cluster.text(under)?);
    // The keys of others are as they were.
    let others = "SELECT string_agg(DISTINCT coalesce(key_group, scope) || ' ' || database_key_version, ', ' ORDER BY coalesce(key_group, scope) || ' ' || database_key_version)
        FROM pagevault.data_keys WHERE key_group IS DISTINCT FROM 'acme'";
    ensure!(cluster.text(others)? == "cluster 1, umbrella 1", "{}", cluster.text(others)?);
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    ensure!(cluster.text(others)? == "cluster 2, umbrella 1", "{}", cluster.text(others)?);
    // A key of the database's own takes over what the cluster's key wraps, and nothing else.
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    ensure!(cluster.text(others)? == "database 1, umbrella 1", "{}", cluster.text(others)?);
    ensure!(cluster.text(under)? == "key group acme 2");
    let spare = cluster.key_file("spare", "main")?;
    cluster.sql(&spare.add_provider("spare"))?;
    cluster.sql("SELECT pagevault.add_key_group_master_key('acme', 'spare', 'main')")?;
    cluster.sql("SELECT pagevault.drop_key_group_master_key('acme', 'of_acme', 'main')")?;
    keys[1].take_away()?;
    cluster.restart()?;
    ensure!(count(&cluster, "acme.t")? == all);
    let error = cluster.error("SELECT pagevault.drop_provider('spare')")?;
    ensure!(error.text().contains("key group \"acme\""), "{error}");
    cluster.finish()
}

/// The keys of many groups are asked for in one request, which is larger than a pipe takes at once.
/// One that is missing locks its group alone.
#[test]
fn a_start_asks_for_the_keys_of_many_groups() -> Result<()> {
    const GROUPS: usize = 200;
    let (mut cluster, _of_cluster) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("key group");
    let first = cluster.key_file("first", "main")?;
    let others = cluster.key_file("others", "main")?;
    let mut client = cluster.client()?;
    for number in 1..=GROUPS {
        let provider = format!("of_{number}_{}", "x".repeat(50));
        let file = if number == 1 { &first } else { &others };
        run_sql(&mut client, &file.add_provider(&provider))?;
        run_sql(
            &mut client,
            &format!(
                "SELECT pagevault.create_key_group('g{number}');
                 SELECT pagevault.set_key_group_master_key('g{number}', '{provider}', 'main')"
            ),
        )?;
    }
    run_sql(
        &mut client,
        "CREATE SCHEMA s; SECURITY LABEL FOR pagevault ON SCHEMA s IS 'encrypted key_group=g200';
         CREATE TABLE s.t AS SELECT 1 AS id",
    )?;
    drop(client);
    cluster.stop(StopMode::Fast)?;
    first.take_away()?;
    cluster.start_server()?;
    let locked =
        "SELECT string_agg(key_group, ' ') FROM pagevault.key_groups WHERE state <> 'unlocked'";
    ensure!(cluster.text(locked)? == "g1", "{}", cluster.text(locked)?);
    ensure!(cluster.text("SELECT id FROM s.t")? == "1");
    first.bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(
        cluster.text("SELECT count(*) FROM pagevault.key_groups WHERE state = 'unlocked'")?
            == "200"
    );
    cluster.finish()
}
