//! Carries out operations on real servers, and has them judged.

mod copies;
mod end;
mod kills;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use postgres::Client;
use tempfile::TempDir;

use super::database::{Database, Label, SCHEMAS};
use super::judge::{self, Server};
use super::operation::{Operation, Order, Setup};
use super::statement::{GROUPS, Statement, group_name};
use super::world::{MAIN, SESSIONS, World, database_name};
use crate::cluster::{column, expect_error, run_sql, text};
use crate::standby::wait_for;
use crate::{Cluster, Installation, KeyFile, Settings};

pub(super) struct Player {
    world: World,
    primary: Cluster,
    standby: Option<Cluster>,
    backups: Vec<Cluster>,
    clients: Vec<Option<Client>>,
    keys: KeyFile,
    /// Of all key groups.
    group_keys: KeyFile,
    /// What the database `postgres` may be like, after statements that were not acknowledged.
    possible: Vec<Database>,
    checksums: bool,
    /// Ids of rows that logical decoding has seen.
    seen: BTreeSet<i64>,
    /// Whether all WAL that the primary has was written encrypted.
    wal_is_hidden: bool,
    /// Where the key file is: servers come and go.
    _directory: TempDir,
}

/// What is in the log of a server whose processes are killed and whose keys are taken away. A PANIC
/// is never.
fn expect_noise(cluster: &mut Cluster) {
    cluster.allow_log("WARNING:  ");
    cluster.allow_log("FATAL:  ");
}

impl Player {
    pub(super) fn start(setup: Setup) -> Result<Player> {
        let installation = Installation::get()?;
        let directory = tempfile::Builder::new().prefix("pagevault-").tempdir()?;
        installation.give(directory.path())?;
        let keys = KeyFile::create(installation, &directory.path().join("keys"), "main")?;
        let mut settings = Settings::default()
            .conf("checkpoint_timeout = 1h\nwal_keep_size = 512MB\nwal_log_hints = on")
            .conf("shared_buffers = 16MB\nmax_prepared_transactions = 2\nmax_worker_processes = 16")
            .conf("allow_in_place_tablespaces = on\nrestart_after_crash = on")
            .conf("pagevault.unlock_timeout = 1s\npagevault.rekey_rate = 0");
        if !setup.checksums {
            settings = settings.without_checksums();
        }
        let mut primary = Cluster::start(&settings)?;
        primary.without_witness("schedules make copies of their own, and take files away");
        expect_noise(&mut primary);
        primary.sql("CREATE EXTENSION pagevault; CREATE SCHEMA open; CREATE SCHEMA vault")?;
        primary.sql(&keys.add_provider("local"))?;
        primary.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
        let group_keys =
            KeyFile::create(installation, &directory.path().join("group_keys"), "main")?;
        if setup.key_groups {
            primary.sql(&group_keys.add_provider("tenants"))?;
        }
        for group in (1..=GROUPS).filter(|_| setup.key_groups).map(group_name) {
            group_keys.add_key(&group)?;
            primary.sql(&format!(
                "SELECT pagevault.create_key_group('{group}');
                 SELECT pagevault.set_key_group_master_key('{group}', 'tenants', '{group}')"
            ))?;
        }
        if setup.forgets {
            primary.set(&[
                ("pagevault.keep_former_keys", "0"),
                ("pagevault.keep_former_wal_keys", "0"),
            ])?;
        }
        if setup.minimal_wal {
            primary.append_conf("wal_level = minimal\nmax_wal_senders = 0")?;
            primary.restart()?;
        }
        if setup.logical_wal {
            primary.append_conf("wal_level = logical\nlogical_decoding_work_mem = 64kB")?;
            primary.restart()?;
        }
        if setup.tablespace {
            primary.sql("CREATE TABLESPACE space LOCATION ''")?;
        }
        if setup.labelled_tablespace {
            primary.sql("SECURITY LABEL FOR pagevault ON TABLESPACE space IS 'encrypted'")?;
        }
        if setup.wal_encryption {
            primary.set(&[("pagevault.wal_encryption", "on")])?;
            primary.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
        }
        Ok(Player {
            world: World::new(setup),
            primary,
            standby: None,
            backups: Vec::new(),
            clients: (0..SESSIONS).map(|_| None).collect(),
            keys,
            group_keys,
            possible: Vec::new(),
            checksums: setup.checksums,
            seen: BTreeSet::new(),
            wal_is_hidden: setup.wal_encryption,
            _directory: directory,
        })
    }

