//! The wire: which fields each endpoint knows, and a body's fields by name with their JSON types checked.
//!
//! Bytes come in from `routes`; `request` reads fields out. Rules that hold for every field: an explicit null is an omitted field; of a
//! repeated key the last one counts; an unknown field is ignored (and named once in the debug log); a number is an integer only if it is
//! written as one. **Invariant:** nothing here recurses or copies the body.

use crate::error::{ApiError, shown};
use crate::json::{self, Kind};
use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::Mutex;

/// What is done with a field that is present and not null.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// `request` reads it.
    Read,
    /// It changes nothing that this server offers; accepted.
    Ignore,
    /// It would change the answer, and is not built: refused by name.
    Refuse,
}

pub type Known = &'static [(&'static str, Use)];

/// Fields of `/v1/completions`.
pub const COMPLETION: Known = &[
    ("model", Use::Read),
    ("prompt", Use::Read),
    ("max_tokens", Use::Read),
    ("suffix", Use::Read),
    ("best_of", Use::Read),
    ("echo", Use::Read),
    ("logprobs", Use::Read),
];

/// Fields of `/v1/chat/completions` (and its `/render`).
pub const CHAT: Known = &[
    ("model", Use::Read),
    ("messages", Use::Read),
    ("max_tokens", Use::Read),
    ("max_completion_tokens", Use::Read),
    ("logprobs", Use::Read),
    ("top_logprobs", Use::Read),
    ("response_format", Use::Read),
    ("tools", Use::Read),
    ("tool_choice", Use::Read),
    ("modalities", Use::Read),
    ("add_generation_prompt", Use::Read),
    ("continue_final_message", Use::Read),
    ("chat_template_kwargs", Use::Read),
    ("parallel_tool_calls", Use::Ignore),
    ("metadata", Use::Ignore),
    ("store", Use::Ignore),
    ("service_tier", Use::Ignore),
    ("verbosity", Use::Ignore),
    ("reasoning_effort", Use::Ignore),
    ("prediction", Use::Ignore),
    ("prompt_cache_key", Use::Ignore),
    ("safety_identifier", Use::Ignore),
    ("moderation", Use::Ignore),
    ("functions", Use::Ignore),
    ("function_call", Use::Ignore),
    ("chat_template", Use::Refuse),
    ("documents", Use::Refuse),
    ("audio", Use::Refuse),
    ("web_search_options", Use::Refuse),
];

/// Fields of both.
pub const SAMPLING: Known = &[
    ("n", Use::Read),
    ("stop", Use::Read),
    ("stream", Use::Read),
    ("stream_options", Use::Read),
    ("temperature", Use::Read),
    ("top_p", Use::Read),
    ("presence_penalty", Use::Read),
    ("frequency_penalty", Use::Read),
    ("logit_bias", Use::Read),
    ("seed", Use::Read),
    ("top_k", Use::Read),
    ("min_p", Use::Read),
    ("repetition_penalty", Use::Read),
    ("min_tokens", Use::Read),
    ("ignore_eos", Use::Read),
    ("stop_token_ids", Use::Read),
    ("add_special_tokens", Use::Read),
    ("skip_special_tokens", Use::Read),
    ("include_stop_str_in_output", Use::Read),
    ("return_token_ids", Use::Read),
    ("return_tokens_as_token_ids", Use::Read),
    ("bad_words", Use::Read),
    ("priority", Use::Read),
    ("user", Use::Read),
    ("request_id", Use::Ignore),
    ("cache_salt", Use::Ignore),
    ("session_id", Use::Ignore),
    ("spaces_between_special_tokens", Use::Ignore),
    ("prompt_logprobs", Use::Refuse),
    ("allowed_token_ids", Use::Refuse),
    ("logprob_token_ids", Use::Refuse),
    ("truncate_prompt_tokens", Use::Refuse),
    ("structured_outputs", Use::Refuse),
    ("guided_json", Use::Refuse),
    ("guided_regex", Use::Refuse),
    ("guided_choice", Use::Refuse),
    ("guided_grammar", Use::Refuse),
    ("kv_transfer_params", Use::Refuse),
    ("use_beam_search", Use::Refuse),
    ("length_penalty", Use::Refuse),
];

