//! Settings → Config: every default, and every combination that cannot run, refused with the flag that would help.

use super::parse::{bytes, duration, fraction, list, refuse, switch, word};
use super::{Config, ConfigError, DeviceKind, KvMemory, Machine, PrecisionMode, Settings, Transport};
use slotgraph_graphs::bucket::{ROWS_MAX, decode_buckets, with_prefill};
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_kernels::contract::PAGE_TOKENS;
use std::time::Duration;

/// Seats at most.
const SLOTS_MAX: usize = 1024;
const CPU_KV_BYTES: u64 = 64 << 20;
const CUDA_KV_FRACTION: f64 = 0.9;

/// What `Config::resolve` does.
pub fn resolve(settings: &Settings, model: &ModelSpec, name: &str, machine: Machine) -> Result<Config, ConfigError> {
    let device = device(settings, machine)?;
    let cuda = device == DeviceKind::Cuda;
    let ranks = ranks(settings, model, device, machine)?;
    let cuda_graph = cuda_graph(settings, device, ranks.transport)?;
    let (max_slots, buckets, prefill_chunk) = step_shapes(settings, device)?;
    let page_bytes = page_bytes(model, device);
    let kv = kv_memory(settings, device)?;
    let mut warnings = Vec::new();
    let max_model_len = max_model_len(settings, model, kv, page_bytes, &mut warnings)?;
    let launch_ahead = within("--launch-ahead", settings.launch_ahead, 1, 0, 2)?;
    not_built("--prefix-cache", &settings.prefix_cache)?;
    not_built("--fusion", &settings.fusion)?;
    let request_timeout = seconds("--request-timeout", &settings.request_timeout, 0, true)?;
    let config = Config {
        served_names: served_names(settings, name)?,
        device,
        devices: ranks.devices,
        ep: ranks.ep,
        transport: ranks.transport,
        allow_shared_device: settings.allow_shared_device,
        nccl_nvls: nccl_nvls(settings, ranks.transport)?,
        cuda_graph,
        pdl: cuda_only("--pdl", &settings.pdl, device)?,
        fusion: false,
        prefix_cache: false,
        precision: precision(settings, device)?,
        threads: within("--threads", settings.threads, machine.processors.clamp(1, SLOTS_MAX), 1, SLOTS_MAX)?,
        max_slots,
        max_model_len,
        buckets,
        prefill_chunk,
        itl_target_ms: itl_target(settings)?,
        launch_ahead,
        reserve_tokens: within("--reserve-tokens", settings.reserve_tokens, 1024, 1, usize::MAX)?,
        kv,
        page_bytes,
        seed: settings.seed.unwrap_or(0),
        max_queue: within("--max-queue", settings.max_queue, 1024, 0, 1 << 20)?,
        max_connections: within("--max-connections", settings.max_connections, 4096, 1, 1 << 20)?,
        body_limit: body_limit(settings)?,
        request_timeout: (!request_timeout.is_zero()).then_some(request_timeout),
        write_timeout: seconds("--write-timeout", &settings.write_timeout, 30, false)?,
        stall_timeout: seconds("--stall-timeout", &settings.stall_timeout, 10, false)?,
        init_timeout: seconds("--init-timeout", &settings.init_timeout, 120, false)?,
        drain_timeout: seconds("--drain-timeout", &settings.drain_timeout, 30, true)?,
        nvtx: settings.nvtx,
        lib_dir: lib_dir(settings, cuda)?,
        faults: faults(settings)?,
        warnings,
    };
    if let Some(pool) = config.fixed_pool() {
        config.pages(pool)?;
    }
    Ok(config)
}

fn device(settings: &Settings, machine: Machine) -> Result<DeviceKind, ConfigError> {
    let flag = "--device";
    let words = [("auto", None), ("cpu", Some(DeviceKind::Cpu)), ("cuda", Some(DeviceKind::Cuda))];
    match word(flag, settings.device.as_deref().unwrap_or("auto"), &words)? {
        Some(DeviceKind::Cuda) if machine.gpus == 0 => {
            Err(refuse(flag, "cuda", format!("no GPU is visible{}; --device cpu needs none", visibility())))
        }
        Some(device) => Ok(device),
        None if machine.gpus > 0 => Ok(DeviceKind::Cuda),
        None => Ok(DeviceKind::Cpu),
    }
}

/// The variable that hides GPUs, when it is set.
fn visibility() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(value) => format!(" (CUDA_VISIBLE_DEVICES={value:?})"),
        Err(_) => String::new(),
    }
}

