//! Chat messages: roles and text, checked.
//!
//! Read by `request`, rendered by `template`. Content parts are joined without a separator; an assistant message without content is empty
//! text; `developer` is another word for `system`. **Invariant:** a `Message` holds text only; anything else was refused by its path.

use crate::api::{self, ApiRequest, Known, Use};
use crate::error::{ApiError, shown};
use crate::json::{self, Kind};

/// One turn, as a chat template sees it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Message {
    pub role: Role,
    pub content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    User,
    Assistant,
    Tool,
}

const MESSAGE: Known = &[
    ("role", Use::Read),
    ("content", Use::Read),
    ("name", Use::Read),
    ("tool_call_id", Use::Read),
    ("tool_calls", Use::Read),
    ("reasoning_content", Use::Read),
    ("refusal", Use::Ignore),
    ("audio", Use::Ignore),
    ("function_call", Use::Ignore),
];

const PART: Known = &[("type", Use::Read), ("text", Use::Read)];

/// Bytes of `tool_calls` that one message may carry.
const TOOL_CALLS_BYTES: usize = 256 << 10;

/// The `messages` field of a request; at most `count_max` of them.
pub fn read(request: &ApiRequest<'_>, count_max: usize) -> Result<Vec<Message>, ApiError> {
    let path = request.path("messages");
    let Some(raw) = request.array("messages")? else { return Err(ApiError::missing(&path)) };
    let mut messages = Vec::new();
    for (index, raw) in json::elements(raw).enumerate() {
        if index == count_max {
            let message = format!("'{path}' has more than {count_max} messages, the limit of this model's context");
            return Err(ApiError::too_long(&path, message));
        }
        messages.push(message(raw, format!("{path}[{index}]"))?);
    }
    if messages.is_empty() {
        return Err(ApiError::field(&path, None, format!("'{path}' must have at least one message")));
    }
    Ok(messages)
}

fn message(raw: &str, path: String) -> Result<Message, ApiError> {
    if Kind::of(raw) != Kind::Object {
        return Err(ApiError::wrong_type(&path, "an object", Kind::of(raw).name()));
    }
    let fields = ApiRequest::object(raw, format!("{path}."), &[MESSAGE])?;
    let role_path = fields.path("role");
    let role = match fields.string("role")?.as_deref() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        Some(other) => {
            let message =
                format!("'{role_path}' is '{}'; it must be system, developer, user, assistant or tool", shown(other));
            return Err(ApiError::field(role_path, None, message));
        }
        None => return Err(ApiError::missing(&role_path)),
    };
    let content = match (fields.raw("content"), role) {
        (Some(raw), _) => content(raw, &fields)?,
        (None, Role::Assistant) => String::new(),
        (None, _) => return Err(ApiError::missing(&fields.path("content"))),
    };
    Ok(Message {
        role,
        content,
        name: fields.string("name")?,
        tool_call_id: fields.string("tool_call_id")?,
        tool_calls: tool_calls(&fields)?,
        reasoning_content: fields.string("reasoning_content")?,
    })
}

/// A string, or text parts joined as they are.
fn content(raw: &str, fields: &ApiRequest<'_>) -> Result<String, ApiError> {
    let path = fields.path("content");
    match Kind::of(raw) {
        Kind::String => return api::text(raw, &path),
        Kind::Array => {}
        _ => return Err(fields.wrong_type("content", "a string or an array of text parts", raw)),
    }
    let mut joined = String::new();
    for (index, raw) in json::elements(raw).enumerate() {
        let at = format!("{path}[{index}]");
        match Kind::of(raw) {
            Kind::String => {
                joined += &api::text(raw, &at)?;
                continue;
            }
            Kind::Object => {}
            kind => return Err(ApiError::wrong_type(&at, "a text part", kind.name())),
        }
        let part = ApiRequest::object(raw, format!("{at}."), &[PART])?;
        match part.string("type")?.as_deref() {
            Some("text") => {
                joined += &part.string("text")?.ok_or_else(|| ApiError::missing(&part.path("text")))?;
            }
            Some(other) => {
                let message = format!("'{at}' is of type '{}'; this model reads text only", shown(other));
                return Err(ApiError::field(at, Some("unsupported_parameter"), message));
            }
            None => return Err(ApiError::missing(&part.path("type"))),
        }
    }
    Ok(joined)
}

/// Calls the assistant made earlier, for templates that print them; arguments given as JSON text become the object they spell.
fn tool_calls(fields: &ApiRequest<'_>) -> Result<Option<serde_json::Value>, ApiError> {
    let Some(raw) = fields.array("tool_calls")? else { return Ok(None) };
    let path = fields.path("tool_calls");
    if raw.len() > TOOL_CALLS_BYTES {
        return Err(ApiError::field(path.clone(), None, format!("'{path}' is larger than {TOOL_CALLS_BYTES} bytes")));
    }
    let mut calls: serde_json::Value = serde_json::from_str(raw)
        .map_err(|error| ApiError::field(path.clone(), None, format!("'{path}' cannot be read: {error}")))?;
    for call in calls.as_array_mut().into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        if let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()) {
            *arguments = object;
        }
    }
    Ok(Some(calls).filter(|calls| calls.as_array().is_some_and(|calls| !calls.is_empty())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(body: &str) -> Result<Vec<Message>, ApiError> {
        read(&ApiRequest::parse(body.as_bytes(), &[crate::api::CHAT]).unwrap(), 100)
    }

    #[test]
    fn parts_are_joined_and_assistants_may_be_empty() {
        let body = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"hello "},{"type":"text","text":"world"}],"name":null},
            {"role":"assistant","content":null}]}"#;
        let found = messages(body).unwrap();
        assert_eq!((found[0].content.as_str(), found[1].content.as_str()), ("hello world", ""));
    }

    #[test]
    fn bad_messages_are_refused_by_path() {
        let cases = [
            (r#"{}"#, "messages"),
            (r#"{"messages":[]}"#, "messages"),
            (r#"{"messages":{}}"#, "messages"),
            (r#"{"messages":[{}]}"#, "messages[0].role"),
            (r#"{"messages":[{"role":"user"}]}"#, "messages[0].content"),
            (r#"{"messages":[{"role":"wizard","content":"x"}]}"#, "messages[0].role"),
            (r#"{"messages":[{"role":"user","content":"\ud83d"}]}"#, "messages[0].content"),
            (
                r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]}"#,
                "messages[0].content[0]",
            ),
            (r#"{"messages":["x"]}"#, "messages[0]"),
        ];
        for (body, param) in cases {
            assert_eq!(messages(body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn deep_content_is_refused_without_recursion() {
        let body =
            format!(r#"{{"messages":[{{"role":"user","content":{}{}}}]}}"#, "[".repeat(100_000), "]".repeat(100_000));
        assert!(messages(&body).unwrap_err().param.unwrap().starts_with("messages[0].content"));
    }
}
