//! A locked key group locks its own partitions, and those of nobody else.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::{Cluster, KeyFile, Settings};
use postgres::Client;

use crate::key_groups::with_groups;
use crate::revalidate::{put_back, replace, strict};

/// One partition of each tenant and one of nobody; a table that refers to them; inheritance without
/// partitions.
const TABLES: &str =
    "CREATE TABLE o (tenant text, v text, PRIMARY KEY (tenant, v)) PARTITION BY LIST (tenant);
    CREATE TABLE acme.of_acme PARTITION OF o FOR VALUES IN ('acme');
    CREATE TABLE umbrella.of_umbrella PARTITION OF o FOR VALUES IN ('umbrella');
    CREATE TABLE plain PARTITION OF o DEFAULT;
    INSERT INTO o VALUES ('acme', 'a1'), ('umbrella', 'u1'), ('umbrella', 'u9'), ('plain', 'p1');
    CREATE TABLE referring (tenant text, v text, FOREIGN KEY (tenant, v) REFERENCES o);
    CREATE TABLE parent (v text);
    INSERT INTO parent VALUES ('p1');
    CREATE TABLE acme.child () INHERITS (parent);
    INSERT INTO acme.child VALUES ('a1')";

/// Plans of the session that are pruned when they begin.
const GENERIC: &str = "SET plan_cache_mode = force_generic_plan;
    PREPARE reads(text) AS SELECT v FROM o WHERE tenant = $1;
    PREPARE changes(text) AS UPDATE o SET v = v WHERE tenant = $1;
    PREPARE refers(text, text) AS INSERT INTO referring VALUES ($1, $2);
    EXECUTE reads('umbrella'); EXECUTE changes('umbrella');
    EXECUTE refers('umbrella', 'u1'); SELECT count(*) FROM o; SELECT count(*) FROM parent";

/// What reads a locked partition or child.
const READS: [&str; 17] = [
    "SELECT * FROM o",
    "SELECT * FROM o WHERE tenant = 'acme'",
    "SELECT v FROM o WHERE v > ''",
    "SET LOCAL enable_seqscan = off; SELECT v FROM o WHERE tenant = 'acme' AND v > ''",
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_indexscan = off;
     SET LOCAL enable_indexonlyscan = off; SELECT v FROM o WHERE tenant = 'acme' AND v > ''",
    "SELECT v FROM o WHERE ctid = '(0,1)'",
    "SELECT count(*) FROM plain WHERE EXISTS (SELECT FROM o WHERE tenant = 'acme')",
    "EXECUTE reads('acme')",
    "EXECUTE changes('acme')",
    "EXECUTE refers('acme', 'a1')",
    "SELECT * FROM parent",
    "UPDATE o SET v = v || 'x'",
    "DELETE FROM o WHERE v = 'a1'",
    "MERGE INTO o USING (VALUES ('acme')) n (t) ON o.tenant = n.t WHEN MATCHED THEN DELETE",
    // They look up rows in a partition that is determined while they run.
    "INSERT INTO o VALUES ('acme', 'a1') ON CONFLICT (tenant, v) DO UPDATE SET v = o.v RETURNING v",
    "INSERT INTO o VALUES ('acme', 'a1') ON CONFLICT DO NOTHING",
    "INSERT INTO o VALUES ('umbrella', 'u9') ON CONFLICT (tenant, v) DO UPDATE SET v = 'u3'",
];

/// What has nothing to do with a locked partition or child.
const OTHERS: [&str; 11] = [
    "SELECT * FROM o WHERE tenant = 'umbrella'",
    "SELECT * FROM o WHERE tenant IN ('umbrella', 'plain')",
    "EXECUTE reads('umbrella')",
    "EXECUTE changes('umbrella')",
    "EXECUTE refers('umbrella', 'u1')",
    "SELECT * FROM ONLY parent",
    "INSERT INTO o VALUES ('umbrella', 'u2'), ('plain', 'p2') RETURNING v",
    "COPY o FROM PROGRAM 'echo umbrella,u4' (FORMAT csv)",
    "UPDATE o SET v = 'p4' WHERE tenant = 'plain'",
    "DELETE FROM o WHERE tenant = 'plain'",
    "MERGE INTO o USING (VALUES ('u9')) n (v) ON o.tenant = 'umbrella' AND o.v = n.v
     WHEN MATCHED THEN DELETE",
];

/// What adds a row to a locked partition.
const INSERTS: [&str; 4] = [
    "INSERT INTO o VALUES ('acme', 'a2')",
    "INSERT INTO o VALUES ('acme', 'a1') ON CONFLICT (tenant, v) DO UPDATE SET v = 'a3'",
    "COPY o FROM PROGRAM 'echo acme,a4' (FORMAT csv)",
    "UPDATE o SET tenant = 'acme' WHERE tenant = 'umbrella' AND v LIKE 'u9%'",
];

fn cluster() -> Result<(Cluster, [KeyFile; 3], Client)> {
    let (mut cluster, keys) = with_groups(&strict().conf("autovacuum = off"))?;
    cluster.allow_log("was revoked");
    cluster.sql(TABLES)?;
    cluster.sql("VACUUM ANALYZE")?;
    let mut session = cluster.client()?;
    run_sql(&mut session, GENERIC)?;
    Ok((cluster, keys, session))
}

