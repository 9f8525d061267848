//! Streaming and response shape.

use crate::serve;
use serde_json::{Value, json};
use slotgraph_tests::http::{Stream, chunks, finishes, joined, post};
use std::time::Duration;

#[test]
fn hand_d1_n_out_of_range_and_failing_streams() {
    let mut server = serve(&[]);
    let refused = |fields: Value| server.chat(fields).refusal(400);
    let below = (Some("n".to_owned()), Some("integer_below_min_value".to_owned()));
    assert_eq!(refused(json!({"n": 0, "stream": true})), below);
    assert_eq!(refused(json!({"n": -1})), below);
    assert_eq!(refused(json!({"n": 129})).1.as_deref(), Some("integer_above_max_value"));
    for n in [json!("2"), json!(1.5)] {
        assert_eq!(refused(json!({"n": n})).1.as_deref(), Some("invalid_type"));
    }
    let two = server.chat(json!({"n": 2, "temperature": 0, "max_tokens": 8})).json();
    let one = server.chat(json!({"temperature": 0, "max_tokens": 8})).json();
    let choices = two["choices"].as_array().unwrap();
    assert_eq!((choices.len(), &choices[0]["message"]), (2, &choices[1]["message"]));
    assert_eq!((&choices[0]["index"], &choices[1]["index"]), (&json!(0), &json!(1)));
    assert_eq!(two["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);
    server.calm();
}

#[test]
fn hand_d1_an_engine_error_ends_the_stream() {
    for stream in [true, false] {
        let mut server =
            slotgraph_tests::server::launch(crate::BINARY, &["--device", "cpu", "--fault", "device-error@12"], &[]);
        server.wait_ready();
        let body = server
            .completion(json!({"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": stream}))
            .to_string();
        let mut conn = server.conn();
        conn.send(&post("/v1/completions", &body, &[]));
        match stream {
            true => {
                let mut stream = Stream::of(conn);
                let mut data = Vec::new();
                while let Ok(Some(event)) = stream.next_event() {
                    data.push(event.data);
                }
                let last: Value = serde_json::from_str(data.last().unwrap()).unwrap();
                assert_eq!(last["error"].as_object().unwrap().len(), 4, "{last}");
                assert_eq!(last["error"]["type"], "server_error");
                assert!(data.len() > 1, "tokens came before the fault");
                assert!(data.iter().all(|data| !data.contains("\"finish_reason\":\"")), "no false finish reason");
                assert!(stream.conn.closes_within(Duration::from_secs(5)));
            }
            false => assert_eq!(conn.reply(false).error(500)["type"], "server_error"),
        }
        assert_eq!(server.exit(Duration::from_secs(3)).code(), Some(1));
    }
}

#[test]
fn hand_d2_the_usage_chunk() {
    let mut server = serve(&[]);
    for chat in [false, true] {
        let ask = |fields: Value| {
            let mut stream = if chat { server.stream_chat(fields) } else { server.stream(fields) };
            chunks(&stream.all())
        };
        let base = json!({"max_tokens": 6, "temperature": 0});
        let mut fields = base.clone();
        fields["stream_options"] = json!({"include_usage": true});
        let with_usage = ask(fields);
        let (last, others) = with_usage.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        let usage = &last["usage"];
        assert_eq!(
            usage["total_tokens"].as_u64().unwrap(),
            usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap()
        );
        assert!(others.iter().all(|chunk| chunk.get("usage").is_some_and(Value::is_null)));
        assert!(others.last().unwrap()["choices"][0]["finish_reason"].is_string());
        let whole = if chat { server.chat(base.clone()) } else { server.complete(base.clone()) };
        assert_eq!(whole.json()["usage"], *usage);
        for options in [json!({"include_usage": false}), Value::Null] {
            let mut fields = base.clone();
            fields["stream_options"] = options;
            let without = ask(fields);
            assert!(without.iter().all(|chunk| !chunk["choices"].as_array().unwrap().is_empty()));
            assert!(without.iter().all(|chunk| chunk["usage"].is_null()));
        }
    }
    let refused = |fields: Value| server.complete(fields).refusal(400);
    assert_eq!(refused(json!({"stream_options": {"include_usage": true}})).0.as_deref(), Some("stream_options"));
    for options in [json!(7), json!({"include_usage": "yes"})] {
        let (param, code) = refused(json!({"stream": true, "stream_options": options}));
        assert!(param.unwrap().starts_with("stream_options"));
        assert_eq!(code.as_deref(), Some("invalid_type"));
    }
    // A client that leaves is owed nothing; its tokens are still counted.
    let before = server.gauge("vllm:generation_tokens_total");
    let mut left =
        server.stream(json!({"max_tokens": 500, "ignore_eos": true, "stream_options": {"include_usage": true}}));
    for _ in 0..3 {
        left.next_event().unwrap();
    }
    drop(left);
    server.until(Duration::from_secs(2), "tokens counted", |server| {
        server.gauge("vllm:generation_tokens_total") >= before + 3.0
    });
    server.calm();
}

#[test]
fn hand_d3_deltas() {
    let mut server = serve(&[]);
    let mut stream = server.stream_chat(json!({"max_tokens": 64, "temperature": 0}));
    assert_eq!(stream.head.version, "HTTP/1.1");
    assert!(stream.head.header("content-type").unwrap().starts_with("text/event-stream"));
    assert_eq!(stream.head.header("cache-control"), Some("no-cache"));
    let events = stream.all();
    let seen = chunks(&events);
    assert!(stream.raw.ends_with(b"data: [DONE]\n\n"));
    let whole = server.chat(json!({"max_tokens": 64, "temperature": 0})).json();
    assert_eq!(joined(&seen, 0), whole["choices"][0]["message"]["content"].as_str().unwrap());
    check_chat_stream(&seen, 1);
    // No burst at the end, and none that waits for the client's acknowledgement.
    let mut gaps: Vec<Duration> = events.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    gaps.sort_unstable();
    assert!(gaps[gaps.len() / 2] < Duration::from_millis(40), "{gaps:?}");
    let mut early = server.stream_chat(json!({"max_tokens": 1500, "ignore_eos": true}));
    for _ in 0..3 {
        early.next_event().unwrap();
    }
    assert_eq!(server.gauge("vllm:num_requests_running"), 1.0, "the first events come while the rest is computed");
    drop(early);
    let seen = chunks(&server.stream_chat(json!({"n": 3, "max_tokens": 12, "seed": 5})).all());
    check_chat_stream(&seen, 3);
    // HTTP/1.0, and a connection that is to be closed.
    let body = server.completion(json!({"stream": true, "max_tokens": 4, "temperature": 0})).to_string();
    for (version, header) in [("1.0", ""), ("1.1", "connection: close\r\n")] {
        let mut conn = server.conn();
        conn.send(
            format!(
                "POST /v1/completions HTTP/{version}\r\nhost: t\r\n{header}content-length: {}\r\n\r\n{body}",
                body.len()
            )
            .as_bytes(),
        );
        let mut stream = Stream::of(conn);
        assert_eq!(finishes(&chunks(&stream.all()), 0).len(), 1);
        assert!(stream.conn.closes_within(Duration::from_secs(5)));
    }
    server.calm();
}

/// Roles, ids and finish reasons of a chat stream with `n` choices.
fn check_chat_stream(seen: &[Value], n: u64) {
    for chunk in seen {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        for key in ["id", "created", "model"] {
            assert_eq!(chunk[key], seen[0][key], "{key}");
        }
    }
    for index in 0..n {
        let choices: Vec<&Value> = seen
            .iter()
            .flat_map(|chunk| chunk["choices"].as_array().unwrap())
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(choices[0]["delta"]["role"], "assistant");
        assert!(choices[1..].iter().all(|choice| choice["delta"].get("role").is_none()));
        let (last, others) = choices.split_last().unwrap();
        assert!(last["delta"].get("content").is_none() && last["finish_reason"].is_string());
        assert!(others.iter().all(|choice| choice["finish_reason"].is_null()));
    }
}

#[test]
fn hand_d4_characters_split_over_tokens() {
    let mut server = serve(&[]);
    // The demo model would not write these by itself: a bias makes it continue with the bytes of the prompt.
    let prompt = "Repeat exactly: 👨‍👩‍👧‍👦 𠮷 한국어 é — ";
    let ids = server.post("/tokenize", &json!({"prompt": "👨𠮷한é—", "add_special_tokens": false})).json();
    let ids: Vec<u64> = serde_json::from_value(ids["tokens"].clone()).unwrap();
    let bias: serde_json::Map<String, Value> = ids.iter().map(|id| (id.to_string(), json!(60))).collect();
    let mut incomplete = 0;
    for k in 1..=40 {
        let fields = json!({
            "prompt": prompt, "temperature": 1.5, "seed": k, "max_tokens": k, "ignore_eos": true, "logit_bias": bias,
            "return_token_ids": true,
        });
        let whole = server.complete(fields.clone()).json();
        let text = whole["choices"][0]["text"].as_str().unwrap();
        assert_eq!(whole["usage"]["completion_tokens"], k);
        let seen = chunks(&server.stream(fields).all());
        assert_eq!(joined(&seen, 0), text);
        let ids = &whole["choices"][0]["token_ids"];
        let decoded = server.post("/detokenize", &json!({"tokens": ids})).json()["prompt"].clone();
        assert_eq!(text, decoded.as_str().unwrap(), "text is the decoding of all ids");
        incomplete += usize::from(text.ends_with('\u{fffd}'));
    }
    assert!(incomplete > 0, "no answer ended inside a character");
    server.calm();
}

#[test]
fn hand_d5_stop_strings() {
    let mut server = serve(&[]);
    let base =
        json!({"prompt": "Enter HAMLET.", "max_tokens": 64, "temperature": 0, "logprobs": 0, "ignore_eos": true});
    let reply = server.complete(base.clone()).json();
    let text = reply["choices"][0]["text"].as_str().unwrap().to_owned();
    let pieces: Vec<String> = serde_json::from_value(reply["choices"][0]["logprobs"]["tokens"].clone()).unwrap();
    for i in [3, 10, 20] {
        let end: String = pieces[i].chars().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect();
        let stop = end + &pieces[i + 1].chars().take(2).collect::<String>();
        let expected = text.split(&stop).next().unwrap();
        let mut fields = base.clone();
        fields["stop"] = json!(stop);
        let whole = server.complete(fields.clone()).json();
        assert_eq!(
            (&whole["choices"][0]["text"], &whole["choices"][0]["finish_reason"]),
            (&json!(expected), &json!("stop"))
        );
        let seen = chunks(&server.stream(fields).all());
        let mut so_far = String::new();
        for chunk in &seen {
            so_far += chunk["choices"][0]["text"].as_str().unwrap();
            assert!(expected.starts_with(&so_far), "{so_far:?} of {expected:?}");
        }
        assert_eq!((so_far.as_str(), finishes(&seen, 0)), (expected, vec!["stop".to_owned()]));
    }
    let never: String = text.chars().rev().take(2).collect::<Vec<_>>().into_iter().rev().chain(['\u{1}']).collect();
    let mut fields = base.clone();
    fields["stop"] = json!(never);
    let whole = server.complete(fields.clone()).json();
    assert_eq!((&whole["choices"][0]["text"], &whole["choices"][0]["finish_reason"]), (&json!(text), &json!("length")));
    assert_eq!(joined(&chunks(&server.stream(fields).all()), 0), text);
    for stop in [json!("x"), json!(["x"]), json!([]), Value::Null] {
        assert_eq!(server.complete(json!({"stop": stop, "max_tokens": 2})).status(), 200);
    }
    let refused = |stop: Value| server.complete(json!({"stop": stop})).refusal(400);
    let five = refused(json!(["a", "b", "c", "d", "e"]));
    assert_eq!(five, (Some("stop".into()), Some("array_above_max_length".into())));
    for stop in [json!(""), json!([""]), json!([1]), json!({})] {
        assert_eq!(refused(stop).0.as_deref(), Some("stop"));
    }
    let echoed = json!({"prompt": "stop here", "stop": "stop here", "echo": true, "max_tokens": 2, "temperature": 0});
    assert!(server.complete(echoed).json()["choices"][0]["text"].as_str().unwrap().starts_with("stop here"));
    // The same rules in chat.
    let chat = json!({"max_tokens": 32, "temperature": 0, "ignore_eos": true});
    let text = server.chat(chat.clone()).json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(6).take(4).collect();
    let mut fields = chat;
    fields["stop"] = json!([stop]);
    let expected = text.split(&stop).next().unwrap();
    assert_eq!(server.chat(fields.clone()).json()["choices"][0]["message"]["content"], expected);
    assert_eq!(joined(&chunks(&server.stream_chat(fields).all()), 0), expected);
    server.calm();
}

#[test]
fn hand_d6_arrays_of_prompts() {
    let mut server = serve(&["--max-slots", "4"]);
    let fields = json!({"prompt": ["A b c", "1 2 3", "x y z"], "n": 2, "max_tokens": 8, "temperature": 0});
    let whole = server.complete(fields.clone()).json();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 6);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["text"], choices[index / 2 * 2]["text"]);
    }
    let alone = |prompt: &str| server.complete(json!({"prompt": prompt, "max_tokens": 8, "temperature": 0})).json();
    let singles: Vec<Value> = ["A b c", "1 2 3", "x y z"].into_iter().map(alone).collect();
    for (number, single) in singles.iter().enumerate() {
        assert_eq!(choices[2 * number]["text"], single["choices"][0]["text"]);
    }
    let sum = |key: &str| singles.iter().map(|single| single["usage"][key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(whole["usage"]["prompt_tokens"], sum("prompt_tokens"));
    assert_eq!(whole["usage"]["completion_tokens"], 2 * sum("completion_tokens"));
    let mut streamed = fields;
    streamed["stream_options"] = json!({"include_usage": true});
    let seen = chunks(&server.stream(streamed).all());
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(joined(&seen, index as u64), choice["text"].as_str().unwrap());
        assert_eq!(finishes(&seen, index as u64).len(), 1);
    }
    assert_eq!(seen.iter().filter(|chunk| chunk["usage"].is_object()).count(), 1);
    let ids = server.complete(json!({"prompt": [[9], [9, 11], [9, 11, 187]], "max_tokens": 2, "temperature": 0}));
    assert_eq!(ids.json()["choices"].as_array().unwrap().len(), 3);
    let many: Vec<String> = (0..20).map(|number| format!("number {number}")).collect();
    let waves = server.complete(json!({"prompt": many, "max_tokens": 4, "temperature": 0})).json();
    assert_eq!(waves["choices"].as_array().unwrap().len(), 20);
    server.calm();
}

