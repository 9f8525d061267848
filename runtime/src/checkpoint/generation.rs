//! generation_config.json: the sampling defaults that a checkpoint ships with, typed.
//!
//! Whether they are used is the server's decision; here their types and ranges are checked, and a bad one is refused by file and key.

use super::CheckpointError;
use super::fields::Fields;

/// Defaults for requests that leave a field out; None where the file says nothing.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct GenerationDefaults {
    /// False means greedy unless the request says otherwise.
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    /// Reads the file's object; keys that are not about sampling are left alone.
    pub fn parse(fields: &Fields) -> Result<GenerationDefaults, CheckpointError> {
        let within = |key: &str, ok: fn(f64) -> bool, range: &str| match fields.number(key)? {
            Some(n) if !ok(n) => Err(fields.error(key, format!("is {n}, expected {range}"))),
            n => Ok(n.map(|n| n as f32)),
        };
        Ok(GenerationDefaults {
            do_sample: fields.flag("do_sample")?,
            temperature: within("temperature", |n| (0.0..=100.0).contains(&n), "0 to 100")?,
            top_p: within("top_p", |n| n > 0.0 && n <= 1.0, "more than 0 and at most 1")?,
            top_k: fields.integer("top_k")?.map(|k| k as u32),
            min_p: within("min_p", |n| (0.0..=1.0).contains(&n), "0 to 1")?,
            repetition_penalty: within("repetition_penalty", |n| n > 0.0 && n <= 100.0, "more than 0")?,
            max_new_tokens: fields.integer("max_new_tokens")?.map(|n| n as u32),
        })
    }
}
