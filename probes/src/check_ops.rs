//! exactness --check-ops: is every op of every bucket what its CPU reference says, fed the device's own inputs?
//!
//! The parent starts itself once per model and watches: a kernel that faults takes its process with it, and the next one goes on with the
//! CPU's outputs in that op's place, so one run finds everything that is wrong. **Invariant:** the CPU computes in contract precision.

mod checker;
mod compared;
mod findings;
mod parent;
mod scenario;
mod stepped;
#[cfg(test)]
mod tests;

use crate::cli::{Outcome, ProbeError};
use crate::load::scatter;
use crate::subject::SubjectArgs;
use checker::Checker;
use findings::Finding;
use rayon::prelude::*;
use scenario::{SLOTS, Scenario, steps_of};
use serde::{Deserialize, Serialize};
use slotgraph_graphs::cuda::{CudaDevice, CudaError, CudaOptions, KvMemory, Opened};
use slotgraph_graphs::model;
use slotgraph_graphs::plan::{Plan, RankShape};
use slotgraph_graphs::source::SourceError;
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::contract::PAGE_TOKENS;
use slotgraph_kernels::cpu::CpuWeight;
use slotgraph_kernels::{Role, WeightSpec};
use slotgraph_runtime::checkpoint::{Checkpoint, Folder};
use slotgraph_server::demo;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stepped::{At, CpuSteps, Stepped};

/// How a step ends that was stopped at its first finding.
const STOPPED: &str = "stopped at the first op that differs";

#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Compare every op with its CPU reference, fed the device's own inputs.
    #[arg(long)]
    pub check_ops: bool,
    /// Checkpoint folder; several are checked one after the other [default: MODEL].
    #[arg(long = "model", id = "check_model", value_name = "DIR")]
    models: Vec<PathBuf>,
    /// Rows of the steps to check.
    #[arg(long, id = "check_bucket", value_name = "ROWS", value_delimiter = ',', num_args = 1.., default_values_t = [1, 2, 4, 8, 16, 32, 64, 128, 256])]
    bucket: Vec<usize>,
    /// Report every op's worst error instead of stopping at the first that differs.
    #[arg(long)]
    keep_going: bool,
    /// Only the model's first layers (dummy weights of a large shape).
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Ops that the device does not run, everywhere or in one bucket: the CPU's outputs take their place.
    #[arg(long, value_name = "OP[@ROWS]", value_delimiter = ',')]
    replace: Vec<String>,
    /// The model that a child process checks, as its index.
    #[arg(long, hide = true, value_name = "INDEX")]
    child: Option<usize>,
    #[arg(long, hide = true, value_name = "ROWS", value_delimiter = ',')]
    child_buckets: Vec<usize>,
}

/// What one process found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// Buckets that were checked to their end.
    pub done: Vec<usize>,
    /// Why the device could not go on.
    pub lost: Option<String>,
    /// Why there is no device at all.
    pub absent: Option<String>,
    pub steps: u64,
    pub ops: u64,
    pub canary_seen: BTreeSet<String>,
    pub canary_missed: BTreeSet<String>,
    pub device: String,
    pub contract_hash: String,
}

pub fn run(subject: &SubjectArgs, args: &Args) -> Result<Outcome, ProbeError> {
    let Some(index) = args.child else { return parent::run(subject, args) };
    let models = args.models(subject);
    let model = models.get(index).ok_or_else(|| ProbeError::Usage(format!("--child {index}: no such model")))?;
    let report = check_model(subject, args, model.as_deref())?;
    // The parent reads it from among the journal's lines.
    println!("{REPORT}{}", serde_json::to_string(&report).expect("a report is plain data"));
    Ok(Outcome::Text(String::new()))
}

/// Positions of a request, unless --max-model-len says otherwise.
const LENGTH: usize = 2048;

/// Starts a child's last line.
const REPORT: &str = "report ";
/// Starts the line that says which op comes next.
const AT: &str = "at ";

impl Args {
    /// The models to check; None is the bundled one.
    fn models(&self, subject: &SubjectArgs) -> Vec<Option<PathBuf>> {
        match self.models.as_slice() {
            [] => vec![subject.model.clone()],
            models => models.iter().cloned().map(Some).collect(),
        }
    }

