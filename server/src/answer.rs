//! What the engine says about a request's choices, turned into text as it comes.
//!
//! `open` makes the group for the engine and the `Answer` that listens to it; `respond` writes its parts out. Dropping an answer that has
//! not ended ends its choices, with the cause that the connection knows. **Invariant:** for each choice: parts in order, then one part with
//! a finish reason; or the whole answer fails with one error.

use crate::detokenize::Detokenizer;
use crate::error::ApiError;
use crate::prompt::Prompted;
use crate::stop::{Matched, StopMatcher};
use crate::tokenizer::Tokenizer;
use crate::wire::Wire;
use hyper::StatusCode;
use slotgraph_runtime::request::{AbortCause, Choice, Event, Finish, FinishReason, Group, RequestId, Token};
use slotgraph_runtime::sink::{Abort, Backlog, TokenStream};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Events a choice may be behind its client before it counts as a slow reader.
const UNDELIVERED_MAX: usize = 768;
/// Bytes of events that all choices of a request may be behind together: one choice with 20 alternatives a token never is before the count
/// above is reached (160 KiB), many are, and so is a scored prompt of some 50,000 tokens, which comes in events of a prefill chunk.
const BACKLOG_MAX: usize = 4 << 20;
/// Events that become text at a time, or one of each choice: what waits for a connection that is not read waits as events, a tenth of their
/// JSON and counted.
const HEARD_AT_ONCE: usize = 64;

/// A token and what is said about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    pub id: u32,
    /// None for the first token of a prompt.
    pub logprob: Option<f32>,
    pub top: Vec<(u32, f32)>,
    /// Characters of the choice's text in front of it.
    pub offset: usize,
    /// Not in the text: EOS and other special tokens.
    pub hidden: bool,
}

/// News about one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Part {
    pub index: u32,
    pub text: String,
    /// Tokens this part tells about; not filled in unless log-probabilities or ids were asked for.
    pub tokens: Vec<Told>,
    pub finish: Option<Finished>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    Stop,
    Length,
}

