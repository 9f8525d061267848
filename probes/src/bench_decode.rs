//! bench-decode: what one decode step costs on a device, by bucket and context, with distinct rows and nothing else in the way.
//!
//! Rows have prompts of their own and sample at temperature 1 with seeds of their own: identical rows route alike and flatter a MoE model.

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::driver::{Seated, StepTime};
use crate::evidence::{Canary, Draft, Evidence, Limit};
use crate::load::scatter;
use crate::regression::{Direction, Regression};
use crate::stats::{Summary, median};
use crate::subject::{AnyDriver, Subject, SubjectArgs};
use serde::Serialize;
use slotgraph_graphs::cuda::CopyRates;
use slotgraph_graphs::device::{DeviceError, DeviceFacts};
use slotgraph_graphs::model;
use slotgraph_graphs::plan::{Plan, RankShape};
use slotgraph_graphs::spec::{Mlp, ModelSpec, SamplingSpec};
use slotgraph_graphs::step::{StepLimits, StepOutput};
use slotgraph_kernels::contract::GemmKind;
use slotgraph_kernels::{Op, Specs, WeightForm};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Step time, throughput and host cost of decode on one device, by bucket and context.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Rows of each measured batch.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16")]
    rows: Vec<usize>,
    /// Context lengths, in tokens, at which a measurement starts.
    #[arg(long, value_delimiter = ',', default_value = "64")]
    context: Vec<usize>,
    /// Measured steps of each repeat.
    #[arg(long, default_value_t = 128)]
    steps: usize,
    #[arg(long, default_value_t = 16)]
    warmup: usize,
    /// Repeats of the whole grid; cells alternate, so that drift meets all of them.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Longer contexts are started at without being filled: same bytes, zeros for keys.
    #[arg(long, default_value_t = 512)]
    fill_max: usize,
    /// Least tokens a second: `ROWS:TOK_S`, several.
    #[arg(long, value_delimiter = ',', value_name = "ROWS:TOK_S", value_parser = parse_floor)]
    min_tok_s: Vec<(usize, f64)>,
    /// Least rate at which weights load from files, as a share of what pinned copies reach.
    #[arg(long, value_name = "SHARE")]
    min_load_share: Option<f64>,
    /// Earlier evidence of the same probe: any number that got worse, where a direction may be claimed, fails.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
}

fn parse_floor(text: &str) -> Result<(usize, f64), String> {
    let (rows, floor) = text.split_once(':').ok_or("ROWS:TOK_S")?;
    Ok((rows.parse().map_err(|e| format!("{e}"))?, floor.parse().map_err(|e| format!("{e}"))?))
}

