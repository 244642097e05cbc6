//! A session's public events as server-sent events.
//!
//! A stream begins at the present (the vendor's rule: open the stream, then list, then drop what came twice), or
//! behind the event that `Last-Event-ID` names. Every event carries its id, so a client that was dropped goes on
//! without a gap. A reader that does not read is dropped; nobody waits for it.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::db::Follower;

/// Pieces that may wait for one reader.
const STREAM_QUEUE_MAX: usize = 64;
/// A reader that takes nothing for this long is dropped.
const STREAM_STALL_MAX: Duration = Duration::from_secs(30);
/// A comment is sent after this long without an event, so that nothing on the way takes the link for dead.
const STREAM_QUIET_MAX: Duration = Duration::from_secs(15);

/// Answers with the events that `follower` gives, until the session ends or is archived, the reader leaves or
/// `stop` is called.
pub(super) fn events(
    mut follower: Follower,
    tasks: &TaskTracker,
    stop: CancellationToken,
    permit: OwnedSemaphorePermit,
) -> Response {
    let (pieces, queue) = mpsc::channel::<Bytes>(STREAM_QUEUE_MAX);
    tasks.spawn(async move {
        let _permit = permit;
        // The comment makes the head and a first byte go out at once: clients wait for them.
        let mut piece = Bytes::from_static(b": open\n\n");
        let mut last = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                sent = pieces.send(piece) => if last || sent.is_err() {
                    return;
                },
                () = tokio::time::sleep(STREAM_STALL_MAX) => {
                    tracing::info!("dropped a stream reader that took nothing for {STREAM_STALL_MAX:?}");
                    return;
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = pieces.closed() => return,
                () = tokio::time::sleep(STREAM_QUIET_MAX) => piece = Bytes::from_static(b": quiet\n\n"),
                next = follower.next() => match next {
                    // Archived: the reader has everything there will ever be.
                    Ok(events) if events.is_empty() => return,
                    Ok(events) => {
                        last = events.iter().any(|(_, event)| ends_the_stream(event));
                        piece = events.iter().map(|(_, event)| written(event)).collect::<String>().into();
                    }
                    Err(error) => {
                        // Ending is the honest answer: the client resumes by id, or learns what is wrong.
                        tracing::debug!(%error, "a stream ends");
                        return;
                    }
                },
            }
        }
    });
    let body = futures_util::stream::unfold(queue, |mut queue| async move {
        let piece = queue.recv().await?;
        Some((Ok::<_, std::convert::Infallible>(piece), queue))
    });
    let head = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // Keeps reverse proxies from collecting the stream.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (head, Body::from_stream(body)).into_response()
}

fn ends_the_stream(event: &Value) -> bool {
    matches!(kind(event), "session.status_terminated" | "session.deleted")
}

fn kind(event: &Value) -> &str {
    event.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn written(event: &Value) -> String {
    let id = event.get("id").and_then(Value::as_str).unwrap_or_default();
    // JSON text has no raw line ends, so one `data` line is enough.
    format!("id: {id}\nevent: {}\ndata: {event}\n\n", kind(event))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::sse::SseParser;

    #[test]
    fn a_written_event_is_read_back_with_its_id_and_kind() {
        let event = json!({"type": "agent.message", "id": "sevt_1", "content": [{"text": "a\nb\r\u{2028}"}]});
        let read = SseParser::default().push(written(&event).as_bytes()).unwrap();
        assert_eq!(read.len(), 1);
        assert_eq!(
            (read[0].id.as_deref(), read[0].event.as_deref()),
            (Some("sevt_1"), Some("agent.message"))
        );
        assert_eq!(serde_json::from_str::<Value>(&read[0].data).unwrap(), event);
    }
}
