//! The scenarios: everything that keys and rekeying can do.

use std::time::Duration;

use crate::scenarios::{Promise, Scenario, Step, Tenants};

mod groups;

const fn step(sql: &'static str) -> Step {
    Step { sql, promise: None, may_fail: None }
}

const fn that(sql: &'static str, about: &'static str, holds: &'static str) -> Step {
    Step { sql, promise: Some(Promise { about, holds }), may_fail: None }
}

const ORDINARY: Scenario = Scenario {
    name: "",
    encrypted: true,
    checksums: true,
    keys: true,
    before: &[],
    steps: &[],
    pause: Duration::from_millis(30),
    passed_over: "'shreds'",
    log: &[],
    conf: &[],
    tenants: Tenants::Absent,
};

const ENCRYPTED: &[&str] =
    &["SELECT pagevault.encrypt(t::regclass) FROM unnest('{ledger,t1,t2,t3}'::text[]) t"];

/// What happens without pagevault, too.
const STOCK: &[Step] = &[
    step("CHECKPOINT"),
    step(
        "CREATE UNLOGGED TABLE u (id int PRIMARY KEY); INSERT INTO u SELECT generate_series(1, 99)",
    ),
    step("VACUUM t2"),
    step("VACUUM FULL t1"),
    that(
        "CREATE TABLE x AS SELECT i AS v FROM generate_series(1, 3000) i;; CREATE INDEX ON x (v)",
        "x",
        "SELECT count(*) = 3000 FROM x",
    ),
    step("CHECKPOINT"),
    that("TRUNCATE x", "x", "SELECT count(*) = 0 FROM x"),
    step("REINDEX TABLE t3"),
    that(
        "CREATE DATABASE d STRATEGY file_copy",
        "d",
        "SELECT count(*) = 1 FROM pg_database WHERE datname = 'd'",
    ),
    step("@d CREATE TABLE y AS SELECT i FROM generate_series(1, 2000) i"),
    that("CREATE DATABASE e", "e", "SELECT count(*) = 1 FROM pg_database WHERE datname = 'e'"),
    that("DROP DATABASE d", "d", "SELECT count(*) = 0 FROM pg_database WHERE datname = 'd'"),
    step("DROP TABLE u"),
    that("DROP TABLE x", "x", "SELECT to_regclass('x') IS NULL"),
    step("VACUUM"),
    step("CHECKPOINT"),
];

/// Many checkpoints, which write the state of prepared transactions to files.
const PREPARED: &[Step] = &[
    step("SELECT pg_sleep(0.1);; CHECKPOINT"),
    step("BEGIN; INSERT INTO points VALUES (-1); PREPARE TRANSACTION 'long'"),
    step("SELECT pg_sleep(0.1);; CHECKPOINT"),
    step("SELECT pg_sleep(0.1);; CHECKPOINT"),
    step("SELECT pg_sleep(0.1);; CHECKPOINT"),
    that("COMMIT PREPARED 'long'", "long", "SELECT count(*) = 1 FROM points WHERE n = -1"),
    step("SELECT pg_sleep(0.1);; CHECKPOINT"),
    step("SELECT pg_sleep(0.1);; CHECKPOINT"),
];

const REKEY: &[Step] = &[
    step("SELECT pagevault.encrypt('t1')"),
    step("SELECT pagevault.rotate_data_key('t2')"),
    step("CHECKPOINT"),
    step("VACUUM t2"),
    step("SELECT pagevault.decrypt('t3')"),
    step("CHECKPOINT"),
    step("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs"),
    step("ALTER SYSTEM SET pagevault.rekey_rate = '256kB';; SELECT pg_reload_conf()"),
    step("SELECT pagevault.rotate_data_key('t1')"),
    step("SELECT pagevault.pause_rekey(max(job)) FROM pagevault.rekey_jobs"),
    step("VACUUM"),
    step("SELECT pagevault.cancel_rekey(max(job)) FROM pagevault.rekey_jobs"),
    step("CHECKPOINT"),
    step("SELECT pagevault.resume_rekey(max(job)) FROM pagevault.rekey_jobs"),
    step("ALTER SYSTEM RESET pagevault.rekey_rate;; SELECT pg_reload_conf()"),
    step(
        "SELECT pagevault.wait_for_rekey('t1'::regclass), pagevault.wait_for_rekey('t3'::regclass)",
    ),
    that(
        "SET pagevault.rekey_threshold = '1GB';; SELECT pagevault.encrypt('t3')",
        "t3",
        "SELECT encrypted FROM pagevault.relations WHERE relation = 't3'::regclass",
    ),
    step("CHECKPOINT"),
    step("SELECT pagevault.rotate_all_data_keys()"),
    step("CHECKPOINT"),
    step("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs"),
    step("SELECT pagevault.encrypt('t2', 'aes-128-xts')"),
    step("VACUUM FULL t2"),
    step("SELECT pagevault.decrypt('t1')"),
    step("SELECT pagevault.wait_for_rekey('t1'::regclass)"),
];

