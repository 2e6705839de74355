//! Labels that name a key group, and groups themselves: names, rights, errors.

use pagevault_tests::installation::run;

use super::*;

#[test]
fn groups_are_made_and_dropped() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    let code = |call: &str| -> Result<String> {
        Ok(cluster.error(&format!("SELECT pagevault.{call}"))?.sqlstate)
    };
    for name in ["", "Acme", "a b", "-a", "a.b", &"a".repeat(64)] {
        ensure!(code(&format!("create_key_group('{name}')"))? == "42602", "{name}");
    }
    ensure!(code("create_key_group('acme')")? == "42710");
    ensure!(code("set_key_group_master_key('none', 'local', 'main')")? == "42704");
    ensure!(code("set_key_group_master_key('acme', 'none', 'main')")? == "42704");
    ensure!(code("rotate_key_group_key('none')")? == "42704");
    ensure!(code("drop_key_group('none')")? == "42704");
    // No key yet.
    cluster.sql("SELECT pagevault.create_key_group('new'); CREATE SCHEMA new")?;
    let label = "SECURITY LABEL FOR pagevault ON SCHEMA new IS 'encrypted key_group=new'";
    let error = cluster.error(label)?;
    ensure!(
        error.sqlstate == "55000" && error.hint.contains("set_key_group_master_key"),
        "{error}"
    );
    ensure!(code("rotate_key_group_key('new')")? == "55000");
    cluster.sql("SELECT pagevault.drop_key_group('new')")?;
    ensure!(cluster.error(label)?.sqlstate == "42704");
    // One in use is not dropped; it is when its keys are forgotten.
    cluster.sql("CREATE TABLE acme.t (id int)")?;
    ensure!(code("drop_key_group('acme')")? == "2BP01");
    cluster.set(&[("pagevault.keep_former_keys", "0")])?;
    cluster.sql("DROP TABLE acme.t")?;
    let kept = "SELECT data_keys FROM pagevault.key_groups WHERE key_group = 'acme'";
    after_checkpoints(&cluster, kept, "0")?;
    cluster.sql("SELECT pagevault.drop_key_group('acme')")?;
    // Its label stays, and says so.
    let error = cluster.error("CREATE TABLE acme.t (id int)")?;
    ensure!(error.sqlstate == "42704" && error.text().contains("acme"), "{error}");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift")? == "0");
    // A group of the same name is another one.
    cluster.sql(
        "SELECT pagevault.create_key_group('acme');
         SELECT pagevault.set_key_group_master_key('acme', 'of_acme', 'main'); CREATE TABLE acme.t (id int)",
    )?;
    let numbers =
        "SELECT string_agg(number::text, ',' ORDER BY number) FROM pagevault.key_group_names()";
    ensure!(cluster.text(numbers)? == "101,103", "{}", cluster.text(numbers)?);
    cluster.crash()?;
    ensure!(cluster.text(numbers)? == "101,103");
    cluster.finish()
}

