//! Relations that move into a group, out of it, and between groups; copies of databases.

use pagevault_tests::datafile::{PageState, assert_sealed};

use super::*;

/// Data that is there already moves by labels and by jobs, and gets another data key.
#[test]
fn relations_move_between_groups_online() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (mut cluster, keys) = with_groups(&settings)?;
    cluster.allow_log("key group");
    cluster
        .sql(&format!("CREATE TABLE t (id serial PRIMARY KEY, name text); INSERT INTO t {ROWS}"))?;
    let all = count(&cluster, "t")?;
    let moved_to = |group: &str, version: u16| -> Result<()> {
        cluster
            .eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
        ensure!(
            groups_in(&cluster, "public")? == format!("{group} 3"),
            "{}",
            groups_in(&cluster, "public")?
        );
        ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0");
        cluster.sql("CHECKPOINT")?;
        for file in cluster.family_files("t")? {
            for state in file.states()? {
                ensure!(
                    [PageState::Zero, PageState::Sealed(version)].contains(&state),
                    "{state:?}"
                );
            }
        }
        ensure!(count(&cluster, "t")? == all);
        Ok(())
    };
    let label =
        |label: &str| cluster.sql(&format!("SECURITY LABEL FOR pagevault ON TABLE t IS {label}"));
    // From plaintext into a group; between groups; out of all.
    label("'encrypted key_group=acme'")?;
    moved_to("acme", 1)?;
    label("'encrypted key_group=umbrella'")?;
    moved_to("umbrella", 2)?;
    label("'encrypted'")?;
    moved_to("-", 3)?;
    // The label of the schema decides about what comes, and what is there moves on request.
    label("NULL")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON SCHEMA public IS 'encrypted key_group=acme'")?;
    ensure!(groups_in(&cluster, "public")? == "- 3");
    let drift =
        "SELECT DISTINCT expected || '; ' || actual FROM pagevault.drift ORDER BY 1 LIMIT 1";
    let drift = cluster.text(drift)?;
    ensure!(drift.starts_with("encrypted key_group=acme; encrypted aes-256-xts"), "{drift}");
    cluster.sql("SELECT pagevault.reconcile('t')")?;
    moved_to("acme", 4)?;
    // Without any label it stays where it is, and its new storage, too.
    cluster.sql("SECURITY LABEL FOR pagevault ON SCHEMA public IS NULL")?;
    cluster.sql("VACUUM FULL t")?;
    ensure!(groups_in(&cluster, "public")? == "acme 3");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift")? == "0");
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
    ensure!(groups_in(&cluster, "public")? == "acme 3");
    // It needs the key of this group alone.
    cluster.stop(StopMode::Fast)?;
    keys[2].take_away()?;
    cluster.start_server()?;
    ensure!(count(&cluster, "t")? == all);
    cluster.stop(StopMode::Fast)?;
    keys[2].bring_back()?;
    keys[1].take_away()?;
    cluster.start_server()?;
    is_locked(&cluster, "t", "acme")?;
    keys[1].bring_back()?;
    cluster.finish()
}

/// Tables that are small are moved by the statement itself, and never under another key before.
#[test]
fn a_small_table_goes_into_its_group_at_once() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    cluster
        .sql(&format!("CREATE TABLE t (id serial PRIMARY KEY, name text); INSERT INTO t {ROWS}"))?;
    cluster
        .sql("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted aes-128-xts key_group=acme'")?;
    ensure!(groups_in(&cluster, "public")? == "acme 3");
    let keys = "SELECT string_agg(DISTINCT version || ' ' || cipher || ' ' || coalesce(key_group, scope), ', ')
        FROM pagevault.data_keys WHERE relation = 't'::regclass";
    ensure!(cluster.text(keys)? == "1 aes-128-xts acme", "{}", cluster.text(keys)?);
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("t")?)?;
    // A table that is attached follows the partitioned table.
    cluster.sql(
        "CREATE TABLE p (id int, name text) PARTITION BY RANGE (id);
         SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted key_group=umbrella';
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);
         CREATE TABLE p2 (id int, name text); ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (10) TO (20)",
    )?;
    ensure!(
        groups_in(&cluster, "public")? == "acme 3, umbrella 2",
        "{}",
        groups_in(&cluster, "public")?
    );
    cluster.finish()
}

