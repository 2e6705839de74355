//! A standby with its own access to the same master key: another address, other credentials.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::process::postmaster;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, Standby, StopMode};

use crate::Test;
use crate::bench::{cluster_on_vault, impatient, readable};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::Vault], run };
    vec![
        test("routes::a_standby_has_its_own_way_to_the_key", own_way),
        test("routes::a_standby_whose_way_is_cut_waits_with_what_it_has", cut),
        test("routes::a_standby_whose_way_is_back_soon_goes_on", back_soon),
    ]
}

/// A proxy to a server on another port, which can be cut.
struct Detour {
    port: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    end: AtomicBool,
    cut: AtomicBool,
    used: AtomicUsize,
    open: Mutex<Vec<TcpStream>>,
}

impl Detour {
    fn to(target: u16) -> Result<Detour> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let detour = Detour { port: listener.local_addr()?.port(), state: Arc::default() };
        let state = Arc::clone(&detour.state);
        std::thread::spawn(move || {
            while !state.end.load(Ordering::Relaxed) {
                match listener.accept() {
                    // Accepted and closed at once.
                    Ok(_) if state.cut.load(Ordering::Relaxed) => {}
                    Ok((client, _)) => {
                        let _ = state.pass_on(client, target);
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(10)),
                }
            }
        });
        Ok(detour)
    }

    /// Number of connections through this proxy.
    fn used(&self) -> usize {
        self.state.used.load(Ordering::Relaxed)
    }

    fn cut(&self) {
        self.state.cut.store(true, Ordering::Relaxed);
        for stream in self.state.open.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn restore(&self) {
        self.state.cut.store(false, Ordering::Relaxed);
    }
}

impl Drop for Detour {
    fn drop(&mut self) {
        self.cut();
        self.state.end.store(true, Ordering::Relaxed);
    }
}

impl State {
    fn pass_on(&self, client: TcpStream, target: u16) -> io::Result<()> {
        client.set_nonblocking(false)?;
        let server = TcpStream::connect(("127.0.0.1", target))?;
        self.used.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for (from, to) in [(&client, &server), (&server, &client)] {
            let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
            std::thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
        }
        open.extend([client, server]);
        Ok(())
    }
}

/// A primary with everything sealed, and its standby. The standby reaches Vault by a proxy, with
/// its own role, credential files and CA file.
///
/// Their paths are in the keystore, which both share. A standby on another machine has other files
/// at the same paths, and the server's name has another address; here the environment of its helper
/// simulates that.
fn pair() -> Result<(Cluster, Cluster, Vault, Detour)> {
    let settings = impatient()
        .conf("wal_keep_size = 1GB")
        .conf("pagevault.revalidate_interval = 1s")
        .conf("pagevault.wal_encryption = on");
    let (mut primary, vault) = cluster_on_vault(&settings)?;
    primary.set(&[("pagevault.default_encryption", "on")])?;
    primary.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    for text in ["could not send", "connection to client lost", "pagevault"] {
        primary.allow_log(text);
    }
    let detour = Detour::to(vault.port())?;
    let mut standby = Standby::default().create(&primary)?;
    for text in ["pagevault", "could not receive data", "could not connect to the primary"] {
        standby.allow_log(text);
    }
    let mut exchange = format!("s#{}#https://127.0.0.1:{}#g", vault.address(), detour.port);
    let own = own_credentials(&vault)?;
    for (theirs, ours) in own {
        exchange += &format!(";s#\"{theirs}\"#\"{ours}\"#g");
    }
    let helper = standby.installation().program("pagevault-keyring");
    let helper =
        standby.script("helper", &format!("sed '{exchange}' | {} \"$@\"", helper.display()))?;
    standby.append_conf(&format!("pagevault.keyring_command = '{helper}'"))?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    Ok((primary, standby, vault, detour))
}

/// Files for another role, named like those in the options.
fn own_credentials(vault: &Vault) -> Result<Vec<(String, String)>> {
    let role = "auth/approle/role/standby";
    vault.cli(&["write", role, "token_policies=db-kek,db-next", "token_ttl=20m"])?;
    let id = vault.cli(&["read", "-field=role_id", &format!("{role}/role-id")])?;
    let secret = vault.cli(&["write", "-f", "-field=secret_id", &format!("{role}/secret-id")])?;
    let authority = std::fs::read_to_string(vault.path("ca.pem"))?;
    let files =
        [("role-id", &id, 0o644), ("secret-id", &secret, 0o600), ("ca.pem", &authority, 0o644)];
    let mut exchanged = Vec::new();
    for (name, content, mode) in files {
        let own = vault.write(&format!("standby-{name}"), content, mode)?;
        let path = |path: &std::path::Path| path.display().to_string();
        exchanged.push((path(&vault.path(name)), path(&own)));
    }
    Ok(exchanged)
}

/// Key changes of every kind, and new rows.
fn rotate(primary: &Cluster) -> Result<()> {
    for statement in [
        "SELECT pagevault.rotate_cluster_master_key()",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.rotate_wal_key()",
        "SELECT pagevault.rotate_data_key('secret')",
        "SELECT pagevault.wait_for_rekey('secret'::regclass, '1min')",
    ] {
        primary.sql(statement)?;
    }
    write(primary)
}

fn write(primary: &Cluster) -> Result<()> {
    primary.sql(
        "INSERT INTO secret SELECT (SELECT max(id) FROM secret) + i, 'more' FROM generate_series(1, 500) i",
    )
}

fn same(standby: &Cluster, primary: &Cluster) -> Result<()> {
    wait_for(standby, primary)?;
    let content = "SELECT count(*) || ':' || sum(hashtext(s::text)::bigint) FROM secret s";
    let (theirs, ours) = (primary.text(content)?, standby.text(content)?);
    ensure!(theirs == ours, "{ours} instead of {theirs}");
    readable(standby)
}

