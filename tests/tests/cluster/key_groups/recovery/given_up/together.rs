//! Two groups that are given up at the same time.

use std::process::{Child, Command, Stdio};

use super::*;

/// The command for a group; what it says is read when it has ended.
fn command_for(server: &Cluster, group: &str) -> Command {
    let mut program = server.program("pagevault-keyring");
    program.arg("give-up-key-group").arg("--data-directory").arg(server.data_directory());
    program.args(["--key-group", group, "--confirm", group, "--without-answer"]);
    program.stdout(Stdio::piped()).stderr(Stdio::piped());
    program
}

fn succeeds(child: Child) -> Result<()> {
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success() && said.contains("is destroyed in this data"), "{said}");
    Ok(())
}

/// Whether a process waits for a lock of a file.
fn waits(process: u32) -> Result<bool> {
    let locks = fs::read_to_string("/proc/locks")?;
    let process = process.to_string();
    let is_its = |line: &str| line.contains("->") && line.split(' ').any(|word| word == process);
    Ok(locks.lines().any(is_its))
}

#[test]
fn both_are_destroyed() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    allow(&mut cluster);
    // A command has read the keystore when it asks this provider, which does not answer until then.
    let place = |name: &str| cluster.directory().join(name);
    let (away, asked, go) = (place("away"), place("asked"), place("go"));
    let wait = format!(
        "if [ -e '{}' ]; then : > '{}'; while [ ! -e '{}' ]; do sleep 0.1; done; exit 1; fi",
        away.display(),
        asked.display(),
        go.display()
    );
    let options = cluster.key_program("slow", &wait)?;
    cluster.sql(&format!("SELECT pagevault.add_provider('slow', 'command', '{options}')"))?;
    cluster.sql("SELECT pagevault.set_key_group_master_key('acme', 'slow', 'main')")?;
    changed(&cluster)?;
    cluster.kill()?;
    fs::write(&away, "")?;
    keys[2].take_away()?;
    let first = command_for(&cluster, "acme").arg("--allow-command").spawn()?;
    cluster.eventually_that("the provider is asked", || {
        ensure!(asked.exists());
        Ok(())
    })?;
    let second = std::cell::RefCell::new(command_for(&cluster, "umbrella").spawn()?);
    cluster.eventually_that("the second command waits, or has ended", || {
        let mut second = second.borrow_mut();
        ensure!(second.try_wait()?.is_some() || waits(second.id())?);
        Ok(())
    })?;
    fs::write(&go, "")?;
    succeeds(first)?;
    succeeds(second.into_inner())?;
    cluster.start_server()?;
    are_destroyed(&cluster, &["acme.t", "umbrella.t"])?;
    ensure!(cluster.text("SELECT count(*) FROM pagevault.key_groups")? == "0");
    cluster.finish()
}
