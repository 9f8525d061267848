//! Fuzz targets: one plain function for every parser at the edge, each of which takes any bytes and checks what must hold of the outcome.
//!
//! Run by `tests/fuzz.rs` with seeded mutations of the corpora, and by libFuzzer from the crate in `fuzz/`. **Invariant:** a target that
//! returns has seen an answer or an error that names what is wrong; it holds no state between calls.

pub mod mutate;
pub mod run;

use serde_json::Value;
use slotgraph_kernels::contract::EXPERT_SHARDS;
use slotgraph_runtime::checkpoint::{self, GenerationDefaults};
use slotgraph_runtime::weights::blob::Blob;
use slotgraph_runtime::weights::{elements, header, shards};
use slotgraph_server::detokenize::Detokenizer;
use slotgraph_server::error::ApiError;
use slotgraph_server::json::{self, Kind};
use slotgraph_server::prompt::{Prompted, Reader};
use slotgraph_server::request::{Endpoint, Limits};
use slotgraph_server::router::Route;
use slotgraph_server::stop::{Matched, StopMatcher};
use slotgraph_server::template::Template;
use slotgraph_server::texts;
use slotgraph_server::tokenizer::Tokenizer;
use std::sync::OnceLock;

pub type Target = fn(&[u8]);

/// Every target, by the name of its corpus.
pub const TARGETS: [(&str, Target); 11] = [
    ("completion_body", completion_body),
    ("chat_body", chat_body),
    ("tokenize_body", tokenize_body),
    ("detokenize_body", detokenize_body),
    ("config_json", config_json),
    ("safetensors_header", safetensors_header),
    ("weights_index", weights_index),
    ("tokenizer_stream", tokenizer_stream),
    ("stop_strings", stop_strings),
    ("chat_template", chat_template),
    ("path", path),
];

/// Longest message that an error may have: it quotes shortened values only.
const MESSAGE_BYTES_MAX: usize = 1000;

struct Texts {
    tokenizer: Tokenizer,
    template: Template,
    limits: Limits,
}

impl Texts {
    fn load(name: &str) -> Texts {
        let read = |file: &str| std::fs::read(crate::model(name).join(file)).expect("a model's file");
        let template = Template::load(None, Some(&read("tokenizer_config.json")));
        Texts {
            tokenizer: Tokenizer::parse(&read("tokenizer.json")).expect("a tokenizer"),
            template: template.expect("it parses").expect("it is there"),
            limits: Limits {
                served: vec!["m".into(), "org/other".into()],
                vocab: 2048,
                context: 256,
                choices_max: 64,
                defaults: GenerationDefaults::default(),
            },
        }
    }
    fn reader(&self) -> Reader<'_> {
        Reader { tokenizer: &self.tokenizer, template: Some(&self.template), limits: &self.limits }
    }
}

/// The texts of the two trained models: their chat templates differ.
fn texts() -> &'static [Texts; 2] {
    static TEXTS: OnceLock<[Texts; 2]> = OnceLock::new();
    TEXTS.get_or_init(|| [Texts::load("shakespeare-dsv2"), Texts::load("shakespeare-qwen3")])
}

pub fn completion_body(bytes: &[u8]) {
    let texts = &texts()[0];
    match texts::prompted(texts.reader(), Endpoint::Completion, bytes) {
        Ok(prompted) => check_prompted(&prompted, &texts.limits),
        Err(error) => check_error(&error, bytes),
    }
}

pub fn chat_body(bytes: &[u8]) {
    for texts in texts() {
        let prompted = texts::prompted(texts.reader(), Endpoint::Chat, bytes);
        let rendered = texts::render(texts.reader(), bytes);
        match (prompted, rendered) {
            (Ok(prompted), Ok(rendered)) => {
                check_prompted(&prompted, &texts.limits);
                let rendered: Value = serde_json::from_str(&rendered).expect("the answer is JSON");
                assert_eq!(rendered["prompt"], prompted.prompts[0].text.as_str());
            }
            (Err(error), Err(same)) => {
                assert_eq!(error, same);
                check_error(&error, bytes);
            }
            (prompted, rendered) => panic!("{prompted:?} but {rendered:?}"),
        }
    }
}