/// A job moves it into the group of the partitioned table; until then, and if the transaction is
/// rolled back, it is under the key of the database.
#[test]
fn rows_of_a_table_that_is_attached_in_a_transaction_are_never_in_plaintext() -> Result<()> {
    let settings = Settings::default().conf("pagevault.enforce_encryption = on");
    let (cluster, _keys) = with_groups(&settings)?;
    cluster.sql(
        "CREATE TABLE p (id int, name text) PARTITION BY LIST (id);
         SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted key_group=acme';
         CREATE TABLE a (id int PRIMARY KEY, name text); CREATE TABLE b (id int, name text);
         CREATE TABLE owner (id int); CREATE SEQUENCE numbers;
         SECURITY LABEL FOR pagevault ON TABLE owner IS 'encrypted key_group=acme'",
    )?;
    let attach = |table: &str, value: &str| {
        format!("ALTER TABLE p ATTACH PARTITION {table} FOR VALUES IN ({value})")
    };
    let plaintext = "SELECT count(*) FROM pagevault.relations
        WHERE relation::text ~ '^(a|b|a_pkey|numbers)$' AND NOT encrypted";
    let mut session = cluster.client()?;
    run_sql(&mut session, &format!("BEGIN; {}", attach("a", "1")))?;
    run_sql(&mut session, &attach("b", "2"))?;
    run_sql(&mut session, "ALTER SEQUENCE numbers OWNED BY owner.id; SELECT nextval('numbers')")?;
    run_sql(&mut session, "INSERT INTO p VALUES (1, 'attached'), (2, 'attached')")?;
    ensure!(text(&mut session, plaintext)? == "0", "in plaintext within the transaction");
    run_sql(&mut session, "COMMIT")?;
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
    let groups =
        "SELECT string_agg(DISTINCT coalesce(key_group, '-'), ' ') FROM pagevault.relations
        WHERE relation::text ~ '^(a|b|a_pkey|numbers)$'";
    ensure!(cluster.text(groups)? == "acme", "{}", cluster.text(groups)?);
    // Nothing is put into the group by a transaction that is rolled back.
    cluster.sql("CREATE TABLE c (id int, name text)")?;
    cluster
        .sql(&format!("BEGIN; {}; ROLLBACK; INSERT INTO c VALUES (3, 'c')", attach("c", "3")))?;
    let state = "SELECT encrypted, key_group IS NULL FROM pagevault.relations
        WHERE relation = 'c'::regclass";
    ensure!(cluster.text(&format!("SELECT x::text FROM ({state}) x"))? == "(t,t)", "rolled back");
    cluster.finish()
}

/// A label that is rolled back moves nothing: who holds the key of the group could lock the table,
/// and it would end with the group.
#[test]
fn a_label_that_is_rolled_back_moves_nothing() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    cluster.sql("CREATE TABLE t AS SELECT 1 AS id; CREATE TABLE u AS SELECT 1 AS id")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE u IS 'encrypted'")?;
    let label = |table: &str| {
        format!("SECURITY LABEL FOR pagevault ON TABLE {table} IS 'encrypted key_group=acme'")
    };
    let (t, u) = (label("t"), label("u"));
    cluster.sql(&format!("BEGIN; {t}; {u}; ROLLBACK"))?;
    cluster.sql(&format!("BEGIN; SAVEPOINT s; {t}; {u}; ROLLBACK TO s; COMMIT"))?;
    let quoted = u.replace('\'', "''");
    cluster.error(&format!("DO 'BEGIN {quoted}; PERFORM 1 / 0; END'"))?;
    cluster.error(&format!("{t}; {u}; SELECT 1 / 0"))?;
    in_a_pipeline_that_fails(&cluster, &t)?;
    in_a_pipeline_that_fails(&cluster, &u)?;
    // An index that gets new storage, and of which it is not known to which group it belongs.
    cluster.sql("CREATE TABLE umbrella.other (id int); CREATE INDEX ON u (id)")?;
    cluster.sql(&format!(
        "BEGIN; LOCK TABLE umbrella.other IN ACCESS EXCLUSIVE MODE; {u}; REINDEX TABLE u; ROLLBACK"
    ))?;
    cluster.sql("DROP INDEX u_id_idx")?;
    ensure!(groups_in(&cluster, "public")? == "- 1", "{}", groups_in(&cluster, "public")?);
    // In a transaction that is committed a job moves them; a new table is moved at once.
    cluster.sql(&format!("BEGIN; {t}; {u}; CREATE TABLE v (id int); {}; COMMIT", label("v")))?;
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
    ensure!(groups_in(&cluster, "public")? == "acme 3", "{}", groups_in(&cluster, "public")?);
    cluster.finish()
}

/// Runs a statement as the first of a pipeline, another of which fails.
fn in_a_pipeline_that_fails(cluster: &Cluster, statement: &str) -> Result<()> {
    let script = cluster.directory().join("pipeline.sql");
    std::fs::write(
        &script,
        format!("\\startpipeline\n{statement};\nSELECT 1 / 0;\n\\endpipeline\n"),
    )?;
    let mut pgbench = cluster.program("pgbench");
    let done = pgbench.args(["-n", "-t", "1", "-M", "extended", "-f"]).arg(&script).output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(said.contains("division by zero"), "{said}");
    Ok(())
}

