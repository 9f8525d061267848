//! The checkpoint's chat template: messages to the text that the model was trained on.
//!
//! Loaded once at start from `chat_template.jinja`, or else from `tokenizer_config.json`, with the environment that Hugging Face gives its
//! templates. **Invariant:** a template that exists has been parsed; what goes wrong while it renders is the client's 400, and that message
//! never holds the conversation.

use crate::error::ApiError;
use crate::request::Chat;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value, context};
use serde::Serialize;
use serde_json::ser::Formatter;
use std::collections::BTreeMap;
use std::io;

/// A template file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {reason}")]
pub struct TemplateError {
    pub file: &'static str,
    pub reason: String,
}

pub struct Template {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and the other named special tokens.
    special: BTreeMap<String, String>,
}

const JINJA: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
/// The template's name inside the environment; without a suffix, so nothing is escaped for HTML.
const NAME: &str = "chat_template";

/// What a template said through `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl Template {
    /// The template of a checkpoint, or None if it has none. The `.jinja` file wins.
    pub fn load(jinja: Option<&[u8]>, config: Option<&[u8]>) -> Result<Option<Template>, TemplateError> {
        let config: serde_json::Value = match config {
            None => serde_json::Value::Null,
            Some(bytes) => serde_json::from_slice(bytes)
                .map_err(|error| TemplateError { file: CONFIG, reason: format!("not JSON: {error}") })?,
        };
        let (file, source) = match jinja {
            Some(bytes) => {
                let text = std::str::from_utf8(bytes)
                    .map_err(|_| TemplateError { file: JINJA, reason: "not UTF-8 text".into() })?;
                (JINJA, text.to_owned())
            }
            None => match in_config(&config)? {
                Some(source) => (CONFIG, source),
                None => return Ok(None),
            },
        };
        let mut environment = environment();
        environment.add_template_owned(NAME, without_generation_marks(&source)).map_err(|error| {
            let line = error.line().map_or(String::new(), |line| format!(" in line {line}"));
            let reason = error.detail().unwrap_or("syntax error").to_owned();
            TemplateError { file, reason: format!("the chat template does not parse{line}: {reason}") }
        })?;
        Ok(Some(Template { environment, special: special_tokens(&config) }))
    }

    /// The text of a conversation.
    pub fn render(&self, chat: &Chat) -> Result<String, ApiError> {
        let own = context! {
            messages => Value::from(Serde(&chat.messages)),
            add_generation_prompt => chat.add_generation_prompt,
            tools => (),
            documents => (),
        };
        let context =
            minijinja::value::merge_maps([own, Value::from(Serde(&self.special)), Value::from(Serde(&chat.kwargs))]);
        let template = self.environment.get_template(NAME).expect("load added it");
        template.render(context).map_err(|error| refused(&error))
    }
}

/// The client's error for a template that failed: its own words if it raised, else the kind of the failure and the line.
fn refused(error: &minijinja::Error) -> ApiError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref::<Raised>() {
            return ApiError::field("messages", None, format!("the chat template refuses these messages: {message}"));
        }
        source = inner.source();
    }
    let line = error.line().map_or(String::new(), |line| format!(" in line {line}"));
    ApiError::field("messages", None, format!("the chat template cannot render these messages{line}: {}", error.kind()))
}

/// `chat_template` of tokenizer_config.json: text, or a list of named ones of which `default` counts.
fn in_config(config: &serde_json::Value) -> Result<Option<String>, TemplateError> {
    let refuse = |reason: &str| TemplateError { file: CONFIG, reason: format!("chat_template: {reason}") };
    match config.get("chat_template") {
        None | Some(serde_json::Value::Null) => Ok(None),
        Some(serde_json::Value::String(text)) => Ok(Some(text.clone())),
        Some(serde_json::Value::Array(list)) => {
            let default = list.iter().find(|entry| entry["name"] == "default");
            match default.and_then(|entry| entry["template"].as_str()) {
                Some(text) => Ok(Some(text.to_owned())),
                None => Err(refuse("no entry named 'default' in the list")),
            }
        }
        Some(_) => Err(refuse("must be text or a list of named templates")),
    }
}

