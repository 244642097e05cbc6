//! Reading a directory's entries object by object, so that a huge one is never in memory as a whole.

use covey_home::BlockStore;
use covey_home::manifest::{Entry, ListingPart, MalformedObject, decode_listing_object};
use covey_home::object::ObjectError;
use covey_types::BlockHash;

/// Calls `object` for each object of the directory and `each` for each entry, in order.
///
/// # Errors
/// When an object cannot be read or contradicts its index, and the first error of a callback.
pub(super) fn read<E: From<ObjectError>>(
    store: &dyn BlockStore,
    listing: &BlockHash,
    object: &mut dyn FnMut(BlockHash, &[u8]) -> Result<(), E>,
    each: &mut dyn FnMut(Vec<u8>, Entry) -> Result<(), E>,
) -> Result<(), E> {
    let mut get = |hash: &BlockHash| -> Result<ListingPart, E> {
        let bytes = store.get(hash).map_err(ObjectError::from)?;
        object(*hash, &bytes)?;
        Ok(decode_listing_object(&bytes).map_err(ObjectError::from)?)
    };
    let pieces = match get(listing)? {
        ListingPart::Entries(entries) => {
            return entries.into_iter().try_for_each(|(name, entry)| each(name, entry));
        }
        ListingPart::Index(pieces) => pieces,
    };
    let malformed = |problem| {
        let error = MalformedObject { object: "listing", at: 0, problem };
        Err(E::from(ObjectError::from(error)))
    };
    let mut last: Option<Vec<u8>> = None;
    for piece in pieces {
        let ListingPart::Entries(entries) = get(&piece.listing)? else {
            return malformed("an index below an index");
        };
        let first_is_right = entries.first().is_some_and(|first| first.0 == piece.first);
        let ascends = last.as_ref().is_none_or(|last| entries.first().is_some_and(|first| *last < first.0));
        if !ascends || !first_is_right || entries.len() as u64 != piece.entries {
            return malformed("an index that does not describe its objects");
        }
        last = entries.last().map(|(name, _)| name.clone());
        entries.into_iter().try_for_each(|(name, entry)| each(name, entry))?;
    }
    Ok(())
}
