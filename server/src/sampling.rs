//! Sampling fields: temperature and its kin, bias, stops.
//!
//! Read by `request` for both endpoints. **Invariant:** what comes out is within the contract's caps and is finite.

use crate::api::{self, ApiRequest};
use crate::error::{ApiError, shown};
use crate::json::{self, Kind};
use crate::request::{Limits, MaxTokens};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_kernels::contract::{LOGIT_BIAS_MAX, STOP_IDS_MAX};
use std::collections::BTreeMap;

/// Stop strings.
const STOP_MAX: usize = 4;
/// Bytes of one stop string: every character of the answer is compared with its beginnings.
const STOP_BYTES_MAX: usize = 1024;

/// Every field of the device's sampler; `max_tokens` and `logprobs` are set by their own readers.
pub fn sampling(
    request: &ApiRequest<'_>,
    limits: &Limits,
    max_tokens: MaxTokens,
    seed: Option<i64>,
) -> Result<SamplingSpec, ApiError> {
    let defaults = &limits.defaults;
    let warm = if defaults.do_sample == Some(false) { 0.0 } else { defaults.temperature.unwrap_or(1.0) };
    let temperature = request.number("temperature", 0.0..=2.0)?.map_or(warm, |value| value as f32);
    let top_p = request.number("top_p", 0.0..=1.0)?.map_or(defaults.top_p.unwrap_or(1.0), |value| value as f32);
    let top_k = match request.integer("top_k", -1..=i64::MAX)? {
        None => defaults.top_k.unwrap_or(0),
        Some(..=0) => 0,
        Some(k) => u32::try_from(k).unwrap_or(u32::MAX),
    };
    let min_p = request.number("min_p", 0.0..=1.0)?.map_or(defaults.min_p.unwrap_or(0.0), |value| value as f32);
    let repetition = request.number("repetition_penalty", f64::from(f32::MIN_POSITIVE)..=1e6)?;
    let most = match max_tokens {
        MaxTokens::Asked { tokens, .. } => tokens,
        MaxTokens::Default(tokens) => u64::from(tokens),
    };
    let most = i64::from(u32::try_from(most).unwrap_or(u32::MAX));
    Ok(SamplingSpec {
        // top_p 0 keeps the best token alone, which is greedy.
        temperature: if top_p == 0.0 { 0.0 } else { temperature },
        top_p: if top_p == 0.0 { 1.0 } else { top_p },
        min_p,
        top_k: if top_k >= limits.vocab { 0 } else { top_k },
        presence_penalty: request.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
        frequency_penalty: request.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
        repetition_penalty: repetition.map_or(defaults.repetition_penalty.unwrap_or(1.0), |value| value as f32),
        seed: seed.map_or(0, |seed| seed as u64),
        logit_bias: logit_bias(request, limits)?,
        stop_ids: stop_ids(request, limits)?,
        ignore_eos: request.boolean("ignore_eos")?.unwrap_or(false),
        min_tokens: request.integer("min_tokens", 0..=most)?.unwrap_or(0) as u32,
        max_tokens: 0,
        logprobs: None,
    })
}

fn logit_bias(request: &ApiRequest<'_>, limits: &Limits) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(raw) = request.object_field("logit_bias")? else { return Ok(Vec::new()) };
    let refuse = |message: String| ApiError::field("logit_bias", None, message);
    let mut bias = BTreeMap::new();
    for (key, value) in json::members(raw) {
        let id = key.parse::<u32>().ok().filter(|id| *id < limits.vocab && key.bytes().all(|b| b.is_ascii_digit()));
        let Some(id) = id else {
            let last = limits.vocab - 1;
            return Err(refuse(format!("'logit_bias' has the key '{}'; keys are token ids 0…{last}", shown(&key))));
        };
        if Kind::of(value) != Kind::Number {
            return Err(refuse(format!("'logit_bias.{id}' must be a number, not {}", Kind::of(value).name())));
        }
        let value = api::number(value, "logit_bias", -100.0..=100.0)?;
        bias.insert(id, value as f32);
        if bias.len() > LOGIT_BIAS_MAX {
            return Err(refuse(format!("'logit_bias' has more than {LOGIT_BIAS_MAX} entries")));
        }
    }
    Ok(bias.into_iter().collect())
}

fn stop_ids(request: &ApiRequest<'_>, limits: &Limits) -> Result<Vec<u32>, ApiError> {
    let Some(raw) = request.array("stop_token_ids")? else { return Ok(Vec::new()) };
    let mut ids = Vec::new();
    for element in json::elements(raw) {
        if Kind::of(element) != Kind::Number {
            return Err(ApiError::wrong_type("stop_token_ids", "an array of integers", Kind::of(element).name()));
        }
        let id = api::integer(element, "stop_token_ids", 0..=i64::from(limits.vocab) - 1)? as u32;
        if !ids.contains(&id) {
            ids.push(id);
        }
        if ids.len() > STOP_IDS_MAX {
            let message = format!("'stop_token_ids' has more than {STOP_IDS_MAX} ids");
            return Err(ApiError::field("stop_token_ids", Some("array_above_max_length"), message));
        }
    }
    Ok(ids)
}

/// Strings that end the answer.
pub fn stop(request: &ApiRequest<'_>) -> Result<Vec<String>, ApiError> {
    let Some(raw) = request.raw("stop") else { return Ok(Vec::new()) };
    let one = [raw];
    let raws: Vec<&str> = match Kind::of(raw) {
        Kind::String => one.to_vec(),
        Kind::Array => json::elements(raw).take(STOP_MAX + 1).collect(),
        _ => return Err(request.wrong_type("stop", "a string or an array of strings", raw)),
    };
    if raws.len() > STOP_MAX {
        let message = format!("'stop' has more than {STOP_MAX} strings");
        return Err(ApiError::field("stop", Some("array_above_max_length"), message));
    }
    let mut stops = Vec::new();
    for raw in raws {
        if Kind::of(raw) != Kind::String {
            return Err(ApiError::wrong_type("stop", "a string or an array of strings", Kind::of(raw).name()));
        }
        let text = api::text(raw, "stop")?;
        if text.is_empty() {
            return Err(ApiError::field("stop", None, "'stop' must not hold an empty string"));
        }
        if text.len() > STOP_BYTES_MAX {
            let message = format!("'stop' has a string of {} bytes; it may have {STOP_BYTES_MAX}", text.len());
            return Err(ApiError::field("stop", Some("string_above_max_length"), message));
        }
        stops.push(text);
    }
    Ok(stops)
}