const REKEYED: Scenario = Scenario {
    before: &["SELECT pagevault.encrypt('t2'), pagevault.encrypt('t3')"],
    steps: REKEY,
    ..ORDINARY
};

/// The first keys of a cluster.
const FIRST: &[Step] = &[
    step("CREATE EXTENSION pagevault"),
    step("SELECT pagevault.add_provider('local', 'file', '{\"path\": \"DIRECTORY/keys\"}')"),
    that(
        "SELECT pagevault.set_cluster_master_key('local', 'main')",
        "master",
        "SELECT state = 'unlocked' FROM pagevault.status",
    ),
    that(
        "SET pagevault.default_encryption = on;; CREATE TABLE x (id int PRIMARY KEY, name text);; INSERT INTO x SELECT i, repeat('x', 500) FROM generate_series(1, 500) i",
        "x",
        "SELECT count(name) = 500 FROM x",
    ),
    that(
        "SET pagevault.rekey_threshold = '1GB';; SELECT pagevault.encrypt('t1')",
        "t1",
        "SELECT encrypted FROM pagevault.relations WHERE relation = 't1'::regclass",
    ),
    step("SELECT pagevault.encrypt('t2')"),
    step("SELECT pagevault.encrypt_catalogs()"),
    step("ALTER SYSTEM SET pagevault.wal_encryption = on;; SELECT pg_reload_conf()"),
    that("TRUNCATE x", "x", "SELECT count(name) = 0 FROM x"),
    step("SELECT pg_sleep(0.3)"),
    step("CHECKPOINT"),
    that("DROP TABLE x", "x", "SELECT to_regclass('x') IS NULL"),
    step("SELECT pagevault.encrypt('t3')"),
];

/// Keys above data keys.
const ROTATION: &[Step] = &[
    step("SELECT pagevault.rotate_database_key()"),
    step("SELECT pagevault.rotate_cluster_master_key()"),
    step("CHECKPOINT"),
    step("SELECT pagevault.set_database_master_key('local', 'main')"),
    step("SELECT pagevault.rotate_database_key()"),
    step("SELECT pagevault.rotate_database_master_key()"),
    step("SELECT pagevault.rotate_data_key('t1')"),
    step("SELECT pagevault.rotate_database_key()"),
    step(
        "SET pagevault.default_encryption = on;; CREATE TABLE x (id int);; SELECT pagevault.rotate_database_key();; DROP TABLE x",
    ),
    step("CHECKPOINT"),
    step("SELECT pagevault.add_provider('other', 'file', '{\"path\": \"DIRECTORY/keys\"}')"),
    step("SELECT pagevault.set_cluster_master_key('other', 'main')"),
    step("SELECT pagevault.set_database_master_key('other', 'main')"),
    step("SELECT pagevault.drop_provider('local')"),
    step("SELECT pagevault.rotate_all_data_keys()"),
    step("SELECT pagevault.rotate_database_key()"),
    step("SELECT pagevault.rotate_cluster_master_key()"),
];

