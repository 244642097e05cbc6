//! Looking into the base.

use std::sync::{Arc, Mutex, PoisonError};

use covey_types::BlockHash;

use super::{TrackedError, TrackedRequest};
use crate::manifest::{Entry, EntryBody, Root};
use crate::object::{self, Listing, ObjectError};

/// Listings that are kept for the next question; neighbours in the tree ask for the same ones.
const KEPT_LISTINGS: usize = 32;

#[derive(Debug)]
pub(super) struct Lower<'a> {
    request: &'a TrackedRequest<'a>,
    root: &'a Root,
    kept: Mutex<Vec<(BlockHash, Arc<Listing>)>>,
}

impl<'a> Lower<'a> {
    pub(super) fn new(request: &'a TrackedRequest<'a>, root: &'a Root) -> Self {
        Self { request, root, kept: Mutex::default() }
    }

    /// The listing of the home's own directory.
    pub(super) const fn root_listing(&self) -> BlockHash {
        self.root.listing
    }

    pub(super) fn listing(&self, hash: &BlockHash) -> Result<Arc<Listing>, TrackedError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, listing)) = kept.iter().find(|(known, _)| known == hash) {
            return Ok(Arc::clone(listing));
        }
        let listing = object::read_listing(self.request.store, hash).map_err(|e| self.error(e))?;
        let listing = Arc::new(listing);
        if kept.len() == KEPT_LISTINGS {
            kept.remove(0);
        }
        kept.push((*hash, Arc::clone(&listing)));
        Ok(listing)
    }

    /// The entry at a lower path; the home's own directory has none.
    pub(super) fn entry(&self, path: &[u8]) -> Result<Option<Entry>, TrackedError> {
        let mut dir = self.root_listing();
        let mut names = path.split(|byte| *byte == b'/').peekable();
        while let Some(name) = names.next() {
            let listing = self.listing(&dir)?;
            let Some(entry) = find(&listing, name) else { return Ok(None) };
            if names.peek().is_none() {
                return Ok(Some(entry.clone()));
            }
            let EntryBody::Directory { listing } = &entry.body else { return Ok(None) };
            dir = *listing;
        }
        Ok(None)
    }

    pub(super) fn error(&self, source: ObjectError) -> TrackedError {
        match source {
            // What is not there now may be there later: not the base's fault.
            ObjectError::Store(error @ crate::block::StoreError::Unavailable { .. }) => error.into(),
            source => TrackedError::Base { base: self.request.base, source },
        }
    }
}

/// The entry of this name.
pub(super) fn find<'l>(listing: &'l Listing, name: &[u8]) -> Option<&'l Entry> {
    let at = listing.entries.binary_search_by(|(known, _)| known.as_slice().cmp(name)).ok()?;
    listing.entries.get(at).map(|(_, entry)| entry)
}
