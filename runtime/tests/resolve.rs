//! Settings → Config: the defaults, the combinations that are refused, and what the limits become.

use serde_json::Value;
use slotgraph_runtime::checkpoint::{Checkpoint, LoadFormat};
use slotgraph_runtime::config::{
    Config, ConfigError, DeviceKind, KvMemory, Machine, PrecisionMode, Settings, Transport,
};
use std::path::Path;
use std::time::Duration;

const CPU: Machine = Machine { gpus: 0, processors: 6 };
const GPUS: Machine = Machine { gpus: 2, processors: 32 };

fn model(name: &str) -> Checkpoint {
    Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models").join(name)).unwrap()
}

fn shape(name: &str) -> Checkpoint {
    Checkpoint::dummy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/shapes").join(name), 0).unwrap()
}

fn on(checkpoint: &Checkpoint, machine: Machine, set: impl FnOnce(&mut Settings)) -> Result<Config, ConfigError> {
    let mut settings = Settings::default();
    set(&mut settings);
    Config::resolve(&settings, &checkpoint.spec, &checkpoint.name, machine)
}

fn text(value: &str) -> Option<String> {
    Some(value.to_string())
}

#[test]
fn defaults_on_the_cpu() {
    let demo = model("shakespeare-dsv2");
    let config = on(&demo, CPU, |_| ()).unwrap();
    assert_eq!((config.device, config.transport, config.ep), (DeviceKind::Cpu, Transport::Single, 1));
    assert_eq!((config.max_slots, config.prefill_chunk, config.launch_ahead), (16, 64, 1));
    assert_eq!(config.buckets, [1, 2, 4, 8, 16, 32, 64, 80]);
    assert_eq!((config.max_model_len, config.reserve_tokens), (2048, 1024));
    assert_eq!((config.cuda_graph, config.pdl, config.prefix_cache), (false, false, false));
    assert_eq!((config.precision, config.threads), (PrecisionMode::Oracle, 6));
    assert_eq!((config.max_queue, config.max_connections, config.body_limit), (1024, 4096, 32 << 20));
    assert_eq!((config.request_timeout, config.drain_timeout), (None, Duration::from_secs(30)));
    assert_eq!((config.write_timeout, config.stall_timeout), (Duration::from_secs(30), Duration::from_secs(10)));
    assert_eq!(config.init_timeout, Duration::from_secs(120));
    assert_eq!(config.served_names, ["shakespeare-dsv2"]);
    assert!(config.warnings.is_empty());
    // 4 layers · 64 tokens · (64 + 16) values · 4 bytes; 64 MiB hold 819, but 16 seats use 512 at most.
    assert_eq!((config.page_bytes, config.kv), (81_920, KvMemory::Bytes(64 << 20)));
    assert_eq!(config.fixed_pages(), Some(16 * 32 + 1));
    let limits = config.limits(config.fixed_pages().unwrap());
    assert_eq!((limits.pages_per_slot, limits.rows_max(), limits.slots_max), (32, 80, 16));
}

#[test]
fn defaults_on_gpus() {
    let lite = shape("deepseek-v2-lite");
    let config = on(&lite, GPUS, |_| ()).unwrap();
    assert_eq!((config.device, config.cuda_graph, config.pdl), (DeviceKind::Cuda, true, true));
    assert_eq!(config.buckets, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 640]);
    assert_eq!((config.max_slots, config.prefill_chunk, config.max_model_len), (128, 512, 163_840));
    assert_eq!((config.kv, config.fixed_pages()), (KvMemory::Fraction(0.9), None));
    assert_eq!(config.precision, PrecisionMode::Contract);
    // 27 layers · 64 tokens · 576 values · 2 bytes.
    assert_eq!(config.page_bytes, 1_990_656);
    let pool = config.pool(100 << 30, 1);
    assert_eq!(pool, (90u64 << 30) - (512 << 20));
    assert_eq!(config.pages(pool).unwrap(), (pool / 1_990_656) as usize);
    assert_eq!(config.pool(100 << 30, 2), (45u64 << 30) - (512 << 20));
    let small = config.pages(1 << 30).unwrap_err();
    assert_eq!(small.flag, "--kv-memory");
    assert!(small.reason.contains("--max-model-len 163840 needs 2561 pages"), "{small}");
}