/// WAL encryption, on and off.
const WAL: &[Step] = &[
    step(
        "ALTER SYSTEM SET pagevault.wal_encryption = on;; SELECT pg_reload_conf();; SELECT pg_sleep(0.5)",
    ),
    step("SELECT pagevault.rotate_wal_key()"),
    step("SELECT pg_switch_wal()"),
    step("CHECKPOINT"),
    step("SELECT pagevault.rotate_wal_key();; SELECT pagevault.rotate_wal_key()"),
    step("SELECT pagevault.rotate_data_key('t1')"),
    step("SELECT pg_sleep(0.3)"),
    step(
        "ALTER SYSTEM SET pagevault.wal_encryption = off;; SELECT pg_reload_conf();; SELECT pg_sleep(0.5)",
    ),
    step("CHECKPOINT"),
    step(
        "ALTER SYSTEM SET pagevault.wal_encryption = on;; SELECT pg_reload_conf();; SELECT pg_sleep(0.3)",
    ),
    step("SELECT pagevault.rotate_database_key()"),
    step("SELECT pg_switch_wal();; CHECKPOINT"),
    step("SELECT pagevault.rotate_wal_key()"),
];

/// Files come and go, all of them encrypted.
const RELATIONS: &[Step] = &[
    that(
        "CREATE TABLE x (id int PRIMARY KEY, name text);; INSERT INTO x SELECT i, repeat(md5(i::text), 100) FROM generate_series(1, 300) i",
        "x",
        "SELECT count(name) = 300 FROM x",
    ),
    step(
        "CREATE INDEX ON x USING gin (string_to_array(name, 'a'));; CREATE INDEX ON x USING hash (id);; CREATE INDEX ON x USING brin (id)",
    ),
    step("VACUUM FULL t1"),
    step("BEGIN; CREATE TABLE w AS SELECT * FROM x; CREATE INDEX ON w (id); ROLLBACK"),
    step("CREATE UNLOGGED TABLE u (id int PRIMARY KEY, name text);; INSERT INTO u SELECT * FROM x"),
    step("CHECKPOINT"),
    that("ALTER TABLE u SET LOGGED", "u", "SELECT count(name) = 300 FROM u"),
    that("ALTER TABLE x SET TABLESPACE ts", "x", "SELECT count(name) = 300 FROM x"),
    step("CREATE MATERIALIZED VIEW m AS SELECT * FROM x;; REFRESH MATERIALIZED VIEW m"),
    step("REINDEX TABLE t2"),
    step("CHECKPOINT"),
    that(
        "BEGIN; TRUNCATE x; INSERT INTO x VALUES (1, 'a'); COMMIT",
        "x",
        "SELECT count(name) = 1 FROM x",
    ),
    step("CREATE SEQUENCE s;; SELECT nextval('s') FROM generate_series(1, 100)"),
    that("ALTER TABLE u SET UNLOGGED", "u", "SELECT count(name) IN (0, 300) FROM u"),
    step("DROP MATERIALIZED VIEW m;; REINDEX TABLE CONCURRENTLY t3"),
    that("DROP TABLE x", "x", "SELECT to_regclass('x') IS NULL"),
    step("ALTER TABLE t1 SET TABLESPACE ts"),
    step("VACUUM"),
    step("CHECKPOINT"),
    that("DROP TABLE u", "u", "SELECT to_regclass('u') IS NULL"),
    step("CLUSTER t2 USING t2_pkey"),
];

const CATALOGS: &[Step] = &[
    step("SELECT pagevault.encrypt_catalogs()"),
    step("CREATE TABLE x AS SELECT i AS id FROM generate_series(1, 100) i;; ANALYZE"),
    step("CHECKPOINT"),
    step("VACUUM FULL pg_statistic"),
    step("SELECT pagevault.rotate_data_key('pg_statistic')"),
    step(
        "ALTER SYSTEM SET pagevault.shared_catalog_encryption = on;; SELECT pg_reload_conf();; SELECT pg_sleep(0.1);; SELECT pagevault.encrypt_catalogs()",
    ),
    step("CREATE ROLE r;; GRANT SELECT ON x TO r;; VACUUM FULL pg_authid"),
    step("ANALYZE t1"),
    step("SELECT pagevault.encrypt_database()"),
    step("CHECKPOINT"),
    step("REINDEX TABLE pg_statistic;; REINDEX TABLE pg_class"),
    step("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs"),
    step(
        "ALTER SYSTEM SET pagevault.shared_catalog_encryption = off;; SELECT pg_reload_conf();; SELECT pagevault.decrypt_database()",
    ),
    step("VACUUM FULL pg_class"),
    step("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs"),
    step("SELECT pagevault.encrypt_database()"),
];

const HERE: &str = "SELECT count(*) = 1 FROM pg_database WHERE datname = 'd'";
const GONE: &str = "SELECT count(*) = 0 FROM pg_database WHERE datname = 'd'";

