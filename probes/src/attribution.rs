//! attribution: where a decode step's time goes, by op and call site, eager by events and inside the graph by stamps.

use crate::bench_decode::{distinct_rows, op_floor_bytes};
use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::cuda::{self, NoDevice};
use crate::driver::{Driver, StepTime};
use crate::evidence::{Canary, Draft};
use crate::stats::Summary;
use crate::subject::{Subject, SubjectArgs};
use serde::Serialize;
use serde_json::{Value, json};
use slotgraph_graphs::cuda::{Counters, CudaDevice, CudaError, OpTime};
use slotgraph_graphs::plan::Plan;
use slotgraph_graphs::spec::ModelSpec;
use std::collections::BTreeMap;

/// Time of a decode step by op and call site, with bytes and share of the floor.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Rows of the step.
    #[arg(long, default_value_t = 1)]
    rows: usize,
    /// Context at which the timed steps start, in tokens.
    #[arg(long, default_value_t = 64)]
    context: usize,
    /// Timed steps, of each kind.
    #[arg(long, default_value_t = 64)]
    steps: usize,
    #[arg(long, default_value_t = 8)]
    warmup: usize,
    /// Bytes a second that the floor assumes, in 10⁹.
    #[arg(long, default_value_t = 4300.0)]
    bandwidth: f64,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    name: String,
    calls: usize,
    total_us: f64,
    mean_us: f64,
    min: f64,
    p50: f64,
    p95: f64,
    p99: f64,
    max: f64,
    /// Of the step.
    pct: f64,
    /// Least bytes that these calls must read in one step.
    floor_bytes: f64,
    /// Floor time at the assumed bandwidth, divided by the measured time.
    floor_share: f64,
}

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    examine(args, &Subject::open(&args.subject)?)
}