pub fn tokenize_body(bytes: &[u8]) {
    let texts = &texts()[0];
    match texts::tokenize(texts.reader(), bytes) {
        Ok(answer) => {
            let answer: Value = serde_json::from_str(&answer).expect("the answer is JSON");
            let tokens = answer["tokens"].as_array().expect("ids");
            assert_eq!(answer["count"], tokens.len());
            assert!(tokens.iter().all(|id| id.as_u64().is_some_and(|id| id < u64::from(texts.limits.vocab))));
        }
        Err(error) => check_error(&error, bytes),
    }
}

pub fn detokenize_body(bytes: &[u8]) {
    let texts = &texts()[0];
    match texts::detokenize(texts.reader(), bytes) {
        Ok(answer) => {
            let answer: Value = serde_json::from_str(&answer).expect("the answer is JSON");
            assert!(answer["prompt"].is_string());
        }
        Err(error) => check_error(&error, bytes),
    }
}

/// Prompts that can be queued: ids in range, within the context with what may follow, within the limit of choices.
fn check_prompted(prompted: &Prompted, limits: &Limits) {
    let Prompted { request, prompts } = prompted;
    assert!(!prompts.is_empty() && prompts.len() * request.n as usize <= limits.choices_max);
    for prompt in prompts {
        assert!(!prompt.ids.is_empty() && prompt.ids.iter().all(|id| *id < limits.vocab));
        assert!(prompt.ids.len() + prompt.max_tokens as usize <= limits.context as usize);
    }
    let sampling = &request.sampling;
    assert!((0.0..=2.0).contains(&sampling.temperature) && (0.0..=1.0).contains(&sampling.top_p));
    assert!(request.stop.len() <= 4 && request.stop.iter().all(|stop| !stop.is_empty()));
}

/// A refusal by the contract; one of a body that is an object names its field.
fn check_error(error: &ApiError, body: &[u8]) {
    assert!(matches!(error.status.as_u16(), 400 | 404), "{error:?}");
    assert!(!error.message.is_empty() && error.message.len() <= MESSAGE_BYTES_MAX, "{error:?}");
    let envelope: Value = serde_json::from_str(&error.envelope()).expect("the envelope is JSON");
    let keys: Vec<&String> = envelope["error"].as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["message", "type", "param", "code"]);
    let object = std::str::from_utf8(body).ok().and_then(|text| json::check(text).ok());
    let object = object.is_some_and(|text| Kind::of(text) == Kind::Object);
    assert_eq!(error.param.is_some(), object, "{error:?}");
    let printable = |c: char| !c.is_control() || c == '\n';
    assert!(error.param.as_deref().unwrap_or_default().chars().all(printable), "{error:?}");
}

/// config.json, and behind a NUL generation_config.json: a model whose plan can be built, or an error that names the file.
pub fn config_json(bytes: &[u8]) {
    let (config, generation) = match bytes.iter().position(|byte| *byte == 0) {
        Some(at) => (&bytes[..at], Some(("generation_config.json", &bytes[at + 1..]))),
        None => (bytes, None),
    };
    match checkpoint::parse("config.json", config, generation) {
        Ok((spec, _)) => {
            assert!(spec.vocab > 0 && spec.hidden > 0 && spec.layers > 0);
            assert!(spec.eos_ids.iter().all(|id| (*id as usize) < spec.vocab));
            assert!(spec.experts().is_none_or(|experts| experts >= 1), "{EXPERT_SHARDS} shards hold them");
            // A shape that no plan can have is an error too.
            if let Ok(required) = checkpoint::required(&spec) {
                assert!(elements(&required) > 0);
            }
        }
        Err(error) => {
            let message = error.to_string();
            assert!(message.contains("config.json"), "{message}");
        }
    }
}