const DATABASES: &[Step] = &[
    that("CREATE DATABASE d TEMPLATE model STRATEGY file_copy", "d", HERE),
    step("@d SELECT pagevault.rotate_data_key('x')"),
    that(
        "CREATE DATABASE e TEMPLATE model STRATEGY wal_log",
        "e",
        "SELECT count(*) = 1 FROM pg_database WHERE datname = 'e'",
    ),
    step("@d SELECT pagevault.set_database_master_key('local', 'main')"),
    step("CHECKPOINT"),
    step("@d UPDATE x SET name = 'new'"),
    that(
        "ALTER DATABASE d SET TABLESPACE ts",
        "d",
        "SELECT count(*) = 1 FROM pg_database d JOIN pg_tablespace t ON t.oid = dattablespace WHERE datname = 'd' AND spcname = 'ts'",
    ),
    step("@e SELECT pagevault.rotate_database_key()"),
    that("DROP DATABASE d", "d", GONE),
    that("CREATE DATABASE d TEMPLATE model STRATEGY file_copy TABLESPACE ts", "d", HERE),
    step("CHECKPOINT"),
    step("@d INSERT INTO x SELECT i FROM generate_series(1000, 2000) i"),
    that("DROP DATABASE d", "d", GONE),
    step("@e TRUNCATE x"),
    step("@e SELECT * FROM pagevault.shred_former_files('e')"),
    that("CREATE DATABASE d TEMPLATE e STRATEGY file_copy", "d", HERE),
];

const SHRED: &[Step] = &[
    that(
        "SELECT * FROM pagevault.shred('shreds.a', 'shreds.a')",
        "a",
        "SELECT coalesce(bool_and(state IN ('destroyed', 'empty')), true) FROM pagevault.verify(to_regclass('shreds.a'))",
    ),
    step("VACUUM FULL t1"),
    step("UPDATE shreds.b SET name = name || 'x';; DELETE FROM shreds.c WHERE id % 2 = 0"),
    step("SELECT * FROM pagevault.shred_former_files('postgres')"),
    that(
        "SELECT * FROM pagevault.shred('shreds.b', 'shreds.b')",
        "b",
        "SELECT coalesce(bool_and(state IN ('destroyed', 'empty')), true) FROM pagevault.verify(to_regclass('shreds.b'))",
    ),
    step("CHECKPOINT"),
    that("TRUNCATE shreds.a", "a", "SELECT true"),
    step("SELECT pagevault.rotate_database_key()"),
    that(
        "SELECT * FROM pagevault.shred_schema('shreds', 'shreds')",
        "c",
        "SELECT coalesce(bool_and(state IN ('destroyed', 'empty')), true) FROM pagevault.verify(to_regclass('shreds.c'))",
    ),
    step("DROP SCHEMA shreds CASCADE"),
    step("SELECT pagevault.rotate_data_key('t2')"),
    step("VACUUM FULL t1"),
    step("SELECT * FROM pagevault.shred_former_files('postgres')"),
];

/// Pages that change without WAL while their file gets another key.
const HINTS: &[Step] = &[
    that(
        "CREATE TABLE h AS SELECT i AS id, 0 AS v FROM generate_series(1, 20000) i;; CREATE INDEX ON h (id)",
        "h",
        "SELECT count(*) = 20000 FROM h",
    ),
    step("SET pagevault.rekey_threshold = '1GB';; SELECT pagevault.encrypt('h')"),
    step("CHECKPOINT"),
    step("SELECT pagevault.rotate_data_key('h')"),
    step("SELECT count(*) FROM h"),
    step("CHECKPOINT"),
    step("VACUUM h"),
    step("SELECT pagevault.rotate_data_key('h')"),
    step("UPDATE h SET v = 1 WHERE id % 10 = 0"),
    step("CHECKPOINT"),
    step("SELECT pagevault.decrypt('h')"),
    step("SELECT count(*) FROM h WHERE v = 1;; SELECT sum(v) FROM t1"),
    step("VACUUM h"),
    step("SELECT pagevault.wait_for_rekey('h'::regclass)"),
    step("DELETE FROM t1 WHERE false;; UPDATE h SET v = 2 WHERE id % 10 = 1"),
    step("SELECT pagevault.encrypt('h')"),
    step("SELECT count(*) FROM h WHERE v = 2"),
    step("CHECKPOINT"),
    step("SET enable_seqscan = off;; SELECT count(*) FROM h WHERE id > 10;; VACUUM FREEZE h"),
    step("SELECT pagevault.wait_for_rekey('h'::regclass)"),
    step("SELECT pagevault.rotate_data_key('h')"),
    step("SELECT count(*) FROM h"),
    step("VACUUM"),
];

