//! Operations.

use crate::{BINARY, serve};
use serde_json::{Value, json};
use slotgraph_tests::http::{Conn, chunks, finishes, post};
use slotgraph_tests::server::{launch, refused};
use std::net::TcpListener;
use std::time::{Duration, Instant};

#[test]
fn hand_h1_drain() {
    let mut server = serve(&["--drain-timeout", "30s", "--max-slots", "2"]);
    let fields = json!({"prompt": "Once", "max_tokens": 700, "ignore_eos": true});
    let mut idle = server.conn();
    // Two run, two wait: all four are served.
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let mut stream = server.stream(fields.clone());
            std::thread::spawn(move || stream.all())
        })
        .collect();
    server.until(Duration::from_secs(2), "two run", |server| server.gauge("vllm:num_requests_running") == 2.0);
    server.signal("TERM");
    std::thread::sleep(Duration::from_millis(100));
    let body = server.completion(json!({"max_tokens": 1})).to_string();
    let reply = idle.ask(&post("/v1/completions", &body, &[]));
    assert_eq!(reply.error(503)["type"], "server_error");
    assert!(reply.head.header("retry-after").is_some());
    for thread in threads {
        let seen = chunks(&thread.join().unwrap());
        assert_eq!(finishes(&seen, 0), ["length"]);
    }
    assert_eq!(server.exit(Duration::from_secs(3)).code(), Some(0));
}

#[test]
fn hand_h1_the_drain_is_bounded() {
    let mut server = serve(&["--drain-timeout", "300ms", "--max-slots", "1", "--itl-target-ms", "1000"]);
    let fields = json!({"prompt": ["Once", "upon", "a", "time"], "max_tokens": 1900, "ignore_eos": true});
    let mut stream = server.stream(fields);
    stream.next_event().unwrap();
    let began = Instant::now();
    server.signal("TERM");
    let mut last = String::new();
    while let Ok(Some(event)) = stream.next_event() {
        last = event.data;
    }
    let error: Value = serde_json::from_str(&last).unwrap_or_else(|_| panic!("an error event, not {last}"));
    assert_eq!(error["error"]["type"], "server_error");
    assert_eq!(server.exit(Duration::from_secs(3)).code(), Some(1));
    assert!(began.elapsed() < Duration::from_millis(300 + 2000));
}

#[test]
fn hand_h1_a_second_signal_ends_at_once() {
    let mut server = serve(&["--drain-timeout", "60s"]);
    let mut stream = server.stream(json!({"prompt": vec!["x"; 16], "max_tokens": 1900, "ignore_eos": true}));
    stream.next_event().unwrap();
    server.signal("INT");
    std::thread::sleep(Duration::from_millis(100));
    server.signal("INT");
    assert_eq!(server.exit(Duration::from_secs(1)).code(), Some(1));
}

/// A folder that takes some seconds to load: a large configuration with dummy weights.
fn slow_to_load() -> (tempfile::TempDir, Vec<String>) {
    let shape = slotgraph_tests::root().join("tests/shapes/qwen3-4b/config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(shape).unwrap()).unwrap();
    config["num_hidden_layers"] = json!(4);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let model = folder.path().to_str().unwrap().to_owned();
    let words = ["--device", "cpu", "--load-format", "dummy", "--max-model-len", "64", "--max-slots", "1", "--model"];
    (folder, words.into_iter().map(str::to_owned).chain([model]).collect())
}

#[test]
fn hand_h1_signals_while_loading() {
    let (_folder, arguments) = slow_to_load();
    let mut server = launch(BINARY, &arguments.iter().map(String::as_str).collect::<Vec<_>>(), &[]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.get("/health").status(), 503);
    server.signal("TERM");
    assert_eq!(server.exit(Duration::from_secs(5)).code(), Some(0));
}

#[test]
fn hand_h2_honest_health() {
    let (_folder, arguments) = slow_to_load();
    let server = launch(BINARY, &arguments.iter().map(String::as_str).collect::<Vec<_>>(), &[]);
    let health = server.get("/health");
    assert_eq!((health.status(), &health.json()["status"]), (503, &json!("loading")));
    assert_eq!((server.get("/health/live").status(), server.get("/health/ready").status()), (200, 503));
    let early = server.post("/v1/completions", &json!({"model": "x", "prompt": "x"}));
    assert_eq!(early.error(503)["type"], "server_error");
    assert!(early.head.header("retry-after").is_some());
    drop(server);

    let mut server = serve(&["--max-slots", "2"]);
    let streams: Vec<_> = (0..6).map(|_| server.stream(json!({"max_tokens": 600, "ignore_eos": true}))).collect();
    for path in ["/health", "/health/live", "/health/ready"] {
        assert_eq!(server.get(path).status(), 200, "{path} while saturated");
    }
    drop(streams);
    server.calm();

    let mut server = launch(BINARY, &["--device", "cpu", "--fault", "engine-panic@20"], &[]);
    server.wait_ready();
    let mut stream = server.stream(json!({"prompt": "Once", "max_tokens": 1000, "ignore_eos": true}));
    let began = Instant::now();
    let mut last = String::new();
    while let Ok(Some(event)) = stream.next_event() {
        last = event.data;
    }
    assert!(last.contains("\"error\""), "{last}");
    assert_eq!(server.exit(Duration::from_secs(10)).code(), Some(1));
    assert!(began.elapsed() < Duration::from_secs(4));
}

#[test]
fn hand_h2_a_stalled_engine_is_not_live() {
    let mut server = launch(BINARY, &["--device", "cpu", "--fault", "engine-stall@10", "--stall-timeout", "1s"], &[]);
    server.wait_ready();
    let _stream = server.stream(json!({"prompt": "Once", "max_tokens": 1000, "ignore_eos": true}));
    server.until(Duration::from_secs(5), "liveness turns 503", |server| server.get("/health/live").status() == 503);
    assert_eq!(server.get("/health").json()["status"], "stalled");
}

#[test]
fn hand_h3_ports() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, log, took) = refused(BINARY, &["--port", &port], &[]);
    assert_eq!(code, 2);
    assert!(log.contains("127.0.0.1") && log.contains(&port) && log.contains("already in use"), "{log}");
    assert!(took < Duration::from_secs(2));
    for (arguments, named) in
        [(["--host", "203.0.113.1"], "--host"), (["--port", "70000"], "--port"), (["--port", "abc"], "--port")]
    {
        let (code, log, took) = refused(BINARY, &arguments, &[]);
        assert_eq!(code, 2);
        assert!(log.contains(named) && log.contains(arguments[1]), "{log}");
        assert!(took < Duration::from_secs(2));
    }
    let (code, log, _) = refused(BINARY, &[], &[("SLOTGRAPH_MAX_SLOTS", "many")]);
    assert_eq!(code, 2);
    assert!(log.contains("--max-slots") && log.contains("many"), "{log}");
    // A port whose last connections are in TIME_WAIT can be bound again at once.
    let mut server = serve(&[]);
    let port = server.address.port().to_string();
    assert_eq!(server.complete(json!({"max_tokens": 1})).status(), 200);
    server.signal("TERM");
    assert_eq!(server.exit(Duration::from_secs(5)).code(), Some(0));
    let mut again = serve(&["--port", &port]);
    again.calm();
    drop(again);
    let mut six = serve(&["--host", "::1"]);
    assert!(six.address.is_ipv6());
    six.calm();
}