/// A weight file: a header whose tensors tile its data, or a reason.
pub fn safetensors_header(bytes: &[u8]) {
    let blob = Blob::Bytes(bytes.to_vec().into());
    match header::read(&blob) {
        Ok(header) => {
            let mut end = header.data_start;
            for tensor in &header.tensors {
                assert_eq!(tensor.start, end, "{}", tensor.name);
                end += tensor.bytes;
            }
            assert_eq!(end, blob.len());
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
}

/// model.safetensors.index.json: names of files in the folder, or an error that names the index.
pub fn weights_index(bytes: &[u8]) {
    match shards::weight_map("the index", bytes) {
        Ok(map) => {
            assert!(!map.is_empty());
            assert!(map.values().all(|file| !file.is_empty() && !file.contains('/') && file != ".."));
        }
        Err(error) => assert!(error.to_string().contains("the index"), "{error}"),
    }
}

/// Two bytes an id, the first bit of the first byte says whether special tokens are skipped: growing text is the decoding of all ids.
pub fn tokenizer_stream(bytes: &[u8]) {
    let tokenizer = &texts()[0].tokenizer;
    let skip = bytes.first().is_some_and(|byte| byte & 1 == 1);
    // Ids past the vocabulary too.
    let ids: Vec<u32> =
        bytes.as_chunks::<2>().0.iter().map(|pair| u32::from(u16::from_le_bytes(*pair)) % 2100).collect();
    let mut detokenizer = Detokenizer::new(tokenizer, skip);
    let mut text = String::new();
    for id in &ids {
        let before = text.len();
        detokenizer.push(tokenizer, *id, &mut text);
        assert!(text.is_char_boundary(before));
    }
    detokenizer.finish(tokenizer, &mut text);
    assert_eq!(text, tokenizer.decode(&ids, skip));
}

/// Lines of text: up to four stop strings, then the text, cut into pieces of as many characters as the first byte says. The first stop string
/// to complete ends the text, wherever the cuts are.
pub fn stop_strings(bytes: &[u8]) {
    let step = usize::from(bytes.first().copied().unwrap_or(1) % 7) + 1;
    let lines = String::from_utf8_lossy(bytes.get(1..).unwrap_or_default()).into_owned();
    let mut lines: Vec<&str> = lines.splitn(5, '\n').collect();
    let text: Vec<char> = lines.pop().unwrap_or_default().chars().collect();
    let stops: Vec<String> = lines.into_iter().filter(|line| !line.is_empty()).map(str::to_owned).collect();

    let mut matcher = StopMatcher::new(stops.clone(), false);
    let (mut out, mut matched) = (String::new(), false);
    for piece in text.chunks(step) {
        if matcher.push(&piece.iter().collect::<String>(), true, &mut out) == Matched::Yes {
            matched = true;
            break;
        }
    }
    if !matched {
        matcher.finish(&mut out);
    }
    let (expected, expected_match) = cut(&text, &stops);
    assert_eq!((out, matched), (expected, expected_match), "{stops:?}");
}

/// What a reader of the whole text would leave of it.
fn cut(text: &[char], stops: &[String]) -> (String, bool) {
    let mut so_far = String::new();
    for c in text {
        so_far.push(*c);
        let longest = stops.iter().filter(|stop| so_far.ends_with(stop.as_str())).map(|stop| stop.len()).max();
        if let Some(bytes) = longest {
            so_far.truncate(so_far.len() - bytes);
            return (so_far, true);
        }
    }
    (so_far, false)
}

/// A template file, and the same bytes as tokenizer_config.json: it parses, or the error names the file.
pub fn chat_template(bytes: &[u8]) {
    for (jinja, config, file) in
        [(Some(bytes), None, "chat_template.jinja"), (None, Some(bytes), "tokenizer_config.json")]
    {
        if let Err(error) = Template::load(jinja, config) {
            assert_eq!(error.file, file);
            assert!(!error.reason.is_empty());
        }
    }
}

/// A request's path: some route, with a name that is a constant.
pub fn path(bytes: &[u8]) {
    let path = String::from_utf8_lossy(bytes);
    let route = Route::of(&path);
    assert!(route.name().is_ascii());
    if let Route::Cancel(id) = &route {
        assert!(!id.is_empty());
    }
}
