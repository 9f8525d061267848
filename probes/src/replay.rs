//! replay: proves that a traced answer is the one that this model, contract and seed give, or says at which token it is not.
//!
//! With the answer's tokens at hand, one prefill pass re-derives every draw from the logits and the seed's noise; without them, or with
//! penalties, the answer is generated again. **Invariant:** a trace of another model or contract is refused, never compared.

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::driver::Seated;
use crate::evidence::{Canary, Draft};
use crate::harness::read_traces;
use crate::load::scatter;
use crate::subject::{AnyDriver, Subject, SubjectArgs};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use slotgraph_graphs::device::DeviceError;
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::Record;
use slotgraph_runtime::trace::sha256_of_ids;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Verify traced answers in one prefill pass each, or generate them again.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// File of trace lines.
    trace: PathBuf,
    /// JSON lines `{"prompt_sha256", "prompt_ids"}`, and `{"request_id", "choice_index", "token_ids", "logprobs"}` for known answers.
    #[arg(long, value_name = "FILE")]
    prompt_file: PathBuf,
    /// Traces taken, chosen by --pick-seed among those that completed [default: all].
    #[arg(long)]
    limit: Option<usize>,
    /// Of these, how many are generated again although their tokens are known.
    #[arg(long, default_value_t = 0)]
    regenerate: usize,
    #[arg(long, default_value_t = 0)]
    pick_seed: u64,
    /// Run every step in this bucket; no answer may have been given in it.
    #[arg(long, value_name = "ROWS")]
    bucket: Option<usize>,
    #[command(flatten)]
    subject: SubjectArgs,
}

/// A line of the prompt file: a prompt, an answer, or both.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct PromptLine {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_sha256: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_ids: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(default)]
    pub choice_index: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Logprobs of the answer's tokens, as the client read them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<f64>>,
}

/// A traced answer with everything that is known of it.
#[derive(Clone, Debug)]
struct Answer {
    id: String,
    model_sha256: String,
    contract_hash: String,
    token_sha256: String,
    completion_tokens: usize,
    /// The choice's sample index: part of its noise.
    sample: u32,
    prompt: Vec<u32>,
    sampling: SamplingSpec,
    tokens: Option<Vec<u32>>,
    logprobs: Option<Vec<f64>>,
    /// Buckets of the steps that gave it.
    buckets_used: Vec<usize>,
}

#[derive(Clone, Debug, Serialize)]
struct Verified {
    request_id: String,
    how: &'static str,
    tokens: usize,
    temperature: f32,
    buckets_used: Vec<usize>,
    /// Why it is not the answer; None if it is.
    refused: Option<String>,
}

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let answers = read(args)?;
    let subject = Subject::open(&args.subject)?;
    let mut draft = Draft::new(
        "replay",
        "are these traced answers the ones that this model, contract and seed give?",
        Claim::of(Label::HttpTrace),
    );
    draft = subject.describe(draft);
    let prepared = match subject.device() {
        Ok(prepared) => prepared,
        Err(none) => return none.end(draft),
    };
    draft.startup = prepared.startup.clone();
    draft.contract_hash = prepared.device.facts().contract_hash;
    let mut replayer = Replayer {
        model_sha256: subject.checkpoint.model_sha256().to_string(),
        contract_hash: draft.contract_hash.clone(),
        driver: prepared.into_driver(),
    };
    if let Some(bucket) = args.bucket {
        let known = &replayer.driver.limits().buckets;
        if !known.contains(&bucket) {
            return Err(ProbeError::Usage(format!("--bucket {bucket}: there are {known:?}")));
        }
        replayer.driver.bucket_floor = bucket;
        let used = answers.iter().filter(|answer| answer.buckets_used.contains(&bucket)).count();
        draft.check("in_another_bucket", used == 0, format!("{used} answers were given in bucket {bucket}"));
    }
    let failed = |e: DeviceError| ProbeError::Failed(e.to_string());
    let mut rows = Vec::new();
    for (number, answer) in answers.iter().enumerate() {
        rows.push(replayer.replay(answer, number < args.regenerate).map_err(failed)?);
    }
    let refused: Vec<&Verified> = rows.iter().filter(|row| row.refused.is_some()).collect();
    let first = refused.first().map(|row| format!("{}: {}", row.request_id, row.refused.as_deref().unwrap_or("")));
    draft.check(
        "every_answer_is_its_own",
        refused.is_empty() && !rows.is_empty(),
        first.unwrap_or_else(|| format!("{} answers", rows.len())),
    );
    for how in ["verified", "regenerated"] {
        draft.metric(
            &format!("answers_{how}"),
            rows.iter().filter(|row| row.how == how).count() as f64,
            "answers",
            1,
            None,
        );
    }
    let greedy = rows.iter().filter(|row| row.temperature == 0.0).count();
    draft.metric("answers_greedy", greedy as f64, "answers", 1, None);
    draft.metric("answers_sampled", (rows.len() - greedy) as f64, "answers", 1, None);
    draft.canary(replayer.planted(&answers).map_err(failed)?);
    draft.detail("answers", &rows);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

