//! Reading a directory's entries object by object, so that a huge one is never in memory as a whole.

use covey_home::BlockStore;
use covey_home::manifest::{Entry, ListingPart, MalformedObject, decode_listing_object};
use covey_home::object::ObjectError;
use covey_types::BlockHash;

/// Who is told what a directory has.
pub(super) trait Visitor {
    type Error: From<ObjectError>;
    /// One object of the directory.
    fn object(&mut self, hash: BlockHash, bytes: &[u8]) -> Result<(), Self::Error>;
    /// One entry; they come in order.
    fn entry(&mut self, name: Vec<u8>, entry: Entry) -> Result<(), Self::Error>;
}

/// Tells `visitor` all objects and entries of the directory.
///
/// # Errors
/// When an object cannot be read or contradicts its index, and the first error of the visitor.
pub(super) fn read<V: Visitor>(
    store: &dyn BlockStore,
    listing: &BlockHash,
    visitor: &mut V,
) -> Result<(), V::Error> {
    let get = |hash: &BlockHash, visitor: &mut V| -> Result<ListingPart, V::Error> {
        let bytes = store.get(hash).map_err(ObjectError::from)?;
        visitor.object(*hash, &bytes)?;
        Ok(decode_listing_object(&bytes).map_err(ObjectError::from)?)
    };
    let pieces = match get(listing, visitor)? {
        ListingPart::Entries(entries) => {
            return entries.into_iter().try_for_each(|(name, entry)| visitor.entry(name, entry));
        }
        ListingPart::Index(pieces) => pieces,
    };
    let malformed = |problem| {
        let error = MalformedObject { object: "listing", at: 0, problem };
        Err(V::Error::from(ObjectError::from(error)))
    };
    let mut last: Option<Vec<u8>> = None;
    for piece in pieces {
        let ListingPart::Entries(entries) = get(&piece.listing, visitor)? else {
            return malformed("an index below an index");
        };
        let first_is_right = entries.first().is_some_and(|first| first.0 == piece.first);
        let ascends = last.as_ref().is_none_or(|last| entries.first().is_some_and(|first| *last < first.0));
        if !ascends || !first_is_right || entries.len() as u64 != piece.entries {
            return malformed("an index that does not describe its objects");
        }
        last = entries.last().map(|(name, _)| name.clone());
        entries.into_iter().try_for_each(|(name, entry)| visitor.entry(name, entry))?;
    }
    Ok(())
}