    /// Carries out an operation, unless it does not fit; whether it did.
    pub(super) fn play(&mut self, operation: &Operation) -> Result<bool> {
        if !self.world.allows(operation) {
            return Ok(false);
        }
        // Transactions with shredded rows are not decoded any more.
        if operation.shreds() && self.world.slot.is_some() {
            self.copy(&Operation::Decode)?;
        }
        if !self.carry_out(operation)? {
            return Ok(false);
        }
        self.world.apply(operation);
        match operation {
            Operation::CrashAt { .. } | Operation::Together { .. } => self.look_what_came_of()?,
            Operation::StopImmediately
            | Operation::Crash
            | Operation::CrashInRecovery { .. }
            | Operation::CrashWithoutGroups { .. }
            | Operation::Kill { .. }
            | Operation::Restart
            | Operation::Promote { .. }
            | Operation::KeysBack
            | Operation::CreateDatabase { .. }
            | Operation::Dump { .. }
            | Operation::MoveDatabase { .. }
            | Operation::Judge => self.judge()?,
            _ => {}
        }
        Ok(true)
    }

    fn judge(&self) -> Result<()> {
        judge::hides(&self.primary, self.wal_is_hidden)?;
        judge::judge(&self.primary, &self.world, Server::Primary)?;
        // Without a provider it waits where a new database key comes.
        if let Some(standby) = self.standby.as_ref().filter(|_| !self.world.keys_away) {
            wait_for(standby, &self.primary)?;
            judge::judge(standby, &self.world, Server::Standby).context("on the standby")?;
            judge::hides(standby, false).context("on the standby")?;
        }
        Ok(())
    }

    /// The session's connection, made when it is needed.
    fn client(&mut self, session: u8) -> Result<&mut Client> {
        let database = self.world.sessions[usize::from(session)].database;
        let slot = &mut self.clients[usize::from(session)];
        if slot.is_none() {
            *slot = Some(judge::connect(&self.primary, &database_name(database))?);
        }
        slot.as_mut().context("a session")
    }

    fn disconnect(&mut self) {
        self.clients.iter_mut().for_each(|client| *client = None);
    }

    /// Runs statements in a session of their own.
    fn sql_in(&self, database: u8, statements: &str) -> Result<()> {
        run_sql(&mut judge::connect(&self.primary, &database_name(database))?, statements)
    }

