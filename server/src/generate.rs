//! `slotgraph generate`: one prompt, greedy, without a server; the answer as text or as one JSON line.
//!
//! **Invariant:** it runs the same engine as `serve`, so its tokens are the ones that a server would give.

use crate::cli::{Generate, LogFormat};
use crate::load::{self, LoadError};
use crate::logging;
use serde::Serialize;
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_runtime::engine;
use slotgraph_runtime::request::{Choice, Event, FinishReason, Group, Token};
use slotgraph_runtime::sink::token_channel;
use slotgraph_runtime::startup::Phases;
use slotgraph_runtime::trace::NoObserver;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// Runs the command.
pub fn run(arguments: &Generate) -> ExitCode {
    match answer(arguments) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err((code, message)) => {
            eprintln!("slotgraph: {message}");
            ExitCode::from(code)
        }
    }
}

fn answer(arguments: &Generate) -> Result<String, (u8, String)> {
    let usage = |message: String| (2, message);
    let load = |error: LoadError| (error.exit_code(), error.to_string());
    logging::start(LogFormat::Text).map_err(usage)?;
    let (checkpoint, config) =
        load::open(arguments.model.as_ref(), &arguments.settings(), &mut Phases::default()).map_err(load)?;
    let tokenizer = load::texts(&checkpoint).map_err(load)?.tokenizer;
    let prompt_ids = match (&arguments.prompt_ids, &arguments.prompt) {
        (Some(ids), _) => ids.clone(),
        (None, text) => {
            tokenizer.encode(text.as_deref().unwrap_or_default(), true).map_err(|error| usage(error.to_string()))?
        }
    };
    check(&prompt_ids, arguments.max_tokens, config.max_model_len, checkpoint.spec.vocab).map_err(usage)?;
    let engine =
        engine::start(&config, &checkpoint, Arc::new(NoObserver)).map_err(|error| load(LoadError::Start(error)))?;
    let mut sampling = SamplingSpec::greedy(arguments.max_tokens);
    sampling.ignore_eos = arguments.ignore_eos;
    sampling.logprobs = arguments.logprobs;
    let (sink, mut stream) = token_channel(arguments.max_tokens as usize + 2);
    let choice = Choice {
        index: 0,
        sample: 0,
        prompt: prompt_ids.clone().into(),
        sampling: Arc::new(sampling),
        score_prompt: None,
        sink,
    };
    let group = Group { id: "generate".into(), choices: vec![choice], received: Instant::now(), deadline: None };
    engine.submit(group).map_err(|error| (1, error.to_string()))?;
    let mut tokens: Vec<Token> = Vec::new();
    let finish_reason = loop {
        match stream.next_blocking() {
            Some(Event::Scheduled | Event::Prompt(_)) => {}
            Some(Event::Token(token)) => tokens.push(token),
            Some(Event::Finished(finish)) => match finish.reason {
                FinishReason::Stop => break "stop",
                FinishReason::Length => break "length",
                FinishReason::Aborted(cause) => return Err((1, format!("the answer was cut: {}", cause.name()))),
            },
            Some(Event::Rejected(reason)) => return Err((2, reason)),
            Some(Event::Error(reason)) => return Err((1, reason)),
            None => return Err((1, "the engine stopped before the answer was complete".to_owned())),
        }
    };
    engine.shutdown();
    engine.join().map_err(|failure| (1, failure.to_string()))?;
    let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
    let text = tokenizer.decode(&ids, true);
    if !arguments.json {
        return Ok(text);
    }
    let told = |token: Token| Told { logprob: token.logprob, top: token.top };
    let logprobs = if arguments.logprobs.is_some() { tokens.into_iter().map(told).collect() } else { Vec::new() };
    let line = Line { prompt_ids, tokens: ids, text, finish_reason, logprobs };
    Ok(serde_json::to_string(&line).expect("numbers and strings are JSON"))
}

/// What `--json` prints.
#[derive(Serialize)]
struct Line {
    prompt_ids: Vec<u32>,
    tokens: Vec<u32>,
    text: String,
    finish_reason: &'static str,
    /// One entry a token if they were asked for.
    logprobs: Vec<Told>,
}

#[derive(Serialize)]
struct Told {
    logprob: f32,
    /// (token id, logprob), best first.
    top: Vec<(u32, f32)>,
}

fn check(ids: &[u32], max_tokens: u32, context: usize, vocab: usize) -> Result<(), String> {
    if ids.is_empty() {
        return Err("--prompt: the prompt has no tokens".to_owned());
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
        return Err(format!("--prompt-ids: {id} is not a token id; ids lie in 0…{}", vocab - 1));
    }
    if ids.len() + max_tokens as usize > context {
        return Err(format!(
            "--max-tokens {max_tokens}: the prompt has {} tokens and the context is {context}; together they must fit",
            ids.len()
        ));
    }
    Ok(())
}