fn own_way() -> Result<()> {
    let (primary, standby, vault, detour) = pair()?;
    let before = detour.used();
    ensure!(before > 0, "the standby started without its own way");
    readable(&standby)?;
    rotate(&primary)?;
    same(&standby, &primary)?;
    // Another key, and one for a single database.
    vault.make_key("db-next")?;
    primary.sql("SELECT pagevault.set_database_master_key('vault', 'db-next')")?;
    primary.sql("SELECT pagevault.rotate_database_master_key()")?;
    primary.sql("SELECT pagevault.set_cluster_master_key('vault', 'db-next')")?;
    rotate(&primary)?;
    same(&standby, &primary)?;
    ensure!(detour.used() > before, "it replayed new keys without asking");
    let checks =
        "SELECT string_agg(item, ' ') FILTER (WHERE NOT ok) FROM pagevault.check_provider('vault')";
    let failed = standby.text(checks)?;
    ensure!(failed.is_empty(), "{failed}");
    standby.restart()?;
    same(&standby, &primary)?;

    // The primary fails, and its credentials are revoked.
    primary.without_witness("its credentials are revoked");
    primary.kill()?;
    vault.cli(&["delete", "auth/approle/role/db"])?;
    vault.write("secret-id", "00000000-0000-0000-0000-000000000000", 0o600)?;
    standby.promote()?;
    rotate(&standby)?;
    standby.sql("SELECT pagevault.rotate_database_master_key()")?;
    readable(&standby)?;
    standby.crash()?;
    readable(&standby)?;
    let output = vault.audit_log()?;
    ensure!(output.contains("\"role_name\":\"standby\""), "its own role was not used");
    standby.finish()?;
    primary.finish()
}

fn cut() -> Result<()> {
    let (primary, mut standby, _vault, detour) = pair()?;
    standby.allow_log("cannot start without keys");
    standby.allow_log("recovery waits for a new key");
    let reachable = "SELECT reachable::text FROM pagevault.providers";
    standby.eventually(reachable, "true")?;
    detour.cut();
    standby.eventually(reachable, "false")?;
    ensure!(primary.text(reachable)? == "true", "the primary's way was cut");
    // Operations that need no new database key continue.
    primary.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    primary.sql("SELECT pagevault.rotate_wal_key()")?;
    primary.sql("SELECT pagevault.rotate_data_key('secret')")?;
    primary.sql("SELECT pagevault.wait_for_rekey('secret'::regclass, '1min')")?;
    write(&primary)?;
    same(&standby, &primary)?;
    ensure!(standby.text("SELECT state FROM pagevault.status")? == "unlocked");

    // A new database key: the standby waits where it is needed, and continues.
    primary.sql("SELECT pagevault.rotate_database_key()")?;
    primary.sql("SELECT pagevault.rotate_wal_key()")?;
    primary.sql("CREATE TABLE later AS SELECT * FROM secret")?;
    write(&primary)?;
    primary.sql("SELECT pg_switch_wal()")?;
    standby.eventually_logs("recovery waits for a new key")?;
    readable(&primary)?;
    readable(&standby)?;
    ensure!(standby.text("SELECT state FROM pagevault.status")? == "locked");
    standby.stop(StopMode::Fast)?;
    // pg_ctl of 18 takes the end of the standby for a recovery with a target, and reports success.
    let _ = standby.start_server();
    standby.eventually_logs("cannot start without keys")?;
    standby.eventually_that("the standby's end", || {
        ensure!(postmaster(&standby.data_directory()).is_none(), "it runs");
        Ok(())
    })?;
    detour.restore();
    standby.start_server()?;
    same(&standby, &primary)?;
    ensure!(standby.text("SELECT count(*) FROM later")? != "0", "rows are missing");
    standby.eventually(reachable, "true")?;
    standby.promote()?;
    rotate(&standby)?;
    standby.finish()?;
    primary.finish()
}

/// It asks repeatedly, as at its start, and can be stopped meanwhile.
fn back_soon() -> Result<()> {
    let (primary, mut standby, _vault, detour) = pair()?;
    standby.allow_log("recovery waits for a new key");
    standby.append_conf("pagevault.unlock_timeout = 1h\npagevault.revalidate_interval = 0")?;
    standby.restart()?;
    wait_for(&standby, &primary)?;
    let needs_a_new_key = |table: &str| -> Result<()> {
        primary.sql("SELECT pagevault.rotate_database_key()")?;
        primary.sql("SELECT pagevault.rotate_wal_key()")?;
        primary.sql(&format!("CREATE TABLE {table} AS SELECT * FROM secret"))?;
        write(&primary)
    };
    let asks_in_vain = |from: usize| {
        standby.eventually_that("the standby asks", || {
            let log = standby.log();
            let asked = log[from..].lines().filter(|line| {
                line.contains("\"by\":\"recovery\"") && line.contains("unreachable")
            });
            ensure!(asked.count() > 2, "not often enough");
            Ok(())
        })
    };
    let server = postmaster(&standby.data_directory());
    detour.cut();
    needs_a_new_key("later")?;
    asks_in_vain(0)?;
    readable(&standby)?;
    detour.restore();
    same(&standby, &primary)?;
    ensure!(standby.text("SELECT count(*) FROM later")? != "0", "rows are missing");
    ensure!(postmaster(&standby.data_directory()) == server, "it was started again");

    let from = standby.log().len();
    detour.cut();
    needs_a_new_key("latest")?;
    asks_in_vain(from)?;
    standby.stop(StopMode::Fast)?;
    detour.restore();
    standby.start_server()?;
    same(&standby, &primary)?;
    standby.finish()?;
    primary.finish()
}
