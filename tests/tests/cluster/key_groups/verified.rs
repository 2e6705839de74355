//! `pagevault-keyring verify` while the key of a group cannot be had.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::*;

/// Output and exit code.
fn verify(server: &Cluster, options: &[&str]) -> Result<(String, Option<i32>)> {
    let mut program = server.program("pagevault-keyring");
    let output = program.arg("verify").arg(server.data_directory()).args(options).output()?;
    let said = [output.stdout, output.stderr].concat();
    Ok((String::from_utf8_lossy(&said).into_owned(), output.status.code()))
}

/// Changes a byte in the second page of a file.
fn flip(path: &Path) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, 12_000)?;
    Ok(file.write_all_at(&[byte[0] ^ 1], 12_000)?)
}

#[test]
fn a_locked_group_does_not_keep_the_rest_from_being_verified() -> Result<()> {
    let (cluster, [_, acme, _]) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    let file = |table: &str| Ok::<_, anyhow::Error>(cluster.files(table)?.remove(0).path);
    let (of_acme, of_umbrella) = (file("acme.t")?, file("umbrella.t")?);
    cluster.without_witness("its files are damaged");
    cluster.stop(StopMode::Fast)?;
    let expect = |options: &[&str], code: i32, words: &[&str]| -> Result<()> {
        let (said, found) = verify(&cluster, options)?;
        ensure!(found == Some(code), "{options:?}: {found:?} instead of {code}: {said}");
        for word in words {
            ensure!(said.contains(word), "{options:?}: {word}: {said}");
        }
        Ok(())
    };
    expect(&[], 0, &["No damage found.\n"])?;
    acme.take_away()?;
    // Pages of one group were not verified, and the exit code says so unless that is accepted.
    let words = [
        "could be unwrapped; others are locked",
        "locked       key group \"acme\": ",
        " encrypted pages were not decrypted: their key groups are locked",
        "No damage found in what was verified. Pages of locked key groups were not: \"acme\".",
    ];
    expect(&[], 1, &words)?;
    expect(&["--locked-key-group=umbrella"], 1, &words)?;
    expect(&["--locked-key-group=umbrella", "--locked-key-group=acme"], 0, &words)?;
    expect(&["--locked-key-group=all"], 0, &words)?;
    let words = ["\"damage_found\": false", "\"key_group\": \"acme\"", "\"accepted\": false"];
    expect(&["--json"], 1, &words)?;
    // What can be checked without the key is: the checksums of its pages, and all others.
    flip(&of_acme)?;
    expect(&["--locked-key-group=all"], 2, &["block 1: the checksum of the encrypted page"])?;
    flip(&of_acme)?;
    flip(&of_umbrella)?;
    expect(&[], 2, &["Damage found: 1 in what was verified."])?;
    flip(&of_umbrella)?;
    acme.bring_back()?;
    expect(&[], 0, &["No damage found.\n"])?;
    cluster.start_server()?;
    cluster.finish()
}
