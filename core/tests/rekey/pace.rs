//! The speed of jobs under `pagevault.rekey_rate = auto`.

use std::time::Duration;

use pagevault_core::rekey::pace::{Busy, Pace, SLOWEST, Seen};
use proptest::prelude::*;

const SECOND: Seen = Seen {
    interval: Duration::from_secs(1),
    active: 0,
    processors: 4,
    commits: 0,
    commit_time: Duration::ZERO,
    wal: 0,
    wal_of_jobs: 200_000_000,
    lag: 0,
};

fn after(seconds: u32, seen: impl Fn(&Pace) -> Seen) -> Pace {
    let mut pace = Pace::default();
    for _ in 0..seconds {
        let seen = seen(&pace);
        pace.observe(&seen);
    }
    pace
}

/// One session commits all the time; each commit takes so long.
fn commits(milliseconds: f64) -> Seen {
    let commits = (1000.0 / milliseconds) as u64;
    let commit_time = Duration::from_secs_f64(milliseconds / 1000.0) * commits as u32;
    Seen { active: 1, commits, commit_time, wal_of_jobs: 0, ..SECOND }
}

#[test]
fn full_speed_when_nobody_else_is_there() {
    let pace = after(5, |_| SECOND);
    assert_eq!((pace.share(), pace.busy()), (1.0, None));
    assert_eq!(pace.pause_after(Duration::from_secs(1)), Duration::ZERO);
}

#[test]
fn out_of_the_way_when_all_processors_are_busy() {
    let pace = after(20, |_| Seen { active: 4, ..SECOND });
    assert_eq!((pace.share(), pace.busy()), (SLOWEST, Some(Busy::Processors)));
    let pause = pace.pause_after(Duration::from_millis(2));
    assert_eq!(pause.as_millis(), 62);
}

/// The job doubles the duration of commits when it goes at full speed.
#[test]
fn settles_where_commits_are_not_slower() {
    for seconds in 300..320 {
        let pace = after(seconds, |pace| commits(1.0 + pace.share()));
        assert!((0.2..0.7).contains(&pace.share()), "{pace:?}");
    }
    // Where it does not matter for them, it goes on to full speed.
    let pace = after(300, |_| commits(1.0));
    assert_eq!(pace.share(), 1.0);
}

/// Commits that become slower for another reason do not hold up the job for ever.
#[test]
fn gets_used_to_slow_commits() {
    let mut pace = after(100, |_| commits(1.0));
    pace.observe(&commits(5.0));
    assert_eq!(pace.busy(), Some(Busy::Commits));
    for _ in 0..200 {
        pace.observe(&commits(5.0));
    }
    assert_eq!((pace.share(), pace.busy()), (1.0, None));
}

#[test]
fn leaves_room_in_wal() {
    let pace = after(50, |pace| Seen {
        active: 1,
        wal: 20_000_000,
        wal_of_jobs: (pace.share() * 200e6) as u64,
        ..SECOND
    });
    assert!(pace.share() <= 0.1, "{pace:?}");
}

#[test]
fn waits_for_standbys() {
    let mut pace = after(20, |_| SECOND);
    for megabytes in [65, 100, 200, 300, 400] {
        pace.observe(&Seen { lag: megabytes << 20, ..SECOND });
        assert_eq!(pace.busy(), Some(Busy::Standby));
    }
    assert_eq!(pace.share(), SLOWEST);
    // It catches up; then it is there.
    pace.observe(&Seen { lag: 300 << 20, ..SECOND });
    assert_eq!(pace.busy(), None);
    (0..6).for_each(|_| pace.observe(&SECOND));
    assert_eq!(pace.share(), 1.0);
}

proptest! {
    /// Whatever is seen, it goes on, and never faster than it can.
    #[test]
    fn never_stops(seen in prop::collection::vec(any::<[u32; 7]>(), 1..100)) {
        let mut pace = Pace::default();
        for [interval, active, processors, commits, time, wal, lag] in seen {
            let seen = Seen {
                interval: Duration::from_micros(interval.into()),
                active,
                processors,
                commits: commits.into(),
                commit_time: Duration::from_micros(time.into()),
                wal: u64::from(wal) << 8,
                wal_of_jobs: u64::from(commits) << 4,
                lag: u64::from(lag) << 8,
            };
            pace.observe(&seen);
            prop_assert!((SLOWEST..=1.0).contains(&pace.share()), "{:?}", pace);
            prop_assert!(pace.pause_after(Duration::from_secs(1)) <= Duration::from_secs(31));
        }
    }
}