impl Finished {
    pub fn name(self) -> &'static str {
        match self {
            Finished::Stop => "stop",
            Finished::Length => "length",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: u64,
}

/// A request that the engine is working on.
pub struct Answer {
    tokenizer: Arc<Tokenizer>,
    wire: Arc<Wire>,
    choices: Vec<Listener>,
    usage: Usage,
}

/// One choice's side of the answer.
struct Listener {
    index: u32,
    stream: TokenStream,
    text: Growing,
    prompt: Arc<[u32]>,
    /// Characters in front of each prompt token, while scored prompt tokens are due.
    scores: Option<PromptScores>,
    /// Parts are told about tokens.
    telling: bool,
    finished: Option<Finished>,
    /// Said before any event: the echoed prompt.
    opening: Option<Part>,
}

/// Detokenizer and stop matcher of a growing text.
struct Growing {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    min_tokens: u32,
    generated: u32,
    /// Characters detokenized so far, the echoed prompt included.
    chars: usize,
    skip_special: bool,
}

struct PromptScores {
    offsets: Vec<usize>,
    /// Prompt tokens told so far.
    told: usize,
}

/// Makes the engine's group and the answer that listens to it.
pub fn open(
    prompted: Prompted,
    tokenizer: Arc<Tokenizer>,
    wire: Arc<Wire>,
    id: RequestId,
    timeout: Option<Duration>,
) -> (Group, Answer) {
    let received = Instant::now();
    let Prompted { request, prompts } = prompted;
    let mut choices = Vec::new();
    let mut listeners = Vec::new();
    let mut usage = Usage::default();
    let backlog = Backlog::new(BACKLOG_MAX);
    for prompt in prompts {
        usage.prompt_tokens += prompt.ids.len() as u64;
        let mut sampling = request.sampling.clone();
        sampling.max_tokens = prompt.max_tokens;
        sampling.min_tokens = sampling.min_tokens.min(prompt.max_tokens);
        if !request.seeded {
            sampling.seed = random();
        }
        let sampling = Arc::new(sampling);
        let scored = request.echo && sampling.logprobs.is_some();
        let telling = sampling.logprobs.is_some() || request.return_token_ids;
        for sample in 0..request.n {
            let index = choices.len() as u32;
            let (sink, stream) = backlog.channel(UNDELIVERED_MAX);
            choices.push(Choice {
                index,
                sample,
                prompt: prompt.ids.clone(),
                sampling: sampling.clone(),
                score_prompt: sampling.logprobs.filter(|_| scored),
                sink,
            });
            let skip = request.skip_special_tokens;
            let mut listener = Listener {
                index,
                stream,
                text: Growing {
                    detokenizer: Detokenizer::new(&tokenizer, skip),
                    matcher: StopMatcher::new(request.stop.clone(), request.include_stop),
                    min_tokens: sampling.min_tokens,
                    generated: 0,
                    chars: if request.echo { prompt.text.chars().count() } else { 0 },
                    skip_special: skip,
                },
                prompt: prompt.ids.clone(),
                scores: None,
                telling,
                finished: None,
                opening: None,
            };
            if request.echo {
                listener.echo(&tokenizer, &prompt.text, scored);
            }
            listeners.push(listener);
        }
    }
    let group = Group { id, choices, received, deadline: timeout.map(|timeout| received + timeout) };
    (group, Answer { tokenizer, wire, choices: listeners, usage })
}

/// A seed, or the number in a request id.
pub fn random() -> u64 {
    getrandom::u64().expect("the system gives random numbers")
}

impl Answer {
    /// News since the last call, or some of them. Ready(false): all choices have ended and all was said. An error ends the whole answer.
    pub fn poll_parts(&mut self, cx: &mut Context<'_>, parts: &mut Vec<Part>) -> Poll<Result<bool, ApiError>> {
        let before = parts.len();
        let share = (HEARD_AT_ONCE / self.choices.len().max(1)).max(1);
        loop {
            // Choices that have not ended, and of them those that will wake us.
            let (mut open, mut pending) = (0, 0);
            for choice in &mut self.choices {
                parts.extend(choice.opening.take());
                for _ in 0..share {
                    if choice.finished.is_some() {
                        break;
                    }
                    let Poll::Ready(event) = choice.stream.poll_next(cx) else {
                        pending += 1;
                        break;
                    };
                    match event {
                        Some(event) => choice.hear(event, &self.tokenizer, &mut self.usage, parts)?,
                        None => {
                            return Poll::Ready(Err(ApiError::engine("the engine stopped before the answer ended")));
                        }
                    }
                }
                open += usize::from(choice.finished.is_none());
            }
            if parts.len() > before || open == 0 {
                return Poll::Ready(Ok(open > 0));
            }
            if open == pending {
                return Poll::Pending;
            }
        }
    }
    /// Tokens in and out so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }
    /// Ids of the prompt of choice `index`.
    pub fn prompt_ids(&self, index: u32) -> &[u32] {
        &self.choices[index as usize].prompt
    }
    pub fn choices(&self) -> u32 {
        self.choices.len() as u32
    }
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }
    /// The finish reason of the request as a whole: stop, if every choice stopped by itself.
    pub fn finished(&self) -> Option<Finished> {
        let all: Option<Vec<Finished>> = self.choices.iter().map(|choice| choice.finished).collect();
        Some(if all?.contains(&Finished::Length) { Finished::Length } else { Finished::Stop })
    }
    /// The abort words of all choices.
    pub fn aborts(&self) -> Vec<Abort> {
        self.choices.iter().map(|choice| choice.stream.abort().clone()).collect()
    }
    /// How the client's side of the answer ended if it is dropped now.
    pub fn cause(&self) -> AbortCause {
        self.wire.cause()
    }
    pub fn wire(&self) -> &Wire {
        &self.wire
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let cause = self.cause();
        for choice in self.choices.iter().filter(|choice| choice.finished.is_none()) {
            choice.stream.abort().set(cause);
        }
    }
}