/// One measured cell of the grid.
#[derive(Clone, Debug, Serialize)]
struct Cell {
    rows: usize,
    bucket: usize,
    context: usize,
    /// Whether the context was really prefilled.
    filled: bool,
    nodes: usize,
    step_ms: Summary,
    device_ms: Summary,
    enqueue_us: Summary,
    /// Between the end of one step and of the next, less the device's own time.
    gap_us: Summary,
    tok_s: f64,
    tok_s_by_repeat: Vec<f64>,
    /// Least bytes that such a step must read.
    floor_bytes: f64,
    floor_gb_s: f64,
    /// Of what copies inside the device reach, measured just before.
    ceiling_share: Option<f64>,
}

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let mut draft = Draft::new(
        "bench-decode",
        "what does one decode step of distinct rows cost on this device?",
        Claim::of(if args.rows == [1] { Label::DirectSingleRow } else { Label::DistinctRowDecode }),
    );
    let subject = Subject::open(&args.subject)?;
    let limits = subject.limits();
    for &rows in &args.rows {
        if rows == 0 || rows > limits.slots_max {
            return Err(ProbeError::Usage(format!("--rows {rows}: between 1 and --max-slots {}", limits.slots_max)));
        }
    }
    let longest = args.context.iter().max().copied().unwrap_or(0) + args.warmup + args.steps + 1;
    if longest > limits.max_model_len {
        let have = limits.max_model_len;
        return Err(ProbeError::Usage(format!(
            "--context and --steps need {longest} tokens of context, the model has {have}"
        )));
    }
    draft = subject.describe(draft);
    let prepared = match subject.device() {
        Ok(prepared) => prepared,
        Err(none) => return none.end(draft),
    };
    draft.startup = prepared.startup.clone();
    let facts = prepared.device.facts();
    draft.contract_hash = facts.contract_hash.clone();
    draft.seed = subject.config.seed;

    let grid: Vec<(usize, usize)> =
        args.rows.iter().flat_map(|&rows| args.context.iter().map(move |&context| (rows, context))).collect();
    let mut times: Vec<Vec<Vec<StepTime>>> = vec![Vec::new(); grid.len()];
    let copies = prepared.copies;
    let mut driver = prepared.into_driver();
    let mut bad = None;
    for _ in 0..args.repeats {
        for (cell, &(rows, context)) in times.iter_mut().zip(&grid) {
            let lost = measure(&mut driver, &subject.checkpoint.spec, args, rows, context, |taken| cell.push(taken));
            bad = bad.or(lost.map_err(|e| ProbeError::Failed(e.to_string()))?);
        }
    }
    let mut cells: Vec<Cell> = grid
        .iter()
        .zip(&times)
        .map(|(&(rows, context), repeats)| {
            cell(&subject.checkpoint.spec, &limits, &facts, args, rows, context, repeats)
        })
        .collect();
    if let Some(CopyRates { within_bytes_s, upload_bytes_s }) = copies {
        draft.metric("copy_gb_s", within_bytes_s / 1e9, "GB/s", 8, None);
        cells.iter_mut().for_each(|cell| cell.ceiling_share = Some(1e9 * cell.floor_gb_s / within_bytes_s));
        draft.metric("upload_gb_s", upload_bytes_s / 1e9, "GB/s", 8, None);
        let weights = draft.startup["weights"].clone();
        let number = |name: &str| weights[name].as_f64().unwrap_or(0.0);
        if weights["dummy"].as_bool() == Some(false) {
            // Pinning the buffers is paid once, however large the model is.
            let stream_s = (number("stream_ms") - number("pin_ms")).max(1e-3) / 1e3;
            draft.metric("weights_gb_s", number("gb_per_s"), "GB/s", 1, None);
            draft.metric("weights_stream_gb_s", number("read_bytes") / stream_s / 1e9, "GB/s", 1, None);
            let least = args.min_load_share.map(Limit::AtLeast);
            let share = number("read_bytes") / stream_s / upload_bytes_s;
            draft.metric("weights_share_of_upload", share, "of upload_gb_s", 1, least);
        }
    }
    draft.check("every_row_drew_a_token", bad.is_none(), bad.unwrap_or_else(|| "each step, each row".into()));
    for cell in &cells {
        let at = format!("b{}_ctx{}", cell.rows, cell.context);
        let samples = cell.step_ms.n as u64;
        let floor = args.min_tok_s.iter().find(|(rows, _)| *rows == cell.rows).map(|(_, floor)| Limit::AtLeast(*floor));
        draft.repeated(&format!("tok_s_{at}"), &cell.tok_s_by_repeat, "tok/s", samples, floor);
        draft.metric(&format!("step_ms_{at}_p50"), cell.step_ms.p50, "ms", samples, None);
        draft.metric(&format!("step_ms_{at}_p99"), cell.step_ms.p99, "ms", samples, None);
        draft.metric(&format!("enqueue_us_{at}_p50"), cell.enqueue_us.p50, "us", samples, None);
        draft.metric(&format!("gap_us_{at}_p50"), cell.gap_us.p50, "us", samples, None);
        if let Some(share) = cell.ceiling_share {
            draft.metric(&format!("ceiling_share_{at}"), share, "of copy_gb_s", samples, None);
        }
    }
    draft.detail("cells", &cells);
    draft.detail("device", &facts);
    draft.canary(planted_delay(&mut driver, &subject.checkpoint.spec, args)?);
    if let Some(baseline) = &args.compare {
        compare(&mut draft, baseline)?;
    }
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// One cell, once. Returns what went wrong with a record, if something did.
fn measure(
    driver: &mut AnyDriver,
    spec: &ModelSpec,
    args: &Args,
    rows: usize,
    context: usize,
    mut take: impl FnMut(Vec<StepTime>),
) -> Result<Option<String>, DeviceError> {
    let filled = context <= args.fill_max;
    driver.seat(
        distinct_rows(spec, rows, if filled { context.max(1) } else { 1 }),
        context + args.warmup + args.steps + 1,
    );
    if filled {
        driver.prefill(usize::MAX, |_| {})?;
    } else {
        driver.start_at(context - 1)?;
    }
    let mut bad = None;
    let mut each = |output: &StepOutput| {
        if output.records.len() != rows {
            bad.get_or_insert(format!("step {} of {rows} rows recorded {}", output.step, output.records.len()));
        }
    };
    driver.decode(args.warmup, &mut each)?;
    take(driver.decode(args.steps, &mut each)?);
    Ok(bad)
}

/// Requests whose prompts and noise differ from each other.
pub fn distinct_rows(spec: &ModelSpec, rows: usize, prompt_tokens: usize) -> Vec<Seated> {
    (0..rows as u64)
        .map(|row| {
            let word = |at: u64| scatter(row << 32 | at) % spec.vocab as u64;
            let sampling =
                SamplingSpec { temperature: 1.0, seed: row, ignore_eos: true, ..SamplingSpec::greedy(u32::MAX) };
            Seated {
                prompt: (0..prompt_tokens as u64).map(|at| word(at) as u32).collect(),
                sampling: Arc::new(sampling),
                choice: 0,
            }
        })
        .collect()
}