/// The named special tokens: text, or objects with `content`.
fn special_tokens(config: &serde_json::Value) -> BTreeMap<String, String> {
    const NAMES: [&str; 7] =
        ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let text = |value: &serde_json::Value| {
        value.as_str().or_else(|| value.get("content").and_then(|content| content.as_str())).map(str::to_owned)
    };
    NAMES.into_iter().filter_map(|name| Some((name.to_owned(), text(config.get(name)?)?))).collect()
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters do not collide"));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, minijinja::Error> {
        jiff::fmt::strtime::format(&format, &jiff::ZonedDateTime::now())
            .map_err(|_| minijinja::Error::new(ErrorKind::InvalidOperation, "strftime_now: unknown format"))
    });
    environment.add_filter("tojson", tojson);
    environment
}

/// `{% generation %}` marks which text an assistant wrote, for training; here it is a block that is always taken.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open + 2..].find("%}").map(|at| open + 2 + at) else { break };
        let body = &rest[open + 2..close];
        let word = body.trim_matches(['-', '+']).trim();
        out.push_str(&rest[..open + 2]);
        match word {
            "generation" => out.push_str(&body.replace("generation", "if true")),
            "endgeneration" => out.push_str(&body.replace("endgeneration", "endif")),
            _ => out.push_str(body),
        }
        out.push_str("%}");
        rest = &rest[close + 2..];
    }
    out + rest
}

/// Python's `json.dumps(value, ensure_ascii=False, …)`.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, minijinja::Error> {
    let refuse = |reason: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {reason}"));
    let indent: Option<usize> = kwargs.get("indent")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    kwargs.assert_all_used()?;
    let mut json = serde_json::to_value(value).map_err(|error| refuse(error.to_string()))?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(refuse("separators must be a pair".into())),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut out = Vec::new();
    let python = Python { item, key, indent, depth: 0, empty: true };
    json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, python))
        .map_err(|error| refuse(error.to_string()))?;
    Ok(Value::from(String::from_utf8(out).expect("serde_json writes UTF-8")))
}

/// Writes JSON the way Python's `json` module does.
struct Python {
    item: String,
    key: String,
    indent: Option<usize>,
    depth: usize,
    /// Nothing was written in the innermost container yet.
    empty: bool,
}

