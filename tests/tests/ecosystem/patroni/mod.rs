//! Patroni: automatic failover and switchover, with everything encrypted including WAL.

mod load;
mod nodes;
mod soak;
mod wire;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::installation::run;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::wal::{Segment, WalPage};
use rustix::process::{Pid, Signal, kill_process};

use self::load::Load;
use self::nodes::{Group, Node, Programs};
use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "patroni::nodes_change_places_under_load",
        needs: &["patroni", "etcd"],
        run: nodes_change_places,
    },
    Test {
        name: "patroni::a_node_that_cannot_be_rewound_is_made_anew",
        needs: &["patroni", "etcd"],
        run: made_anew,
    },
    Test {
        name: "patroni::nodes_fail_for_long",
        needs: &["patroni", "etcd", "PAGEVAULT_PATRONI_MINUTES"],
        run: soak::nodes_fail_for_long,
    },
];

/// Occurs in each row.
const CANARY: &str = "rotkehlchen-7d1f0c6e92b4";
/// Occurs in each row that exists only on a failed server.
const LOST: &str = "zaunkoenig-b83a5e0f41c7";

/// A digest that must be equal on all nodes.
const CONTENT: &str = "SELECT concat_ws(' ',
    (SELECT count(*) || ':' || coalesce(sum(hashtext(t::text)::bigint), 0) FROM t),
    (SELECT count(*) || ':' || coalesce(sum(hashtext(l::text)::bigint), 0) FROM ledger l),
    (SELECT count(*) || ':' || coalesce(sum(hashtext(a::text)::bigint), 0) FROM pgbench_accounts a),
    (SELECT count(*) || ':' || coalesce(sum(delta), 0) FROM pgbench_history))";

/// A group of nodes with sealed tables.
fn group(count: usize, programs: Programs) -> Result<Group> {
    let group = Group::start(count, programs)?;
    let leader = &group.nodes[group.leader()?];
    leader.sql(&format!(
        "CREATE TABLE ledger (id bigint PRIMARY KEY, digest text, name text);
         CREATE TABLE t (id serial PRIMARY KEY, name text);
         INSERT INTO t (name) SELECT '{CANARY}-' || i FROM generate_series(1, 5000) i"
    ))?;
    run(group.pgbench(group.leader()?).args(["-i", "-q", "-s", "1"]))?;
    Ok(group)
}

/// Creates a new key of every kind.
fn rotate(node: &Node) -> Result<()> {
    for statement in [
        "SELECT pagevault.rotate_cluster_master_key()",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.rotate_wal_key()",
        "SELECT pagevault.rotate_data_key('t')",
    ] {
        node.sql(statement).with_context(|| node.name.clone())?;
    }
    let done = node.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")?;
    ensure!(done == "t", "new pages are not written in time");
    Ok(())
}

/// Lets a leader write rows and keys that no standby receives, and kills it.
fn die_alone(group: &mut Group, number: usize) -> Result<()> {
    let leader = &group.nodes[number];
    let senders = column(&mut leader.client()?, "SELECT pid FROM pg_stat_replication")?;
    ensure!(!senders.is_empty(), "nobody streams");
    for sender in senders {
        let sender = Pid::from_raw(sender.parse()?).context("no process")?;
        kill_process(sender, Signal::STOP)?;
    }
    let mut client = leader.client()?;
    for statement in [
        "SET synchronous_commit = local",
        "SELECT pagevault.rotate_wal_key()",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.rotate_data_key('ledger')",
        &format!("INSERT INTO t (name) SELECT '{LOST}-' || i FROM generate_series(1, 5000) i"),
        &format!("CREATE TABLE lost AS SELECT '{LOST}' || id AS name FROM t"),
        "CHECKPOINT",
    ] {
        pagevault_tests::cluster::run_sql(&mut client, statement)?;
    }
    group.kill_node(number)
}

/// Waits for a leader other than `before`.
fn next_leader(group: &Group, before: usize) -> Result<usize> {
    let mut leader = before;
    group.eventually("another leader", |group| {
        leader = group.leader()?;
        ensure!(leader != before, "it is still {}", group.nodes[before].name);
        Ok(())
    })?;
    Ok(leader)
}

/// Checks that all nodes have the same contents, that none of it is readable in their files, and
/// that every page and WAL record can be opened. Only a node that existed before the first key may
/// have plaintext WAL from that time.
fn check(mut group: Group, leader: usize, oldest: Option<usize>) -> Result<()> {
    let content = group.nodes[leader].text(CONTENT)?;
    for node in &group.nodes {
        group.eventually(&node.name, |_| {
            let found = node.text(CONTENT)?;
            ensure!(found == content, "{found} instead of {content}");
            Ok(())
        })?;
    }
    let drift = "SELECT string_agg(relation::text, ' ') FROM pagevault.drift(true)";
    let drift = group.nodes[leader].text(drift)?;
    ensure!(drift.is_empty(), "not as wanted: {drift}");
    group.stop()?;
    let canaries = [CANARY, LOST].map(|text| Canary::stored(text, text.as_bytes().to_vec()));
    let scanner = Scanner::new(&canaries);
    for (number, node) in group.nodes.iter().enumerate() {
        let data = node.data_directory();
        let found = scanner.scan_trees(&[&data])?;
        ensure!(found.is_empty(), "{}", report(&found));
        let pages = Segment::all(&data.join("pg_wal"))?
            .iter()
            .map(Segment::pages)
            .collect::<Result<Vec<_>>>()?
            .concat();
        let sealed = pages.iter().filter(|page| matches!(page, WalPage::Sealed(_))).count();
        ensure!(sealed > 100, "{sealed} pages of {} are sealed in pg_wal", node.name);
        let plain = pages.iter().filter(|page| **page == WalPage::Plain).count();
        ensure!(
            plain == 0 || oldest == Some(number),
            "{plain} pages of {} are plaintext in pg_wal",
            node.name
        );
        run(group.tool("pg_checksums").args(["--check", "-D"]).arg(&data))?;
        run(group.tool("pagevault-keyring").arg("verify").arg(&data))?;
    }
    group.passed();
    Ok(())
}

