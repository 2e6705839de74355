//! What a disk holds after a cut.

use std::error::Error;
use std::path::Path;

use pagevault_powercut_disk::journal::{Kind, header, records};
use pagevault_powercut_disk::{Disk, Ignore, Image, Order, Survival};

type Result = std::result::Result<(), Box<dyn Error>>;

/// A journal that is being written, and the place of the next record.
#[derive(Default)]
struct Journal(Vec<u8>);

impl Journal {
    fn add(
        &mut self,
        kind: Kind,
        inode: u64,
        number: u64,
        path: &str,
        rest: &[u8],
    ) -> &mut Journal {
        let header = header(kind, 0, inode, number, path.len(), rest.len()).unwrap_or_default();
        self.0.extend([&header, path.as_bytes(), rest].concat());
        self
    }

    fn open(&mut self, inode: u64, path: &str) -> &mut Journal {
        self.add(Kind::Open, inode, 0, path, b"")
    }

    fn write(&mut self, inode: u64, at: u64, bytes: &[u8]) -> &mut Journal {
        self.add(Kind::Write, inode, at, "", bytes)
    }

    /// One that begins now.
    fn sync(&mut self, inode: u64) -> &mut Journal {
        let now = self.0.len() as u64;
        self.add(Kind::Sync, inode, now, "", b"")
    }

    fn disk(&self, base: &Path, order: Order, ignore: Ignore) -> std::io::Result<Disk> {
        let mut disk = Disk::of(base, order, ignore)?;
        for record in records(&self.0) {
            assert!(disk.happens(&record), "{record:?}");
        }
        Ok(disk)
    }

    fn nothing(&self, base: &Path, order: Order) -> std::io::Result<Image> {
        Ok(self.disk(base, order, None)?.after_cut(&Survival::Nothing, 1))
    }
}

/// A directory with `d/f`, which holds "old".
fn base() -> std::io::Result<tempfile::TempDir> {
    let base = tempfile::tempdir()?;
    std::fs::create_dir(base.path().join("d"))?;
    std::fs::write(base.path().join("d/f"), "old")?;
    Ok(base)
}

#[test]
fn what_was_written_before_a_sync_began_is_there() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(9, "d/f").write(9, 0, b"new").sync(9).write(9, 3, b"er");
    for order in [Order::Kept, Order::Free] {
        assert_eq!(journal.nothing(base.path(), order)?.read("d/f"), Some(&b"new"[..]));
    }
    let all = journal.disk(base.path(), Order::Free, None)?.after_cut(&Survival::Everything, 1);
    assert_eq!(all.read("d/f"), Some(&b"newer"[..]));
    Ok(())
}

#[test]
fn a_write_that_a_running_sync_may_have_missed_can_be_lost() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(9, "d/f");
    let began = journal.0.len() as u64;
    journal.write(9, 0, b"new").add(Kind::Sync, 9, began, "", b"");
    assert_eq!(journal.nothing(base.path(), Order::Kept)?.read("d/f"), Some(&b"old"[..]));
    Ok(())
}

#[test]
fn a_new_file_is_there_once_it_is_synced_itself() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(9, "d/new").write(9, 0, b"x");
    assert_eq!(journal.nothing(base.path(), Order::Free)?.read("d/new"), None);
    journal.sync(9);
    assert_eq!(journal.nothing(base.path(), Order::Free)?.read("d/new"), Some(&b"x"[..]));
    Ok(())
}

#[test]
fn a_rename_is_durable_with_its_directory_only_where_order_is_not_kept() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(8, "d").open(9, "d/f").open(10, "d/new").write(10, 0, b"new").sync(10);
    journal.add(Kind::Rename, 0, 0, "d/new", b"d/f").open(11, "other");
    for order in [Order::Kept, Order::Free] {
        assert_eq!(journal.nothing(base.path(), order)?.read("d/f"), Some(&b"old"[..]));
    }
    let mut with_other = Journal(journal.0.clone());
    with_other.sync(11);
    let read = |journal: &Journal, order| -> std::io::Result<Option<Vec<u8>>> {
        Ok(journal.nothing(base.path(), order)?.read("d/f").map(<[u8]>::to_vec))
    };
    assert_eq!(read(&with_other, Order::Kept)?, Some(b"new".to_vec()));
    assert_eq!(read(&with_other, Order::Free)?, Some(b"old".to_vec()));
    journal.sync(8);
    assert_eq!(read(&journal, Order::Free)?, Some(b"new".to_vec()));
    Ok(())
}

