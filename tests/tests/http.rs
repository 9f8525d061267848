//! The server from outside, beyond the hand cases: keys, ids, cancels, limits, extensions, `generate`, the debug routes.
//!
//! Each test starts the real server on the CPU device and leaves it calm.

use serde_json::{Value, json};
use slotgraph_tests::http::{Conn, Stream, bare, chunks, finishes, joined, post};
use slotgraph_tests::server::{Server, launch, refused, start};
use std::process::Command;
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_slotgraph-under-test");

fn serve(arguments: &[&str]) -> Server {
    start(BINARY, &[&["--device", "cpu"], arguments].concat())
}

#[test]
fn keys_guard_what_they_should() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "second\n\nthird\n").unwrap();
    let arguments = ["--device", "cpu", "--api-key", "first", "--api-key-file", file.path().to_str().unwrap()];
    let server = launch(BINARY, &arguments, &[("SLOTGRAPH_API_KEY", "fourth,fifth")]);
    server.until(Duration::from_secs(30), "ready", |server| server.get("/health").status() == 200);
    let ask = |path: &str, header: &str| {
        let headers: &[(&str, &str)] = if header.is_empty() { &[] } else { &[("authorization", header)] };
        server.conn().ask(&bare("GET", path, headers))
    };
    for path in ["/v1/models", "/debug/slots", "/debug/graphs", "/debug/traces"] {
        for key in ["first", "second", "third", "fourth", "fifth"] {
            assert_eq!(ask(path, &format!("Bearer {key}")).status(), 200, "{path} {key}");
        }
        for header in ["", "Bearer ", "Bearer sixth", "Basic first"] {
            let reply = ask(path, header);
            assert_eq!(reply.error(401)["code"], "invalid_api_key");
            assert_eq!(reply.head.header("www-authenticate"), Some("Bearer"));
        }
    }
    for path in ["/health", "/health/live", "/health/ready", "/metrics", "/version"] {
        assert_eq!(ask(path, "").status(), 200, "{path}");
    }
    // A refused request with a body leaves the connection usable.
    let mut conn = server.conn();
    conn.ask(&post("/v1/completions", r#"{"prompt":"x"}"#, &[])).error(401);
    conn.ask(&post("/v1/requests/x/cancel", "", &[])).error(401);
    assert_eq!(conn.ask(&bare("GET", "/health", &[])).status(), 200);
    let (code, log, _) = refused(BINARY, &["--port", "0", "--api-key", " "], &[]);
    assert_eq!(code, 2);
    assert!(log.contains("--api-key"), "{log}");
}

#[test]
fn request_ids_are_taken_echoed_and_traced() {
    let mut server = serve(&[]);
    let body = server.completion(json!({"max_tokens": 3, "temperature": 0, "ignore_eos": true})).to_string();
    let reply = server.conn().ask(&post("/v1/completions", &body, &[("x-request-id", "my-id.7")]));
    assert_eq!(reply.head.header("x-request-id"), Some("my-id.7"));
    assert_eq!(reply.json()["id"], "cmpl-my-id.7");
    for bad in ["has blank", "tab\there", &"x".repeat(129)] {
        let reply = server.conn().ask(&bare("GET", "/health", &[("x-request-id", bad)]));
        let made = reply.head.header("x-request-id").unwrap();
        assert!(made.len() == 32 && made.bytes().all(|byte| byte.is_ascii_hexdigit()), "{made}");
    }
    server.until(Duration::from_secs(2), "the trace", |server| server.get("/debug/traces").text().contains("my-id.7"));
    let traces = server.get("/debug/traces").json();
    let trace = traces.as_array().unwrap().iter().find(|trace| trace["request_id"] == "my-id.7").unwrap();
    assert_eq!((&trace["terminal_reason"], &trace["finish_reason"]), (&json!("completed_length"), &json!("length")));
    assert_eq!((&trace["completion_tokens"], &trace["choice_index"]), (&json!(3), &json!(0)));
    for key in ["slot", "pages", "buckets_used", "prompt_sha256", "token_sha256", "contract_hash", "seed", "sampling"] {
        assert!(!trace[key].is_null(), "{key}");
    }
    assert!(server.log().lines().any(|line| line.starts_with("slotgraph_http_trace {") && line.contains("my-id.7")));
    server.calm();
}

#[test]
fn traces_go_to_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut server = serve(&["--trace-file", file.path().to_str().unwrap()]);
    server.complete(json!({"n": 3, "max_tokens": 4}));
    server.signal("TERM");
    assert_eq!(server.exit(Duration::from_secs(5)).code(), Some(0));
    let text = std::fs::read_to_string(file.path()).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line.strip_prefix("slotgraph_http_trace ").unwrap()).unwrap())
        .collect();
    assert_eq!(lines.len(), 4, "the canary's and one a choice");
    assert!(!server.log().contains("slotgraph_http_trace"));
}

