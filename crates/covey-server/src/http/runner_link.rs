//! A runner dials in: a request that becomes the runner link.
//!
//! What stays true: the token was checked before the connection changes hands, so the link needs no credential of its own and
//! serves that token's org. What does not belong here: what is said over the link.

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use covey_wire::runner::RUNNER_LINK_PROTOCOL;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use super::Api;
use super::error::{ApiError, Result};
use super::extract::Caller;
use crate::link::{self, Trust};

pub(super) async fn take_in(
    State(api): State<Api>,
    caller: Caller,
    mut request: Request,
) -> Result<Response> {
    let asked = request.headers().get(header::UPGRADE).and_then(|value| value.to_str().ok());
    if !asked.is_some_and(|asked| asked.eq_ignore_ascii_case(RUNNER_LINK_PROTOCOL)) {
        let text = format!(
            "this is where runners dial in: the request must ask to upgrade to {RUNNER_LINK_PROTOCOL}"
        );
        return Err(ApiError::invalid(text));
    }
    let Some(links) = api.inner.links.clone() else {
        return Err(ApiError::invalid("no runner can dial in here"));
    };
    let Some(upgraded) = request.extensions_mut().remove::<OnUpgrade>() else {
        return Err(ApiError::invalid(
            "the connection cannot be upgraded; a proxy between may not let it pass",
        ));
    };
    let stop = api.inner.stop.clone();
    api.inner.tasks.spawn(async move {
        match upgraded.await {
            Ok(stream) => {
                let end =
                    link::serve(TokioIo::new(stream), &links, Trust::InProcess(caller.org), &stop).await;
                tracing::debug!(reason = %end, "link served");
            }
            Err(error) => tracing::debug!(%error, "a runner went before its link stood"),
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static(RUNNER_LINK_PROTOCOL));
    Ok(response)
}
