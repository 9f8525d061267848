//! What the edge hands to the engine and what it hears back: commands, events, and the reasons a request ends.
//!
//! Built by the server (after validation: an invalid value cannot be written down here), consumed by the scheduler.
//! **Invariant:** each choice hears `Scheduled` at most once, then tokens, then exactly one terminal event.

use crate::scheduler::Snapshot;
use crate::sink::TokenSink;
use slotgraph_graphs::spec::SamplingSpec;
use std::sync::Arc;
use std::time::Instant;

/// The request's id: `x-request-id`, taken or made; also the trace id.
pub type RequestId = Arc<str>;

/// A message to the engine thread. Cancels do not come this way: they set the sink's abort word, which the sweep reads.
#[derive(Debug)]
pub enum Command {
    /// A whole group: validated, queued and refused as one.
    Submit(Group),
    /// Stop admitting; end everything that is still queued or running at `deadline`.
    Drain { deadline: Instant },
    /// Leave the loop once nothing is live.
    Shutdown,
    /// Show the slot table, for `/debug/slots`.
    Inspect(tokio::sync::oneshot::Sender<Snapshot>),
}

/// A request with n × prompts choices.
#[derive(Debug)]
pub struct Group {
    pub id: RequestId,
    /// prompt_no × n + sample_no order; choices of the same prompt share their `prompt` allocation.
    pub choices: Vec<Choice>,
    /// When the edge accepted it.
    pub received: Instant,
    /// Ends the request with cause `expired`.
    pub deadline: Option<Instant>,
}

/// One answer to produce.
#[derive(Debug)]
pub struct Choice {
    /// Position among the request's choices.
    pub index: u32,
    /// Sample index among its prompt's choices: part of the noise counter.
    pub sample: u32,
    pub prompt: Arc<[u32]>,
    pub sampling: Arc<SamplingSpec>,
    /// Prompt logprobs (echo + logprobs): alternatives to keep, at most 5. Such a choice prefills its whole prompt itself.
    pub score_prompt: Option<u32>,
    pub sink: TokenSink,
}

/// A token and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub id: u32,
    /// Raw logprob; meaningful only if the choice asked for logprobs.
    pub logprob: f32,
    pub rank: u32,
    /// Best first; at most as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

/// What a choice hears.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The choice took a slot; prefill starts.
    Scheduled,
    /// Scored prompt tokens in order, from prompt position 1 on (position 0 has no logprob). May come in several pieces.
    Prompt(Vec<Token>),
    /// One generated token. EOS and stop ids are delivered too (counted, not shown).
    Token(Token),
    /// Terminal.
    Finished(Finish),
    /// Terminal: refused by the scheduler (never started).
    Rejected(String),
    /// Terminal: the engine failed, or a NaN row.
    Error(String),
}

impl Event {
    /// Whether nothing follows it.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Event::Finished(_) | Event::Rejected(_) | Event::Error(_))
    }
    /// What it takes of memory while it waits, terminal events' words aside. The same before and after it was sent.
    pub fn bytes(&self) -> usize {
        let top = |token: &Token| token.top.capacity() * size_of::<(u32, f32)>();
        let beside = match self {
            Event::Prompt(tokens) => tokens.capacity() * size_of::<Token>() + tokens.iter().map(top).sum::<usize>(),
            Event::Token(token) => top(token),
            Event::Scheduled | Event::Finished(_) | Event::Rejected(_) | Event::Error(_) => 0,
        };
        size_of::<Event>() + beside
    }
}

/// How a choice that ran ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finish {
    pub reason: FinishReason,
    pub prompt_tokens: u32,
    /// Tokens delivered, EOS included.
    pub completion_tokens: u32,
    pub cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// EOS, a stop id, or a stop string.
    Stop,
    /// max_tokens or the context limit.
    Length,
    /// Ended by its abort word; nobody listens any more, or the server tells the client why.
    Aborted(AbortCause),
}

/// The terminal reason of a choice, from end to end: traces, metrics, logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Terminal {
    CompletedStop,
    CompletedLength,
    Rejected,
    Cancelled,
    Disconnected,
    Expired,
    Error,
}

impl Terminal {
    pub fn name(self) -> &'static str {
        match self {
            Terminal::CompletedStop => "completed_stop",
            Terminal::CompletedLength => "completed_length",
            Terminal::Rejected => "rejected",
            Terminal::Cancelled => "cancelled",
            Terminal::Disconnected => "disconnected",
            Terminal::Expired => "expired",
            Terminal::Error => "error",
        }
    }
}

/// Why a choice was asked to end early: the value of its abort word. The first writer wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AbortCause {
    /// The client's connection went before its first token.
    Disconnected = 1,
    /// The client left after its first token, or called the cancel endpoint.
    Cancelled = 2,
    /// The deadline passed.
    Expired = 3,
    /// The client stopped reading.
    SlowReader = 4,
    /// The server is draining and the drain deadline passed.
    Drain = 5,
    /// A stop string completed in the text: the choice is complete (`completed_stop`), only the device does not know yet.
    StopString = 6,
}

impl AbortCause {
    pub fn name(self) -> &'static str {
        match self {
            AbortCause::Disconnected => "disconnected",
            AbortCause::Cancelled => "cancelled",
            AbortCause::Expired => "expired",
            AbortCause::SlowReader => "slow_reader",
            AbortCause::Drain => "drain",
            AbortCause::StopString => "stop_string",
        }
    }
    /// The terminal reason that this cause leads to.
    pub fn terminal(self) -> Terminal {
        match self {
            AbortCause::Disconnected => Terminal::Disconnected,
            AbortCause::Cancelled | AbortCause::SlowReader | AbortCause::Drain => Terminal::Cancelled,
            AbortCause::Expired => Terminal::Expired,
            AbortCause::StopString => Terminal::CompletedStop,
        }
    }
}
