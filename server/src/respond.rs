//! Parts of an answer as the JSON of both endpoints: whole, or one chunk at a time.
//!
//! Called by `routes` (whole) and `sse` (chunks). **Invariant:** every number is finite JSON: a log-probability that is not finite is
//! −9999.0. Log-probabilities are of the model's raw distribution, before temperature, bias and penalties, in both endpoints.

use crate::answer::{Finished, Part, Told, Usage};
use crate::request::Endpoint;
use crate::tokenizer::Tokenizer;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::sync::Arc;

/// What is the same in every chunk of a request.
pub struct Head {
    pub endpoint: Endpoint,
    /// `cmpl-…` or `chatcmpl-…`.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
    pub tokenizer: Arc<Tokenizer>,
    /// Log-probabilities were asked for; for chat with how many alternatives.
    pub logprobs: Option<u32>,
    pub token_ids: bool,
    pub tokens_as_ids: bool,
    /// Chunks carry `usage`.
    pub include_usage: bool,
}

#[derive(Serialize)]
struct Envelope<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<ChoiceJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageJson>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct ChoiceJson<'a> {
    index: u32,
    #[serde(flatten)]
    content: Content<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content<'a> {
    Text(&'a str),
    Message(Message<'a>),
    Delta(Delta<'a>),
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Logprobs {
    Completion {
        tokens: Vec<String>,
        token_logprobs: Vec<Option<f32>>,
        top_logprobs: Vec<Option<Alternatives>>,
        text_offset: Vec<usize>,
    },
    Chat {
        content: Vec<ChatToken>,
        refusal: Option<()>,
    },
}

/// An object of token → log-probability, in order.
struct Alternatives(Vec<(String, f32)>);

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}

#[derive(Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: Named,
    top_logprobs: Vec<Named>,
}

#[derive(Serialize)]
struct Named {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(Serialize)]
struct UsageJson {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: Details,
}

#[derive(Serialize)]
struct Details {
    cached_tokens: u64,
}

/// A choice that was collected whole.
#[derive(Default)]
pub struct Whole {
    pub text: String,
    pub tokens: Vec<Told>,
    pub finished: Option<Finished>,
}

impl Whole {
    pub fn add(&mut self, part: Part) {
        self.text.push_str(&part.text);
        self.tokens.extend(part.tokens);
        self.finished = self.finished.or(part.finish);
    }
}

impl Head {
    /// The answer of a request that does not stream; `prompts` gives the prompt of each choice.
    pub fn whole<'a>(&'a self, wholes: &'a [Whole], usage: Usage, prompt: impl Fn(u32) -> &'a [u32]) -> String {
        let choice = |(index, whole): (usize, &'a Whole)| {
            let index = index as u32;
            let chat = self.endpoint == Endpoint::Chat;
            ChoiceJson {
                index,
                content: match chat {
                    true => Content::Message(Message { role: "assistant", content: &whole.text, refusal: None }),
                    false => Content::Text(&whole.text),
                },
                logprobs: self.logprobs(&whole.tokens),
                finish_reason: whole.finished.map(Finished::name),
                token_ids: self.ids(&whole.tokens),
                prompt_token_ids: (self.token_ids && !chat).then(|| prompt(index)),
            }
        };
        let prompt_token_ids = (self.token_ids && self.endpoint == Endpoint::Chat).then(|| prompt(0));
        let envelope = Envelope {
            object: match self.endpoint {
                Endpoint::Chat => "chat.completion",
                Endpoint::Completion => "text_completion",
            },
            usage: Some(Some(usage.into())),
            prompt_token_ids,
            ..self.envelope(wholes.iter().enumerate().map(choice).collect())
        };
        json(&envelope)
    }

    /// The first chunk of a chat choice.
    pub fn role(&self, index: u32) -> String {
        self.chunk(ChoiceJson {
            index,
            content: Content::Delta(Delta { role: Some("assistant"), content: Some("") }),
            logprobs: None,
            finish_reason: None,
            token_ids: None,
            prompt_token_ids: None,
        })
    }

    /// One part as a chunk. `prompt` is given with the first part of a completion choice whose ids were asked for.
    pub fn part(&self, part: &Part, prompt: Option<&[u32]>) -> String {
        let content = match (self.endpoint, part.finish) {
            (Endpoint::Completion, _) => Content::Text(&part.text),
            (Endpoint::Chat, Some(_)) => Content::Delta(Delta { role: None, content: None }),
            (Endpoint::Chat, None) => Content::Delta(Delta { role: None, content: Some(&part.text) }),
        };
        self.chunk(ChoiceJson {
            index: part.index,
            content,
            logprobs: if part.tokens.is_empty() { None } else { self.logprobs(&part.tokens) },
            finish_reason: part.finish.map(Finished::name),
            token_ids: if part.finish.is_some() { None } else { self.ids(&part.tokens) },
            prompt_token_ids: prompt,
        })
    }

    /// The chunk without choices that ends a stream with `include_usage`.
    pub fn usage(&self, usage: Usage) -> String {
        json(&Envelope { usage: Some(Some(usage.into())), ..self.envelope(Vec::new()) })
    }

    fn chunk(&self, choice: ChoiceJson<'_>) -> String {
        json(&self.envelope(vec![choice]))
    }

    fn envelope<'a>(&'a self, choices: Vec<ChoiceJson<'a>>) -> Envelope<'a> {
        Envelope {
            id: &self.id,
            object: match self.endpoint {
                Endpoint::Chat => "chat.completion.chunk",
                Endpoint::Completion => "text_completion",
            },
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            usage: self.include_usage.then_some(None),
            prompt_token_ids: None,
        }
    }

    fn ids(&self, tokens: &[Told]) -> Option<Vec<u32>> {
        self.token_ids.then(|| tokens.iter().map(|token| token.id).collect())
    }

    fn logprobs(&self, tokens: &[Told]) -> Option<Logprobs> {
        let most = self.logprobs?;
        Some(match self.endpoint {
            Endpoint::Completion => Logprobs::Completion {
                tokens: tokens.iter().map(|token| self.name(token.id)).collect(),
                token_logprobs: tokens.iter().map(|token| token.logprob.map(finite)).collect(),
                top_logprobs: tokens.iter().map(|token| self.alternatives(token, most)).collect(),
                text_offset: tokens.iter().map(|token| token.offset).collect(),
            },
            Endpoint::Chat => Logprobs::Chat {
                content: tokens.iter().map(|token| self.chat_token(token, most)).collect(),
                refusal: None,
            },
        })
    }

    /// The best tokens, and the chosen one where it is not among them.
    fn alternatives(&self, token: &Told, most: u32) -> Option<Alternatives> {
        let chosen = finite(token.logprob?);
        let mut named: Vec<(String, f32)> =
            token.top.iter().take(most as usize).map(|(id, logprob)| (self.name(*id), finite(*logprob))).collect();
        if most > 0 && !token.top.iter().take(most as usize).any(|(id, _)| *id == token.id) {
            named.push((self.name(token.id), chosen));
        }
        Some(Alternatives(named))
    }

    fn chat_token(&self, token: &Told, most: u32) -> ChatToken {
        let named = |id: u32, logprob: f32, hidden: bool| Named {
            token: self.name(id),
            logprob: finite(logprob),
            bytes: if hidden { Vec::new() } else { self.tokenizer.alone(id) },
        };
        ChatToken {
            token: named(token.id, token.logprob.unwrap_or(0.0), token.hidden),
            top_logprobs: token
                .top
                .iter()
                .take(most as usize)
                .map(|(id, logprob)| named(*id, *logprob, false))
                .collect(),
        }
    }

    /// A token's name: its text, `bytes:\x…` where it is a part of a character, `token_id:…` where it has neither or ids were asked for.
    fn name(&self, id: u32) -> String {
        let bytes = self.tokenizer.alone(id);
        if self.tokens_as_ids || bytes.is_empty() {
            return format!("token_id:{id}");
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => {
                let hex: String = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}")).collect();
                format!("bytes:{hex}")
            }
        }
    }
}