impl Python {
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        writer.write_all(bracket)
    }
    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.line(writer)?;
        }
        self.empty = false;
        writer.write_all(bracket)
    }
    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.empty = false;
        self.line(writer)
    }
    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(writer, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }
    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }
    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }
    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }
    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }
    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let text = format!("{value:?}");
        match text.split_once('e') {
            // Python writes a sign and two digits: 1e+16, 1e-07.
            Some((digits, exponent)) => {
                let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
                write!(writer, "{digits}e{sign}{exponent:0>2}")
            }
            None => writer.write_all(text.as_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{Message, Role};

    fn chat(turns: &[(Role, &str)]) -> Chat {
        Chat {
            messages: turns
                .iter()
                .map(|(role, content)| Message {
                    role: *role,
                    content: content.to_string(),
                    name: None,
                    tool_call_id: None,
                    tool_calls: None,
                    reasoning_content: None,
                })
                .collect(),
            add_generation_prompt: true,
            kwargs: serde_json::Map::new(),
        }
    }
    fn render(source: &str, chat: &Chat) -> String {
        Template::load(Some(source.as_bytes()), None).unwrap().unwrap().render(chat).unwrap()
    }

    #[test]
    fn a_block_without_room_for_a_word_is_an_error_and_no_panic() {
        for source in ["{%}", "{%}]{% if x %}", "{% generation %}{%}", "x{%"] {
            assert!(Template::load(Some(source.as_bytes()), None).is_err(), "{source}");
        }
    }

    #[test]
    fn the_oracles_of_hugging_face_are_met() {
        let oracle: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/oracle/chat_template.json")).unwrap();
        let cases = oracle.as_array().unwrap();
        assert!(cases.len() >= 20);
        for case in cases {
            let folder = format!("{}/../tests/models/{}", env!("CARGO_MANIFEST_DIR"), case["model"].as_str().unwrap());
            let read = |name: &str| std::fs::read(format!("{folder}/{name}")).unwrap();
            let template = Template::load(None, Some(&read("tokenizer_config.json"))).unwrap().unwrap();
            let tokenizer = crate::tokenizer::Tokenizer::parse(&read("tokenizer.json")).unwrap();
            let body = serde_json::json!({
                "messages": case["messages"], "add_generation_prompt": case["add_generation_prompt"],
            })
            .to_string();
            let request = crate::api::ApiRequest::parse(body.as_bytes(), &[crate::api::CHAT]).unwrap();
            let limits = crate::request::Limits {
                served: vec![],
                vocab: 2048,
                context: 2048,
                choices_max: 1,
                defaults: Default::default(),
            };
            let text = template.render(&crate::request::conversation(&request, &limits).unwrap()).unwrap();
            assert_eq!(text, case["text"].as_str().unwrap());
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(&text, false).unwrap(), ids);
            let plain: Vec<u32> = serde_json::from_value(case["plain_ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(&text, true).unwrap(), plain);
        }
    }

    #[test]
    fn blocks_are_trimmed_as_jinja_does() {
        let source =
            "{% for m in messages %}\n    {% if loop.first %}\n[{{ m.content }}]\n    {% endif %}\n{% endfor %}\nend\n";
        assert_eq!(render(source, &chat(&[(Role::User, " x ")])), "[ x ]\nend");
    }

    #[test]
    fn python_methods_slices_and_names_work() {
        let source = "{%- set ns = namespace(n=0) -%}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ m.content.strip() }}|{% endfor %}\
            {{ ns.n }} {{ messages[-1].content.split('</think>')[-1] }} {{ messages[0]['content'].startswith(' a') }} {{ none }} {{ [1, 'x', true] }}";
        let chat = chat(&[(Role::User, " a "), (Role::Assistant, "b</think>c")]);
        assert_eq!(render(source, &chat), "b</think>c|a|2 c True None [1, 'x', True]");
    }

    #[test]
    fn tojson_is_pythons() {
        let source = "{{ {'b': [1, 1.0, 1e16, none, true], 'a': '<é\\n>'}|tojson }} {{ {'a': [], 'b': [1]}|tojson(indent=2) }} {{ [1,{'a':2}]|tojson(separators=(',',':')) }}";
        let expected = "{\"b\": [1, 1.0, 1e+16, null, true], \"a\": \"<é\\n>\"} {\n  \"a\": [],\n  \"b\": [\n    1\n  ]\n} [1,{\"a\":2}]";
        assert_eq!(render(source, &chat(&[(Role::User, "x")])), expected);
    }

    #[test]
    fn generation_marks_are_blocks() {
        assert_eq!(render("a{%- generation -%} b {%- endgeneration %}c", &chat(&[(Role::User, "x")])), "abc");
    }

    #[test]
    fn failures_name_no_message() {
        let load = |source: &str| Template::load(Some(source.as_bytes()), None);
        let raised = load("{{ raise_exception('roles must alternate') }}").unwrap().unwrap();
        let error = raised.render(&chat(&[(Role::User, "secret")])).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("messages")));
        assert!(error.message.contains("roles must alternate"));
        let broken = load("{{ messages[0].content + 1 }}").unwrap().unwrap();
        let error = broken.render(&chat(&[(Role::User, "secret")])).unwrap_err();
        assert!(!error.message.contains("secret"), "{}", error.message);
        let error = load("{% if %}").err().unwrap().to_string();
        assert!(error.contains("chat_template.jinja") && error.contains("line 1"), "{error}");
    }

    #[test]
    fn the_jinja_file_wins_and_lists_have_a_default() {
        let config = br#"{"chat_template":[{"name":"tool_use","template":"no"},{"name":"default","template":"{{ bos_token }}yes"}],
            "bos_token":{"content":"<s>"}}"#;
        let chat = chat(&[(Role::User, "x")]);
        assert_eq!(Template::load(None, Some(config)).unwrap().unwrap().render(&chat).unwrap(), "<s>yes");
        assert_eq!(Template::load(Some(b"file"), Some(config)).unwrap().unwrap().render(&chat).unwrap(), "file");
        assert!(Template::load(None, Some(b"{}")).unwrap().is_none());
    }
}
