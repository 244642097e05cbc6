//! A stack of tasks that several threads empty and fill; depth first, so that few directories are open.
//!
//! As many threads work as there are processors while they compute. While they wait for a disk instead, more do,
//! because a disk answers many requests in the time of one.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};

/// Threads at most; more than this many requests in flight gained nothing when it was measured on a cold disk.
pub(crate) const THREADS_MAX: usize = 16;
/// Enough for recursion over the deepest tree that is accepted; only touched pages cost memory.
pub(crate) const STACK_BYTES: usize = 64 * 1024 * 1024;
/// How often it is looked whether the threads wait.
const WATCH_PERIOD: Duration = Duration::from_millis(4);

#[derive(Debug)]
struct State<T, E> {
    tasks: Vec<T>,
    running: usize,
    /// Tasks that may run at once.
    allowed: usize,
    error: Option<E>,
}

impl<T, E> State<T, E> {
    fn is_over(&self) -> bool {
        self.error.is_some() || (self.running == 0 && self.tasks.is_empty())
    }
}

/// Tasks not yet begun.
#[derive(Debug)]
pub(crate) struct Tasks<T, E> {
    state: Mutex<State<T, E>>,
    /// There is a task to take, or everything is over.
    changed: Condvar,
    over: Condvar,
    /// The threads at work.
    threads: Mutex<Vec<Pid>>,
}

/// A task that is worked on; counted off also when the thread panics, so that the others do not wait for it.
struct Running<'t, T: Send, E: Send>(&'t Tasks<T, E>);

impl<T: Send, E: Send> Drop for Running<'_, T, E> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.running -= 1;
        if state.is_over() {
            self.0.changed.notify_all();
            self.0.over.notify_all();
        }
    }
}

