//! Tokenizer files and prompts.

use crate::{serve, serve_folder};
use serde_json::{Value, json};
use slotgraph_tests::server::{Server, copy_of, edit, refused};

/// How a request whose next token is forced ends.
fn forced(server: &Server, id: u32) -> (String, u64, String) {
    let mut bias = serde_json::Map::new();
    bias.insert(id.to_string(), json!(100));
    let reply = server.complete(json!({"logit_bias": bias, "max_tokens": 5, "temperature": 0})).json();
    let choice = &reply["choices"][0];
    (
        choice["finish_reason"].as_str().unwrap().to_owned(),
        reply["usage"]["completion_tokens"].as_u64().unwrap(),
        choice["text"].as_str().unwrap().to_owned(),
    )
}

#[test]
fn hand_f5_end_of_sequence_from_two_files() {
    let model = slotgraph_tests::model("shakespeare-dsv2");
    let stops = |server: &Server, id: u32| {
        let (reason, tokens, text) = forced(server, id);
        assert_eq!((reason.as_str(), tokens), ("stop", 1), "{id}");
        assert_eq!(text, "");
    };
    let runs_on = |server: &Server, id: u32| {
        let (reason, tokens, _) = forced(server, id);
        assert_eq!((reason.as_str(), tokens), ("length", 5), "{id}");
    };
    let folder = copy_of(&model);
    edit(folder.path(), "generation_config.json", |value| value["eos_token_id"] = json!([1, 2]));
    let mut server = serve_folder(folder.path(), &[]);
    stops(&server, 1);
    stops(&server, 2);
    server.calm();

    let folder = copy_of(&model);
    std::fs::remove_file(folder.path().join("generation_config.json")).unwrap();
    let mut server = serve_folder(folder.path(), &[]);
    stops(&server, 1);
    runs_on(&server, 2);
    assert_eq!(forced(&server, 2).2, "", "special tokens are not shown");
    server.calm();

    let folder = copy_of(&model);
    std::fs::remove_file(folder.path().join("generation_config.json")).unwrap();
    edit(folder.path(), "config.json", |value| value["eos_token_id"] = json!([1, 2]));
    let mut server = serve_folder(folder.path(), &[]);
    stops(&server, 1);
    stops(&server, 2);
    server.calm();

    let folder = copy_of(&model);
    edit(folder.path(), "generation_config.json", |value| value["eos_token_id"] = Value::Null);
    let mut server = serve_folder(folder.path(), &[]);
    stops(&server, 1);
    server.calm();

    for bad in [json!("1"), json!([]), json!(99_999_999)] {
        let folder = copy_of(&model);
        std::fs::remove_file(folder.path().join("generation_config.json")).unwrap();
        edit(folder.path(), "config.json", |value| value["eos_token_id"] = bad.clone());
        let path = folder.path().to_str().unwrap();
        let (code, log, _) =
            refused(crate::BINARY, &["--port", "0", "--device", "cpu", "--print-config", "--model", path], &[]);
        assert!(code != 0 || log.contains("WARN"), "{bad}: {log}");
        assert!(log.contains("config.json") && log.contains("eos_token_id"), "{bad}: {log}");
    }

    let folder = copy_of(&model);
    edit(folder.path(), "generation_config.json", |value| {
        value["do_sample"] = json!(true);
        value["temperature"] = json!(0.6);
        value["top_k"] = json!(1);
    });
    let mut server = serve_folder(folder.path(), &[]);
    let fields = json!({"prompt": "Enter", "max_tokens": 12});
    let text = |fields: Value| server.complete(fields).json()["choices"][0]["text"].clone();
    let greedy = text(json!({"prompt": "Enter", "max_tokens": 12, "temperature": 0}));
    assert_eq!(text(fields.clone()), greedy, "the file's top_k 1 is a default");
    let mut explicit = fields;
    explicit["top_k"] = json!(-1);
    explicit["temperature"] = json!(2);
    assert_ne!(text(explicit), greedy, "the request's fields win");
    server.calm();
}

#[test]
fn hand_f6_prompts_are_what_hugging_face_would_build() {
    let oracle: Value = serde_json::from_slice(
        &std::fs::read(slotgraph_tests::root().join("tests/oracle/chat_template.json")).unwrap(),
    )
    .unwrap();
    for name in ["shakespeare-dsv2", "shakespeare-qwen3"] {
        let mut server = serve_folder(&slotgraph_tests::model(name), &[]);
        for case in oracle.as_array().unwrap().iter().filter(|case| case["model"] == name) {
            let fields = json!({
                "messages": case["messages"], "add_generation_prompt": case["add_generation_prompt"], "max_tokens": 6,
                "temperature": 0, "return_token_ids": true,
            });
            let chat = server.chat(fields.clone()).json();
            assert_eq!(chat["usage"]["prompt_tokens"], case["ids"].as_array().unwrap().len(), "{case}");
            assert_eq!(chat["prompt_token_ids"], case["ids"]);
            let ids = json!({"prompt": case["ids"], "max_tokens": 6, "temperature": 0, "return_token_ids": true});
            let plain = server.complete(ids).json();
            assert_eq!(plain["choices"][0]["token_ids"], chat["choices"][0]["token_ids"]);
            let rendered = server.post("/v1/chat/completions/render", &server.conversation(fields)).json();
            assert_eq!((&rendered["prompt"], &rendered["token_ids"]), (&case["text"], &case["ids"]));
            let asked = json!({"messages": case["messages"], "add_generation_prompt": case["add_generation_prompt"]});
            assert_eq!(server.post("/tokenize", &asked).json()["tokens"], case["ids"]);
            let text = json!({"prompt": case["text"]});
            assert_eq!(server.post("/tokenize", &text).json()["tokens"], case["plain_ids"]);
        }
        server.calm();
    }
}

#[test]
fn hand_f6_the_jinja_file_wins() {
    let folder = copy_of(&slotgraph_tests::model("shakespeare-dsv2"));
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ messages[-1].content.strip() }}!").unwrap();
    let mut server = serve_folder(folder.path(), &[]);
    let fields = json!({"messages": [{"role": "user", "content": " x "}]});
    assert_eq!(server.post("/v1/chat/completions/render", &server.conversation(fields)).json()["prompt"], "x!");
    server.calm();
    let mut plain = serve(&[]);
    let rendered = plain.post("/v1/chat/completions/render", &plain.conversation(json!({}))).json();
    assert_eq!(rendered["prompt"], "HAMLET.\nhi\n\nHORATIO.\n");
    plain.calm();
}