#[test]
fn cancels_end_requests() {
    let mut server = serve(&[]);
    let fields = json!({"prompt": "Once", "max_tokens": 1900, "ignore_eos": true, "stream": true});
    let body = server.completion(fields).to_string();
    let cancel = |id: &str| server.post_raw(&format!("/v1/requests/{id}/cancel"), "");
    let open = |id: &str| Stream::open(server.address, &post("/v1/completions", &body, &[("x-request-id", id)]));
    for (id, named) in [("one", "one"), ("two", "cmpl-two")] {
        let mut stream = open(id);
        stream.next_event().unwrap();
        assert_eq!(cancel(named).status(), 202);
        let mut last = String::new();
        while let Ok(Some(event)) = stream.next_event() {
            last = event.data;
        }
        let error: Value = serde_json::from_str(&last).unwrap();
        assert_eq!(error["error"]["code"], "request_cancelled");
        cancel(id).error(409);
    }
    cancel("never").error(404);
    // Not streamed: the waiting client is told.
    let whole = body.replace("\"stream\":true", "\"stream\":false");
    let mut conn = server.conn();
    conn.send(&post("/v1/completions", &whole, &[("x-request-id", "three")]));
    server.until(Duration::from_secs(2), "it runs", |server| server.gauge("vllm:num_requests_running") == 1.0);
    assert_eq!(cancel("three").status(), 202);
    assert_eq!(conn.reply(false).error(499)["code"], "request_cancelled");
    assert_eq!(server.metric("slotgraph_requests_total", &["outcome=\"cancelled\""]), 3.0);
    server.calm();
}

#[test]
fn requests_run_out_of_time() {
    let mut server = serve(&["--request-timeout", "800ms", "--max-slots", "1"]);
    let fields = json!({"prompt": ["a", "b", "c", "d"], "max_tokens": 1900, "ignore_eos": true});
    let began = Instant::now();
    assert_eq!(server.complete(fields.clone()).error(504)["code"], "request_timeout");
    assert!(began.elapsed() < Duration::from_secs(2));
    let mut stream = server.stream(fields);
    let mut last = String::new();
    while let Ok(Some(event)) = stream.next_event() {
        last = event.data;
    }
    assert!(last.contains("request_timeout"), "{last}");
    assert_eq!(server.metric("slotgraph_requests_total", &["outcome=\"expired\""]), 2.0);
    server.calm();
}

