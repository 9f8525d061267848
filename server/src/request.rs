//! A request whose every field was checked: `ApiRequest` goes in, `ValidRequest` or the client's error comes out.
//!
//! Called by `routes` before anything is tokenized or admitted. **Invariant:** past this point an invalid value cannot be written down;
//! what depends on the number of prompt tokens is checked by `prompt`.

use crate::api::{self, ApiRequest};
use crate::error::ApiError;
use crate::input::{Input, prompts};
use crate::json;
use crate::messages::{self, Message};
use crate::sampling::{sampling, stop};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_runtime::checkpoint::GenerationDefaults;

/// What requests are checked against; fixed at start.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Names this model answers to; the first is the model's own.
    pub served: Vec<String>,
    /// Rows of the embedding table: ids are below it.
    pub vocab: u32,
    /// Most tokens of one sequence, prompt and answer together: the number that is advertised, named in messages and enforced.
    pub context: u32,
    /// Most choices of one request.
    pub choices_max: usize,
    pub defaults: GenerationDefaults,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Completion,
    Chat,
}

/// A conversation and how to render it.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    pub messages: Vec<Message>,
    pub add_generation_prompt: bool,
    /// `chat_template_kwargs`.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
}

/// How many tokens may be generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// The client said so, in this field; more than fits is an error.
    Asked { tokens: u64, field: &'static str },
    /// At most this many, cut to what fits.
    Default(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streaming {
    pub include_usage: bool,
}

/// A checked request.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidRequest {
    pub endpoint: Endpoint,
    /// The served name that the client used.
    pub model: String,
    pub input: Input,
    /// Choices a prompt.
    pub n: u32,
    pub max_tokens: MaxTokens,
    /// Complete but for `max_tokens`, which `prompt` sets.
    pub sampling: SamplingSpec,
    /// The client gave no seed: each request draws its own.
    pub seeded: bool,
    pub stop: Vec<String>,
    pub include_stop: bool,
    pub echo: bool,
    pub add_special_tokens: bool,
    pub skip_special_tokens: bool,
    pub return_token_ids: bool,
    pub tokens_as_ids: bool,
    pub streaming: Option<Streaming>,
}

/// Choices of one prompt.
const N_MAX: i64 = 128;
/// Bytes of `chat_template_kwargs`.
const KWARGS_BYTES: usize = 64 << 10;
/// OpenAI's default of `/v1/completions`.
const COMPLETION_TOKENS: u32 = 16;

/// Checks a `/v1/completions` body.
pub fn completion(request: &ApiRequest<'_>, limits: &Limits) -> Result<ValidRequest, ApiError> {
    let model = model(request, limits)?;
    refuse_unless(request, "suffix", |raw| raw == "\"\"", "there is no infilling")?;
    if request.integer("best_of", 1..=i64::MAX)?.is_some_and(|best| best > 1) {
        return Err(ApiError::unsupported("best_of", "only 1 is; use n for several choices"));
    }
    let n = request.integer("n", 1..=N_MAX)?.unwrap_or(1) as u32;
    let prompts = prompts(request, limits)?;
    check_choices(prompts.len(), n, limits)?;
    let logprobs = request.integer("logprobs", 0..=5)?.map(|k| k as u32);
    let max_tokens = match request.integer("max_tokens", 0..=i64::MAX)? {
        Some(tokens) => MaxTokens::Asked { tokens: tokens as u64, field: "max_tokens" },
        None => MaxTokens::Default(COMPLETION_TOKENS),
    };
    let echo = request.boolean("echo")?.unwrap_or(false);
    let mut valid = common(request, limits, Endpoint::Completion, model, Input::Prompts(prompts), max_tokens)?;
    valid.n = n;
    valid.echo = echo;
    valid.sampling.logprobs = logprobs;
    Ok(valid)
}

/// Checks a `/v1/chat/completions` body.
pub fn chat(request: &ApiRequest<'_>, limits: &Limits) -> Result<ValidRequest, ApiError> {
    let model = model(request, limits)?;
    refuse_tools(request)?;
    refuse_unless(request, "modalities", |raw| json::elements(raw).all(|word| word == "\"text\""), "only text is")?;
    if let Some(format) = request.object_field("response_format")? {
        let text = json::members(format).any(|(key, value)| key == "type" && value == "\"text\"");
        if !text {
            return Err(ApiError::unsupported("response_format", "only {\"type\":\"text\"} is"));
        }
    }
    let n = request.integer("n", 1..=N_MAX)?.unwrap_or(1) as u32;
    check_choices(1, n, limits)?;
    let logprobs = request.boolean("logprobs")?.unwrap_or(false);
    let top = request.integer("top_logprobs", 0..=20)?.unwrap_or(0) as u32;
    if top > 0 && !logprobs {
        return Err(ApiError::field("top_logprobs", None, "'top_logprobs' needs 'logprobs': true"));
    }
    let max_tokens = chat_max_tokens(request, limits)?;
    let chat = conversation(request, limits)?;
    let mut valid = common(request, limits, Endpoint::Chat, model, Input::Chat(chat), max_tokens)?;
    valid.n = n;
    valid.sampling.logprobs = logprobs.then_some(top);
    Ok(valid)
}

/// The messages of a chat, and how to render them: `/v1/chat/completions`, its `/render`, and `/tokenize` with messages.
pub fn conversation(request: &ApiRequest<'_>, limits: &Limits) -> Result<Chat, ApiError> {
    if request.boolean("continue_final_message")? == Some(true) {
        return Err(ApiError::unsupported("continue_final_message", "send the text to /v1/completions instead"));
    }
    let kwargs = match request.object_field("chat_template_kwargs")? {
        None => serde_json::Map::new(),
        Some(raw) if raw.len() > KWARGS_BYTES => {
            let message = format!("'chat_template_kwargs' is larger than {KWARGS_BYTES} bytes");
            return Err(ApiError::field("chat_template_kwargs", None, message));
        }
        Some(raw) => serde_json::from_str(raw).map_err(|error| {
            ApiError::field("chat_template_kwargs", None, format!("'chat_template_kwargs' cannot be read: {error}"))
        })?,
    };
    Ok(Chat {
        add_generation_prompt: request.boolean("add_generation_prompt")?.unwrap_or(true),
        messages: messages::read(request, limits.context as usize)?,
        kwargs,
    })
}

/// The served name that a body asks for.
pub fn model(request: &ApiRequest<'_>, limits: &Limits) -> Result<String, ApiError> {
    match request.string("model")? {
        None => Err(ApiError::missing("model")),
        Some(name) if name.is_empty() => Err(ApiError::field("model", None, "'model' must not be empty")),
        Some(name) if limits.served.contains(&name) => Ok(name),
        Some(name) => Err(ApiError::model_not_found(&name)),
    }
}

fn check_choices(prompts: usize, n: u32, limits: &Limits) -> Result<(), ApiError> {
    let choices = prompts * n as usize;
    if choices <= limits.choices_max {
        return Ok(());
    }
    let param = if prompts > 1 { "prompt" } else { "n" };
    let message =
        format!("the request has {choices} choices; this server takes at most {} at once", limits.choices_max);
    Err(ApiError::field(param, None, message))
}

fn chat_max_tokens(request: &ApiRequest<'_>, limits: &Limits) -> Result<MaxTokens, ApiError> {
    let old = request.integer("max_tokens", 1..=i64::MAX)?;
    let new = request.integer("max_completion_tokens", 1..=i64::MAX)?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => {
            let message = format!("'max_tokens' is {old} and 'max_completion_tokens' is {new}; send one of them");
            Err(ApiError::field("max_tokens", None, message))
        }
        (_, Some(tokens)) => Ok(MaxTokens::Asked { tokens: tokens as u64, field: "max_completion_tokens" }),
        (Some(tokens), None) => Ok(MaxTokens::Asked { tokens: tokens as u64, field: "max_tokens" }),
        (None, None) => Ok(MaxTokens::Default(limits.defaults.max_new_tokens.unwrap_or(u32::MAX))),
    }
}

