//! Runs tasks in threads, several at a time, until the deadline.
//!
//! A task holds a place while it runs, but not when it is slow: then another task starts beside it.
//! So tasks that hang delay others a little, and do not stop them, however many they are. What they
//! use is bounded by the number of threads, and of those that run programs.
//!
//! A task is slow if it takes a certain time, and twice as long as most that have ended. If they
//! all take long, because they ask the same server for example, more at a time would not help.
//!
//! A task whose thread the system refuses waits until another one has ended.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// How many tasks may run at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Those that are not slow.
    pub(super) places: usize,
    /// A task that has not run for this time is not slow.
    pub(super) slow_after: Duration,
    /// All.
    pub(super) threads: usize,
    /// Those that run programs.
    pub(super) programs: usize,
}

/// Until when.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// What has not started by then has no time left. Before the deadline.
    pub(super) last_start: Instant,
    pub(super) deadline: Instant,
}

/// Something to do in a thread of its own.
pub(super) struct Task<W> {
    pub(super) work: W,
    /// Whether it may start processes.
    pub(super) runs_programs: bool,
}

/// What has become of a task when the deadline has passed, or all have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// It was not started.
    Waiting,
    Running,
    /// It has returned or panicked.
    Ended,
}

/// The end of a worker's channel.
pub(super) struct Reports<U> {
    task: usize,
    sender: Sender<Message<U>>,
}

enum Message<U> {
    Update(U),
    Ended(usize),
}

impl<U> Reports<U> {
    /// Sends an update. False if the deadline has passed.
    pub(super) fn send(&self, update: U) -> bool {
        self.sender.send(Message::Update(update)).is_ok()
    }
}

impl<U> Drop for Reports<U> {
    /// Also when the worker panics. Its task has been dropped before.
    fn drop(&mut self) {
        // Fails only if the deadline has passed.
        let _ = self.sender.send(Message::Ended(self.task));
    }
}

/// Performs tasks until all have ended, or until the deadline. They start in order, except that
/// those that run programs may have to wait for each other. `receive` gets what they report.
/// Threads that still run at the deadline are left alone.
pub(super) fn run_all<W, U>(
    tasks: Vec<Task<W>>,
    bounds: Bounds,
    times: Times,
    perform: impl Fn(W, &Reports<U>) + Clone + Send + 'static,
    mut receive: impl FnMut(U),
) -> Vec<State>
where
    W: Send + 'static,
    U: Send + 'static,
{
    let mut states = vec![State::Waiting; tasks.len()];
    let mut waiting: VecDeque<(usize, Task<W>)> = tasks.into_iter().enumerate().collect();
    let mut places = Places { bounds, running: BTreeMap::new(), ended: Vec::new() };
    let (sender, receiver) = mpsc::channel();
    loop {
        let now = Instant::now();
        let may_start = now < times.last_start && !waiting.is_empty();
        if !may_start && places.running.is_empty() {
            return states;
        }
        if may_start && let Some(at) = places.next(&waiting, now) {
            match thread_for(perform.clone()) {
                Ok(thread) => {
                    let Some((number, task)) = waiting.remove(at) else { continue };
                    states[number] = State::Running;
                    let worker = Worker { since: now, runs_programs: task.runs_programs };
                    places.running.insert(number, worker);
                    let reports = Reports { task: number, sender: sender.clone() };
                    // The thread waits for this, so it does not fail.
                    let _ = thread.send((task.work, reports));
                }
                Err(error) if places.running.is_empty() => {
                    eprintln!("pagevault-keyring: could not start a thread: {error}");
                    return vec![State::Ended; states.len()];
                }
                Err(_) => places.bounds.threads = places.running.len(),
            }
            continue;
        }
        let slow = places.next_slow(now).filter(|_| may_start);
        let until = slow.map_or(times.deadline, |slow| slow.min(times.deadline));
        match receiver.recv_timeout(until.saturating_duration_since(now)) {
            Ok(Message::Update(update)) => receive(update),
            Ok(Message::Ended(number)) => {
                states[number] = State::Ended;
                places.leave(number);
            }
            // Nothing is left unread.
            Err(_) if now >= times.deadline => return states,
            Err(_) => {}
        }
    }
}