/// Fields of `/tokenize` and `/detokenize`.
pub const TOKENIZE: Known = &[
    ("model", Use::Read),
    ("prompt", Use::Read),
    ("messages", Use::Read),
    ("tokens", Use::Read),
    ("add_special_tokens", Use::Read),
    ("return_token_strs", Use::Read),
    ("add_generation_prompt", Use::Read),
    ("continue_final_message", Use::Read),
    ("chat_template_kwargs", Use::Read),
    ("tools", Use::Read),
    ("chat_template", Use::Refuse),
];

/// The members of one JSON object that this server knows.
#[derive(Debug)]
pub struct ApiRequest<'a> {
    /// Where the object stands in the body: "" or `messages[0].`.
    at: String,
    fields: Vec<(&'static str, &'a str)>,
}

impl<'a> ApiRequest<'a> {
    /// The body of a request; `known` are the endpoint's fields.
    pub fn parse(body: &'a [u8], known: &[Known]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body)
            .map_err(|error| ApiError::body(format!("the body is not UTF-8 at byte {}", error.valid_up_to())))?;
        let text = json::check(text).map_err(|error| ApiError::body(format!("the body is not JSON: {error}")))?;
        if Kind::of(text) != Kind::Object {
            return Err(ApiError::body(format!("the body must be a JSON object, not {}", Kind::of(text).name())));
        }
        Self::object(text, String::new(), known)
    }

    /// An object inside a checked body; `at` is its path with a trailing dot.
    pub fn object(text: &'a str, at: String, known: &[Known]) -> Result<Self, ApiError> {
        let mut fields: Vec<(&'static str, &'a str)> = Vec::new();
        for (key, value) in json::members(text) {
            let Some(&(name, usage)) = known.iter().flat_map(|list| list.iter()).find(|(name, _)| *name == key) else {
                name_once(&at, &key);
                continue;
            };
            fields.retain(|(seen, _)| *seen != name);
            if Kind::of(value) == Kind::Null || usage == Use::Ignore {
                continue;
            }
            if usage == Use::Refuse {
                return Err(ApiError::unsupported(&format!("{at}{name}"), "this server does not implement it"));
            }
            fields.push((name, value));
        }
        Ok(ApiRequest { at, fields })
    }

    /// The path of a field, for messages.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.at)
    }
    /// The raw text of a field that is there and not null.
    pub fn raw(&self, name: &str) -> Option<&'a str> {
        self.fields.iter().find(|(field, _)| *field == name).map(|(_, value)| *value)
    }
    fn of_kind(&self, name: &str, kind: Kind) -> Result<Option<&'a str>, ApiError> {
        match self.raw(name) {
            Some(raw) if Kind::of(raw) != kind => Err(self.wrong_type(name, kind.name(), raw)),
            other => Ok(other),
        }
    }
    pub fn wrong_type(&self, name: &str, expected: &str, raw: &str) -> ApiError {
        let got = match Kind::of(raw) {
            Kind::Number | Kind::Boolean => shown(raw),
            kind => kind.name().to_owned(),
        };
        ApiError::wrong_type(&self.path(name), expected, &got)
    }
    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        Ok(self.of_kind(name, Kind::Boolean)?.map(|raw| raw == "true"))
    }
    pub fn string(&self, name: &str) -> Result<Option<String>, ApiError> {
        self.of_kind(name, Kind::String)?.map(|raw| text(raw, &self.path(name))).transpose()
    }
    pub fn array(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.of_kind(name, Kind::Array)
    }
    pub fn object_field(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.of_kind(name, Kind::Object)
    }
    /// An integer within `range`.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(raw) = self.of_kind(name, Kind::Number)? else { return Ok(None) };
        integer(raw, &self.path(name), range).map(Some)
    }
    /// A real number within `range`.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(raw) = self.of_kind(name, Kind::Number)? else { return Ok(None) };
        number(raw, &self.path(name), range).map(Some)
    }
}

/// A string value; lone surrogates are refused.
pub fn text(raw: &str, path: &str) -> Result<String, ApiError> {
    json::string(raw).map_err(|_| {
        ApiError::field(path, None, format!("'{path}' is not Unicode text: it has a lone surrogate escape"))
    })
}

