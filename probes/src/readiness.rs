//! graph-readiness: was every bucket captured, instantiated, replayed over many steps, and equal to eager bit for bit?
//!
//! Fail-closed: ready is what remains when nothing was found wrong. **Invariant:** the eager device and the graph device run the same
//! script (`script`) from the same start; every bucket that is configured is part of it.

mod canary;
mod locate;
mod report;

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::cuda::{self, NoDevice};
use crate::driver::Driver;
use crate::evidence::{Draft, Limit};
use crate::script::{self, StepBits, Transcript, first_divergence};
use crate::stats::Summary;
use crate::subject::{Subject, SubjectArgs};
use report::{BucketReport, FailureStage, Readiness};
use serde_json::json;
use slotgraph_graphs::cuda::{Counters, CudaDevice, GraphReport, PrepareReport};
use slotgraph_graphs::device::{Device, DeviceError};
use slotgraph_graphs::step::EndReason;
use slotgraph_kernels::Role;
use slotgraph_runtime::config::Transport;

/// Prove that every bucket's graph replays as eager runs.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Decode steps of each bucket's longest part.
    #[arg(long, default_value_t = 96)]
    steps: usize,
    /// Further replays of the smallest bucket, over which nothing may be allocated.
    #[arg(long, default_value_t = 1000)]
    replays: usize,
    /// Try NCCL's all-gather alone, first or instead of the whole.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "first", value_name = "WHEN")]
    nccl_smoke: Option<Smoke>,
    /// Leave the planted faults out (they run on the bundled model).
    #[arg(long)]
    no_canary: bool,
    /// Nobody else uses the GPU or many processors meanwhile: also judge its free memory, and how long the start took.
    #[arg(long)]
    alone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Smoke {
    First,
    Only,
}

/// What one device did with every bucket's script.
struct Ran {
    /// In the order of the buckets.
    transcripts: Vec<Transcript>,
    /// The same again with pad rows' page full of NaN.
    poisoned: Vec<Transcript>,
    counters_before: Counters,
    counters_after: Counters,
    /// Free bytes on the GPU, before and after the replays.
    free: [u64; 2],
    /// What went wrong when a row's cache held NaN.
    nan_row: Result<(), String>,
    contract_hash: String,
    /// Of the preparation.
    report: PrepareReport,
    /// What was captured, for a device with graphs.
    buckets: Vec<BucketReport>,
}

/// Bytes by which the free memory of a GPU that nobody else uses may move while steps run: the driver's smallest piece.
const FREE_MOVES: f64 = (2 << 20) as f64;

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    examine(args, &Subject::open(&args.subject)?)
}

