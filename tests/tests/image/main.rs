//! The container image: the result of a plain `docker run`, and the options of its entrypoint.
//!
//! `PAGEVAULT_IMAGE` names the image; `make image-test` sets it. Without Docker engine or image,
//! every test counts as ignored, with a message on standard error.

mod container;

use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use container::{Container, docker};
use libtest_mimic::{Arguments, Failed, Trial};

type Test = (&'static str, fn() -> Result<()>);

const TESTS: &[Test] = &[
    ("docker_run_alone_gives_an_encrypting_server", docker_run_alone_gives_an_encrypting_server),
    ("data_outlives_the_container", data_outlives_the_container),
    ("without_the_key_file_nothing_is_read", without_the_key_file_nothing_is_read),
    (
        "scripts_and_passwords_are_as_in_the_official_image",
        scripts_and_passwords_are_as_in_the_official_image,
    ),
    ("a_password_is_required", a_password_is_required),
    ("a_first_start_that_fails_is_begun_again", a_first_start_that_fails_is_begun_again),
    ("nothing_is_encrypted_if_so_wanted", nothing_is_encrypted_if_so_wanted),
    ("a_read_only_root_and_directories_of_the_host", a_read_only_root_and_directories_of_the_host),
    ("every_part_is_of_one_version", every_part_is_of_one_version),
    ("the_image_holds_only_what_runs", the_image_holds_only_what_runs),
];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let lacking = container::lacking();
    if let Some(lacking) = &lacking {
        eprintln!("SKIPPED the tests of the image: {lacking}");
    }
    let trial = |(name, run): &Test| {
        let run = *run;
        Trial::test(*name, move || run().map_err(|error| Failed::from(format!("{error:#}"))))
            .with_ignored_flag(lacking.is_some())
    };
    libtest_mimic::run(&arguments, TESTS.iter().map(trial).collect()).exit_code()
}

const PASSWORD: [&str; 2] = ["-e", "POSTGRES_PASSWORD=correct horse"];

fn docker_run_alone_gives_an_encrypting_server() -> Result<()> {
    let server = Container::run(&PASSWORD, &[])?;
    server.ready()?;
    ensure!(server.shell("stat -c %U /proc/1")? == "postgres", "the server runs as root");
    ensure!(server.sql("SELECT state, wal_encrypted FROM pagevault.status")? == "unlocked|t");

    server.sql("CREATE TABLE t AS SELECT 'Rosalind Franklin ' || i AS name FROM generate_series(1, 2000) i")?;
    server.sql("CREATE INDEX ON t (name)")?;
    server.sql("ANALYZE t")?;
    server.sql("CHECKPOINT")?;
    ensure!(server.sql("SELECT pagevault.is_encrypted('t')")? == "t");
    ensure!(server.in_data_directory("Rosalind Franklin")? == 0, "it is on disk in plaintext");
    // Verify that the search works.
    server.sql("CREATE TABLE plain (name text)")?;
    server.sql("SECURITY LABEL FOR pagevault ON TABLE plain IS 'plaintext'")?;
    server.sql("INSERT INTO plain VALUES ('Maurice Wilkins')")?;
    server.sql("CHECKPOINT")?;
    ensure!(server.in_data_directory("Maurice Wilkins")? > 0);

    let output = server.log()?;
    ensure!(
        output.contains("WITHOUT THIS FILE THE DATA IS LOST"),
        "nobody is told of the key file"
    );
    ensure!(output.contains("WITHOUT A NAME"), "nobody is told that its volume has no name");
    server.eventually("it is healthy", || {
        Ok(server.inspect("{{.State.Health.Status}}")? == "healthy")
    })
}

fn data_outlives_the_container() -> Result<()> {
    let server = Container::run(&PASSWORD, &[])?;
    server.ready()?;
    server.sql("CREATE TABLE t AS SELECT 42 AS answer")?;
    server.restart()?;
    server.ready()?;
    ensure!(server.sql("SELECT answer FROM t")? == "42");
    ensure!(server.sql("SELECT state FROM pagevault.status")? == "unlocked");
    // Like a power failure.
    server.sql("INSERT INTO t VALUES (43)")?;
    docker(&["kill", server.name()])?;
    docker(&["start", server.name()])?;
    server.ready()?;
    ensure!(server.sql("SELECT count(*) FROM t")? == "2");
    Ok(())
}

