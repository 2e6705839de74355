//! CloudNativePG: the steps of its instance manager, with its own command lines, on servers that
//! have pagevault from an image volume.

mod pods;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::datafile::holds;
use pagevault_tests::installation::run;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::wal::{Segment, WalPage};

use self::pods::{Env, Host, Pod, crate_root};
use crate::Test;

/// Without the setting, which 18 has introduced, the operator mounts no images of extensions; and
/// this mounts one.
const NEEDS: &[&str] = &["extension_control_path", "mount namespaces"];

/// Whether the server or this machine has it.
pub(crate) fn is_there(what: &str) -> bool {
    match what {
        "extension_control_path" => Installation::get().is_ok_and(|found| found.major >= 18),
        "mount namespaces" => {
            let mut unshare = Command::new("unshare");
            unshare
                .args(["--mount", "mount", "--bind", "/tmp", "/tmp"])
                .output()
                .is_ok_and(|output| output.status.success())
        }
        "dpkg-deb" => Command::new("dpkg-deb").arg("--version").output().is_ok(),
        _ => false,
    }
}

pub(crate) const TESTS: &[Test] = &[
    Test { name: "cloudnativepg::a_cluster_lives", needs: NEEDS, run: a_cluster_lives },
    Test { name: "cloudnativepg::the_helper_is_found", needs: NEEDS, run: the_helper_is_found },
    Test { name: "cloudnativepg::the_library_is_idle", needs: NEEDS, run: the_library_is_idle },
    Test { name: "cloudnativepg::upgrades", needs: NEEDS, run: upgrades },
    Test { name: "cloudnativepg::packages", needs: &["dpkg-deb"], run: packages },
];

const SETUP: &str = include_str!("../../../../docs/examples/cloudnativepg/setup.sql");
const APPLICATION: &str = include_str!("../../../../docs/examples/cloudnativepg/application.sql");

/// Occurs in each row.
const CANARY: &str = "rotkehlchen-51e0b7c2d94a";
/// Occurs in each row that exists only on a failed server.
const LOST: &str = "zaunkoenig-0c83f2a6e715";

const CONTENT: &str = "SELECT concat_ws(' ', count(*), sum(hashtext(t::text)::bigint)) FROM t";

/// A key file, and the script of the example with this in place of Vault.
fn keys(host: &Host) -> Result<String> {
    let file = host.at("projected/keys");
    let mut create =
        host.command(&host.at("extensions/pagevault/bin/pagevault-keyring"), Env::Manager)?;
    run(create.args(["file", "create"]).arg(&file).args(["--key", "main"]))?;
    let (before, rest) =
        SETUP.split_once("PERFORM pagevault.add_provider(").context("a provider")?;
    let (_, after) = rest.split_once(");").context("its end")?;
    ensure!(after.contains("'vault', 'db-kek'"), "no master key");
    let provider = format!(
        "PERFORM pagevault.add_provider('vault', 'file', '{{\"path\": \"{}\"}}');",
        file.display()
    );
    Ok(format!("{before}{provider}{}", after.replace("db-kek", "main")))
}

/// The first pod of a cluster: `Bootstrap` (initdb.go).
fn bootstrapped<'a>(host: &'a Host, setup: &str) -> Result<Pod<'a>> {
    let mut pod = host.pod("db-1")?;
    pod.initdb()?;
    let socket = pod.volume().display().to_string();
    let mut start = pod.tool("pg_ctl", Env::Postgres)?;
    run(start.args(["start", "-w", "-D"]).arg(pod.pgdata()).args([
        "-o",
        &format!("-c port=5432 -c unix_socket_directories={socket}"),
        "-t 40000000",
        "-l",
        &pod.volume().join("log").display().to_string(),
    ]))
    .context("the first start")?;
    pod.sql("postgres", "CREATE ROLE app LOGIN")?;
    // Each file is one query to the operator. Again, as when the job is repeated.
    for _ in 0..2 {
        pod.sql("postgres", setup)?;
    }
    pod.sql("postgres", "CREATE DATABASE app OWNER app")?;
    for _ in 0..2 {
        pod.sql("app", APPLICATION)?;
    }
    pod.stop()?;
    pod.start()?;
    Ok(pod)
}