#[test]
fn ranks_devices_and_transports() {
    let lite = shape("deepseek-v2-lite");
    let two = on(&lite, GPUS, |s| s.ep = Some(2)).unwrap();
    assert_eq!((two.devices, two.transport, two.cuda_graph), (vec![0, 1], Transport::Nccl, true));
    let swapped = on(&lite, GPUS, |s| {
        (s.ep, s.devices, s.transport) = (Some(2), text("1,0"), text("p2p"));
    });
    assert_eq!(swapped.unwrap().devices, [1, 0]);
    let staged = on(&lite, GPUS, |s| (s.ep, s.transport) = (Some(2), text("host-staged"))).unwrap();
    assert_eq!((staged.transport, staged.cuda_graph), (Transport::HostStaged, false));
    let shared = on(&lite, GPUS, |s| {
        (s.ep, s.devices, s.allow_shared_device) = (Some(2), text("0,0"), true);
    });
    assert_eq!(shared.unwrap().transport, Transport::P2p);
    let cpu = on(&model("shakespeare-dsv2"), CPU, |s| s.ep = Some(8)).unwrap();
    assert_eq!((cpu.transport, cpu.devices.len()), (Transport::HostStaged, 8));
}

#[test]
fn impossible_combinations_name_flag_value_and_remedy() {
    let (demo, dense, lite) = (model("shakespeare-dsv2"), model("shakespeare-qwen3"), shape("deepseek-v2-lite"));
    type Change = fn(&mut Settings);
    let cases: &[(&Checkpoint, Machine, Change, &str, &str)] = &[
        (&demo, CPU, |s| s.device = text("tpu"), "--device tpu", "auto, cpu, cuda"),
        (&demo, CPU, |s| s.device = text("cuda"), "--device cuda", "no GPU is visible"),
        (&demo, CPU, |s| s.ep = Some(3), "--ep 3", "1, 2, 4 or 8"),
        (&demo, CPU, |s| s.ep = Some(0), "--ep 0", "1, 2, 4 or 8"),
        (&demo, CPU, |s| s.ep = Some(128), "--ep 128", "1, 2, 4 or 8"),
        (&dense, CPU, |s| s.ep = Some(2), "--ep 2", "no experts"),
        (&lite, GPUS, |s| s.ep = Some(4), "--ep 4", "needs 4 GPUs, 2 visible"),
        (&lite, GPUS, |s| s.devices = text("0,1"), "--devices 0,1", "2 devices for --ep 1"),
        (&lite, GPUS, |s| (s.ep, s.devices) = (Some(2), text("0,2")), "--devices 0,2", "device 2 is not there"),
        (&lite, GPUS, |s| (s.ep, s.devices) = (Some(2), text("1,1")), "--devices 1,1", "--allow-shared-device"),
        (&lite, GPUS, |s| s.devices = text("gpu0"), "--devices gpu0", "1,2,4"),
        (&demo, CPU, |s| s.devices = text("0"), "--devices 0", "--device is cpu"),
        (
            &lite,
            GPUS,
            |s| (s.ep, s.devices, s.allow_shared_device, s.transport) = (Some(2), text("0,0"), true, text("nccl")),
            "--transport nccl",
            "p2p",
        ),
        (&lite, GPUS, |s| s.transport = text("nccl"), "--transport nccl", "--ep"),
        (&lite, GPUS, |s| (s.ep, s.transport) = (Some(2), text("rdma")), "--transport rdma", "host-staged, nccl, p2p"),
        (&demo, CPU, |s| (s.ep, s.transport) = (Some(2), text("p2p")), "--transport p2p", "host-staged"),
        (
            &lite,
            GPUS,
            |s| (s.ep, s.transport, s.cuda_graph) = (Some(2), text("host-staged"), text("on")),
            "--cuda-graph on",
            "eager only",
        ),
        (&demo, CPU, |s| s.cuda_graph = text("on"), "--cuda-graph on", "--device cuda"),
        (&demo, CPU, |s| s.cuda_graph = text("yes"), "--cuda-graph yes", "on or off"),
        (&demo, CPU, |s| s.max_model_len = Some(2049), "--max-model-len 2049", "max_position_embeddings is 2048"),
        (&demo, CPU, |s| s.max_model_len = Some(0), "--max-model-len 0", "1 to 2048"),
        (&demo, CPU, |s| s.buckets = text(""), "--buckets ", "1,2,4"),
        (&demo, CPU, |s| s.buckets = text("1,,2"), "--buckets 1,,2", "1,2,4"),
        (&demo, CPU, |s| s.buckets = text("0,1"), "--buckets 0,1", "ascending"),
        (&demo, CPU, |s| s.buckets = text("4,2"), "--buckets 4,2", "ascending"),
        (&demo, CPU, |s| s.buckets = text("2,2"), "--buckets 2,2", "ascending"),
        (&demo, CPU, |s| s.buckets = text("1,4096"), "--buckets 1,4096", "2048"),
        (&demo, CPU, |s| (s.buckets, s.max_slots) = (text("1,2"), Some(4)), "--buckets 1,2", "--max-slots is 4"),
        (&demo, CPU, |s| s.max_slots = Some(0), "--max-slots 0", "1 to 1024"),
        (&demo, CPU, |s| s.prefill_chunk = Some(0), "--prefill-chunk 0", "1 to 2048"),
        (&demo, CPU, |s| s.launch_ahead = Some(3), "--launch-ahead 3", "0 to 2"),
        (&demo, CPU, |s| s.kv_memory = text("0.5"), "--kv-memory 0.5", "bytes"),
        (&lite, GPUS, |s| s.kv_memory = text("1.5"), "--kv-memory 1.5", "between 0 and 1"),
        (&demo, CPU, |s| s.kv_memory = text("lots"), "--kv-memory lots", "64MiB"),
        (&demo, CPU, |s| s.kv_memory = text("1KiB"), "--kv-memory 1024", "holds 0 tokens"),
        (&demo, CPU, |s| s.kv_pages = Some(1), "--kv-pages 1", "at least 2"),
        (&demo, CPU, |s| (s.kv_pages, s.kv_memory) = (Some(9), text("1MiB")), "--kv-memory 1MiB", "--kv-pages"),
        (&demo, CPU, |s| (s.kv_pages, s.max_model_len) = (Some(8), Some(512)), "--kv-pages 8", "needs 9 pages"),
        (&demo, CPU, |s| s.reserve_tokens = Some(0), "--reserve-tokens 0", "at least 1"),
        (&demo, CPU, |s| s.prefix_cache = text("on"), "--prefix-cache on", "not built yet"),
        (&demo, CPU, |s| s.fusion = text("on"), "--fusion on", "not built yet"),
        (&demo, CPU, |s| s.pdl = text("on"), "--pdl on", "only GPUs"),
        (&lite, GPUS, |s| s.precision = text("oracle"), "--precision oracle", "--device cpu"),
        (&demo, CPU, |s| s.precision = text("fp8"), "--precision fp8", "oracle, contract"),
        (&demo, CPU, |s| s.threads = Some(0), "--threads 0", "1 to 1024"),
        (&demo, CPU, |s| s.itl_target_ms = Some(-1.0), "--itl-target-ms -1", "above 0"),
        (&demo, CPU, |s| s.max_connections = Some(0), "--max-connections 0", "1 to"),
        (&demo, CPU, |s| s.body_limit = text("10"), "--body-limit 10", "1KiB"),
        (&demo, CPU, |s| s.write_timeout = text("0"), "--write-timeout 0", "more than 0"),
        (&demo, CPU, |s| s.drain_timeout = text("soon"), "--drain-timeout soon", "30s"),
        (&demo, CPU, |s| s.request_timeout = text("-1"), "--request-timeout -1", "30s"),
        (&demo, CPU, |s| s.nccl_nvls = true, "--nccl-nvls on", "nccl"),
        (&demo, CPU, |s| s.fault = text("a,,b"), "--fault a,,b", "NAME@step"),
        (&demo, CPU, |s| s.served_model_name = vec![" ".into()], "--served-model-name", "expected a name"),
        (&lite, GPUS, |s| s.lib_dir = Some("/nowhere/at/all".into()), "--lib-dir /nowhere/at/all", "not a folder"),
    ];
    for (checkpoint, machine, change, flag, remedy) in cases {
        let error = on(checkpoint, *machine, change).err().unwrap_or_else(|| panic!("{flag} was accepted")).to_string();
        assert!(error.starts_with(flag) && error.contains(remedy) && !error.contains('\n'), "{flag}: {error}");
    }
}