/// What both endpoints share.
fn common(
    request: &ApiRequest<'_>,
    limits: &Limits,
    endpoint: Endpoint,
    model: String,
    input: Input,
    max_tokens: MaxTokens,
) -> Result<ValidRequest, ApiError> {
    refuse_unless(request, "bad_words", |raw| raw == "[]", "use logit_bias")?;
    refuse_unless(request, "priority", |raw| raw == "0", "requests are served in order of arrival")?;
    request.string("user")?;
    let streaming = streaming(request)?;
    let seed = request.integer("seed", i64::MIN..=i64::MAX)?;
    Ok(ValidRequest {
        endpoint,
        model,
        input,
        n: 1,
        max_tokens,
        sampling: sampling(request, limits, max_tokens, seed)?,
        seeded: seed.is_some(),
        stop: stop(request)?,
        include_stop: request.boolean("include_stop_str_in_output")?.unwrap_or(false),
        echo: false,
        add_special_tokens: request.boolean("add_special_tokens")?.unwrap_or(endpoint == Endpoint::Completion),
        skip_special_tokens: request.boolean("skip_special_tokens")?.unwrap_or(true),
        return_token_ids: request.boolean("return_token_ids")?.unwrap_or(false),
        tokens_as_ids: request.boolean("return_tokens_as_token_ids")?.unwrap_or(false),
        streaming,
    })
}

