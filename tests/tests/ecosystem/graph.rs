//! Apache AGE: graphs, whose vertices and edges are in tables that it creates.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql, text};
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::{Cluster, Settings};
use postgres::Client;

use crate::Test;

pub(crate) const TESTS: &[Test] = &[Test { name: "age", needs: &["age"], run: graph }];

/// A session that speaks Cypher.
fn session(cluster: &Cluster) -> Result<Client> {
    let mut session = cluster.client()?;
    run_sql(&mut session, "LOAD 'age'; SET search_path = ag_catalog, public")?;
    Ok(session)
}

fn statement(query: &str) -> String {
    format!("SELECT * FROM cypher('people', $$ {query} $$) AS (found agtype)")
}

fn cypher(session: &mut Client, query: &str) -> Result<String> {
    text(session, &statement(query))
}

const FRIENDS: &str =
    "MATCH (a:person {id: 7})-[:knows]->(b)-[:knows]->(c) RETURN [b.id, c.id, c.name]";

/// A graph, with an index; changed, and read after a crash.
fn graph() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("ALTER DATABASE postgres SET pagevault.default_encryption = on")?;
    cluster.sql("CREATE EXTENSION age")?;
    let mut ours = session(&cluster)?;
    run_sql(&mut ours, "SELECT create_graph('people')")?;
    for step in [
        "UNWIND range(1, 500) AS i CREATE (:person {id: i, name: 'name ' + toString(i)})",
        "MATCH (a:person), (b:person) WHERE b.id = a.id + 1 CREATE (a)-[:knows {since: a.id}]->(b)",
        "MATCH (a:person) WHERE a.id % 10 = 9 SET a.name = 'another'",
        "MATCH (a:person) WHERE a.id > 490 DETACH DELETE a",
    ] {
        run_sql(&mut ours, &statement(step)).context(step)?;
    }
    run_sql(&mut ours, "CREATE INDEX by_content ON people.person USING gin (properties)")?;
    let found = cypher(&mut ours, FRIENDS)?;
    ensure!(found == r#"[8, 9, "another"]"#, "{found}");
    drop(ours);
    cluster.crash()?;
    let mut ours = session(&cluster)?;
    ensure!(cypher(&mut ours, FRIENDS)? == found, "after a crash");
    ensure!(cypher(&mut ours, "MATCH (a:person) RETURN count(a)")? == "490", "vertices");
    run_sql(&mut ours, "CHECKPOINT")?;
    // Also those from which the tables of all labels inherit.
    let tables = "SELECT format('%s.%I', relnamespace::regnamespace, relname) FROM pg_class
        WHERE relkind = 'r'
        AND relnamespace IN ('people'::regnamespace, 'ag_catalog'::regnamespace)";
    let tables = column(&mut ours, tables)?;
    ensure!(tables.len() >= 6, "{tables:?}");
    for table in tables {
        assert_sealed(&cluster.family_files(&table)?)?;
    }
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    cluster.finish()
}