#[test]
fn buckets_grow_to_what_mixed_steps_need() {
    let demo = model("shakespeare-dsv2");
    let buckets = |set: fn(&mut Settings)| on(&demo, CPU, set).unwrap().buckets;
    assert_eq!(buckets(|s| (s.max_slots, s.prefill_chunk) = (Some(1), Some(1))), [1, 2, 4, 8, 16]);
    assert_eq!(
        buckets(|s| (s.buckets, s.max_slots, s.prefill_chunk) = (text("1,2,4,8,16"), Some(13), Some(64))),
        [1, 2, 4, 8, 16, 32, 64, 80]
    );
    assert_eq!(buckets(|s| (s.buckets, s.prefill_chunk) = (text("3, 100"), Some(8))), [3, 100]);
    assert_eq!(buckets(|s| (s.buckets, s.prefill_chunk) = (text("3 100"), Some(8))), [3, 100]);
    assert_eq!(*buckets(|s| (s.max_slots, s.prefill_chunk) = (Some(1024), Some(2048))).last().unwrap(), 2048);
    let few = on(&demo, CPU, |s| s.buckets = text("1,2,4")).unwrap();
    assert_eq!(few.max_slots, 4);
}

#[test]
fn a_small_pool_cuts_the_default_context_and_says_so() {
    let demo = model("shakespeare-dsv2");
    let config = on(&demo, CPU, |s| s.kv_pages = Some(9)).unwrap();
    assert_eq!((config.max_model_len, config.fixed_pages()), (512, Some(9)));
    assert!(config.warnings[0].contains("from 2048 to 512"), "{:?}", config.warnings);
    let qwen = on(&shape("qwen3-4b"), CPU, |_| ()).unwrap();
    assert_eq!((qwen.max_model_len, qwen.fixed_pages()), (128, Some(3)));
    let exact = on(&demo, CPU, |s| (s.kv_pages, s.max_model_len) = (Some(9), Some(512))).unwrap();
    assert!(exact.warnings.is_empty());
}