impl From<Usage> for UsageJson {
    fn from(usage: Usage) -> Self {
        UsageJson {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: Details { cached_tokens: usage.cached_tokens },
        }
    }
}

/// A log-probability that JSON can hold.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("strings, numbers and lists serialize")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn head(endpoint: Endpoint, logprobs: Option<u32>) -> Head {
        let tokenizer = include_bytes!("../../tests/models/shakespeare-dsv2/tokenizer.json");
        Head {
            endpoint,
            id: "cmpl-1".into(),
            created: 7,
            model: "m".into(),
            fingerprint: "fp_0".into(),
            tokenizer: Arc::new(Tokenizer::parse(tokenizer).unwrap()),
            logprobs,
            token_ids: false,
            tokens_as_ids: false,
            include_usage: false,
        }
    }
    fn told(id: u32, logprob: f32, top: &[(u32, f32)]) -> Told {
        Told { id, logprob: Some(logprob), top: top.to_vec(), offset: 0, hidden: id < 3 }
    }
    fn parse(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_whole_chat_has_the_published_shape() {
        let whole = Whole { text: "hi".into(), tokens: vec![], finished: Some(Finished::Stop) };
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 0 };
        let value = parse(&head(Endpoint::Chat, None).whole(&[whole], usage, |_| &[]));
        assert_eq!(value["object"], "chat.completion");
        let message = serde_json::json!({"role": "assistant", "content": "hi", "refusal": null});
        assert_eq!(value["choices"][0]["message"], message);
        assert!(value["choices"][0]["logprobs"].is_null());
        assert_eq!(value["usage"]["total_tokens"], 5);
        assert_eq!(value["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    }

    #[test]
    fn completion_logprobs_have_equal_lengths_and_finite_numbers() {
        let head = head(Endpoint::Completion, Some(2));
        let tokens = vec![
            Told { id: 0, logprob: None, top: vec![], offset: 0, hidden: true },
            told(42, -0.5, &[(42, -0.5), (81, -1.0), (54, -2.0)]),
            told(16, f32::NEG_INFINITY, &[(42, -0.5), (81, f32::NAN)]),
        ];
        let value =
            parse(&head.whole(&[Whole { text: String::new(), tokens, finished: None }], Usage::default(), |_| &[]));
        let logprobs = &value["choices"][0]["logprobs"];
        for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(logprobs[key].as_array().unwrap().len(), 3, "{key}");
        }
        assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
        assert_eq!(logprobs["token_logprobs"][2], -9999.0);
        let lengths: Vec<usize> = (1..3).map(|i| logprobs["top_logprobs"][i].as_object().unwrap().len()).collect();
        assert_eq!(lengths, [2, 3]);
    }

    #[test]
    fn parts_of_characters_keep_distinct_names() {
        let head = head(Endpoint::Completion, Some(0));
        let ids = head.tokenizer.encode("🙂", false).unwrap();
        let names: Vec<String> = ids.iter().map(|id| head.name(*id)).collect();
        assert_eq!(names[0], "bytes:\\xf0");
        assert_eq!(head.name(5000), "token_id:5000");
    }

    #[test]
    fn chat_bytes_join_to_the_text() {
        let head = head(Endpoint::Chat, Some(0));
        let ids = head.tokenizer.encode("é🙂 x", false).unwrap();
        let mut tokens: Vec<Told> = ids.iter().map(|id| told(*id, -1.0, &[])).collect();
        tokens.push(told(1, -1.0, &[]));
        let value =
            parse(&head.whole(&[Whole { text: "é🙂 x".into(), tokens, finished: None }], Usage::default(), |_| &[]));
        let content = value["choices"][0]["logprobs"]["content"].as_array().unwrap();
        let bytes: Vec<u8> = content
            .iter()
            .flat_map(|token| token["bytes"].as_array().unwrap())
            .map(|byte| byte.as_u64().unwrap() as u8)
            .collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), "é🙂 x");
        assert_eq!(content[0]["top_logprobs"], serde_json::json!([]));
    }

    #[test]
    fn chunks_end_with_an_empty_delta() {
        let head = head(Endpoint::Chat, None);
        let last = Part { index: 2, finish: Some(Finished::Length), ..Part::default() };
        let value = parse(&head.part(&last, None));
        assert_eq!(value["choices"][0]["delta"], serde_json::json!({}));
        assert_eq!(value["choices"][0]["finish_reason"], "length");
        assert!(value.get("usage").is_none());
        let mut head = head;
        head.include_usage = true;
        assert!(parse(&head.part(&last, None))["usage"].is_null());
        let usage = parse(&head.usage(Usage::default()));
        assert_eq!(usage["choices"], serde_json::json!([]));
        assert!(usage["usage"].is_object());
    }
}
