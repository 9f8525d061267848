//! Bodies that are read without asking the engine anything: a request's prompts, a rendered chat, ids of a text, text of ids.
//!
//! Called by `routes` on a thread that may take its time. **Invariant:** whatever the bytes are, the outcome is an answer or an `ApiError`.

use crate::api::{self, ApiRequest};
use crate::error::ApiError;
use crate::input::{self, PromptInput};
use crate::prompt::{Prompted, Reader};
use crate::request::{self, Endpoint};
use serde_json::json;

/// The prompts of `/v1/completions` or `/v1/chat/completions`.
pub fn prompted(reader: Reader<'_>, endpoint: Endpoint, body: &[u8]) -> Result<Prompted, ApiError> {
    let valid = match endpoint {
        Endpoint::Completion => {
            request::completion(&ApiRequest::parse(body, &[api::COMPLETION, api::SAMPLING])?, reader.limits)?
        }
        Endpoint::Chat => request::chat(&ApiRequest::parse(body, &[api::CHAT, api::SAMPLING])?, reader.limits)?,
    };
    reader.read(valid)
}

/// The text and ids of a chat's prompt, as JSON.
pub fn render(reader: Reader<'_>, body: &[u8]) -> Result<String, ApiError> {
    let Prompted { request, prompts } = prompted(reader, Endpoint::Chat, body)?;
    let prompt = &prompts[0];
    Ok(json!({
        "object": "chat.completion.render",
        "model": request.model,
        "prompt": prompt.text,
        "token_ids": &prompt.ids[..],
        "prompt_token_ids": &prompt.ids[..],
        "prompt_tokens": prompt.ids.len(),
        "max_tokens": prompt.max_tokens,
    })
    .to_string())
}

/// The ids of a prompt or of a conversation, as JSON.
pub fn tokenize(reader: Reader<'_>, body: &[u8]) -> Result<String, ApiError> {
    let fields = ApiRequest::parse(body, &[api::TOKENIZE])?;
    let limits = reader.limits;
    if fields.raw("model").is_some() {
        request::model(&fields, limits)?;
    }
    let chat = fields.raw("messages").is_some();
    let add_special = fields.boolean("add_special_tokens")?.unwrap_or(!chat);
    let ids = match chat {
        true => reader.encode(&reader.render(&request::conversation(&fields, limits)?)?, add_special, "messages")?,
        false => match input::prompts(&fields, limits)?.as_slice() {
            [PromptInput::Text(text)] => reader.encode(text, add_special, "prompt")?,
            _ => return Err(ApiError::wrong_type("prompt", "a string", "an array")),
        },
    };
    let mut answer = json!({"count": ids.len(), "max_model_len": limits.context, "tokens": ids});
    if fields.boolean("return_token_strs")? == Some(true) {
        answer["token_strs"] = ids.iter().map(|id| reader.tokenizer.piece(*id)).collect();
    }
    Ok(answer.to_string())
}

/// The text of ids, as JSON.
pub fn detokenize(reader: Reader<'_>, body: &[u8]) -> Result<String, ApiError> {
    let fields = ApiRequest::parse(body, &[api::TOKENIZE])?;
    if fields.raw("model").is_some() {
        request::model(&fields, reader.limits)?;
    }
    let ids = input::token_list(&fields, "tokens", reader.limits)?;
    Ok(json!({"prompt": reader.tokenizer.decode(&ids, false)}).to_string())
}
