//! TokenSink: the one-way pipe from the engine to a choice's listener, and the one word that travels back.
//!
//! The engine sends without ever waiting; a full channel aborts the choice as a slow reader. The server, the cancel endpoint, deadlines
//! and drain write the abort word; the engine's sweep reads it once a turn. **Invariant:** the first abort cause stays.

use crate::request::{AbortCause, Event};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use tokio::sync::mpsc;

/// The abort word of one choice, shared by everyone who may end it.
#[derive(Clone, Debug, Default)]
pub struct Abort(Arc<AtomicU8>);

impl Abort {
    /// Asks the choice to end; returns whether this cause was the first.
    pub fn set(&self, cause: AbortCause) -> bool {
        self.0.compare_exchange(0, cause as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    /// The cause, if any.
    pub fn cause(&self) -> Option<AbortCause> {
        Some(match self.0.load(Ordering::Acquire) {
            0 => return None,
            1 => AbortCause::Disconnected,
            2 => AbortCause::Cancelled,
            3 => AbortCause::Expired,
            4 => AbortCause::SlowReader,
            5 => AbortCause::Drain,
            6 => AbortCause::StopString,
            other => unreachable!("abort word holds {other}, which no cause has"),
        })
    }
}

/// The engine's end.
#[derive(Debug)]
pub struct TokenSink {
    events: mpsc::Sender<Event>,
    abort: Abort,
}

/// The listener's end.
#[derive(Debug)]
pub struct TokenStream {
    events: mpsc::Receiver<Event>,
    abort: Abort,
}

/// A sink and its stream, holding at most `capacity` undelivered events.
pub fn token_channel(capacity: usize) -> (TokenSink, TokenStream) {
    let (sender, receiver) = mpsc::channel(capacity);
    let abort = Abort::default();
    (TokenSink { events: sender, abort: abort.clone() }, TokenStream { events: receiver, abort })
}

impl TokenSink {
    /// Sends without waiting. A full channel sets the abort word to `SlowReader`, a closed one to `Disconnected`; false in both.
    pub fn send(&self, event: Event) -> bool {
        match self.events.try_send(event) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.abort.set(AbortCause::SlowReader);
                false
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                self.abort.set(AbortCause::Disconnected);
                false
            }
        }
    }
    pub fn abort(&self) -> &Abort {
        &self.abort
    }
}

impl TokenStream {
    /// The next event; None once the engine's end is gone.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
    /// The next event from a thread that is not async.
    pub fn next_blocking(&mut self) -> Option<Event> {
        self.events.blocking_recv()
    }
    /// An event that is already there.
    pub fn try_next(&mut self) -> Option<Event> {
        self.events.try_recv().ok()
    }
    pub fn abort(&self) -> &Abort {
        &self.abort
    }
}
