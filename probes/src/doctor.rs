//! doctor: what this machine offers, whether the parts that everything rests on hold here, and one verdict.

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::cuda;
use crate::driver::Driver;
use crate::evidence::{Canary, Draft};
use crate::machine::Machine;
use crate::script::{self, Transcript, first_divergence};
use crate::stats::Summary;
use crate::subject::{Subject, SubjectArgs};
use serde_json::{Value, json};
use slotgraph_graphs::cuda::libs::{DRIVER, LibraryError, NCCL, NVRTC, Search};
use slotgraph_graphs::cuda::{Chains, device_count};
use slotgraph_graphs::device::Device;
use slotgraph_graphs::fault::{Fault, FaultDevice};
use slotgraph_runtime::config::Settings;
use std::path::PathBuf;

/// Libraries, devices, and the bundled model on each of them: one verdict.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder searched first for CUDA, NVRTC and NCCL.
    #[arg(long)]
    lib_dir: Option<PathBuf>,
}

/// Bucket of the script that every device runs.
const BUCKET: usize = 4;
const STEPS: usize = 80;

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let mut draft = Draft::new(
        "doctor",
        "do the parts that everything rests on hold on this machine?",
        Claim::of(Label::MachineState),
    );
    let machine = Machine::read();
    let libraries = libraries(args);
    let missing = |name: &str| libraries[name].get("error").and_then(Value::as_str).map(String::from);
    // Those that the driver shows this process, which may be fewer; all of them when it cannot be asked, so that its check fails.
    let folders: Vec<PathBuf> = args.lib_dir.iter().cloned().collect();
    let gpus = match machine.gpus.len() {
        0 => 0,
        all => device_count(&folders).unwrap_or(all),
    };
    draft.detail("libraries", &libraries);

    let cpu = subject("cpu", None, args, None)?;
    let first = transcript(&cpu)?;
    draft.contract_hash = cpu.device().map_err(failed)?.device.facts().contract_hash;
    draft.check("cpu_repeats_itself", first_divergence(&first, &transcript(&cpu)?).is_none(), step_time(&first));
    let threads = subject("cpu", None, args, Some(1))?;
    let same = first_divergence(&first, &transcript(&threads)?);
    draft.check("cpu_threads_change_nothing", same.is_none(), format!("{same:?}"));

    if gpus == 0 {
        draft.detail("gpu", missing("driver").unwrap_or_else(|| "the driver lists no GPU".into()));
    } else {
        for name in ["driver", "nvrtc"] {
            draft.check(&format!("library_{name}"), missing(name).is_none(), missing(name).unwrap_or_default());
        }
        for ordinal in 0..gpus {
            examine(&mut draft, args, ordinal)?;
        }
    }
    draft.canary(changed_bit(&cpu, &first)?);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// Each library: path, version rule, or why it was not found.
fn libraries(args: &Args) -> Value {
    let folders: Vec<PathBuf> = args.lib_dir.iter().cloned().collect();
    let mut search = Search::new(&folders);
    let describe = |name: &str, found: Result<slotgraph_graphs::cuda::libs::Found, LibraryError>| match found {
        Ok(found) => {
            json!({"library": name, "file": found.path.file_name().map(|f| f.to_string_lossy()), "why": found.why})
        }
        Err(error) => json!({"library": name, "error": error.to_string()}),
    };
    let driver = search.driver();
    let nvrtc = search.toolkit(&NVRTC);
    let nccl = search.toolkit(&NCCL);
    json!({
        "driver": describe(DRIVER.title, driver),
        "nvrtc": describe(NVRTC.title, nvrtc),
        "nccl": describe(NCCL.title, nccl),
    })
}

