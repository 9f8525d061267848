//! The engine loop over devices that do as they are told.

use super::*;
use crate::load::SLOT_STATES;
use crate::request::{AbortCause, Event, Finish, FinishReason, Group};
use crate::sink::TokenStream;
use crate::testing::{options, plain, read, request};
use crate::trace::{Latency, NoObserver, Observer, TraceRecord};
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

fn started(faults: &[&str]) -> EngineHandle {
    let texts: Vec<String> = faults.iter().map(ToString::to_string).collect();
    let (faults, _) = EngineFaults::parse(&texts).unwrap();
    start_with(EngineOptions { faults, ..options() }, vec![plain()], Arc::new(NoObserver)).unwrap()
}

fn submitted(handle: &EngineHandle, max_tokens: u32, deadline: Option<Duration>) -> TokenStream {
    let (group, stream) = request("r", max_tokens, deadline);
    handle.submit(group).unwrap();
    stream
}

fn aborted(event: &Event) -> Option<AbortCause> {
    match event {
        Event::Finished(Finish { reason: FinishReason::Aborted(cause), .. }) => Some(*cause),
        _ => None,
    }
}

#[test]
fn a_panic_ends_every_stream_and_the_engine_is_dead() {
    let handle = started(&["engine-panic@3"]);
    let streams: Vec<TokenStream> = (0..6).map(|_| submitted(&handle, 200, None)).collect();
    for stream in streams {
        let (_, end) = read(stream);
        let Event::Error(reason) = end else { panic!("{end:?}") };
        assert!(reason.contains("engine-panic was armed for step 3"), "{reason}");
    }
    let failure = handle.join().unwrap_err();
    assert!(failure.0.contains("engine-panic"), "{failure}");
    assert!(!handle.load().is_healthy());
    assert_eq!(handle.load().live.load(Relaxed), 0);
    let (group, stream) = request("late", 3, None);
    let refusal = handle.submit(group).unwrap_err();
    assert!(matches!(refusal, SubmitError::NotAccepting(NotAccepting::Dead(_))), "{refusal}");
    assert!(matches!(read(stream).1, Event::Error(_)));
}

#[test]
fn an_idle_engine_keeps_its_heart_beating_and_leaves_when_told() {
    let handle = started(&[]);
    assert_eq!(read(submitted(&handle, 5, None)).0.len(), 5);
    std::thread::sleep(Duration::from_millis(700));
    let load = handle.load().clone();
    assert!(load.since_heartbeat() < Duration::from_millis(650), "{:?}", load.since_heartbeat());
    assert!(load.is_healthy() && !load.stalled(Duration::from_secs(1)));
    assert_eq!((load.running.load(Relaxed), load.pages_used.load(Relaxed)), (0, 0));
    handle.shutdown();
    handle.join().unwrap();
    assert!(matches!(handle.accepting(), Err(NotAccepting::Draining)));
}

#[test]
fn an_engine_that_has_started_says_how_many_slots_it_has() {
    for _ in 0..50 {
        let handle = started(&[]);
        let slots: u64 = SLOT_STATES.iter().map(|&state| handle.load().slots(state)).sum();
        assert_eq!(slots, options().slots_max as u64);
    }
}

#[test]
fn an_engine_without_handles_finishes_its_work_and_leaves() {
    let handle = started(&[]);
    let stream = submitted(&handle, 100, None);
    let load = handle.load().clone();
    drop(handle);
    assert_eq!(read(stream).0.len(), 100);
    let deadline = Instant::now() + Duration::from_secs(5);
    while Arc::strong_count(&load) > 1 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(Arc::strong_count(&load), 1, "the engine thread is gone");
}

#[test]
fn deadlines_end_what_is_live_and_a_drain_lets_it_finish_in_time() {
    let handle = started(&[]);
    let late = submitted(&handle, 200, Some(Duration::ZERO));
    assert_eq!(aborted(&read(late).1), Some(AbortCause::Expired));
    handle.shutdown();
    handle.join().unwrap();

    // A drain whose deadline is now ends what runs; one that is far off lets it finish.
    let handle = started(&[]);
    let stream = submitted(&handle, 20, None);
    handle.drain(Instant::now() + Duration::from_secs(60));
    assert_eq!(read(stream).0.len(), 20);
    let (group, _) = request("late", 3, None);
    assert_eq!(handle.submit(group), Err(NotAccepting::Draining.into()));
    handle.shutdown();
    handle.join().unwrap();
}

#[test]
fn a_stalled_loop_shows_in_its_heartbeat() {
    let handle = started(&["engine-stall@2"]);
    let _stream = submitted(&handle, 20, None);
    let limit = Duration::from_millis(200);
    let deadline = Instant::now() + Duration::from_secs(5);
    while !handle.load().stalled(limit) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(handle.load().stalled(limit));
}

/// A group whose every choice is in the trace, with what its stream heard.
#[test]
fn each_ended_choice_leaves_one_trace_line_without_text() {
    #[derive(Default)]
    struct Recorder(Mutex<Vec<TraceRecord>>, Mutex<Vec<Latency>>);
    impl Observer for Recorder {
        fn ended(&self, record: TraceRecord) {
            self.0.lock().unwrap().push(record);
        }
        fn latency(&self, latency: Latency, _took: Duration) {
            self.1.lock().unwrap().push(latency);
        }
        fn step(&self, _bucket: usize, _took: Duration) {}
    }
    let recorder = Arc::new(Recorder::default());
    let handle = start_with(options(), vec![plain()], recorder.clone()).unwrap();
    let (group, stream) = request("abc-1", 4, None);
    let prompt = group.choices[0].prompt.clone();
    handle.submit(Group { ..group }).unwrap();
    let (tokens, _) = read(stream);
    handle.shutdown();
    handle.join().unwrap();
    let records = recorder.0.lock().unwrap();
    let [record] = &records[..] else { panic!("{records:?}") };
    let line = serde_json::to_value(record).unwrap();
    assert_eq!(line["request_id"], "abc-1");
    assert_eq!(line["terminal_reason"], "completed_length");
    assert_eq!(line["finish_reason"], "length");
    assert_eq!((&line["prompt_tokens"], &line["completion_tokens"]), (&3.into(), &4.into()));
    assert_eq!(line["decode_step_count"], 3);
    assert_eq!(line["singleton_decode_steps"], 3);
    assert_eq!(line["prefill_chunks"], 1);
    assert_eq!(line["buckets_used"], serde_json::json!([1, 4]));
    assert_eq!(line["healthy_baseline_after_terminal"], true);
    assert_eq!(line["sampling"]["max_tokens"], 4);
    assert_eq!(line["token_sha256"], crate::trace::sha256_of_ids(&tokens));
    assert_eq!(line["prompt_sha256"], crate::trace::sha256_of_ids(&prompt));
    for stamp in ["queue_wait_ms", "prefill_ms", "scheduled_to_terminal_ms", "decode_mean_ms"] {
        assert!(line[stamp].as_f64().is_some_and(|ms| ms >= 0.0), "{stamp} is {}", line[stamp]);
    }
    assert!(line.get("error").is_none() && line["cause"].is_null());
    let latencies = recorder.1.lock().unwrap();
    use Latency::{FirstToken, InterToken, Queue};
    assert_eq!(*latencies, [Queue, FirstToken, InterToken, InterToken, InterToken]);
}

#[test]
fn the_slot_table_can_be_looked_at() {
    let handle = started(&[]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let snapshot = runtime.block_on(handle.inspect()).unwrap();
    assert_eq!((snapshot.queued, snapshot.pages_free, snapshot.slots.len()), (0, 8, 0));
}
