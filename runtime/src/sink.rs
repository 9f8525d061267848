//! TokenSink: the one-way pipe from the engine to a choice's listener, and the one word that travels back.
//!
//! The engine sends without ever waiting; a full channel, or a reader too many bytes behind in all of its choices, aborts the choice as a
//! slow reader. The server, the cancel endpoint, deadlines and drain write the abort word; the engine's sweep reads it once a turn.
//! **Invariant:** the first abort cause stays; the stream hears exactly one terminal event, and nothing after it: one place of the channel
//! is kept for it, `finish` consumes the sink, and a sink that is dropped unfinished (the engine died) says so itself.

use crate::request::{AbortCause, Event};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// The abort word of one choice, shared by everyone who may end it: the cause in the low byte; for a stop string, the tokens that belong to
/// the answer in the high half.
#[derive(Clone, Debug, Default)]
pub struct Abort(Arc<AtomicU64>);

impl Abort {
    /// Asks the choice to end; returns whether this cause was the first.
    pub fn set(&self, cause: AbortCause) -> bool {
        self.write(cause as u64)
    }
    /// A stop string completed with the choice's `kept`-th token: the choice is complete with that token, and later ones, delivered before
    /// the engine heard of it, are no part of the answer. Returns whether this cause was the first.
    pub fn stop_string(&self, kept: u32) -> bool {
        self.write(AbortCause::StopString as u64 | u64::from(kept) << 32)
    }
    /// The cause, if any.
    pub fn cause(&self) -> Option<AbortCause> {
        Some(match self.0.load(Ordering::Acquire) & 0xff {
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
    /// Tokens that belong to the answer, if a stop string ended it and said so.
    pub(crate) fn kept(&self) -> Option<u32> {
        let word = self.0.load(Ordering::Acquire);
        let kept = (word >> 32) as u32;
        (word & 0xff == AbortCause::StopString as u64 && kept > 0).then_some(kept)
    }
    fn write(&self, word: u64) -> bool {
        self.0.compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Bytes of the events that wait for one reader, over all of its channels, and the most that may.
#[derive(Clone, Debug)]
pub struct Backlog {
    waiting: Arc<AtomicUsize>,
    max: usize,
}

impl Backlog {
    pub fn new(max: usize) -> Self {
        Backlog { waiting: Arc::default(), max }
    }
    /// A sink and its stream, holding at most `capacity` undelivered events and the terminal one.
    pub fn channel(&self, capacity: usize) -> (TokenSink, TokenStream) {
        let (sender, receiver) = mpsc::channel(capacity + 1);
        let abort = Abort::default();
        (
            TokenSink { events: sender, abort: abort.clone(), backlog: self.clone(), finished: false },
            TokenStream { events: receiver, abort, backlog: self.clone() },
        )
    }
    /// Takes an event in, unless more would wait than may. One that is too large alone is taken when nothing else waits, so the most that
    /// ever wait are `max` or one event.
    fn take(&self, bytes: usize) -> bool {
        let fits = |waiting: usize| (waiting == 0 || waiting + bytes <= self.max).then(|| waiting + bytes);
        self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }
    fn release(&self, bytes: usize) {
        self.waiting.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The engine's end.
#[derive(Debug)]
pub struct TokenSink {
    events: mpsc::Sender<Event>,
    abort: Abort,
    backlog: Backlog,
    finished: bool,
}

/// The listener's end. Dropping it disconnects the choice, unless it has ended or has another cause already.
#[derive(Debug)]
pub struct TokenStream {
    events: mpsc::Receiver<Event>,
    abort: Abort,
    backlog: Backlog,
}

/// A channel of a reader that may be `capacity` events behind, whatever their size.
pub fn token_channel(capacity: usize) -> (TokenSink, TokenStream) {
    Backlog::new(usize::MAX).channel(capacity)
}

impl TokenSink {
    /// Sends without waiting. A full channel or backlog sets the abort word to `SlowReader`, a closed channel to `Disconnected`; false in both.
    pub fn send(&self, event: Event) -> bool {
        debug_assert!(!event.is_terminal(), "a terminal event goes through finish");
        if self.events.is_closed() {
            self.abort.set(AbortCause::Disconnected);
            return false;
        }
        // This is the only sender, so the place seen here is still there below; the last one is the terminal event's.
        let bytes = event.bytes();
        if self.events.capacity() <= 1 || !self.backlog.take(bytes) {
            self.abort.set(AbortCause::SlowReader);
            return false;
        }
        let sent = self.events.try_send(event).is_ok();
        if !sent {
            self.backlog.release(bytes);
            self.abort.set(AbortCause::Disconnected);
        }
        sent
    }
    /// Sends the terminal event; nothing can follow it. A listener that is gone does not matter any more.
    pub fn finish(mut self, event: Event) {
        debug_assert!(event.is_terminal(), "only a terminal event finishes a sink");
        self.last(event);
    }
    pub fn abort(&self) -> &Abort {
        &self.abort
    }
    fn last(&mut self, event: Event) {
        self.finished = true;
        // Fails only if the listener is gone: one place was kept.
        let _ = self.events.try_send(event);
    }
}

impl Drop for TokenSink {
    fn drop(&mut self) {
        if !self.finished {
            self.last(Event::Error("the engine stopped before the answer was complete".to_owned()));
        }
    }
}

impl TokenStream {
    /// The next event; None after the terminal one.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv().await;
        self.read(event)
    }
    /// The next event, for a listener that polls several streams.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        self.events.poll_recv(cx).map(|event| self.read(event))
    }
    /// The next event from a thread that is not async.
    pub fn next_blocking(&mut self) -> Option<Event> {
        let event = self.events.blocking_recv();
        self.read(event)
    }
    /// An event that is already there.
    pub fn try_next(&mut self) -> Option<Event> {
        let event = self.events.try_recv().ok();
        self.read(event)
    }
    pub fn abort(&self) -> &Abort {
        &self.abort
    }
    /// What was read waits no longer. A terminal event was never counted: it comes whatever waits.
    fn read(&self, event: Option<Event>) -> Option<Event> {
        if let Some(event) = event.as_ref().filter(|event| !event.is_terminal()) {
            self.backlog.release(event.bytes());
        }
        event
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.abort.set(AbortCause::Disconnected);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Finish, FinishReason, Token};

    fn token(id: u32) -> Event {
        Event::Token(Token { id, logprob: 0.0, rank: 1, top: Vec::new() })
    }
    fn finish() -> Event {
        let reason = FinishReason::Length;
        Event::Finished(Finish { reason, prompt_tokens: 1, completion_tokens: 2, cached_tokens: 0 })
    }

    #[test]
    fn a_full_channel_is_a_slow_reader_and_still_hears_the_end() {
        let (sink, mut stream) = token_channel(2);
        assert!(sink.send(token(1)));
        assert!(sink.send(token(2)));
        assert!(!sink.send(token(3)));
        assert_eq!(sink.abort().cause(), Some(AbortCause::SlowReader));
        sink.finish(finish());
        assert_eq!(stream.try_next(), Some(token(1)));
        assert_eq!(stream.try_next(), Some(token(2)));
        assert_eq!(stream.try_next(), Some(finish()));
        assert_eq!(stream.next_blocking(), None);
    }

    #[test]
    fn a_reader_is_as_many_bytes_behind_as_its_backlog_in_all_its_channels() {
        let wide = |id| Event::Token(Token { id, logprob: 0.0, rank: 1, top: vec![(1, 0.0); 20] });
        let backlog = Backlog::new(5 * wide(0).bytes());
        let [(first, mut heard), (second, mut other)] = [backlog.channel(100), backlog.channel(100)];
        assert!((0..3).all(|id| first.send(wide(id))) && (0..2).all(|id| second.send(wide(id))));
        // What was read makes room, for either channel.
        assert_eq!(heard.try_next(), Some(wide(0)));
        assert!(second.send(wide(2)));
        assert!(!second.send(token(3)));
        assert_eq!(second.abort().cause(), Some(AbortCause::SlowReader));
        assert_eq!(first.abort().cause(), None);
        // The end comes all the same, and nothing is left over when all was read.
        second.finish(finish());
        first.finish(finish());
        let all = |stream: &mut TokenStream| std::iter::from_fn(|| stream.next_blocking()).count();
        assert_eq!((all(&mut heard), all(&mut other)), (2 + 1, 3 + 1));
        assert_eq!(backlog.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_event_larger_than_the_backlog_goes_alone() {
        let backlog = Backlog::new(100);
        let (sink, mut stream) = backlog.channel(100);
        let scored = || Event::Prompt(vec![Token { id: 1, logprob: 0.0, rank: 1, top: vec![] }; 100]);
        assert!(sink.send(scored()));
        assert_eq!(stream.try_next(), Some(scored()));
        assert!(sink.send(token(1)));
        assert!(!sink.send(scored()));
        assert_eq!(sink.abort().cause(), Some(AbortCause::SlowReader));
    }

    #[test]
    fn a_dropped_stream_disconnects_and_a_dropped_sink_is_an_error() {
        let (sink, stream) = token_channel(2);
        drop(stream);
        assert_eq!(sink.abort().cause(), Some(AbortCause::Disconnected));
        assert!(!sink.send(token(1)));
        let (sink, mut stream) = token_channel(1);
        assert!(sink.send(token(1)));
        drop(sink);
        assert_eq!(stream.try_next(), Some(token(1)));
        assert!(matches!(stream.try_next(), Some(Event::Error(_))));
        assert_eq!(stream.next_blocking(), None);
    }

    #[test]
    fn the_first_cause_stays() {
        let (_, stream) = token_channel(1);
        assert!(stream.abort().stop_string(7));
        assert!(!stream.abort().set(AbortCause::Cancelled));
        assert_eq!(stream.abort().cause(), Some(AbortCause::StopString));
        assert_eq!(stream.abort().kept(), Some(7));
    }
}