fn without_the_key_file_nothing_is_read() -> Result<()> {
    let server = Container::run(&PASSWORD, &["-c", "pagevault.unlock_timeout=1s"])?;
    server.ready()?;
    server.sql("CREATE TABLE t AS SELECT 42 AS answer")?;
    server.shell("mv /etc/pagevault/keys /etc/pagevault/away")?;
    docker(&["restart", server.name()])?;
    // WAL is encrypted, so the server does not start.
    server.eventually("it ends", || Ok(server.inspect("{{.State.Running}}")? == "false"))?;
    ensure!(server.log()?.contains("FATAL"), "it does not say why");
    Ok(())
}

fn scripts_and_passwords_are_as_in_the_official_image() -> Result<()> {
    let files = tempfile::tempdir()?;
    let write = |name: &str, text: &str| std::fs::write(files.path().join(name), text);
    write("1.sql", "CREATE TABLE from_sql AS SELECT current_database() AS name;")?;
    write(
        "2.sh",
        "psql -v ON_ERROR_STOP=1 -h /var/run/postgresql -U \"$POSTGRES_USER\" -d \"$POSTGRES_DB\" -c 'CREATE TABLE from_sh ()'\n",
    )?;
    write("password", "tr0ub4dor\n")?;
    let path = files.path().display();
    for name in ["1.sql", "2.sh", "password", ""] {
        let mode = if name.is_empty() { 0o755 } else { 0o644 };
        std::fs::set_permissions(files.path().join(name), std::fs::Permissions::from_mode(mode))?;
    }
    let server = Container::run(
        &[
            "-e",
            "POSTGRES_USER=alice",
            "-e",
            "POSTGRES_DB=app",
            "-e",
            "POSTGRES_PASSWORD_FILE=/password",
            "-v",
            &format!("{path}:/docker-entrypoint-initdb.d:ro"),
            "-v",
            &format!("{path}/password:/password:ro"),
        ],
        &["-c", "work_mem=5MB"],
    )?;
    let sql = |statement: &str| {
        server.shell(&format!(
            "PGPASSWORD=tr0ub4dor psql -X -A -t -q -h 127.0.0.1 -U alice -d app -c \"{statement}\""
        ))
    };
    server.eventually("it answers", || Ok(sql("SELECT 1").is_ok()))?;
    ensure!(sql("SELECT name FROM from_sql")? == "app");
    ensure!(sql("SELECT count(*) FROM from_sh")? == "0");
    ensure!(sql("SELECT pagevault.is_encrypted('from_sql')")? == "t");
    ensure!(sql("SHOW work_mem")? == "5MB");
    let wrong = "PGPASSWORD=wrong psql -h 127.0.0.1 -U alice -d app -c 'SELECT 1'";
    ensure!(server.shell(wrong).is_err(), "any password does");
    ensure!(!server.log()?.contains("tr0ub4dor"), "the password is in the log");
    ensure!(
        !server
            .shell("tr '\\0' '\\n' </proc/1/environ; cat /proc/1/cmdline")?
            .contains("tr0ub4dor"),
        "the server's environment holds the password"
    );
    Ok(())
}

fn a_password_is_required() -> Result<()> {
    let server = Container::run(&[], &[])?;
    server.eventually("it ends", || Ok(server.inspect("{{.State.Running}}")? == "false"))?;
    ensure!(server.inspect("{{.State.ExitCode}}")? != "0");
    ensure!(server.log()?.contains("POSTGRES_PASSWORD"), "{}", server.log()?);
    Ok(())
}

fn a_first_start_that_fails_is_begun_again() -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let options = |path: &str| -> Result<()> {
        std::fs::write(file.path(), format!("{{\"path\": \"{path}\"}}"))?;
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644))?;
        Ok(())
    };
    options("/etc/pagevault/elsewhere")?;
    let mount = format!("{}:/options:ro", file.path().display());
    let server = Container::run(
        &[&PASSWORD[..], &["-v", &mount, "-e", "PAGEVAULT_OPTIONS_FILE=/options"]].concat(),
        &[],
    )?;
    server.eventually("it ends", || Ok(server.inspect("{{.State.Running}}")? == "false"))?;
    ensure!(server.log()?.contains("/etc/pagevault/elsewhere"), "{}", server.log()?);
    options("/etc/pagevault/keys")?;
    docker(&["start", server.name()])?;
    server.ready()?;
    ensure!(server.log()?.contains("beginning again"), "{}", server.log()?);
    ensure!(server.sql("SELECT state, wal_encrypted FROM pagevault.status")? == "unlocked|t");
    Ok(())
}