fn insert(pod: &Pod<'_>, canary: &str, rows: u32) -> Result<()> {
    pod.sql(
        "app",
        &format!("INSERT INTO t (name) SELECT '{canary}-' || i FROM generate_series(1, {rows}) i"),
    )
}

/// No row is readable in any file, and no page of WAL is plaintext.
fn assert_sealed(pod: &Pod<'_>) -> Result<()> {
    let canaries = [CANARY, LOST].map(|text| Canary::stored(text, text.as_bytes().to_vec()));
    let found = Scanner::new(&canaries).scan_trees(&[&pod.pgdata()])?;
    ensure!(found.is_empty(), "{}: {}", pod.name, report(&found));
    for segment in Segment::all(&pod.pgdata().join("pg_wal"))? {
        let plain = segment.pages()?.iter().filter(|page| **page == WalPage::Plain).count();
        ensure!(plain == 0, "{plain} plaintext pages in {}", segment.path.display());
    }
    Ok(())
}

fn a_cluster_lives() -> Result<()> {
    let host = Host::new()?;
    let setup = keys(&host)?;
    let mut first = bootstrapped(&host, &setup)?;
    let status =
        |column: &str| first.text("postgres", &format!("SELECT {column} FROM pagevault.status"));
    let shown = status("keyring_command")?;
    ensure!(shown.ends_with("/extensions/pagevault/bin/pagevault-keyring"), "{shown}");
    first.eventually("postgres", "SELECT wal_encrypted FROM pagevault.status", "t")?;
    let refused = first.error("ALTER SYSTEM SET pagevault.wal_encryption = off")?;
    ensure!(refused.text().contains("ALTER SYSTEM is not allowed"), "{}", refused.text());
    for place in [host.at("extensions/pagevault/bin"), "/var/tmp".into()] {
        let mut touch = host.command(Path::new("/usr/bin/touch"), Env::Manager)?;
        let touched = touch.arg(place.join("pagevault-cnpg")).output()?;
        let said = String::from_utf8_lossy(&touched.stderr).into_owned();
        ensure!(said.contains("Read-only file system"), "{}: {said}", place.display());
    }

    first.sql("app", "SELECT pg_switch_wal()")?;
    first.sql("app", "CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    insert(&first, CANARY, 5000)?;
    for relation in ["t", "pg_class", "pg_statistic"] {
        let query = format!("SELECT pagevault.is_encrypted('{relation}')");
        ensure!(first.text("app", &query)? == "t", "{relation} is not encrypted");
    }
    for database in ["postgres", "app"] {
        let drift = first.text(database, "SELECT count(*) FROM pagevault.drift(true)")?;
        ensure!(drift == "0", "{drift} relations of {database} are not as wanted");
    }

    // A new replica. The stream is plaintext, and so is its copy, until it starts.
    let mut second = host.pod("db-2")?;
    let mut writer = first.client("app")?;
    let copied = std::thread::scope(|scope| {
        let writing = scope.spawn(move || -> Result<()> {
            let insert = format!(
                "INSERT INTO t (name) SELECT '{CANARY}-' || i FROM generate_series(1, 2000) i"
            );
            (0..50).try_for_each(|_| pagevault_tests::cluster::run_sql(&mut writer, &insert))
        });
        let joined = second.join(&first);
        writing.join().map_err(|_| anyhow::anyhow!("the writer has panicked"))??;
        joined
    });
    copied?;
    second.start()?;
    first.is_followed_by(&second)?;
    assert_sealed(&second)?;
    ensure!(second.text("app", CONTENT)? == first.text("app", CONTENT)?, "the tables differ");

    // The first node writes what nobody receives, with keys that nobody else has, and is lost.
    second.stop()?;
    first.sql("postgres", "SELECT pagevault.rotate_wal_key()")?;
    first.sql("app", "SELECT pagevault.rotate_data_key('t')")?;
    insert(&first, LOST, 5000)?;
    first.sql("app", "CHECKPOINT")?;
    first.kill()?;
    second.start()?;
    second.promote()?;
    insert(&second, CANARY, 1000)?;
    second.sql("postgres", "SELECT pagevault.rotate_wal_key()")?;

    // It returns: the operator's own call of the stock program.
    let alone = first.rewind(&second, Env::Manager)?.output()?;
    ensure!(!alone.status.success(), "pg_rewind needs no keys: nothing is tested");
    run(&mut first.rewind(&second, Env::Postgres)?).context("pg_rewind")?;
    // It is not the source's, so pg_rewind has removed it.
    ensure!(!first.pgdata().join("global/pg_control.old").exists(), "it was not rewound");
    first.configure(&first.pgdata(), "extensions")?;
    first.follow(&second)?;
    first.make_standby()?;
    first.start()?;
    second.is_followed_by(&first)?;
    ensure!(second.text("app", CONTENT)? == first.text("app", CONTENT)?, "the tables differ");

    // And leads again, after a switchover.
    second.stop()?;
    first.promote()?;
    second.follow(&first)?;
    second.make_standby()?;
    second.start()?;
    insert(&first, CANARY, 1000)?;
    first.is_followed_by(&second)?;
    let content = first.text("app", CONTENT)?;
    ensure!(second.text("app", CONTENT)? == content, "the tables differ");

    restore(&host, &first, &content)?;
    first.stop()?;
    second.stop()?;
    assert_sealed(&second)?;
    for pod in [&first, &second] {
        run(pod.tool("pg_checksums", Env::Manager)?.args(["--check", "-D"]).arg(pod.pgdata()))?;
    }
    let archived = fs::read_dir(host.at("archive"))?.map(|entry| Ok(fs::read(entry?.path())?));
    for bytes in archived.collect::<Result<Vec<_>>>()? {
        ensure!(!holds(&bytes, CANARY.as_bytes()), "the archive has plaintext");
    }
    Ok(())
}

/// A backup of files and the archive, as that of barman-cloud and of volume snapshots; the restore
/// is that of the operator: `recovery.signal` and a target.
fn restore(host: &Host, from: &Pod<'_>, content: &str) -> Result<()> {
    let mut restored = host.pod("db-restored")?;
    let mut session = from.client("postgres")?;
    let ask = |session: &mut _, query: &str| pagevault_tests::cluster::text(session, query);
    ask(&mut session, "SELECT pg_backup_start('backup', true)")?;
    run(Command::new("cp").arg("-a").arg(from.pgdata()).arg(restored.pgdata()))?;
    let label = ask(&mut session, "SELECT labelfile FROM pg_backup_stop()")?;
    for name in ["postmaster.pid", "postmaster.opts", "standby.signal"] {
        let _ = fs::remove_file(restored.pgdata().join(name));
    }
    let wal = restored.pgdata().join("pg_wal");
    for segment in Segment::all(&wal)? {
        fs::remove_file(segment.path)?;
    }
    restored.configure(&restored.pgdata(), "extensions")?;
    restored.write_to(&restored.pgdata().join("backup_label"), &label)?;
    restored.write_to(&restored.pgdata().join("recovery.signal"), "")?;
    restored.write_to(
        &restored.pgdata().join("override.conf"),
        &format!(
            "restore_command = 'cp {}/%f %p'\nrecovery_target_action = promote\narchive_mode = off\n",
            host.at("archive").display()
        ),
    )?;
    restored.start()?;
    restored.eventually("postgres", "SELECT pg_is_in_recovery()", "f")?;
    let found = restored.text("app", CONTENT)?;
    ensure!(found == content, "{found} instead of {content}");
    restored.stop()?;
    assert_sealed(&restored)
}

/// Where the helper is looked for, and which is refused.
fn the_helper_is_found() -> Result<()> {
    let host = Host::new()?;
    let setup = keys(&host)?;
    let mut pod = host.pod("db-1")?;
    pod.initdb()?;
    let elsewhere = host.at("elsewhere");
    let custom = pod.pgdata().join("custom.conf");
    pod.write_to(
        &custom,
        &fs::read_to_string(&custom)?.replace("wal_encryption = 'on'", "wal_encryption = 'off'"),
    )?;
    pod.start()?;
    pod.sql("postgres", "CREATE EXTENSION pagevault")?;
    let add = format!(
        "SELECT pagevault.add_provider('x', 'file', '{{\"path\": \"{}\"}}')",
        host.at("projected/keys").display()
    );
    let image = host.at("image/bin");
    let helper = image.join("pagevault-keyring");
    let mode = |mode| fs::set_permissions(&helper, fs::Permissions::from_mode(mode));

    mode(0o757)?;
    let refused = pod.error(&add)?.text();
    for part in [
        "58000 could not find the program \"pagevault-keyring\"",
        "Key providers are reached through this program. There is none in \"",
        "/extensions/pagevault/bin\" is refused: other users can write to \"",
        "(mode 0757)",
        "Install it, owned by root and writable by its owner only, or set pagevault.keyring_command.",
    ] {
        ensure!(refused.contains(part), "no {part:?} in:\n{refused}");
    }
    let none = pod.text("postgres", "SELECT keyring_command IS NULL FROM pagevault.status")?;
    ensure!(none == "t", "status names one");

    fs::rename(&helper, elsewhere.join("kept"))?;
    let missing = pod.error(&add)?.text();
    ensure!(missing.contains("There is none in \""), "{missing}");
    ensure!(missing.contains("/extensions/pagevault/bin\", \""), "{missing}");
    ensure!(!missing.contains("refused"), "{missing}");

    fs::rename(elsewhere.join("kept"), &helper)?;
    mode(0o755)?;
    pod.sql("postgres", &setup)?;
    pod.stop()
}

/// Loaded into everything that the server starts, the library does nothing there; in `pg_rewind` it
/// takes only what it knows, and ends it without keys.
fn the_library_is_idle() -> Result<()> {
    let host = Host::new()?;
    let output = |program: &str, arguments: &[&str], options: Option<&str>| -> Result<String> {
        let mut command = host.command(Path::new("/usr/bin/env"), Env::Postgres)?;
        command.args(options.map(|options| format!("PAGEVAULT_EXEC_OPTIONS={options}")));
        let output = command.arg(program).args(arguments).output()?;
        Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let environment = output("/bin/sh", &["-c", "env; exec cat /proc/self/comm"], None)?;
    ensure!(environment.contains("LD_PRELOAD=/"), "{environment}");
    ensure!(environment.trim_end().ends_with("cat"), "{environment}");
    let bin = host.bin()?;
    let at = |name: &str| bin.join(name).display().to_string();
    for name in ["postgres", "pg_ctl", "pg_rewind", "pg_upgrade"] {
        let version = output(&at(name), &["--version"], None)?;
        ensure!(version.starts_with(&format!("{name} (PostgreSQL) ")), "{version}");
    }
    // No keystore: as without the library.
    let plain = ["--target-pgdata=/nonexistent", "--source-server=host=/nonexistent"];
    let missing = output(&at("pg_rewind"), &plain, None)?;
    ensure!(missing.contains("/nonexistent"), "{missing}");
    for options in ["-- /bin/sh", "--library=/x.so", "--providers /x", "--allow-credential"] {
        let refused = output(&at("pg_rewind"), &plain, Some(options))?;
        ensure!(refused.starts_with("pagevault: PAGEVAULT_EXEC_OPTIONS contains \""), "{refused}");
    }
    fs::remove_file(host.at("image/bin/pagevault-keyring"))?;
    let missing = output(&at("pg_rewind"), &plain, None)?;
    ensure!(missing.starts_with("pagevault: could not find the program"), "{missing}");
    ensure!(missing.contains("/extensions/pagevault/bin\""), "{missing}");
    Ok(())
}

/// The job of a major upgrade (upgrade/execute/cmd.go). With one major, which is all that this
/// needs to show: the operator's call of `pg_upgrade` transfers the keys.
fn upgrades() -> Result<()> {
    let host = Host::new()?;
    let setup = keys(&host)?;
    let mut pod = bootstrapped(&host, &setup)?;
    pod.sql("app", "CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    insert(&pod, CANARY, 5000)?;
    let content = pod.text("app", CONTENT)?;
    pod.stop()?;
    pod.mount()?;

    let new = pod.volume().join("pgdata-new");
    run(pod
        .tool("initdb", Env::Manager)?
        .args(["--username", "postgres", "-D"])
        .arg(&new)
        .args(["--wal-segsize=16", "--data-checksums"]))?;
    pod.configure(&new, "extensions")?;
    let upgrade = |env| -> Result<Command> {
        let mut upgrade = pod.tool("pg_upgrade", env)?;
        upgrade.args(["--link", "--username", "postgres", "--old-bindir"]).arg(host.bin()?);
        upgrade.arg("--old-datadir").arg(pod.pgdata()).arg("--new-datadir").arg(&new);
        upgrade.current_dir(&new);
        Ok(upgrade)
    };
    let alone = upgrade(Env::Manager)?.output()?;
    ensure!(!alone.status.success(), "pg_upgrade needs no keys: nothing is tested");
    run(&mut upgrade(Env::Postgres)?).context("pg_upgrade")?;
    fs::rename(pod.pgdata(), pod.volume().join("pgdata.old"))?;
    fs::rename(&new, pod.pgdata())?;
    fs::remove_dir_all(pod.volume().join("pgdata.old"))?;
    pod.start()?;
    ensure!(pod.text("app", CONTENT)? == content, "the tables differ");
    ensure!(pod.text("app", "SELECT pagevault.is_encrypted('t')")? == "t", "it is not encrypted");
    pod.stop()
}

/// The tree is the same from a package as from a server, and belongs to root alone.
fn packages() -> Result<()> {
    let root = tempfile::tempdir()?;
    let at = |name: &str| root.path().join(name);
    let tool = || {
        let mut tool = Command::new(crate_root().join("tools/cnpg-image"));
        tool.arg("tree");
        tool
    };
    let pg_config = Installation::get()?.program("pg_config");
    run(tool().arg(at("tree")).arg(pg_config))?;
    // As tools/deb does.
    for (from, to) in [
        ("lib", "usr/lib/postgresql/18/lib"),
        ("bin", "usr/lib/postgresql/18/bin"),
        ("share/extension", "usr/share/postgresql/18/extension"),
    ] {
        fs::create_dir_all(at("package").join(to).parent().context("a directory")?)?;
        run(Command::new("cp").arg("-r").arg(at("tree").join(from)).arg(at("package").join(to)))?;
    }
    let documents = at("package/usr/share/doc/postgresql-18-pagevault");
    fs::create_dir_all(&documents)?;
    fs::write(documents.join("copyright"), "licences")?;
    fs::create_dir(at("package/DEBIAN"))?;
    fs::write(
        at("package/DEBIAN/control"),
        "Package: postgresql-18-pagevault\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.com>\nDescription: test\n",
    )?;
    run(Command::new("dpkg-deb").args(["-Znone", "--build"]).arg(at("package")).arg(at("deb")))?;
    run(tool().arg(at("again")).arg(at("deb")))?;
    let same = run(Command::new("diff")
        .arg("-r")
        .arg(at("tree"))
        .arg(at("again"))
        .arg("--exclude=licenses"))?;
    ensure!(same.is_empty(), "{same}");
    ensure!(at("again/licenses/copyright").exists(), "the licences are missing");
    let open = run(Command::new("find").arg(at("again")).args(["-perm", "/022"]))?;
    ensure!(open.is_empty(), "others can write to {open}");
    // Nothing is replaced.
    ensure!(!tool().arg(at("again")).arg(at("deb")).output()?.status.success());
    Ok(())
}
