//! The scenarios.

use pagevault_tests::choice::Named;

/// While what calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum During {
    /// A statement.
    Statement,
    /// The stop of a server in good order.
    Stop,
    /// The start after such a stop.
    Start,
    /// The start after the end of all processes.
    Recovery,
    /// The restart after the end of a backend.
    Crash,
}

/// What is done while calls fail.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// While what.
    pub during: During,
    /// Whether the cluster has keys.
    pub keys: bool,
    /// Without pagevault, as a control.
    pub stock: bool,
    /// Whether the table `g` is in a key group, whose key is away while calls fail.
    pub outage: bool,
    /// Lines of its configuration.
    pub conf: &'static [&'static str],
    /// Before each round, without errors.
    pub before: &'static str,
    /// Statements, separated by `;;`. The key file is `DIRECTORY/keys`.
    pub sql: &'static str,
    /// Answers `t` when the statements have succeeded.
    pub holds: &'static str,
}

impl Named for Scenario {
    fn name(&self) -> &'static str {
        self.name
    }
}

const STATEMENT: Scenario = Scenario {
    name: "",
    during: During::Statement,
    keys: true,
    stock: false,
    outage: false,
    conf: &[],
    before: "SELECT 1",
    sql: "SELECT 1",
    holds: "SELECT true",
};

const WRITES: Scenario = Scenario {
    before: "DELETE FROM t WHERE id >= 10000",
    sql: "INSERT INTO t SELECT i, 1, repeat('x', 1000) FROM generate_series(10000, 10500) i;; SELECT pg_switch_wal();; DELETE FROM t WHERE id >= 10000;; CHECKPOINT",
    ..STATEMENT
};

/// For `postgresql.conf`.
pub(crate) const ENCRYPTED_WAL: &str = "pagevault.wal_encryption = on";

const WAL: &[&str] = &[ENCRYPTED_WAL];

/// A start that fails does not try again by itself, for as long as calls fail.
const ONCE: &str = "restart_after_crash = off";

const ENCRYPTED_T: &str =
    "SELECT bool_and(state IN ('encrypted', 'empty')) FROM pagevault.verify('t')";