impl Listener {
    /// Repeats the prompt; with `scored`, log-probabilities of its tokens follow as the engine sends them.
    fn echo(&mut self, tokenizer: &Tokenizer, text: &str, scored: bool) {
        let mut part = Part { index: self.index, text: text.to_owned(), ..Part::default() };
        if scored {
            let mut detokenizer = Detokenizer::new(tokenizer, self.text.skip_special);
            let (mut decoded, mut chars) = (String::new(), 0);
            let mut offsets = Vec::with_capacity(self.prompt.len());
            for id in self.prompt.iter() {
                offsets.push(chars);
                detokenizer.push(tokenizer, *id, &mut decoded);
                chars += decoded.chars().count();
                decoded.clear();
            }
            let first = self.prompt[0];
            part.tokens.push(Told {
                id: first,
                logprob: None,
                top: Vec::new(),
                offset: 0,
                hidden: self.text.hides(tokenizer, first),
            });
            self.scores = Some(PromptScores { offsets, told: 1 });
        }
        self.opening = Some(part);
    }

    fn hear(
        &mut self,
        event: Event,
        tokenizer: &Tokenizer,
        usage: &mut Usage,
        parts: &mut Vec<Part>,
    ) -> Result<(), ApiError> {
        let mut part = Part { index: self.index, ..Part::default() };
        match event {
            Event::Scheduled => return Ok(()),
            Event::Prompt(tokens) => {
                let Some(scores) = &mut self.scores else { return Ok(()) };
                for token in tokens {
                    let offset = scores.offsets.get(scores.told).copied().unwrap_or_default();
                    scores.told += 1;
                    part.tokens.push(self.text.told(tokenizer, token, offset));
                }
            }
            Event::Token(token) => {
                usage.completion_tokens += 1;
                let matched = self.text.push(tokenizer, token, self.telling, &mut part);
                if matched == Matched::Yes {
                    self.stream.abort().stop_string(self.text.generated);
                    self.finished = Some(Finished::Stop);
                }
            }
            Event::Finished(finish) => self.finish(finish, tokenizer, usage, &mut part)?,
            Event::Rejected(reason) => return Err(ApiError::body(reason)),
            Event::Error(reason) => return Err(ApiError::engine(reason)),
        }
        if !part.text.is_empty() || !part.tokens.is_empty() {
            parts.push(part);
        }
        if self.finished.is_some() {
            parts.push(Part { index: self.index, finish: self.finished, ..Part::default() });
        }
        Ok(())
    }

    fn finish(
        &mut self,
        finish: Finish,
        tokenizer: &Tokenizer,
        usage: &mut Usage,
        part: &mut Part,
    ) -> Result<(), ApiError> {
        let finished = match finish.reason {
            FinishReason::Stop => Finished::Stop,
            FinishReason::Length => Finished::Length,
            FinishReason::Aborted(cause) => return Err(aborted(cause)),
        };
        usage.cached_tokens += u64::from(finish.cached_tokens);
        let mut tail = String::new();
        self.text.detokenizer.finish(tokenizer, &mut tail);
        let armed = self.text.generated >= self.text.min_tokens;
        let matched = self.text.matcher.push(&tail, armed, &mut part.text);
        if matched == Matched::No {
            self.text.matcher.finish(&mut part.text);
        }
        self.finished = Some(if matched == Matched::Yes { Finished::Stop } else { finished });
        Ok(())
    }
}

impl Growing {
    /// Takes one generated token; its visible consequences go into `part`.
    fn push(&mut self, tokenizer: &Tokenizer, token: Token, telling: bool, part: &mut Part) -> Matched {
        self.generated += 1;
        let mut fresh = String::new();
        self.detokenizer.push(tokenizer, token.id, &mut fresh);
        if telling {
            part.tokens.push(self.told(tokenizer, token, self.chars));
        }
        self.chars += fresh.chars().count();
        self.matcher.push(&fresh, self.generated >= self.min_tokens, &mut part.text)
    }
    fn told(&self, tokenizer: &Tokenizer, token: Token, offset: usize) -> Told {
        let hidden = self.hides(tokenizer, token.id);
        Told { id: token.id, logprob: Some(token.logprob), top: token.top, offset, hidden }
    }
    fn hides(&self, tokenizer: &Tokenizer, id: u32) -> bool {
        self.skip_special && tokenizer.is_special(id)
    }
}