fn examine(args: &Args, subject: &Subject) -> Result<Outcome, ProbeError> {
    let mut draft = Draft::new("attribution", "where does a decode step's time go?", Claim::of(Label::Attribution));
    draft = subject.describe(draft);
    if !cuda::is_cuda(subject) {
        return NoDevice::Absent("there is no CUDA device whose ops could be timed".into()).end(draft);
    }
    if args.rows == 0 || args.rows > subject.config.max_slots {
        return Err(ProbeError::Usage(format!("--rows {}: between 1 and --max-slots", args.rows)));
    }
    // Every rank times its own steps, which are the same; rank 0 speaks.
    let spec = &subject.checkpoint.spec;
    let timed = |_, device| timed(device, args, spec);
    let ranks = match cuda::on_ranks(subject, subject.config.transport, true, timed) {
        Ok(ranks) => ranks.into_iter().collect::<Result<Vec<Timed>, ProbeError>>()?,
        Err(none) => return none.end(draft),
    };
    let Timed { startup, counters, plan, plain, eager, inside, stamp_us } = &ranks[0];
    draft.startup = startup.clone();
    draft.detail("counters_before", counters.0);
    let stamp = Summary::of(stamp_us).p50;
    let context = args.context + args.warmup + args.steps;
    let floor = |at: &OpTime| op_floor_bytes(spec, plan, at.index, args.rows, context);
    let by = |samples: &[Vec<OpTime>], name: fn(&OpTime) -> String, less: f64| {
        table(samples, name, &floor, less, args.bandwidth)
    };
    let op = |at: &OpTime| at.op.to_string();
    let site = |at: &OpTime| at.layer.map_or(at.op.to_string(), |layer| format!("{}.{}", layer, at.op));
    let by_op = by(inside, op, stamp);
    let whole: f64 = by_op.iter().map(|row| row.mean_us * row.calls as f64).sum();
    let step_us = Summary::of(&plain.iter().map(|t| t.device.as_secs_f64() * 1e6).collect::<Vec<_>>()).p50;
    draft.check(
        "every_op_was_timed",
        inside.iter().all(|ops| ops.len() == plan.ops.len()),
        format!("{} ops", plan.ops.len()),
    );
    draft.metric("step_us_p50", step_us, "us", plain.len() as u64, None);
    draft.metric("stamped_step_us", whole, "us", args.steps as u64, None);
    if let Some(exchange) = by_op.iter().find(|row| row.name == "exchange") {
        // One a sparse layer, with the wait for the slowest rank in it.
        draft.metric("exchange_us_per_layer", exchange.mean_us, "us", args.steps as u64, None);
    }
    draft.detail("by_op", &by_op);
    draft.detail("by_call_site", by(inside, site, stamp));
    draft.detail("by_op_eager", by(eager, op, 0.0));
    draft.detail("by_call_site_eager", by(eager, site, 0.0));
    draft.detail("stamp_us", Summary::of(stamp_us));
    draft.detail("counters", counters.1);
    draft.detail("coverage", coverage(plan, spec));
    draft.canary(known_cost_canary(eager, inside));
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// What one rank measured.
struct Timed {
    startup: Value,
    /// Before and after.
    counters: (Counters, Counters),
    plan: Plan,
    plain: Vec<StepTime>,
    eager: Vec<Vec<OpTime>>,
    inside: Vec<Vec<OpTime>>,
    stamp_us: Vec<f64>,
}

fn timed(device: CudaDevice, args: &Args, spec: &ModelSpec) -> Result<Timed, ProbeError> {
    let failed = |e: CudaError| ProbeError::Failed(e.to_string());
    let startup = serde_json::to_value(device.report()).expect("a report is plain data");
    let before = device.counters();
    let limits = device.limits().clone();
    let bucket = limits.buckets.iter().copied().find(|&b| b >= args.rows).expect("rows fit the seats");
    let plan = device.plan(bucket).map_err(|e| ProbeError::Failed(e.to_string()))?.clone();
    let mut driver = Driver::new(device, limits);
    let timed = 2 * args.steps + args.warmup + 64;
    driver.seat(distinct_rows(spec, args.rows, args.context), args.context + timed);
    driver.prefill(usize::MAX, |_| {}).map_err(|e| ProbeError::Failed(e.to_string()))?;
    let plain = driver.decode(args.warmup.max(16), |_| {}).map_err(|e| ProbeError::Failed(e.to_string()))?;
    let (mut eager, mut inside, mut stamp_us) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.steps {
        eager.push(driver.by_hand(CudaDevice::time_ops).map_err(failed)?.1);
        let (_, times) = driver.by_hand(CudaDevice::time_nodes).map_err(failed)?;
        stamp_us.push(times.stamp_us);
        inside.push(times.ops);
    }
    let counters = (before, driver.device.counters());
    Ok(Timed { startup, counters, plan, plain, eager, inside, stamp_us })
}

/// Rows by name, dearest first.
fn table(
    samples: &[Vec<OpTime>],
    name: fn(&OpTime) -> String,
    floor: &dyn Fn(&OpTime) -> f64,
    less: f64,
    bandwidth: f64,
) -> Vec<Row> {
    let mut groups: BTreeMap<String, (Vec<f64>, f64)> = BTreeMap::new();
    for (step, ops) in samples.iter().enumerate() {
        for op in ops {
            let (us, bytes) = groups.entry(name(op)).or_default();
            us.push((op.us - less).max(0.0));
            if step == 0 {
                *bytes += floor(op);
            }
        }
    }
    let steps = samples.len().max(1) as f64;
    let all: f64 = groups.values().map(|(us, _)| us.iter().sum::<f64>()).sum();
    let mut rows: Vec<Row> = groups
        .into_iter()
        .map(|(name, (us, floor_bytes))| {
            let total_us: f64 = us.iter().sum();
            let summary = Summary::of(&us);
            let step_us = total_us / steps;
            Row {
                name,
                calls: (us.len() as f64 / steps) as usize,
                total_us,
                mean_us: summary.mean,
                min: summary.min,
                p50: summary.p50,
                p95: summary.p95,
                p99: summary.p99,
                max: summary.max,
                pct: 100.0 * total_us / all.max(f64::MIN_POSITIVE),
                floor_bytes,
                floor_share: floor_bytes / (bandwidth * 1e3) / step_us.max(f64::MIN_POSITIVE),
            }
        })
        .collect();
    rows.sort_by(|a, b| b.total_us.total_cmp(&a.total_us));
    rows
}

fn coverage(plan: &Plan, spec: &ModelSpec) -> Value {
    json!([
        {"item": "gpu events, eager", "status": "measured", "source": "an event before and after each op"},
        {"item": "in-graph node times", "status": "measured", "source": "global timer stamps between the ops of a graph"},
        {"item": "ops", "status": "complete", "source": format!("{} ops of {}", plan.ops.len(), spec.family.name())},
        {"item": "host time of a launch", "status": "elsewhere", "source": "bench-decode"},
        {"item": "NVTX ranges", "status": "elsewhere", "source": "serve --nvtx under nsys"},
    ])
}

/// The cheapest op, made as dear as all others together, must come out on top of both tables: by events and by stamps.
fn known_cost_canary(eager: &[Vec<OpTime>], inside: &[Vec<OpTime>]) -> Canary {
    let seen = |samples: &[Vec<OpTime>]| {
        let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
        for op in samples.iter().flatten() {
            *sums.entry(op.op).or_default() += op.us;
        }
        let Some(victim) = sums.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(op, _)| *op) else { return false };
        let planted: Vec<Vec<OpTime>> = samples
            .iter()
            .map(|ops| {
                let whole: f64 = ops.iter().map(|op| op.us).sum();
                let add = |op: &OpTime| if op.op == victim { op.us + whole } else { op.us };
                ops.iter().map(|op| OpTime { us: add(op), ..op.clone() }).collect()
            })
            .collect();
        let rows = table(&planted, |at| at.op.to_string(), &|_| 0.0, 0.0, 1.0);
        rows.first().is_some_and(|row| row.name == victim && row.pct >= 50.0)
    };
    Canary::planted("the cheapest op made as dear as all others", seen(eager) && seen(inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_of_a_mock_driver_is_timed() {
        crate::mock::with_subject(
            "attribution::tests::every_op_of_a_mock_driver_is_timed",
            |_| {},
            |subject| {
                let demo = SubjectArgs { model: None, engine: Default::default() };
                let args = Args { subject: demo, rows: 3, context: 70, steps: 4, warmup: 2, bandwidth: 4300.0 };
                let Outcome::Evidence(evidence) = examine(&args, subject).unwrap() else { panic!("evidence") };
                assert!(evidence.checks.iter().all(|check| check.pass), "{}", evidence.summary());
                let sites = evidence.details["by_call_site"].as_array().unwrap().len();
                assert!(sites > 20, "{sites}");
            },
        );
    }
}