fn nothing_is_encrypted_if_so_wanted() -> Result<()> {
    let server = Container::run(&[&PASSWORD[..], &["-e", "PAGEVAULT_ENCRYPT=none"]].concat(), &[])?;
    server.ready()?;
    server.sql("CREATE TABLE t AS SELECT 1 AS id")?;
    ensure!(server.sql("SELECT pagevault.is_encrypted('t')")? == "f");
    ensure!(server.sql("SELECT state, wal_encrypted FROM pagevault.status")? == "unlocked|f");
    server.sql("SELECT pagevault.encrypt('t')")?;
    ensure!(server.sql("SELECT pagevault.is_encrypted('t')")? == "t");
    Ok(())
}

fn a_read_only_root_and_directories_of_the_host() -> Result<()> {
    let host = tempfile::tempdir()?;
    let data = format!("{}:/var/lib/postgresql/data", host.path().join("data").display());
    let keys = format!("{}:/etc/pagevault", host.path().join("keys").display());
    let places = ["-v", &data, "-v", &keys, "--tmpfs", "/tmp"];
    let read_only = ["--read-only", "--tmpfs", "/var/run/postgresql:uid=999"];
    // Docker creates the directories, owned by root.
    let stranger = Container::run(&[&PASSWORD[..], &places].concat(), &[])?;
    stranger.eventually("it ends", || Ok(stranger.inspect("{{.State.Running}}")? == "false"))?;
    ensure!(stranger.log()?.contains("--user=root"), "{}", stranger.log()?);
    let given = Container::run(&[&PASSWORD[..], &places, &["--user=root"]].concat(), &[])?;
    given.ready()?;
    ensure!(given.shell("ps -o user= -p 1 2>/dev/null || stat -c %U /proc/1")? == "postgres");
    given.sql("CREATE TABLE t AS SELECT 42 AS answer")?;
    docker(&["stop", given.name()])?;
    let server = Container::run(&[&PASSWORD[..], &places, &read_only].concat(), &[])?;
    server.ready()?;
    ensure!(server.sql("SELECT answer FROM t")? == "42");
    ensure!(server.shell("touch /usr/here").is_err(), "the root file system can be written");
    Ok(())
}

fn every_part_is_of_one_version() -> Result<()> {
    let server = Container::run(&PASSWORD, &[])?;
    server.ready()?;
    let version =
        server.inspect("{{index .Config.Labels \"org.opencontainers.image.version\"}}")?;
    ensure!(version == env!("CARGO_PKG_VERSION"), "the image says {version}");
    ensure!(server.shell("pagevault-keyring --version")?.ends_with(&format!(" {version}")));
    let extension = "SELECT extversion FROM pg_extension WHERE extname = 'pagevault'";
    ensure!(server.sql(extension)? == version);
    let package = server.shell("dpkg-query -W -f '${Version}' 'postgresql-*-pagevault'")?;
    ensure!(package == format!("{version}-1"), "the package is {package}");
    Ok(())
}

fn the_image_holds_only_what_runs() -> Result<()> {
    let server = Container::run(&["--entrypoint", "sleep"], &["600"])?;
    for program in ["cargo", "rustc", "gcc", "cc", "clang", "git", "make"] {
        ensure!(
            server.shell(&format!("command -v {program}")).is_err(),
            "{program} is in the image"
        );
    }
    let left = server.shell("find / -xdev \\( -name '*.rs' -o -name Cargo.lock -o -name keys -path '*pagevault*' \\) 2>/dev/null; ls /run/secrets 2>/dev/null; true")?;
    ensure!(left.is_empty(), "left from building: {left}");
    let environment =
        docker(&["inspect", "-f", "{{.Config.Env}} {{.Config.User}}", server.name()])?;
    ensure!(environment.trim_end().ends_with("postgres"), "{environment}");
    ensure!(!environment.to_lowercase().contains("proxy"), "{environment}");
    Ok(())
}
