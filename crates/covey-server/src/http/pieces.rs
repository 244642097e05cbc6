//! Bytes between a blocking reader or writer and an HTTP body, a few pieces at a time.
//!
//! What stays true: a body that could not be written to its end breaks off and never looks whole; a peer that takes
//! or sends nothing for [`STALL_MAX`] ends the work that waits for it.

use std::io::{self, Read, Write};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::StreamExt as _;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// A peer may stand still for so long.
pub(super) const STALL_MAX: Duration = Duration::from_secs(60);
/// Pieces that wait between the two sides.
const PIECES_MAX: usize = 4;
const PIECE_BYTES: usize = 256 * 1024;
/// Of a request that was refused early, so much is still read: a client that has not sent everything yet would not
/// see the answer.
const DRAINED_BYTES_MAX: usize = 64 * 1024 * 1024;

type Piece = io::Result<Bytes>;

/// The writing side; for a blocking thread of the runtime.
#[derive(Debug)]
pub(super) struct PieceWriter {
    pieces: mpsc::Sender<Piece>,
    buffer: Vec<u8>,
    is_ended: bool,
}

/// A body, and what to write it with.
pub(super) fn body() -> (PieceWriter, Body) {
    let (pieces, queue) = mpsc::channel::<Piece>(PIECES_MAX);
    let stream = futures_util::stream::unfold(queue, |mut queue| async move {
        let piece = queue.recv().await?;
        Some((piece, queue))
    });
    (PieceWriter { pieces, buffer: Vec::new(), is_ended: false }, Body::from_stream(stream))
}

/// Lines of JSON on their way to a client.
#[derive(Debug)]
pub(super) struct LineSender {
    pieces: mpsc::Sender<Piece>,
}

/// A body of lines, and what to send them with.
pub(super) fn lines() -> (LineSender, Body) {
    let (pieces, queue) = mpsc::channel::<Piece>(PIECES_MAX);
    let stream = futures_util::stream::unfold(queue, |mut queue| async move {
        let piece = queue.recv().await?;
        Some((piece, queue))
    });
    (LineSender { pieces }, Body::from_stream(stream))
}

impl LineSender {
    /// Sends a line; false when nobody takes it any more.
    pub(super) async fn send(&self, line: &serde_json::Value) -> bool {
        let piece = Bytes::from(format!("{line}\n"));
        matches!(tokio::time::timeout(STALL_MAX, self.pieces.send(Ok(piece))).await, Ok(Ok(())))
    }
}

impl PieceWriter {
    fn send(&self, piece: Piece) -> io::Result<()> {
        let sent = Handle::current().block_on(tokio::time::timeout(STALL_MAX, self.pieces.send(piece)));
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::Error::from(io::ErrorKind::BrokenPipe)),
            Err(_) => {
                tracing::info!("dropped a reader that took nothing for {STALL_MAX:?}");
                Err(io::Error::from(io::ErrorKind::TimedOut))
            }
        }
    }

    /// Ends the body: whole after a success, broken off after a failure.
    pub(super) fn end(mut self, done: io::Result<()>) {
        self.is_ended = true;
        if let Err(error) = done.and_then(|()| self.flush()) {
            // The reader may be gone, and then nobody needs to know.
            if let Err(gone) = self.send(Err(error)) {
                tracing::debug!(error = %gone, "a body ends without its reader");
            }
        }
    }
}

impl Drop for PieceWriter {
    fn drop(&mut self) {
        // Whoever wrote has panicked: what was sent so far must not look whole.
        if !self.is_ended && self.pieces.try_send(Err(io::Error::other("the writer is gone"))).is_err() {
            tracing::debug!("a body ends without its reader, or behind a full queue");
        }
    }
}

impl Write for PieceWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let piece = std::mem::take(&mut self.buffer);
        self.send(Ok(piece.into()))
    }
}

/// The reading side; for a blocking thread.
#[derive(Debug)]
pub(super) struct PieceReader {
    queue: mpsc::Receiver<Piece>,
    piece: Bytes,
}

/// Gives the pieces of a request's body to a [`PieceReader`].
#[derive(Debug)]
pub(super) struct Forward {
    pieces: mpsc::Sender<Piece>,
}

/// A reader, and what feeds it.
pub(super) fn reader() -> (PieceReader, Forward) {
    let (pieces, queue) = mpsc::channel(PIECES_MAX);
    (PieceReader { queue, piece: Bytes::new() }, Forward { pieces })
}

impl Forward {
    /// Feeds the reader until the body or the reader ends. A body that breaks off or stands still is an error to the
    /// reader, never an early end.
    pub(super) async fn run(self, body: Body) {
        let mut body = body.into_data_stream();
        let mut drained = 0;
        loop {
            let next = tokio::time::timeout(STALL_MAX, body.next()).await;
            let piece = match next {
                Ok(None) => return,
                Ok(Some(Ok(piece))) => Ok(piece),
                Ok(Some(Err(error))) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, error)),
                Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "nothing came for too long")),
            };
            let (is_over, len) = (piece.is_err(), piece.as_ref().map_or(0, Bytes::len));
            if self.pieces.send(piece).await.is_err() {
                drained += len;
            }
            if is_over || drained > DRAINED_BYTES_MAX {
                return;
            }
        }
    }
}

impl Read for PieceReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.queue.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
        }
        let len = buffer.len().min(self.piece.len());
        buffer[..len].copy_from_slice(&self.piece.split_to(len));
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_written_arrives_and_a_failure_never_looks_like_an_end() {
        for fails in [false, true] {
            let (mut writer, body) = body();
            let written = tokio::task::spawn_blocking(move || {
                writer.write_all(&vec![7; PIECE_BYTES * 5 + 1]).unwrap();
                writer.end(if fails { Err(io::Error::other("on purpose")) } else { Ok(()) });
            });
            let read = axum::body::to_bytes(body, usize::MAX).await;
            written.await.unwrap();
            assert_eq!(read.map(|bytes| bytes.len()).ok(), (!fails).then_some(PIECE_BYTES * 5 + 1));
        }
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_an_error_to_its_reader() {
        for breaks in [false, true] {
            let pieces = [Ok("ab"), if breaks { Err(io::Error::other("gone")) } else { Ok("c") }];
            let body = Body::from_stream(futures_util::stream::iter(pieces));
            let (mut reader, forward) = reader();
            let read = tokio::task::spawn_blocking(move || {
                let mut text = String::new();
                reader.read_to_string(&mut text).map(|_| text)
            });
            forward.run(body).await;
            assert_eq!(read.await.unwrap().ok(), (!breaks).then(|| "abc".to_owned()));
        }
    }
}