/// Whoever holds the master key can lock what is in the group. So owners cannot choose it.
#[test]
fn only_administrators_change_groups() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    cluster.sql(
        "CREATE ROLE tenant LOGIN; GRANT ALL ON SCHEMA acme, public TO tenant; SET ROLE tenant;
         CREATE TABLE acme.t (id int); CREATE TABLE public.t (id int)",
    )?;
    for (statement, code) in [
        ("ON TABLE public.t IS 'encrypted key_group=acme'", "42501"),
        ("ON TABLE acme.t IS 'encrypted key_group=umbrella'", "42501"),
        ("ON TABLE acme.t IS 'plaintext'", "42501"),
        ("ON TABLE acme.t IS 'encrypted key_group=Acme'", "22023"),
        ("ON TABLE acme.t IS 'plaintext key_group=acme'", "22023"),
    ] {
        let statement = format!("SET ROLE tenant; SECURITY LABEL FOR pagevault {statement}");
        let error = cluster.error(&statement)?;
        ensure!(error.sqlstate == code, "{statement}: {error}");
    }
    // A label of the table's own leaves it in the group of its schema.
    cluster.sql(
        "SET ROLE tenant; SECURITY LABEL FOR pagevault ON TABLE acme.t IS 'encrypted aes-128-xts'",
    )?;
    ensure!(groups_in(&cluster, "acme")? == "acme 1");
    cluster
        .sql("SECURITY LABEL FOR pagevault ON TABLE public.t IS 'encrypted key_group=umbrella'")?;
    ensure!(groups_in(&cluster, "public")? == "umbrella 1");
    let error = cluster
        .error("SET ROLE tenant; SECURITY LABEL FOR pagevault ON TABLE public.t IS 'encrypted'")?;
    ensure!(error.sqlstate == "42501", "{error}");
    // Without any label that names a group it stays where it is, and its owner cannot change that.
    cluster.sql(
        "SECURITY LABEL FOR pagevault ON TABLE acme.t IS NULL;
         SECURITY LABEL FOR pagevault ON SCHEMA acme IS NULL; ALTER SCHEMA acme OWNER TO tenant",
    )?;
    for object in ["TABLE acme.t", "SCHEMA acme"] {
        let label = format!("SECURITY LABEL FOR pagevault ON {object} IS 'encrypted'");
        let error = cluster.error(&format!("SET ROLE tenant; {label}"))?;
        ensure!(error.sqlstate == "42501", "{object}: {error}");
        cluster.sql("SET ROLE tenant; TRUNCATE acme.t")?;
        ensure!(groups_in(&cluster, "acme")? == "acme 1");
    }
    let error = cluster
        .error("SECURITY LABEL FOR pagevault ON DATABASE postgres IS 'encrypted key_group=acme'")?;
    ensure!(error.sqlstate == "0A000" && !error.hint.is_empty(), "{error}");
    cluster.finish()
}

