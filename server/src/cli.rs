//! The command line: every flag, its variable, and where it goes.
//!
//! Read once by `main`. Each flag also reads `SLOTGRAPH_…`; a variable that cannot be parsed is fatal. What a value means and whether a
//! combination can run is decided by `Config::resolve`, so that every refusal names its flag in one way.

use clap::builder::BoolishValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use slotgraph_runtime::config::Settings;
use std::path::PathBuf;
use std::process::ExitCode;

/// A CUDA-Graph-centric, static-shape decode runtime.
#[derive(Debug, Parser)]
#[command(name = "slotgraph", version, about, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model over HTTP (the bundled demo model if none is named).
    Serve(Box<Serve>),
    /// Continue one prompt and print the answer.
    Generate(Box<Generate>),
}

#[derive(Debug, Args)]
pub struct Serve {
    /// Checkpoint folder
    #[arg(value_name = "MODEL", conflicts_with = "model_flag")]
    model: Option<PathBuf>,
    /// Checkpoint folder
    #[arg(long = "model", alias = "model-path", value_name = "DIR", env = "SLOTGRAPH_MODEL", id = "model_flag")]
    model_flag: Option<PathBuf>,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", env = "SLOTGRAPH_HOST")]
    pub host: String,
    /// Port to listen on; 0 takes a free one and prints it
    #[arg(long, default_value_t = 8000, env = "SLOTGRAPH_PORT")]
    pub port: u16,
    /// Key that /v1, /debug and cancel ask for; may be given several times (SLOTGRAPH_API_KEY: separated by commas)
    #[arg(long = "api-key", value_name = "KEY")]
    pub api_keys: Vec<String>,
    /// File of API keys, one a line
    #[arg(long, value_name = "FILE", env = "SLOTGRAPH_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Append trace lines to this file instead of writing them to stderr
    #[arg(long, value_name = "FILE", env = "SLOTGRAPH_TRACE_FILE")]
    pub trace_file: Option<PathBuf>,
    /// How log lines look
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "SLOTGRAPH_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// Print the resolved configuration and the memory split as JSON, and exit
    #[arg(long)]
    pub print_config: bool,
    /// Seconds that a client may take to send a request's headers
    #[arg(long, default_value_t = 30.0, value_parser = seconds, value_name = "SECONDS", env = "SLOTGRAPH_HEADER_TIMEOUT")]
    pub header_timeout: f64,
    /// Seconds that a client may take to send a request's body
    #[arg(long, default_value_t = 60.0, value_parser = seconds, value_name = "SECONDS", env = "SLOTGRAPH_BODY_TIMEOUT")]
    pub body_timeout: f64,
    #[command(flatten)]
    http: Http,
    #[command(flatten)]
    engine: Engine,
}

/// Limits of the HTTP edge.
#[derive(Debug, Default, Args)]
struct Http {
    /// Names that the model answers to; the first is its own [default: the folder's name]
    #[arg(long, num_args = 1.., value_name = "NAME", env = "SLOTGRAPH_SERVED_MODEL_NAME", value_delimiter = ',')]
    served_model_name: Vec<String>,
    /// Requests that may wait beyond those that hold a slot [default: 1024]
    #[arg(long, alias = "max-num-queued-reqs", value_name = "N", env = "SLOTGRAPH_MAX_QUEUE")]
    max_queue: Option<usize>,
    /// Open connections [default: 4096]
    #[arg(long, value_name = "N", env = "SLOTGRAPH_MAX_CONNECTIONS")]
    max_connections: Option<usize>,
    /// Largest request body, such as 32MiB [default: 32MiB]
    #[arg(long, value_name = "BYTES", env = "SLOTGRAPH_BODY_LIMIT")]
    body_limit: Option<String>,
    /// Longest life of a request, such as 30s; 0 is none [default: 0]
    #[arg(long, value_name = "TIME", env = "SLOTGRAPH_REQUEST_TIMEOUT")]
    request_timeout: Option<String>,
    /// How long a client may not read before its connection is cut [default: 30s]
    #[arg(long, value_name = "TIME", env = "SLOTGRAPH_WRITE_TIMEOUT")]
    write_timeout: Option<String>,
    /// How long the engine may stand still before /health/live turns 503 [default: 10s]
    #[arg(long, value_name = "TIME", env = "SLOTGRAPH_STALL_TIMEOUT")]
    stall_timeout: Option<String>,
    /// How long a stop waits for requests in flight [default: 30s]
    #[arg(long, alias = "shutdown-timeout", value_name = "TIME", env = "SLOTGRAPH_DRAIN_TIMEOUT")]
    drain_timeout: Option<String>,
}

