//! Keeping the cache within its limit.
//!
//! Whole images go, the one that was used longest ago first, and then every content that no image refers to any
//! more. What a pinned image refers to stays, also beyond the limit.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::SystemTime;

use serde::Serialize;

use super::session::{entries, id_of};
use super::{Cache, CacheError, Pin, io_error};
use crate::content::ContentId;
use crate::image::Image;

/// What a cache holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CacheReport {
    /// Contents.
    pub contents: u64,
    /// Bytes that they take on disk.
    pub bytes: u64,
    /// Images.
    pub images: u64,
    /// Contents that were removed.
    pub removed: u64,
    /// Bytes that this freed.
    pub removed_bytes: u64,
    /// More is needed by mounted images than the limit allows.
    pub over_limit: bool,
}

/// Enough of a content's name to keep it: if two share it, one too many is kept.
type ShortId = u64;

fn short(id: &ContentId) -> ShortId {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&id.hash().as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}

impl Cache {
    /// Removes what is beyond the limit. Looks at every content, so it is for when nobody waits. None: somebody
    /// is adding something, and nothing was done.
    ///
    /// # Errors
    /// When something cannot be read or removed.
    pub fn trim(&self) -> Result<Option<CacheReport>, CacheError> {
        let Some(_alone) = self.try_lock_alone()? else { return Ok(None) };
        let mut sizes: HashMap<ShortId, u64> = HashMap::new();
        let mut report = CacheReport::default();
        for dir in entries(&self.contents())? {
            for path in entries(&dir)? {
                let metadata = fs::symlink_metadata(&path).map_err(io_error(&path))?;
                let bytes = metadata.blocks() * 512;
                report.contents += 1;
                report.bytes += bytes;
                if let Some(id) = id_of(&path) {
                    *sizes.entry(short(&id)).or_default() += bytes;
                }
            }
        }
        let mut images = self.all_images()?;
        report.images = images.len() as u64;
        let Some(limit) = self.limit_bytes.filter(|limit| report.bytes > *limit) else {
            return Ok(Some(report));
        };
        let pinned = self.pinned()?;
        let is_pinned = |image: &Image| pinned.contains(image.id());
        images.sort_by_key(|(image, used)| (is_pinned(image), *used));
        let mut kept: HashSet<ShortId> = HashSet::new();
        let mut kept_bytes = 0;
        let mut full = false;
        while let Some((image, _)) = images.pop() {
            let mut adds = Vec::new();
            let mut added_bytes = 0;
            for content in image.needs().map_err(io_error(&self.images()))? {
                let content = content.map_err(io_error(&self.images()))?;
                let Some(id) = ContentId::of(&content).map(|id| short(&id)) else { continue };
                if kept.insert(id) {
                    added_bytes += sizes.get(&id).copied().unwrap_or(0);
                    adds.push(id);
                }
            }
            if is_pinned(&image) || (!full && kept_bytes + added_bytes <= limit) {
                kept_bytes += added_bytes;
                continue;
            }
            // Older ones are not kept instead: a limit that is too small would otherwise keep the least used.
            full = true;
            adds.iter().for_each(|id| {
                kept.remove(id);
            });
            let mark = self.ready_mark(image.id());
            match fs::remove_file(&mark) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error(&mark)(error)),
                _ => image.remove().map_err(io_error(&mark))?,
            }
            report.images -= 1;
        }
        report.over_limit = kept_bytes > limit;
        for dir in entries(&self.contents())? {
            for path in entries(&dir)? {
                if id_of(&path).is_some_and(|id| kept.contains(&short(&id))) {
                    continue;
                }
                let bytes = fs::symlink_metadata(&path).map_err(io_error(&path))?.blocks() * 512;
                fs::remove_file(&path).map_err(io_error(&path))?;
                report.removed += 1;
                report.removed_bytes += bytes;
            }
        }
        report.contents -= report.removed;
        report.bytes -= report.removed_bytes;
        Ok(Some(report))
    }

    /// Whole images with the time of their last use. Drafts and parts of images are removed on the way.
    fn all_images(&self) -> Result<Vec<(Image, SystemTime)>, CacheError> {
        let dir = self.images();
        let mut images = Vec::new();
        let mut parts = Vec::new();
        for path in entries(&dir)? {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            match name.strip_suffix(".json").and_then(|id| Image::find(&dir, id)) {
                Some(image) => {
                    let used = fs::metadata(&path).and_then(|metadata| metadata.modified());
                    images.push((image, used.map_err(io_error(&path))?));
                }
                None => parts.push(path),
            }
        }
        for path in parts {
            let id = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            if !images.iter().any(|(image, _)| image.id() == id) {
                fs::remove_file(&path).map_err(io_error(&path))?;
            }
        }
        Ok(images)
    }

    /// Images that are mounted in this boot.
    fn pinned(&self) -> Result<HashSet<String>, CacheError> {
        let mut pinned = HashSet::new();
        for path in entries(&self.dir.join("pins"))? {
            let text = fs::read(&path).map_err(io_error(&path))?;
            let pin: Pin =
                serde_json::from_slice(&text).map_err(io::Error::other).map_err(io_error(&path))?;
            if pin.boot == self.boot {
                pinned.insert(pin.image);
            } else {
                fs::remove_file(&path).map_err(io_error(&path))?;
            }
        }
        Ok(pinned)
    }
}