/// What begins to follow a relation of a group by a command that is rolled back stays where it was.
/// Owners may do that.
#[test]
fn following_that_is_rolled_back_moves_nothing() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    cluster.sql(
        "CREATE TABLE acme.parent (id int) PARTITION BY RANGE (id); CREATE TABLE acme.t (id int);
         CREATE TABLE part (id int); CREATE INDEX ON part (id); CREATE SEQUENCE s;
         SECURITY LABEL FOR pagevault ON TABLE part IS 'encrypted';
         SECURITY LABEL FOR pagevault ON SEQUENCE s IS 'encrypted'",
    )?;
    ensure!(groups_in(&cluster, "public")? == "- 3", "{}", groups_in(&cluster, "public")?);
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE part IS NULL")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON SEQUENCE s IS NULL")?;
    let attach = "ALTER TABLE acme.parent ATTACH PARTITION part FOR VALUES FROM (1) TO (10)";
    let own = "ALTER SEQUENCE s SET SCHEMA acme; ALTER SEQUENCE acme.s OWNED BY acme.t.id";
    cluster.sql(&format!("BEGIN; {attach}; {own}; ROLLBACK"))?;
    ensure!(groups_in(&cluster, "public")? == "- 3", "{}", groups_in(&cluster, "public")?);
    in_a_pipeline_that_fails(&cluster, attach)?;
    ensure!(groups_in(&cluster, "public")? == "- 3", "{}", groups_in(&cluster, "public")?);
    Ok(())
}

/// A kill at any step of a move leaves every row readable, and the move goes on.
#[test]
fn a_kill_at_any_step_of_a_move_loses_nothing() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = with_groups(&settings)?;
    cluster.sql(&format!(
        "CREATE TABLE acme.t (id serial PRIMARY KEY, name text); INSERT INTO acme.t {ROWS}"
    ))?;
    let all = count(&cluster, "acme.t")?;
    let mut group = "acme";
    for point in
        ["rekey.switched", "rekey.page_done", "rekey.flushed", "rekey.proved", "rekey.rewritten"]
    {
        group = if group == "acme" { "umbrella" } else { "acme" };
        cluster.stop_at(point)?;
        cluster.restart()?;
        cluster.sql(&format!(
            "SECURITY LABEL FOR pagevault ON TABLE acme.t IS 'encrypted key_group={group}'"
        ))?;
        cluster.stopped_at(point)?;
        cluster.kill()?;
        cluster.resume();
        cluster.start_server()?;
        ensure!(count(&cluster, "acme.t")? == all, "{point}");
        cluster
            .eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
        ensure!(groups_in(&cluster, "acme")? == format!("{group} 3"), "{point}");
        ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "{point}");
    }
    cluster.finish()
}

/// Both ways of copying a database keep relations in their groups.
#[test]
fn copies_of_databases_stay_in_the_group() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    cluster.allow_log("key group");
    tables(&cluster)?;
    let all = count(&cluster, "acme.t")?;
    for strategy in ["file_copy", "wal_log"] {
        cluster
            .sql(&format!("CREATE DATABASE {strategy} TEMPLATE postgres STRATEGY {strategy}"))
            .or_else(|_| copy(&cluster, strategy))?;
    }
    let databases =
        "SELECT array_to_string(databases, ',') FROM pagevault.key_groups WHERE key_group = 'acme'";
    ensure!(
        cluster.text(databases)? == "file_copy,postgres,wal_log",
        "{}",
        cluster.text(databases)?
    );
    cluster.crash()?;
    cluster.stop(StopMode::Fast)?;
    keys[1].take_away()?;
    cluster.start_server()?;
    for database in ["file_copy", "wal_log"] {
        let mut client = cluster.client_to(database)?;
        let error = expect_error(&mut client, &format!("{COUNT} acme.t"))?;
        ensure!(error.text().contains("key group \"acme\""), "{error}");
        ensure!(text(&mut client, &format!("{COUNT} umbrella.t"))? == all);
    }
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    for database in ["file_copy", "wal_log"] {
        ensure!(text(&mut cluster.client_to(database)?, &format!("{COUNT} acme.t"))? == all);
    }
    cluster.finish()
}

/// Nobody else may be connected to the template, so from another database.
fn copy(cluster: &Cluster, strategy: &str) -> Result<()> {
    let mut client = cluster.client_to("template1")?;
    let connected = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'postgres'";
    while text(&mut client, connected)? != "0" {}
    run_sql(
        &mut client,
        &format!("CREATE DATABASE {strategy} TEMPLATE postgres STRATEGY {strategy}"),
    )
}
