//! Batches and buckets, on the device that interprets the plans of the graphs.

use crate::serve;
use serde_json::{Value, json};
use slotgraph_tests::http::post;

/// Ids and log-probabilities of each choice.
fn bits(answer: &Value) -> Vec<Value> {
    let choices = answer["choices"].as_array().expect("choices");
    choices.iter().map(|choice| json!([choice["token_ids"], choice["logprobs"]["token_logprobs"]])).collect()
}

fn asked(prompt: Value, tokens: u32) -> Value {
    json!({
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "logprobs": 1, "return_token_ids": true,
    })
}

#[test]
fn hand_a1_every_batch_size_below_every_bucket() {
    // 13 is no bucket; the pool is what 13 requests of two pages need, so its first and its last page belong to live ones.
    let mut server = serve(&["--max-slots", "13", "--buckets", "1,2,4,8,16", "--kv-pages", "131"]);
    let prompts: Vec<String> =
        (0..13).map(|number| format!("Scene {number}. Enter HAMLET and {number} players.")).collect();
    let alone: Vec<Value> =
        prompts.iter().map(|prompt| bits(&server.complete(asked(json!(prompt), 48)).json()).remove(0)).collect();
    for rows in [1, 3, 5, 6, 7, 9, 12, 13] {
        let together = server.complete(asked(json!(prompts[..rows]), 48)).json();
        assert_eq!(bits(&together), alone[..rows], "{rows} rows");
    }
    // Rows that end at different times.
    std::thread::scope(|scope| {
        for (number, prompt) in prompts.iter().enumerate() {
            let (server, alone) = (&server, &alone[number]);
            scope.spawn(move || {
                let tokens = 3 + 45 * number / 12;
                let answer = bits(&server.complete(asked(json!(prompt), tokens as u32)).json()).remove(0);
                for part in [0, 1] {
                    assert_eq!(answer[part].as_array().unwrap()[..], alone[part].as_array().unwrap()[..tokens]);
                }
            });
        }
    });
    server.calm();
}

#[test]
fn hand_a3_lengths_are_not_baked_in() {
    let mut server = serve(&["--buckets", "1,2,4,8,16"]);
    let short = asked(json!("Enter HAMLET."), 64);
    let alone = bits(&server.complete(short.clone()).json());
    // One row runs to the end of the context; a short one keeps its bits beside it, and after it in the slot that it left.
    let long = asked(json!([9, 11, 1879, 0, 9, 11, 1879, 0, 9, 11]), 2038);
    std::thread::scope(|scope| {
        let (server, long) = (&server, &long);
        let whole = scope.spawn(move || server.complete(long.clone()).json());
        let far = |server: &slotgraph_tests::server::Server| {
            let slots = server.get("/debug/slots").json();
            slots["slots"]
                .as_array()
                .is_some_and(|slots| slots.iter().any(|slot| slot["holder"]["position"].as_u64() > Some(1700)))
        };
        server.until(std::time::Duration::from_secs(120), "the long row is long", far);
        assert_eq!(bits(&server.complete(short.clone()).json()), alone);
        let whole = whole.join().unwrap();
        assert_eq!(whole["usage"]["total_tokens"], 2048);
        assert_eq!(whole["choices"][0]["finish_reason"], "length");
        assert_eq!(whole["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 2038);
    });
    assert_eq!(bits(&server.complete(short.clone()).json()), alone);
    server.calm();
}

#[test]
fn hand_a4_prefills_of_every_length_leave_a_stream_alone() {
    let mut server = serve(&[]);
    let fields = asked(json!("To be, or not to be"), 256);
    let alone = bits(&server.complete(fields.clone()).json());
    std::thread::scope(|scope| {
        let (server, fields) = (&server, &fields);
        let beside = scope.spawn(move || bits(&server.complete(fields.clone()).json()));
        for length in (0..40).map(|number| 1 + 16 * number) {
            let body = server.completion(json!({"prompt": vec![100; length], "max_tokens": 1})).to_string();
            assert_eq!(server.conn().ask(&post("/v1/completions", &body, &[])).status(), 200);
        }
        assert_eq!(beside.join().unwrap(), alone);
    });
    server.calm();
}
