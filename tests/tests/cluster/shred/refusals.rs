//! Cases in which shredding is refused, and operations that are refused afterwards.

use super::*;

#[test]
fn it_is_refused_unless_confirmed_and_complete() -> Result<()> {
    let (mut cluster, _keys) = cluster("pagevault.rekey_rate = 1MB")?;
    cluster.allow_log("there is");
    cluster.sql(
        "CREATE TABLE open (id int PRIMARY KEY); INSERT INTO open VALUES (1);
         CREATE ROLE bob LOGIN; GRANT pagevault_admin TO bob; CREATE ROLE eve LOGIN; ALTER TABLE u OWNER TO eve;
         CREATE FUNCTION hidden() RETURNS bigint LANGUAGE plpgsql AS
            $$ BEGIN RETURN (SELECT count(*) FROM pagevault.shred('t', 'public.t')); END $$;
         CREATE FUNCTION looped() RETURNS void LANGUAGE plpgsql AS
            $$ DECLARE r record; BEGIN FOR r IN SELECT * FROM pagevault.shred('t', 'public.t') LOOP END LOOP; END $$;
         CREATE FUNCTION plain() RETURNS bigint LANGUAGE sql AS
            $$ SELECT count(*) FROM pagevault.shred('t', 'public.t') $$;
         SET pagevault.default_encryption = on; CREATE TEMPORARY TABLE z (id int);
         CREATE TABLE mixed (id int); INSERT INTO mixed VALUES (1)",
    )?;
    let sums = ["t", "u"]
        .map(|table| format!("SELECT count(*) || ' ' || sum(hashtext(name)) FROM {table}"));
    let before = [cluster.text(&sums[0])?, cluster.text(&sums[1])?];
    let refused = |statement: &str, sqlstate: &str, part: &str| -> Result<()> {
        let error = cluster.error(statement)?;
        ensure!(error.sqlstate == sqlstate && error.text().contains(part), "{statement}: {error}");
        Ok(())
    };
    refused("SELECT pagevault.shred('t')", "42883", "does not exist")?;
    for name in ["t", "public.u", "PUBLIC.T", "yes", ""] {
        let statement = format!("SELECT * FROM pagevault.shred('t', '{name}')");
        refused(&statement, "22023", "confirm => 'public.t'")?;
    }
    refused("SELECT * FROM pagevault.shred_schema('public', 'publi')", "22023", "not confirmed")?;
    for statement in [
        format!("BEGIN; {SHRED}"),
        format!("SELECT 1; {SHRED}"),
        format!("EXPLAIN ANALYZE {SHRED}"),
        format!("CREATE TABLE proof AS {SHRED}"),
        format!("DO $$ BEGIN PERFORM count(*) FROM ({SHRED}) s; END $$"),
        "SELECT hidden()".to_owned(),
        "SELECT looped()".to_owned(),
        "SELECT plain()".to_owned(),
    ] {
        refused(&statement, "25001", "cannot run in a transaction block")?;
    }
    let mut reader = cluster.client()?;
    run_sql(&mut reader, "SET default_transaction_read_only = on")?;
    let error = expect_error(&mut reader, SHRED)?;
    let read_only = "cannot destroy data keys in a read-only transaction";
    ensure!(error.sqlstate == "25006" && error.message == read_only, "{error}");
    refused(
        "SELECT * FROM pagevault.shred('open', 'public.open')",
        "55000",
        "1 page of it is in plaintext",
    )?;
    refused("SELECT * FROM pagevault.shred('t_name', 'public.t_name')", "42809", "goes along")?;
    refused("SELECT * FROM pagevault.shred('t_id_seq', 'public.t_id_seq')", "42809", "goes along")?;
    refused("SELECT * FROM pagevault.shred('v', 'public.v')", "42809", "holds nothing")?;
    refused(
        "SELECT * FROM pagevault.shred('pg_statistic', 'pg_catalog.pg_statistic')",
        "42809",
        "part of the system",
    )?;
    refused(
        "SELECT * FROM pagevault.shred_schema('pagevault', 'pagevault')",
        "55000",
        "no relation",
    )?;
    refused("SELECT * FROM pagevault.shred_schema('pg_catalog', 'pg_catalog')", "42809", "system")?;
    refused(
        "SELECT * FROM pagevault.shred_database('postgres', 'postgres')",
        "55006",
        "connected",
    )?;
    refused("SELECT * FROM pagevault.shred_database('none', 'none')", "3D000", "does not exist")?;
    // The schema contains a plaintext table, so nothing is shredded.
    refused(
        "SELECT * FROM pagevault.shred_schema('public', 'public')",
        "55000",
        "not wholly encrypted",
    )?;
    // Owners may not shred, only administrators.
    let mut eve = cluster.client()?;
    run_sql(&mut eve, "SET ROLE eve")?;
    let error = expect_error(&mut eve, "SELECT * FROM pagevault.shred('u', 'public.u')")?;
    ensure!(error.sqlstate == "42501", "{error}");
    // One plaintext page is enough for a refusal.
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE mixed IS 'plaintext'")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('mixed'::regclass)")?;
    refused(
        "SELECT * FROM pagevault.shred('mixed', 'public.mixed')",
        "55000",
        "not wholly encrypted",
    )?;
    // A relation that is being rekeyed.
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    refused(SHRED, "55006", &format!("Rekey job {job} is not finished"))?;
    cluster.sql(&format!("SELECT pagevault.cancel_rekey({job})"))?;
    for (sum, before) in sums.iter().zip(before) {
        ensure!(cluster.text(sum)? == before, "contents differ after refusals");
    }
    // An administrator may, even without being superuser or owner.
    let mut bob = cluster.client()?;
    run_sql(&mut bob, "SET ROLE bob")?;
    run_sql(&mut bob, "SELECT * FROM pagevault.shred('u', 'public.u')")?;
    let error = cluster.error("SELECT * FROM u")?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    cluster.finish()
}

