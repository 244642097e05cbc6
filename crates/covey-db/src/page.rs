//! Parts of lists.

/// Rows one page may have; a larger wish is cut to it.
pub const PAGE_ROWS_MAX: usize = 1000;

/// In which order a list comes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Oldest first.
    Ascending,
    /// Newest first.
    #[default]
    Descending,
}

impl Order {
    pub(crate) const fn sql(self) -> &'static str {
        match self {
            Self::Ascending => "ASC",
            Self::Descending => "DESC",
        }
    }

    pub(crate) const fn beyond(self) -> &'static str {
        match self {
            Self::Ascending => ">",
            Self::Descending => "<",
        }
    }
}

/// Which part of a list; lists are in the order of creation (ids sort by it).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page<Id> {
    /// Only what comes behind this one in the chosen order.
    pub after: Option<Id>,
    /// At most this many, cut to [`PAGE_ROWS_MAX`]. Ask for one more than is shown to know whether a next
    /// page exists.
    pub limit: usize,
    /// The order.
    pub order: Order,
}

impl<Id> Default for Page<Id> {
    fn default() -> Self {
        Self { after: None, limit: 100, order: Order::Descending }
    }
}

impl<Id: ToString> Page<Id> {
    pub(crate) fn limit_sql(&self) -> i64 {
        limit_sql(self.limit)
    }

    pub(crate) fn after_sql(&self) -> Option<String> {
        self.after.as_ref().map(ToString::to_string)
    }
}

pub(crate) fn limit_sql(limit: usize) -> i64 {
    limit.min(PAGE_ROWS_MAX) as i64
}
