//! A checked request becomes token ids: `ValidRequest` goes in, `Prompted` comes out.
//!
//! Called by `routes`, on a thread that may take its time. **Invariant:** every prompt fits the context together with the tokens that may
//! be generated from it.

use crate::error::ApiError;
use crate::input::{Input, PromptInput};
use crate::request::{Endpoint, Limits, MaxTokens, ValidRequest};
use crate::template::Template;
use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// A prompt, ready to be prefilled.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    pub ids: Arc<[u32]>,
    /// What `echo` repeats.
    pub text: String,
    /// Tokens that may follow.
    pub max_tokens: u32,
}

/// A request with its prompts.
#[derive(Clone, Debug)]
pub struct Prompted {
    pub request: ValidRequest,
    pub prompts: Vec<Prompt>,
}

/// What turns text into ids.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    pub tokenizer: &'a Tokenizer,
    pub template: Option<&'a Template>,
    pub limits: &'a Limits,
}

impl Reader<'_> {
    /// Tokenizes every prompt and checks its length.
    pub fn read(self, request: ValidRequest) -> Result<Prompted, ApiError> {
        let texts = match &request.input {
            Input::Prompts(prompts) => prompts.clone(),
            Input::Chat(chat) => vec![PromptInput::Text(self.render(chat)?)],
        };
        let prompts = texts.into_iter().map(|text| self.prompt(text, &request)).collect::<Result<_, _>>()?;
        Ok(Prompted { request, prompts })
    }

    /// The text of a conversation.
    pub fn render(self, chat: &crate::request::Chat) -> Result<String, ApiError> {
        match self.template {
            Some(template) => template.render(chat),
            None => Err(ApiError::field("messages", None, "this model has no chat template; use /v1/completions")),
        }
    }

    /// Ids of a text; a text that cannot fit the context is refused, most of the time before it is encoded.
    pub fn encode(self, text: &str, add_special: bool, param: &str) -> Result<Vec<u32>, ApiError> {
        let least = self.tokenizer.tokens_at_least(text);
        if least > self.limits.context as usize {
            return Err(self.too_long(param, &format!("at least {least}")));
        }
        let ids = self
            .tokenizer
            .encode(text, add_special)
            .map_err(|error| ApiError::field(param, None, format!("'{param}' cannot be tokenized: {error}")))?;
        match ids.iter().find(|id| **id >= self.limits.vocab) {
            Some(id) => {
                let message = format!("'{param}' has the token {id}, which this model's embedding has no row for");
                Err(ApiError::field(param, None, message))
            }
            None => Ok(ids),
        }
    }

    fn too_long(self, param: &str, tokens: &str) -> ApiError {
        let message = format!("'{param}' has {tokens} tokens; this model's context is {} tokens", self.limits.context);
        ApiError::too_long(param, message)
    }

    fn prompt(self, input: PromptInput, request: &ValidRequest) -> Result<Prompt, ApiError> {
        let param = match request.endpoint {
            Endpoint::Completion => "prompt",
            Endpoint::Chat => "messages",
        };
        let (ids, text) = match input {
            PromptInput::Text(text) => (self.encode(&text, request.add_special_tokens, param)?, text),
            PromptInput::Ids(ids) => {
                let text =
                    if request.echo { self.tokenizer.decode(&ids, request.skip_special_tokens) } else { String::new() };
                (ids, text)
            }
        };
        if ids.is_empty() {
            return Err(ApiError::field(param, None, format!("'{param}' has no tokens")));
        }
        let max_tokens = self.max_tokens(ids.len(), request.max_tokens, param)?;
        Ok(Prompt { ids: ids.into(), text, max_tokens })
    }

    fn max_tokens(self, prompt: usize, asked: MaxTokens, param: &str) -> Result<u32, ApiError> {
        let context = self.limits.context as usize;
        let Some(room) = context.checked_sub(prompt) else { return Err(self.too_long(param, &prompt.to_string())) };
        match asked {
            MaxTokens::Default(_) if room == 0 => {
                let message = format!("'{param}' has {prompt} tokens, all of this model's context of {context} tokens");
                Err(ApiError::too_long(param, message))
            }
            MaxTokens::Default(tokens) => Ok(tokens.min(room as u32)),
            MaxTokens::Asked { tokens, field } if tokens > room as u64 => {
                let message = format!(
                    "'{field}' is {tokens} and the prompt has {prompt} tokens; together they must not exceed this \
                     model's context of {context} tokens"
                );
                Err(ApiError::too_long(field, message))
            }
            MaxTokens::Asked { tokens, .. } => Ok(tokens as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{self, ApiRequest};
    use crate::request;

    fn read(body: &str) -> Result<Prompted, ApiError> {
        let tokenizer = Tokenizer::parse(include_bytes!("../../tests/models/shakespeare-dsv2/tokenizer.json")).unwrap();
        let limits =
            Limits { served: vec!["m".into()], vocab: 2048, context: 20, choices_max: 9, defaults: Default::default() };
        let reader = Reader { tokenizer: &tokenizer, template: None, limits: &limits };
        let fields = ApiRequest::parse(body.as_bytes(), &[api::COMPLETION, api::CHAT, api::SAMPLING])?;
        let valid = match fields.raw("messages") {
            Some(_) => request::chat(&fields, &limits)?,
            None => request::completion(&fields, &limits)?,
        };
        reader.read(valid)
    }
    fn ids(count: usize) -> String {
        vec!["100"; count].join(",")
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let cases = [
            (format!(r#"{{"model":"m","prompt":[{}],"max_tokens":1}}"#, ids(21)), "prompt"),
            (format!(r#"{{"model":"m","prompt":[{}],"max_tokens":20}}"#, ids(10)), "max_tokens"),
            (format!(r#"{{"model":"m","prompt":[{}]}}"#, ids(20)), "prompt"),
            (r#"{"model":"m","prompt":"hi","max_tokens":1000000000000}"#.to_owned(), "max_tokens"),
            (format!(r#"{{"model":"m","prompt":"{}"}}"#, "a b c ".repeat(500_000)), "prompt"),
        ];
        for (body, param) in cases {
            let error = read(&body).unwrap_err();
            assert_eq!((error.code, error.param.as_deref()), (Some("context_length_exceeded"), Some(param)));
            assert!(error.message.contains("20"), "{}", error.message);
        }
    }

    #[test]
    fn defaults_are_cut_to_what_fits() {
        assert_eq!(read(&format!(r#"{{"model":"m","prompt":[{}]}}"#, ids(15))).unwrap().prompts[0].max_tokens, 5);
        assert_eq!(read(r#"{"model":"m","prompt":"hi"}"#).unwrap().prompts[0].max_tokens, 16);
        let all = read(&format!(r#"{{"model":"m","prompt":[{}],"max_tokens":0}}"#, ids(20))).unwrap();
        assert_eq!(all.prompts[0].max_tokens, 0);
    }

    #[test]
    fn text_gets_bos_and_ids_are_used_as_given() {
        assert_eq!(&*read(r#"{"model":"m","prompt":"Hello"}"#).unwrap().prompts[0].ids, [0, 42, 422, 81]);
        assert_eq!(&*read(r#"{"model":"m","prompt":""}"#).unwrap().prompts[0].ids, [0]);
        assert_eq!(&*read(r#"{"model":"m","prompt":[42,422]}"#).unwrap().prompts[0].ids, [42, 422]);
        let bare = r#"{"model":"m","prompt":"","add_special_tokens":false}"#;
        assert_eq!(read(bare).unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn a_model_without_a_template_says_so() {
        let error = read(r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#).unwrap_err();
        assert!(error.message.contains("no chat template"));
    }
}