struct Ranks {
    ep: usize,
    devices: Vec<usize>,
    transport: Transport,
}

fn ranks(settings: &Settings, model: &ModelSpec, device: DeviceKind, machine: Machine) -> Result<Ranks, ConfigError> {
    let ep = settings.ep.unwrap_or(1);
    if !matches!(ep, 1 | 2 | 4 | 8) {
        return Err(refuse("--ep", ep, "expected 1, 2, 4 or 8"));
    }
    if ep > 1 && model.experts().is_none() {
        let family = model.family.name();
        return Err(refuse("--ep", ep, format!("a {family} model has no experts to spread; leave --ep at 1")));
    }
    let devices = devices(settings, ep, device, machine)?;
    let shared = devices.len() > 1 && (1..devices.len()).any(|rank| devices[..rank].contains(&devices[rank]));
    let transport = transport(settings, ep, device, shared && device == DeviceKind::Cuda)?;
    Ok(Ranks { ep, devices, transport })
}

fn devices(settings: &Settings, ep: usize, device: DeviceKind, machine: Machine) -> Result<Vec<usize>, ConfigError> {
    let flag = "--devices";
    let Some(text) = settings.devices.as_deref() else {
        if device == DeviceKind::Cpu {
            return Ok(vec![0; ep]);
        }
        if ep > machine.gpus {
            let gpus = machine.gpus;
            let reason = format!("needs {ep} GPUs, {gpus} visible{}; lower --ep", visibility());
            return Err(refuse("--ep", ep, reason));
        }
        return Ok((0..ep).collect());
    };
    if device == DeviceKind::Cpu {
        return Err(refuse(flag, text, "names GPUs, but --device is cpu; leave it out"));
    }
    let ordinals = list(flag, text)?;
    if ordinals.len() != ep {
        let reason = format!("names {} devices for --ep {ep}; name one a rank", ordinals.len());
        return Err(refuse(flag, text, reason));
    }
    if let Some(absent) = ordinals.iter().find(|ordinal| **ordinal >= machine.gpus) {
        let reason = format!("device {absent} is not there: {} visible{}", machine.gpus, visibility());
        return Err(refuse(flag, text, reason));
    }
    for (rank, ordinal) in ordinals.iter().enumerate() {
        if ordinals[..rank].contains(ordinal) && !settings.allow_shared_device {
            let reason = format!("device {ordinal} is named twice; --allow-shared-device permits that");
            return Err(refuse(flag, text, reason));
        }
    }
    Ok(ordinals)
}

fn transport(settings: &Settings, ep: usize, device: DeviceKind, shared: bool) -> Result<Transport, ConfigError> {
    let flag = "--transport";
    let words = [("host-staged", Transport::HostStaged), ("nccl", Transport::Nccl), ("p2p", Transport::P2p)];
    let asked = settings.transport.as_deref().map(|value| word(flag, value, &words)).transpose()?;
    let value = settings.transport.as_deref().unwrap_or_default();
    match (asked, ep, device) {
        (None, 1, _) => Ok(Transport::Single),
        (Some(_), 1, _) => Err(refuse(flag, value, "one rank exchanges nothing; leave it out, or raise --ep")),
        (None | Some(Transport::HostStaged), _, DeviceKind::Cpu) => Ok(Transport::HostStaged),
        (Some(_), _, DeviceKind::Cpu) => Err(refuse(flag, value, "is for GPUs; the CPU device has host-staged")),
        (Some(Transport::Nccl), _, _) if shared => {
            Err(refuse(flag, value, "NCCL refuses two ranks on one GPU; use p2p or host-staged"))
        }
        (None, _, _) if shared => Ok(Transport::P2p),
        (None, _, _) => Ok(Transport::Nccl),
        (Some(transport), _, _) => Ok(transport),
    }
}

fn cuda_graph(settings: &Settings, device: DeviceKind, transport: Transport) -> Result<bool, ConfigError> {
    let flag = "--cuda-graph";
    let asked = switch(flag, &settings.cuda_graph)?;
    if asked == Some(true) && device == DeviceKind::Cpu {
        return Err(refuse(flag, "on", "the CPU device has no CUDA graphs; --device cuda has, or leave it out"));
    }
    if asked == Some(true) && transport == Transport::HostStaged {
        let reason =
            "--transport host-staged goes through the host and is eager only; use nccl or p2p, or --cuda-graph off";
        return Err(refuse(flag, "on", reason));
    }
    Ok(asked.unwrap_or(device == DeviceKind::Cuda && transport != Transport::HostStaged))
}

