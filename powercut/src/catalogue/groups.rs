//! Keys of key groups, and servers that recover while these are away.

use super::{ENCRYPTED, ORDINARY, step, that};
use crate::scenarios::{Scenario, Step, Tenants};

/// Two groups with keys, `acme` and `gone`, and a table in the second.
const BEFORE: &[&str] = &[
    ENCRYPTED[0],
    "SELECT pagevault.create_key_group(g), pagevault.set_key_group_master_key(g, 'tenants', 'main') FROM unnest('{acme,gone}'::text[]) g",
    "CREATE SCHEMA shreds;; SECURITY LABEL FOR pagevault ON SCHEMA shreds IS 'encrypted key_group=gone';; CREATE TABLE shreds.g (id int PRIMARY KEY, name varchar(20));; INSERT INTO shreds.g SELECT i, 'g' FROM generate_series(1, 999) i",
];

const STEPS: &[Step] = &[
    step("SELECT pagevault.create_key_group('umbrella')"),
    step("SELECT pagevault.set_key_group_master_key('umbrella', 'tenants', 'main')"),
    step("SECURITY LABEL FOR pagevault ON TABLE t1 IS 'encrypted key_group=acme'"),
    step("CHECKPOINT"),
    step("SELECT pagevault.rotate_key_group_key('acme')"),
    step("SELECT pagevault.wait_for_rekey('t1'::regclass)"),
    that(
        "SET pagevault.rekey_threshold = '1GB';; SECURITY LABEL FOR pagevault ON TABLE t2 IS 'encrypted key_group=umbrella'",
        "t2",
        "SELECT key_group = 'umbrella' FROM pagevault.relations WHERE relation = 't2'::regclass",
    ),
    step("CHECKPOINT"),
    step(
        "CREATE SCHEMA tenant;; SECURITY LABEL FOR pagevault ON SCHEMA tenant IS 'encrypted key_group=acme'",
    ),
    that(
        "CREATE TABLE tenant.x AS SELECT i AS v, repeat('x', 300) AS pad FROM generate_series(1, 2000) i;; CREATE INDEX ON tenant.x USING hash (v);; CREATE INDEX ON tenant.x (v)",
        "x",
        "SELECT count(*) = 2000 FROM tenant.x",
    ),
    step("VACUUM"),
    step("SELECT pagevault.rotate_data_key('t1')"),
    step("SELECT pagevault.rotate_key_group_master_key('umbrella')"),
    step("SELECT pagevault.add_key_group_master_key('umbrella', 'local', 'main')"),
    step("UPDATE tenant.x SET pad = 'y' WHERE v % 10 = 0"),
    step("CHECKPOINT"),
    step(
        "INSERT INTO tenant.x SELECT i, 'z' FROM generate_series(1, 500) i;; DELETE FROM tenant.x WHERE pad = 'z'",
    ),
    step("VACUUM FULL t1"),
    step("VACUUM tenant.x"),
    that(
        "SELECT * FROM pagevault.shred_key_group('gone', 'gone')",
        "gone",
        "SELECT coalesce(bool_and(state IN ('destroyed', 'empty')), true) FROM pagevault.verify(to_regclass('shreds.g'))",
    ),
    step("DROP SCHEMA shreds CASCADE"),
    that("TRUNCATE tenant.x", "x", "SELECT count(*) = 0 FROM tenant.x"),
    that(
        "SET pagevault.rekey_threshold = '1GB';; SECURITY LABEL FOR pagevault ON TABLE t2 IS 'encrypted key_group=acme'",
        "t2",
        "SELECT key_group = 'acme' FROM pagevault.relations WHERE relation = 't2'::regclass",
    ),
    step("SELECT pagevault.drop_key_group_master_key('umbrella', 'local', 'main')"),
    step("SELECT pagevault.rotate_key_group_key('acme')"),
    step("REINDEX TABLE t2"),
    that("DROP TABLE tenant.x", "x", "SELECT to_regclass('tenant.x') IS NULL"),
    step("SECURITY LABEL FOR pagevault ON TABLE t1 IS 'encrypted'"),
    step("CHECKPOINT"),
    step("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs"),
    step("SELECT pagevault.rotate_all_data_keys()"),
    step("VACUUM"),
];

/// The keys are there.
pub(super) const GROUPS: Scenario = Scenario {
    name: "groups",
    before: BEFORE,
    steps: STEPS,
    tenants: Tenants::Present,
    ..ORDINARY
};

/// Servers recover without them, and say which group is locked.
pub(super) const GROUPS_AWAY: Scenario =
    Scenario { name: "groups-away", tenants: Tenants::Away, log: &["key group"], ..GROUPS };