/// All of them.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "first-key",
        keys: false,
        sql: "SELECT pagevault.add_provider('local', 'file', '{\"path\": \"DIRECTORY/keys\"}');; SELECT pagevault.set_cluster_master_key('local', 'main');; SELECT pagevault.encrypt('ledger'), pagevault.encrypt('t')",
        holds: ENCRYPTED_T,
        ..STATEMENT
    },
    Scenario {
        name: "new-table",
        before: "DROP TABLE IF EXISTS x;; SELECT pg_stat_force_next_flush()",
        sql: "SET pagevault.default_encryption = on;; CREATE TABLE x (id int PRIMARY KEY, pad text);; INSERT INTO x SELECT i, repeat('y', 500) FROM generate_series(1, 200) i;; CHECKPOINT",
        holds: "SELECT count(*) = 200 AND (SELECT bool_and(state IN ('encrypted', 'empty')) FROM pagevault.verify('x')) FROM x",
        ..STATEMENT
    },
    Scenario {
        name: "new-database",
        before: "DROP DATABASE IF EXISTS d",
        sql: "CREATE DATABASE d STRATEGY file_copy",
        holds: "SELECT count(*) = 1 FROM pg_database WHERE datname = 'd'",
        ..STATEMENT
    },
    Scenario {
        name: "rotate-data-key",
        before: "SELECT pagevault.resume_rekey(job) FROM pagevault.rekey_jobs WHERE state = 'failed';; SELECT pagevault.wait_for_rekey('t'::regclass)",
        sql: "SET statement_timeout = '20s';; SELECT pagevault.rotate_data_key('t');; SELECT pagevault.wait_for_rekey('t'::regclass);; CHECKPOINT",
        holds: ENCRYPTED_T,
        ..STATEMENT
    },
    Scenario {
        name: "rotate-database-key",
        sql: "SELECT pagevault.rotate_database_key();; CHECKPOINT",
        holds: ENCRYPTED_T,
        ..STATEMENT
    },
    Scenario {
        name: "rotate-master-key",
        sql: "SELECT pagevault.rotate_cluster_master_key()",
        ..STATEMENT
    },
    Scenario {
        name: "rotate-wal-key",
        conf: WAL,
        before: "DELETE FROM t WHERE id >= 10000",
        sql: "SELECT pagevault.rotate_wal_key();; INSERT INTO t SELECT 10000, 1, 'x';; DELETE FROM t WHERE id = 10000",
        ..STATEMENT
    },
    Scenario {
        name: "encrypt",
        before: "DROP TABLE IF EXISTS p;; CREATE TABLE p AS SELECT i AS id, repeat('z', 300) AS pad FROM generate_series(1, 200) i;; CHECKPOINT",
        sql: "SET pagevault.rekey_threshold = '1GB';; SELECT pagevault.encrypt('p');; CHECKPOINT",
        holds: "SELECT bool_and(state IN ('encrypted', 'empty')) FROM pagevault.verify('p')",
        ..STATEMENT
    },
    Scenario {
        name: "rekey-job",
        conf: &["pagevault.rekey_threshold = 0"],
        before: "DROP TABLE IF EXISTS p;; CREATE TABLE p AS SELECT i AS id, repeat('z', 300) AS pad FROM generate_series(1, 200) i;; CHECKPOINT",
        sql: "SET statement_timeout = '20s';; SELECT pagevault.encrypt('p');; SELECT pagevault.wait_for_rekey('p'::regclass)",
        holds: "SELECT bool_and(state IN ('encrypted', 'empty')) FROM pagevault.verify('p')",
        ..STATEMENT
    },
    Scenario {
        name: "shred",
        before: "DROP TABLE IF EXISTS s;; SET pagevault.default_encryption = on;; CREATE TABLE s AS SELECT i AS id, repeat('s', 300) AS pad FROM generate_series(1, 100) i;; CHECKPOINT",
        sql: "SELECT * FROM pagevault.shred('public.s', 'public.s')",
        holds: "SELECT bool_and(state IN ('destroyed', 'empty')) FROM pagevault.verify('s')",
        ..STATEMENT
    },
    Scenario {
        name: "key-group",
        before: NO_GROUP,
        sql: "SELECT pagevault.create_key_group('n');; SELECT pagevault.set_key_group_master_key('n', 'local', 'main');; SET pagevault.rekey_threshold = '1GB';; SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted key_group=n';; SELECT pagevault.rotate_key_group_key('n');; CHECKPOINT",
        holds: "SELECT key_group = 'n' AND (SELECT bool_and(state IN ('encrypted', 'empty')) FROM pagevault.verify('p')) FROM pagevault.relations WHERE relation = 'p'::regclass",
        ..STATEMENT
    },
    Scenario {
        name: "shred-key-group",
        before: GROUP,
        sql: "SELECT * FROM pagevault.shred_key_group('n', 'n')",
        holds: "SELECT bool_and(state IN ('destroyed', 'empty')) FROM pagevault.verify('p')",
        ..STATEMENT
    },
    Scenario {
        name: "sort",
        sql: "SET work_mem = '64kB';; SELECT count(*) FROM (SELECT id, pad || id AS x FROM t, generate_series(1, 3) ORDER BY x) s",
        ..STATEMENT
    },
    Scenario {
        name: "notify",
        sql: "LISTEN a;; SELECT pg_notify('a', repeat(chr(97 + i), 7000)) FROM generate_series(1, 20) i",
        ..STATEMENT
    },
    Scenario { name: "wal", conf: WAL, ..WRITES },
    Scenario { name: "wal-stock", stock: true, ..WRITES },
    Scenario {
        name: "revalidate",
        sql: "SELECT pagevault.unlock();; SELECT * FROM pagevault.check_provider('local')",
        ..STATEMENT
    },
    Scenario {
        name: "move",
        before: "SELECT pagevault.set_cluster_master_key('local', 'main');; SELECT pagevault.drop_provider(provider) FROM pagevault.providers WHERE provider = 'other'",
        sql: "SELECT pagevault.add_provider('other', 'file', '{\"path\": \"DIRECTORY/keys\"}');; SELECT pagevault.set_cluster_master_key('other', 'main')",
        ..STATEMENT
    },
    Scenario { name: "stop", during: During::Stop, before: CHANGES, ..STATEMENT },
    Scenario { name: "start", during: During::Start, conf: &[ONCE], before: CHANGES, ..STATEMENT },
    Scenario {
        name: "start-encrypted-wal",
        during: During::Start,
        conf: &[ENCRYPTED_WAL, ONCE],
        before: CHANGES,
        ..STATEMENT
    },
    Scenario {
        name: "recovery",
        during: During::Recovery,
        conf: &[ONCE],
        before: CHANGES,
        ..STATEMENT
    },
    Scenario {
        name: "recovery-stock",
        during: During::Recovery,
        stock: true,
        conf: &[ONCE],
        before: CHANGES,
        ..STATEMENT
    },
    Scenario {
        name: "recovery-encrypted-wal",
        during: During::Recovery,
        conf: &[ENCRYPTED_WAL, ONCE],
        before: CHANGES,
        ..STATEMENT
    },
    Scenario {
        name: "locked-recovery",
        during: During::Recovery,
        outage: true,
        conf: &[ONCE],
        before: "UPDATE g SET pad = repeat('y', 60), v = 1;; VACUUM g;; INSERT INTO g SELECT i, 1, 'z' FROM generate_series(3000, 3100) i;; DELETE FROM g WHERE id >= 3000",
        ..STATEMENT
    },
    Scenario { name: "crash", during: During::Crash, conf: WAL, before: CHANGES, ..STATEMENT },
    Scenario {
        name: "crash-stock",
        during: During::Crash,
        stock: true,
        before: CHANGES,
        ..STATEMENT
    },
];

const CHANGES: &str = "SET pagevault.default_encryption = on;; DROP TABLE IF EXISTS x;; CREATE TABLE x (id int PRIMARY KEY);; INSERT INTO x SELECT generate_series(1, 100)";

const NO_GROUP: &str = "DROP TABLE IF EXISTS p;; SELECT * FROM pagevault.key_groups g, pagevault.shred_key_group(g.key_group, g.key_group) WHERE g.key_group = 'n';; CREATE TABLE p AS SELECT i AS id, repeat('z', 300) AS pad FROM generate_series(1, 200) i;; CHECKPOINT";

const GROUP: &str = "DROP TABLE IF EXISTS p;; SELECT * FROM pagevault.key_groups g, pagevault.shred_key_group(g.key_group, g.key_group) WHERE g.key_group = 'n';; SELECT pagevault.create_key_group('n');; SELECT pagevault.set_key_group_master_key('n', 'local', 'main');; CREATE TABLE p AS SELECT i AS id, repeat('z', 300) AS pad FROM generate_series(1, 200) i;; SET pagevault.rekey_threshold = '1GB';; SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted key_group=n';; CHECKPOINT";