    fn carry_out(&mut self, operation: &Operation) -> Result<bool> {
        match operation {
            Operation::Run { session, statement } => {
                let sql = statement.sql(&self.world.seen_by(*session), &self.world.context);
                run_sql(self.client(*session)?, &sql)?;
            }
            Operation::Begin { session } => run_sql(self.client(*session)?, "BEGIN")?,
            Operation::Savepoint { session } => run_sql(self.client(*session)?, "SAVEPOINT s")?,
            Operation::RollbackTo { session } => {
                run_sql(self.client(*session)?, "ROLLBACK TO SAVEPOINT s")?;
            }
            Operation::Commit { session } => run_sql(self.client(*session)?, "COMMIT")?,
            Operation::Rollback { session } => run_sql(self.client(*session)?, "ROLLBACK")?,
            Operation::Prepare { session } => {
                run_sql(self.client(*session)?, "PREPARE TRANSACTION 'prepared'")?;
            }
            Operation::FinishPrepared { commit } => {
                let end = if *commit { "COMMIT" } else { "ROLLBACK" };
                self.sql_in(MAIN, &format!("{end} PREPARED 'prepared'"))?;
            }
            Operation::Connect { session, .. } => self.clients[usize::from(*session)] = None,
            Operation::Judge => {}
            Operation::Unforeseen { sql } => self.sql_in(MAIN, sql)?,
            Operation::Default { .. }
            | Operation::Jobs { .. }
            | Operation::Crawl { .. }
            | Operation::DatabaseLabel { .. }
            | Operation::SchemaLabel { .. }
            | Operation::ShredSchema { .. }
            | Operation::ShredDatabase { .. }
            | Operation::Mark
            | Operation::Checkpoint
            | Operation::Order { .. }
            | Operation::WaitForJobs
            | Operation::RotateAllDataKeys { .. }
            | Operation::EncryptDatabase { .. }
            | Operation::Forbidden { .. }
            | Operation::WalEncryption { .. }
            | Operation::RotateClusterMasterKey
            | Operation::MoveClusterMasterKey
            | Operation::OwnMasterKey { .. }
            | Operation::RotateDatabaseMasterKey { .. }
            | Operation::RotateDatabaseKey { .. }
            | Operation::RotateKeyGroupMasterKey { .. }
            | Operation::RotateKeyGroupKey { .. }
            | Operation::RotateWalKey
            | Operation::ShredFormerFiles { .. }
            | Operation::MoveDatabase { .. }
            | Operation::DropDatabase { .. }
            | Operation::DropExtension { .. } => self.administer(operation)?,
            Operation::CreateDatabase { database, template, by_files } => {
                return self.create_database(*database, *template, *by_files);
            }
            Operation::Restart
            | Operation::StopImmediately
            | Operation::Crash
            | Operation::Kill { .. }
            | Operation::CrashAt { .. }
            | Operation::Together { .. }
            | Operation::CrashInRecovery { .. }
            | Operation::CrashWithoutGroups { .. }
            | Operation::KeysAway
            | Operation::KeysBack => return self.disturb(operation),
            Operation::MakeStandby
            | Operation::CrashStandby
            | Operation::Promote { .. }
            | Operation::BackUp { .. }
            | Operation::Dump { .. }
            | Operation::MakeSlot
            | Operation::Decode
            | Operation::Restore { .. } => self.copy(operation)?,
        }
        Ok(true)
    }

    /// Operations that are one call, and in which database.
    fn call(&self, operation: &Operation) -> Result<Option<(u8, String)>> {
        let call =
            |database: u8, function: &str| (database, format!("SELECT pagevault.{function}"));
        Ok(Some(match operation {
            Operation::Run { statement, .. } => {
                (MAIN, statement.sql(&self.world.databases[&MAIN], &self.world.context))
            }
            Operation::Checkpoint => (MAIN, "CHECKPOINT".to_owned()),
            Operation::SchemaLabel { database, schema, label } => {
                let (schema, label) = (SCHEMAS[usize::from(*schema)], Label::sql(*label));
                let set = format!("SECURITY LABEL FOR pagevault ON SCHEMA {schema} IS {label}");
                (*database, set)
            }
            Operation::DatabaseLabel { database, on } => {
                let label = Label::sql(on.then_some(Label::Encrypted));
                let name = database_name(*database);
                (*database, format!("SECURITY LABEL FOR pagevault ON DATABASE {name} IS {label}"))
            }
            Operation::ShredSchema { database, schema } => {
                let schema = SCHEMAS[usize::from(*schema)];
                call(*database, &format!("shred_schema('{schema}', '{schema}')"))
            }
            Operation::Mark => {
                // With a transaction number, so that COMMIT flushes it.
                let name = format!("mark {}", self.world.marks);
                let mark =
                    format!("SELECT pg_create_restore_point('{name}'), pg_current_xact_id()");
                (MAIN, mark)
            }
            Operation::RotateClusterMasterKey => call(MAIN, "rotate_cluster_master_key()"),
            Operation::MoveClusterMasterKey => {
                let key = format!("main{}", self.world.master_keys);
                self.keys.add_key(&key)?;
                call(MAIN, &format!("set_cluster_master_key('local', '{key}')"))
            }
            Operation::OwnMasterKey { database } => {
                call(*database, "set_database_master_key('local', 'main')")
            }
            Operation::RotateDatabaseMasterKey { database } => {
                call(*database, "rotate_database_master_key()")
            }
            Operation::RotateDatabaseKey { database } => call(*database, "rotate_database_key()"),
            Operation::RotateKeyGroupMasterKey { group } => {
                call(MAIN, &format!("rotate_key_group_master_key('{}')", group_name(*group)))
            }
            Operation::RotateKeyGroupKey { group } => {
                call(MAIN, &format!("rotate_key_group_key('{}')", group_name(*group)))
            }
            Operation::RotateWalKey => call(MAIN, "rotate_wal_key()"),
            Operation::RotateAllDataKeys { database } => call(*database, "rotate_all_data_keys()"),
            Operation::EncryptDatabase { database } => call(*database, "encrypt_database()"),
            Operation::ShredFormerFiles { database } => {
                let name = database_name(*database);
                call(*database, &format!("shred_former_files('{name}')"))
            }
            _ => return Ok(None),
        }))
    }

