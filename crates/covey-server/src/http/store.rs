//! `/v1/covey/store`: what an org's store holds beyond need, and collecting it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use covey_home::Counters;
use covey_types::Fault;
use serde_json::{Value, json};

use super::error::{ApiError, Result};
use super::extract::{Caller, JsonBody};
use super::fields::Fields;
use super::{Api, pieces};
use crate::collect::{CollectRequest, CollectorError};
/// How often a line about the progress is sent.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// The last collection.
pub(super) async fn get(State(api): State<Api>, caller: Caller) -> Result<Json<Value>> {
    let org = caller.org;
    let last = api.inner.db.last_collection(org).await?;
    let floor = api.inner.db.collect_floor(org).await?;
    let collected = last.map(|last| json!({ "at": last.at.to_string(), "report": last.report }));
    Ok(Json(json!({ "org_id": org.to_string(), "collected": collected, "epoch_floor": floor })))
}

/// Collects and answers with a line of JSON for each second that it takes, then one with the result. A client that goes
/// away ends the collection.
pub(super) async fn collect(
    State(api): State<Api>,
    caller: Caller,
    JsonBody(body): JsonBody,
) -> Result<Response> {
    let fields = Fields::body(&body);
    let dry_run = fields.flag("dry_run")?.unwrap_or(false);
    let limit = fields.number("bytes_per_second")?;
    let recompress_bytes = fields.number("recompress_bytes")?.unwrap_or(0);
    api.stores()?;
    let Some(collector) = api.collector().cloned() else {
        return Err(ApiError::new(Fault::Bug, "a server with stores has no collector"));
    };
    let cancel = Arc::new(AtomicBool::new(false));
    let progress = Arc::new(Counters::default());
    let request = CollectRequest {
        org: caller.org,
        dry_run,
        bytes_per_second: limit.unwrap_or(collector.config().bytes_per_second),
        recompress_bytes,
        cancel: Arc::clone(&cancel),
        progress: Arc::clone(&progress),
    };
    let stop = api.inner.stop.clone();
    let (sender, body) = pieces::lines();
    api.inner.tasks.spawn(async move {
        let mut running = std::pin::pin!(collector.run(request));
        let result = loop {
            tokio::select! {
                done = &mut running => break done,
                () = stop.cancelled() => cancel.store(true, Ordering::Relaxed),
                () = tokio::time::sleep(PROGRESS_EVERY) => {
                    let line = json!({ "type": "progress", "bytes": progress.bytes() });
                    if !sender.send(&line).await {
                        cancel.store(true, Ordering::Relaxed);
                    }
                }
            }
            if cancel.load(Ordering::Relaxed) {
                break running.await;
            }
        };
        if !sender.send(&last_line(result)).await {
            tracing::debug!("whoever asked for a collection is gone");
        }
    });
    let mut response = body.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    Ok(response)
}

fn last_line(result: std::result::Result<crate::collect::Collected, CollectorError>) -> Value {
    match result {
        Ok(collected) => {
            let mut line = json!({ "type": "done" });
            if let (Some(line), Ok(Value::Object(report))) =
                (line.as_object_mut(), serde_json::to_value(&collected))
            {
                line.extend(report);
            }
            line
        }
        Err(error) => {
            let fault = error.fault();
            json!({ "type": "error", "fault": fault, "message": ApiError::of(fault, &error).message() })
        }
    }
}