/// One GPU: eager repeats itself, graphs equal eager, a row's place and the kernel form change no bit.
fn examine(draft: &mut Draft, args: &Args, ordinal: usize) -> Result<(), ProbeError> {
    let name = |check: &str| format!("gpu{ordinal}_{check}");
    tensor_cores(draft, args, ordinal);
    let eager = subject("cuda", Some(ordinal), args, None)?;
    let device = match cuda::prepare(&eager, false, None) {
        Ok(device) => device,
        Err(none) => {
            draft.check(&name("prepares"), false, none.to_string());
            return Ok(());
        }
    };
    draft.check(&name("prepares"), true, format!("{:?}", device.report().gpu));
    draft.detail(&name("report"), device.report());
    let limits = device.limits().clone();
    let mut driver = Driver::new(device, limits);
    let run = |driver: &mut Driver<_>, bucket| script::run(driver, bucket, STEPS).map_err(failed);
    let first = run(&mut driver, BUCKET)?;
    drop(driver);
    let again = cuda_transcript(&eager, false)?;
    draft.check(&name("eager_repeats_itself"), first_divergence(&first, &again).is_none(), step_time(&first));
    let graph = cuda_transcript(&eager, true)?;
    let same = first_divergence(&first, &graph);
    let times = format!("{}; {same:?}", step_time(&graph));
    draft.check(&name("graph_equals_eager"), same.is_none(), times);
    // In a larger bucket the same rows stand beside more padding, and other kernel forms may serve them: the chain of sums must not change.
    for (check, bucket) in [("column_independence", 8), ("wide_kernels_keep_the_chain", 64)] {
        let device = cuda::prepare(&eager, false, None).map_err(failed)?;
        let limits = device.limits().clone();
        let mut driver = Driver::new(device, limits);
        let wide = script::run_wide(&mut driver, BUCKET, bucket, STEPS).map_err(failed)?;
        let differs = first.steps.iter().zip(&wide.steps).find(|(a, b)| a.records != b.records);
        draft.check(&name(check), differs.is_none(), format!("bucket {bucket} against {BUCKET}"));
    }
    Ok(())
}

/// The sums that everything rests on: a row's bits must not depend on its column, its neighbours, or the form of the instruction. A
/// chain that was cut in two must be seen as different.
fn tensor_cores(draft: &mut Draft, args: &Args, ordinal: usize) {
    let name = |check: &str| format!("gpu{ordinal}_{check}");
    let folders: Vec<PathBuf> = args.lib_dir.iter().cloned().collect();
    let (plain, split) = match (Chains::of(ordinal, &folders, false), Chains::of(ordinal, &folders, true)) {
        (Ok(plain), Ok(split)) => (plain, split),
        (Err(error), _) | (_, Err(error)) => {
            draft.check(&name("tensor_cores"), false, error.to_string());
            return;
        }
    };
    let found = format!("{plain:?}");
    draft.check(&name("mma_columns_are_independent"), plain.moved == 0 && plain.sums > 0, &found);
    draft.check(&name("wgmma_keeps_the_mma_chain"), plain.wgmma_differs.unwrap_or(0) == 0, &found);
    let seen = split.moved > 0 && split.wgmma_differs != Some(0) && plain.degenerate == 0;
    draft.check(&name("a_cut_chain_is_seen"), seen, format!("{split:?}"));
}

/// The bundled model on a small pool; `threads` None leaves the CPU device its default.
fn subject(device: &str, ordinal: Option<usize>, args: &Args, threads: Option<usize>) -> Result<Subject, ProbeError> {
    let settings = Settings {
        device: Some(device.into()),
        devices: ordinal.map(|ordinal| ordinal.to_string()),
        max_slots: Some(8),
        kv_pages: Some(260),
        lib_dir: args.lib_dir.clone(),
        prefill_chunk: Some(64),
        threads,
        ..Settings::default()
    };
    Subject::with(&SubjectArgs { model: None, engine: Default::default() }, &settings)
}

fn transcript(subject: &Subject) -> Result<Transcript, ProbeError> {
    let mut driver = subject.device().map_err(failed)?.into_driver();
    script::run(&mut driver, BUCKET, STEPS).map_err(failed)
}

fn cuda_transcript(subject: &Subject, graph: bool) -> Result<Transcript, ProbeError> {
    let device = cuda::prepare(subject, graph, None).map_err(failed)?;
    let limits = device.limits().clone();
    script::run(&mut Driver::new(device, limits), BUCKET, STEPS).map_err(failed)
}

fn step_time(transcript: &Transcript) -> String {
    let us: Vec<f64> = transcript.times.iter().map(|time| time.wall.as_secs_f64() * 1e6).collect();
    format!("{BUCKET} rows in {:.0} µs a step (p50 of {})", Summary::of(&us).p50, us.len())
}

/// A flipped bit in one logprob must be seen by the comparison that all checks rest on.
fn changed_bit(subject: &Subject, truth: &Transcript) -> Result<Canary, ProbeError> {
    let fault: Fault = "logprob-bit@9".parse().map_err(|e| ProbeError::Failed(format!("{e}")))?;
    let prepared = subject.device().map_err(failed)?;
    let armed: Box<dyn Device> = Box::new(FaultDevice::arm(prepared.device, 0, &[fault]).map_err(failed)?);
    let planted = script::run(&mut Driver::new(armed, prepared.limits), BUCKET, STEPS).map_err(failed)?;
    Ok(Canary::planted("a flipped logprob bit", first_divergence(truth, &planted).is_some()))
}

fn failed(error: impl std::fmt::Display) -> ProbeError {
    ProbeError::Failed(error.to_string())
}