/// A thread that performs the task that it is sent. Whoever asks for one still has the task if the
/// system refuses.
fn thread_for<W: Send + 'static, U: Send + 'static>(
    perform: impl Fn(W, &Reports<U>) + Send + 'static,
) -> io::Result<Sender<(W, Reports<U>)>> {
    let (sender, receiver) = mpsc::channel::<(W, Reports<U>)>();
    thread::Builder::new().spawn(move || {
        if let Ok((work, reports)) = receiver.recv() {
            perform(work, &reports);
        }
    })?;
    Ok(sender)
}

struct Worker {
    since: Instant,
    runs_programs: bool,
}

struct Places {
    bounds: Bounds,
    /// Workers that run, by the numbers of their tasks.
    running: BTreeMap<usize, Worker>,
    /// The times that others took, in order of length.
    ended: Vec<Duration>,
}

impl Places {
    /// The position of the first task for which there is a place.
    fn next<W>(&self, waiting: &VecDeque<(usize, Task<W>)>, now: Instant) -> Option<usize> {
        let count = |counted: &dyn Fn(&Worker) -> bool| {
            self.running.values().filter(|worker| counted(worker)).count()
        };
        if self.running.len() >= self.bounds.threads
            || count(&|worker| now < self.slow(worker)) >= self.bounds.places
        {
            return None;
        }
        let may_run_programs = count(&|worker| worker.runs_programs) < self.bounds.programs;
        waiting.iter().position(|(_, task)| may_run_programs || !task.runs_programs)
    }

    /// When a worker has become slow, or will.
    fn slow(&self, worker: &Worker) -> Instant {
        let median = self.ended.get(self.ended.len() / 2).copied().unwrap_or_default();
        worker.since + self.bounds.slow_after.max(2 * median)
    }

    /// A task has ended.
    fn leave(&mut self, number: usize) {
        if let Some(worker) = self.running.remove(&number) {
            let time = worker.since.elapsed();
            let at = self.ended.partition_point(|other| *other < time);
            self.ended.insert(at, time);
        }
    }

    /// When the next worker becomes slow.
    fn next_slow(&self, now: Instant) -> Option<Instant> {
        self.running.values().map(|worker| self.slow(worker)).filter(|slow| now < *slow).min()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier, Condvar, Mutex};

    use super::*;

    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(600);

    const BOUNDS: Bounds = Bounds { places: 3, slow_after: LONG, threads: 100, programs: 100 };

    fn tasks(count: usize, runs_programs: bool) -> Vec<Task<usize>> {
        (0..count).map(|work| Task { work, runs_programs }).collect()
    }

    fn within(time: Duration) -> Times {
        let deadline = Instant::now() + time;
        Times { last_start: deadline, deadline }
    }

    /// Counts tasks that run.
    #[derive(Default)]
    struct Count {
        now: AtomicUsize,
        most: AtomicUsize,
    }