/// What `serve`, `generate` and the probes share.
#[derive(Clone, Debug, Default, Args)]
pub struct Engine {
    /// auto, cpu or cuda [default: auto]
    #[arg(long, env = "SLOTGRAPH_DEVICE")]
    device: Option<String>,
    /// Replay captured graphs: on, off, true or false [default: on with CUDA]
    #[arg(long, num_args = 0..=1, default_missing_value = "on", value_name = "SWITCH", env = "SLOTGRAPH_CUDA_GRAPH")]
    cuda_graph: Option<String>,
    /// Same as --cuda-graph off
    #[arg(long, conflicts_with = "cuda_graph", value_parser = BoolishValueParser::new(), env = "SLOTGRAPH_ENFORCE_EAGER")]
    enforce_eager: bool,
    /// Batch sizes, such as 1,2,4,8
    #[arg(
        long,
        aliases = ["cudagraph-capture-sizes", "cuda-graph-sizes"],
        value_name = "LIST",
        env = "SLOTGRAPH_BUCKETS"
    )]
    buckets: Option<String>,
    /// Concurrent sequences [default: 16 on the CPU, 128 with CUDA]
    #[arg(long, alias = "max-num-seqs", value_name = "N", env = "SLOTGRAPH_MAX_SLOTS")]
    max_slots: Option<usize>,
    /// Most tokens of one sequence, prompt and answer [default: the model's]
    #[arg(long, value_name = "N", env = "SLOTGRAPH_MAX_MODEL_LEN")]
    max_model_len: Option<usize>,
    /// Memory of the KV pool, bytes or a fraction [default: 64MiB on the CPU, 0.9 with CUDA]
    #[arg(
        long,
        aliases = ["gpu-memory-utilization", "kv-cache-memory-bytes"],
        value_name = "BYTES|FRACTION",
        env = "SLOTGRAPH_KV_MEMORY"
    )]
    kv_memory: Option<String>,
    /// Pages of the KV pool
    #[arg(long, alias = "num-gpu-blocks-override", value_name = "N", env = "SLOTGRAPH_KV_PAGES")]
    kv_pages: Option<usize>,
    /// Generated tokens that admission reserves pages for [default: 1024]
    #[arg(long, value_name = "N", env = "SLOTGRAPH_RESERVE_TOKENS")]
    reserve_tokens: Option<usize>,
    /// Expert-parallel ranks: 1, 2, 4 or 8 [default: 1]
    #[arg(long, value_name = "N", env = "SLOTGRAPH_EP")]
    ep: Option<usize>,
    /// CUDA devices, one a rank, such as 0,1
    #[arg(long, value_name = "LIST", env = "SLOTGRAPH_DEVICES")]
    devices: Option<String>,
    /// Let two ranks use one device
    #[arg(long, value_parser = BoolishValueParser::new(), env = "SLOTGRAPH_ALLOW_SHARED_DEVICE")]
    allow_shared_device: bool,
    /// How ranks exchange: host-staged, nccl or p2p
    #[arg(long, alias = "exchange", env = "SLOTGRAPH_TRANSPORT")]
    transport: Option<String>,
    /// Allow NCCL its multicast
    #[arg(long, value_parser = BoolishValueParser::new(), env = "SLOTGRAPH_NCCL_NVLS")]
    nccl_nvls: bool,
    /// auto, or dummy: seeded weights, only config.json is needed
    #[arg(long, env = "SLOTGRAPH_LOAD_FORMAT")]
    load_format: Option<String>,
    /// Seed of dummy weights
    #[arg(long, value_name = "N", env = "SLOTGRAPH_SEED")]
    seed: Option<u64>,
    /// Prefill rows a step [default: 64 on the CPU, 512 with CUDA]
    #[arg(long, value_name = "ROWS", env = "SLOTGRAPH_PREFILL_CHUNK")]
    prefill_chunk: Option<usize>,
    /// Keep the gap between a stream's tokens under this by fewer prefill rows a step
    #[arg(long, value_name = "MS", env = "SLOTGRAPH_ITL_TARGET_MS")]
    itl_target_ms: Option<f64>,
    /// Steps enqueued beyond the last settled one: 0, 1 or 2 [default: 1]
    #[arg(long, value_name = "N", env = "SLOTGRAPH_LAUNCH_AHEAD")]
    launch_ahead: Option<usize>,
    /// on or off
    #[arg(long, value_name = "SWITCH", env = "SLOTGRAPH_PREFIX_CACHE")]
    prefix_cache: Option<String>,
    /// Programmatic dependent launch: on or off
    #[arg(long, value_name = "SWITCH", env = "SLOTGRAPH_PDL")]
    pdl: Option<String>,
    /// Fusions across nodes: on or off
    #[arg(long, value_name = "SWITCH", env = "SLOTGRAPH_FUSION")]
    fusion: Option<String>,
    /// How long a start may take [default: 120s]
    #[arg(long, value_name = "TIME", env = "SLOTGRAPH_INIT_TIMEOUT")]
    init_timeout: Option<String>,
    /// Worker threads of the CPU device [default: all processors]
    #[arg(long, value_name = "N", env = "SLOTGRAPH_THREADS")]
    threads: Option<usize>,
    /// Folder searched first for CUDA, NVRTC and NCCL
    #[arg(long, value_name = "DIR", env = "SLOTGRAPH_LIB_DIR")]
    lib_dir: Option<PathBuf>,
    /// Push NVTX ranges
    #[arg(long, value_parser = BoolishValueParser::new(), env = "SLOTGRAPH_NVTX")]
    nvtx: bool,
    /// Precision of the CPU device: oracle or contract
    #[arg(long, hide = true, env = "SLOTGRAPH_PRECISION")]
    precision: Option<String>,
    /// Arm a planted fault: NAME[@step|@rank]
    #[arg(long, hide = true, env = "SLOTGRAPH_FAULT")]
    fault: Option<String>,
}

