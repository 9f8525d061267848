//! Overload, limits, bad input.

use crate::{serve, serve_folder};
use serde_json::{Value, json};
use slotgraph_tests::http::{Conn, bare, post};
use slotgraph_tests::server::{Server, behind, copy_of};
use std::io::Write;
use std::time::{Duration, Instant};

/// Rows of the demo model's embedding, and its context.
const VOCAB: u64 = 2048;

/// Posts each fragment and checks how it is refused.
fn refusals(server: &Server, path: &str, cases: &[(&str, &str, Option<&str>)]) {
    for (fragment, param, code) in cases {
        let body = match path {
            "/v1/completions" => format!(r#"{{"model":"{}","prompt":"hi",{fragment}}}"#, server.model),
            _ => format!(r#"{{"model":"{}","messages":[{{"role":"user","content":"hi"}}],{fragment}}}"#, server.model),
        };
        let (got_param, got_code) = server.post_raw(path, &body).refusal(400);
        let got_param = got_param.unwrap_or_default();
        assert!(
            got_param == *param
                || got_param.starts_with(&format!("{param}["))
                || got_param.starts_with(&format!("{param}.")),
            "{fragment}: {got_param}"
        );
        if code.is_some() {
            assert_eq!(got_code.as_deref(), *code, "{fragment}");
        }
    }
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[test]
fn hand_c1_over_long_prompts() {
    let mut server = serve(&["--max-model-len", "256"]);
    let prefilled = server.gauge("vllm:prompt_tokens_total");
    let ids = |count: usize| vec![100; count];
    for stream in [false, true] {
        let reply = server.complete(json!({"prompt": ids(257), "max_tokens": 1, "stream": stream}));
        assert_eq!(reply.refusal(400), (Some("prompt".into()), Some("context_length_exceeded".into())));
    }
    let long = json!([{"role": "user", "content": "word ".repeat(400)}]);
    let reply = server.chat(json!({"messages": long}));
    assert_eq!(reply.refusal(400), (Some("messages".into()), Some("context_length_exceeded".into())));
    let reply = server.complete(json!({"prompt": ids(10), "max_tokens": 256}));
    let error = reply.error(400);
    assert_eq!(
        (error["code"].as_str(), error["param"].as_str()),
        (Some("context_length_exceeded"), Some("max_tokens"))
    );
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("256") && message.contains("10"), "{message}");
    assert_eq!(server.gauge("vllm:prompt_tokens_total"), prefilled, "nothing was prefilled");

    let overhead = server.chat(json!({"max_tokens": 1})).json()["usage"]["prompt_tokens"].as_u64().unwrap() - 1;
    let content = "a\n".repeat((251 - overhead as usize) / 2);
    let reply = server.chat(json!({"messages": [{"role": "user", "content": content}]}));
    assert_eq!(reply.status(), 200, "{}", reply.text());
    let usage = reply.json()["usage"].clone();
    assert!(usage["total_tokens"].as_u64().unwrap() <= 256, "{usage}");

    let reply = server.complete(json!({"prompt": ids(251), "ignore_eos": true}));
    assert_eq!((reply.status(), reply.json()["usage"]["completion_tokens"].as_u64()), (200, Some(5)));
    assert_eq!(reply.json()["choices"][0]["finish_reason"], "length");
    assert_eq!(server.get("/v1/models").json()["data"][0]["max_model_len"], 256);
    server.calm();
}

#[test]
fn hand_c2_max_tokens() {
    let mut server = serve(&[]);
    let reply = server.complete(json!({"max_tokens": 0})).json();
    let (choice, usage) = (&reply["choices"][0], &reply["usage"]);
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(""), &json!("length")));
    assert_eq!(usage["completion_tokens"], 0);
    assert_eq!(usage["total_tokens"], usage["prompt_tokens"]);
    let reply = server.complete(json!({"prompt": "hi there", "max_tokens": 0, "echo": true})).json();
    assert_eq!((&reply["choices"][0]["text"], &reply["usage"]["completion_tokens"]), (&json!("hi there"), &json!(0)));
    let one = server.complete(json!({"max_tokens": 1})).json();
    assert_eq!(one["usage"]["completion_tokens"], 1);
    refusals(
        &server,
        COMPLETIONS,
        &[
            (r#""max_tokens":-1"#, "max_tokens", Some("integer_below_min_value")),
            (r#""max_tokens":"16""#, "max_tokens", Some("invalid_type")),
            (r#""max_tokens":1.5"#, "max_tokens", Some("invalid_type")),
            (r#""max_tokens":true"#, "max_tokens", Some("invalid_type")),
            (r#""max_tokens":[16]"#, "max_tokens", Some("invalid_type")),
            (r#""max_tokens":1000000000000"#, "max_tokens", Some("context_length_exceeded")),
        ],
    );
    let ask = |fields: Value| server.complete(fields).json()["usage"]["completion_tokens"].clone();
    let fields = json!({"temperature": 0, "ignore_eos": true});
    let mut nulled = fields.clone();
    nulled["max_tokens"] = Value::Null;
    assert_eq!((ask(fields), ask(nulled)), (json!(16), json!(16)));
    refusals(
        &server,
        CHAT,
        &[
            (r#""max_tokens":0"#, "max_tokens", Some("integer_below_min_value")),
            (r#""max_completion_tokens":0"#, "max_completion_tokens", Some("integer_below_min_value")),
            (r#""max_tokens":3,"max_completion_tokens":4"#, "max_tokens", None),
        ],
    );
    assert_eq!(server.chat(json!({"max_tokens": 3, "max_completion_tokens": 3})).status(), 200);
    server.calm();
}

#[test]
fn hand_c3_empty_prompts_and_ids() {
    let mut server = serve(&[]);
    let canary = json!({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0});
    let expected = server.complete(canary.clone()).json()["choices"].clone();
    let ask = |prompt: Value| server.complete(json!({"prompt": prompt, "max_tokens": 4, "temperature": 0}));
    assert_eq!(ask(json!("")).json()["usage"]["prompt_tokens"], 1);
    for prompt in [json!([]), json!([[]]), json!([[1, 2], []])] {
        assert_eq!(ask(prompt.clone()).refusal(400).0.as_deref(), Some("prompt"), "{prompt}");
    }
    for prompt in [json!([1, "a"]), json!([1.5]), json!([true]), json!([[1], "a"]), json!({"a": 1}), json!(7)] {
        let refusal = ask(prompt.clone()).refusal(400);
        assert_eq!(refusal, (Some("prompt".into()), Some("invalid_type".into())), "{prompt}");
    }
    for raw in ["[-1]", "[2048]", "[2147483648]", "[5279552648203111001]", "[9223372036854775808]"] {
        let body = format!(r#"{{"model":"{}","prompt":{raw}}}"#, server.model);
        let error = server.post_raw(COMPLETIONS, &body).error(400);
        assert_eq!(error["param"], "prompt");
        assert!(error["message"].as_str().unwrap().contains("0…2047"), "{error}");
        assert_eq!(server.complete(canary.clone()).json()["choices"], expected);
    }
    assert_eq!(ask(json!([VOCAB - 1])).status(), 200);
    let text = server.post("/detokenize", &json!({"tokens": [0, 42, 422, 81]})).json()["prompt"].clone();
    let text = text.as_str().unwrap().strip_prefix("<|begin_of_text|>").unwrap();
    let (by_ids, by_text) = (ask(json!([0, 42, 422, 81])).json(), ask(json!(text)).json());
    assert_eq!((&by_ids["usage"], &by_ids["choices"]), (&by_text["usage"], &by_text["choices"]));
    let missing = server.post(COMPLETIONS, &json!({"model": server.model}));
    assert_eq!(missing.refusal(400), (Some("prompt".into()), Some("missing_required_parameter".into())));
    assert_eq!(ask(Value::Null).refusal(400).0.as_deref(), Some("prompt"));
    for messages in [json!([]), Value::Null, json!({}), json!([{}]), json!([{"role": "user"}])] {
        let param = server.chat(json!({"messages": messages})).refusal(400).0.unwrap();
        assert!(param.starts_with("messages"), "{param}");
    }
    server.calm();
}

#[test]
fn hand_c4_malformed_bodies() {
    let mut server = serve(&[]);
    let model = server.model.clone();
    for path in [COMPLETIONS, CHAT] {
        let cut = format!(r#"{{"model":"{model}","prompt":"hi""#);
        for body in [cut.as_str(), &format!("{cut}}} x"), "", "null", "[]", "\"x\"", "42"] {
            assert_eq!(server.post_raw(path, body).refusal(400), (None, None), "{path} {body}");
        }
        let mut bytes = post(path, "", &[]);
        let body = b"{\"model\":\"\xff\"}";
        bytes.truncate(bytes.len() - "content-length: 0\r\n\r\n".len());
        bytes.extend(format!("content-length: {}\r\n\r\n", body.len()).bytes().chain(*body));
        server.conn().ask(&bytes).error(400);
    }
    for stream in ["false", "true"] {
        for (path, field) in [
            (COMPLETIONS, r#""prompt":"\ud83d""#),
            (COMPLETIONS, r#""prompt":"\ude00\ud83d""#),
            (COMPLETIONS, r#""prompt":"hi","stop":"\ud83d""#),
            (CHAT, r#""messages":[{"role":"user","content":"\ud83d"}]"#),
        ] {
            server.post_raw(path, &format!(r#"{{"model":"{model}","stream":{stream},{field}}}"#)).error(400);
        }
    }
    let prompt_tokens = |raw: &str| {
        let reply = server.post_raw(COMPLETIONS, &format!(r#"{{"model":"{model}","max_tokens":1,"prompt":{raw}}}"#));
        assert_eq!(reply.status(), 200, "{}", reply.text());
        reply.json()["usage"]["prompt_tokens"].clone()
    };
    assert_eq!(prompt_tokens(r#""\ud83d\ude00""#), prompt_tokens("\"😀\""));
    prompt_tokens(r#""a\u0000b""#);
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    for (path, field, tolerated) in [
        (COMPLETIONS, format!(r#""prompt":"hi","max_tokens":1,"zzz":{deep}"#), true),
        (COMPLETIONS, format!(r#""prompt":{deep}"#), false),
        (CHAT, format!(r#""messages":[{{"role":"user","content":{deep}}}]"#), false),
    ] {
        let began = Instant::now();
        let status = server.post_raw(path, &format!(r#"{{"model":"{model}",{field}}}"#)).status();
        assert!(status == 400 || (tolerated && status == 200), "{status}");
        assert!(began.elapsed() < Duration::from_secs(1));
    }
    // Of a repeated key the last one counts.
    let twice = |body: &str| server.post_raw(COMPLETIONS, body).json()["choices"][0]["text"].clone();
    let repeated = format!(r#"{{"model":"{model}","prompt":"a","prompt":"b","echo":true,"max_tokens":0}}"#);
    assert_eq!(twice(&repeated), "b");
    let body = format!(r#"{{"model":"{model}","prompt":"hi","max_tokens":1}}"#);
    let typed = post(COMPLETIONS, &body, &[("content-type", "application/json; charset=utf-8")]);
    assert_eq!(server.conn().ask(&typed).status(), 200);
    let head = "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n";
    let (first, second) = body.split_at(7);
    let chunked = format!(
        "{head}transfer-encoding: chunked\r\n\r\n{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
        first.len(),
        second.len()
    );
    assert_eq!(server.conn().ask(chunked.as_bytes()).status(), 200);
    let mut conn = server.conn();
    conn.send(format!("{head}expect: 100-continue\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes());
    assert!(conn.line().unwrap().starts_with("HTTP/1.1 100"));
    assert_eq!(conn.line().unwrap(), "");
    assert_eq!(conn.ask(body.as_bytes()).status(), 200);
    server.calm();
}

#[test]
fn hand_c5_null_is_omitted_and_parts_are_joined() {
    let mut server = serve(&[]);
    let nulls = json!({
        "messages": [{"role": "user", "content": "hi", "name": null}], "top_p": null, "n": null, "stop": null,
        "stream": null, "stream_options": null, "logprobs": null, "top_logprobs": null, "logit_bias": null, "seed": null,
        "user": null, "tools": null, "response_format": null, "max_tokens": 4, "temperature": 0,
    });
    let plain = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0});
    let ask = |fields: Value| {
        let mut answer = server.chat(fields).json();
        json!([answer["choices"].take(), answer["usage"].take()])
    };
    assert_eq!(ask(nulls), ask(plain));
    let parts = json!([{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]);
    let chat =
        |content: Value| json!({"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0});
    assert_eq!(ask(chat(parts)), ask(chat(json!("hello world"))));
    let image = json!([{"type": "image_url", "image_url": {"url": "data:,"}}]);
    let error = server.chat(chat(image)).error(400);
    assert!(error["param"].as_str().unwrap().starts_with("messages"));
    assert!(error["message"].as_str().unwrap().contains("text only"), "{error}");
    let wizard = json!({"messages": [{"role": "wizard", "content": "x"}]});
    assert!(server.chat(wizard).refusal(400).0.unwrap().starts_with("messages"));
    let empty = json!({"messages": [{"role": "assistant", "content": null}], "max_tokens": 1});
    assert_eq!(server.chat(empty).status(), 200);
    refusals(
        &server,
        CHAT,
        &[
            (r#""tools":[{"type":"function","function":{"name":"f"}}]"#, "tools", None),
            (r#""response_format":{"type":"json_object"}"#, "response_format", None),
        ],
    );
    refusals(&server, COMPLETIONS, &[(r#""suffix":"x""#, "suffix", None), (r#""best_of":4"#, "best_of", None)]);
    let accepted = json!({"tool_choice": "none", "response_format": {"type": "text"}, "max_tokens": 1});
    assert_eq!(server.chat(accepted).status(), 200);
    assert_eq!(server.complete(json!({"best_of": 1, "max_tokens": 1})).status(), 200);
    server.calm();
}

#[test]
fn hand_c6_unknown_models_routes_and_methods() {
    let mut server = serve(&["--served-model-name", "demo", "org/other"]);
    let refusal = server.complete(json!({"model": "nope"})).refusal(404);
    assert_eq!(refusal, (Some("model".into()), Some("model_not_found".into())));
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "hi"})).refusal(400).0.as_deref(), Some("model"));
    assert_eq!(server.complete(json!({"model": 7})).refusal(400).0.as_deref(), Some("model"));
    assert_eq!(server.complete(json!({"model": ""})).refusal(400).0.as_deref(), Some("model"));
    let list = server.get("/v1/models").json();
    assert_eq!((&list["object"], list["data"].as_array().unwrap().len()), (&json!("list"), 2));
    for path in ["/v1/models/demo", "/v1/models/org/other", "/v1/models/org%2Fother"] {
        let card = server.get(path).json();
        assert_eq!(card["object"], "model");
        assert!(card["created"].is_u64() && card["owned_by"].is_string());
    }
    let (_, code) = server.get("/v1/models/nope").refusal(404);
    assert_eq!(code.as_deref(), Some("model_not_found"));
    assert_eq!(server.complete(json!({"model": "org/other", "max_tokens": 1})).json()["model"], "org/other");
    let mut conn = server.conn();
    conn.ask(&post("/v1/nope", "{}", &[])).error(404);
    conn.ask(&bare("GET", "/", &[])).error(404);
    for (method, path) in [("GET", COMPLETIONS), ("DELETE", CHAT)] {
        let reply = conn.ask(&bare(method, path, &[]));
        reply.error(405);
        assert_eq!(reply.head.header("allow"), Some("POST"));
    }
    // The connection is still usable after all of these.
    assert_eq!(conn.ask(&bare("GET", "/health", &[])).status(), 200);
    server.calm();
}

#[test]
fn hand_c7_chat_template_failures() {
    let model = slotgraph_tests::model("shakespeare-dsv2");
    let with_template = |template: Option<&str>| {
        let folder = copy_of(&model);
        let file = folder.path().join("tokenizer_config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        match template {
            Some(template) => config["chat_template"] = json!(template),
            None => drop(config.as_object_mut().unwrap().remove("chat_template")),
        }
        std::fs::write(&file, config.to_string()).unwrap();
        folder
    };
    let folder = with_template(Some("{{ raise_exception('roles must alternate') }}"));
    let mut server = serve_folder(folder.path(), &[]);
    let error = server.chat(json!({})).error(400);
    assert_eq!(error["param"], "messages");
    assert!(error["message"].as_str().unwrap().contains("roles must alternate"));
    server.calm();

    let folder = with_template(None);
    let mut server = serve_folder(folder.path(), &[]);
    assert_eq!(server.log().lines().filter(|line| line.contains("WARN") && line.contains("chat template")).count(), 1);
    assert!(server.chat(json!({})).error(400)["message"].as_str().unwrap().contains("no chat template"));
    assert_eq!(server.complete(json!({"max_tokens": 1})).status(), 200);
    server.calm();

    let folder = with_template(Some("{% if %}"));
    let path = folder.path().to_str().unwrap();
    let (code, log, _) = slotgraph_tests::server::refused(crate::BINARY, &["--port", "0", "--model", path], &[]);
    assert_eq!(code, 2);
    let last = log.lines().last().unwrap();
    assert!(last.contains("tokenizer_config.json") && last.contains("line 1"), "{last}");
}

#[test]
fn hand_c8_big_bodies_slow_bodies_slow_headers() {
    let mut server = serve(&[
        "--body-limit",
        "16MiB",
        "--header-timeout",
        "1.5",
        "--body-timeout",
        "2",
        "--max-connections",
        "2000",
    ]);
    let files = server.open_files();
    let reply = server.complete(json!({"prompt": "a b c ".repeat(512 << 10)}));
    assert_eq!(reply.refusal(400).1.as_deref(), Some("context_length_exceeded"));
    for length in [(16u64 << 20) + 1, 1 << 40] {
        let mut conn = server.conn();
        conn.send(format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: t\r\ncontent-length: {length}\r\n\r\n").as_bytes());
        let reply = conn.reply(false);
        reply.error(413);
        assert_eq!(reply.head.header("connection"), Some("close"));
        assert!(conn.closes_within(Duration::from_secs(5)));
    }
    let before = server.rss_kib();
    let mut conn = server.conn();
    conn.send(format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes());
    let chunk = [b"100000\r\n".to_vec(), vec![b' '; 1 << 20], b"\r\n".to_vec()].concat();
    for _ in 0..64 {
        if conn.tcp.write_all(&chunk).is_err() {
            break;
        }
    }
    conn.reply(false).error(413);
    assert!(server.rss_kib() < before + (32 << 10), "{} KiB from {before}", server.rss_kib());
    // Nothing sent; headers that never end; a body that never ends.
    let began = Instant::now();
    let (mut silent, mut headers, mut body) = (server.conn(), server.conn(), server.conn());
    headers.send(b"POST /v1/completions HTTP/1.1\r\nhost:");
    body.send(format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n{{").as_bytes());
    assert!(silent.closes_within(Duration::from_secs(5)) && headers.closes_within(Duration::from_secs(5)));
    let reply = body.reply(false);
    reply.error(408);
    assert_eq!(reply.head.header("connection"), Some("close"));
    assert!(began.elapsed() < Duration::from_secs(6));
    let slow: Vec<Conn> = (0..500)
        .map(|number| {
            let mut conn = server.conn();
            match number % 2 {
                0 => conn.send(b"POST /v1/completions HTTP/1.1\r\nhost:"),
                _ => conn.send(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n{"),
            }
            conn
        })
        .collect();
    let mut waits: Vec<Duration> = (0..100)
        .map(|_| {
            let began = Instant::now();
            assert_eq!(server.get("/health").status(), 200);
            began.elapsed()
        })
        .collect();
    waits.sort_unstable();
    assert!(waits[98] <= Duration::from_millis(100), "{:?}", waits[98]);
    assert_eq!(server.gauge("vllm:num_requests_running") + server.gauge("vllm:num_requests_waiting"), 0.0);
    drop(slow);
    server.until(Duration::from_secs(5), "file descriptors at baseline", |server| server.open_files() <= files + 2);
    server.calm();
}

#[test]
fn hand_c8_out_of_file_descriptors() {
    for limit in [256, 64] {
        let script = behind(crate::BINARY, &format!("ulimit -n {limit}\nexec"));
        let mut server = slotgraph_tests::server::start(script.to_str().unwrap(), &["--device", "cpu"]);
        let held: Vec<Conn> = (0..400).map(|_| server.conn()).collect();
        // The limit is reached once nobody new is let in.
        let deadline = Instant::now() + Duration::from_secs(10);
        while server.open_files() < limit / 2 {
            assert!(Instant::now() < deadline, "{} of {limit} files are open", server.open_files());
            std::thread::sleep(Duration::from_millis(5));
        }
        let cpu = cpu_ticks(server.pid());
        std::thread::sleep(Duration::from_secs(1));
        assert!(cpu_ticks(server.pid()) - cpu < 50, "the accept loop spins");
        assert!(server.open_files() <= limit);
        drop(held);
        let well = |server: &Server| server.try_get("/health").is_some_and(|reply| reply.status() == 200);
        server.until(Duration::from_secs(2), "recovery", well);
        server.calm();
    }
}

/// Hundredths of a second that a process has used.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn hand_c9_overload() {
    let mut server = serve(&["--max-slots", "4", "--max-queue", "10"]);
    let rejected =
        |server: &Server| server.metric("slotgraph_requests_total", &["outcome=\"rejected\"", "code=\"429\""]);
    // Four hold the slots for as long as the test wants, ten wait.
    let long = json!({"prompt": "Once", "max_tokens": 1900, "ignore_eos": true});
    let held: Vec<_> = (0..4).map(|_| server.stream(long.clone())).collect();
    let short = server.completion(json!({"prompt": "Once", "max_tokens": 8, "ignore_eos": true})).to_string();
    let mut waiting: Vec<Conn> = (0..10)
        .map(|_| {
            let mut conn = server.conn();
            conn.send(&post(COMPLETIONS, &short, &[]));
            conn
        })
        .collect();
    server.until(Duration::from_secs(10), "four run and ten wait", |server| {
        server.gauge("vllm:num_requests_running") == 4.0 && server.gauge("vllm:num_requests_waiting") == 10.0
    });
    // 50 more at once, streamed or not: each is refused, within 100 ms of the server having its head.
    let quick = |server: &Server| {
        let labels = ["handler=\"/v1/completions\"", "le=\"0.1\""];
        server.metric("http_request_duration_seconds_bucket", &labels)
    };
    let (rejected_before, quick_before) = (rejected(&server), quick(&server));
    let streamed = server.completion(json!({"stream": true})).to_string();
    let mut refused: Vec<Conn> = (0..50)
        .map(|number| {
            let mut conn = server.conn();
            conn.send(&post(COMPLETIONS, if number % 2 == 0 { &short } else { &streamed }, &[]));
            conn
        })
        .collect();
    let mut waits: Vec<Duration> = (0..20)
        .map(|_| {
            let began = Instant::now();
            assert_eq!(server.get("/health").status(), 200);
            began.elapsed()
        })
        .collect();
    waits.sort_unstable();
    assert!(waits[10] <= Duration::from_millis(100), "{waits:?}");
    for conn in &mut refused {
        let reply = conn.reply(false);
        let error = reply.error(429);
        assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("rate_limit_exceeded")));
        assert!(error["param"].is_null());
        assert!(reply.head.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    }
    assert_eq!(rejected(&server) - rejected_before, 50.0);
    assert_eq!(quick(&server) - quick_before, 50.0, "refusals within 100 ms");
    assert_eq!(server.gauge("vllm:num_requests_waiting"), 10.0, "nobody lost a place");
    drop(held);
    for conn in &mut waiting {
        let reply = conn.reply(false);
        assert_eq!((reply.status(), &reply.json()["usage"]["completion_tokens"]), (200, &json!(8)));
    }
    server.calm();
}
