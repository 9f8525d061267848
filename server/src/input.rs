//! Prompts as they come: a string, several, token ids, or several lists of them.
//!
//! Read by `request` and by `/tokenize` and `/detokenize`. **Invariant:** ids that come out are rows of the embedding table, at most a
//! context of them; a prompt given in ids has at least one.

use crate::api::{self, ApiRequest};
use crate::error::{ApiError, shown};
use crate::json::{self, Kind};
use crate::request::{Chat, Limits};

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    Prompts(Vec<PromptInput>),
    Chat(Chat),
}

#[derive(Clone, Debug, PartialEq)]
pub enum PromptInput {
    Text(String),
    /// Used as given: nothing is added or removed.
    Ids(Vec<u32>),
}

/// `prompt`: a string, several, token ids, or several lists of them.
pub fn prompts(request: &ApiRequest<'_>, limits: &Limits) -> Result<Vec<PromptInput>, ApiError> {
    let path = request.path("prompt");
    let Some(raw) = request.raw("prompt") else { return Err(ApiError::missing(&path)) };
    match Kind::of(raw) {
        Kind::String => return Ok(vec![PromptInput::Text(api::text(raw, &path)?)]),
        Kind::Array => {}
        _ => return Err(request.wrong_type("prompt", "a string, token ids, or an array of either", raw)),
    }
    let Some(first) = json::elements(raw).next() else { return Err(empty(&path)) };
    if Kind::of(first) == Kind::Number {
        return Ok(vec![PromptInput::Ids(ids(raw, &path, limits)?)]);
    }
    let mut prompts = Vec::new();
    for (index, element) in json::elements(raw).enumerate() {
        if index == limits.choices_max {
            let message = format!("'{path}' has more than {} prompts, the limit of this server", limits.choices_max);
            return Err(ApiError::field(path, Some("array_above_max_length"), message));
        }
        prompts.push(match (Kind::of(first), Kind::of(element)) {
            (Kind::String, Kind::String) => PromptInput::Text(api::text(element, &path)?),
            (Kind::Array, Kind::Array) => PromptInput::Ids(ids(element, &path, limits)?),
            (_, kind) => {
                return Err(ApiError::wrong_type(&path, "a string, token ids, or an array of either", kind.name()));
            }
        });
    }
    Ok(prompts)
}

/// A required flat list of token ids.
pub fn token_list(request: &ApiRequest<'_>, name: &str, limits: &Limits) -> Result<Vec<u32>, ApiError> {
    let path = request.path(name);
    match request.array(name)? {
        Some(raw) if json::elements(raw).next().is_some() => ids(raw, &path, limits),
        Some(_) => Ok(Vec::new()),
        None => Err(ApiError::missing(&path)),
    }
}

fn empty(path: &str) -> ApiError {
    ApiError::field(path, None, format!("'{path}' must not be empty"))
}

/// A flat array of token ids, each a row of the embedding table.
fn ids(array: &str, path: &str, limits: &Limits) -> Result<Vec<u32>, ApiError> {
    let mut ids = Vec::new();
    let mut count = 0usize;
    for raw in json::elements(array) {
        if Kind::of(raw) != Kind::Number {
            return Err(ApiError::wrong_type(path, "integers throughout", Kind::of(raw).name()));
        }
        let id = api::integer(raw, path, 0..=i64::from(limits.vocab) - 1).map_err(|mut error| {
            if error.code != Some("invalid_type") {
                error.message = format!("'{path}' holds {}; token ids lie in 0…{}", shown(raw), limits.vocab - 1);
            }
            error
        })?;
        count += 1;
        if count <= limits.context as usize {
            ids.push(id as u32);
        }
    }
    match count {
        0 => Err(empty(path)),
        _ if count > ids.len() => {
            let message = format!("'{path}' has {count} tokens; this model's context is {} tokens", limits.context);
            Err(ApiError::too_long(path, message))
        }
        _ => Ok(ids),
    }
}
