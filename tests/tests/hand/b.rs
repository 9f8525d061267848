//! Cancellation.

use crate::serve;
use serde_json::{Value, json};
use slotgraph_tests::http::{Conn, Stream, post};
use slotgraph_tests::server::Server;
use std::io::Read;
use std::time::{Duration, Instant};

/// Requests that were left, by any cause.
fn aborted(server: &Server) -> f64 {
    ["cancelled", "disconnected", "expired"]
        .iter()
        .map(|outcome| server.metric("slotgraph_requests_total", &[&format!("outcome=\"{outcome}\"")]))
        .sum()
}

fn long(server: &Server, stream: bool) -> Vec<u8> {
    let fields = json!({"prompt": "Count upward from one:", "max_tokens": 1900, "ignore_eos": true, "stream": stream});
    post("/v1/completions", &server.completion(fields).to_string(), &[])
}

/// Closes with a reset instead of a goodbye.
fn reset(conn: Conn) {
    let socket = socket2::Socket::from(conn.tcp);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
}

/// What must be seen within a second; longer only where other tests take the processors.
const SOON: Duration = Duration::from_secs(3);

/// Idle soon, with everything given back.
fn collapses(server: &Server, aborted_before: f64, count: f64) {
    server.until(SOON, "the collapse", |server| {
        server.gauge("vllm:num_requests_running") == 0.0
            && server.gauge("vllm:num_requests_waiting") == 0.0
            && server.gauge("slotgraph_kv_pages_used") == 0.0
            && aborted(server) - aborted_before == count
    });
    let tokens = server.gauge("vllm:generation_tokens_total");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(server.gauge("vllm:generation_tokens_total"), tokens, "generation went on");
}

#[test]
fn hand_b1_disconnects_in_every_phase() {
    let mut server = serve(&[]);
    let ttft = || {
        let began = Instant::now();
        let mut stream = server.stream(json!({"max_tokens": 1, "temperature": 0, "ignore_eos": true}));
        stream.next_event().unwrap();
        let took = began.elapsed();
        stream.all();
        took
    };
    // The fastest of 20: what other tests do to the processors is not what a leftover would do.
    let fastest = || (0..20).map(|_| ttft()).min().expect("20 times");
    let before = fastest();
    // After five events: reset, then goodbye.
    for with_reset in [true, false] {
        for _ in 0..50 {
            let left = aborted(&server);
            let mut stream = Stream::open(server.address, &long(&server, true));
            for _ in 0..5 {
                stream.next_event().unwrap();
            }
            if with_reset {
                reset(stream.conn)
            } else {
                drop(stream)
            }
            server.until(SOON, "one more aborted", |server| aborted(server) == left + 1.0);
        }
        collapses(&server, aborted(&server), 0.0);
    }
    assert_eq!(server.metric("slotgraph_requests_total", &["outcome=\"cancelled\""]), 100.0, "all got a token first");
    // Not streamed.
    for _ in 0..10 {
        let left = aborted(&server);
        let mut conn = server.conn();
        conn.send(&long(&server, false));
        server.until(SOON, "it runs", |server| server.gauge("vllm:num_requests_running") == 1.0);
        drop(conn);
        collapses(&server, left, 1.0);
    }
    assert_eq!(server.metric("slotgraph_requests_total", &["outcome=\"disconnected\""]), 10.0);
    // In the middle of a long prompt's prefill.
    let prefilled = server.gauge("vllm:prompt_tokens_total");
    for _ in 0..10 {
        let left = aborted(&server);
        let fields = json!({"prompt": vec![100; 1984], "max_tokens": 4, "stream": true});
        let mut conn = server.conn();
        conn.send(&post("/v1/completions", &server.completion(fields).to_string(), &[]));
        server.until(SOON, "it runs", |server| server.gauge("vllm:num_requests_running") == 1.0);
        drop(conn);
        collapses(&server, left, 1.0);
    }
    assert!(server.gauge("vllm:prompt_tokens_total") - prefilled < 10.0 * 1984.0, "no prompt was finished for nobody");
    let after = fastest();
    assert!(after <= before.mul_f64(1.2).max(before + Duration::from_millis(3)), "{before:?} became {after:?}");
    server.calm();
}