/// What the client hears when its request was ended from outside.
pub fn aborted(cause: AbortCause) -> ApiError {
    match cause {
        AbortCause::Expired => {
            let mut error =
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, crate::error::SERVER, "the request ran out of time");
            error.code = Some("request_timeout");
            error
        }
        AbortCause::Drain => ApiError::unavailable("the server is shutting down", Some(1)),
        AbortCause::SlowReader => {
            ApiError::new(status(499), crate::error::INVALID, "the client reads too slowly").closing()
        }
        AbortCause::Cancelled | AbortCause::Disconnected | AbortCause::StopString => {
            let mut error = ApiError::new(status(499), crate::error::INVALID, "the request was cancelled");
            error.code = Some("request_cancelled");
            error
        }
    }
}

fn status(code: u16) -> StatusCode {
    StatusCode::from_u16(code).expect("a three-digit status")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{self, ApiRequest};
    use crate::prompt::Reader;
    use crate::request::{self, Limits};
    use slotgraph_runtime::sink::TokenSink;

    /// A request's answer, and the engine's ends of its choices.
    fn answer(body: &str) -> (Answer, Vec<TokenSink>) {
        let tokenizer = include_bytes!("../../tests/models/shakespeare-dsv2/tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::parse(tokenizer).unwrap());
        let limits = Limits {
            served: vec!["m".into()],
            vocab: 2048,
            context: 200,
            choices_max: 64,
            defaults: Default::default(),
        };
        let fields = ApiRequest::parse(body.as_bytes(), &[api::COMPLETION, api::SAMPLING]).unwrap();
        let valid = request::completion(&fields, &limits).unwrap();
        let prompted = Reader { tokenizer: &tokenizer, template: None, limits: &limits }.read(valid).unwrap();
        let (group, answer) = open(prompted, tokenizer, Arc::default(), "r".into(), None);
        (answer, group.choices.into_iter().map(|choice| choice.sink).collect())
    }
    fn token(id: u32) -> Event {
        Event::Token(Token { id, logprob: -1.0, rank: 1, top: vec![] })
    }
    fn end(sink: TokenSink, reason: FinishReason, tokens: u32) {
        sink.finish(Event::Finished(Finish { reason, prompt_tokens: 1, completion_tokens: tokens, cached_tokens: 0 }));
    }
    /// Everything said so far, and whether more may come.
    fn heard(answer: &mut Answer) -> (Vec<Part>, Result<bool, ApiError>) {
        let mut parts = Vec::new();
        let mut cx = Context::from_waker(std::task::Waker::noop());
        loop {
            match answer.poll_parts(&mut cx, &mut parts) {
                Poll::Pending => return (parts, Ok(true)),
                Poll::Ready(Ok(true)) => {}
                Poll::Ready(done) => return (parts, done),
            }
        }
    }
    fn text(parts: &[Part]) -> String {
        parts.iter().map(|part| part.text.as_str()).collect()
    }
    fn ids(text: &str) -> Vec<u32> {
        let tokenizer = include_bytes!("../../tests/models/shakespeare-dsv2/tokenizer.json");
        Tokenizer::parse(tokenizer).unwrap().encode(text, false).unwrap()
    }

    /// Sends tokens to every choice in turn until one is refused; how many were taken, and by which choice's sink not.
    fn sent_until_cut(sinks: &[TokenSink], alternatives: usize) -> (usize, usize) {
        let event = || Event::Token(Token { id: 42, logprob: -1.0, rank: 1, top: vec![(42, -1.0); alternatives] });
        (0..).map(|sent| (sent, sent % sinks.len())).find(|(_, at)| !sinks[*at].send(event())).unwrap()
    }

    #[test]
    fn what_a_slow_reader_holds_is_bounded() {
        // A choice alone by its count, which with 20 alternatives a token and the connection's buffer is below 256 KiB.
        let (_answer, sinks) = answer(r#"{"model":"m","prompt":"x","logprobs":5}"#);
        assert_eq!(sent_until_cut(&sinks, 20), (UNDELIVERED_MAX, 0));
        let wide = size_of::<Event>() + 20 * size_of::<(u32, f32)>();
        assert!((UNDELIVERED_MAX + 1) * wide + crate::listen::BUFFER <= 256 << 10);
        // Many by the bytes of all.
        let (mut slow, sinks) = answer(r#"{"model":"m","prompt":"x","logprobs":5,"n":64}"#);
        let (mut neighbour, beside) = answer(r#"{"model":"m","prompt":"x"}"#);
        let (sent, cut) = sent_until_cut(&sinks, 20);
        assert_eq!(sent, BACKLOG_MAX / wide);
        assert!(sent < 64 * UNDELIVERED_MAX / 2);
        assert_eq!(sinks[cut].abort().cause(), Some(AbortCause::SlowReader));
        // Another request is not behind.
        assert!(beside[0].send(token(42)));
        assert_eq!(heard(&mut neighbour).0[0].tokens, []);
        // Little of it becomes text at a time, from every choice; what was heard makes room again.
        let (mut parts, mut cx) = (Vec::new(), Context::from_waker(std::task::Waker::noop()));
        assert_eq!(slow.poll_parts(&mut cx, &mut parts), Poll::Ready(Ok(true)));
        let told: Vec<u32> = parts.iter().map(|part| part.index).collect();
        assert_eq!(told, (0..64).collect::<Vec<_>>());
        assert!(sinks[(cut + 1) % 64].send(token(42)));
    }

    #[test]
    fn events_that_say_nothing_do_not_hide_those_behind_them() {
        let (mut answer, mut sinks) = answer(r#"{"model":"m","prompt":"x","stop":"hhhhh"}"#);
        // All of these are held, as they may be a stop string; more than are heard at once.
        for _ in 0..4 {
            sinks[0].send(token(ids("h")[0]));
        }
        (0..2 * HEARD_AT_ONCE).for_each(|_| assert!(sinks[0].send(Event::Scheduled)));
        end(sinks.remove(0), FinishReason::Length, 4);
        let (parts, done) = heard(&mut answer);
        assert_eq!((text(&parts).as_str(), done), ("hhhh", Ok(false)));
    }

    #[test]
    fn a_stop_string_across_tokens_ends_the_choice_and_tells_the_engine() {
        let (mut answer, mut sinks) = answer(r#"{"model":"m","prompt":"x","stop":"o w"}"#);
        for id in ids("hello world") {
            assert!(sinks[0].send(token(id)));
        }
        let (parts, done) = heard(&mut answer);
        assert_eq!((text(&parts).as_str(), done), ("hell", Ok(false)));
        assert_eq!(parts.last().unwrap().finish, Some(Finished::Stop));
        assert_eq!(sinks[0].abort().cause(), Some(AbortCause::StopString));
        assert!(answer.usage().completion_tokens <= ids("hello world").len() as u64);
        // Late tokens and the engine's own word change nothing.
        let sink = sinks.remove(0);
        sink.send(token(5));
        end(sink, FinishReason::Stop, 9);
        assert_eq!(heard(&mut answer), (vec![], Ok(false)));
    }

    #[test]
    fn held_text_and_cut_characters_come_with_the_end() {
        let (mut answer, mut sinks) = answer(r#"{"model":"m","prompt":"x","stop":"lot"}"#);
        let mut all = ids("hel");
        all.extend(ids("lo"));
        all.push(ids("é")[0]);
        for id in &all {
            sinks[0].send(token(*id));
        }
        assert_eq!(text(&heard(&mut answer).0), "hel");
        end(sinks.remove(0), FinishReason::Length, all.len() as u32);
        let (parts, done) = heard(&mut answer);
        assert_eq!((text(&parts).as_str(), done), ("lo\u{fffd}", Ok(false)));
        assert_eq!(answer.finished(), Some(Finished::Length));
    }

    #[test]
    fn stop_strings_wait_for_min_tokens() {
        let (mut answer, mut sinks) = answer(r#"{"model":"m","prompt":"x","stop":"a","min_tokens":3,"max_tokens":9}"#);
        for id in [ids("a")[0], ids("b")[0], ids("c")[0], ids("a")[0]] {
            sinks[0].send(token(id));
        }
        let (parts, done) = heard(&mut answer);
        assert_eq!((text(&parts).as_str(), done), ("abc", Ok(false)));
        assert_eq!(answer.usage().completion_tokens, 4);
        drop(sinks.remove(0));
    }

    #[test]
    fn an_error_of_one_choice_ends_the_answer() {
        let (mut answer, mut sinks) = answer(r#"{"model":"m","prompt":"x","n":2}"#);
        sinks[1].send(token(42));
        sinks.remove(0).finish(Event::Error("a NaN row".into()));
        let (_, done) = heard(&mut answer);
        assert_eq!(done.unwrap_err().status.as_u16(), 500);
        drop(answer);
        assert_eq!(sinks[0].abort().cause(), Some(AbortCause::Disconnected));
    }

    #[test]
    fn dropping_an_answer_says_why() {
        let (mut left, sinks) = answer(r#"{"model":"m","prompt":"x"}"#);
        sinks[0].send(token(42));
        assert!(heard(&mut left).1.is_ok());
        left.wire().queue_text();
        left.wire().flushed();
        drop(left);
        assert_eq!(sinks[0].abort().cause(), Some(AbortCause::Cancelled));
    }

    #[test]
    fn echoed_prompts_are_scored_from_their_second_token_on() {
        let (mut answer, mut sinks) =
            answer(r#"{"model":"m","prompt":"Hello","echo":true,"logprobs":1,"max_tokens":0}"#);
        let told = |id| Token { id, logprob: -0.5, rank: 1, top: vec![(id, -0.5)] };
        sinks[0].send(Event::Scheduled);
        sinks[0].send(Event::Prompt(vec![told(42), told(422)]));
        sinks[0].send(Event::Prompt(vec![told(81)]));
        end(sinks.remove(0), FinishReason::Length, 0);
        let (parts, done) = heard(&mut answer);
        assert_eq!((text(&parts).as_str(), done), ("Hello", Ok(false)));
        let tokens: Vec<&Told> = parts.iter().flat_map(|part| &part.tokens).collect();
        assert_eq!(tokens.iter().map(|token| token.id).collect::<Vec<_>>(), [0, 42, 422, 81]);
        assert_eq!(tokens.iter().map(|token| token.offset).collect::<Vec<_>>(), [0, 0, 1, 4]);
        assert_eq!((tokens[0].logprob, tokens[1].logprob), (None, Some(-0.5)));
        assert!(tokens[0].hidden && !tokens[1].hidden);
    }

    #[test]
    fn unseeded_prompts_draw_their_own_seeds() {
        let seeds = |body: &str| {
            let tokenizer = include_bytes!("../../tests/models/shakespeare-dsv2/tokenizer.json");
            let tokenizer = Arc::new(Tokenizer::parse(tokenizer).unwrap());
            let limits = Limits {
                served: vec!["m".into()],
                vocab: 2048,
                context: 200,
                choices_max: 64,
                defaults: Default::default(),
            };
            let fields = ApiRequest::parse(body.as_bytes(), &[api::COMPLETION, api::SAMPLING]).unwrap();
            let valid = request::completion(&fields, &limits).unwrap();
            let prompted = Reader { tokenizer: &tokenizer, template: None, limits: &limits }.read(valid).unwrap();
            let (group, _) = open(prompted, tokenizer, Arc::default(), "r".into(), None);
            group.choices.iter().map(|choice| choice.sampling.seed).collect::<Vec<_>>()
        };
        let drawn = seeds(r#"{"model":"m","prompt":["x","x"],"n":2}"#);
        assert!(drawn[0] == drawn[1] && drawn[2] == drawn[3] && drawn[0] != drawn[2]);
        assert_eq!(seeds(r#"{"model":"m","prompt":["x","x"],"seed":7}"#), [7, 7]);
    }
}