#[test]
fn a_removed_file_comes_back_unless_its_directory_is_synced() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(8, "d").add(Kind::Unlink, 0, 0, "d/f", b"");
    assert_eq!(journal.nothing(base.path(), Order::Free)?.read("d/f"), Some(&b"old"[..]));
    journal.sync(8);
    assert_eq!(journal.nothing(base.path(), Order::Free)?.read("d/f"), None);
    Ok(())
}

#[test]
fn a_torn_write_leaves_whole_sectors() -> Result {
    let base = base()?;
    let (old, new) = (vec![1; 8192], vec![2; 8192]);
    let mut journal = Journal::default();
    journal.open(9, "d/f").write(9, 0, &old).sync(9).write(9, 0, &new);
    let disk = journal.disk(base.path(), Order::Kept, None)?;
    let survival = Survival::Some { percent: 50, sector: Some(512) };
    let mut torn = 0;
    for seed in 0..100 {
        let image = disk.after_cut(&survival, seed);
        let bytes = image.read("d/f").unwrap_or_default();
        assert_eq!(bytes.len(), 8192);
        for sector in bytes.chunks(512) {
            assert!(sector.iter().all(|byte| *byte == sector[0] && matches!(byte, 1 | 2)));
        }
        torn += usize::from(bytes.contains(&1) && bytes.contains(&2));
    }
    assert!(torn > 10, "{torn}");
    Ok(())
}

#[test]
fn sectors_hold_what_was_written_to_them_before() -> Result {
    // Two appends within one sector: the second never survives without the first.
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(9, "d/f").write(9, 3, b"A").write(9, 4, b"B");
    let disk = journal.disk(base.path(), Order::Kept, None)?;
    let survival = Survival::Some { percent: 50, sector: Some(512) };
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..200 {
        seen.insert(disk.after_cut(&survival, seed).read("d/f").map(<[u8]>::to_vec));
    }
    assert!(!seen.contains(&Some(b"old\0B".to_vec())), "{seen:?}");
    assert!(seen.contains(&Some(b"oldAB".to_vec())) && seen.contains(&Some(b"old".to_vec())));
    Ok(())
}

#[test]
fn a_shorter_file_may_be_as_long_as_it_was() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(9, "d/f").add(Kind::Length, 9, 1, "", b"");
    let disk = journal.disk(base.path(), Order::Kept, None)?;
    let survival = Survival::Some { percent: 50, sector: None };
    let lengths: std::collections::BTreeSet<_> =
        (0..50).map(|seed| disk.after_cut(&survival, seed).read("d/f").map(<[u8]>::len)).collect();
    assert_eq!(lengths, [Some(1), Some(3)].into());
    journal.sync(9);
    assert_eq!(journal.nothing(base.path(), Order::Kept)?.read("d/f"), Some(&b"o"[..]));
    Ok(())
}

#[test]
fn a_file_is_shorter_or_it_is_not() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    let long = vec![1; 8192];
    journal.open(9, "d/f").write(9, 0, &long).sync(9).add(Kind::Length, 9, 0, "", b"");
    journal.write(9, 0, &vec![2; 4096]);
    let disk = journal.disk(base.path(), Order::Kept, None)?;
    let survival = Survival::Some { percent: 50, sector: Some(512) };
    for seed in 0..100 {
        let image = disk.after_cut(&survival, seed);
        let bytes = image.read("d/f").unwrap_or_default();
        assert!(bytes == long || !bytes.contains(&1), "seed {seed}");
    }
    Ok(())
}

#[test]
fn syncs_can_be_ignored() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(9, "d/f").write(9, 0, b"new").sync(9).open(10, "e").write(10, 0, b"e").sync(10);
    let image =
        journal.disk(base.path(), Order::Free, Some(b"d"))?.after_cut(&Survival::Nothing, 1);
    assert_eq!((image.read("d/f"), image.read("e")), (Some(&b"old"[..]), Some(&b"e"[..])));
    Ok(())
}

#[test]
fn a_seed_repeats_an_image() -> Result {
    let base = base()?;
    let mut journal = Journal::default();
    journal.open(9, "d/f");
    for n in 0..50 {
        journal.write(9, n * 100, &[n as u8; 900]);
    }
    let disk = journal.disk(base.path(), Order::Free, None)?;
    let survival = Survival::Some { percent: 50, sector: Some(512) };
    let read = |seed| disk.after_cut(&survival, seed).read("d/f").map(<[u8]>::to_vec);
    assert_eq!(read(3), read(3));
    assert_ne!(read(3), read(4));
    Ok(())
}

#[test]
fn an_unfinished_record_is_the_end() {
    let mut journal = Journal::default();
    journal.open(9, "d/f").write(9, 0, b"new");
    let cut = &journal.0[..journal.0.len() - 1];
    assert_eq!(records(cut).count(), 1);
}
