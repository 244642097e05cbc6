//! A stack of tasks that several threads empty and fill; depth first, so that few directories are open.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Threads at most; more than this many requests in flight gained nothing when it was measured on a cold disk.
pub(crate) const THREADS_MAX: usize = 16;
/// Enough for recursion over the deepest tree that is accepted; only touched pages cost memory.
const STACK_BYTES: usize = 64 * 1024 * 1024;

#[derive(Debug)]
struct State<T, E> {
    tasks: Vec<T>,
    running: usize,
    error: Option<E>,
}

/// Tasks not yet begun.
#[derive(Debug)]
pub(crate) struct Tasks<T, E> {
    state: Mutex<State<T, E>>,
    changed: Condvar,
}

impl<T: Send, E: Send> Tasks<T, E> {
    fn state(&self) -> MutexGuard<'_, State<T, E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds several; the last is begun first.
    pub(crate) fn extend(&self, tasks: Vec<T>) {
        if tasks.is_empty() {
            return;
        }
        self.state().tasks.extend(tasks);
        self.changed.notify_all();
    }

    fn next(&self) -> Option<T> {
        let mut state = self.state();
        loop {
            if state.error.is_some() {
                return None;
            }
            if let Some(task) = state.tasks.pop() {
                state.running += 1;
                return Some(task);
            }
            if state.running == 0 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn done(&self, result: Result<(), E>) {
        let mut state = self.state();
        state.running -= 1;
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        if state.running == 0 || state.error.is_some() {
            self.changed.notify_all();
        }
    }

    /// Runs `first` and everything it leads to; the first error ends it.
    pub(crate) fn run(
        threads: usize,
        first: T,
        each: impl Fn(T, &Self) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let state = State { tasks: vec![first], running: 0, error: None };
        let tasks = Self { state: Mutex::new(state), changed: Condvar::new() };
        let threads =
            if threads == 0 { thread::available_parallelism().map_or(2, usize::from) } else { threads }
                .min(THREADS_MAX);
        thread::scope(|scope| {
            let work = || {
                while let Some(task) = tasks.next() {
                    tasks.done(each(task, &tasks));
                }
            };
            let started = (0..threads)
                .filter(|_| thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work).is_ok())
                .count();
            if started == 0 {
                work();
            }
        });
        let state = tasks.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.error.map_or(Ok(()), Err)
    }
}
