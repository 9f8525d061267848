//! The numbers on `/metrics`: what the edge counts itself, and the engine's load at the moment of the scrape.
//!
//! vLLM's names where the meaning is the same, ours for the rest; every engine series carries `model_name` and `engine`. The latency
//! histograms hold completed choices only (stop or length), never refusals or aborts; time to first token and inter-token latency hold
//! every token that was delivered. **Invariant:** every series exists from the start.

use crate::error::ApiError;
use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
};
use slotgraph_runtime::load::{ABORT_CAUSES, LIFE_STATES, Load, SLOT_STATES};
use slotgraph_runtime::request::Terminal;
use slotgraph_runtime::trace::{Latency, TraceRecord};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How a request ended, for `slotgraph_requests_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Stop,
    Length,
    /// A client's mistake, with the status it was told.
    Invalid(u16),
    /// Not taken: 429 full, 503 loading, draining or dead.
    Rejected(u16),
    Cancelled,
    Disconnected,
    Expired,
    Error,
}

const OUTCOMES: [Outcome; 17] = [
    Outcome::Stop,
    Outcome::Length,
    Outcome::Invalid(400),
    Outcome::Invalid(401),
    Outcome::Invalid(404),
    Outcome::Invalid(405),
    Outcome::Invalid(408),
    Outcome::Invalid(409),
    Outcome::Invalid(413),
    Outcome::Invalid(415),
    Outcome::Invalid(431),
    Outcome::Rejected(429),
    Outcome::Rejected(503),
    Outcome::Cancelled,
    Outcome::Disconnected,
    Outcome::Expired,
    Outcome::Error,
];

impl Outcome {
    /// The outcome of a request that was answered with an error.
    pub fn of(error: &ApiError) -> Outcome {
        match error.status.as_u16() {
            code @ (429 | 503) => Outcome::Rejected(code),
            499 => Outcome::Cancelled,
            504 => Outcome::Expired,
            500.. => Outcome::Error,
            code => Outcome::Invalid(code),
        }
    }
    fn labels(self) -> (&'static str, u16) {
        match self {
            Outcome::Stop => ("stop", 200),
            Outcome::Length => ("length", 200),
            Outcome::Invalid(code) => ("invalid", code),
            Outcome::Rejected(code) => ("rejected", code),
            Outcome::Cancelled => ("cancelled", 499),
            Outcome::Disconnected => ("disconnected", 499),
            Outcome::Expired => ("expired", 504),
            Outcome::Error => ("error", 500),
        }
    }
}

const TTFT: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const TOKEN: [f64; 22] = [
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const REQUEST: [f64; 25] = [
    0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
];
const STEP: [f64; 14] = [0.0002, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 4.0];
const TOKENS: [f64; 18] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0,
    200000.0, 500000.0,
];
const CHOICES: [f64; 8] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 128.0];

/// Facts that `slotgraph_info` shows; empty until the engine has started.
#[derive(Clone, Debug, Default)]
pub struct Info {
    pub device: String,
    pub contract_hash: String,
    pub ledger_hash: String,
    pub transport: String,
    pub ep: String,
    pub graph_bytes: u64,
}

/// A counter that is kept elsewhere, brought up to date at each scrape.
struct Mirror {
    counter: IntCounter,
    read: Box<dyn Fn(&Load) -> u64 + Send + Sync>,
}

pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    rejections: IntCounterVec,
    success: IntCounterVec,
    first_token: Histogram,
    inter_token: Histogram,
    per_token: Histogram,
    end_to_end: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    max_tokens: Histogram,
    choices: Histogram,
    steps: HashMap<usize, Histogram>,
    http: IntCounterVec,
    http_seconds: HistogramVec,
    running: Gauge,
    waiting: Gauge,
    waiting_by_reason: GaugeVec,
    kv_usage: [Gauge; 2],
    cache_config: GaugeVec,
    slots: GaugeVec,
    head_wait: Gauge,
    pages_used: Gauge,
    pages: Gauge,
    graph_bytes: Gauge,
    info: GaugeVec,
    connections: Gauge,
    pub refused_connections: IntCounter,
    pub dropped_traces: IntCounter,
    mirrors: Vec<Mirror>,
    /// One scrape at a time: mirrors add differences.
    scraping: Mutex<()>,
}

/// Registers series with the labels that all of them carry.
struct Maker {
    registry: Registry,
    labels: HashMap<String, String>,
}

impl Maker {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_labels(self.labels.clone())
    }
    fn keep<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let made = made.expect("metric names and labels are constants");
        self.registry.register(Box::new(made.clone())).expect("each series is registered once");
        made
    }
    fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.keep(Gauge::with_opts(self.opts(name, help)))
    }
    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.keep(GaugeVec::new(self.opts(name, help), labels))
    }
    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.keep(IntCounter::with_opts(self.opts(name, help)))
    }
    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.keep(IntCounterVec::new(self.opts(name, help), labels))
    }
    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::from(self.opts(name, help)).buckets(buckets.to_vec());
        self.keep(Histogram::with_opts(opts))
    }
    fn histograms(&self, name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> HistogramVec {
        let opts = HistogramOpts::from(self.opts(name, help)).buckets(buckets.to_vec());
        self.keep(HistogramVec::new(opts, labels))
    }
}

/// A counter read from the engine's load.
fn mirror(counter: IntCounter, read: impl Fn(&Load) -> u64 + Send + Sync + 'static) -> Mirror {
    Mirror { counter, read: Box::new(read) }
}

impl Metrics {
    /// `model` is the first served name; `buckets` are the configured ones.
    pub fn new(model: &str, buckets: &[usize]) -> Metrics {
        let labels = [("model_name", model), ("engine", "0")];
        let m = Maker {
            registry: Registry::new(),
            labels: labels.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect(),
        };
        let steps = m.histograms("slotgraph_step_seconds", "Time of one step, by bucket.", &STEP, &["bucket"]);
        let metrics = Metrics {
            requests: m.counters(
                "slotgraph_requests_total",
                "Requests by how they ended and the status the client was told.",
                &["outcome", "code"],
            ),
            rejections: m.counters("vllm:admission_rejections_total", "Requests refused at admission.", &["reason"]),
            success: m.counters("vllm:request_success_total", "Choices that ended, by reason.", &["finished_reason"]),
            first_token: m.histogram("vllm:time_to_first_token_seconds", "Accepted to first token.", &TTFT),
            inter_token: m.histogram("vllm:inter_token_latency_seconds", "Between two tokens of a choice.", &TOKEN),
            per_token: m.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time of a completed choice's tokens after the first.",
                &TOKEN,
            ),
            end_to_end: m.histogram("vllm:e2e_request_latency_seconds", "Accepted to last token.", &REQUEST),
            queue: m.histogram("vllm:request_queue_time_seconds", "Accepted to slot.", &REQUEST),
            prefill: m.histogram("vllm:request_prefill_time_seconds", "Slot to first token.", &REQUEST),
            decode: m.histogram("vllm:request_decode_time_seconds", "First token to last token.", &REQUEST),
            inference: m.histogram("vllm:request_inference_time_seconds", "Slot to last token.", &REQUEST),
            prompt_tokens: m.histogram("vllm:request_prompt_tokens", "Prompt tokens of a completed choice.", &TOKENS),
            generation_tokens: m.histogram(
                "vllm:request_generation_tokens",
                "Generated tokens of a completed choice.",
                &TOKENS,
            ),
            max_tokens: m.histogram("vllm:request_params_max_tokens", "Tokens that a request may generate.", &TOKENS),
            choices: m.histogram("vllm:request_params_n", "Choices a prompt.", &CHOICES),
            steps: buckets
                .iter()
                .map(|bucket| (*bucket, steps.with_label_values(&[bucket.to_string().as_str()])))
                .collect(),
            http: m.counters("http_requests_total", "HTTP requests answered.", &["handler", "method", "status"]),
            http_seconds: m.histograms(
                "http_request_duration_seconds",
                "Until the head of the response.",
                &REQUEST,
                &["handler", "method"],
            ),
            running: m.gauge("vllm:num_requests_running", "Choices that hold a slot."),
            waiting: m.gauge("vllm:num_requests_waiting", "Choices in the queue."),
            waiting_by_reason: m.gauges(
                "vllm:num_requests_waiting_by_reason",
                "Choices in the queue, by what they wait for.",
                &["reason"],
            ),
            kv_usage: [
                m.gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1."),
                m.gauge("vllm:gpu_cache_usage_perc", "Share of KV pages in use, 0 to 1 (older name)."),
            ],
            cache_config: m.gauges(
                "vllm:cache_config_info",
                "Size of a KV page in tokens, and pages.",
                &["block_size", "num_gpu_blocks"],
            ),
            slots: m.gauges("slotgraph_slots", "Slots by state.", &["state"]),
            head_wait: m.gauge("slotgraph_head_wait_seconds", "How long the head of the queue has waited."),
            pages_used: m.gauge("slotgraph_kv_pages_used", "KV pages held or cooling."),
            pages: m.gauge("slotgraph_kv_pages", "KV pages."),
            graph_bytes: m.gauge("slotgraph_graph_bytes", "Device memory of captured graphs."),
            info: m.gauges(
                "slotgraph_info",
                "What runs.",
                &["version", "device", "contract_hash", "ledger_hash", "transport", "ep"],
            ),
            connections: m.gauge("slotgraph_http_connections", "Open client connections."),
            refused_connections: m
                .counter("slotgraph_http_connections_refused_total", "Connections refused because too many were open."),
            dropped_traces: m
                .counter("slotgraph_traces_dropped_total", "Trace lines lost because writing fell behind."),
            mirrors: mirrors(&m, buckets),
            registry: m.registry,
            scraping: Mutex::new(()),
        };
        metrics.touch();
        metrics
    }

    /// The crate leaves families without samples out; each label set is made here.
    fn touch(&self) {
        for outcome in OUTCOMES {
            self.requests_of(outcome);
        }
        for reason in ["queue_full", "loading", "draining", "dead"] {
            self.rejections.with_label_values(&[reason]);
        }
        for reason in ["stop", "length", "abort", "error"] {
            self.success.with_label_values(&[reason]);
        }
        for reason in ["capacity", "deferred"] {
            self.waiting_by_reason.with_label_values(&[reason]);
        }
        for state in SLOT_STATES {
            self.slots.with_label_values(&[state.name()]);
        }
        for handler in ["/v1/completions", "/v1/chat/completions"] {
            self.http.with_label_values(&[handler, "POST", "200"]);
            self.http_seconds.with_label_values(&[handler, "POST"]);
        }
        self.cache_config.with_label_values(&["0", "0"]).set(1.0);
        self.set_info(&Info::default());
    }

    pub fn set_info(&self, info: &Info) {
        self.info.reset();
        let Info { device, contract_hash, ledger_hash, transport, ep, graph_bytes } = info;
        let labels = [env!("CARGO_PKG_VERSION"), device, contract_hash, ledger_hash, transport, ep];
        self.info.with_label_values(&labels).set(1.0);
        self.graph_bytes.set(*graph_bytes as f64);
    }
    pub fn set_cache(&self, page_tokens: usize, pages: usize) {
        self.cache_config.reset();
        self.cache_config.with_label_values(&[&page_tokens.to_string(), &pages.to_string()]).set(1.0);
    }

    fn requests_of(&self, outcome: Outcome) -> IntCounter {
        let (name, code) = outcome.labels();
        self.requests.with_label_values(&[name, &code.to_string()])
    }
    /// A request ended.
    pub fn count(&self, outcome: Outcome) {
        self.requests_of(outcome).inc();
    }
    pub fn counted(&self, outcome: Outcome) -> u64 {
        self.requests_of(outcome).get()
    }
    /// A request was not taken.
    pub fn refuse(&self, reason: &str) {
        self.rejections.with_label_values(&[reason]).inc();
    }
    /// A request was taken.
    pub fn admit(&self, max_tokens: u32, n: u32) {
        self.max_tokens.observe(f64::from(max_tokens));
        self.choices.observe(f64::from(n));
    }
    pub fn answered(&self, handler: &str, method: &str, status: u16, took: Duration) {
        self.http.with_label_values(&[handler, method, &status.to_string()]).inc();
        self.http_seconds.with_label_values(&[handler, method]).observe(took.as_secs_f64());
    }
    pub fn connected(&self) {
        self.connections.inc();
    }
    pub fn disconnected(&self) {
        self.connections.dec();
    }

    pub fn latency(&self, latency: Latency, took: Duration) {
        let histogram = match latency {
            Latency::Queue => &self.queue,
            Latency::FirstToken => &self.first_token,
            Latency::InterToken => &self.inter_token,
        };
        histogram.observe(took.as_secs_f64());
    }
    pub fn step(&self, bucket: usize, took: Duration) {
        if let Some(histogram) = self.steps.get(&bucket) {
            histogram.observe(took.as_secs_f64());
        }
    }
    /// A choice ended.
    pub fn ended(&self, record: &TraceRecord) {
        let (reason, completed) = match record.terminal {
            Terminal::CompletedStop => ("stop", true),
            Terminal::CompletedLength => ("length", true),
            Terminal::Error => ("error", false),
            Terminal::Rejected | Terminal::Cancelled | Terminal::Disconnected | Terminal::Expired => ("abort", false),
        };
        self.success.with_label_values(&[reason]).inc();
        if !completed {
            return;
        }
        let seconds = |ms: f64| ms / 1000.0;
        self.prompt_tokens.observe(f64::from(record.prompt_tokens));
        self.generation_tokens.observe(f64::from(record.completion_tokens));
        self.decode.observe(seconds(record.decode_total_ms));
        self.end_to_end.observe(seconds(record.queue_wait_ms + record.scheduled_to_terminal_ms.unwrap_or(0.0)));
        if let Some(ms) = record.scheduled_to_terminal_ms {
            self.inference.observe(seconds(ms));
        }
        if let Some(ms) = record.prefill_ms {
            self.prefill.observe(seconds(ms));
        }
        if let Some(ms) = record.decode_mean_ms {
            self.per_token.observe(seconds(ms));
        }
    }

    /// The text of `/metrics`.
    pub fn render(&self, load: Option<&Load>) -> String {
        let _one = self.scraping.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(load) = load {
            self.read(load);
        }
        TextEncoder::new().encode_to_string(&self.registry.gather()).expect("metric names and labels are valid")
    }

    fn read(&self, load: &Load) {
        let waiting = load.waiting.load(Relaxed) as f64;
        let (used, total) = (load.pages_used.load(Relaxed) as f64, load.pages_total.load(Relaxed) as f64);
        self.running.set(load.running.load(Relaxed) as f64);
        self.waiting.set(waiting);
        self.waiting_by_reason.with_label_values(&["capacity"]).set(waiting);
        self.kv_usage.iter().for_each(|gauge| gauge.set(if total > 0.0 { used / total } else { 0.0 }));
        for state in SLOT_STATES {
            self.slots.with_label_values(&[state.name()]).set(load.slots(state) as f64);
        }
        self.head_wait.set(load.head_wait().as_secs_f64());
        self.pages_used.set(used);
        self.pages.set(total);
        for Mirror { counter, read } in &self.mirrors {
            counter.inc_by(read(load).saturating_sub(counter.get()));
        }
    }
}

/// The counters that the engine keeps, and those that stay 0 until a prefix cache exists.
fn mirrors(m: &Maker, buckets: &[usize]) -> Vec<Mirror> {
    let mut all = vec![
        mirror(m.counter("vllm:prompt_tokens_total", "Prompt tokens prefilled."), |l| l.prompt_tokens.load(Relaxed)),
        mirror(m.counter("vllm:generation_tokens_total", "Tokens handed to requests."), |l| {
            l.generation_tokens.load(Relaxed)
        }),
        mirror(m.counter("vllm:num_preemptions_total", "Choices preempted and recomputed."), |l| {
            l.preemptions.load(Relaxed)
        }),
        mirror(m.counter("slotgraph_padded_rows_total", "Rows of steps that no request used."), |l| {
            l.padded_rows.load(Relaxed)
        }),
        mirror(m.counter("slotgraph_nan_rows_total", "Rows whose logits were not numbers."), |l| {
            l.nan_rows.load(Relaxed)
        }),
        mirror(m.counter("slotgraph_late_records_total", "Row records of holders that had left."), |l| {
            l.late_records.load(Relaxed)
        }),
    ];
    for name in [
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_hits_total",
    ] {
        all.push(mirror(m.counter(name, "Prompt tokens looked up in, or taken from, a prefix cache."), |_| 0));
    }
    let eager = m.counters("slotgraph_eager_steps_total", "Steps that were not graph replays.", &["reason"]);
    all.push(mirror(eager.with_label_values(&["graphs_off"]), |l| l.eager_steps.load(Relaxed)));
    let routes = m.counters("slotgraph_routes_total", "Token-expert pairs computed, by owner.", &["owner"]);
    all.push(mirror(routes.with_label_values(&["local"]), |l| l.routes_local.load(Relaxed)));
    all.push(mirror(routes.with_label_values(&["remote"]), |l| l.routes_remote.load(Relaxed)));
    let replays = m.counters("slotgraph_graph_replays_total", "Graph replays, by bucket.", &["bucket"]);
    for bucket in buckets.iter().copied() {
        let of = move |l: &Load| l.buckets.iter().find(|b| b.bucket == bucket).map_or(0, |b| b.replays.load(Relaxed));
        all.push(mirror(replays.with_label_values(&[bucket.to_string().as_str()]), of));
    }
    let swept = m.counters(
        "slotgraph_sweep_retired_total",
        "Choices ended from outside, by where they were and why.",
        &["state", "cause"],
    );
    for state in LIFE_STATES {
        for cause in ABORT_CAUSES {
            let counter = swept.with_label_values(&[state.name(), cause.name()]);
            all.push(mirror(counter, move |l| l.swept(state, cause)));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_exists_from_the_start() {
        let metrics = Metrics::new("demo", &[1, 2, 64]);
        let text = metrics.render(None);
        for series in [
            "vllm:num_requests_running{engine=\"0\",model_name=\"demo\"} 0",
            "vllm:request_success_total{engine=\"0\",finished_reason=\"abort\",model_name=\"demo\"} 0",
            "slotgraph_requests_total{code=\"429\",engine=\"0\",model_name=\"demo\",outcome=\"rejected\"} 0",
            "slotgraph_graph_replays_total{bucket=\"64\",engine=\"0\",model_name=\"demo\"} 0",
            "slotgraph_sweep_retired_total{cause=\"slow_reader\",engine=\"0\",model_name=\"demo\",state=\"queued\"} 0",
            "vllm:time_to_first_token_seconds_count",
            "vllm:cache_config_info",
            "slotgraph_info",
            "slotgraph_step_seconds_bucket{bucket=\"1\"",
        ] {
            assert!(text.contains(series), "{series}");
        }
        let helps: Vec<&str> = text.lines().filter(|line| line.starts_with("# HELP")).collect();
        let mut names: Vec<&str> = helps.iter().map(|line| line.split(' ').nth(2).unwrap()).collect();
        names.dedup();
        assert_eq!(names.len(), helps.len());
    }

    #[test]
    fn the_engines_counters_are_mirrored() {
        let metrics = Metrics::new("demo", &[1]);
        let load = Load::new(&[1]);
        load.prompt_tokens.store(7, Relaxed);
        load.pages_total.store(4, Relaxed);
        load.pages_used.store(1, Relaxed);
        let text = metrics.render(Some(&load));
        assert!(text.contains("vllm:prompt_tokens_total{engine=\"0\",model_name=\"demo\"} 7"));
        assert!(text.contains("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"demo\"} 0.25"));
        load.prompt_tokens.store(9, Relaxed);
        assert!(metrics.render(Some(&load)).contains("vllm:prompt_tokens_total{engine=\"0\",model_name=\"demo\"} 9"));
    }
}