fn streaming(request: &ApiRequest<'_>) -> Result<Option<Streaming>, ApiError> {
    let stream = request.boolean("stream")?.unwrap_or(false);
    let Some(options) = request.object_field("stream_options")? else {
        return Ok(stream.then_some(Streaming { include_usage: false }));
    };
    if !stream {
        return Err(ApiError::field("stream_options", None, "'stream_options' needs 'stream': true"));
    }
    let known: api::Known = &[("include_usage", api::Use::Read), ("continuous_usage_stats", api::Use::Read)];
    let options = ApiRequest::object(options, "stream_options.".into(), &[known])?;
    if options.boolean("continuous_usage_stats")? == Some(true) {
        return Err(ApiError::unsupported("stream_options.continuous_usage_stats", "usage comes once, at the end"));
    }
    Ok(Some(Streaming { include_usage: options.boolean("include_usage")?.unwrap_or(false) }))
}

/// Tools are refused; an empty list and the choices that use none are not.
fn refuse_tools(request: &ApiRequest<'_>) -> Result<(), ApiError> {
    if request.array("tools")?.is_some_and(|tools| json::elements(tools).next().is_some()) {
        return Err(ApiError::unsupported("tools", "this server does not call tools"));
    }
    refuse_unless(
        request,
        "tool_choice",
        |raw| matches!(raw, "\"none\"" | "\"auto\""),
        "this server does not call tools",
    )
}

