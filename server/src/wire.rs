//! What a connection knows about its client: whether it reads, and whether it got its first token.
//!
//! Shared by the socket (`socket`), which sees bytes leave, and the answer, which must say why it ended when the client goes away.
//! **Invariant:** one request at a time uses it; `begin` starts the next.

use slotgraph_runtime::request::AbortCause;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[derive(Debug, Default)]
pub struct Wire {
    /// Text of the answer is in the connection's buffer.
    queued: AtomicBool,
    /// Text of the answer was handed to the socket.
    written: AtomicBool,
    /// A write made no progress for the write timeout.
    slow: AtomicBool,
    /// The client may still be sending: read a little before closing, so that it sees the answer rather than a reset.
    linger: AtomicBool,
}

impl Wire {
    /// The next request of the connection.
    pub fn begin(&self) {
        self.queued.store(false, Relaxed);
        self.written.store(false, Relaxed);
    }
    /// A frame with text of the answer goes to the connection's buffer.
    pub fn queue_text(&self) {
        self.queued.store(true, Relaxed);
    }
    /// The connection's buffer is empty: all of it went to the socket.
    pub fn flushed(&self) {
        if self.queued.load(Relaxed) {
            self.written.store(true, Relaxed);
        }
    }
    pub fn stalled(&self) {
        self.slow.store(true, Relaxed);
    }
    pub fn linger(&self) {
        self.linger.store(true, Relaxed);
    }
    pub fn lingers(&self) -> bool {
        self.linger.load(Relaxed)
    }
    /// Why an answer that is dropped now was not wanted any more.
    pub fn cause(&self) -> AbortCause {
        match (self.slow.load(Relaxed), self.written.load(Relaxed)) {
            (true, _) => AbortCause::SlowReader,
            (false, true) => AbortCause::Cancelled,
            (false, false) => AbortCause::Disconnected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_text_on_the_socket_turns_disconnected_into_cancelled() {
        let wire = Wire::default();
        wire.flushed();
        assert_eq!(wire.cause(), AbortCause::Disconnected);
        wire.queue_text();
        assert_eq!(wire.cause(), AbortCause::Disconnected);
        wire.flushed();
        assert_eq!(wire.cause(), AbortCause::Cancelled);
        wire.begin();
        assert_eq!(wire.cause(), AbortCause::Disconnected);
        wire.stalled();
        assert_eq!(wire.cause(), AbortCause::SlowReader);
    }
}