/// A new file does not say whose it is, if several relations are locked.
#[test]
fn storage_of_several_groups_is_not_mixed_up() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    cluster.sql("CREATE TABLE public.plain (id int)")?;
    let all = count(&cluster, "acme.t")?;
    // It goes where it belongs.
    let (acme, umbrella, public) = (
        groups_in(&cluster, "acme")?,
        groups_in(&cluster, "umbrella")?,
        groups_in(&cluster, "public")?,
    );
    cluster.sql("CREATE TABLE public.with_key (id serial PRIMARY KEY, name text)")?;
    for statements in [
        "TRUNCATE acme.t, umbrella.t, public.t, public.with_key RESTART IDENTITY",
        "BEGIN; TRUNCATE acme.t; TRUNCATE umbrella.t; COMMIT",
        "BEGIN; TRUNCATE public.t; TRUNCATE acme.t; COMMIT",
        "BEGIN; TRUNCATE acme.t; TRUNCATE public.plain; COMMIT",
        "BEGIN; REINDEX TABLE acme.t; REINDEX TABLE umbrella.t; COMMIT",
        "BEGIN; LOCK umbrella.t; REINDEX TABLE acme.t; COMMIT",
        "BEGIN; LOCK public.plain; ALTER SEQUENCE acme.t_id_seq RESTART; COMMIT",
        "BEGIN; ALTER TABLE acme.t ALTER id TYPE bigint; ALTER TABLE umbrella.t ALTER id TYPE bigint; COMMIT",
        "BEGIN; ALTER TABLE acme.t ALTER id TYPE int; CLUSTER public.t USING t_pkey; CLUSTER umbrella.t USING t_pkey; COMMIT",
    ] {
        let inside = statements.trim_start_matches("BEGIN; ").trim_end_matches("; COMMIT");
        cluster.sql(&format!("BEGIN; {inside}; ROLLBACK"))?;
        for schema in ["acme", "umbrella", "public"] {
            ensure!(count(&cluster, &format!("{schema}.t"))? == all, "{schema}: {statements}");
        }
        cluster.sql(statements)?;
        ensure!(
            groups_in(&cluster, "acme")? == acme,
            "{statements}: {}",
            groups_in(&cluster, "acme")?
        );
        ensure!(groups_in(&cluster, "umbrella")? == umbrella, "{statements}");
        let strangers =
            "SELECT count(*) FROM pagevault.relations r JOIN pg_class c ON c.oid = r.relation
            WHERE c.relnamespace = 'public'::regnamespace AND r.key_group IS NOT NULL";
        ensure!(cluster.text(strangers)? == "0", "{statements}");
        for schema in ["acme", "umbrella", "public"] {
            cluster.sql(&format!(
                "DELETE FROM {schema}.t; INSERT INTO {schema}.t (name) SELECT name FROM ({ROWS}) r (i, name)"
            ))?;
        }
    }
    // What was plaintext may be encrypted, as beside any encrypted relation (docs/policy.md).
    cluster.sql("DROP TABLE public.with_key; DROP TABLE public.plain")?;
    ensure!(groups_in(&cluster, "public")? == public);
    // New relations, and such as are filled anew, are told apart.
    cluster.sql(
        "BEGIN; LOCK acme.t, umbrella.t; CREATE TABLE acme.u AS SELECT * FROM umbrella.t;
         CREATE TABLE umbrella.u AS SELECT * FROM acme.t; CREATE TABLE public.u AS SELECT 1 AS id;
         ALTER TABLE acme.t ALTER id TYPE bigint; COMMIT;
         BEGIN; TRUNCATE acme.t; TRUNCATE acme.u; COMMIT",
    )?;
    cluster.sql("BEGIN; TRUNCATE acme.u; CREATE SEQUENCE public.lone; COMMIT")?;
    let lone = "SELECT count(*) FROM pagevault.relations
        WHERE relation = 'public.lone'::regclass AND key_group IS NOT NULL";
    ensure!(cluster.text(lone)? == "0");
    cluster.sql("DROP SEQUENCE public.lone; ALTER TABLE acme.u ADD number serial")?;
    ensure!(groups_in(&cluster, "acme")? == "acme 5", "{}", groups_in(&cluster, "acme")?);
    ensure!(groups_in(&cluster, "umbrella")? == "umbrella 4");
    ensure!(groups_in(&cluster, "public")? == "- 3", "{}", groups_in(&cluster, "public")?);
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0");
    // Without a label an index follows its table. Of a table only the former file says in which
    // group it is.
    cluster.sql("SECURITY LABEL FOR pagevault ON SCHEMA acme IS NULL")?;
    cluster.sql("BEGIN; LOCK umbrella.t; REINDEX TABLE acme.t; COMMIT")?;
    cluster.sql("INSERT INTO acme.t (name) VALUES ('x')")?;
    cluster.make_tablespace("other")?;
    let move_it = "BEGIN; LOCK umbrella.t; ALTER TABLE acme.t SET TABLESPACE other; COMMIT";
    let error = cluster.error(move_it)?;
    ensure!(error.sqlstate == "0A000" && !error.hint.is_empty(), "{error}");
    ensure!(groups_in(&cluster, "acme")? == "acme 5", "{}", groups_in(&cluster, "acme")?);
    cluster.finish()
}

/// A dump has the names of groups, and is restored where they exist.
#[test]
fn dumps_name_the_group() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    cluster.sql("CREATE DATABASE other")?;
    let file = cluster.directory().join("dump.sql");
    run(cluster.program("pg_dump").args(["--dbname=postgres", "--file"]).arg(&file))?;
    let script = std::fs::read_to_string(&file)?;
    ensure!(script.contains("encrypted key_group=acme"), "the dump does not name it");
    let mut client = cluster.client_to("other")?;
    run_sql(&mut client, "CREATE EXTENSION pagevault; CREATE SCHEMA acme;
        SECURITY LABEL FOR pagevault ON SCHEMA acme IS 'encrypted key_group=acme'; CREATE TABLE acme.t (id int)")?;
    let databases =
        "SELECT array_to_string(databases, ',') FROM pagevault.key_groups WHERE key_group = 'acme'";
    ensure!(text(&mut client, databases)? == "other,postgres");
    let error = expect_error(
        &mut client,
        "CREATE SCHEMA x; SECURITY LABEL FOR pagevault ON SCHEMA x IS 'encrypted key_group=none'",
    )?;
    ensure!(error.sqlstate == "42704", "{error}");
    drop(client);
    cluster.finish()
}