    fn buckets(&self) -> Vec<usize> {
        let chosen = if self.child_buckets.is_empty() { &self.bucket } else { &self.child_buckets };
        let sorted: BTreeSet<usize> = chosen.iter().copied().collect();
        sorted.into_iter().collect()
    }
}

/// Checks one model in this process.
fn check_model(subject: &SubjectArgs, args: &Args, folder: Option<&Path>) -> Result<Report, ProbeError> {
    let usage = |error: &dyn std::fmt::Display| ProbeError::Usage(error.to_string());
    let settings = subject.engine.settings();
    let format = settings.load_format().map_err(|e| usage(&e))?;
    let opened = match folder {
        Some(path) => Checkpoint::load(Folder::Disk(path.to_path_buf()), format),
        None => Checkpoint::load(Folder::Embedded { name: demo::NAME, files: demo::FILES }, format),
    };
    let checkpoint = opened.map_err(|e| usage(&e))?;
    let mut spec = checkpoint.spec.clone();
    if let Some(layers) = args.layers {
        spec.layers = layers.clamp(1, spec.layers);
    }
    let limits = limits(&spec, &args.buckets(), settings.max_model_len.unwrap_or(LENGTH));
    let plans = limits.buckets.iter().map(|&bucket| model::build(&spec, &limits, RankShape::SINGLE, bucket));
    let plans = plans.collect::<Result<Vec<Plan>, _>>().map_err(|e| usage(&e))?;
    let largest = plans.last().expect("there is a bucket").clone();
    let source = checkpoint.source();
    let weights = weights(&largest.weights, |spec, group, out| source.read(spec, group, out))
        .map_err(|e| ProbeError::Failed(e.to_string()))?;

    let cpu = settings.device.as_deref() == Some("cpu");
    let mut device: Box<dyn Stepped> = if cpu {
        let memory = checker::memory(&largest, weights.clone());
        Box::new(CpuSteps::new(limits.clone(), spec.eos_ids.clone(), plans, memory))
    } else {
        let mut options = CudaOptions::new(spec.clone(), limits.clone(), source);
        options.kv = KvMemory::Pages(limits.pages);
        options.graph = false;
        options.pdl = settings.pdl.as_deref() != Some("off");
        options.lib_dirs = settings.lib_dir.iter().cloned().collect();
        match cold(options) {
            Ok(device) => Box::new(device),
            Err(error) => return Ok(no_device(&error)),
        }
    };
    let mut journal = |step: u64, at: At| {
        let layer = at.placed.layer.map_or(String::new(), |layer| format!(" of layer {layer}"));
        let mut out = std::io::stdout().lock();
        // A parent that left is noticed when the report is written.
        let _ = writeln!(out, "{AT}{} bucket {} step {step} op {}{layer}", at.placed.op.name(), at.plan.rows, at.index);
        let _ = out.flush();
    };
    let replaced: BTreeSet<String> = args.replace.iter().cloned().collect();
    let mut checker = Checker::new(checker::memory(&largest, weights), &replaced, !args.keep_going, &mut journal);
    let prompts = folder.map(prompts).unwrap_or_default();
    let mut report = check(&mut *device, &spec, prompts, &mut checker);
    report.findings = checker.findings.into_list();
    report.canary_seen = checker.canary_seen.iter().map(|op| op.to_string()).collect();
    report.canary_missed = checker.canary_missed.iter().map(|op| op.to_string()).collect();
    report.device = if cpu { "cpu".into() } else { "cuda".into() };
    Ok(report)
}

/// A device without its first run, so that the first launch of each op is one that is watched.
fn cold(options: CudaOptions) -> Result<CudaDevice, CudaError> {
    let allocated = Opened::open(options)?.compile()?.connect()?.load_weights()?.allocate()?;
    let pages = allocated.pages()?;
    allocated.allocate_kv(pages)?.cold()?.capture()?.replay()
}