#[test]
fn hand_g3_impossible_layouts() {
    for ep in ["3", "0", "128"] {
        let (code, log, took) = refused(BINARY, &["--port", "0", "--device", "cpu", "--ep", ep], &[]);
        assert_eq!(code, 2);
        assert!(log.contains(&format!("--ep {ep}")) && log.contains("1, 2, 4 or 8"), "{log}");
        assert!(took < Duration::from_secs(5));
    }
}

#[test]
fn hand_h4_metrics() {
    let mut server = serve(&["--body-limit", "1MiB", "--max-slots", "1", "--max-queue", "0"]);
    let reply = server.get("/metrics");
    assert_eq!(reply.head.header("content-type"), Some("text/plain; version=0.0.4"));
    let head = server.conn().ask(b"HEAD /metrics HTTP/1.1\r\nhost: t\r\n\r\n");
    assert_eq!(head.status(), 200);
    let count = |outcome: &str, code: &str| {
        let labels = [format!("outcome=\"{outcome}\""), format!("code=\"{code}\"")];
        server.metric("slotgraph_requests_total", &[&labels[0], &labels[1]])
    };
    let latencies = || server.gauge("vllm:e2e_request_latency_seconds_count");
    let (successes, before) = (count("length", "200") + count("stop", "200"), latencies());
    server.complete(json!({"max_tokens": -1})).error(400);
    server.complete(json!({"model": "nope"})).error(404);
    server.post_raw("/v1/completions", &" ".repeat((1 << 20) + 1)).error(413);
    let mut held = server.stream(json!({"max_tokens": 1500, "ignore_eos": true}));
    held.next_event().unwrap();
    server.complete(json!({})).error(429);
    assert_eq!(latencies(), before, "refusals are in no latency histogram");
    drop(held);
    server.until(Duration::from_secs(1), "the abort is counted", |_| count("cancelled", "499") == 1.0);
    server.quiescent();
    assert_eq!(server.complete(json!({"max_tokens": 2, "ignore_eos": true})).status(), 200);
    assert_eq!(
        [count("invalid", "400"), count("invalid", "404"), count("invalid", "413"), count("rejected", "429")],
        [1.0; 4]
    );
    assert_eq!(count("length", "200") + count("stop", "200") - successes, 1.0);
    assert_eq!(latencies() - before, 1.0);
    let text = server.get("/metrics");
    let mut last: Option<(String, f64)> = None;
    for line in text.text().lines().filter(|line| line.contains("_bucket{")) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split("le=").next().unwrap().to_owned();
        let value: f64 = value.parse().unwrap();
        if let Some((before, smaller)) = &last
            && *before == name
        {
            assert!(value >= *smaller, "{line}");
        }
        last = Some((name, value));
    }
    server.calm();
}

#[test]
fn hand_h4_quiet_logs() {
    let mut server = serve(&[]);
    let lines = |server: &slotgraph_tests::server::Server| {
        server.log().lines().filter(|line| !line.starts_with("slotgraph_http_trace")).count()
    };
    let before = lines(&server);
    let mut conn = server.conn();
    for number in 0..1000 {
        let body = format!(r#"{{"model":"\u001b[31mEVIL{number}\n","prompt":7}}"#);
        conn.ask(&post("/v1/completions", &body, &[]));
    }
    for _ in 0..100 {
        let body =
            server.completion(json!({"prompt": "SECRET", "max_tokens": 900, "ignore_eos": true, "stream": true}));
        let mut left = Conn::open(server.address);
        left.send(&post("/v1/completions", &body.to_string(), &[]));
    }
    server.until(Duration::from_secs(5), "idle", |server| server.gauge("vllm:num_requests_running") == 0.0);
    std::thread::sleep(Duration::from_millis(200));
    let log = server.log();
    assert!(!log.contains("EVIL") && !log.contains("SECRET") && !log.contains('\u{1b}'));
    assert!(lines(&server) <= before + 10, "{} lines more", lines(&server) - before);
    server.calm();
}
