//! Functions that change keys or jobs refuse a read-only transaction.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql};
use pagevault_tests::{Cluster, Settings};

/// Functions that change nothing in the keystore.
const READERS: [&str; 8] = [
    "is_encrypted",
    "verify",
    "drift",
    "check_provider",
    "wait_for_rekey",
    "unlock",
    "key_group_names",
    "report",
];

#[test]
fn a_read_only_transaction_changes_no_key() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE DATABASE other")?;
    cluster.sql("CREATE TABLE t (id int); INSERT INTO t VALUES (1)")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let mut client = cluster.client()?;
    let functions = column(
        &mut client,
        "SELECT DISTINCT proname::text FROM pg_proc p
         WHERE pronamespace = 'pagevault'::regnamespace AND prokind = 'f'
           AND has_function_privilege('pagevault_admin', p.oid, 'EXECUTE')
           AND proname NOT LIKE '%rows' ORDER BY 1",
    )?;
    let calls = [
        "SELECT pagevault.add_provider('p', 'file', '{}')",
        "SELECT pagevault.alter_provider('keys', '{}')",
        "SELECT pagevault.drop_provider('keys')",
        "SELECT pagevault.set_cluster_master_key('keys', 'other')",
        "SELECT pagevault.set_database_master_key('keys', 'other')",
        "SELECT pagevault.add_cluster_master_key('keys', 'other')",
        "SELECT pagevault.add_database_master_key('keys', 'other')",
        "SELECT pagevault.drop_cluster_master_key('keys', 'main')",
        "SELECT pagevault.drop_database_master_key('keys', 'main')",
        "SELECT pagevault.create_key_group('acme')",
        "SELECT pagevault.drop_key_group('acme')",
        "SELECT pagevault.set_key_group_master_key('acme', 'keys', 'other')",
        "SELECT pagevault.add_key_group_master_key('acme', 'keys', 'other')",
        "SELECT pagevault.drop_key_group_master_key('acme', 'keys', 'other')",
        "SELECT pagevault.rotate_key_group_master_key('acme')",
        "SELECT pagevault.rotate_key_group_key('acme')",
        "SELECT * FROM pagevault.shred_key_group('acme', 'acme')",
        "SELECT pagevault.rotate_cluster_master_key()",
        "SELECT pagevault.rotate_database_master_key()",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.rotate_wal_key()",
        "SELECT pagevault.rotate_data_key('t')",
        "SELECT * FROM pagevault.rotate_all_data_keys()",
        "SELECT pagevault.encrypt('t')",
        "SELECT pagevault.encrypt('pg_statistic')",
        "SELECT pagevault.decrypt('t')",
        "SELECT pagevault.decrypt('pg_statistic')",
        "SELECT * FROM pagevault.encrypt_database()",
        "SELECT * FROM pagevault.decrypt_database()",
        "SELECT * FROM pagevault.encrypt_catalogs()",
        "SELECT pagevault.reconcile('t')",
        "SELECT pagevault.pause_rekey(1)",
        "SELECT pagevault.resume_rekey(1)",
        "SELECT pagevault.cancel_rekey(1)",
        "SELECT * FROM pagevault.shred('t', 'public.t')",
        "SELECT * FROM pagevault.shred_schema('public', 'public')",
        "SELECT * FROM pagevault.shred_database('other', 'other')",
        "SELECT * FROM pagevault.shred_former_files('postgres')",
    ];
    run_sql(&mut client, "SET default_transaction_read_only = on")?;
    for call in calls {
        let said = expect_error(&mut client, call)?;
        ensure!(said.sqlstate == "25006", "{call}: {said}");
    }
    for function in functions {
        let called = calls.iter().any(|call| call.contains(&format!("pagevault.{function}(")));
        ensure!(called || READERS.contains(&function.as_str()), "{function} is not tried here");
    }
    cluster.finish()
}