fn cell(
    spec: &ModelSpec,
    limits: &StepLimits,
    facts: &DeviceFacts,
    args: &Args,
    rows: usize,
    context: usize,
    repeats: &[Vec<StepTime>],
) -> Cell {
    let all: Vec<StepTime> = repeats.iter().flatten().copied().collect();
    let of = |value: fn(&StepTime) -> f64| Summary::of(&all.iter().map(value).collect::<Vec<f64>>());
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let bucket =
        limits.buckets.iter().copied().find(|&bucket| bucket >= rows).expect("rows were checked against the seats");
    let rate =
        |times: &[StepTime]| rows as f64 / (median(&times.iter().map(|t| ms(t.wall)).collect::<Vec<f64>>()) / 1e3);
    let step_ms = of(|time| time.wall.as_secs_f64() * 1e3);
    let floor_bytes = floor_bytes(spec, limits, bucket, rows, context + args.warmup + args.steps / 2);
    Cell {
        rows,
        bucket,
        context,
        filled: context <= args.fill_max,
        nodes: facts.buckets.iter().find(|known| known.bucket == bucket).map_or(0, |known| known.nodes),
        device_ms: of(|time| time.device.as_secs_f64() * 1e3),
        enqueue_us: of(|time| time.enqueue.as_secs_f64() * 1e6),
        gap_us: of(|time| (time.wall.as_secs_f64() - time.device.as_secs_f64()) * 1e6),
        tok_s: rows as f64 / (step_ms.p50 / 1e3),
        tok_s_by_repeat: repeats.iter().map(|times| rate(times)).collect(),
        floor_bytes,
        floor_gb_s: floor_bytes / 1e9 / (step_ms.p50 / 1e3),
        ceiling_share: None,
        step_ms,
    }
}

/// Bytes of weights and keys that a step of `rows` rows at `context` tokens must read at least, bf16, with experts drawn uniformly.
fn floor_bytes(spec: &ModelSpec, limits: &StepLimits, bucket: usize, rows: usize, context: usize) -> f64 {
    let plan = model::build(spec, limits, RankShape::SINGLE, bucket).expect("this bucket's plan was prepared");
    (0..plan.ops.len()).map(|op| op_floor_bytes(spec, &plan, op, rows, context)).sum()
}

/// The part of one op.
pub fn op_floor_bytes(spec: &ModelSpec, plan: &Plan, op: usize, rows: usize, context: usize) -> f64 {
    let touched = match &spec.mlp {
        Mlp::Dense { .. } => 1.0,
        Mlp::Moe(moe) => 1.0 - (1.0 - moe.routing.top_k as f64 / moe.routing.experts as f64).powi(rows as i32),
    };
    let op = &plan.ops[op].op;
    let weights: f64 = op
        .weights()
        .into_iter()
        .map(|id| match &plan.weight(id).form {
            WeightForm::Gemm { kind, groups, n, k } => {
                let routed = matches!(kind, GemmKind::ExpertGateUp | GemmKind::ExpertDown);
                2.0 * (groups * n * k) as f64 * if routed { touched } else { 1.0 }
            }
            WeightForm::Vector { n } => 2.0 * *n as f64,
            WeightForm::Table { cols, .. } => 2.0 * (rows * cols) as f64,
            WeightForm::Rope(table) => 8.0 * (rows * table.inv_freq_bits.len()) as f64,
        })
        .sum();
    let attends = matches!(op, Op::MlaAttend(_) | Op::GqaAttend(_));
    weights + if attends { 2.0 * (rows * context * spec.kv_width()) as f64 } else { 0.0 }
}

/// Measures the smallest batch with and without a planted delay of twice its step: the measurement must see it.
fn planted_delay(driver: &mut AnyDriver, spec: &ModelSpec, args: &Args) -> Result<Canary, ProbeError> {
    let rows = args.rows.iter().min().copied().unwrap_or(1);
    let context = args.context.iter().min().copied().unwrap_or(1);
    let mut step = |delay: Duration| -> Result<f64, ProbeError> {
        driver.planted_delay = delay;
        let mut walls = Vec::new();
        measure(driver, spec, args, rows, context, |times| {
            walls.extend(times.iter().map(|time| time.wall.as_secs_f64()));
        })
        .map_err(|e| ProbeError::Failed(e.to_string()))?;
        Ok(median(&walls))
    };
    let plain = step(Duration::ZERO)?;
    let delay = Duration::from_secs_f64(2.0 * plain);
    let slowed = step(delay)?;
    let fault = format!("{:.0} µs lost in every step", delay.as_secs_f64() * 1e6);
    Ok(Canary::planted(&fault, slowed - plain > 0.4 * delay.as_secs_f64()))
}

fn compare(draft: &mut Draft, baseline: &std::path::Path) -> Result<(), ProbeError> {
    let baseline = Evidence::read(baseline).map_err(|e| ProbeError::Usage(e.to_string()))?;
    let regression = Regression::of(&baseline, &draft.preview());
    let worse: Vec<&str> = regression.worse().map(|row| row.metric.as_str()).collect();
    let silent = regression.rows.iter().filter(|row| row.direction == Direction::NoDirectionalClaim).count();
    let detail = format!("worse: {worse:?}; without a directional claim: {silent} of {}", regression.rows.len());
    draft.check("no_regression", worse.is_empty(), detail);
    draft.detail("regression_summary", &regression);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_are_read_as_rows_and_rate() {
        assert_eq!(parse_floor("16:5000").unwrap(), (16, 5000.0));
        assert!(parse_floor("16").is_err());
        assert!(parse_floor("x:1").is_err());
    }
}