fn examine(args: &Args, subject: &Subject) -> Result<Outcome, ProbeError> {
    let mut draft = Draft::new(
        "graph-readiness",
        "was every bucket captured, replayed over many steps, and equal to eager bit for bit?",
        Claim::of(Label::GraphReadiness),
    );
    draft = subject.describe(draft);
    if !cuda::is_cuda(subject) {
        return NoDevice::Absent("there is no CUDA device to capture graphs on".into()).end(draft);
    }
    if args.steps < 8 || args.steps + 64 > subject.config.max_model_len {
        return Err(ProbeError::Usage(format!("--steps {}: between 8 and --max-model-len less 64", args.steps)));
    }
    let buckets = subject.config.buckets.clone();
    let transport = subject.config.transport;
    let mut readiness = Readiness::new(transport.name(), &buckets);
    if transport == Transport::HostStaged {
        readiness
            .fail(FailureStage::CaptureFailed, "the host-staged exchange goes through the host and cannot be captured");
        readiness.record(&mut draft);
        return Ok(Outcome::Evidence(Box::new(draft.finish())));
    }

    if let Some(when) = args.nccl_smoke {
        let passed = smoke(&mut draft, subject)?;
        readiness.smoke = Some(passed);
        if when == Smoke::Only || !passed {
            return Ok(Outcome::Evidence(Box::new(draft.finish())));
        }
    }

    // The reference of several ranks exchanges through the host, which shares nothing with the transport that is examined.
    let reference = if subject.config.ep > 1 { Transport::HostStaged } else { transport };
    let eager = match cuda::on_ranks(subject, reference, false, |_, device| run_script(device, &buckets, args, false)) {
        Ok(ranks) => ranks.into_iter().collect::<Result<Vec<Ran>, Failure>>(),
        Err(none @ NoDevice::Absent(_)) => return none.end(draft),
        Err(NoDevice::Failed(reason)) => Err((FailureStage::ReferenceFailed, reason)),
    };
    if let Ok(ranks) = &eager {
        first_start(&mut draft, &ranks[0].report, args.alone);
    }
    let graph = match &eager {
        Err(_) => Err((FailureStage::NotStarted, String::new())),
        Ok(_) => match cuda::on_ranks(subject, transport, true, |_, device| run_script(device, &buckets, args, true)) {
            Ok(ranks) => ranks.into_iter().collect::<Result<Vec<Ran>, Failure>>(),
            Err(none) => Err((FailureStage::CaptureFailed, none.to_string())),
        },
    };
    if let Ok(ranks) = &graph {
        draft.contract_hash = ranks[0].contract_hash.clone();
        draft.startup = match ranks.as_slice() {
            [only] => json!(only.report),
            several => json!({ "ranks": several.iter().map(|ran| &ran.report).collect::<Vec<_>>() }),
        };
        start_times(&mut draft, &ranks[0].report, args.alone);
    }
    match (&eager, &graph) {
        (Ok(eager), Ok(graph)) => judge(&mut readiness, eager, graph),
        (Err((stage, reason)), _) | (_, Err((stage, reason))) => readiness.fail(*stage, reason),
    }
    if readiness.diverged() && subject.config.ep == 1 {
        locate::first_op(subject, &mut readiness, args.steps);
    }
    readiness.record(&mut draft);
    if let (Ok(eager), Ok(graph)) = (&eager, &graph) {
        for (mode, ranks) in [("eager", eager), ("graph", graph)] {
            let went_wrong = ranks.iter().find_map(|ran| ran.nan_row.clone().err());
            let right = went_wrong.is_none();
            let detail = went_wrong.unwrap_or_else(|| "and neither neighbours nor later holders saw it".into());
            draft.check(&format!("{mode}: a_nan_row_ends_alone"), right, detail);
        }
        let [before, after] = graph[0].free;
        let moved = (before as f64 - after as f64).abs();
        let limit = args.alone.then_some(Limit::AtMost(FREE_MOVES));
        draft.metric("free_memory_moved_bytes", moved, "bytes", args.replays as u64, limit);
    }
    if !args.no_canary {
        draft.canary(canary::planted(&args.subject)?);
    }
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// The collective alone, on every rank: whether its bytes were right each time.
fn smoke(draft: &mut Draft, subject: &Subject) -> Result<bool, ProbeError> {
    if subject.config.transport != Transport::Nccl {
        return Err(ProbeError::Usage("--nccl-smoke: only --transport nccl has a collective of its own".into()));
    }
    match cuda::smoke(subject) {
        Ok(reports) => {
            let faults: Vec<String> = reports
                .iter()
                .flat_map(|report| report.shapes.iter().map(move |shape| (report.rank, shape)))
                .filter_map(|(rank, shape)| Some(format!("on rank {rank}, {}", shape.fault()?)))
                .collect();
            for shape in &reports[0].shapes {
                let name = |mode: &str| format!("all_gather_{mode}_us_{}", shape.bytes_per_rank);
                draft.metric(&name("eager"), shape.eager_us, "us", 1, None);
                draft.metric(&name("graph"), shape.graph_us, "us", 1, None);
            }
            draft.detail("nccl_smoke", &reports);
            let well = || format!("{} ranks, every word compared", reports.len());
            draft.check("nccl_smoke", faults.is_empty(), faults.first().cloned().unwrap_or_else(well));
            Ok(faults.is_empty())
        }
        Err(none) => {
            draft.check("nccl_smoke", false, none.to_string());
            Ok(false)
        }
    }
}

/// The first start compiles what no earlier process did; judged if nobody else had the machine.
fn first_start(draft: &mut Draft, report: &PrepareReport, alone: bool) {
    let modules = &report.modules;
    if modules.cached == modules.units {
        return;
    }
    let at_most = |most: f64| alone.then_some(Limit::AtMost(most));
    draft.metric("cold_start_ms", less_weights_ms(report), "ms", 1, at_most(WARM_MS_MAX + COMPILE_MS_MAX));
    draft.metric("compile_ms", modules.compile_ms, "ms", modules.units as u64, at_most(COMPILE_MS_MAX));
}

/// How long the start with graphs took, whose kernels the eager one had compiled, and each graph.
fn start_times(draft: &mut Draft, report: &PrepareReport, alone: bool) {
    let at_most = |most: f64| alone.then_some(Limit::AtMost(most));
    let graph_ms = |graph: &GraphReport| (graph.capture_us + graph.instantiate_us) / 1e3;
    let slowest = report.graphs.iter().map(graph_ms).fold(0.0, f64::max);
    let graphs = report.graphs.len() as u64;
    draft.metric("capture_and_instantiate_ms_max", slowest, "ms", graphs, at_most(GRAPH_MS_MAX));
    draft.metric("graph_bytes", report.memory.graphs as f64, "bytes", graphs, None);
    draft.metric("warm_start_ms", less_weights_ms(report), "ms", 1, at_most(WARM_MS_MAX));
}

fn less_weights_ms(report: &PrepareReport) -> f64 {
    report.phases_ms.iter().filter(|(phase, _)| *phase != "weights").map(|(_, ms)| ms).sum()
}

/// Most time for one graph; for a start whose kernels were all compiled before, less its weights; for compiling them all.
const GRAPH_MS_MAX: f64 = 300.0;
const WARM_MS_MAX: f64 = 6000.0;
const COMPILE_MS_MAX: f64 = 20_000.0;

type Failure = (FailureStage, String);

/// Runs every bucket's script, plain and poisoned; a graph device also tells what was captured.
fn run_script(device: CudaDevice, buckets: &[usize], args: &Args, graph: bool) -> Result<Ran, Failure> {
    let failed = |e: DeviceError| (FailureStage::ReplayFailed, e.to_string());
    let limits = device.limits().clone();
    let contract_hash = device.facts().contract_hash;
    let report = device.report().clone();
    let ledger_before = device.ledger_hash();
    let lost = |e: slotgraph_graphs::cuda::CudaError| (FailureStage::ReplayFailed, e.to_string());
    let counters_before = device.counters();
    let free_before = device.free_memory().map_err(lost)?;
    let mut driver = Driver::new(device, limits);
    let mut transcripts = Vec::new();
    for &bucket in buckets {
        transcripts.push(script::run(&mut driver, bucket, args.steps).map_err(failed)?);
    }
    if graph && args.replays > 0 {
        exhaust(&mut driver, args.replays).map_err(failed)?;
    }
    let counters_after = driver.device.counters();
    let free = [free_before, driver.device.free_memory().map_err(lost)?];
    let mut poisoned = Vec::new();
    for &bucket in buckets {
        poison(&mut driver.device).map_err(|e| (FailureStage::ReplayFailed, e))?;
        poisoned.push(script::run(&mut driver, bucket, args.steps).map_err(failed)?);
    }
    let mut reports = Vec::new();
    for (&bucket, transcript) in buckets.iter().zip(&transcripts).filter(|_| graph) {
        let mut report = BucketReport { bucket, ..BucketReport::default() };
        describe(&mut report, &driver.device, transcript)?;
        report.ledger_hash_before = ledger_before.clone();
        report.ledger_hash_after = driver.device.ledger_hash();
        reports.push(report);
    }
    let nan_row = nan_row(&mut driver).map_err(failed)?;
    let buckets = reports;
    Ok(Ran { transcripts, poisoned, counters_before, counters_after, free, nan_row, contract_hash, report, buckets })
}

/// Many replays of one row, restarting its request when its context is full.
fn exhaust(driver: &mut Driver<CudaDevice>, replays: usize) -> Result<(), DeviceError> {
    let mut left = replays;
    let context = driver.limits().max_model_len;
    while left > 0 {
        let steps = left.min(context - 16);
        driver.seat(vec![script::plain_request(7, 4)], context);
        driver.prefill(usize::MAX, |_| {})?;
        driver.decode(steps, |_| {})?;
        left -= steps;
    }
    Ok(())
}

/// A row whose first page is overwritten with NaN ends with that, at once and alone; and whoever holds the page next sees nothing of
/// what is left in it.
fn nan_row(driver: &mut Driver<CudaDevice>) -> Result<Result<(), String>, DeviceError> {
    const VICTIM: u32 = 1;
    let rows = driver.limits().slots_max.min(3);
    if rows < 2 {
        return Ok(Ok(()));
    }
    let mut decoded = |poisoned: bool| -> Result<Vec<StepBits>, DeviceError> {
        driver.seat((0..rows).map(|row| script::plain_request(40 + row, 70)).collect(), 128);
        driver.prefill(usize::MAX, |_| {})?;
        if poisoned {
            let page = driver.first_page(VICTIM as usize);
            overwrite(&driver.device, page).map_err(DeviceError::Lost)?;
        }
        let mut steps = Vec::new();
        driver.decode(4, |output| steps.push(output.into()))?;
        Ok(steps)
    };
    let (clean, poisoned, after) = (decoded(false)?, decoded(true)?, decoded(false)?);
    let others =
        |step: &StepBits| step.records.iter().filter(|record| record.slot != VICTIM).cloned().collect::<Vec<_>>();
    let victims: Vec<_> =
        poisoned.iter().flat_map(|step| &step.records).filter(|record| record.slot == VICTIM).collect();
    if victims.len() != 1 || victims[0].ended != Some(EndReason::Nan) {
        return Ok(Err(format!("the row went on or ended otherwise: {victims:?}")));
    }
    if let Some((a, b)) = clean.iter().zip(&poisoned).find(|(a, b)| others(a) != others(b)) {
        return Ok(Err(format!("a neighbour changed: {:?} against {:?}", others(a), others(b))));
    }
    let same = clean.iter().zip(&after).all(|(a, b)| a.records == b.records);
    Ok(if same { Ok(()) } else { Err("a later holder of the page saw what was left in it".into()) })
}

/// Fills page 0, which only pad rows may read or write, with NaN bits.
fn poison(device: &mut CudaDevice) -> Result<(), String> {
    overwrite(device, 0)
}

/// Fills a page of every layer with NaN bits.
fn overwrite(device: &CudaDevice, page: usize) -> Result<(), String> {
    for spec in device.buffers().iter().filter(|spec| spec.role == Role::Kv) {
        let page_bytes = spec.bytes() / spec.shape[0].max(1);
        device.write_buffer(&spec.name, page * page_bytes, &vec![0xff; page_bytes]).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// What the capture gave and how the replays went.
fn describe(report: &mut BucketReport, device: &CudaDevice, transcript: &Transcript) -> Result<(), Failure> {
    let made = device.report().graphs.iter().find(|graph| graph.bucket == report.bucket);
    let Some(made) = made else {
        return Err((FailureStage::CaptureFailed, format!("bucket {} has no graph", report.bucket)));
    };
    report.captured = true;
    report.instantiated = true;
    report.capture_us = made.capture_us;
    report.instantiate_us = made.instantiate_us;
    report.upload_us = made.upload_us;
    let again = device.recheck(report.bucket).map_err(|e| (FailureStage::VerificationFailed, e.to_string()))?;
    report.unchanged_since_capture = again.digest == made.audit.digest;
    report.take_rank(made, &again);
    let us: Vec<f64> = transcript.times.iter().map(|time| time.device.as_secs_f64() * 1e6).collect();
    let launch: Vec<f64> = transcript.times.iter().map(|time| time.enqueue.as_secs_f64() * 1e6).collect();
    report.replay_us = Summary::of(&us);
    report.launch_us = Summary::of(&launch);
    report.replayed = !transcript.steps.is_empty();
    report.replay_count = transcript.steps.len();
    Ok(())
}

/// A bucket's report is rank 0's, with what each rank captured; every rank's steps must be equal to the reference's of the same rank.
fn judge(readiness: &mut Readiness, eager: &[Ran], graph: &[Ran]) {
    for (at, report) in readiness.buckets.iter_mut().enumerate() {
        *report = graph[0].buckets[at].clone();
        report.poison_changes_nothing = true;
        report.steps_verified = usize::MAX;
        for (rank, (eager, graph)) in eager.iter().zip(graph).enumerate() {
            let (want, got) = (&eager.transcripts[at], &graph.transcripts[at]);
            let plain = first_divergence(want, got);
            let verified = match &plain {
                None => got.steps.len(),
                Some(divergence) => got.steps.iter().take_while(|step| step.step < divergence.step).count(),
            };
            report.steps_verified = report.steps_verified.min(verified);
            report.first_divergence = report.first_divergence.take().or(plain.map(Into::into));
            report.poison_changes_nothing &=
                same_but_steps(want, &graph.poisoned[at]) && same_but_steps(want, &eager.poisoned[at]);
            if rank > 0 {
                report.take_other_rank(rank, &graph.buckets[at]);
            }
        }
    }
    // A rank that allocates or copies while steps run is as bad as any other.
    let grew = graph.iter().find(|ran| Readiness::grown(ran.counters_before, ran.counters_after).is_some());
    let shown = grew.unwrap_or(&graph[0]);
    readiness.counters_before = shown.counters_before;
    readiness.counters_after = shown.counters_after;
    readiness.close();
}

/// Equal apart from the step numbers: the second run of a script continues the device's count.
fn same_but_steps(want: &Transcript, got: &Transcript) -> bool {
    want.steps.len() == got.steps.len()
        && want
            .steps
            .iter()
            .zip(&got.steps)
            .all(|(a, b)| a.records == b.records && a.routes == b.routes && a.pad_rows == b.pad_rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_whose_kernels_do_nothing_is_ready_and_says_so_for_every_bucket() {
        let name = "readiness::tests::a_driver_whose_kernels_do_nothing_is_ready_and_says_so_for_every_bucket";
        crate::mock::with_subject(
            name,
            |_| {},
            |subject| {
                let demo = SubjectArgs { model: None, engine: Default::default() };
                let args =
                    Args { subject: demo, steps: 96, replays: 100, no_canary: true, nccl_smoke: None, alone: true };
                let Outcome::Evidence(evidence) = examine(&args, subject).unwrap() else { panic!("evidence") };
                let readiness = &evidence.details["cuda_graph_readiness"];
                assert_eq!(readiness["full_decode_capture_ready"], true, "{}", evidence.summary());
                let buckets: Vec<u64> =
                    readiness["buckets"].as_array().unwrap().iter().map(|b| b["bucket"].as_u64().unwrap()).collect();
                assert_eq!(buckets, subject.config.buckets.iter().map(|&b| b as u64).collect::<Vec<u64>>());
                for bucket in readiness["buckets"].as_array().unwrap() {
                    assert!(bucket["ranks"][0]["nodes"].as_u64() > Some(20), "{bucket}");
                    assert!(bucket["steps_verified"].as_u64() > Some(2), "{bucket}");
                }
            },
        );
    }
}
