//! Sampling.

use crate::serve;
use serde_json::{Value, json};
use slotgraph_tests::http::{chunks, joined};
use slotgraph_tests::server::Server;

fn text(server: &Server, fields: Value) -> String {
    let reply = server.complete(fields);
    assert_eq!(reply.status(), 200, "{}", reply.text());
    reply.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn merged(base: &Value, more: Value) -> Value {
    let mut fields = base.clone();
    for (key, value) in more.as_object().unwrap() {
        fields[key] = value.clone();
    }
    fields
}

#[test]
fn hand_e1_extreme_but_legal_values() {
    let mut server = serve(&[]);
    let base = json!({"prompt": "Enter HAMLET.", "max_tokens": 24, "seed": 3});
    let ask = |more: Value| text(&server, merged(&base, more));
    let greedy = ask(json!({"temperature": 0}));
    for more in [
        json!({"temperature": 1e-9}),
        json!({"temperature": 5e-324}),
        json!({"temperature": 1, "top_p": 0}),
        json!({"temperature": 1, "top_p": 1e-4}),
        json!({"temperature": 1, "top_k": 1}),
    ] {
        assert_eq!(ask(more.clone()), greedy, "{more}");
    }
    let free = ask(json!({"temperature": 1}));
    for top_k in [0, -1, 9_999_999] {
        assert_eq!(ask(json!({"temperature": 1, "top_k": top_k})), free);
    }
    for (fragment, param) in [
        (json!({"top_k": -2}), "top_k"),
        (json!({"temperature": 2.01}), "temperature"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"top_p": 1.01}), "top_p"),
        (json!({"top_p": -0.1}), "top_p"),
    ] {
        assert_eq!(server.complete(fragment).refusal(400).0.as_deref(), Some(param));
    }
    // Greedy rows are what they are beside sampled ones.
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (ask, greedy) = (&ask, &greedy);
            scope.spawn(move || match number % 2 {
                0 => assert_eq!(&ask(json!({"temperature": 0})), greedy),
                _ => drop(ask(json!({"temperature": 1, "seed": number}))),
            });
        }
    });
    server.calm();
}

#[test]
fn hand_e2_seeds_are_worth_the_same_in_any_company() {
    let mut server = serve(&[]);
    let request = json!({"prompt": "Once", "seed": 42, "temperature": 0.8, "max_tokens": 48, "ignore_eos": true});
    let alone = text(&server, request.clone());
    for _ in 0..4 {
        assert_eq!(text(&server, request.clone()), alone);
    }
    std::thread::scope(|scope| {
        for number in 0..7 {
            let (server, request) = (&server, &request);
            scope.spawn(move || match number % 4 {
                0 => drop(server.complete(json!({"prompt": "x", "max_tokens": 40, "ignore_eos": true}))),
                1 => drop(server.complete(merged(request, json!({"seed": number})))),
                2 => drop(server.complete(merged(request, json!({"temperature": 0})))),
                _ => drop(server.stream(json!({"max_tokens": 500, "ignore_eos": true})).next_event()),
            });
        }
        for _ in 0..3 {
            assert_eq!(text(&server, request.clone()), alone);
        }
    });
    let seeds = [json!(0), json!(-1), json!(i64::MAX), json!(i64::MIN)];
    let mut seen: Vec<String> = Vec::new();
    for seed in seeds {
        let fields = merged(&request, json!({"seed": seed, "temperature": 1.5}));
        let first = text(&server, fields.clone());
        assert_eq!(text(&server, fields), first);
        assert!(!seen.contains(&first));
        seen.push(first);
    }
    let mut unseeded = request;
    unseeded.as_object_mut().unwrap().remove("seed");
    let texts: Vec<String> = (0..5).map(|_| text(&server, unseeded.clone())).collect();
    assert!(texts.iter().any(|text| *text != texts[0]));
    server.calm();
}

#[test]
fn hand_e3_min_tokens_ignore_eos_and_bias() {
    let mut server = serve(&[]);
    let base =
        json!({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 10, "logit_bias": {"1": 100}});
    let ask = |more: Value| server.complete(merged(&base, more)).json();
    let stopped = ask(json!({}));
    assert_eq!((&stopped["choices"][0]["text"], &stopped["choices"][0]["finish_reason"]), (&json!(""), &json!("stop")));
    assert!(stopped["usage"]["completion_tokens"].as_u64().unwrap() <= 1);
    let later = ask(json!({"min_tokens": 5, "return_token_ids": true}));
    let ids: Vec<u64> = serde_json::from_value(later["choices"][0]["token_ids"].clone()).unwrap();
    assert_eq!(later["choices"][0]["finish_reason"], "stop");
    assert!(ids.len() == 6 && ids[5] == 1 && !ids[..5].contains(&1), "five visible tokens, then EOS: {ids:?}");
    let ignored = ask(json!({"ignore_eos": true}));
    assert_eq!(
        (&ignored["usage"]["completion_tokens"], &ignored["choices"][0]["finish_reason"]),
        (&json!(10), &json!("length"))
    );
    for min_tokens in [json!(11), json!(-1), json!("5")] {
        let reply = server.complete(merged(&base, json!({"min_tokens": min_tokens})));
        assert_eq!(reply.refusal(400).0.as_deref(), Some("min_tokens"));
    }
    // A stop string that occurs before min_tokens does not count.
    let plain = json!({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 12, "ignore_eos": true});
    let whole = text(&server, plain.clone());
    let early: String = whole.chars().take(2).collect();
    let stopped = server.complete(merged(&plain, json!({"stop": early, "min_tokens": 6}))).json();
    assert!(stopped["usage"]["completion_tokens"].as_u64().unwrap() >= 6);
    assert!(stopped["choices"][0]["text"].as_str().unwrap().starts_with(&early));
    server.calm();
}

