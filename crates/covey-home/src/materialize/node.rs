//! One directory while it is materialized: what it should hold, what is there, and what the stat cache will know.

use std::ffi::{CStr, CString};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use covey_types::BlockHash;

use super::job::{Job, lock};
use crate::anchor::Anchor;
use crate::manifest::{Content, Entry, Meta};
use crate::stat_cache::{CachedDir, CachedEntry, RecordBuilder};
use crate::sys::Stat;

/// One name of the snapshot in a directory.
#[derive(Debug)]
pub(super) enum Item {
    /// It is right, and as the cached directory has it at this position.
    Kept(u32),
    Full(Box<FullItem>),
}

#[derive(Debug)]
pub(super) struct FullItem {
    pub(super) name: CString,
    pub(super) entry: Entry,
    pub(super) encoded: Vec<u8>,
    /// What is under the name in the target.
    pub(super) existing: Option<Stat>,
    /// The target's inode already is what the snapshot says; of a directory its own metadata, not what is in it.
    pub(super) keep: bool,
    /// It was there under another name, with this content.
    pub(super) moved: Option<Content>,
    /// As it is in the end, for the stat cache.
    pub(super) done: Option<Stat>,
}

/// What a directory holds while it is worked on.
#[derive(Debug, Default)]
pub(super) struct Held {
    pub(super) items: Vec<Item>,
    /// Objects below the listing, if it is cut.
    pub(super) pieces: Vec<BlockHash>,
    pub(super) cached: Option<CachedDir>,
}

impl Held {
    pub(super) fn full(&self, number: usize) -> Option<&FullItem> {
        match self.items.get(number)? {
            Item::Full(item) => Some(item),
            Item::Kept(_) => None,
        }
    }

    pub(super) fn set_done(&mut self, number: usize, stat: Option<Stat>) {
        if let Some(Item::Full(item)) = self.items.get_mut(number) {
            item.done = stat.or(item.existing);
        }
    }
}

/// One directory of the snapshot.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) anchor: Arc<Anchor>,
    pub(super) parent: Option<(Arc<Node>, usize)>,
    pub(super) meta: Meta,
    pub(super) listing: BlockHash,
    /// None: we have just created it.
    pub(super) existing: Option<Stat>,
    /// Its number in the stat cache.
    pub(super) cached: Option<u32>,
    /// The stat cache proves that its own metadata is right, unless something in it changes.
    pub(super) proven: bool,
    /// Its names in the table of linked names.
    pub(super) linked: Range<u32>,
    pub(super) held: Mutex<Held>,
    pub(super) pending: AtomicUsize,
    /// Its own metadata has to be set again.
    pub(super) touched: AtomicBool,
    /// It is not what the snapshot says, so the stat cache must not know it.
    pub(super) flawed: AtomicBool,
    /// Nothing is known of what belongs into it, and it was not there: it is taken away again.
    pub(super) unknown: AtomicBool,
    pub(super) has_links: AtomicBool,
    pub(super) excluded_names: AtomicUsize,
}

pub(super) fn new_node(
    job: &Job<'_>,
    anchor: Arc<Anchor>,
    parent: Option<(Arc<Node>, usize)>,
    (meta, listing): (Meta, BlockHash),
    (existing, proven): (Option<Stat>, bool),
) -> Node {
    let cached =
        existing.zip(job.cache.as_ref()).and_then(|(stat, cache)| cache.find(stat.device, stat.inode));
    let linked = if job.has_links() { job.linked_in(&anchor.path()) } else { 0..0 };
    Node {
        anchor,
        parent,
        meta,
        listing,
        existing,
        cached,
        proven,
        linked,
        held: Mutex::default(),
        pending: AtomicUsize::new(1),
        touched: AtomicBool::new(false),
        flawed: AtomicBool::new(false),
        unknown: AtomicBool::new(false),
        has_links: AtomicBool::new(false),
        excluded_names: AtomicUsize::new(0),
    }
}

impl Node {
    pub(super) fn touch(&self, job: &Job<'_>) {
        self.touched.store(true, Ordering::SeqCst);
        job.mark_changed();
    }

    pub(super) fn flaw(&self) {
        self.flawed.store(true, Ordering::SeqCst);
    }

    pub(super) fn path_of(&self, name: &CStr) -> Vec<u8> {
        self.anchor.path_of(name.to_bytes())
    }
}

/// Tells the stat cache what the directory holds now.
pub(super) fn add_record(job: &Job<'_>, node: &Node, stat: &Stat) {
    if node.flawed.load(Ordering::SeqCst) {
        return;
    }
    let held = lock(&node.held);
    let cached = held.cached.as_ref();
    if let Some((cached, number)) =
        cached.zip(node.cached).filter(|(cached, _)| cached.listing == node.listing)
        && held.items.len() == cached.len()
        && held.items.iter().enumerate().all(|(at, item)| is_as_cached(item, cached, at))
    {
        job.keep_record(number);
        return;
    }
    let pieces = match cached.filter(|cached| cached.listing == node.listing) {
        Some(cached) => &cached.pieces,
        None => &held.pieces,
    };
    let inode = (stat.device, stat.inode);
    let mut record = RecordBuilder::new(inode, node.listing, pieces, held.items.len());
    for item in &held.items {
        let entry = match item {
            Item::Kept(position) => cached.and_then(|cached| cached.entry(*position as usize)),
            Item::Full(item) => item.done.map(|done| CachedEntry {
                name: item.name.to_bytes(),
                inode: done.inode,
                ctime: done.ctime,
                dirty: false,
                // Somebody else may have made a name while we did.
                names_proven: false,
                entry: &item.encoded,
            }),
        };
        // Without a stat it is a flaw, and we are not here.
        let Some(entry) = entry else { return };
        record.push(&entry);
    }
    job.add_record(&record);
}

fn is_as_cached(item: &Item, cached: &CachedDir, at: usize) -> bool {
    match item {
        Item::Kept(position) => *position as usize == at,
        Item::Full(item) => cached.entry(at).zip(item.done).is_some_and(|(cached, done)| {
            cached.name == item.name.to_bytes()
                && !cached.dirty
                && (cached.inode, cached.ctime) == (done.inode, done.ctime)
                && cached.entry == item.encoded
        }),
    }
}
