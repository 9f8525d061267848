//! What a client hears when its request is not answered: a status and the four-key JSON envelope.
//!
//! Made by every stage of the request path; written by the router and, once a stream has started, by `sse`.
//! **Invariant:** all four keys are always present, `code` is a string or null, and no message holds client text beyond a shortened value.

use hyper::StatusCode;
use serde_json::json;

/// A refusal or failure, as the client sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub message: String,
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// `Retry-After`, seconds.
    pub retry_after: Option<u32>,
    /// `Allow` of a 405.
    pub allow: Option<&'static str>,
    /// The connection cannot be used again.
    pub close: bool,
}

pub const INVALID: &str = "invalid_request_error";
pub const SERVER: &str = "server_error";

impl ApiError {
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
            allow: None,
            close: false,
        }
    }
    /// 400 about the body as a whole.
    pub fn body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, message)
    }
    /// 400 about one field.
    pub fn field(param: impl Into<String>, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let mut error = Self::body(message);
        error.param = Some(param.into());
        error.code = code;
        error
    }
    pub fn missing(param: &str) -> Self {
        Self::field(param, Some("missing_required_parameter"), format!("'{param}' is required"))
    }
    pub fn wrong_type(param: &str, expected: &str, got: &str) -> Self {
        Self::field(param, Some("invalid_type"), format!("'{param}' must be {expected}, not {got}"))
    }
    pub fn unsupported(param: &str, what: impl std::fmt::Display) -> Self {
        Self::field(param, Some("unsupported_parameter"), format!("'{param}' is not supported: {what}"))
    }
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        Self::field(param, Some("context_length_exceeded"), message)
    }
    pub fn model_not_found(model: &str) -> Self {
        let mut error = Self::field(
            "model",
            Some("model_not_found"),
            format!("the model '{}' is not served here; see /v1/models", shown(model)),
        );
        error.status = StatusCode::NOT_FOUND;
        error
    }
    /// 429: every seat and queue place is taken.
    pub fn busy(message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        error.code = Some("rate_limit_exceeded");
        error.retry_after = Some(1);
        error
    }
    /// 503; `retry_after` where the server will recover.
    pub fn unavailable(message: impl Into<String>, retry_after: Option<u32>) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, message);
        error.retry_after = retry_after;
        error
    }
    /// 500: the engine failed.
    pub fn engine(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, message)
    }
    pub fn closing(mut self) -> Self {
        self.close = true;
        self
    }
    /// The envelope.
    pub fn envelope(&self) -> String {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
            .to_string()
    }
}

/// A client's value, cut to 40 characters, control characters replaced.
pub fn shown(value: &str) -> String {
    let mut text: String = value.chars().take(40).map(|c| if is_hidden(c) { '?' } else { c }).collect();
    if value.chars().nth(40).is_some() {
        text.push('…');
    }
    text
}

/// Whether `c` could start a new line or steer a terminal.
fn is_hidden(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_envelope_has_four_keys() {
        let value: serde_json::Value = serde_json::from_str(&ApiError::missing("prompt").envelope()).unwrap();
        let error = value["error"].as_object().unwrap();
        assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
        assert!(
            serde_json::from_str::<serde_json::Value>(&ApiError::body("x").envelope()).unwrap()["error"]["code"]
                .is_null()
        );
    }

    #[test]
    fn shown_values_are_short_and_printable() {
        assert_eq!(shown("a\nb\u{1b}[0m"), "a?b?[0m");
        assert_eq!(shown(&"x".repeat(50)).chars().count(), 41);
    }
}