/// Neither a command nor a job may rewrite it.
#[test]
fn labels_are_refused() -> Result<()> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("were destroyed");
    cluster.sql("ALTER TABLE t ALTER id DROP DEFAULT; DROP SEQUENCE t_id_seq")?;
    cluster.sql(SHRED)?;
    cluster.sql("CHECKPOINT")?;
    let before = cluster.files("t")?.remove(0).states()?;
    for threshold in ["0", "8GB"] {
        for statement in [
            "SECURITY LABEL FOR pagevault ON TABLE t IS 'plaintext'",
            "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted aes-128-xts'",
            "SELECT pagevault.reconcile('t')",
            "SELECT pagevault.rotate_data_key('t')",
        ] {
            let set = format!("SET pagevault.rekey_threshold = '{threshold}'; ");
            let error = cluster.error(&(set + statement))?;
            ensure!(error.sqlstate == "55000", "{statement}: {error}");
            ensure!(error.message == "the data keys of public.t were destroyed", "{error}");
            ensure!(error.hint.contains("TRUNCATE"), "{error}");
        }
    }
    // Encryption of the whole database skips it.
    cluster.sql("SET pagevault.rekey_threshold = 0; SELECT pagevault.encrypt_database()")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(cluster.files("t")?.remove(0).states()? == before, "pages were written");
    // Rotation of all keys skips its keys.
    ensure!(
        cluster.text("SELECT count(*) FROM pagevault.rotate_all_data_keys()")? != "0",
        "no other job"
    );
    cluster.eventually(
        "SELECT count(*) FILTER (WHERE state <> 'done') || ' ' || count(*) FILTER (WHERE relation = 't'::regclass)
         FROM pagevault.rekey_jobs",
        "0 0",
    )?;
    cluster.sql("TRUNCATE t")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "0", "after TRUNCATE");
    cluster.finish()
}
