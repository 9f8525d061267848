//! Which route a path means, and which methods it takes.
//!
//! **Invariant:** a route's name is a constant: metrics and logs never hold a client's path.

use hyper::Method;
use std::borrow::Cow;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    Completions,
    Chat,
    Render,
    Models,
    /// The model's id, decoded.
    Model(String),
    /// The request's id, decoded.
    Cancel(String),
    Tokenize,
    Detokenize,
    Health,
    Live,
    Ready,
    Metrics,
    Version,
    Slots,
    Graphs,
    Traces,
    /// Nothing is there.
    Unknown,
}

impl Route {
    pub fn of(path: &str) -> Route {
        match path.strip_suffix('/').filter(|rest| !rest.is_empty()).unwrap_or(path) {
            "/v1/completions" => Route::Completions,
            "/v1/chat/completions" => Route::Chat,
            "/v1/chat/completions/render" => Route::Render,
            "/v1/models" => Route::Models,
            "/tokenize" => Route::Tokenize,
            "/detokenize" => Route::Detokenize,
            "/health" => Route::Health,
            "/health/live" => Route::Live,
            "/health/ready" => Route::Ready,
            "/metrics" => Route::Metrics,
            "/version" => Route::Version,
            "/debug/slots" => Route::Slots,
            "/debug/graphs" => Route::Graphs,
            "/debug/traces" => Route::Traces,
            other => {
                if let Some(id) = other.strip_prefix("/v1/models/") {
                    return Route::Model(decoded(id).into_owned());
                }
                match other.strip_prefix("/v1/requests/").and_then(|rest| rest.strip_suffix("/cancel")) {
                    Some(id) if !id.is_empty() && !id.contains('/') => Route::Cancel(decoded(id).into_owned()),
                    _ => Route::Unknown,
                }
            }
        }
    }

    /// For metrics and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Route::Completions => "/v1/completions",
            Route::Chat => "/v1/chat/completions",
            Route::Render => "/v1/chat/completions/render",
            Route::Models => "/v1/models",
            Route::Model(_) => "/v1/models/id",
            Route::Cancel(_) => "/v1/requests/id/cancel",
            Route::Tokenize => "/tokenize",
            Route::Detokenize => "/detokenize",
            Route::Health => "/health",
            Route::Live => "/health/live",
            Route::Ready => "/health/ready",
            Route::Metrics => "/metrics",
            Route::Version => "/version",
            Route::Slots => "/debug/slots",
            Route::Graphs => "/debug/graphs",
            Route::Traces => "/debug/traces",
            Route::Unknown => "other",
        }
    }

    /// `Allow`, or None where any method gets the same answer.
    pub fn allows(&self) -> Option<&'static str> {
        match self {
            Route::Completions
            | Route::Chat
            | Route::Render
            | Route::Cancel(_)
            | Route::Tokenize
            | Route::Detokenize => Some("POST"),
            Route::Unknown => None,
            _ => Some("GET, HEAD"),
        }
    }
    pub fn takes(&self, method: &Method) -> bool {
        self.allows().is_none_or(|allowed| allowed.split(", ").any(|name| name == method.as_str()))
    }
    /// Whether an API key is asked for.
    pub fn is_guarded(&self, path: &str) -> bool {
        path.starts_with("/v1/") || path.starts_with("/debug/") || path == "/v1" || path == "/debug"
    }
    /// Whether an error here counts as a request's outcome.
    pub fn counts(&self, path: &str) -> bool {
        path.starts_with("/v1/")
    }
}

/// `method` as a label with few values.
pub fn method_name(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

/// Percent-decoding; what is not valid stays as it is.
fn decoded(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return Cow::Borrowed(text);
    }
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = |offset: usize| bytes.get(at + offset).and_then(|byte| char::from(*byte).to_digit(16));
        match (bytes[at], hex(1), hex(2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    Cow::Owned(String::from_utf8_lossy(&out).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_find_their_routes() {
        assert_eq!(Route::of("/v1/completions"), Route::Completions);
        assert_eq!(Route::of("/v1/completions/"), Route::Completions);
        assert_eq!(Route::of("/v1/models/org/name"), Route::Model("org/name".into()));
        assert_eq!(Route::of("/v1/models/org%2Fname"), Route::Model("org/name".into()));
        assert_eq!(Route::of("/v1/requests/a%3ab/cancel"), Route::Cancel("a:b".into()));
        for path in ["/", "/v1", "/v1/nope", "/v1/requests//cancel", "/v1/requests/a/b/cancel", "//"] {
            assert_eq!(Route::of(path), Route::Unknown, "{path}");
        }
    }

    #[test]
    fn methods_are_checked() {
        assert!(Route::Metrics.takes(&Method::HEAD) && !Route::Metrics.takes(&Method::POST));
        assert!(Route::Chat.takes(&Method::POST) && !Route::Chat.takes(&Method::DELETE));
        assert!(Route::Unknown.takes(&Method::DELETE));
    }
}