#[test]
fn hand_b2_left_in_the_queue() {
    let mut server = serve(&["--max-slots", "2", "--kv-pages", "129"]);
    let fill = || -> Vec<Stream> {
        let fields = json!({"prompt": "x", "max_tokens": 1800, "ignore_eos": true});
        (0..2).map(|_| server.stream(fields.clone())).collect()
    };
    let busy = fill();
    server.until(SOON, "both slots are held", |s| s.gauge("vllm:num_requests_running") == 2.0);
    let prefilled = server.gauge("vllm:prompt_tokens_total");
    let left = aborted(&server);
    let queued: Vec<Conn> = (0..20)
        .map(|number| {
            let fields = json!({"prompt": vec![100 + number; 1500], "max_tokens": 4, "stream": true});
            let mut conn = server.conn();
            conn.send(&post("/v1/completions", &server.completion(fields).to_string(), &[]));
            conn
        })
        .collect();
    server.until(SOON, "20 wait", |server| server.gauge("vllm:num_requests_waiting") == 20.0);
    drop(queued);
    server.until(SOON, "none waits", |server| server.gauge("vllm:num_requests_waiting") == 0.0);
    assert_eq!(server.gauge("vllm:num_requests_running"), 2.0, "all slots are still busy");
    server.until(SOON, "20 more aborted", |server| aborted(server) == left + 20.0);
    drop(busy);
    server.until(SOON, "idle", |server| server.gauge("vllm:num_requests_running") == 0.0);
    assert_eq!(server.gauge("vllm:prompt_tokens_total"), prefilled, "no abandoned prompt was prefilled");
    server.calm();
}

#[test]
fn hand_b3_accounting_returns_to_baseline() {
    let mut server = serve(&[]);
    let outcomes = |server: &Server| server.metric("slotgraph_requests_total", &[]);
    for round in 0..3 {
        let (all, left) = (outcomes(&server), aborted(&server));
        let errors = server.metric("slotgraph_requests_total", &["outcome=\"error\""]);
        std::thread::scope(|scope| {
            for worker in 0..8 {
                let server = &server;
                scope.spawn(move || {
                    for turn in 0..5 {
                        let number = worker * 5 + turn + round;
                        match number % 4 {
                            0 | 1 => {
                                let fields = json!({"prompt": format!("{number}"), "max_tokens": 12});
                                assert_eq!(server.complete(fields).status(), 200);
                            }
                            2 => {
                                let mut stream = Stream::open(server.address, &long(server, true));
                                stream.next_event().unwrap();
                            }
                            _ => {
                                let fields =
                                    json!({"prompt": vec![50 + number; 1200], "max_tokens": 400, "ignore_eos": true});
                                let mut conn = server.conn();
                                conn.send(&post("/v1/completions", &server.completion(fields).to_string(), &[]));
                                std::thread::sleep(Duration::from_millis(5));
                            }
                        }
                    }
                });
            }
        });
        server.until(SOON, "the baseline", |server| {
            server.gauge("slotgraph_kv_pages_used") == 0.0
                && server.gauge("vllm:num_requests_running") == 0.0
                && server.gauge("vllm:num_requests_waiting") == 0.0
                && outcomes(server) - all == 40.0
        });
        assert_eq!(aborted(&server) - left, 20.0);
        assert_eq!(server.metric("slotgraph_requests_total", &["outcome=\"error\""]), errors);
    }
    server.calm();
}

#[test]
fn hand_b4_a_client_that_does_not_read() {
    let mut server = serve(&["--write-timeout", "2s"]);
    // What a first load touches is not what a stalled client costs.
    server.complete(json!({"prompt": vec!["x"; 12], "max_tokens": 100, "ignore_eos": true, "logprobs": 5}));
    let before = server.rss_kib();
    // As small a window as the system gives; enough text to fill every buffer in between.
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(&server.address.into()).unwrap();
    let mut stalled = Conn::over(socket.into());
    let fields = json!({
        "prompt": vec!["x"; 8], "max_tokens": 1900, "ignore_eos": true, "stream": true, "logprobs": 5,
    });
    stalled.send(&post("/v1/completions", &server.completion(fields).to_string(), &[]));
    let slow = |server: &Server| server.metric("slotgraph_sweep_retired_total", &["cause=\"slow_reader\""]);
    let neighbours: Vec<Value> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let server = &server;
                scope.spawn(move || {
                    server.complete(json!({"prompt": "Once", "max_tokens": 64, "temperature": 0})).json()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(neighbours.windows(2).all(|pair| pair[0]["choices"] == pair[1]["choices"]));
    server.until(Duration::from_secs(30), "the slow reader is cut", |server| slow(server) >= 1.0);
    server.until(Duration::from_secs(10), "its slots are free", |server| {
        server.gauge("vllm:num_requests_running") == 0.0
    });
    assert!(server.rss_kib() < before + (8 << 10), "{} KiB from {before}", server.rss_kib());
    // What it can still read has no gap: whole events, in order, then the end or an error; never a false finish.
    stalled.tcp.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut rest = Vec::new();
    let _ = stalled.tcp.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("\"finish_reason\":\"stop\""));
    server.calm();
}

#[test]
fn hand_b4_a_stalled_client_does_not_delay_a_stop() {
    let mut server = serve(&["--drain-timeout", "1s"]);
    let mut stalled = server.conn();
    let fields = json!({"prompt": vec!["x"; 8], "max_tokens": 1900, "ignore_eos": true, "stream": true, "logprobs": 5});
    stalled.send(&post("/v1/completions", &server.completion(fields).to_string(), &[]));
    server.until(SOON, "it runs", |server| server.gauge("vllm:num_requests_running") > 0.0);
    server.signal("TERM");
    server.exit(Duration::from_secs(6));
}
