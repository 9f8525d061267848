//! Special ids: one id or a list, from two files.
//!
//! generation_config.json's `eos_token_id` wins when it has one; when it is absent or null, config.json's is used (as Transformers does).
//! A value that could never match is refused, so that no generation silently runs on for ever.

use super::CheckpointError;
use super::fields::{Fields, shown};
use serde_json::Value;
use slotgraph_kernels::contract::EOS_IDS_MAX;

/// The ids that end a sequence, in file order without repeats; empty when neither file names one.
pub fn eos_ids(config: &Fields, generation: Option<&Fields>, vocab: usize) -> Result<Vec<u32>, CheckpointError> {
    let ours = ids(config, "eos_token_id", vocab)?;
    let theirs = generation.map(|fields| ids(fields, "eos_token_id", vocab)).transpose()?.flatten();
    Ok(theirs.or(ours).unwrap_or_default())
}

/// A single optional id.
pub fn token_id(config: &Fields, key: &str, vocab: usize) -> Result<Option<u32>, CheckpointError> {
    config.value(key).map(|value| id(config, key, value, vocab)).transpose()
}

fn ids(fields: &Fields, key: &str, vocab: usize) -> Result<Option<Vec<u32>>, CheckpointError> {
    let values = match fields.value(key) {
        None => return Ok(None),
        Some(Value::Array(values)) if values.is_empty() => {
            return Err(fields.error(key, "is an empty list; name at least one id, or leave the key out"));
        }
        Some(Value::Array(values)) => values.as_slice(),
        Some(value) => std::slice::from_ref(value),
    };
    let mut ids = Vec::new();
    for value in values {
        let id = id(fields, key, value, vocab)?;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    if ids.len() > EOS_IDS_MAX {
        return Err(fields.error(key, format!("names {} ids, at most {EOS_IDS_MAX} are supported", ids.len())));
    }
    Ok(Some(ids))
}

fn id(fields: &Fields, key: &str, value: &Value, vocab: usize) -> Result<u32, CheckpointError> {
    match value.as_u64() {
        Some(id) if (id as usize) < vocab => Ok(id as u32),
        Some(id) => Err(fields.error(key, format!("is {id}, but vocab_size is {vocab}"))),
        None => Err(fields.error(key, format!("is {}, expected a token id (or a list of them)", shown(value)))),
    }
}