#[test]
fn sizes_and_durations_have_units() {
    let demo = model("shakespeare-dsv2");
    let pool = |value: &str| on(&demo, CPU, |s| s.kv_memory = text(value)).unwrap().kv;
    assert_eq!(pool("100000000"), KvMemory::Bytes(100_000_000));
    assert_eq!(pool("128MiB"), KvMemory::Bytes(128 << 20));
    assert_eq!(pool("1g"), KvMemory::Bytes(1 << 30));
    assert_eq!(pool("2 GB"), KvMemory::Bytes(2_000_000_000));
    assert_eq!(pool("1.5MiB"), KvMemory::Bytes(3 << 19));
    let lite = shape("deepseek-v2-lite");
    assert_eq!(on(&lite, GPUS, |s| s.kv_memory = text("80%")).unwrap().kv, KvMemory::Fraction(0.8));
    let timeout = |value: &str| on(&demo, CPU, |s| s.request_timeout = text(value)).unwrap().request_timeout;
    assert_eq!(timeout("0"), None);
    assert_eq!(timeout("1.5"), Some(Duration::from_millis(1500)));
    assert_eq!(timeout("250ms"), Some(Duration::from_millis(250)));
    assert_eq!(timeout("2m"), Some(Duration::from_secs(120)));
    assert_eq!(on(&demo, CPU, |s| s.drain_timeout = text("0")).unwrap().drain_timeout, Duration::ZERO);
}