/// Seats, buckets and prefill rows a step, which must fit each other.
fn step_shapes(settings: &Settings, device: DeviceKind) -> Result<(usize, Vec<usize>, usize), ConfigError> {
    let cuda = device == DeviceKind::Cuda;
    let prefill_chunk = within("--prefill-chunk", settings.prefill_chunk, if cuda { 512 } else { 64 }, 1, ROWS_MAX)?;
    let default_slots = if cuda { 128 } else { 16 };
    let Some(text) = settings.buckets.as_deref() else {
        let max_slots = within("--max-slots", settings.max_slots, default_slots, 1, SLOTS_MAX)?;
        let buckets = with_prefill(&decode_buckets(max_slots), max_slots, prefill_chunk);
        return Ok((max_slots, buckets, prefill_chunk));
    };
    let flag = "--buckets";
    let buckets = list(flag, text)?;
    let last = *buckets.last().expect("a parsed list has a number");
    if buckets[0] == 0 || buckets.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(refuse(flag, text, "expected ascending numbers from 1, each once"));
    }
    if last > ROWS_MAX {
        return Err(refuse(flag, text, format!("{last} rows are more than the {ROWS_MAX} a step can have")));
    }
    let max_slots = within("--max-slots", settings.max_slots, default_slots.min(last), 1, SLOTS_MAX)?;
    if last < max_slots {
        let reason = format!("the largest bucket is {last}, but --max-slots is {max_slots}; add a bucket or lower it");
        return Err(refuse(flag, text, reason));
    }
    Ok((max_slots, with_prefill(&buckets, max_slots, prefill_chunk), prefill_chunk))
}

/// One page over all layers: bf16 on a GPU, f32 on the CPU.
fn page_bytes(model: &ModelSpec, device: DeviceKind) -> u64 {
    let element = if device == DeviceKind::Cuda { 2 } else { 4 };
    (model.layers * PAGE_TOKENS * model.kv_width() * element) as u64
}

fn kv_memory(settings: &Settings, device: DeviceKind) -> Result<KvMemory, ConfigError> {
    let flag = "--kv-memory";
    match (settings.kv_memory.as_deref(), settings.kv_pages) {
        (Some(text), Some(_)) => Err(refuse(flag, text, "--kv-pages is given too; keep one of them")),
        (None, Some(pages)) if pages < 2 => {
            Err(refuse("--kv-pages", pages, "expected at least 2 (page 0 belongs to pad rows)"))
        }
        (None, Some(pages)) => Ok(KvMemory::Pages(pages)),
        (None, None) if device == DeviceKind::Cpu => Ok(KvMemory::Bytes(CPU_KV_BYTES)),
        (None, None) => Ok(KvMemory::Fraction(CUDA_KV_FRACTION)),
        (Some(text), None) => match fraction(text) {
            Some(_) if device == DeviceKind::Cpu => Err(refuse(
                flag,
                text,
                "a fraction is of a GPU's free memory; for the CPU device give bytes, such as 64MiB",
            )),
            Some(part) if part > 0.0 && part < 1.0 => Ok(KvMemory::Fraction(part)),
            Some(_) => Err(refuse(flag, text, "a fraction lies between 0 and 1; bytes are whole, such as 8GiB")),
            None => Ok(KvMemory::Bytes(bytes(flag, text)?)),
        },
    }
}

fn max_model_len(
    settings: &Settings,
    model: &ModelSpec,
    kv: KvMemory,
    page_bytes: u64,
    warnings: &mut Vec<String>,
) -> Result<usize, ConfigError> {
    let positions = model.positions;
    if let Some(asked) = settings.max_model_len {
        let flag = "--max-model-len";
        if asked > positions {
            return Err(refuse(flag, asked, format!("config.json's max_position_embeddings is {positions}")));
        }
        return within(flag, Some(asked), asked, 1, positions);
    }
    let pages = match kv {
        KvMemory::Bytes(bytes) => (bytes / page_bytes) as usize,
        KvMemory::Pages(pages) => pages,
        KvMemory::Fraction(_) => return Ok(positions),
    };
    let held = pages.saturating_sub(1) * PAGE_TOKENS;
    if held > 0 && held < positions {
        let size = if let KvMemory::Pages(_) = kv { "--kv-pages" } else { "--kv-memory" };
        warnings.push(format!(
            "max_model_len is cut from {positions} to {held}, which is what the KV pool holds; {size} enlarges it"
        ));
    }
    Ok(if held > 0 { held.min(positions) } else { positions })
}

