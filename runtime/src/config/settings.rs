//! Raw settings: one optional value a flag, as the command line or its `SLOTGRAPH_…` variable gave it.

use std::path::PathBuf;

/// What the user said; None where nothing was said. Words and lists stay text: `Config::resolve` parses them, so that every refusal names
/// its flag in the same way. vLLM's aliases (the server's parser maps them): `--max-num-seqs` → `max_slots`, `--enforce-eager` →
/// `cuda_graph = off`, `--cudagraph-capture-sizes` and `--cuda-graph-sizes` → `buckets`, `--shutdown-timeout` → `drain_timeout`,
/// `--max-num-queued-reqs` → `max_queue`, `--gpu-memory-utilization` and `--kv-cache-memory-bytes` → `kv_memory`,
/// `--num-gpu-blocks-override` → `kv_pages`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// `--device auto|cpu|cuda`
    pub device: Option<String>,
    /// `--cuda-graph[=on|off|true|false]`
    pub cuda_graph: Option<String>,
    /// `--buckets 1,2,4,8`
    pub buckets: Option<String>,
    /// `--max-slots N`
    pub max_slots: Option<usize>,
    /// `--max-model-len N`
    pub max_model_len: Option<usize>,
    /// `--kv-memory BYTES|FRACTION`: `64MiB`, `8GiB`, `1000000`, `0.9`
    pub kv_memory: Option<String>,
    /// `--kv-pages N`
    pub kv_pages: Option<usize>,
    /// `--reserve-tokens N`
    pub reserve_tokens: Option<usize>,
    /// `--ep N`
    pub ep: Option<usize>,
    /// `--devices 0,1`
    pub devices: Option<String>,
    /// `--allow-shared-device`
    pub allow_shared_device: bool,
    /// `--transport host-staged|nccl|p2p`
    pub transport: Option<String>,
    /// `--nccl-nvls`
    pub nccl_nvls: bool,
    /// `--load-format auto|dummy`
    pub load_format: Option<String>,
    /// `--seed N`
    pub seed: Option<u64>,
    /// `--prefill-chunk ROWS`
    pub prefill_chunk: Option<usize>,
    /// `--itl-target-ms MS`
    pub itl_target_ms: Option<f64>,
    /// `--launch-ahead 0|1|2`
    pub launch_ahead: Option<usize>,
    /// `--prefix-cache on|off`
    pub prefix_cache: Option<String>,
    /// `--pdl on|off`
    pub pdl: Option<String>,
    /// `--fusion on|off`
    pub fusion: Option<String>,
    /// `--served-model-name NAME…`
    pub served_model_name: Vec<String>,
    /// `--max-queue N`
    pub max_queue: Option<usize>,
    /// `--max-connections N`
    pub max_connections: Option<usize>,
    /// `--body-limit BYTES`: `32MiB`
    pub body_limit: Option<String>,
    /// Durations: seconds (`30`, `0.5`) or with a unit (`500ms`, `30s`, `2m`).
    pub request_timeout: Option<String>,
    pub write_timeout: Option<String>,
    pub stall_timeout: Option<String>,
    pub init_timeout: Option<String>,
    pub drain_timeout: Option<String>,
    /// Hidden: `--precision oracle|contract`
    pub precision: Option<String>,
    /// `--threads N`
    pub threads: Option<usize>,
    /// `--lib-dir DIR`
    pub lib_dir: Option<PathBuf>,
    /// `--nvtx`
    pub nvtx: bool,
    /// Hidden: `--fault NAME[@step|@rank]`
    pub fault: Option<String>,
}
