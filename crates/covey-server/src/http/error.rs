//! The one error model: every answer that is no success, in the vendor's shape.
//!
//! HTTP status and error type follow from [`Fault`] and from nothing else; the text names the thing and the next
//! step. What is our own fault is logged with the request's id and not told in detail.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use covey_home::EditError;
use covey_home::view::ViewError;
use covey_types::Fault;
use covey_wire::api::{ErrorBody, ErrorDetail};

use crate::db::DbError;
use crate::history::OpenFileError;
use crate::stores::StoresError;

/// Set on every answer; the SDKs show it in their errors.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// The SDKs repeat a 409 unless this says no: repeating a conflict cannot mend it.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// An error on its way out.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    retry_after_s: Option<u32>,
}

pub(super) type Result<T> = std::result::Result<T, ApiError>;

impl ApiError {
    pub(super) fn new(fault: Fault, message: impl Into<String>) -> Self {
        let (status, kind, retry_after_s) = match fault {
            Fault::Retry => (StatusCode::SERVICE_UNAVAILABLE, "overloaded_error", Some(1)),
            Fault::Conflict => (StatusCode::CONFLICT, "conflict_error", None),
            Fault::NotFound => (StatusCode::NOT_FOUND, "not_found_error", None),
            Fault::Invalid => (StatusCode::BAD_REQUEST, "invalid_request_error", None),
            Fault::Denied => (StatusCode::FORBIDDEN, "permission_error", None),
            Fault::Limit => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some(5)),
            Fault::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", None),
            // The vendor has no type for it; the SDKs repeat it like any other 5xx, with growing waits.
            Fault::Full => (StatusCode::INSUFFICIENT_STORAGE, "api_error", Some(5)),
            Fault::Corrupt | Fault::Bug => (StatusCode::INTERNAL_SERVER_ERROR, "api_error", None),
        };
        Self { status, kind, message: message.into(), retry_after_s }
    }

    /// What looking into a home failed with, its causes in one sentence. A block that is missing in the store is
    /// damage to whoever asked for a file, not a wrong question.
    pub(super) fn of(fault: Fault, error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            cause = error.source();
        }
        Self::new(fault, message)
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Fault::Invalid, message)
    }

    /// What belongs to another org answers with exactly this as well.
    pub(super) fn not_found(what: &str, id: &str) -> Self {
        let id: String = id.chars().take(80).collect();
        Self::new(Fault::NotFound, format!("{what} `{id}` does not exist; list them to see which do"))
    }

    pub(super) fn unauthenticated(message: &str) -> Self {
        Self {
            status: StatusCode::UNAUTHORIZED,
            kind: "authentication_error",
            message: message.to_owned(),
            retry_after_s: None,
        }
    }

    pub(super) fn too_large(limit: usize) -> Self {
        Self::new(Fault::TooLarge, format!("the request body exceeds {limit} bytes"))
    }

    pub(super) fn beyond_the_end(size: u64) -> Self {
        Self {
            status: StatusCode::RANGE_NOT_SATISFIABLE,
            kind: "invalid_request_error",
            message: format!("the range begins beyond the end of the file, which has {size} bytes"),
            retry_after_s: None,
        }
    }

    pub(super) fn method_not_allowed(method: &str, path: &str) -> Self {
        Self {
            status: StatusCode::METHOD_NOT_ALLOWED,
            kind: "invalid_request_error",
            message: format!("{method} is not possible on {path}; see docs/api.md for the routes"),
            retry_after_s: None,
        }
    }
}

impl From<StoresError> for ApiError {
    fn from(error: StoresError) -> Self {
        Self::of(error.fault(), &error)
    }
}

impl From<ViewError> for ApiError {
    fn from(error: ViewError) -> Self {
        let fault = match (&error, error.fault()) {
            (ViewError::Object { .. }, Fault::NotFound) => Fault::Corrupt,
            (_, fault) => fault,
        };
        Self::of(fault, &error)
    }
}

impl From<OpenFileError> for ApiError {
    fn from(error: OpenFileError) -> Self {
        match error {
            OpenFileError::View(error) => error.into(),
            other => Self::of(other.fault(), &other),
        }
    }
}

impl From<EditError> for ApiError {
    fn from(error: EditError) -> Self {
        match error {
            EditError::View(error) => error.into(),
            other => Self::of(other.fault(), &other),
        }
    }
}

impl From<DbError> for ApiError {
    fn from(error: DbError) -> Self {
        let fault = error.fault();
        match fault {
            Fault::Retry => {
                tracing::warn!(%error, "the database did not answer a request");
                Self::new(fault, "the server's database is busy or going down; try again")
            }
            Fault::Full => {
                tracing::error!(%error, "the disk is full");
                Self::new(fault, error.to_string())
            }
            Fault::Corrupt | Fault::Bug => {
                tracing::error!(%error, "a request failed");
                Self::new(fault, "the server failed; its log has the reason under this request's id")
            }
            _ => Self::new(fault, error.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let id = format!("req_{}", uuid::Uuid::now_v7().simple());
        if self.status.is_server_error() {
            tracing::warn!(request = %id, status = self.status.as_u16(), message = %self.message, "answered");
        }
        let error = ErrorDetail { kind: self.kind.to_owned(), message: self.message };
        let body = ErrorBody { kind: "error".to_owned(), error, request_id: id.clone() };
        let mut response = (self.status, Json(body)).into_response();
        let headers = response.headers_mut();
        if let Ok(id) = HeaderValue::try_from(id) {
            headers.insert(REQUEST_ID, id);
        }
        if self.status == StatusCode::CONFLICT {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
