//! How this process keeps memory that it has freed.
//!
//! The C library gives each thread a heap of its own and keeps in each what was freed there, up to the largest piece
//! that was ever freed. A secure or a materialize has up to 16 threads while it waits for a disk, and blocks of up to
//! 8 MiB: that came to 300 MiB for nothing. What does not belong here: how much memory is used at once.

/// Heaps that threads share at most, on machines with more processors. Small pieces come from a list of each thread,
/// so sharing costs little.
const HEAPS_MAX: usize = 8;
/// Pieces from this size on go back to the system when they are freed, in bytes.
const GIVEN_BACK_BYTES: i32 = 1 << 20;

/// Called once, before there are threads.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "there is no safe way to tell the C library")]
pub(crate) fn set_up() {
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    let heaps = processors.clamp(2, HEAPS_MAX) as i32;
    // SAFETY: `mallopt` takes two numbers and touches no memory of ours; no other thread exists yet.
    let is_set = unsafe {
        [libc::mallopt(libc::M_ARENA_MAX, heaps), libc::mallopt(libc::M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)]
    };
    debug_assert_eq!(is_set, [1, 1], "the C library knows both");
}

/// Other C libraries have no such heaps.
#[cfg(not(target_env = "gnu"))]
pub(crate) const fn set_up() {}
