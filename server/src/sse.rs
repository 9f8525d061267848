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

    use crate::answer;
    use crate::api::{self, ApiRequest};
    use crate::live::Registry;
    use crate::metrics::{Metrics, Outcome};
    use crate::prompt::Reader;
    use crate::request::{self, Limits};
    use crate::tokenizer::Tokenizer;
    use slotgraph_runtime::request::{Event, Finish, FinishReason, Token};
    use slotgraph_runtime::sink::TokenSink;
    use std::sync::Arc;

    /// A stream of `n` chat choices, the engine's ends of them, and where outcomes are counted.
    fn stream(n: u32) -> (Events, Vec<TokenSink>, Arc<Metrics>) {
        let tokenizer = include_bytes!("../../tests/models/shakespeare-dsv2/tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::parse(tokenizer).unwrap());
        let limits = Limits {
            served: vec!["m".into()],
            vocab: 2048,
            context: 200,
            choices_max: 64,
            defaults: Default::default(),
        };
        let body = format!(r#"{{"model":"m","prompt":"x","n":{n}}}"#);
        let fields = ApiRequest::parse(body.as_bytes(), &[api::COMPLETION, api::SAMPLING]).unwrap();
        let valid = request::completion(&fields, &limits).unwrap();
        let prompted = Reader { tokenizer: &tokenizer, template: None, limits: &limits }.read(valid).unwrap();
        let (group, answer) = answer::open(prompted, tokenizer.clone(), Arc::default(), "r".into(), None);
        let metrics = Arc::new(Metrics::new("m", &[1]));
        let registry = Arc::new(Registry::default());
        let live = registry.begin("r".into(), answer.aborts(), metrics.clone(), Arc::default());
        let head = Head {
            endpoint: Endpoint::Chat,
            id: "chatcmpl-r".into(),
            created: 1,
            model: "m".into(),
            fingerprint: "fp_".into(),
            tokenizer,
            logprobs: None,
            token_ids: false,
            tokens_as_ids: false,
            include_usage: true,
        };
        let sinks = group.choices.into_iter().map(|choice| choice.sink).collect();
        (Events::new(head, answer, live), sinks, metrics)
    }
    fn token(id: u32) -> Event {
        Event::Token(Token { id, logprob: 0.0, rank: 1, top: vec![] })
    }
    /// What can be read now, an entry a frame.
    fn read(events: &mut Events) -> Vec<String> {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let mut frames = Vec::new();
        while let Poll::Ready(Some(bytes)) = events.poll_bytes(&mut cx) {
            frames.push(String::from_utf8(bytes.to_vec()).unwrap());
        }
        frames
    }

    #[tokio::test]
    async fn a_stream_ends_with_usage_and_done() {
        let (mut events, mut sinks, metrics) = stream(2);
        assert_eq!(read(&mut events)[0].matches("\"role\":\"assistant\"").count(), 2);
        for sink in sinks.drain(..) {
            sink.send(token(42));
            sink.finish(Event::Finished(Finish {
                reason: FinishReason::Length,
                prompt_tokens: 2,
                completion_tokens: 1,
                cached_tokens: 0,
            }));
        }
        let text = read(&mut events).concat();
        assert_eq!(text.matches("\"finish_reason\":\"length\"").count(), 2);
        assert!(text.contains("\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":2"), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n") && text.matches("[DONE]").count() == 1);
        assert!(events.is_over());
        assert_eq!(metrics.counted(Outcome::Length), 1);
    }

    #[tokio::test]
    async fn a_failure_is_one_event_and_the_end() {
        let (mut events, mut sinks, metrics) = stream(1);
        read(&mut events);
        for id in [42, 43, 44] {
            sinks[0].send(token(id));
        }
        drop(sinks.remove(0));
        let text = read(&mut events).concat();
        let last = text.trim_end().rsplit("data: ").next().unwrap();
        let value: serde_json::Value = serde_json::from_str(last).unwrap();
        assert_eq!(value["error"]["type"], "server_error");
        assert!(!text.contains("\"finish_reason\":\"") && !text.contains("[DONE]"));
        assert!(events.is_over());
        assert_eq!(metrics.counted(Outcome::Error), 1);
    }

    #[tokio::test]
    async fn a_quiet_stream_says_that_it_lives() {
        let (mut events, _sinks, _) = stream(1);
        let before = Instant::now();
        read(&mut events);
        assert!(events.keep_alive.deadline() >= before + KEEP_ALIVE, "not before it has been quiet for that long");
        // As if that time had passed.
        let due = Instant::now();
        events.keep_alive.as_mut().reset(due);
        let next = std::future::poll_fn(|cx| events.poll_bytes(cx)).await.unwrap();
        assert_eq!(&next[..], b": keep-alive\n\n");
        assert!(events.keep_alive.deadline() >= due + KEEP_ALIVE, "and then again");
    }

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
