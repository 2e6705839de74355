//! Labels on relations with data, and on whole databases: small relations at once, others by jobs.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::{Cluster, Settings};

use crate::{assert_plain, assert_sealed};

const ALL: &str = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM big";

/// A plaintext table of some 1,500 pages, and a small one.
fn cluster(conf: &str) -> Result<Cluster> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf(conf))?;
    cluster.sql(
        "CREATE TABLE big (id serial PRIMARY KEY, name text);
         INSERT INTO big (name) SELECT repeat(md5(i::text), 4) FROM generate_series(1, 60000) i;
         CREATE TABLE small AS SELECT 1 AS id",
    )?;
    cluster.sql("CHECKPOINT")?;
    Ok(cluster)
}

fn label(word: &str, table: &str) -> String {
    format!("SECURITY LABEL FOR pagevault ON TABLE {table} IS {word}")
}

const JOBS: &str =
    "SELECT coalesce(string_agg(concat_ws(' ', relation, kind, state), ', ' ORDER BY job), 'none')
    FROM pagevault.rekey_jobs";
const DRIFT: &str = "SELECT coalesce(string_agg(concat_ws(' ', relation, expected, '<-', actual, ':', fix), ', '), 'none')
    FROM pagevault.drift";

#[test]
fn a_label_on_a_large_table_creates_a_job() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 64kB")?;
    let before = cluster.text(ALL)?;
    cluster.sql(&label("'encrypted'", "small"))?;
    ensure!(cluster.text(JOBS)? == "none", "a job for one page");
    assert_sealed(&cluster.files("small")?)?;

    // After a rollback there is neither label nor job.
    cluster.sql(&format!("BEGIN; {}; ROLLBACK", label("'encrypted'", "big")))?;
    ensure!(cluster.text(JOBS)? == "none" && cluster.text(DRIFT)? == "none");
    cluster.sql(&label("'encrypted aes-128-xts'", "big"))?;
    cluster.eventually(JOBS, "big encrypt running")?;
    let job = cluster.text("SELECT max(job) FROM pagevault.rekey_jobs")?;
    let drift = cluster.text(DRIFT)?;
    ensure!(
        drift.starts_with("big encrypted <- running, ")
            && drift.ends_with(&format!("SELECT pagevault.wait_for_rekey({job})")),
        "{drift}"
    );
    ensure!(cluster.text("SELECT pagevault.is_encrypted('big')")? == "f");
    let error = cluster.error(&label("'plaintext'", "big"))?;
    ensure!(
        error.sqlstate == "55006" && error.hint.contains(&format!("cancel_rekey({job})")),
        "{error}"
    );

    cluster.sql(&format!("SELECT pagevault.cancel_rekey({job})"))?;
    let drift = cluster.text(DRIFT)?;
    ensure!(
        drift.starts_with("big encrypted <- cancelled, ")
            && drift.contains(&format!("SELECT pagevault.resume_rekey({job})")),
        "{drift}"
    );
    ensure!(cluster.text(ALL)? == before, "a mixture is not readable");
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    cluster.sql(&format!("SELECT pagevault.resume_rekey({job})"))?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('big'::regclass, '60s')")? == "t");
    assert_sealed(&cluster.family_files("big")?)?;
    ensure!(
        cluster.text(
            "SELECT DISTINCT cipher FROM pagevault.relations WHERE relation = 'big'::regclass"
        )? == "aes-128-xts"
    );
    ensure!(cluster.text(DRIFT)? == "none", "{}", cluster.text(DRIFT)?);
    ensure!(cluster.text(ALL)? == before, "contents differ");
    cluster.finish()
}

#[test]
fn decryption_is_rolled_back_with_its_transaction() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0")?;
    cluster.sql("SELECT pagevault.encrypt('small')")?;
    cluster.sql(&format!("BEGIN; {}; ROLLBACK", label("'plaintext'", "small")))?;
    assert_sealed(&cluster.files("small")?)?;
    ensure!(cluster.text(JOBS)? == "none");
    // A function is part of a transaction too; so this is a job.
    cluster.sql("SELECT pagevault.decrypt('small')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('small'::regclass, '60s')")? == "t");
    assert_plain(&cluster.files("small")?)?;
    let error = cluster.error(
        "BEGIN; SELECT pagevault.encrypt('big'); SELECT pagevault.wait_for_rekey('big'::regclass)",
    )?;
    ensure!(error.sqlstate == "25001", "{error}");
    cluster.finish()
}