/// Refuses a field unless its raw value means the same as leaving it out.
fn refuse_unless(
    request: &ApiRequest<'_>,
    name: &str,
    harmless: impl FnOnce(&str) -> bool,
    why: &str,
) -> Result<(), ApiError> {
    match request.raw(name) {
        Some(raw) if !harmless(raw) => Err(ApiError::unsupported(name, why)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::PromptInput;

    fn limits() -> Limits {
        Limits {
            served: vec!["m".into(), "org/other".into()],
            vocab: 2048,
            context: 64,
            choices_max: 20,
            defaults: GenerationDefaults::default(),
        }
    }
    fn complete(fragment: &str) -> Result<ValidRequest, ApiError> {
        let body = format!(r#"{{"model":"m","prompt":"hi"{}{fragment}}}"#, if fragment.is_empty() { "" } else { "," });
        completion(&ApiRequest::parse(body.as_bytes(), &[api::COMPLETION, api::SAMPLING]).unwrap(), &limits())
    }
    fn talk(fragment: &str) -> Result<ValidRequest, ApiError> {
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}]{}{fragment}}}"#,
            if fragment.is_empty() { "" } else { "," }
        );
        chat(&ApiRequest::parse(body.as_bytes(), &[api::CHAT, api::SAMPLING])?, &limits())
    }
    /// Each fragment is refused with this parameter and code.
    fn refused(check: impl Fn(&str) -> Result<ValidRequest, ApiError>, cases: &[(&str, &str, Option<&str>)]) {
        for (fragment, param, code) in cases {
            let error = check(fragment).expect_err(fragment);
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(*param)), "{fragment}");
            if code.is_some() {
                assert_eq!(error.code, *code, "{fragment}");
            }
        }
    }

    #[test]
    fn defaults_are_openais() {
        let valid = complete("").unwrap();
        assert_eq!(valid.max_tokens, MaxTokens::Default(16));
        assert_eq!((valid.sampling.temperature, valid.sampling.top_p, valid.n), (1.0, 1.0, 1));
        assert_eq!(talk("").unwrap().max_tokens, MaxTokens::Default(u32::MAX));
    }

    #[test]
    fn completion_limits_hold() {
        refused(
            complete,
            &[
                (r#""max_tokens":-1"#, "max_tokens", Some("integer_below_min_value")),
                (r#""max_tokens":"16""#, "max_tokens", Some("invalid_type")),
                (r#""max_tokens":1.5"#, "max_tokens", Some("invalid_type")),
                (r#""max_tokens":true"#, "max_tokens", Some("invalid_type")),
                (r#""max_tokens":[16]"#, "max_tokens", Some("invalid_type")),
                (r#""logprobs":6"#, "logprobs", Some("integer_above_max_value")),
                (r#""logprobs":-1"#, "logprobs", Some("integer_below_min_value")),
                (r#""logprobs":true"#, "logprobs", Some("invalid_type")),
                (r#""suffix":"x""#, "suffix", Some("unsupported_parameter")),
                (r#""best_of":4"#, "best_of", Some("unsupported_parameter")),
                (r#""stop":["a","b","c","d","e"]"#, "stop", Some("array_above_max_length")),
                (r#""stop":"""#, "stop", None),
                (r#""stop":[""]"#, "stop", None),
                (r#""stop":[1]"#, "stop", Some("invalid_type")),
                (r#""stop":{}"#, "stop", Some("invalid_type")),
                (r#""stop":"\ud83d""#, "stop", None),
                (&format!(r#""stop":["a","{}"]"#, "é".repeat(513)), "stop", Some("string_above_max_length")),
                (r#""min_tokens":11,"max_tokens":10"#, "min_tokens", Some("integer_above_max_value")),
                (r#""min_tokens":-1"#, "min_tokens", Some("integer_below_min_value")),
                (r#""min_tokens":"5""#, "min_tokens", Some("invalid_type")),
                (r#""top_k":-2"#, "top_k", Some("integer_below_min_value")),
                (r#""temperature":2.01"#, "temperature", None),
                (r#""temperature":-0.1"#, "temperature", None),
                (r#""temperature":1e400"#, "temperature", None),
                (r#""temperature":1e39"#, "temperature", None),
                (r#""top_p":1.01"#, "top_p", None),
                (r#""frequency_penalty":1e39"#, "frequency_penalty", None),
                (r#""frequency_penalty":2.1"#, "frequency_penalty", None),
                (r#""presence_penalty":-2.1"#, "presence_penalty", None),
                (r#""repetition_penalty":0"#, "repetition_penalty", None),
                (r#""repetition_penalty":-1"#, "repetition_penalty", None),
                (r#""repetition_penalty":1e39"#, "repetition_penalty", None),
                (r#""min_p":1.1"#, "min_p", None),
                (r#""logit_bias":{"2048":1}"#, "logit_bias", None),
                (r#""logit_bias":{"-1":1}"#, "logit_bias", None),
                (r#""logit_bias":{"abc":1}"#, "logit_bias", None),
                (r#""logit_bias":{"1":101}"#, "logit_bias", None),
                (r#""logit_bias":{"1":"x"}"#, "logit_bias", None),
                (r#""logit_bias":[]"#, "logit_bias", Some("invalid_type")),
                (r#""seed":9223372036854775808"#, "seed", None),
                (r#""seed":1.5"#, "seed", None),
                (r#""seed":"a""#, "seed", None),
                (r#""stream_options":{"include_usage":true}"#, "stream_options", None),
                (r#""stream":true,"stream_options":7"#, "stream_options", Some("invalid_type")),
                (
                    r#""stream":true,"stream_options":{"include_usage":"yes"}"#,
                    "stream_options.include_usage",
                    Some("invalid_type"),
                ),
                (r#""n":0"#, "n", Some("integer_below_min_value")),
                (r#""n":129"#, "n", Some("integer_above_max_value")),
                (r#""n":21"#, "n", None),
                (r#""stop_token_ids":[2048]"#, "stop_token_ids", Some("integer_above_max_value")),
                (r#""model":"""#, "model", None),
                (r#""model":7"#, "model", Some("invalid_type")),
            ],
        );
        for accepted in [
            r#""best_of":1"#,
            r#""suffix":null"#,
            r#""logit_bias":{"1":100,"2":-100}"#,
            r#""seed":-9223372036854775808"#,
            r#""top_k":9999999"#,
            r#""temperature":5e-324"#,
            r#""stop":[]"#,
            r#""max_tokens":0"#,
            r#""prompt":"a\u0000b""#,
        ] {
            complete(accepted).expect(accepted);
        }
        assert_eq!(complete(r#""model":"nope""#).unwrap_err().status.as_u16(), 404);
    }

    #[test]
    fn chat_limits_hold() {
        refused(
            talk,
            &[
                (r#""max_tokens":0"#, "max_tokens", Some("integer_below_min_value")),
                (r#""max_completion_tokens":0"#, "max_completion_tokens", Some("integer_below_min_value")),
                (r#""max_tokens":3,"max_completion_tokens":4"#, "max_tokens", None),
                (r#""logprobs":1"#, "logprobs", Some("invalid_type")),
                (r#""top_logprobs":2"#, "top_logprobs", None),
                (r#""logprobs":true,"top_logprobs":21"#, "top_logprobs", Some("integer_above_max_value")),
                (r#""tools":[{}]"#, "tools", Some("unsupported_parameter")),
                (r#""tool_choice":"required""#, "tool_choice", Some("unsupported_parameter")),
                (r#""response_format":{"type":"json_object"}"#, "response_format", Some("unsupported_parameter")),
            ],
        );
        let nulls = r#""temperature":null,"top_p":null,"n":null,"stop":null,"stream":null,"stream_options":null,"logprobs":null,
            "top_logprobs":null,"logit_bias":null,"seed":null,"user":null,"tools":null,"response_format":null"#;
        assert_eq!(talk(nulls).unwrap(), talk("").unwrap());
        talk(r#""max_tokens":3,"max_completion_tokens":3,"tool_choice":"none","response_format":{"type":"text"}"#)
            .unwrap();
    }

    #[test]
    fn prompts_come_in_four_forms() {
        let long: Vec<String> = (0..65).map(|id| id.to_string()).collect();
        let prompt = |raw: &str| complete(&format!(r#""prompt":{raw}"#));
        let Input::Prompts(found) = prompt(r#"["a","b"]"#).unwrap().input else { panic!() };
        assert_eq!(found, [PromptInput::Text("a".into()), PromptInput::Text("b".into())]);
        let Input::Prompts(found) = prompt("[[1, 2],[ 2047 ]]").unwrap().input else { panic!() };
        assert_eq!(found, [PromptInput::Ids(vec![1, 2]), PromptInput::Ids(vec![2047])]);
        for raw in [r#"[1,"a"]"#, "[1.5]", "[true]", r#"[[1],"a"]"#, r#"{"a":1}"#, "7", "[[1],[[2]]]"] {
            assert_eq!(prompt(raw).unwrap_err().code, Some("invalid_type"), "{raw}");
        }
        for raw in ["[]", "[[]]", "[[1,2],[]]", "null"] {
            assert_eq!(prompt(raw).unwrap_err().param.as_deref(), Some("prompt"), "{raw}");
        }
        for raw in ["[-1]", "[2048]", "[2147483648]", "[5279552648203111001]", "[9223372036854775808]"] {
            let error = prompt(raw).unwrap_err();
            assert!(error.message.contains("0…2047") && error.param.as_deref() == Some("prompt"), "{raw}: {error:?}");
        }
        let error = prompt(&format!("[{}]", long.join(","))).unwrap_err();
        assert_eq!(error.code, Some("context_length_exceeded"));
    }

    #[test]
    fn top_p_zero_is_greedy_and_seeds_stay_distinct() {
        assert!(complete(r#""temperature":1,"top_p":0"#).unwrap().sampling.is_greedy());
        let seed = |raw: &str| complete(&format!(r#""seed":{raw}"#)).unwrap().sampling.seed;
        assert_ne!(seed("-1"), seed("9223372036854775807"));
        assert_eq!(seed("-1"), u64::MAX);
    }
}