#[derive(Debug, Args)]
pub struct Generate {
    /// Checkpoint folder [default: the bundled demo model]
    #[arg(long, alias = "model-path", value_name = "DIR", env = "SLOTGRAPH_MODEL")]
    pub model: Option<PathBuf>,
    /// Text to continue
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub prompt: Option<String>,
    /// Token ids to continue, such as 1,2,3
    #[arg(long, value_name = "IDS", value_delimiter = ',', num_args = 1)]
    pub prompt_ids: Option<Vec<u32>>,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub max_tokens: u32,
    /// Go on after an end-of-sequence token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Log-probabilities, with this many alternatives (0 to 20)
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(0..=20))]
    pub logprobs: Option<u32>,
    /// Print one JSON line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    engine: Engine,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 86_400.0 => Ok(seconds),
        _ => Err("a number of seconds above 0 is needed".to_owned()),
    }
}

impl Serve {
    pub fn model(&self) -> Option<&PathBuf> {
        self.model.as_ref().or(self.model_flag.as_ref())
    }
    pub fn settings(&self) -> Settings {
        Settings {
            served_model_name: self.http.served_model_name.clone(),
            max_queue: self.http.max_queue,
            max_connections: self.http.max_connections,
            body_limit: self.http.body_limit.clone(),
            request_timeout: self.http.request_timeout.clone(),
            write_timeout: self.http.write_timeout.clone(),
            stall_timeout: self.http.stall_timeout.clone(),
            drain_timeout: self.http.drain_timeout.clone(),
            ..self.engine.settings()
        }
    }
}