    impl Count {
        fn during(&self, work: impl FnOnce()) {
            let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(now, Ordering::SeqCst);
            work();
            self.now.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Runs tasks that end only three at a time, and returns how many ran at most.
    fn most_of(tasks: Vec<Task<usize>>, bounds: Bounds) -> usize {
        let (count, barrier) = (Arc::new(Count::default()), Arc::new(Barrier::new(3)));
        let counted = Arc::clone(&count);
        let work = move |_, _: &Reports<()>| counted.during(|| _ = barrier.wait());
        let expected = vec![State::Ended; tasks.len()];
        assert_eq!(run_all(tasks, bounds, within(LONG), work, drop), expected);
        count.most.load(Ordering::SeqCst)
    }

    #[test]
    fn as_many_run_at_a_time_as_there_are_places() {
        for runs_programs in [false, true] {
            assert_eq!(most_of(tasks(12, runs_programs), BOUNDS), 3);
        }
    }

    #[test]
    fn slow_ones_are_bounded_by_threads_and_programs() {
        let slow = Bounds { places: 2, slow_after: Duration::ZERO, ..BOUNDS };
        assert_eq!(most_of(tasks(12, false), Bounds { threads: 3, ..slow }), 3);
        assert_eq!(most_of(tasks(12, true), Bounds { programs: 3, ..slow }), 3);
    }

    /// Whether something has happened, for threads that wait for it.
    #[derive(Default)]
    struct Event(Mutex<bool>, Condvar);

    impl Event {
        fn set(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_all();
        }

        fn wait(&self) {
            drop(self.1.wait_while(self.0.lock().unwrap(), |happened| !*happened).unwrap());
        }
    }

    #[test]
    fn those_that_hang_hold_up_no_other() {
        // All but the last wait for the last.
        let event = Arc::new(Event::default());
        let work = move |number, reports: &Reports<usize>| {
            if number == 19 {
                event.set()
            } else {
                event.wait()
            }
            assert!(reports.send(number));
        };
        let bounds = Bounds { slow_after: Duration::from_millis(1), ..BOUNDS };
        let mut done = Vec::new();
        let states =
            run_all(tasks(20, false), bounds, within(LONG), work, |number| done.push(number));
        done.sort_unstable();
        assert_eq!(done, (0..20).collect::<Vec<_>>());
        assert_eq!(states, [State::Ended; 20]);
    }

    #[test]
    fn programs_wait_for_each_other_but_nobody_else_does() {
        // The first runs a program, and waits for the last, which does not.
        let event = Arc::new(Event::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&order);
        let work = move |number, _: &Reports<()>| {
            match number {
                0 => event.wait(),
                3 => event.set(),
                _ => {}
            }
            noted.lock().unwrap().push(number);
        };
        let mut all = tasks(4, true);
        all[3].runs_programs = false;
        run_all(all, Bounds { programs: 1, ..BOUNDS }, within(LONG), work, drop);
        let order: Vec<usize> =
            order.lock().unwrap().iter().copied().filter(|number| *number != 3).collect();
        assert_eq!(order, [0, 1, 2]);
    }

    #[test]
    fn a_panic_is_the_end_of_its_task_only() {
        let work = |number, reports: &Reports<usize>| {
            // Without a message, which tests of this crate would print.
            if number % 2 == 1 {
                std::panic::resume_unwind(Box::new(()));
            }
            reports.send(number);
        };
        let mut done = Vec::new();
        let states =
            run_all(tasks(10, false), BOUNDS, within(LONG), work, |number| done.push(number));
        done.sort_unstable();
        assert_eq!((done, states), (vec![0, 2, 4, 6, 8], vec![State::Ended; 10]));
    }

    #[test]
    fn at_the_deadline_some_run_and_others_wait() {
        let event = Arc::new(Event::default());
        let waited = Arc::clone(&event);
        let (told, ended) = mpsc::channel();
        let work = move |number, reports: &Reports<()>| {
            if number > 0 {
                waited.wait();
                let _ = told.send(reports.send(()));
            }
        };
        let times = within(Duration::from_secs(2));
        let states = run_all(tasks(6, false), BOUNDS, times, work, drop);
        let count = |state| states.iter().filter(|other| **other == state).count();
        assert_eq!(count(State::Running), 3, "{states:?}");
        assert_eq!((states[0], count(State::Waiting)), (State::Ended, 2), "{states:?}");
        event.set();
        // Nobody listens any more.
        assert_eq!(ended.iter().take(3).collect::<Vec<_>>(), [false; 3]);
    }

    #[test]
    fn nothing_starts_without_time_left() {
        let times = Times { last_start: Instant::now(), ..within(LONG) };
        let work = |_, _: &Reports<()>| {};
        assert_eq!(run_all(tasks(2, false), BOUNDS, times, work, drop), [State::Waiting; 2]);
    }

    #[test]
    fn slow_is_what_takes_longer_than_most() {
        let second = Duration::from_secs(1);
        let since = Instant::now();
        let worker = Worker { since, runs_programs: false };
        let bounds = Bounds { slow_after: second, ..BOUNDS };
        let mut places = Places { bounds, running: BTreeMap::new(), ended: Vec::new() };
        assert_eq!(places.slow(&worker) - since, second);
        places.ended = vec![second / 9, second / 9, 600 * second];
        assert_eq!(places.slow(&worker) - since, second);
        places.ended = vec![second / 9, 2 * second, 600 * second];
        assert_eq!(places.slow(&worker) - since, 4 * second);
    }
}