struct Replayer {
    model_sha256: String,
    contract_hash: String,
    driver: AnyDriver,
}

impl Replayer {
    fn replay(&mut self, answer: &Answer, regenerate: bool) -> Result<Verified, DeviceError> {
        let can_verify = answer.tokens.is_some() && !answer.sampling.has_penalties() && !regenerate;
        let how = if can_verify { "verified" } else { "regenerated" };
        let refused = match self.refuse(answer) {
            Some(reason) => Some(reason),
            None if can_verify => self.verify(answer)?,
            None => self.regenerate(answer)?,
        };
        Ok(Verified {
            request_id: answer.id.clone(),
            how,
            tokens: answer.completion_tokens,
            temperature: answer.sampling.temperature,
            buckets_used: answer.buckets_used.clone(),
            refused,
        })
    }

    /// Why this trace cannot even be compared.
    fn refuse(&self, answer: &Answer) -> Option<String> {
        if answer.model_sha256 != self.model_sha256 {
            return Some(format!("another model: {}", answer.model_sha256));
        }
        if answer.contract_hash != self.contract_hash {
            return Some(format!("another contract: {}", answer.contract_hash));
        }
        let tokens = answer.tokens.as_ref()?;
        if tokens.len() != answer.completion_tokens || sha256_of_ids(tokens) != answer.token_sha256 {
            return Some("the answer's tokens are not those of the trace".into());
        }
        None
    }

    fn seat(&mut self, answer: &Answer) {
        let context = answer.prompt.len() + answer.completion_tokens + 1;
        let sampling = SamplingSpec { logprobs: Some(0), ..answer.sampling.clone() };
        self.driver.seat(
            vec![Seated { prompt: answer.prompt.clone(), sampling: Arc::new(sampling), choice: answer.sample }],
            context,
        );
    }

    /// One pass over prompt and answer; every draw must be the answer's token.
    fn verify(&mut self, answer: &Answer) -> Result<Option<String>, DeviceError> {
        let tokens = answer.tokens.as_deref().unwrap_or_default();
        if tokens.is_empty() {
            return Ok(None);
        }
        self.seat(answer);
        let records = self.driver.redraw(tokens)?;
        Ok(disagreement(&records, tokens, answer.logprobs.as_deref()))
    }

    fn regenerate(&mut self, answer: &Answer) -> Result<Option<String>, DeviceError> {
        if answer.completion_tokens == 0 {
            return Ok(None);
        }
        self.seat(answer);
        let records = self.driver.regenerate(answer.completion_tokens)?;
        let drawn: Vec<u32> = records.iter().map(|record| record.token).collect();
        if let Some(tokens) = &answer.tokens {
            return Ok(disagreement(&records, tokens, answer.logprobs.as_deref()));
        }
        let same = sha256_of_ids(&drawn) == answer.token_sha256;
        Ok((!same).then(|| format!("a fresh run gives other tokens: {drawn:?}")))
    }

    /// A changed token, seed and logprob bit must each be refused.
    fn planted(&mut self, answers: &[Answer]) -> Result<Canary, DeviceError> {
        const FAULT: &str = "a changed token, seed and logprob bit";
        let known = |answer: &&Answer| answer.completion_tokens > 1 && !answer.sampling.has_penalties();
        let with_tokens = answers.iter().filter(known).find(|answer| answer.tokens.is_some());
        let sampled = answers.iter().filter(known).find(|a| a.sampling.temperature > 0.5 && a.completion_tokens > 4);
        let (Some(plain), Some(sampled)) = (with_tokens, sampled) else {
            return Ok(Canary::skipped(FAULT, "no sampled answer, or none with its tokens, is among the traces"));
        };
        let mut token = plain.clone();
        let tokens = token.tokens.get_or_insert_default();
        tokens[0] ^= 1;
        token.token_sha256 = sha256_of_ids(tokens);
        let mut seed = sampled.clone();
        seed.sampling.seed ^= 1;
        let mut caught = self.replay(&token, false)?.refused.is_some() && self.replay(&seed, false)?.refused.is_some();
        if let Some(scored) = answers.iter().filter(known).find(|a| a.tokens.is_some() && a.logprobs.is_some()) {
            let mut bit = scored.clone();
            for logprob in bit.logprobs.iter_mut().flatten().take(1) {
                *logprob = f64::from(f32::from_bits((*logprob as f32).to_bits() ^ 1));
            }
            caught &= self.replay(&bit, false)?.refused.is_some();
        }
        Ok(Canary::planted(FAULT, caught))
    }
}

