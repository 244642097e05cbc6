//! Paging, the same for every list: `limit`, `page` and `order` in, `data` and `next_page` out.
//!
//! A cursor is the id (or the journal position) of the last item that was shown, so a page never skips or repeats
//! an item, whatever is created or deleted in between.

use std::fmt::Display;
use std::str::FromStr;

use covey_wire::api::{PAGE_LIMIT_DEFAULT, PAGE_LIMIT_MAX, Page};

use super::error::{ApiError, Result};
use super::fields::Query;
use crate::db::Order;

/// How many items a page gets.
pub(super) fn limit(query: &Query) -> Result<usize> {
    let Some(text) = query.one("limit") else { return Ok(PAGE_LIMIT_DEFAULT) };
    match text.parse::<usize>() {
        Ok(limit) if limit > 0 => Ok(limit.min(PAGE_LIMIT_MAX)),
        _ => Err(ApiError::invalid("`limit`: expected a whole number of at least 1")),
    }
}

/// The item that the page begins behind.
pub(super) fn after<Id: FromStr>(query: &Query) -> Result<Option<Id>> {
    let Some(text) = query.one("page").filter(|text| !text.is_empty()) else { return Ok(None) };
    let wrong =
        |_| ApiError::invalid("`page`: expected the `next_page` of an earlier answer to the same list");
    text.parse().map(Some).map_err(wrong)
}

/// The order that was asked for.
pub(super) fn order(query: &Query, default: Order) -> Result<Order> {
    match query.one("order") {
        None => Ok(default),
        Some("asc") => Ok(Order::Ascending),
        Some("desc") => Ok(Order::Descending),
        Some(_) => Err(ApiError::invalid("`order`: expected `asc` or `desc`")),
    }
}

/// Cuts `items`, of which one more than `limit` was asked for, to a page.
pub(super) fn cut<T, Id: Display>(mut items: Vec<T>, limit: usize, id: impl Fn(&T) -> Id) -> Page<T> {
    let more = items.len() > limit;
    items.truncate(limit);
    let next_page = items.last().filter(|_| more).map(|last| id(last).to_string());
    Page { data: items, next_page }
}
