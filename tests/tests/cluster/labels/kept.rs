//! Encryption that commands must not take away: of tables that get another parent, another name, or
//! another owner.

use pagevault_tests::Installation;
use pagevault_tests::cluster::expect_error;

use super::*;

/// The table was created by the same session, last of all, and has no block, TOAST table or index.
#[test]
fn partitions_stay_encrypted_when_they_are_attached_and_detached() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "CREATE TABLE p (id int) PARTITION BY LIST (id)")?;
    for (number, statement) in
        ["ALTER TABLE p ATTACH PARTITION t FOR VALUES IN (1)", "ALTER TABLE p DETACH PARTITION t"]
            .into_iter()
            .enumerate()
    {
        let create = match number {
            0 => "CREATE TABLE t (id int)",
            _ => "CREATE TABLE t PARTITION OF p FOR VALUES IN (1)",
        };
        run_sql(&mut client, create)?;
        run_sql(&mut client, &label("TABLE t", "'encrypted'"))?;
        run_sql(&mut client, statement)?;
        run_sql(&mut client, "INSERT INTO t VALUES (1)")?;
        expect(&cluster, "t", DEFAULT).context(statement)?;
        run_sql(&mut client, "DROP TABLE t")?;
    }
    // Encrypted by something that does not apply any more; and rolled back.
    run_sql(&mut client, &label("TABLE p", "'plaintext'"))?;
    for end in ["COMMIT", "ROLLBACK"] {
        run_sql(&mut client, "SET pagevault.default_encryption = on")?;
        run_sql(&mut client, "CREATE TABLE t (id int)")?;
        run_sql(&mut client, "RESET pagevault.default_encryption")?;
        run_sql(&mut client, "BEGIN; ALTER TABLE p ATTACH PARTITION t FOR VALUES IN (1)")?;
        run_sql(&mut client, end)?;
        run_sql(&mut client, "INSERT INTO t VALUES (1)")?;
        expect(&cluster, "t", DEFAULT).context(end)?;
        run_sql(&mut client, "DROP TABLE t")?;
    }
    drop(client);
    cluster.finish()
}

/// What is decided for a partition depends on all tables above it.
#[test]
fn partitions_below_an_attached_table_follow_it() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    run_sql(
        &mut client,
        "CREATE TABLE top (id int) PARTITION BY LIST (id);
         CREATE TABLE mid (id int) PARTITION BY LIST (id);
         CREATE TABLE leaf PARTITION OF mid FOR VALUES IN (1); CREATE TABLE other (id int)",
    )?;
    run_sql(&mut client, &label("TABLE top", "'encrypted'"))?;
    for statement in [
        "INSERT INTO leaf VALUES (1)",
        "BEGIN",
        "LOCK leaf",
        "TRUNCATE other",
        "ALTER TABLE top ATTACH PARTITION mid FOR VALUES IN (1)",
        "TRUNCATE leaf",
        "INSERT INTO leaf VALUES (1)",
        "COMMIT",
    ] {
        run_sql(&mut client, statement)?;
    }
    expect(&cluster, "leaf", DEFAULT)?;
    drop(client);
    cluster.finish()
}

/// An owner can give a table the name of a copy by pg_squeeze, of another table that is plaintext.
#[test]
fn names_of_pg_squeeze_copies_do_not_avoid_encryption() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "CREATE SCHEMA enc; SET search_path = enc")?;
    run_sql(&mut client, &label("SCHEMA enc", "'encrypted'"))?;
    run_sql(&mut client, "CREATE TABLE open (id int)")?;
    run_sql(&mut client, &label("TABLE open", "'plaintext'"))?;
    let oid = text(&mut client, "SELECT 'open'::regclass::oid")?;
    for statement in [
        "TRUNCATE tmp",
        "REINDEX TABLE tmp",
        "VACUUM FULL tmp",
        "ALTER TABLE tmp SET TABLESPACE space",
        "ALTER TABLE tmp ALTER name TYPE varchar(50)",
    ] {
        run_sql(&mut client, "CREATE TABLE secret (id int PRIMARY KEY, name varchar(20))")?;
        run_sql(&mut client, "INSERT INTO secret VALUES (1, 'x')")?;
        run_sql(&mut client, &format!("ALTER TABLE secret RENAME TO tmp_{oid}"))?;
        run_sql(&mut client, &statement.replace("tmp", &format!("tmp_{oid}")))?;
        run_sql(&mut client, &format!("ALTER TABLE tmp_{oid} RENAME TO secret"))?;
        expect(&cluster, "enc.secret", DEFAULT).context(statement)?;
        run_sql(&mut client, "DROP TABLE secret")?;
    }
    run_sql(&mut client, &format!("CREATE TABLE tmp_{oid} (id int)"))?;
    expect(&cluster, &format!("enc.tmp_{oid}"), DEFAULT)?;
    drop(client);
    cluster.finish()
}

/// A sequence in plaintext stays so while a table in plaintext owns it.
#[test]
fn sequences_that_lose_their_owner_are_encrypted_where_others_are() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE SCHEMA enc")?;
    cluster.sql(&label("SCHEMA enc", "'encrypted'"))?;
    cluster.sql("CREATE TABLE open (id int); CREATE SEQUENCE s OWNED BY open.id")?;
    cluster.sql(&label("TABLE open", "'plaintext'"))?;
    cluster.sql("ALTER TABLE open SET SCHEMA enc")?;
    let sealed = "SELECT encrypted FROM pagevault.relations WHERE relation = 'enc.s'::regclass";
    ensure!(cluster.text(sealed)? == "f", "the sequence is encrypted already");
    cluster.sql("ALTER SEQUENCE enc.s OWNED BY NONE")?;
    ensure!(cluster.text(sealed)? == "t", "the sequence is in plaintext");
    cluster.finish()
}

/// CREATE RULE made views of tables until 15. The label stays, and says nothing any more.
#[test]
fn the_owner_removes_the_label_of_a_view_that_was_a_table() -> Result<()> {
    if Installation::get()?.major > 15 {
        eprintln!("skipped: PostgreSQL 16 makes no views of tables");
        return Ok(());
    }
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "SELECT pagevault.create_key_group('acme');
         SELECT pagevault.set_key_group_master_key('acme', 'local', 'main');
         CREATE ROLE bob; GRANT ALL ON SCHEMA public TO bob",
    )?;
    for wanted in ["'encrypted'", "'encrypted key_group=acme'"] {
        cluster.sql("CREATE TABLE v (id int)")?;
        cluster.sql(&label("TABLE v", wanted))?;
        cluster.sql("ALTER TABLE v OWNER TO bob")?;
        let mut bob = cluster.client()?;
        run_sql(&mut bob, "SET ROLE bob")?;
        run_sql(&mut bob, "CREATE RULE \"_RETURN\" AS ON SELECT TO v DO INSTEAD SELECT 1 AS id")?;
        expect_error(&mut bob, &label("VIEW v", "'encrypted'"))?;
        run_sql(&mut bob, &label("VIEW v", "NULL"))?;
        drop(bob);
        let left = "SELECT count(*) FROM pg_seclabels WHERE objoid = 'v'::regclass";
        ensure!(cluster.text(left)? == "0", "the label is still there");
        cluster.sql("DROP VIEW v")?;
    }
    cluster.finish()
}