fn served_names(settings: &Settings, name: &str) -> Result<Vec<String>, ConfigError> {
    if let Some(bad) = settings.served_model_name.iter().find(|name| name.trim().is_empty()) {
        return Err(refuse("--served-model-name", format!("{bad:?}"), "expected a name"));
    }
    Ok(if settings.served_model_name.is_empty() { vec![name.to_string()] } else { settings.served_model_name.clone() })
}

fn precision(settings: &Settings, device: DeviceKind) -> Result<PrecisionMode, ConfigError> {
    let flag = "--precision";
    let words = [("oracle", PrecisionMode::Oracle), ("contract", PrecisionMode::Contract)];
    let asked = settings.precision.as_deref().map(|value| word(flag, value, &words)).transpose()?;
    match (asked, device) {
        (Some(PrecisionMode::Oracle), DeviceKind::Cuda) => {
            Err(refuse(flag, "oracle", "GPUs always run the rounded contract; --device cpu has the oracle"))
        }
        (Some(mode), _) => Ok(mode),
        (None, DeviceKind::Cpu) => Ok(PrecisionMode::Oracle),
        (None, DeviceKind::Cuda) => Ok(PrecisionMode::Contract),
    }
}

/// A switch that only GPUs have; on by default there.
fn cuda_only(flag: &str, value: &Option<String>, device: DeviceKind) -> Result<bool, ConfigError> {
    match (switch(flag, value)?, device) {
        (Some(true), DeviceKind::Cpu) => Err(refuse(flag, "on", "only GPUs have it; --device is cpu")),
        (asked, device) => Ok(asked.unwrap_or(device == DeviceKind::Cuda)),
    }
}

/// A switch whose feature does not exist yet: off is what happens anyway.
fn not_built(flag: &str, value: &Option<String>) -> Result<(), ConfigError> {
    match switch(flag, value)? {
        Some(true) => Err(refuse(flag, "on", "is not built yet; leave it out or say off")),
        _ => Ok(()),
    }
}

fn nccl_nvls(settings: &Settings, transport: Transport) -> Result<bool, ConfigError> {
    if settings.nccl_nvls && transport != Transport::Nccl {
        return Err(refuse("--nccl-nvls", "on", "only --transport nccl has multicast"));
    }
    Ok(settings.nccl_nvls)
}

fn lib_dir(settings: &Settings, cuda: bool) -> Result<Option<std::path::PathBuf>, ConfigError> {
    match &settings.lib_dir {
        Some(path) if cuda && !path.is_dir() => Err(refuse("--lib-dir", path.display(), "is not a folder")),
        path => Ok(path.clone()),
    }
}

fn itl_target(settings: &Settings) -> Result<Option<f64>, ConfigError> {
    match settings.itl_target_ms {
        Some(target) if !target.is_finite() || target <= 0.0 => {
            Err(refuse("--itl-target-ms", target, "expected milliseconds above 0"))
        }
        target => Ok(target),
    }
}

fn faults(settings: &Settings) -> Result<Vec<String>, ConfigError> {
    let Some(text) = settings.fault.as_deref() else { return Ok(Vec::new()) };
    let names: Vec<String> = text.split(',').map(|name| name.trim().to_string()).collect();
    if names.iter().any(String::is_empty) {
        return Err(refuse("--fault", text, "expected NAME, NAME@step or NAME@rank"));
    }
    Ok(names)
}

fn body_limit(settings: &Settings) -> Result<usize, ConfigError> {
    let flag = "--body-limit";
    let Some(text) = settings.body_limit.as_deref() else { return Ok(32 << 20) };
    let limit = bytes(flag, text)?;
    if !(1 << 10..=1 << 32).contains(&limit) {
        return Err(refuse(flag, text, "expected 1KiB to 4GiB"));
    }
    Ok(limit as usize)
}

fn seconds(flag: &str, value: &Option<String>, default: u64, zero: bool) -> Result<Duration, ConfigError> {
    let Some(text) = value.as_deref() else { return Ok(Duration::from_secs(default)) };
    let parsed = duration(flag, text)?;
    if parsed.is_zero() && !zero {
        return Err(refuse(flag, text, "expected more than 0"));
    }
    Ok(parsed)
}

fn within(flag: &str, value: Option<usize>, default: usize, min: usize, max: usize) -> Result<usize, ConfigError> {
    match value {
        None => Ok(default),
        Some(n) if (min..=max).contains(&n) => Ok(n),
        Some(n) if max == usize::MAX => Err(refuse(flag, n, format!("expected at least {min}"))),
        Some(n) => Err(refuse(flag, n, format!("expected {min} to {max}"))),
    }
}