impl Generate {
    pub fn settings(&self) -> Settings {
        self.engine.settings()
    }
}

impl Engine {
    pub fn settings(&self) -> Settings {
        Settings {
            device: self.device.clone(),
            cuda_graph: if self.enforce_eager { Some("off".into()) } else { self.cuda_graph.clone() },
            buckets: self.buckets.clone(),
            max_slots: self.max_slots,
            max_model_len: self.max_model_len,
            kv_memory: self.kv_memory.clone(),
            kv_pages: self.kv_pages,
            reserve_tokens: self.reserve_tokens,
            ep: self.ep,
            devices: self.devices.clone(),
            allow_shared_device: self.allow_shared_device,
            transport: self.transport.clone(),
            nccl_nvls: self.nccl_nvls,
            load_format: self.load_format.clone(),
            seed: self.seed,
            prefill_chunk: self.prefill_chunk,
            itl_target_ms: self.itl_target_ms,
            launch_ahead: self.launch_ahead,
            prefix_cache: self.prefix_cache.clone(),
            pdl: self.pdl.clone(),
            fusion: self.fusion.clone(),
            init_timeout: self.init_timeout.clone(),
            precision: self.precision.clone(),
            threads: self.threads,
            lib_dir: self.lib_dir.clone(),
            nvtx: self.nvtx,
            fault: self.fault.clone(),
            ..Settings::default()
        }
    }
}

/// Runs the command line; what `main` returns.
pub fn run() -> ExitCode {
    match Cli::parse().command {
        Command::Serve(serve) => crate::serve::run(&serve),
        Command::Generate(generate) => crate::generate::run(&generate),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(arguments: &[&str]) -> Result<Serve, clap::Error> {
        let all = ["slotgraph", "serve"].iter().chain(arguments);
        match Cli::try_parse_from(all)?.command {
            Command::Serve(serve) => Ok(*serve),
            Command::Generate(_) => unreachable!(),
        }
    }

    #[test]
    fn the_definition_holds_together() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn vllms_words_are_aliases() {
        let arguments = [
            "DIR",
            "--max-num-seqs",
            "13",
            "--enforce-eager",
            "--cudagraph-capture-sizes",
            "1,2",
            "--shutdown-timeout",
            "5",
            "--max-num-queued-reqs",
            "7",
            "--served-model-name",
            "a",
            "b",
        ];
        let parsed = serve(&arguments).unwrap();
        let settings = parsed.settings();
        assert_eq!(parsed.model().unwrap().to_str(), Some("DIR"));
        assert_eq!((settings.max_slots, settings.max_queue), (Some(13), Some(7)));
        assert_eq!(settings.cuda_graph.as_deref(), Some("off"));
        assert_eq!((settings.buckets.as_deref(), settings.drain_timeout.as_deref()), (Some("1,2"), Some("5")));
        assert_eq!(settings.served_model_name, ["a", "b"]);
    }

    #[test]
    fn the_graph_switch_takes_an_optional_word() {
        for (arguments, expected) in
            [(&["--cuda-graph"][..], "on"), (&["--cuda-graph=off"], "off"), (&["--cuda-graph", "false"], "false")]
        {
            assert_eq!(serve(arguments).unwrap().settings().cuda_graph.as_deref(), Some(expected));
        }
    }

    #[test]
    fn bad_values_name_their_flag() {
        for (flag, value) in [("--port", "70000"), ("--port", "abc"), ("--max-slots", "-1"), ("--body-timeout", "0")] {
            let error = serve(&[&format!("{flag}={value}")]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let text = error.to_string();
            assert!(text.contains(flag) && text.contains(value), "{text}");
        }
    }
}