#[test]
fn hand_e4_numbers_out_of_range() {
    let mut server = serve(&[]);
    let running: Vec<Value> = (0..4)
        .map(|number| json!({"prompt": format!("{number}"), "max_tokens": 200, "temperature": 0, "ignore_eos": true}))
        .collect();
    let expected: Vec<String> = running.iter().map(|fields| text(&server, fields.clone())).collect();
    let cases = [
        (r#""temperature":NaN"#, None),
        (r#""temperature":Infinity"#, None),
        (r#""temperature":1e400"#, Some("temperature")),
        (r#""temperature":1e39"#, Some("temperature")),
        (r#""top_p":1e400"#, Some("top_p")),
        (r#""frequency_penalty":1e39"#, Some("frequency_penalty")),
        (r#""repetition_penalty":0"#, Some("repetition_penalty")),
        (r#""repetition_penalty":-1"#, Some("repetition_penalty")),
        (r#""repetition_penalty":1e39"#, Some("repetition_penalty")),
        (r#""frequency_penalty":2.1"#, Some("frequency_penalty")),
        (r#""presence_penalty":-2.1"#, Some("presence_penalty")),
        (r#""min_p":1.1"#, Some("min_p")),
        (r#""logit_bias":{"2048":1}"#, Some("logit_bias")),
        (r#""logit_bias":{"-1":1}"#, Some("logit_bias")),
        (r#""logit_bias":{"abc":1}"#, Some("logit_bias")),
        (r#""logit_bias":{"1":101}"#, Some("logit_bias")),
        (r#""logit_bias":{"1":"x"}"#, Some("logit_bias")),
        (r#""logit_bias":[]"#, Some("logit_bias")),
        (r#""seed":9223372036854775808"#, Some("seed")),
        (r#""seed":1.5"#, Some("seed")),
        (r#""seed":"a""#, Some("seed")),
    ];
    std::thread::scope(|scope| {
        for (fields, expected) in running.iter().zip(&expected) {
            let server = &server;
            scope.spawn(move || {
                let seen = chunks(&server.stream(fields.clone()).all());
                assert_eq!(&joined(&seen, 0), expected);
            });
        }
        for (fragment, param) in cases {
            let body = format!(r#"{{"model":"{}","prompt":"hi",{fragment}}}"#, server.model);
            assert_eq!(server.post_raw("/v1/completions", &body).refusal(400).0.as_deref(), param, "{fragment}");
        }
    });
    for bias in [json!({"1": 100}), json!({"1": -100})] {
        assert_eq!(server.complete(json!({"logit_bias": bias, "max_tokens": 2})).status(), 200);
    }
    server.calm();
}

#[test]
fn hand_e5_ties() {
    let mut server = serve(&[]);
    let greedy = json!({"prompt": "Enter", "max_tokens": 12, "temperature": 0});
    let expected = text(&server, greedy.clone());
    for seed in 0..10 {
        assert_eq!(text(&server, merged(&greedy, json!({"seed": seed}))), expected);
        assert_eq!(text(&server, merged(&greedy, json!({"seed": seed, "temperature": 1, "top_k": 1}))), expected);
    }
    server.calm();
}

#[test]
fn hand_e5_a_row_that_is_not_a_number_fails_alone() {
    // From step 150 on (after the canary and the answers alone): the cache of one of three is spoiled.
    let mut server = serve(&["--fault", "nan-cache@150"]);
    let asked: Vec<Value> = ["Enter HAMLET.", "To be, or not to be", "Once"]
        .into_iter()
        .map(|prompt| {
            json!({
                "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": 5,
                "return_token_ids": true,
            })
        })
        .collect();
    let whole = |fields: &Value| server.complete(fields.clone()).json()["choices"][0].clone();
    let alone: Vec<Value> = asked.iter().map(whole).collect();
    assert_eq!(server.gauge("slotgraph_nan_rows_total"), 0.0);
    let longer: Vec<Value> = asked.iter().map(|fields| merged(fields, json!({"max_tokens": 300}))).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = longer
            .iter()
            .map(|fields| {
                let server = &server;
                scope.spawn(move || server.complete(fields.clone()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let failed = together.iter().filter(|reply| reply.status() != 200).collect::<Vec<_>>();
    assert_eq!(failed.len(), 1, "one row, one request");
    let error = failed[0].error(500);
    assert_eq!(error["type"], "server_error");
    assert!(error["message"].as_str().unwrap().contains("not a number"), "{error}");
    for (reply, alone) in together.iter().zip(&alone).filter(|(reply, _)| reply.status() == 200) {
        let choice = &reply.json()["choices"][0];
        for (ids, expected) in [
            (&choice["token_ids"], &alone["token_ids"]),
            (&choice["logprobs"]["token_logprobs"], &alone["logprobs"]["token_logprobs"]),
        ] {
            assert_eq!(ids.as_array().unwrap()[..24], expected.as_array().unwrap()[..]);
        }
    }
    assert_eq!(server.gauge("slotgraph_nan_rows_total"), 1.0);
    assert_eq!(server.metric("slotgraph_requests_total", &["outcome=\"error\""]), 1.0);
    // Its pages go to others, who see nothing of it.
    let again: Vec<Value> = asked.iter().map(whole).collect();
    assert_eq!(again, alone);
    server.calm();
}