    fn administer(&mut self, operation: &Operation) -> Result<()> {
        if let Some((database, call)) = self.call(operation)? {
            return match self.sql_in(database, &call) {
                // How many files a table has had the model does not know.
                Err(error) if error.to_string().contains("no keys of files that are gone") => {
                    Ok(())
                }
                other => other,
            };
        }
        match operation {
            Operation::Default { .. }
            | Operation::Jobs { .. }
            | Operation::Crawl { .. }
            | Operation::WalEncryption { .. } => {
                let mut after = self.world.clone();
                after.apply(operation);
                self.set(&after)
            }
            Operation::WaitForJobs => self.wait_for_jobs(),
            Operation::Order { order } => self.order(*order),
            Operation::Forbidden { database, table } => {
                let mut client = judge::connect(&self.primary, &database_name(*database))?;
                run_sql(&mut client, "SET pagevault.enforce_encryption = on")?;
                let label = Statement::Label { table: *table, label: Some(Label::Plaintext) };
                let label = label.sql(&self.world.databases[database], &self.world.context);
                let error = expect_error(&mut client, &label)?;
                ensure!(error.text().contains("is enforced"), "{label}: {error}");
                Ok(())
            }
            Operation::MoveDatabase { database, to_other } => {
                self.disconnect();
                let space = if *to_other { "space" } else { "pg_default" };
                let name = database_name(*database);
                self.primary.sql(&format!("ALTER DATABASE {name} SET TABLESPACE {space}"))
            }
            Operation::DropDatabase { database } => {
                self.disconnect();
                self.primary.sql(&format!("DROP DATABASE {}", database_name(*database)))
            }
            Operation::ShredDatabase { database } => {
                self.disconnect();
                let name = database_name(*database);
                let shred = format!("SELECT * FROM pagevault.shred_database('{name}', '{name}')");
                self.primary.sql(&shred)?;
                self.primary.sql(&format!("DROP DATABASE {name}"))
            }
            Operation::DropExtension { database } => {
                let mut client = judge::connect(&self.primary, &database_name(*database))?;
                let error = expect_error(&mut client, "DROP EXTENSION pagevault")?;
                ensure!(error.sqlstate == "2BP01", "DROP EXTENSION: {error}");
                Ok(())
            }
            _ => bail!("{operation:?} is nothing to administer"),
        }
    }