fn no_device(error: &CudaError) -> Report {
    let absent = match error {
        CudaError::NoDevice { count: 0, .. } => true,
        CudaError::Library(_) => crate::machine::Machine::read().gpus.is_empty(),
        _ => false,
    };
    let text = Some(error.to_string());
    if absent { Report { absent: text, ..Report::default() } } else { Report { lost: text, ..Report::default() } }
}

fn limits(spec: &ModelSpec, buckets: &[usize], length: usize) -> StepLimits {
    let max_model_len = spec.positions.min(length.max(2 * PAGE_TOKENS));
    let pages_per_slot = max_model_len.div_ceil(PAGE_TOKENS);
    StepLimits {
        slots_max: SLOTS,
        pages: SLOTS * pages_per_slot + 1,
        pages_per_slot,
        buckets: buckets.to_vec(),
        launch_ahead: 0,
        max_model_len,
        prefill_chunk: 512,
    }
}

fn weights(
    specs: &[WeightSpec],
    read: impl Fn(&WeightSpec, usize, &mut [u16]) -> Result<(), SourceError> + Sync,
) -> Result<Arc<[Arc<CpuWeight>]>, SourceError> {
    let packed: Result<Vec<Arc<CpuWeight>>, SourceError> = specs
        .par_iter()
        .map(|spec| CpuWeight::from_bf16(spec, |group, out| read(spec, group, out)).map(Arc::new))
        .collect();
    Ok(packed?.into())
}

/// Prompts of the oracle file that lies beside the test models, if this is one of them.
fn prompts(folder: &Path) -> Vec<Vec<u32>> {
    let Some(name) = folder.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
    let file = format!("{}.json", name.strip_prefix("shakespeare-").unwrap_or(name));
    let Ok(text) = std::fs::read(folder.join("../../oracle").join(file)) else { return Vec::new() };
    let Ok(whole) = serde_json::from_slice::<serde_json::Value>(&text) else { return Vec::new() };
    let ids = |case: &serde_json::Value| -> Vec<u32> {
        case["prompt_ids"].as_array().into_iter().flatten().filter_map(|id| Some(id.as_u64()? as u32)).collect()
    };
    whole["cases"].as_array().into_iter().flatten().map(ids).filter(|prompt| !prompt.is_empty()).collect()
}

/// Runs the scenario of every bucket under the checker.
fn check(device: &mut dyn Stepped, spec: &ModelSpec, prompts: Vec<Vec<u32>>, checker: &mut Checker) -> Report {
    let mut report = Report::default();
    let limits = device.limits().clone();
    if let Err(reason) = poison_cache(device) {
        report.lost = Some(reason);
        return report;
    }
    let mut scenario = Scenario::new(&limits, spec.vocab, prompts);
    for &bucket in &limits.buckets {
        let steps = steps_of(bucket);
        for k in 0..steps {
            let input = scenario.next(bucket, k);
            checker.step = input.step;
            // The last step's outputs are compared twice: as they are, and with a changed element.
            checker.canary = k + 1 == steps;
            match device.step(&input, checker) {
                Ok(output) => scenario.settle(&output),
                Err(reason) => {
                    report.lost = Some(reason);
                    return report;
                }
            }
            report.steps += 1;
            report.ops += device.largest().ops.len() as u64;
        }
        report.done.push(bucket);
    }
    report
}

/// Fills every page, page 0 too, with noise: whoever reads a key that it must not read sees something.
fn poison_cache(device: &mut dyn Stepped) -> Result<(), String> {
    let specs: Vec<_> = device.largest().buffers.iter().filter(|spec| spec.role == Role::Kv).cloned().collect();
    for (number, spec) in specs.iter().enumerate() {
        let noise = |at: usize| {
            let word = scatter((number as u64) << 40 | at as u64);
            let uniform = (word & 0xffff) as f32 + (word >> 16 & 0xffff) as f32 + (word >> 32 & 0xffff) as f32;
            half::bf16::from_f32((uniform / 65_536.0 - 1.5) * 2.0).to_le_bytes()
        };
        let bytes: Vec<u8> = (0..spec.elements()).into_par_iter().flat_map_iter(noise).collect();
        device.fill(spec, &bytes)?;
    }
    Ok(())
}