/// Each statement is refused because of the group.
fn are_refused(session: &mut Client, statements: &[&str]) -> Result<()> {
    let mut others = Vec::new();
    for statement in statements {
        let error = expect_error(session, &format!("BEGIN; {statement}"));
        run_sql(session, "ROLLBACK")?;
        match error {
            Ok(error) if error.sqlstate == "55000" && error.message.contains("locked") => {}
            Ok(error) => others.push(format!("{statement}: {error}")),
            Err(error) => others.push(format!("{statement}: {error:#}")),
        }
    }
    ensure!(others.is_empty(), "{others:#?}");
    Ok(())
}

/// Each statement is done, and undone.
fn are_done(session: &mut Client, statements: &[&str]) -> Result<()> {
    let mut refused = Vec::new();
    for statement in statements {
        let done = run_sql(session, &format!("BEGIN; {statement}"));
        run_sql(session, "ROLLBACK")?;
        refused.extend(done.err().map(|error| format!("{statement}: {error:#}")));
    }
    ensure!(refused.is_empty(), "{refused:#?}");
    Ok(())
}

const IN_BUFFERS: &str = "SELECT count(*) > 0 FROM pg_buffercache
    WHERE relfilenode = pg_relation_filenode('acme.of_acme')";

/// A cursor keeps pages of the partition in shared buffers. They are not read by any statement that
/// begins afterwards.
#[test]
fn a_locked_partition_locks_no_other() -> Result<()> {
    let (cluster, [_, acme, _], mut session) = cluster()?;
    let shows_buffers = cluster.installation().has_extension("pg_buffercache");
    if shows_buffers {
        cluster.sql("CREATE EXTENSION pg_buffercache")?;
    }
    let mut reader = cluster.client()?;
    run_sql(
        &mut reader,
        "BEGIN; DECLARE c CURSOR FOR SELECT * FROM acme.of_acme; FETCH 1 FROM c;
         SET LOCAL enable_seqscan = off;
         DECLARE i CURSOR FOR SELECT v FROM acme.of_acme WHERE tenant = 'acme'; FETCH 1 FROM i;
         RESET enable_seqscan;
         DECLARE h CURSOR FOR SELECT * FROM acme.child; FETCH 1 FROM h",
    )?;
    replace(&cluster, &acme, "another")?;
    cluster.eventually_logs(" in use, ")?;
    let in_buffers = !shows_buffers || cluster.text(IN_BUFFERS)? == "t";
    ensure!(in_buffers, "no page is in shared buffers");
    are_refused(&mut session, &READS)?;
    are_done(&mut session, &OTHERS)?;
    run_sql(&mut reader, "ROLLBACK")?;
    cluster.eventually_logs("None is left.")?;
    for session in [&mut session, &mut reader] {
        are_refused(session, &INSERTS)?;
    }
    are_refused(&mut session, &READS)?;
    are_done(&mut session, &OTHERS)?;
    put_back(&acme)?;
    cluster.eventually("SELECT count(*) FROM pagevault.key_groups WHERE state = 'locked'", "0")?;
    ensure!(cluster.text("SELECT count(*) FROM o")? == "4", "rows");
    cluster.finish()
}

/// Recovery has pages of the group under interim keys.
#[test]
fn a_partition_that_is_locked_after_a_crash_locks_no_other() -> Result<()> {
    let (mut cluster, [_, acme, _], session) = cluster()?;
    cluster.allow_log("locked");
    cluster.allow_log("pagevault");
    cluster.sql(
        "CHECKPOINT; UPDATE o SET v = v || 'x' WHERE v <> 'u1'; UPDATE parent SET v = v || 'x'",
    )?;
    acme.take_away()?;
    drop(session);
    cluster.kill()?;
    cluster.start_server()?;
    let mut session = cluster.client()?;
    let others = OTHERS.iter().filter(|other| !other.starts_with("EXECUTE")).copied();
    are_done(&mut session, &others.collect::<Vec<_>>())?;
    let reads = READS.iter().filter(|read| !read.starts_with("EXECUTE")).copied();
    are_refused(&mut session, &reads.collect::<Vec<_>>())?;
    are_refused(&mut session, &INSERTS)?;
    acme.bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    cluster.eventually("SELECT string_agg(v, ' ' ORDER BY v) FROM o", "a1x p1x u1 u9x")?;
    cluster.finish()
}

/// A plan that is pruned when it begins has not lost its other partitions.
#[test]
fn a_shredded_partition_refuses_no_other() -> Result<()> {
    let (cluster, _) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE p (id int) PARTITION BY LIST (id)")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted'")?;
    cluster.sql(
        "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1);
         CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2);
         INSERT INTO p VALUES (1), (2)",
    )?;
    let mut session = cluster.client()?;
    let prepare = "SET plan_cache_mode = force_generic_plan;
        PREPARE reads(int) AS SELECT count(*) FROM p WHERE id = $1";
    run_sql(&mut session, prepare)?;
    ensure!(text(&mut session, "EXECUTE reads(2)")? == "1", "before");
    cluster.sql("SELECT pagevault.shred('p1', confirm => 'public.p1')")?;
    ensure!(text(&mut session, "EXECUTE reads(2)")? == "1", "after");
    for statement in ["EXECUTE reads(1)", "SELECT * FROM p", "SELECT * FROM p WHERE id = 1"] {
        let error = expect_error(&mut session, statement)?;
        ensure!(error.message.contains("were destroyed"), "{statement}: {error}");
    }
    ensure!(cluster.text("SELECT count(*) FROM p WHERE id = 2")? == "1", "pruned by the planner");
    cluster.sql("INSERT INTO p VALUES (2) ON CONFLICT DO NOTHING")?;
    cluster.finish()
}