impl<T: Send, E: Send> Tasks<T, E> {
    fn state(&self) -> MutexGuard<'_, State<T, E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds several; the last is begun first.
    pub(crate) fn extend(&self, tasks: Vec<T>) {
        let several = match tasks.len() {
            0 => return,
            // Whoever adds a task takes the next one itself.
            1 => false,
            _ => true,
        };
        self.state().tasks.extend(tasks);
        if several {
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<(T, Running<'_, T, E>)> {
        let mut state = self.state();
        loop {
            if state.is_over() {
                return None;
            }
            if state.running < state.allowed
                && let Some(task) = state.tasks.pop()
            {
                state.running += 1;
                return Some((task, Running(self)));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, each: &(impl Fn(T, &Self) -> Result<(), E> + Sync)) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(rustix::thread::gettid());
        while let Some((task, running)) = self.next() {
            if let Err(error) = each(task, self) {
                self.state().error.get_or_insert(error);
            }
            drop(running);
        }
    }

    /// Runs `first` and everything it leads to; the first error ends it. `threads`: exactly so many, or 0: by
    /// what the work waits for.
    pub(crate) fn run(
        threads: usize,
        first: T,
        each: impl Fn(T, &Self) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let processors = thread::available_parallelism().map_or(2, usize::from).min(THREADS_MAX);
        let (begin, most) = match threads {
            0 => (processors, THREADS_MAX),
            threads => (threads.min(THREADS_MAX), 0),
        };
        let state = State { tasks: vec![first], running: 0, allowed: begin, error: None };
        let tasks = Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            over: Condvar::new(),
            threads: Mutex::default(),
        };
        thread::scope(|scope| {
            let start = || {
                let builder = thread::Builder::new().stack_size(STACK_BYTES);
                builder.spawn_scoped(scope, || tasks.work(&each)).is_ok()
            };
            let mut started = (0..begin).filter(|_| start()).count();
            if started == 0 {
                tasks.work(&each);
            }
            let mut watch = Watch::begin();
            while started > 0 && begin < most && !tasks.is_over_after(WATCH_PERIOD) {
                let allowed = tasks.adapt(watch.computes_little(processors), (processors, most));
                started += (started..allowed).filter(|_| start()).count();
            }
        });
        let state = tasks.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.error.map_or(Ok(()), Err)
    }

    /// Decides how many tasks may run at once from now on.
    fn adapt(&self, computes_little: bool, limits: (usize, usize)) -> usize {
        let at_disk = if computes_little { self.at_disk() } else { 0 };
        let mut state = self.state();
        let allowed = allowed_next(state.allowed, state.running, at_disk, limits);
        let grows = allowed > state.allowed;
        // Nobody to give more work to: more threads would only wait.
        if !grows || !state.tasks.is_empty() {
            state.allowed = allowed;
        }
        if grows {
            self.changed.notify_all();
        }
        state.allowed
    }

    /// Threads that wait for a disk at this moment. Others may wait for a processor, because another program
    /// keeps it busy; more threads would not help there.
    fn at_disk(&self) -> usize {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().filter(|thread| is_at_disk(**thread)).count()
    }

    fn is_over_after(&self, wait: Duration) -> bool {
        let state = self.state();
        let waited = self.over.wait_timeout_while(state, wait, |state| !state.is_over());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_over()
    }
}

/// Compares the processor time that passes with the time on the wall.
struct Watch {
    wall: Instant,
    processor: Duration,
}

impl Watch {
    fn begin() -> Self {
        Self { wall: Instant::now(), processor: processor_time() }
    }

    /// Whether `threads` threads have computed less than half of the time since the last question.
    fn computes_little(&mut self, threads: usize) -> bool {
        let now = Self::begin();
        let wall = now.wall.duration_since(self.wall);
        let computed = now.processor.saturating_sub(self.processor);
        *self = now;
        computed * 2 < wall * threads as u32
    }
}

/// More when at least half of those that run wait for a disk, step by step back to the processors when none does.
fn allowed_next(allowed: usize, running: usize, at_disk: usize, (least, most): (usize, usize)) -> usize {
    if at_disk > 0 && at_disk * 2 >= running {
        (allowed * 2).min(most)
    } else if at_disk == 0 {
        allowed.saturating_sub(1).max(least)
    } else {
        allowed
    }
}

fn is_at_disk(thread: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", thread.as_raw_nonzero()));
    // The name in parentheses may contain anything; the state follows it.
    stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D')))
}

/// Of this process, all its threads together.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_task_is_done_once_and_the_first_error_ends_it() {
        let done = AtomicUsize::new(0);
        Tasks::<u32, ()>::run(2, 10, |depth, tasks| {
            done.fetch_add(1, Ordering::SeqCst);
            tasks.extend(vec![depth.saturating_sub(1); if depth == 0 { 0 } else { 2 }]);
            Ok(())
        })
        .unwrap();
        assert_eq!(done.into_inner(), (1 << 11) - 1);
        let failed = Tasks::<u32, u32>::run(4, 3, |depth, tasks| {
            tasks.extend(vec![depth + 1; 3]);
            if depth == 6 { Err(depth) } else { Ok(()) }
        });
        assert_eq!(failed, Err(6));
    }

    #[test]
    fn more_run_while_the_disk_is_waited_for_and_as_many_as_processors_while_they_compute() {
        let limits = (2, 16);
        assert_eq!(allowed_next(2, 2, 1, limits), 4);
        assert_eq!(allowed_next(8, 8, 8, limits), 16);
        assert_eq!(allowed_next(16, 16, 16, limits), 16, "never more than the most");
        assert_eq!(allowed_next(16, 16, 3, limits), 16, "some wait: as it is");
        assert_eq!(allowed_next(16, 4, 0, limits), 15, "none waits: fewer");
        assert_eq!(allowed_next(2, 2, 0, limits), 2, "never fewer than processors");
    }

    #[test]
    fn no_more_tasks_run_at_once_than_asked_for() {
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Tasks::<u32, ()>::run(3, 5, |depth, tasks| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tasks.extend(vec![depth.saturating_sub(1); if depth == 0 { 0 } else { 3 }]);
            running.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        })
        .unwrap();
        assert!((1..=3).contains(&most.into_inner()));
    }
}