/// Returns the number of the job, or null if none was needed, even if an event trigger has created
/// another job meanwhile.
#[test]
fn functions_return_their_job() -> Result<()> {
    let cluster = cluster("pagevault.rekey_workers = 0")?;
    cluster.sql(
        "CREATE TABLE other AS SELECT * FROM big;
         CREATE FUNCTION another() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
             IF NOT EXISTS (SELECT FROM pg_seclabel WHERE objoid = 'other'::regclass) THEN
                 SECURITY LABEL FOR pagevault ON TABLE other IS 'encrypted';
             END IF; END $$;
         CREATE EVENT TRIGGER labels ON ddl_command_end WHEN TAG IN ('SECURITY LABEL')
             EXECUTE FUNCTION another()",
    )?;
    let job = |call: &str| cluster.text(&format!("SELECT coalesce(pagevault.{call}, 0)"));
    let of = |relation: &str| {
        cluster.text(&format!(
            "SELECT max(job) FROM pagevault.rekey_jobs WHERE relation = '{relation}'::regclass"
        ))
    };
    for function in ["encrypt", "reconcile"] {
        let made = job(&format!("{function}('big')"))?;
        ensure!(made == of("big")?, "{function}: {made}, not {}", of("big")?);
        ensure!(of("other")? == "2", "{function}: {}", of("other")?);
        cluster.sql(&format!("SELECT pagevault.cancel_rekey({made})"))?;
        ensure!(job(&format!("{function}('small')"))? == "0", "{function} of a small table");
    }
    // This relation never had a key; the other one has.
    ensure!(job("decrypt('big')")? == "0", "nothing to decrypt");
    ensure!(job("decrypt('small')")? == of("small")?, "{}", of("small")?);
    cluster.finish()
}

#[test]
fn a_database_is_encrypted_and_decrypted() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0")?;
    cluster.sql(
        "CREATE SCHEMA app; CREATE TABLE app.parts (id int, name text) PARTITION BY RANGE (id);
         CREATE TABLE app.low PARTITION OF app.parts FOR VALUES FROM (0) TO (100);
         INSERT INTO app.parts SELECT i, 'x' FROM generate_series(0, 99) i;
         CREATE MATERIALIZED VIEW app.view AS SELECT count(*) FROM big; CREATE SEQUENCE numbers;
         CREATE TABLE open AS SELECT 1 AS id",
    )?;
    cluster.sql(&label("'plaintext'", "open"))?;
    let before = cluster.text(ALL)?;
    // Each large relation has a job. Small ones are encrypted at once and have none. Rows of
    // catalogs follow.
    let reported = column(
        &mut cluster.client()?,
        "SELECT concat_ws(' ', relation, (job > 0)::text) FROM pagevault.encrypt_database()",
    )?;
    for row in ["big true", "small", "app.low", "numbers", "pg_class", "pg_statistic"] {
        ensure!(reported.iter().any(|reported| reported == row), "{row}: {reported:?}");
    }
    ensure!(
        !reported.iter().any(|row| row.starts_with("open") || row.contains("pg_toast")),
        "{reported:?}"
    );
    let wait = "SELECT coalesce(bool_and(pagevault.wait_for_rekey(job, '60s')), true) FROM pagevault.rekey_jobs";
    ensure!(cluster.text(wait)? == "t");
    ensure!(cluster.text(DRIFT)? == "none", "{}", cluster.text(DRIFT)?);
    cluster.sql("CHECKPOINT")?;
    for relation in ["big", "small", "app.low", "app.view", "numbers", "pg_class", "pg_statistic"] {
        assert_sealed(&cluster.files(relation)?)?;
    }
    assert_plain(&cluster.files("open")?)?;
    // Everything is encrypted already.
    ensure!(cluster.text("SELECT count(*) FROM pagevault.encrypt_database()")? == "0");

    let jobs = cluster.text("SELECT count(job) FROM pagevault.rotate_all_data_keys()")?;
    ensure!(jobs.parse::<i64>()? > 5, "{jobs} jobs");
    ensure!(cluster.text(wait)? == "t");
    ensure!(cluster.text(ALL)? == before, "contents differ");

    let reported = "SELECT count(*) = count(job) AND bool_or(relation = 'big'::regclass)
                  FROM pagevault.decrypt_database()";
    ensure!(cluster.text(reported)? == "t", "not all by jobs");
    ensure!(cluster.text(wait)? == "t");
    cluster.sql("CHECKPOINT")?;
    for relation in ["big", "small", "app.low", "app.view", "numbers", "pg_class"] {
        assert_plain(&cluster.files(relation)?)?;
    }
    ensure!(
        cluster.text("SELECT count(*) FROM pg_seclabels WHERE label LIKE 'encrypted%'")? == "0"
    );
    ensure!(cluster.text(ALL)? == before, "contents differ");
    cluster.restart()?;
    ensure!(cluster.text(ALL)? == before, "contents differ after a restart");
    cluster.finish()
}