/// A new relation of a transaction that has locked relations of a group gets no key of that group:
/// in plaintext it would keep it for ever, and the group could not end.
#[test]
fn new_relations_get_no_key_of_a_group_that_others_are_in() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    // Inner commands, and such as fail, do not change what an outer one is.
    cluster.sql(
        "CREATE FUNCTION inner_commands() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
            CREATE TABLE public.from_inside (id int);
            TRUNCATE acme.t;
            BEGIN CREATE TABLE public.from_inside (id int); EXCEPTION WHEN duplicate_table THEN NULL; END;
            REINDEX TABLE acme.t;
            RETURN 1; END $$;
         BEGIN; TRUNCATE acme.t;
         CREATE TABLE public.plain (id int, name text);
         CREATE TABLE public.filled AS SELECT inner_commands() AS id;
         CREATE INDEX ON public.plain (id);
         CREATE MATERIALIZED VIEW public.view AS SELECT 1 AS id;
         CREATE TABLE public.numbered (id serial);
         CREATE TABLE acme.also (id serial PRIMARY KEY, name text);
         CREATE INDEX ON acme.t (name);
         INSERT INTO acme.t (name) VALUES ('x'); COMMIT;
         BEGIN; LOCK acme.t; ALTER TABLE public.plain ADD PRIMARY KEY (id); REFRESH MATERIALIZED VIEW public.view;
         ALTER TABLE public.numbered ALTER id TYPE bigint; COMMIT",
    )?;
    let strangers =
        "SELECT count(*) FROM pagevault.data_keys k JOIN pg_class c ON c.oid = k.relation
         WHERE k.key_group = 'acme' AND c.relnamespace = 'public'::regnamespace";
    ensure!(cluster.text(strangers)? == "0", "{}", cluster.text(strangers)?);
    ensure!(groups_in(&cluster, "acme")? == "acme 7", "{}", groups_in(&cluster, "acme")?);
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0");
    cluster.sql("DROP SCHEMA acme CASCADE")?;
    cluster.sql("SELECT pagevault.shred_key_group('acme', 'acme')")?;
    ensure!(cluster.text("SELECT count(*) FROM public.numbered")? == "0");
    cluster.finish()
}

/// Keys are not rolled back, so a job brings it into the group: that is no plaintext to refuse.
#[test]
fn an_empty_table_is_attached_within_a_transaction() -> Result<()> {
    let settings = Settings::default().conf("pagevault.enforce_encryption = on");
    let (cluster, _keys) = with_groups(&settings)?;
    cluster.sql(
        "CREATE TABLE p (id int) PARTITION BY LIST (id);
         SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted key_group=acme'; CREATE TABLE t (id int)",
    )?;
    cluster.sql("BEGIN; ALTER TABLE p ATTACH PARTITION t FOR VALUES IN (1); COMMIT")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t");
    let group = "SELECT key_group FROM pagevault.relations WHERE relation = 't'::regclass";
    ensure!(cluster.text(group)? == "acme", "{}", cluster.text(group)?);
    cluster.finish()
}

/// A label of a transaction that has not ended may bring relations into the group, as soon as it
/// commits.
#[test]
fn a_group_is_not_dropped_while_labels_change() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default().conf("max_prepared_transactions = 2"))?;
    cluster.sql("CREATE TABLE t (id int)")?;
    let label = "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted key_group=acme'";
    cluster.sql(&format!("BEGIN; {label}; PREPARE TRANSACTION 'p'"))?;
    let error = cluster.error("SELECT pagevault.drop_key_group('acme')")?;
    ensure!(error.sqlstate == "55006" && error.hint.contains("pg_prepared_xacts"), "{error}");
    ensure!(error.text().contains("Nothing was destroyed."), "{error}");
    cluster.sql("COMMIT PREPARED 'p'")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass)")?;
    ensure!(cluster.error("SELECT pagevault.drop_key_group('acme')")?.sqlstate == "2BP01");
    cluster.sql("SELECT pagevault.drop_key_group('umbrella')")?;
    cluster.finish()
}