    /// False if it was refused, because pages must be read that cannot be read any more.
    fn create_database(&mut self, database: u8, template: u8, by_files: bool) -> Result<bool> {
        self.disconnect();
        let shredded = self.world.databases[&template].tables.values().any(|t| t.shredded);
        let strategy = if by_files { "file_copy" } else { "wal_log" };
        let (name, template) = (database_name(database), database_name(template));
        let from = if template == "postgres" { "template1" } else { "postgres" };
        let mut client = self.primary.client_to(from)?;
        let create = format!("CREATE DATABASE {name} TEMPLATE {template} STRATEGY {strategy}");
        if shredded && !by_files {
            let error = expect_error(&mut client, &create)?;
            let destroyed = error.sqlstate == "55000" && error.text().contains("were destroyed");
            ensure!(destroyed, "a relation of {template} is shredded, and the server says {error}");
            let left = "SELECT string_agg(d, ', ') FROM pg_ls_dir('base') d
                 WHERE d ~ '^[0-9]+$' AND d::oid NOT IN (SELECT oid FROM pg_database)";
            let left = text(&mut client, left)?;
            ensure!(left.is_empty(), "files of a database that was not made: {left}");
            return Ok(false);
        }
        run_sql(&mut client, &create)?;
        Ok(true)
    }

    /// Makes the settings of the primary what the model says.
    pub(super) fn set(&mut self, world: &World) -> Result<()> {
        let on = |on: bool| if on { "on" } else { "off" };
        let wal_encryption =
            if world.wal_was_encrypted { on(world.wal_encryption) } else { "keep" };
        self.primary.set(&[
            ("pagevault.default_encryption", on(world.context.default)),
            ("pagevault.rekey_threshold", if world.context.at_once { "8MB" } else { "0" }),
            ("pagevault.rekey_rate", if world.crawling { "16kB" } else { "0" }),
            ("pagevault.wal_encryption", wal_encryption),
        ])?;
        self.wal_is_hidden &= world.wal_encryption;
        let encrypted = if world.wal_encryption { "t" } else { "f" };
        self.primary.eventually("SELECT wal_encrypted FROM pagevault.status", encrypted)
    }

    fn order(&self, order: Order) -> Result<()> {
        let (function, state) = match order {
            Order::Pause => ("pause_rekey", "state IN ('waiting', 'running')"),
            Order::Resume => ("resume_rekey", "state = 'paused'"),
            Order::Cancel => ("cancel_rekey", "state IN ('waiting', 'running', 'paused')"),
        };
        for database in self.world.databases.keys() {
            let mut client = judge::connect(&self.primary, &database_name(*database))?;
            let jobs = format!("SELECT job FROM pagevault.rekey_jobs WHERE {state}");
            for job in column(&mut client, &jobs)? {
                let ordered = run_sql(&mut client, &format!("SELECT pagevault.{function}({job})"));
                let done =
                    format!("SELECT state = 'done' FROM pagevault.rekey_jobs WHERE job = {job}");
                if ordered.is_err() && text(&mut client, &done)? != "t" {
                    return ordered;
                }
            }
        }
        Ok(())
    }

    fn wait_for_jobs(&self) -> Result<()> {
        let open =
            "SELECT count(*) FROM pagevault.rekey_jobs WHERE state IN ('waiting', 'running')";
        let failed = "SELECT concat_ws(' ', job, relation, kind, error) FROM pagevault.rekey_jobs WHERE state = 'failed'";
        let deadline = Instant::now() + Duration::from_secs(60);
        for database in self.world.databases.keys() {
            let mut client = judge::connect(&self.primary, &database_name(*database))?;
            while text(&mut client, open)? != "0" {
                let jobs = "SELECT j::text FROM pagevault.rekey_jobs j";
                ensure!(
                    Instant::now() < deadline,
                    "jobs do not end: {:?}",
                    column(&mut client, jobs)?
                );
                std::thread::sleep(Duration::from_millis(20));
            }
            let failed = column(&mut client, failed)?;
            ensure!(failed.is_empty(), "jobs have failed: {failed:?}");
        }
        Ok(())
    }
}
