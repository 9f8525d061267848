//! Trace lines: one JSON line for each ended choice, on stderr or in a file, and the last thousand in memory.
//!
//! The engine thread hands records over and never waits; a thread of our own writes them. **Invariant:** order of ends is order of lines; a
//! line that could not be kept is counted.

use crate::metrics::Metrics;
use slotgraph_runtime::trace::{Latency, Observer, TraceRecord};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The tag in front of a line's JSON.
const TAG: &str = "slotgraph_http_trace";
/// Lines at `/debug/traces`.
const RING: usize = 1000;
/// Records that may wait to be written.
const BACKLOG: usize = 16_384;

enum Message {
    Record(Box<TraceRecord>),
    /// Answered once everything before it is written.
    Flush(SyncSender<()>),
}

/// The engine's observer: traces and metrics.
pub struct Traces {
    records: SyncSender<Message>,
    metrics: Arc<Metrics>,
    ring: Arc<Mutex<VecDeque<String>>>,
}

impl Traces {
    /// Starts the writer; `file` None means stderr.
    pub fn start(file: Option<&Path>, metrics: Arc<Metrics>) -> io::Result<Arc<Traces>> {
        let sink = match file {
            Some(path) => Sink::File(OpenOptions::new().create(true).append(true).open(path)?),
            None => Sink::Stderr,
        };
        let (records, incoming) = sync_channel(BACKLOG);
        let ring = Arc::new(Mutex::new(VecDeque::with_capacity(RING)));
        let kept = ring.clone();
        std::thread::Builder::new().name("traces".into()).spawn(move || write_all(incoming, sink, &kept))?;
        Ok(Arc::new(Traces { records, metrics, ring }))
    }

    /// Waits until every line so far is written, or `patience` is over.
    pub fn flush(&self, patience: Duration) {
        let (done, wait) = sync_channel(1);
        if self.records.try_send(Message::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(patience);
        }
    }

    /// The last lines' JSON, oldest first.
    pub fn recent(&self) -> Vec<String> {
        self.ring.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).iter().cloned().collect()
    }
}

impl Observer for Traces {
    fn ended(&self, record: TraceRecord) {
        self.metrics.ended(&record);
        if self.records.try_send(Message::Record(Box::new(record))).is_err() {
            self.metrics.dropped_traces.inc();
        }
    }
    fn latency(&self, latency: Latency, took: Duration) {
        self.metrics.latency(latency, took);
    }
    fn step(&self, bucket: usize, took: Duration) {
        self.metrics.step(bucket, took);
    }
}

enum Sink {
    Stderr,
    File(File),
}

impl Sink {
    fn write(&mut self, lines: &str) -> io::Result<()> {
        match self {
            Sink::Stderr => io::stderr().lock().write_all(lines.as_bytes()),
            Sink::File(file) => file.write_all(lines.as_bytes()),
        }
    }
}

fn write_all(incoming: Receiver<Message>, mut sink: Sink, ring: &Mutex<VecDeque<String>>) {
    let mut failed = false;
    while let Ok(first) = incoming.recv() {
        let (mut lines, mut flushes) = (String::new(), Vec::new());
        // What has come in meanwhile goes out in one write.
        for message in std::iter::once(first).chain(incoming.try_iter().take(255)) {
            match message {
                Message::Record(record) => keep(&record, &mut lines, ring),
                Message::Flush(done) => flushes.push(done),
            }
        }
        if let Err(error) = sink.write(&lines)
            && !std::mem::replace(&mut failed, true)
        {
            tracing::warn!(%error, "trace lines cannot be written; this is said once");
        }
        for done in flushes {
            let _ = done.send(());
        }
    }
}

fn keep(record: &TraceRecord, lines: &mut String, ring: &Mutex<VecDeque<String>>) {
    let json = serde_json::to_string(record).expect("records hold numbers and strings");
    lines.extend([TAG, " ", &json, "\n"]);
    let mut ring = ring.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if ring.len() == RING {
        ring.pop_front();
    }
    ring.push_back(json);
}