#[test]
fn hand_d7_logprobs() {
    let mut server = serve(&[]);
    let reply = server.complete(json!({"logprobs": 2, "max_tokens": 5, "temperature": 0})).json();
    let tokens = reply["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    let logprobs = &reply["choices"][0]["logprobs"];
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[key].as_array().unwrap().len(), tokens, "{key}");
    }
    for top in logprobs["top_logprobs"].as_array().unwrap() {
        assert!([2, 3].contains(&top.as_object().unwrap().len()), "{top}");
    }
    let ids = [0, 42, 422, 81, 16];
    let echoed = json!({"prompt": ids, "logprobs": 1, "echo": true, "max_tokens": 0});
    let scored = server.complete(echoed).json()["choices"][0]["logprobs"].clone();
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(scored[key].as_array().unwrap().len(), 5, "{key}");
    }
    let values = scored["token_logprobs"].as_array().unwrap();
    assert!(values[0].is_null() && scored["top_logprobs"][0].is_null());
    assert!(values[1..].iter().all(|value| value.as_f64().is_some_and(|value| value <= 0.0)));
    let none = server.complete(json!({"logprobs": 0, "max_tokens": 3, "temperature": 0})).json();
    let none = &none["choices"][0]["logprobs"];
    assert!(none["token_logprobs"].as_array().unwrap().iter().all(Value::is_number));
    assert!(none["top_logprobs"].as_array().unwrap().iter().all(|top| top.as_object().unwrap().is_empty()));
    for logprobs in [json!(6), json!(-1), json!(true)] {
        assert_eq!(server.complete(json!({"logprobs": logprobs})).refusal(400).0.as_deref(), Some("logprobs"));
    }
    assert_eq!(server.chat(json!({"logprobs": 1})).refusal(400).0.as_deref(), Some("logprobs"));
    let many = json!({"logprobs": true, "top_logprobs": 21});
    assert_eq!(server.chat(many).refusal(400).0.as_deref(), Some("top_logprobs"));
    assert_eq!(server.chat(json!({"top_logprobs": 2})).refusal(400).0.as_deref(), Some("top_logprobs"));
    let chat = server.chat(json!({"logprobs": true, "max_tokens": 6, "temperature": 0})).json();
    let choice = &chat["choices"][0];
    let content = choice["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|token| token["bytes"].as_array().unwrap())
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(String::from_utf8_lossy(&bytes), choice["message"]["content"].as_str().unwrap());
    assert!(content.iter().all(|token| token["top_logprobs"] == json!([])));
    assert!(choice["logprobs"]["refusal"].is_null());
    // All numbers stay finite.
    let top = server.chat(json!({"logprobs": true, "top_logprobs": 20, "max_tokens": 1, "temperature": 0})).json();
    let top = &top["choices"][0]["logprobs"]["content"][0]["top_logprobs"];
    let banned: Vec<String> =
        top.as_array().unwrap()[2..].iter().map(|t| t["token"].as_str().unwrap().into()).collect();
    let mut bias = serde_json::Map::new();
    for token in banned {
        let ids = server.post("/tokenize", &json!({"prompt": token, "add_special_tokens": false})).json();
        if let Some([id]) = ids["tokens"].as_array().map(Vec::as_slice) {
            bias.insert(id.to_string(), json!(-100));
        }
    }
    let fields = json!({"logit_bias": bias, "top_p": 0.01, "temperature": 1, "logprobs": 5, "max_tokens": 8});
    let text = server.complete(fields).text().to_owned();
    assert!(!text.contains("NaN") && !text.contains("Infinity"));
    let value: Value = serde_json::from_str(&text).unwrap();
    let numbers = value["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
    assert!(numbers.iter().all(Value::is_number));
    server.calm();
}

#[test]
fn hand_d8_line_separators() {
    let mut server = serve(&[]);
    let fields = json!({"prompt": "a\u{2028}b\u{2029}c\u{85}d\u{b}e", "echo": true, "max_tokens": 1, "temperature": 0});
    let whole = server.complete(fields.clone()).json()["choices"][0]["text"].as_str().unwrap().to_owned();
    let mut stream = server.stream(fields);
    let events = stream.all();
    let raw = String::from_utf8(stream.raw.clone()).unwrap();
    assert!(!raw.contains(['\u{85}', '\u{2028}', '\u{2029}', '\u{b}']));
    // What splits lines the Unicode way sees the same events as what splits at line feeds.
    let unicode =
        raw.split(['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}']);
    assert!(unicode.eq(raw.split('\n')));
    assert_eq!(joined(&chunks(&events), 0), whole);
    server.calm();
}