#[test]
fn load_format_is_known_before_the_checkpoint_is_opened() {
    let settings = |load: &str| Settings { load_format: text(load), seed: Some(7), ..Settings::default() };
    assert_eq!(Settings::default().load_format().unwrap(), LoadFormat::Safetensors);
    assert_eq!(settings("auto").load_format().unwrap(), LoadFormat::Safetensors);
    assert_eq!(settings("dummy").load_format().unwrap(), LoadFormat::Dummy { seed: 7 });
    assert!(settings("gguf").load_format().unwrap_err().to_string().starts_with("--load-format gguf"));
}

#[test]
fn the_printed_configuration_is_stable_json_with_the_memory_split() {
    let lite = shape("deepseek-v2-lite");
    let config = on(&lite, GPUS, |s| (s.ep, s.max_model_len, s.kv_pages) = (Some(2), Some(4096), Some(1000))).unwrap();
    let printed = config.print(&lite).unwrap();
    assert_eq!(printed, config.print(&lite).unwrap());
    let value: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(value.as_object().unwrap().keys().collect::<Vec<_>>(), ["config", "model", "memory"]);
    assert_eq!((&value["config"]["transport"], &value["config"]["request_timeout"]), (&"nccl".into(), &Value::Null));
    assert_eq!(value["model"]["weights"]["parameters"], 15_706_484_224u64);
    let memory = &value["memory"];
    assert_eq!((&memory["kv_pages"], &memory["kv_tokens"]), (&1000.into(), &63_936.into()));
    assert_eq!(memory["kv_bytes"], 1_990_656_000u64);
    // Half of the routed experts: 26 layers · 32 · 3 · 2,048 · 1,408 values; the rest of the model is whole on each rank.
    let routed = 26u64 * 32 * 3 * 2048 * 1408 * 2;
    let whole = 15_706_484_224u64 * 2 - 2 * routed;
    let weights = memory["weight_bytes"].as_u64().unwrap();
    assert!(weights > whole + routed && weights < whole + routed + (8 << 20), "{weights}");
    assert!(memory["exchange_bytes"].as_u64().unwrap() > 0);
    // A fraction is not known before the weights are loaded.
    let open = on(&lite, GPUS, |_| ()).unwrap();
    let value: Value = serde_json::from_str(&open.print(&lite).unwrap()).unwrap();
    assert_eq!(value["memory"]["kv_pages"], Value::Null);
}

#[test]
fn switches_show_everything_that_can_be_rolled_back() {
    let lite = shape("deepseek-v2-lite");
    let config =
        on(&lite, GPUS, |s| (s.cuda_graph, s.pdl, s.fault) = (text("off"), text("off"), text("flip@3"))).unwrap();
    let switches = config.switches();
    assert_eq!(switches["cuda_graph"], "off");
    assert_eq!(switches["pdl"], "off");
    assert_eq!(switches["transport"], "single");
    assert_eq!(switches["fault"], "flip@3");
    assert!(!on(&lite, GPUS, |_| ()).unwrap().switches().contains_key("fault"));
}
