//! Case-set files and oracle files: what is asked, and what another implementation answered.

use crate::cli::ProbeError;
use serde::Deserialize;
use serde_json::Value;
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_server::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

/// The case set that is asked when none is named.
const BUILT_IN: &str = include_str!("../../../tests/cases/basic.json");

/// A case-set file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseSet {
    pub schema: u32,
    pub description: String,
    pub cases: Vec<CaseFile>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseFile {
    pub id: String,
    /// One text for every row.
    pub prompt: Option<String>,
    /// A text for each row.
    pub prompts: Option<Vec<String>>,
    /// Ids for each row.
    pub prompt_ids: Option<Vec<Vec<u32>>>,
    pub output_len: usize,
    #[serde(default = "one")]
    pub batch_size: usize,
    #[serde(default)]
    pub ignore_eos: bool,
    pub sampling: Option<SamplingFile>,
}

fn one() -> usize {
    1
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingFile {
    temperature: f32,
    top_p: Option<f32>,
    top_k: u32,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: Option<f32>,
    seed: u64,
}

/// A case ready to be run.
#[derive(Clone, Debug)]
pub struct Case {
    pub id: String,
    /// By row.
    pub prompts: Vec<Vec<u32>>,
    pub output_len: usize,
    pub sampling: SamplingSpec,
    pub oracle: Option<Oracle>,
}

/// What the oracle answered to a one-row case.
#[derive(Clone, Debug)]
pub struct Oracle {
    pub tokens: Vec<u32>,
    pub margin: Vec<f64>,
    pub logprobs: Vec<f64>,
}

/// What is asked: cases, and the descriptions of the sets that they come from.
pub struct Asked {
    pub sets: Vec<String>,
    pub cases: Vec<Case>,
    /// Built-in cases that the model's context does not hold.
    pub left_out: Vec<String>,
}

/// Cases of the named files (the built-in set if none), then one case for each oracle prompt.
pub fn read(
    files: &[PathBuf],
    oracle: Option<&Path>,
    tokenizer: &Tokenizer,
    context: usize,
) -> Result<Asked, ProbeError> {
    let (mut sets, mut cases) = (Vec::new(), Vec::new());
    let mut take = |(set, more): (String, Vec<Case>)| {
        sets.push(set);
        cases.extend(more);
    };
    match files {
        [] => take(parse("the built-in case set", BUILT_IN.as_bytes(), tokenizer)?),
        files => {
            for file in files {
                let bytes = std::fs::read(file).map_err(|e| usage(file, &e))?;
                take(parse(&file.display().to_string(), &bytes, tokenizer)?);
            }
        }
    }
    if let Some(file) = oracle {
        cases.extend(read_oracle(file)?);
    }
    let fits = |case: &Case| case.prompts.iter().all(|prompt| prompt.len() + case.output_len <= context);
    let mut left_out = Vec::new();
    if files.is_empty() {
        left_out = cases.iter().filter(|case| !fits(case)).map(|case| case.id.clone()).collect();
        cases.retain(fits);
    }
    if let Some(long) = cases.iter().find(|case| !fits(case)) {
        return Err(ProbeError::Usage(format!(
            "case {}: it needs more than the {context} tokens of --max-model-len",
            long.id
        )));
    }
    Ok(Asked { sets, cases, left_out })
}

fn usage(file: &Path, error: &dyn std::fmt::Display) -> ProbeError {
    ProbeError::Usage(format!("{}: {error}", file.display()))
}

/// A set's description and its cases.
fn parse(name: &str, bytes: &[u8], tokenizer: &Tokenizer) -> Result<(String, Vec<Case>), ProbeError> {
    let bad = |what: String| ProbeError::Usage(format!("{name}: {what}"));
    let set: CaseSet = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
    if set.schema != 2 {
        return Err(bad(format!("schema {} is not 2", set.schema)));
    }
    let cases: Result<Vec<Case>, ProbeError> =
        set.cases.into_iter().map(|case| resolve(case, tokenizer).map_err(bad)).collect();
    Ok((set.description, cases?))
}

fn resolve(case: CaseFile, tokenizer: &Tokenizer) -> Result<Case, String> {
    let encode = |text: &String| tokenizer.encode(text, true).map_err(|e| format!("case {}: {e}", case.id));
    let prompts = match (&case.prompt, &case.prompts, &case.prompt_ids) {
        (Some(text), None, None) => vec![encode(text)?; case.batch_size],
        (None, Some(texts), None) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        (None, None, Some(ids)) => ids.clone(),
        _ => return Err(format!("case {}: one of prompt, prompts and prompt_ids is needed", case.id)),
    };
    if prompts.len() != case.batch_size || prompts.iter().any(Vec::is_empty) || case.output_len == 0 {
        return Err(format!("case {}: {} prompts for batch_size {}", case.id, prompts.len(), case.batch_size));
    }
    let file = case.sampling.unwrap_or_default();
    let sampling = SamplingSpec {
        temperature: file.temperature,
        top_p: file.top_p.unwrap_or(1.0),
        top_k: file.top_k,
        min_p: file.min_p,
        presence_penalty: file.presence_penalty,
        frequency_penalty: file.frequency_penalty,
        repetition_penalty: file.repetition_penalty.unwrap_or(1.0),
        seed: file.seed,
        ignore_eos: case.ignore_eos,
        logprobs: Some(5),
        ..SamplingSpec::greedy(case.output_len as u32)
    };
    Ok(Case { id: case.id, prompts, output_len: case.output_len, sampling, oracle: None })
}

/// An oracle file of `tests/gpu/oracle.py`.
fn read_oracle(file: &Path) -> Result<Vec<Case>, ProbeError> {
    let bytes = std::fs::read(file).map_err(|e| usage(file, &e))?;
    let whole: Value = serde_json::from_slice(&bytes).map_err(|e| usage(file, &e))?;
    let cases = whole["cases"].as_array().ok_or_else(|| usage(file, &"it has no cases"))?;
    cases.iter().map(|case| oracle_case(case).ok_or_else(|| usage(file, &"a case lacks a field"))).collect()
}

fn oracle_case(case: &Value) -> Option<Case> {
    let ids =
        |value: &Value| -> Option<Vec<u32>> { value.as_array()?.iter().map(|v| Some(v.as_u64()? as u32)).collect() };
    let floats = |value: &Value| -> Option<Vec<f64>> { value.as_array()?.iter().map(Value::as_f64).collect() };
    let tokens = ids(&case["tokens"])?;
    let logprobs = match case.get("chosen_logprobs") {
        Some(chosen) => floats(chosen)?,
        None => case["top5_logprobs"].as_array()?.iter().map(|row| row[0][1].as_f64()).collect::<Option<_>>()?,
    };
    let margin = floats(&case["margin"])?;
    if margin.len() != tokens.len() || logprobs.len() != tokens.len() || tokens.is_empty() {
        return None;
    }
    let sampling = SamplingSpec { ignore_eos: true, logprobs: Some(5), ..SamplingSpec::greedy(tokens.len() as u32) };
    Some(Case {
        id: format!("oracle_{}", case["name"].as_str()?),
        prompts: vec![ids(&case["prompt_ids"])?],
        output_len: tokens.len(),
        sampling,
        oracle: Some(Oracle { tokens, margin, logprobs }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_set_is_whole() {
        let (_, cases) = parse("built in", BUILT_IN.as_bytes(), &Tokenizer::bytes_only(2048)).unwrap();
        assert!(cases.len() >= 10);
        assert!(cases.iter().any(|case| case.prompts.len() == 8));
        assert!(cases.iter().any(|case| !case.sampling.is_greedy()));
    }

    #[test]
    fn every_case_file_is_whole() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/cases");
        let files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 5);
        for file in files {
            let name = file.display().to_string();
            let (_, cases) = parse(&name, &std::fs::read(&file).unwrap(), &Tokenizer::bytes_only(2048)).unwrap();
            let longest = |case: &Case| case.prompts.iter().map(Vec::len).max().unwrap() + case.output_len;
            assert!(cases.iter().all(|case| longest(case) <= 8192), "{name}");
        }
    }

    #[test]
    fn a_case_without_a_prompt_or_with_too_few_is_refused() {
        for bad in [r#"{"id":"x","output_len":1}"#, r#"{"id":"x","output_len":1,"batch_size":2,"prompts":["a"]}"#] {
            let set = format!(r#"{{"schema":2,"description":"","cases":[{bad}]}}"#);
            assert!(parse("x", set.as_bytes(), &Tokenizer::bytes_only(2048)).is_err(), "{bad}");
        }
    }
}
