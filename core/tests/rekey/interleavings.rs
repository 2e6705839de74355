//! A job, interleaved with other events at random.

use pagevault_core::rekey::file::{End, StepResult, WaitsFor};
use pagevault_core::rekey::run::Run;

use crate::random::Random;
use crate::world::{Stop, World};

/// Number of random histories.
const SEEDS: u64 = 3000;
/// Steps of the job with other events in between, and without.
const STEPS: usize = 120;
const STEPS_ALONE: usize = 2000;

/// Number of occurrences in all histories.
#[derive(Default, Debug)]
struct Seen {
    killed: usize,
    destroyed: usize,
    done_among_events: usize,
    done_alone: usize,
    again: usize,
    waited: usize,
}

fn check_progress(run: &Run, world: &World) {
    let progress = run.progress();
    assert!(
        (0..=progress.pages_total).contains(&progress.pages_done),
        "{progress:?}\n{}",
        world.story.join("\n")
    );
}

/// Ends the process of the job alone (by a kill, pause or cancellation), with the server, or with
/// the machine. The job starts anew then.
fn interrupt(world: &mut World, random: &mut Random) {
    match random.below(3) {
        0 => world.stop(),
        power => world.crash(random, power == 2),
    }
}

fn history(seed: u64, seen: &mut Seen) {
    let mut random = Random::new(seed);
    let random = &mut random;
    let mut world = World::new(random);
    let mut run = world.run();
    for _ in 0..STEPS {
        for _ in 0..random.below(4) {
            world.event(random);
        }
        if world.ends_in.is_none() && random.one_in(12) {
            world.ends_in = Some(random.below(20));
        }
        let step = world.step(&mut run);
        check_progress(&run, &world);
        match step {
            Ok(Some(StepResult::Ended(End::NeverEnds))) => panic!("{}", world.story.join("\n")),
            Ok(Some(StepResult::StartedOver)) => seen.again += 1,
            Ok(Some(StepResult::Waits(_))) => seen.waited += 1,
            Ok(Some(_)) => {}
            Ok(None) => {
                world.check_done();
                seen.done_among_events += 1;
                return;
            }
            Err(Stop::Killed) => {
                seen.killed += 1;
                interrupt(&mut world, random);
                run = world.run();
            }
            Err(Stop::Destroyed) => {
                seen.destroyed += 1;
                return;
            }
        }
    }
    // The job is paused, and resumed without other events.
    world.stop();
    world.quiet();
    let mut run = world.run();
    for _ in 0..STEPS_ALONE {
        let step = world.step(&mut run);
        check_progress(&run, &world);
        match step {
            Ok(None) => {
                world.check_done();
                seen.done_alone += 1;
                return;
            }
            Ok(Some(StepResult::Ended(End::NeverEnds))) => panic!("{}", world.story.join("\n")),
            Ok(Some(_)) => {}
            Err(Stop::Destroyed) => {
                seen.destroyed += 1;
                return;
            }
            Err(Stop::Killed) => unreachable!("nobody kills it"),
        }
    }
    panic!("it does not end\n{}", world.story.join("\n"));
}

#[test]
fn random_histories() {
    let mut seen = Seen::default();
    for seed in 0..SEEDS {
        history(seed, &mut seen);
    }
    // The histories must contain enough of what they are meant to test.
    let Seen { killed, destroyed, done_among_events, done_alone, again, waited } = seen;
    for count in [killed, destroyed, done_among_events, done_alone, again, waited] {
        assert!(count > 40, "{seen:?}");
    }
}

/// Writers that look up the key before it changes, and write as late as possible: when the job
/// waits for them, or after it is done.
#[test]
fn writers_with_the_former_key() {
    let mut waited = 0;
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let mut world = World::new(&mut random);
        (0..8).for_each(|_| world.writer_begins(&mut random));
        let mut run = world.run();
        while let Some(result) = world.step(&mut run).unwrap() {
            if result == StepResult::Waits(WaitsFor::Writers) {
                waited += 1;
                world.writers_end();
            }
        }
        world.writers_end();
        world.check_done();
    }
    assert!(waited > 100, "{waited}");
}

/// A crash after each single effect of a job. The resumed job must end as it would have without a
/// crash.
#[test]
fn a_crash_at_any_step() {
    for seed in 0..40 {
        for power in [false, true] {
            for at in 0.. {
                let mut random = Random::new(seed);
                let mut world = World::new(&mut random);
                let mut run = world.run();
                world.ends_in = Some(at);
                let killed = alone(&mut world, &mut run);
                if killed {
                    world.crash(&mut random, power);
                    run = world.run();
                    assert!(!alone(&mut world, &mut run));
                }
                world.check_done();
                if !killed {
                    break;
                }
            }
        }
    }
}

/// Runs the job without other events until it is complete (false) or its process is killed (true).
fn alone(world: &mut World, run: &mut Run) -> bool {
    let total = run.progress().pages_total;
    let mut all = true;
    for _ in 0..STEPS_ALONE {
        match world.step(run) {
            Ok(None) => {
                assert!(!all || run.progress().pages_done == total);
                return false;
            }
            Ok(Some(result)) => {
                all &= result != StepResult::Ended(End::Nothing);
                assert_eq!(run.progress().pages_total, total);
            }
            Err(Stop::Killed) => return true,
            Err(Stop::Destroyed) => unreachable!("nobody shreds"),
        }
        check_progress(run, world);
    }
    panic!("it does not end\n{}", world.story.join("\n"));
}