#[test]
fn extensions_do_what_they_say() {
    let mut server = serve(&[]);
    let base = json!({"prompt": "Enter HAMLET.", "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let with = |more: Value| {
        let mut fields = base.clone();
        more.as_object().unwrap().iter().for_each(|(key, value)| fields[key] = value.clone());
        server.complete(fields).json()["choices"][0].clone()
    };
    let plain = with(json!({}));
    let text = plain["text"].as_str().unwrap();
    let stop: String = text.chars().skip(5).take(3).collect();
    let kept = with(json!({"stop": stop, "include_stop_str_in_output": true}));
    assert!(text.starts_with(kept["text"].as_str().unwrap()) && kept["text"].as_str().unwrap().ends_with(&stop));
    let ids = with(json!({"return_token_ids": true}));
    assert_eq!((ids["token_ids"].as_array().unwrap().len(), &ids["text"]), (24, &plain["text"]));
    assert_eq!(ids["prompt_token_ids"][0], 0, "BOS first");
    let bare_prompt = with(json!({"return_token_ids": true, "add_special_tokens": false}));
    assert_ne!(bare_prompt["prompt_token_ids"][0], 0);
    let special = with(json!({"logit_bias": {"1": 100}, "skip_special_tokens": false, "max_tokens": 2}));
    assert_eq!(special["text"], "<|end_of_text|><|end_of_text|>");
    let named = with(json!({"logprobs": 1, "return_tokens_as_token_ids": true, "max_tokens": 2}));
    assert!(named["logprobs"]["tokens"][0].as_str().unwrap().starts_with("token_id:"));
    let stopped = with(json!({"stop_token_ids": [ids["token_ids"][3]], "return_token_ids": true}));
    let first = ids["token_ids"].as_array().unwrap().iter().position(|id| *id == ids["token_ids"][3]).unwrap();
    assert_eq!(
        (stopped["token_ids"].as_array().unwrap().len(), &stopped["finish_reason"]),
        (first + 1, &json!("stop"))
    );
    // Scoring a finished text gives the logprob bits of its generation.
    let generated = with(json!({"logprobs": 5, "return_token_ids": true}));
    let mut all = generated["prompt_token_ids"].as_array().unwrap().clone();
    let prompt = all.len();
    all.extend(generated["token_ids"].as_array().unwrap().iter().cloned());
    let scored = server.complete(json!({"prompt": all, "echo": true, "logprobs": 5, "max_tokens": 0})).json();
    for key in ["token_logprobs", "top_logprobs"] {
        let scores = &scored["choices"][0]["logprobs"][key].as_array().unwrap()[prompt..];
        assert_eq!(scores, generated["logprobs"][key].as_array().unwrap().as_slice(), "{key}");
    }
    let mut echoed = base.clone();
    echoed["echo"] = json!(true);
    echoed["logprobs"] = json!(1);
    let whole = server.complete(echoed.clone()).json()["choices"][0].clone();
    let seen = chunks(&server.stream(echoed).all());
    assert_eq!(joined(&seen, 0), whole["text"].as_str().unwrap());
    let offsets: Vec<Value> = seen
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(Value::Array(offsets), whole["logprobs"]["text_offset"]);
    server.calm();
}

#[test]
fn connections_are_bounded_and_reusable() {
    let mut server = serve(&["--max-connections", "8"]);
    let mut held: Vec<Conn> = Vec::new();
    let began = Instant::now();
    while held.len() < 8 {
        let mut conn = server.conn();
        match conn.ask(&bare("GET", "/health", &[])).status() {
            200 => held.push(conn),
            // A connection of the start may not have been counted out yet.
            refused => assert!(refused == 503 && began.elapsed() < Duration::from_secs(2), "{refused}"),
        }
    }
    let mut one_more = server.conn();
    assert_eq!(one_more.reply(false).error(503)["type"], "server_error");
    assert!(one_more.closes_within(Duration::from_secs(2)));
    let body = server.completion(json!({"max_tokens": 1})).to_string();
    let conn = &mut held[0];
    for _ in 0..3 {
        assert_eq!(conn.ask(&post("/v1/completions", &body, &[])).status(), 200);
        conn.ask(&post("/v1/completions", "{", &[])).error(400);
    }
    // Two requests in one write.
    conn.send(&[bare("GET", "/health", &[]), bare("GET", "/version", &[])].concat());
    assert_eq!((conn.reply(false).status(), conn.reply(false).status()), (200, 200));
    drop(held);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(server.gauge("slotgraph_http_connections_refused_total"), 1.0);
    server.calm();
}

#[test]
fn the_other_routes_answer() {
    let mut server = serve(&["--max-slots", "2"]);
    let version = server.get("/version").json();
    assert_eq!((&version["engine"], version["version"].is_string()), (&json!("slotgraph"), true));
    assert!(version["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
    let reply = server.complete(json!({"max_tokens": 1})).json();
    assert_eq!(reply["system_fingerprint"], version["system_fingerprint"]);
    let tokens = server.post("/tokenize", &json!({"prompt": "Hello", "return_token_strs": true})).json();
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!([0, 42, 422, 81]), &json!(4)));
    assert_eq!(tokens["token_strs"].as_array().unwrap().len(), 4);
    assert_eq!(tokens["max_model_len"], 2048);
    assert_eq!(server.post("/detokenize", &json!({"tokens": [42, 422, 81]})).json()["prompt"], "Hello");
    assert_eq!(server.post("/detokenize", &json!({"tokens": [9999]})).refusal(400).0.as_deref(), Some("tokens"));
    let mut stream = server.stream(json!({"max_tokens": 1500, "ignore_eos": true}));
    stream.next_event().unwrap();
    let slots = server.get("/debug/slots").json();
    assert_eq!(slots["slots"].as_array().unwrap().len(), 1);
    assert_eq!(slots["slots"][0]["state"], "active");
    drop(stream);
    let graphs = server.get("/debug/graphs").json();
    assert_eq!(graphs["ranks"][0]["device"]["kind"], "cpu");
    assert_eq!(graphs["startup"]["tag"], "slotgraph_startup");
    let steps: u64 = graphs["buckets"].as_array().unwrap().iter().map(|bucket| bucket["steps"].as_u64().unwrap()).sum();
    assert!(steps > 0);
    server.calm();
}

#[test]
fn sse_keeps_quiet_until_there_is_something() {
    let mut server = serve(&["--max-slots", "1"]);
    let fields = json!({"prompt": "Once", "max_tokens": 300, "ignore_eos": true});
    let mut first = server.stream(fields.clone());
    // The second waits in the queue, with its head and its role already there.
    let mut second = server.stream_chat(json!({"max_tokens": 5, "ignore_eos": true}));
    assert_eq!(second.head.header("x-accel-buffering"), Some("no"));
    let role: Value = serde_json::from_str(&second.next_event().unwrap().unwrap().data).unwrap();
    assert_eq!(role["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(finishes(&chunks(&first.all()), 0), ["length"]);
    assert!(second.all().len() > 2);
    server.calm();
}

fn generate(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(BINARY).arg("generate").args(["--device", "cpu"]).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn generate_prints_one_json_line() {
    let oracle = std::fs::read(slotgraph_tests::root().join("tests/oracle/dsv2.json")).unwrap();
    let oracle: Value = serde_json::from_slice(&oracle).unwrap();
    let case = &oracle["cases"][0];
    let prompt = case["prompt"].as_str().unwrap();
    let (code, out, _) =
        generate(&["--prompt", prompt, "--max-tokens", "48", "--ignore-eos", "--logprobs", "3", "--json"]);
    assert_eq!((code, out.lines().count()), (0, 1));
    let line: Value = serde_json::from_str(&out).unwrap();
    let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["prompt_ids", "tokens", "text", "finish_reason", "logprobs"]);
    for key in ["prompt_ids", "tokens", "text"] {
        assert_eq!(line[key], case[key], "{key}");
    }
    assert_eq!(line["finish_reason"], "length");
    assert_eq!(line["logprobs"].as_array().unwrap().len(), 48);
    assert_eq!(line["logprobs"][0]["top"].as_array().unwrap().len(), 3);
    let ids: Vec<String> = case["prompt_ids"].as_array().unwrap().iter().map(Value::to_string).collect();
    let by_ids = generate(&["--prompt-ids", &ids.join(","), "--max-tokens", "8", "--ignore-eos"]);
    assert!(case["text"].as_str().unwrap().starts_with(by_ids.1.trim_end_matches('\n')), "{by_ids:?}");
    for (arguments, named) in [
        (&["--prompt-ids", "1,9999"][..], "--prompt-ids"),
        (&["--prompt", "x", "--max-tokens", "5000"], "--max-tokens"),
        (&[], "--prompt"),
    ] {
        let (code, _, log) = generate(arguments);
        assert_eq!(code, 2);
        assert!(log.contains(named), "{log}");
    }
}

#[test]
fn the_configuration_is_printed() {
    let arguments =
        ["serve", "--device", "cpu", "--print-config", "--max-num-seqs", "3", "--served-model-name", "a", "b"];
    let output = Command::new(BINARY).args(arguments).output().unwrap();
    assert!(output.status.success());
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed["config"]["max_slots"], 3);
    assert_eq!(printed["config"]["served_names"], json!(["a", "b"]));
    assert!(printed["memory"].is_object());
    for (arguments, named) in [
        (&["--prefix-cache", "on"][..], "--prefix-cache"),
        (&["--ep", "3"], "--ep"),
        (&["--no-such-flag"], "--no-such-flag"),
        (&["--transport", "pigeon"], "--transport"),
    ] {
        let (code, log, took) = refused(BINARY, &[&["--port", "0", "--device", "cpu"], arguments].concat(), &[]);
        assert_eq!(code, 2, "{log}");
        assert!(log.contains(named), "{log}");
        assert!(took < Duration::from_secs(2));
    }
}