/// A leader fails with rows and keys that only it has, another takes over, and the first returns by
/// `pg_rewind`; then a switchover. Rows are inserted all the time, and every key is rotated in
/// between.
fn nodes_change_places() -> Result<()> {
    let mut group = group(3, Programs::WithKeys)?;
    let mut load = Load::start(&group);
    let first = group.leader()?;
    load.pgbench_on(&group, first)?;
    load.goes_on(&group)?;
    rotate(&group.nodes[first])?;
    group.whole()?;
    die_alone(&mut group, first)?;
    let second = next_leader(&group, first)?;
    load.is_on(&group.nodes[second])?;
    load.pgbench_on(&group, second)?;
    load.goes_on(&group)?;
    rotate(&group.nodes[second])?;

    group.start_node(first)?;
    group.whole()?;
    let log = group.nodes[first].log();
    ensure!(log.contains("pg_rewind exit code=0"), "it came back without pg_rewind");
    ensure!(!log.contains("replica has been created using basebackup"), "it was made anew");
    ensure!(
        group.nodes[first].text("SELECT to_regclass('lost')")?.is_empty(),
        "{} has what nobody else has",
        group.nodes[first].name
    );
    rotate(&group.nodes[second])?;

    let candidate = group.synchronous()?;
    let name = |number: usize| group.nodes[number].name.as_str();
    group.patronictl(&[
        "switchover",
        "--leader",
        name(second),
        "--candidate",
        name(candidate),
        "--force",
        "main",
    ])?;
    let third = next_leader(&group, second)?;
    ensure!(third == candidate, "{} leads, not {}", name(third), name(candidate));
    load.pgbench_on(&group, third)?;
    load.goes_on(&group)?;
    rotate(&group.nodes[third])?;
    let leader = group.whole()?;
    // pg_waldump is asked where the last checkpoint ends: an old leader without later WAL follows
    // without pg_rewind. Patroni does not understand the answer if another record follows already,
    // but there is one.
    let log = group.nodes[second].log();
    // It takes the size of segments from the first that the directory lists, which may be one
    // without content (`search_directory`, pg_waldump.c).
    let has_listed_empty = log.contains("header specifies 0 bytes");
    ensure!(
        has_listed_empty
            || !log.contains("Failed to parse pg_waldump output")
            || log.contains(" stdout=rmgr:"),
        "pg_waldump did not work: {}",
        log.lines().filter(|line| line.contains(" std")).collect::<Vec<_>>().join("\n")
    );
    ensure!(
        has_listed_empty || !log.contains("running pg_rewind"),
        "it was rewound after a switchover"
    );
    load.finish(&group.nodes[leader])?;
    check(group, leader, Some(first))
}

/// While the provider is unavailable, promotion of a standby works, and a returning node waits for
/// the provider. `pg_rewind` without keys fails then and changes nothing, and Patroni makes a new
/// copy instead. Another copy is made manually.
fn made_anew() -> Result<()> {
    let mut group = group(2, Programs::StockRewind)?;
    let load = Load::start(&group);
    let first = group.leader()?;
    load.goes_on(&group)?;
    group.whole()?;
    die_alone(&mut group, first)?;
    group.keys.take_away()?;
    let second = next_leader(&group, first)?;
    load.is_on(&group.nodes[second])?;
    load.goes_on(&group)?;
    group.start_node(first)?;
    // It is attempted repeatedly.
    group.eventually("recovery without keys", |group| {
        let tries = group.nodes[first].log().matches("cannot start without keys").count();
        ensure!(tries >= 3, "{tries} of 3 tries");
        Ok(())
    })?;
    let log = group.nodes[first].log();
    ensure!(!log.contains("removing"), "its files were thrown away");
    group.keys.bring_back()?;
    group.whole()?;
    let log = group.nodes[first].log();
    ensure!(log.contains("invalid info bits"), "pg_rewind did not fail, or for another reason");
    ensure!(log.contains("replica has been created using basebackup"), "it was not made anew");
    rotate(&group.nodes[second])?;
    group.patronictl(&["reinit", "--force", "--wait", "main", &group.nodes[first].name])?;
    let leader = group.whole()?;
    let copies = group.nodes[first].log().matches("replica has been created").count();
    ensure!(copies == 2, "it was made anew {copies} times");
    load.goes_on(&group)?;
    load.finish(&group.nodes[leader])?;
    check(group, leader, None)
}
