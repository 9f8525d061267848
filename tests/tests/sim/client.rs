//! A client: one choice as its listener sees it, and the judge of the events that it hears.

use super::script::{Ending, answer};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_runtime::request::{AbortCause, Event, Finish, FinishReason};
use slotgraph_runtime::sink::{Abort, TokenStream};
use slotgraph_runtime::trace::{TraceRecord, sha256_of_ids};
use std::sync::Arc;

pub struct Client {
    pub arrival: u64,
    pub group: u64,
    pub index: u32,
    pub prompt: Arc<[u32]>,
    pub sampling: Arc<SamplingSpec>,
    pub score: bool,
    /// None once the client has left.
    pub stream: Option<TokenStream>,
    pub abort: Abort,
    /// Reads what it is sent.
    pub attentive: bool,
    pub answer: Vec<u32>,
    pub ending: Ending,
    pub scheduled: bool,
    pub scores: usize,
    pub tokens: Vec<u32>,
    pub terminal: Option<Event>,
    pub trace: Option<TraceRecord>,
}

impl Client {
    pub fn new(
        (arrival, group, index, sample): (u64, u64, u32, u32),
        prompt: Arc<[u32]>,
        sampling: Arc<SamplingSpec>,
        score: bool,
        stream: TokenStream,
        attentive: bool,
        context_max: usize,
    ) -> Self {
        let (answer, ending) = answer(&prompt, &sampling, sample, context_max);
        Client {
            arrival,
            group,
            index,
            prompt,
            sampling,
            score,
            abort: stream.abort().clone(),
            stream: Some(stream),
            attentive,
            answer,
            ending,
            scheduled: false,
            scores: 0,
            tokens: Vec::new(),
            terminal: None,
            trace: None,
        }
    }

    pub fn is_live(&self) -> bool {
        self.trace.is_none()
    }

    /// Reads what is there, and judges it.
    pub fn pump(&mut self, dead: bool) -> Result<(), String> {
        while self.read_one(dead)? {}
        Ok(())
    }

    /// Reads one event, and judges it; whether one was there.
    pub fn read_one(&mut self, dead: bool) -> Result<bool, String> {
        let Some(event) = self.stream.as_mut().and_then(TokenStream::try_next) else { return Ok(false) };
        self.hear(event, dead).map_err(|wrong| format!("choice {}: {wrong}", self.arrival))?;
        Ok(true)
    }

    fn hear(&mut self, event: Event, dead: bool) -> Result<(), String> {
        if let Some(terminal) = &self.terminal {
            return Err(format!("{event:?} after {terminal:?}"));
        }
        match &event {
            Event::Scheduled if !self.scheduled => self.scheduled = true,
            Event::Rejected(_) if !self.scheduled => {}
            Event::Error(_) | Event::Finished(Finish { reason: FinishReason::Aborted(_), .. }) => {}
            _ if !self.scheduled => return Err(format!("{event:?} before it was scheduled")),
            Event::Scheduled => return Err("scheduled twice".into()),
            Event::Prompt(scores) => {
                for score in scores {
                    self.scores += 1;
                    if !self.score || self.prompt.get(self.scores) != Some(&score.id) || !self.tokens.is_empty() {
                        return Err(format!("score {} is of token {}", self.scores, score.id));
                    }
                }
            }
            Event::Token(token) => {
                if self.answer.get(self.tokens.len()) != Some(&token.id) {
                    return Err(format!("token {} is {}, not {:?}", self.tokens.len(), token.id, self.answer));
                }
                if token.top.len() != self.sampling.logprobs.unwrap_or(0) as usize {
                    return Err(format!("{} alternatives for {:?}", token.top.len(), self.sampling.logprobs));
                }
                self.tokens.push(token.id);
            }
            Event::Finished(_) | Event::Rejected(_) => {}
        }
        if event.is_terminal() {
            self.judge_end(&event, dead)?;
            self.terminal = Some(event);
        }
        Ok(())
    }

    fn judge_end(&self, event: &Event, dead: bool) -> Result<(), String> {
        let heard = self.tokens.len();
        match event {
            Event::Finished(Finish {
                reason: FinishReason::Aborted(cause), completion_tokens, prompt_tokens, ..
            }) => {
                if self.abort.cause() != Some(*cause) {
                    return Err(format!("ended by {cause:?} with abort word {:?}", self.abort.cause()));
                }
                let all = *completion_tokens as usize == heard || *cause == AbortCause::StopString;
                if !all || *completion_tokens as usize > heard || *prompt_tokens as usize != self.prompt.len() {
                    return Err(format!("{event:?} after {heard} tokens"));
                }
            }
            Event::Finished(finish) => {
                let scores = if self.score { self.prompt.len() - 1 } else { 0 };
                let whole = heard == self.answer.len() && finish.completion_tokens as usize == heard;
                if Ending::Finished(finish.reason) != self.ending || !whole || self.scores != scores {
                    let (wanted, ending) = (self.answer.len(), self.ending);
                    return Err(format!(
                        "{event:?} after {heard} of {wanted} tokens, {} scores; {ending:?}",
                        self.scores
                    ));
                }
            }
            Event::Error(_) if dead => {}
            Event::Error(reason) => {
                if self.ending != Ending::Nan || heard != self.answer.len() || !reason.contains("not a number") {
                    return Err(format!("{event:?} after {heard} tokens, expected {:?}", self.ending));
                }
            }
            other => return Err(format!("{other:?}")),
        }
        Ok(())
    }

    /// Judges the trace record of this choice.
    pub fn judge_trace(&mut self, record: TraceRecord, dead: bool) -> Result<(), String> {
        let wrong = |what: &str| Err(format!("choice {}: its trace has the wrong {what}: {record:?}", self.arrival));
        if self.trace.is_some() {
            return wrong("number of lines: a second one");
        }
        let kept = record.completion_tokens as usize;
        if kept > self.answer.len() || record.token_sha256 != sha256_of_ids(&self.answer[..kept]) {
            return wrong("tokens");
        }
        if record.prompt_sha256 != sha256_of_ids(&self.prompt) || record.seed != self.sampling.seed {
            return wrong("prompt or seed");
        }
        let complete = kept == self.answer.len();
        let fits = match record.terminal_reason {
            "completed_stop" if record.cause.is_none() => {
                complete && self.ending == Ending::Finished(FinishReason::Stop)
            }
            "completed_length" => complete && self.ending == Ending::Finished(FinishReason::Length),
            "error" => dead || (complete && self.ending == Ending::Nan),
            _ => record.abort.is_some() && record.abort == self.abort.cause(),
        };
        if !fits {
            return wrong("terminal reason");
        }
        self.trace = Some(record);
        Ok(())
    }
}