/// A raw number as an integer within `range`.
pub fn integer(raw: &str, path: &str, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
    let digits = raw.strip_prefix('-').unwrap_or(raw);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        let got = if Kind::of(raw) == Kind::Number { shown(raw) } else { Kind::of(raw).name().to_owned() };
        return Err(ApiError::wrong_type(path, "an integer", &got));
    }
    let low = ("integer_below_min_value", "at least", *range.start());
    let high = ("integer_above_max_value", "at most", *range.end());
    let (code, words, bound) = match raw.parse::<i64>() {
        Ok(value) if range.contains(&value) => return Ok(value),
        Ok(value) if value < *range.start() => low,
        Err(_) if raw.starts_with('-') => low,
        _ => high,
    };
    Err(ApiError::field(path, Some(code), format!("'{path}' is {}; it must be {words} {bound}", shown(raw))))
}

/// A raw number as a real within `range`.
pub fn number(raw: &str, path: &str, range: RangeInclusive<f64>) -> Result<f64, ApiError> {
    let value: f64 = raw.parse().map_err(|_| ApiError::wrong_type(path, "a number", Kind::of(raw).name()))?;
    if range.contains(&value) {
        return Ok(value);
    }
    let code = if value < *range.start() { "decimal_below_min_value" } else { "decimal_above_max_value" };
    let message = format!("'{path}' is {}; it must lie in {}…{}", shown(raw), range.start(), range.end());
    Err(ApiError::field(path, Some(code), message))
}

/// Names an ignored field in the debug log, once a process (and at most 256 of them, so that nobody can fill the log or the memory).
fn name_once(at: &str, key: &str) {
    static SEEN: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    if !tracing::enabled!(tracing::Level::DEBUG) || !at.is_empty() {
        return;
    }
    let name = shown(key);
    let mut seen = SEEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let seen = seen.get_or_insert_with(HashSet::new);
    if seen.len() < 256 && seen.insert(name.clone()) {
        tracing::debug!(field = name, "an unknown request field is ignored");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<ApiRequest<'_>, ApiError> {
        ApiRequest::parse(body.as_bytes(), &[COMPLETION, SAMPLING])
    }

    #[test]
    fn bodies_that_are_not_an_object_are_refused() {
        for body in ["", "null", "[]", "\"x\"", "42", "{\"a\":1", "{} x"] {
            let error = parse(body).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param, error.code), (400, None, None), "{body}");
        }
        assert!(ApiRequest::parse(b"{\"prompt\":\"\xff\"}", &[COMPLETION]).is_err());
    }

    #[test]
    fn null_is_omitted_and_the_last_of_a_repeated_key_counts() {
        let request = parse(r#"{"prompt":"a","prompt":"b","seed":1,"seed":null,"zzz":[[]]}"#).unwrap();
        assert_eq!(request.string("prompt").unwrap().as_deref(), Some("b"));
        assert_eq!(request.integer("seed", i64::MIN..=i64::MAX).unwrap(), None);
    }

    #[test]
    fn integers_are_checked_by_type_then_range() {
        let code = |body: &str| parse(body).unwrap().integer("n", 1..=128).unwrap_err().code.unwrap();
        for body in [r#"{"n":"2"}"#, r#"{"n":1.5}"#, r#"{"n":true}"#, r#"{"n":[2]}"#, r#"{"n":1e2}"#] {
            assert_eq!(code(body), "invalid_type", "{body}");
        }
        assert_eq!(code(r#"{"n":0}"#), "integer_below_min_value");
        assert_eq!(code(r#"{"n":-99999999999999999999}"#), "integer_below_min_value");
        assert_eq!(code(r#"{"n":99999999999999999999}"#), "integer_above_max_value");
    }

    #[test]
    fn numbers_out_of_any_range_are_refused() {
        for body in [r#"{"top_p":1e400}"#, r#"{"top_p":-0.1}"#, r#"{"top_p":"1"}"#] {
            let error = parse(body).unwrap().number("top_p", 0.0..=1.0).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("top_p"), "{body}");
        }
    }

    #[test]
    fn fields_that_are_not_built_are_refused_by_name() {
        let error = parse(r#"{"guided_json":{}}"#).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some("guided_json"), Some("unsupported_parameter")));
        assert!(parse(r#"{"guided_json":null}"#).is_ok());
    }
}
