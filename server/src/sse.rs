//! Server-sent events: an answer's parts as they come, keep-alive comments while there are none.
//!
//! The body of a streamed response; polled by the connection, so a client that does not read stops it from being polled, and its choices'
//! bounded channels fill. **Invariant:** a stream ends with `[DONE]` after every choice's finish reason, or with one error event.

use crate::answer::{Answer, Part};
use crate::error::ApiError;
use crate::live::Live;
use crate::request::Endpoint;
use crate::respond::Head;
use bytes::{BufMut, Bytes, BytesMut};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// Between two comments on a quiet stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub struct Events {
    head: Head,
    answer: Answer,
    /// Gone once the outcome is known.
    live: Option<Live>,
    stage: Stage,
    parts: Vec<Part>,
    /// Per choice: its first part was written.
    begun: Vec<bool>,
    keep_alive: Pin<Box<Sleep>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A chat's first deltas are due.
    Roles,
    Parts,
    Over,
}

impl Events {
    pub fn new(head: Head, answer: Answer, live: Live) -> Self {
        Events {
            begun: vec![false; answer.choices() as usize],
            stage: if head.endpoint == Endpoint::Chat { Stage::Roles } else { Stage::Parts },
            head,
            answer,
            live: Some(live),
            parts: Vec::new(),
            keep_alive: Box::pin(tokio::time::sleep(KEEP_ALIVE)),
        }
    }

    /// The next bytes; None at the end.
    pub fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut out = BytesMut::new();
        match self.stage {
            Stage::Over => return Poll::Ready(None),
            Stage::Roles => {
                (0..self.answer.choices()).for_each(|index| write_event(&mut out, &self.head.role(index)));
                self.stage = Stage::Parts;
            }
            Stage::Parts => match self.answer.poll_parts(cx, &mut self.parts) {
                Poll::Pending => {
                    ready!(self.keep_alive.as_mut().poll(cx));
                    out.put_slice(b": keep-alive\n\n");
                }
                Poll::Ready(Ok(open)) => {
                    self.write_parts(&mut out);
                    if !open {
                        self.end(&mut out);
                    }
                }
                Poll::Ready(Err(error)) => {
                    self.write_parts(&mut out);
                    self.fail(&error, &mut out);
                }
            },
        }
        self.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
        Poll::Ready(Some(out.freeze()))
    }

    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    fn write_parts(&mut self, out: &mut BytesMut) {
        for part in self.parts.drain(..) {
            let first = !std::mem::replace(&mut self.begun[part.index as usize], true);
            let shows_prompt = first && self.head.token_ids && self.head.endpoint == Endpoint::Completion;
            if !part.text.is_empty() || !part.tokens.is_empty() {
                self.answer.wire().queue_text();
            }
            let prompt = shows_prompt.then(|| self.answer.prompt_ids(part.index));
            write_event(out, &self.head.part(&part, prompt));
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        if self.head.include_usage {
            write_event(out, &self.head.usage(self.answer.usage()));
        }
        write_event(out, "[DONE]");
        self.stage = Stage::Over;
        if let (Some(live), Some(finished)) = (self.live.take(), self.answer.finished()) {
            live.finished(finished);
        }
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        write_event(out, &error.envelope());
        self.stage = Stage::Over;
        if let Some(live) = self.live.take() {
            live.failed(error);
        }
    }
}

/// One event. Characters that some clients take for line ends are escaped, so every event is one line to everybody.
fn write_event(out: &mut BytesMut, json: &str) {
    out.reserve(json.len() + 8);
    out.put_slice(b"data: ");
    let mut rest = json;
    while let Some(at) = rest.find(['\u{85}', '\u{2028}', '\u{2029}']) {
        let c = rest[at..].chars().next().expect("find gave its start");
        out.put_slice(&rest.as_bytes()[..at]);
        out.put_slice(format!("\\u{:04x}", c as u32).as_bytes());
        rest = &rest[at + c.len_utf8()..];
    }
    out.put_slice(rest.as_bytes());
    out.put_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_separators_are_escaped() {
        let mut out = BytesMut::new();
        write_event(&mut out, "{\"a\":\"x\u{2028}y\u{2029}z\u{85}é\"}");
        let text = std::str::from_utf8(&out).unwrap();
        assert_eq!(text, "data: {\"a\":\"x\\u2028y\\u2029z\\u0085é\"}\n\n");
        let value: serde_json::Value = serde_json::from_str(text.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(value["a"], "x\u{2028}y\u{2029}z\u{85}é");
    }
}