/// Keys end as soon as nothing needs them: of dropped files, of each kind, of whole databases.
const FORGETTING: &[Step] = &[
    step("VACUUM FULL t1;; CHECKPOINT"),
    step("SELECT pagevault.rotate_database_key();; CHECKPOINT"),
    step("SELECT pg_sleep(1.1)"),
    step("SELECT pagevault.rotate_data_key('t2')"),
    step("SELECT pagevault.wait_for_rekey('t2'::regclass);; CHECKPOINT"),
    step("SELECT pagevault.rotate_wal_key();; SELECT pg_switch_wal();; CHECKPOINT"),
    step("SELECT pg_sleep(1.1);; CHECKPOINT"),
    that(
        "SET pagevault.default_encryption = on;; CREATE TABLE x AS SELECT i AS v FROM generate_series(1, 3000) i;; CREATE INDEX ON x (v)",
        "x",
        "SELECT count(*) = 3000 FROM x",
    ),
    step("SELECT pagevault.rotate_database_key();; CHECKPOINT"),
    that("TRUNCATE x", "x", "SELECT count(*) = 0 FROM x"),
    that("CREATE DATABASE d TEMPLATE model STRATEGY file_copy", "d", HERE),
    step("@d SELECT pagevault.rotate_data_key('x');; CHECKPOINT"),
    step("SELECT pg_sleep(1.1);; CHECKPOINT"),
    step("REINDEX TABLE t3;; CHECKPOINT"),
    that("DROP DATABASE d", "d", GONE),
    step("SELECT pagevault.rotate_database_key();; SELECT pagevault.rotate_cluster_master_key()"),
    step("SELECT pg_sleep(1.1);; CHECKPOINT"),
    that("DROP TABLE x", "x", "SELECT to_regclass('x') IS NULL"),
    step("SELECT pagevault.rotate_all_data_keys();; CHECKPOINT"),
    step("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs"),
    step("SELECT pagevault.rotate_wal_key();; SELECT pg_switch_wal();; CHECKPOINT"),
    step("SELECT pg_sleep(1.1);; CHECKPOINT"),
    step("SELECT pg_sleep(1.1);; CHECKPOINT"),
];

/// A database key with several master keys.
const SEVERAL: &[Step] = &[
    step("SELECT pagevault.add_provider('other', 'file', '{\"path\": \"DIRECTORY/keys\"}')"),
    step("SELECT pagevault.add_cluster_master_key('other', 'main')"),
    step("SELECT pagevault.rotate_cluster_master_key();; CHECKPOINT"),
    step("SELECT pagevault.rotate_database_key()"),
    step("SELECT pagevault.drop_cluster_master_key('local', 'main')"),
    step("SELECT pagevault.add_cluster_master_key('local', 'main');; CHECKPOINT"),
    step("SELECT pagevault.set_database_master_key('local', 'main')"),
    step("SELECT pagevault.add_database_master_key('other', 'main')"),
    step("SELECT pagevault.set_cluster_master_key('local', 'main')"),
    step("SELECT pagevault.rotate_database_master_key()"),
    step("SELECT pagevault.rotate_database_key();; CHECKPOINT"),
    step("SELECT pagevault.drop_database_master_key('local', 'main')"),
    step("SELECT pagevault.drop_cluster_master_key('other', 'main')"),
    step("SELECT pagevault.rotate_cluster_master_key()"),
];

/// What recovery says of a tablespace inside the data directory (`CheckTablespaceDirectory`,
/// xlogrecovery.c).
const IN_PLACE: &[&str] = &["found in pg_tblspc"];

const TABLESPACE: &str = "SET allow_in_place_tablespaces = on;; CREATE TABLESPACE ts LOCATION ''";