/// Where draws and an answer part.
fn disagreement(records: &[Record], tokens: &[u32], logprobs: Option<&[f64]>) -> Option<String> {
    if records.len() != tokens.len() {
        return Some(format!("{} draws for {} tokens", records.len(), tokens.len()));
    }
    for (at, (record, &token)) in records.iter().zip(tokens).enumerate() {
        if record.token != token {
            return Some(format!("token {at} is {token}, the draw gives {}", record.token));
        }
        let known = logprobs.and_then(|logprobs| logprobs.get(at));
        if let Some(logprob) = known.map(|logprob| *logprob as f32).filter(|l| l.to_bits() != record.logprob.to_bits())
        {
            return Some(format!("the logprob of token {at} is {logprob}, the pass gives {}", record.logprob));
        }
    }
    None
}

fn read(args: &Args) -> Result<Vec<Answer>, ProbeError> {
    let usage = |path: &PathBuf, e: &dyn std::fmt::Display| ProbeError::Usage(format!("{}: {e}", path.display()));
    let traces = read_traces(&args.trace).map_err(|e| usage(&args.trace, &e))?;
    let text = std::fs::read_to_string(&args.prompt_file).map_err(|e| usage(&args.prompt_file, &e))?;
    let mut prompts: HashMap<String, Vec<u32>> = HashMap::new();
    let mut known: HashMap<(String, u32), PromptLine> = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let line: PromptLine = serde_json::from_str(line)
            .map_err(|e| ProbeError::Usage(format!("{}:{}: {e}", args.prompt_file.display(), number + 1)))?;
        if let Some(ids) = &line.prompt_ids {
            let hash = sha256_of_ids(ids);
            if line.prompt_sha256.as_ref().is_some_and(|named| *named != hash) {
                let file = args.prompt_file.display();
                return Err(ProbeError::Usage(format!(
                    "{file}:{}: prompt_sha256 is not that of prompt_ids",
                    number + 1
                )));
            }
            prompts.insert(hash, ids.clone());
        }
        if let Some(id) = &line.request_id {
            known.insert((id.clone(), line.choice_index), line);
        }
    }
    let mut answers = Vec::new();
    for trace in &traces {
        if let Some(answer) = answer(trace, &prompts, &known)? {
            answers.push(answer);
        }
    }
    answers.sort_by_key(|answer| answer.id.bytes().fold(args.pick_seed, |hash, byte| scatter(hash ^ u64::from(byte))));
    answers.truncate(args.limit.unwrap_or(usize::MAX));
    if answers.is_empty() {
        return Err(ProbeError::Usage(format!("{}: no completed answer whose prompt is known", args.trace.display())));
    }
    Ok(answers)
}

/// A completed trace whose prompt is known; None otherwise.
fn answer(
    trace: &Map<String, Value>,
    prompts: &HashMap<String, Vec<u32>>,
    known: &HashMap<(String, u32), PromptLine>,
) -> Result<Option<Answer>, ProbeError> {
    let text = |key: &str| trace.get(key).and_then(Value::as_str).unwrap_or_default().to_string();
    let number = |key: &str| trace.get(key).and_then(Value::as_u64).unwrap_or_default();
    let id = text("request_id");
    if !text("terminal_reason").starts_with("completed") {
        return Ok(None);
    }
    let Some(prompt) = prompts.get(&text("prompt_sha256")) else { return Ok(None) };
    let broken = |what: String| ProbeError::Usage(format!("trace of {id}: {what}"));
    let sampling = trace.get("sampling").ok_or_else(|| broken("it has no sampling fields".into()))?;
    let mut sampling: SamplingSpec = serde_json::from_value(sampling.clone()).map_err(|e| broken(e.to_string()))?;
    sampling.seed = trace.get("seed").and_then(Value::as_u64).ok_or_else(|| broken("it has no seed".into()))?;
    let line = known.get(&(id.clone(), number("choice_index") as u32));
    Ok(Some(Answer {
        model_sha256: text("model_sha256"),
        contract_hash: text("contract_hash"),
        token_sha256: text("token_sha256"),
        completion_tokens: number("completion_tokens") as usize,
        sample: trace.get("sample").and_then(Value::as_u64).unwrap_or(number("choice_index")) as u32,
        prompt: prompt.clone(),
        sampling,
        tokens: line.and_then(|line| line.token_ids.clone()),
        logprobs: line.and_then(|line| line.logprobs.clone()),
        buckets_used: trace.get("buckets_used").and_then(Value::as_array).map_or_else(Vec::new, |buckets| {
            buckets.iter().filter_map(Value::as_u64).map(|bucket| bucket as usize).collect()
        }),
        id,
    }))
}
