//! Where requests are made: connections belong to threads of this crate's own, because its callers block.
//!
//! What stays true: waiting works from any thread, also from one of somebody else's runtime. What does not belong
//! here: what is waited for.

use std::future::Future;
use std::io;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};

use tokio::runtime::{Handle, Runtime};

/// Threads that watch the connections of all buckets of the process; hashing is done by who waits.
const THREADS: usize = 1;

/// Made with the first bucket and never taken down: an orderly end would wait for requests that nobody waits for.
static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);

/// The threads, started if they are not running.
///
/// # Errors
/// When the system gives no threads.
pub(crate) fn start() -> io::Result<Handle> {
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(running) = &*runtime {
        return Ok(running.handle().clone());
    }
    let made = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("covey-bucket")
        .enable_all()
        .build()?;
    Ok(runtime.insert(made).handle().clone())
}

/// Makes a future and blocks until it is done.
pub(crate) fn wait<T: Send, F: Future<Output = T>>(on: &Handle, make: impl FnOnce() -> F + Send) -> T {
    if Handle::try_current().is_err() {
        return on.block_on(make());
    }
    // A thread of a runtime must not block on another one. What it runs may.
    std::thread::scope(|scope| {
        scope.spawn(|| on.block_on(make())).join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_works_outside_and_inside_of_another_runtime() {
        let on = start().unwrap();
        let answer = || async { tokio::task::yield_now().await };
        wait(&on, answer);
        let outer = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(outer.block_on(async { wait(&on, || async { 7 }) }), 7);
        let outer = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let blocking = outer.spawn_blocking(move || wait(&on, || async { 8 }));
        assert_eq!(outer.block_on(blocking).unwrap(), 8);
    }
}