/// All of them.
pub const ALL: &[Scenario] = &[
    groups::GROUPS,
    groups::GROUPS_AWAY,
    Scenario { name: "stock", encrypted: false, keys: false, steps: STOCK, ..ORDINARY },
    Scenario {
        name: "stock-without-checksums",
        encrypted: false,
        keys: false,
        checksums: false,
        steps: STOCK,
        ..ORDINARY
    },
    Scenario { name: "stock-prepared", encrypted: false, keys: false, steps: PREPARED, ..ORDINARY },
    Scenario { name: "prepared", before: ENCRYPTED, steps: PREPARED, ..ORDINARY },
    Scenario { name: "rekey", ..REKEYED },
    Scenario { name: "rekey-without-checksums", checksums: false, ..REKEYED },
    Scenario { name: "first-keys", keys: false, steps: FIRST, ..ORDINARY },
    Scenario {
        name: "first-keys-without-checksums",
        checksums: false,
        keys: false,
        steps: FIRST,
        ..ORDINARY
    },
    Scenario { name: "rotation", before: ENCRYPTED, steps: ROTATION, ..ORDINARY },
    Scenario {
        name: "forgetting",
        before: &[
            ENCRYPTED[0],
            "CREATE DATABASE model",
            "@model CREATE EXTENSION pagevault;; SET pagevault.default_encryption = on;; CREATE TABLE x (id int PRIMARY KEY, name text);; INSERT INTO x SELECT i, 'old' FROM generate_series(1, 500) i",
        ],
        steps: FORGETTING,
        conf: &[
            "pagevault.keep_former_keys = 0",
            "pagevault.keep_former_wal_keys = 0",
            "pagevault.wal_encryption = on",
        ],
        ..ORDINARY
    },
    Scenario { name: "several-master-keys", before: ENCRYPTED, steps: SEVERAL, ..ORDINARY },
    Scenario { name: "wal", before: ENCRYPTED, steps: WAL, ..ORDINARY },
    Scenario {
        name: "wal-without-checksums",
        checksums: false,
        before: ENCRYPTED,
        steps: WAL,
        ..ORDINARY
    },
    Scenario {
        name: "relations",
        before: &[
            TABLESPACE,
            ENCRYPTED[0],
            "ALTER DATABASE postgres SET pagevault.default_encryption = on",
        ],
        steps: RELATIONS,
        log: IN_PLACE,
        ..ORDINARY
    },
    Scenario {
        name: "relations-without-checksums",
        checksums: false,
        before: &[
            TABLESPACE,
            ENCRYPTED[0],
            "ALTER DATABASE postgres SET pagevault.default_encryption = on",
        ],
        steps: RELATIONS,
        log: IN_PLACE,
        ..ORDINARY
    },
    Scenario { name: "catalogs", before: ENCRYPTED, steps: CATALOGS, ..ORDINARY },
    Scenario {
        name: "catalogs-without-checksums",
        checksums: false,
        before: ENCRYPTED,
        steps: CATALOGS,
        ..ORDINARY
    },
    Scenario {
        name: "databases",
        before: &[
            TABLESPACE,
            "CREATE DATABASE model",
            "@model CREATE EXTENSION pagevault;; SET pagevault.default_encryption = on;; CREATE TABLE x (id int PRIMARY KEY, name text);; INSERT INTO x SELECT i, 'old' FROM generate_series(1, 500) i",
        ],
        steps: DATABASES,
        log: IN_PLACE,
        ..ORDINARY
    },
    Scenario {
        name: "shred",
        before: &[
            ENCRYPTED[0],
            "SET pagevault.default_encryption = on;; CREATE SCHEMA shreds;; CREATE TABLE shreds.a (id int PRIMARY KEY, name varchar(20));; CREATE TABLE shreds.b (LIKE shreds.a INCLUDING ALL);; CREATE TABLE shreds.c (LIKE shreds.a INCLUDING ALL)",
            "INSERT INTO shreds.a SELECT i, 'a' FROM generate_series(1, 999) i;; INSERT INTO shreds.b SELECT * FROM shreds.a;; INSERT INTO shreds.c SELECT * FROM shreds.a;; ANALYZE",
        ],
        steps: SHRED,
        ..ORDINARY
    },
    Scenario { name: "hints", steps: HINTS, ..REKEYED },
    Scenario { name: "hints-without-checksums", checksums: false, steps: HINTS, ..REKEYED },
];
