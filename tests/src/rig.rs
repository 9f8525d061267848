//! The rig: the real engine on a model, driven as the server drives it, heard without text or HTTP.

use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_runtime::config::{Config, Machine, Settings};
use slotgraph_runtime::engine::{self, EngineHandle};
use slotgraph_runtime::request::{Choice, Event, Finish, Group, Token};
use slotgraph_runtime::sink::{TokenStream, token_channel};
use slotgraph_runtime::trace::NoObserver;
use std::sync::Arc;
use std::time::Instant;

/// A running engine.
pub struct Rig {
    pub handle: EngineHandle,
    pub config: Config,
    asked: std::cell::Cell<u64>,
}

/// One choice to ask for.
#[derive(Clone, Debug)]
pub struct Ask {
    pub prompt: Vec<u32>,
    pub sampling: SamplingSpec,
    /// Score the prompt with this many alternatives.
    pub score_prompt: Option<u32>,
}

impl Ask {
    /// Greedy, EOS not honoured, five alternatives.
    pub fn greedy(prompt: &[u32], tokens: usize) -> Ask {
        let sampling =
            SamplingSpec { ignore_eos: true, logprobs: Some(5), ..SamplingSpec::greedy(tokens.try_into().unwrap()) };
        Ask { prompt: prompt.to_vec(), sampling, score_prompt: None }
    }

    /// Logprobs of every token of `text` but the first.
    pub fn score(text: &[u32]) -> Ask {
        Ask { score_prompt: Some(5), ..Ask::greedy(text, 1) }
    }
}

/// What a choice said until its end.
#[derive(Clone, Debug, Default)]
pub struct Said {
    pub tokens: Vec<Token>,
    /// Scored prompt tokens, from prompt position 1 on.
    pub prompt: Vec<Token>,
    pub finish: Option<Finish>,
}

/// A token with its numbers as bits: equal only if nothing differs.
pub type Bits = (u32, u32, u32, Vec<(u32, u32)>);

/// The bits of what was said.
pub fn bits(tokens: &[Token]) -> Vec<Bits> {
    let top = |token: &Token| token.top.iter().map(|&(id, logprob)| (id, logprob.to_bits())).collect();
    tokens.iter().map(|token| (token.id, token.logprob.to_bits(), token.rank, top(token))).collect()
}

impl Said {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }
    pub fn bits(&self) -> Vec<Bits> {
        bits(&self.tokens)
    }
}

/// A choice that was asked for and is being heard.
pub struct Pending(TokenStream);

impl Pending {
    /// Hears a choice to its end; a rejection or an error is the test's failure.
    pub fn hear(mut self) -> Said {
        let mut said = Said::default();
        while let Some(event) = self.0.next_blocking() {
            match event {
                Event::Scheduled => {}
                Event::Prompt(tokens) => said.prompt.extend(tokens),
                Event::Token(token) => said.tokens.push(token),
                Event::Finished(finish) => said.finish = Some(finish),
                Event::Rejected(reason) | Event::Error(reason) => panic!("the choice ended with: {reason}"),
            }
        }
        assert!(said.finish.is_some(), "the stream ended without a terminal event");
        said
    }

    /// Hears `tokens` tokens and leaves.
    pub fn leave_after(mut self, tokens: usize) {
        let mut heard = 0;
        while heard < tokens {
            match self.0.next_blocking() {
                Some(Event::Token(_)) => heard += 1,
                Some(event) if event.is_terminal() => return,
                Some(_) => {}
                None => return,
            }
        }
    }
}

impl Rig {
    /// Starts the engine on the CPU device, with what `change` makes of the defaults.
    pub fn start(checkpoint: &Checkpoint, change: impl FnOnce(&mut Settings)) -> Rig {
        let mut settings = Settings { device: Some("cpu".into()), ..Settings::default() };
        change(&mut settings);
        let machine = Machine { gpus: 0, processors: std::thread::available_parallelism().map_or(1, |n| n.get()) };
        let config = Config::resolve(&settings, &checkpoint.spec, &checkpoint.name, machine)
            .unwrap_or_else(|e| panic!("{settings:?}: {e}"));
        let handle = engine::start(&config, checkpoint, Arc::new(NoObserver)).unwrap_or_else(|e| panic!("{e}"));
        Rig { handle, config, asked: std::cell::Cell::new(0) }
    }

    /// Hands one choice to the engine.
    pub fn submit(&self, ask: &Ask) -> Pending {
        let number = self.asked.replace(self.asked.get() + 1);
        let (sink, stream) = token_channel(ask.sampling.max_tokens as usize + ask.prompt.len() + 8);
        let choice = Choice {
            index: 0,
            sample: 0,
            prompt: ask.prompt.as_slice().into(),
            sampling: Arc::new(ask.sampling.clone()),
            score_prompt: ask.score_prompt,
            sink,
        };
        let id = format!("ask-{number}").as_str().into();
        let group = Group { id, choices: vec![choice], received: Instant::now(), deadline: None };
        self.handle.submit(group).unwrap_or_else(|e| panic!("{e}"));
        Pending(stream)
    }

    /// All at once.
    pub fn together(&self, asks: &[Ask]) -> Vec<Said> {
        let pending: Vec<Pending> = asks.iter().map(|ask| self.submit(ask)).collect();
        pending.into_iter().map(Pending::hear).collect()
    }

    /// One after the other.
    pub fn one_by_one(&self, asks: &[Ask]) -> Vec<Said> {
        asks.iter().map(|ask| self.submit(ask).hear()).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.handle.shutdown();
        let end = self.handle.join();
        if !std::thread::panicking() {
            end.unwrap_or_else(|e| panic!("the engine died: {e}"));
        }
    }
}
