//! PL/Python and PL/Perl: interpreters in the server's process, with allocators, exceptions and
//! processes of their own.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::{Cluster, Settings};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    Test { name: "languages", needs: &["plpython3u", "plperlu"], run: in_a_session },
    Test { name: "languages_preloaded", needs: &["plpython3u", "plperlu"], run: preloaded },
];

/// They read and write an encrypted table, catch errors of the server, keep much memory, and start
/// processes.
const FUNCTIONS: &str = r#"
CREATE EXTENSION plpython3u;
CREATE EXTENSION plperlu;
CREATE TABLE t (id bigint PRIMARY KEY, name text);
SELECT pagevault.encrypt('t');
CREATE FUNCTION by_python(first bigint, count bigint) RETURNS bigint LANGUAGE plpython3u AS $$
    import subprocess
    kept = {i: 'name %d' % i * 20 for i in range(100000)}
    insert = plpy.prepare('INSERT INTO t VALUES ($1, $2)', ['bigint', 'text'])
    for i in range(first, first + count):
        insert.execute([i, kept[i % len(kept)]])
    try:
        with plpy.subtransaction():
            insert.execute([first, 'again'])
        return -1
    except plpy.SPIError as error:
        if error.sqlstate != '23505':
            raise
    if subprocess.run(['true']).returncode != 0:
        return -2
    rows = plpy.execute('SELECT count(*) AS n, count(DISTINCT name) AS d FROM t')
    return rows[0]['n']
$$;
CREATE FUNCTION by_perl(first bigint, count bigint) RETURNS bigint LANGUAGE plperlu AS $$
    my ($first, $count) = @_;
    my %kept = map { $_ => "name $_" x 20 } 0 .. 99999;
    my $insert = spi_prepare('INSERT INTO t VALUES ($1, $2)', 'bigint', 'text');
    spi_exec_prepared($insert, $_, $kept{$_ % 100000}) for $first .. $first + $count - 1;
    eval { spi_exec_prepared($insert, $first, 'again'); };
    die 'no error' unless $@ =~ /duplicate key/;
    die 'no process' if system('true') != 0;
    return spi_exec_query('SELECT count(*) AS n FROM t')->{rows}[0]{n};
$$;
"#;

fn in_a_session() -> Result<()> {
    work("pagevault")
}

/// The interpreters are in every process then, also beside the key helper's pipes.
fn preloaded() -> Result<()> {
    work("plpython3, pagevault, plperl")
}

fn work(libraries: &str) -> Result<()> {
    let settings = Settings::default()
        .conf(&format!("shared_preload_libraries = '{libraries}'"))
        .conf("work_mem = 64kB");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("duplicate key");
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.sql(FUNCTIONS)?;
    let mut client = cluster.client()?;
    ensure!(text(&mut client, "SELECT by_python(1, 5000)")? == "5000", "PL/Python");
    ensure!(text(&mut client, "SELECT by_perl(5001, 5000)")? == "10000", "PL/Perl");
    run_sql(&mut client, "SELECT pagevault.rotate_data_key('t')")?;
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey('t')")?;
    ensure!(text(&mut client, "SELECT by_python(10001, 5000)")? == "15000", "after a rotation");
    drop(client);
    cluster.crash()?;
    ensure!(
        cluster.text("SELECT count(*) || ' ' || count(DISTINCT name) FROM t")? == "15000 15000"
    );
    ensure!(cluster.text("SELECT by_perl(15001, 10)")? == "15010", "after a crash");
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("t")?)?;
    cluster.finish()
}
