//! Frames that hold several small blocks, unfolded: neighbours are read next, often by several threads at once.
//!
//! What stays true: a frame is unfolded by one thread while others wait for it; memory is bounded. What does not belong
//! here: frames of one block, which nobody asks for twice.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Plain bytes that are kept.
const KEPT_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Pack and offset.
type Place = (u32, u64);

#[derive(Debug, Default)]
struct State {
    /// The last used last.
    kept: Vec<(Place, Arc<Vec<u8>>)>,
    /// Being unfolded.
    unfolding: Vec<Place>,
}

/// See the module's first lines.
#[derive(Debug, Default)]
pub(super) struct Frames {
    state: Mutex<State>,
    unfolded: Condvar,
}

/// The right to unfold a frame; when it is dropped, others may try.
#[derive(Debug)]
pub(super) struct Unfolding<'f> {
    frames: &'f Frames,
    place: Place,
}

/// What to do about a frame.
#[derive(Debug)]
pub(super) enum Found<'f> {
    Kept(Arc<Vec<u8>>),
    /// Unfold it, and say so with [`Unfolding::keep`].
    Unfold(Unfolding<'f>),
}

impl Frames {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The frame, or the task of unfolding it; waits while another thread does.
    pub(super) fn find(&self, pack: u32, offset: u64) -> Found<'_> {
        let place = (pack, offset);
        let mut state = self.state();
        loop {
            if let Some(at) = state.kept.iter().position(|(kept, _)| *kept == place) {
                let found = state.kept.remove(at);
                let plain = Arc::clone(&found.1);
                state.kept.push(found);
                return Found::Kept(plain);
            }
            if !state.unfolding.contains(&place) {
                state.unfolding.push(place);
                return Found::Unfold(Unfolding { frames: self, place });
            }
            state = self.unfolded.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Unfolding<'_> {
    /// Keeps the frame for those who wait and those who come.
    pub(super) fn keep(self, plain: Arc<Vec<u8>>) {
        let mut state = self.frames.state();
        let mut bytes = plain.len() + state.kept.iter().map(|(_, kept)| kept.len()).sum::<usize>();
        while bytes > KEPT_BYTES_MAX && !state.kept.is_empty() {
            bytes -= state.kept.remove(0).1.len();
        }
        state.kept.push((self.place, plain));
    }
}

impl Drop for Unfolding<'_> {
    fn drop(&mut self) {
        self.frames.state().unfolding.retain(|place| *place != self.place);
        self.frames.unfolded.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    #[test]
    fn a_frame_is_unfolded_once_for_all_who_want_it_and_again_when_that_failed() {
        let (frames, unfolded) = (Frames::default(), AtomicUsize::new(0));
        let read = |fails: bool| match frames.find(1, 2) {
            Found::Kept(plain) => Some(plain.len()),
            Found::Unfold(unfolding) => {
                unfolded.fetch_add(1, Ordering::SeqCst);
                if fails {
                    return None;
                }
                unfolding.keep(Arc::new(vec![0; 10]));
                Some(10)
            }
        };
        assert_eq!(read(true), None);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(read(false), Some(10)));
            }
        });
        assert_eq!(unfolded.into_inner(), 2);
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_last_used_stays() {
        let frames = Frames::default();
        let is_kept = |offset| matches!(frames.find(0, offset), Found::Kept(_));
        for offset in 0..40 {
            match frames.find(0, offset) {
                Found::Unfold(unfolding) => unfolding.keep(Arc::new(vec![0; 1 << 20])),
                Found::Kept(_) => unreachable!("each comes once"),
            }
            assert!(is_kept(0) || offset > 40, "the first is used again and again");
        }
        assert!(is_kept(39) && !is_kept(10));
        assert!(frames.state().kept.iter().map(|(_, kept)| kept.len()).sum::<usize>() <= KEPT_BYTES_MAX);
    }
}