#[test]
fn looking_for_jobs_after_a_start_assigns_no_transaction_ids() -> Result<()> {
    let (cluster, _keys) =
        Cluster::with_keys(&Settings::default().conf("log_min_messages = debug1"))?;
    cluster.sql("CREATE DATABASE other")?;
    // As long as no transaction changes anything: standbys must not see new transaction ids either,
    // on a server that logical slots depend on.
    let next = "SELECT pg_snapshot_xmax(pg_current_snapshot())";
    let before = cluster.text(next)?;
    cluster.restart()?;
    cluster.eventually(
        "SELECT wait_event_type FROM pg_stat_activity WHERE backend_type = 'pagevault rekey launcher'",
        "Extension",
    )?;
    let after = cluster.text(next)?;
    ensure!(after == before, "the next transaction was to be {before}, and is {after}");
    cluster.finish()
}

/// They belong to no partition, and their table has no file.
#[test]
fn sequences_of_partitioned_tables_are_rekeyed_too() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE p (id bigint GENERATED ALWAYS AS IDENTITY, n serial) PARTITION BY LIST (n);
         CREATE TABLE one PARTITION OF p FOR VALUES IN (1);
         INSERT INTO p DEFAULT VALUES",
    )?;
    let check = |wanted: &str| -> Result<()> {
        cluster
            .sql("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs; CHECKPOINT")?;
        for name in ["p_id_seq", "p_n_seq", "one"] {
            let verify =
                format!("SELECT concat(state, data_key_version) FROM pagevault.verify('{name}')");
            let found = cluster.text(&verify)?;
            ensure!(found == wanted, "{name}: {found} instead of {wanted}");
        }
        Ok(())
    };
    check("encrypted1")?;
    cluster.sql("SELECT pagevault.rotate_data_key('p')")?;
    check("encrypted2")?;
    let all = "SELECT string_agg(relation::text, ' ' ORDER BY relation::text)
         FROM pagevault.rotate_all_data_keys() WHERE relation::oid >= 16384";
    let jobs = cluster.text(all)?;
    ensure!(jobs == "one p_id_seq p_n_seq", "jobs for {jobs}");
    check("encrypted3")?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('p')")? == "f", "p has no file");
    cluster.sql("DROP TABLE one")?;
    cluster.sql("SELECT pagevault.rotate_data_key('p')")?;
    cluster.sql("CREATE TABLE one PARTITION OF p DEFAULT; INSERT INTO p DEFAULT VALUES")?;
    cluster.sql("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs")?;
    cluster.sql("SELECT * FROM pagevault.decrypt_database()")?;
    check("plaintext")?;
    cluster.finish()
}

/// So does `encrypt()` if the label takes a table out of a key group, and an event trigger puts
/// another one into it.
#[test]
fn a_label_that_changes_the_key_group_returns_its_job() -> Result<()> {
    let cluster = cluster("pagevault.rekey_workers = 0")?;
    cluster.sql(
        "SELECT pagevault.create_key_group('acme');
         SELECT pagevault.set_key_group_master_key('acme', 'local', 'main');
         CREATE TABLE other AS SELECT * FROM big",
    )?;
    cluster.sql(&label("'encrypted key_group=acme'", "big"))?;
    cluster.sql("SELECT pagevault.cancel_rekey(job) FROM pagevault.rekey_jobs")?;
    cluster.sql(
        "CREATE FUNCTION another() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
             IF NOT EXISTS (SELECT FROM pg_seclabel WHERE objoid = 'other'::regclass) THEN
                 SECURITY LABEL FOR pagevault ON TABLE other IS 'encrypted key_group=acme';
             END IF; END $$;
         CREATE EVENT TRIGGER labels ON ddl_command_end WHEN TAG IN ('SECURITY LABEL')
             EXECUTE FUNCTION another()",
    )?;
    let made = cluster.text("SELECT coalesce(pagevault.encrypt('big'), 0)")?;
    let jobs = "SELECT string_agg(concat_ws(' ', job, relation, kind), ', ' ORDER BY job)
        FROM pagevault.rekey_jobs WHERE state = 'waiting'";
    ensure!(cluster.text(jobs)? == "2 other encrypt, 3 big encrypt", "{}", cluster.text(jobs)?);
    ensure!(made == "3", "it has returned {made}");
    cluster.finish()
}
