//! The server as whoever operates it sees it: signals as process 1, log lines, file descriptors, keys in logs.

use serde_json::{Value, json};
use slotgraph_tests::http::{chunks, finishes};
use slotgraph_tests::server::{Server, behind, launch, start};
use std::process::{Command, Stdio};
use std::time::Duration;

const BINARY: &str = env!("CARGO_BIN_EXE_slotgraph-under-test");

/// Whether this machine allows a process 1 of one's own.
fn unshares() -> bool {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "true"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[test]
fn process_one_drains_under_load() {
    if !unshares() {
        println!("skipped: this machine does not allow unshare --pid");
        return;
    }
    let script = behind(BINARY, "exec unshare --pid --fork --kill-child");
    let mut server = start(script.to_str().unwrap(), &["--device", "cpu", "--max-slots", "2"]);
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", server.pid())).unwrap();
    let child = children.split_whitespace().next().unwrap().to_owned();
    let spaces = std::fs::read_to_string(format!("/proc/{child}/status")).unwrap();
    let inside = spaces.lines().find(|line| line.starts_with("NSpid:")).unwrap();
    assert_eq!(inside.split_whitespace().last(), Some("1"), "{inside}");
    // Two run and two wait when the signal comes; all four are served.
    let streams: Vec<_> =
        (0..4).map(|_| server.stream(json!({"prompt": "Once", "max_tokens": 300, "ignore_eos": true}))).collect();
    server.until(Duration::from_secs(10), "two run", |server| server.gauge("vllm:num_requests_running") == 2.0);
    assert!(Command::new("kill").args(["-TERM", &child]).status().unwrap().success());
    for mut stream in streams {
        assert_eq!(finishes(&chunks(&stream.all()), 0), ["length"]);
    }
    assert_eq!(server.exit(Duration::from_secs(10)).code(), Some(0));
}

/// Soft and hard limit of open files of a process.
fn file_limits(pid: u32) -> (u64, u64) {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    (numbers[0], numbers[1])
}

#[test]
fn the_limit_of_open_files_is_raised_and_said() {
    let script = behind(BINARY, "ulimit -Sn 200\nulimit -Hn 900\nexec");
    let mut server = start(script.to_str().unwrap(), &["--device", "cpu"]);
    assert_eq!(file_limits(server.pid()), (900, 900));
    let log = server.log();
    let line = log.lines().find(|line| line.contains("file_descriptors")).expect("a line about limits");
    // 64 are kept for what is not a client's.
    assert!(line.contains("file_descriptors=900") && line.contains("connections_max=836"), "{line}");
    server.calm();
}

#[test]
fn log_lines_are_json_when_asked() {
    let mut server = start(BINARY, &["--device", "cpu", "--log-format", "json"]);
    assert_eq!(server.complete(json!({"max_tokens": 2})).status(), 200);
    server.complete(json!({"max_tokens": -1})).error(400);
    server.signal("TERM");
    assert_eq!(server.exit(Duration::from_secs(10)).code(), Some(0));
    let log = server.log();
    let (mut events, mut records) = (Vec::new(), 0);
    for line in log.lines() {
        if let Some(trace) = line.strip_prefix("slotgraph_http_trace ") {
            serde_json::from_str::<Value>(trace).expect("a trace is JSON");
            records += 1;
            continue;
        }
        let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        match value.get("level") {
            Some(level) => {
                assert!(level.is_string() && value["timestamp"].is_string(), "{line}");
                events.push(value["message"].as_str().unwrap_or_default().to_owned());
            }
            None => assert_eq!(value["tag"], "slotgraph_startup", "{line}"),
        }
    }
    for message in ["limits", "ready", "draining", "stopped"] {
        assert!(events.iter().any(|event| event == message), "{message} is not in {events:?}");
    }
    assert_eq!(records, 2, "the canary's trace and one more");
}

#[test]
fn keys_are_in_no_log() {
    let server = launch(BINARY, &["--device", "cpu", "--api-key", "correct-horse"], &[("SLOTGRAPH_LOG", "debug")]);
    server.until(Duration::from_secs(60), "ready", |server| server.get("/health").status() == 200);
    let ask = |server: &Server, key: &str| {
        let header = format!("Bearer {key}");
        let request = slotgraph_tests::http::bare("GET", "/v1/models", &[("authorization", &header)]);
        server.conn().ask(&request).status()
    };
    assert_eq!((ask(&server, "correct-horse"), ask(&server, "battery-staple")), (200, 401));
    let log = server.log();
    assert!(!log.contains("correct-horse") && !log.contains("battery-staple"), "{log}");
}
