//! A server moves its keys from each subject to each other one, in every ordered pair.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::{Cluster, Settings};

use super::subjects::{Home, all};
use crate::Test;
use crate::bench::{TABLES, add_provider, readable};

pub(super) fn tests() -> Vec<Test> {
    vec![Test {
        name: "contract::moved_to_and_from_every_other_provider",
        needs: &[Server::Vault, Server::Moto, Server::SoftHsm, Server::PyKmip],
        run: moved,
    }]
}

/// A walk that begins and ends at 0 and makes each move between `places` places.
fn walk(places: usize) -> Vec<usize> {
    let mut walk = vec![0];
    for place in 0..places {
        if place > 0 {
            walk.push(place);
        }
        for other in place + 1..places {
            walk.extend([other, place]);
        }
    }
    walk.push(0);
    walk
}

fn moved() -> Result<()> {
    let cluster = Cluster::start(&Settings::default())?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    let homes: Vec<Home> = all().iter().map(|row| (row.home)()).collect::<Result<_>>()?;
    // One of each kind.
    let mut kinds = BTreeSet::new();
    let homes: Vec<Home> =
        homes.into_iter().filter(|home| kinds.insert(home.kind.clone())).collect();
    for home in &homes {
        cluster.sql(&add_provider(home.name, &home.kind, &home.options))?;
    }
    let go = |home: &Home| -> Result<()> {
        let (name, key) = (home.name, &home.key);
        cluster.sql(&format!("SELECT pagevault.set_cluster_master_key('{name}', '{key}')"))?;
        let found = cluster
            .text("SELECT string_agg(DISTINCT provider, ' ') FROM pagevault.database_keys")?;
        ensure!(found == name, "at {found} instead of {name}");
        Ok(())
    };
    go(&homes[0])?;
    cluster.sql(TABLES)?;
    let walk = walk(homes.len());
    let mut made = BTreeSet::new();
    for step in walk.windows(2) {
        let (from, to) = (step[0], step[1]);
        go(&homes[to])?;
        // New database keys on the way.
        if made.insert((from, to)) && made.len() % homes.len() == 0 {
            cluster.sql("SELECT pagevault.rotate_database_key()")?;
        }
    }
    let pairs = homes.len() * (homes.len() - 1);
    ensure!(made.len() == pairs, "{} of {pairs} moves", made.len());
    // Each of them unlocks a start.
    for home in &homes {
        go(home)?;
        cluster.restart()?;
        readable(&cluster)?;
    }
    cluster.finish()
}
