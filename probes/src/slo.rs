//! slo: profiles of load against a budget file (`probes/slo/`). Repeats, marks for noisy cells, percentiles, and one verdict a profile.

use crate::bench_http::{LoadArgs, describe_server, record};
use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::evidence::{Canary, Draft};
use crate::harness::{Target, TargetArgs};
use crate::load::{self, Arrivals, LoadSummary};
use crate::regression::STABLE_SPREAD;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Latency and throughput of short, mixed and long profiles, held against a budget.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// Limits by profile and metric.
    #[arg(long, value_name = "FILE")]
    budget: PathBuf,
    /// Only these profiles [default: all of the budget].
    #[arg(long, value_delimiter = ',')]
    profile: Vec<String>,
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Multiply every budget by this: 0.5 must fail where 1 passes.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
}

/// A budget file.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    pub schema: u32,
    /// What the budget was set for.
    pub description: String,
    /// `machine::yardstick_ms` of the machine that the limits are for: where it takes twice as long, so may everything else.
    /// Without it the limits hold everywhere.
    #[serde(default)]
    pub yardstick_ms: Option<f64>,
    pub profiles: BTreeMap<String, Profile>,
}

/// One load and what its clients may see.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Prompt lengths; request i has the one at i modulo their number.
    pub prompt_tokens: Vec<usize>,
    pub max_tokens: usize,
    pub requests: usize,
    pub concurrency: usize,
    pub timeout_s: f64,
    /// Most milliseconds, by metric: `ttft_ms_p50`, `ttft_ms_p99`, `tpot_ms_p50`, `itl_ms_p99`, `e2e_ms_p99` …
    pub at_most: BTreeMap<String, f64>,
}

impl Profile {
    fn requests(&self, target: &Target, name: &str, repeat: usize, seed: u64) -> Vec<load::LoadRequest> {
        (0..self.requests)
            .map(|number| {
                let load = LoadArgs {
                    num_requests: self.requests,
                    warmup: 0,
                    prompt_tokens: self.prompt_tokens[number % self.prompt_tokens.len()],
                    max_tokens: self.max_tokens,
                    rows: "distinct".into(),
                    seed: seed ^ (number as u64) << 8,
                    timeout: self.timeout_s,
                };
                let mut request = load.requests(target, name, repeat, 1).remove(0);
                request.id = target.id(&format!("{name}{repeat}"), number);
                request
            })
            .collect()
    }
}

/// A metric of a profile over the repeats.
#[derive(Clone, Debug, Serialize)]
struct Row {
    profile: String,
    metric: String,
    /// As measured.
    by_repeat: Vec<f64>,
    /// Of the repeats, each divided by how much slower the machine was than the one that the budget is for.
    median: f64,
    /// What is held against the budget: the median, or the least of a noisy cell, whose other repeats say more of the machine.
    judged: f64,
    budget: f64,
    /// `stable`, `noisy` (repeats spread over more than a tenth of the median) or `insufficient_repeats`.
    noise: &'static str,
    /// Whether at least 30 samples stand behind a tail percentile.
    tail_sample_sufficient: bool,
    passed: bool,
}

pub fn read_budget(path: &std::path::Path) -> Result<Budget, ProbeError> {
    let text = std::fs::read(path).map_err(|e| ProbeError::Usage(format!("--budget {}: {e}", path.display())))?;
    let budget: Budget =
        serde_json::from_slice(&text).map_err(|e| ProbeError::Usage(format!("--budget {}: {e}", path.display())))?;
    if budget.schema != 1 {
        return Err(ProbeError::Usage(format!("--budget {}: schema {} is not 1", path.display(), budget.schema)));
    }
    for (name, profile) in &budget.profiles {
        if let Some(unknown) = profile.at_most.keys().find(|metric| value(&BLANK, metric).is_none()) {
            return Err(ProbeError::Usage(format!("--budget {}: {name}: no metric {unknown}", path.display())));
        }
        if budget.yardstick_ms.is_some_and(|reference| reference.is_nan() || reference <= 0.0) {
            return Err(ProbeError::Usage(format!("--budget {}: yardstick_ms is a time", path.display())));
        }
        if profile.prompt_tokens.is_empty() || profile.at_most.is_empty() || profile.requests == 0 {
            return Err(ProbeError::Usage(format!("--budget {}: {name} asks for nothing", path.display())));
        }
    }
    Ok(budget)
}

pub async fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let budget = read_budget(&args.budget)?;
    if let Some(unknown) = args.profile.iter().find(|name| !budget.profiles.contains_key(*name)) {
        return Err(ProbeError::Usage(format!("--profile {unknown}: the budget has {:?}", budget.profiles.keys())));
    }
    let target = args.target.open(&[]).await?;
    let mut draft = Draft::new("slo", "does the server keep its latency budget?", Claim::of(Label::Slo));
    draft.config = json!({
        "target": args.target.config(), "model": target.model, "repeats": args.repeats, "scale": args.scale, "budget": budget,
    });
    describe_server(&mut draft, &target).await;
    let chosen: Vec<(&String, &Profile)> =
        budget.profiles.iter().filter(|(name, _)| args.profile.is_empty() || args.profile.contains(name)).collect();
    let mut rows = Vec::new();
    let mut all_summaries: Vec<(String, Vec<LoadSummary>)> = Vec::new();
    let mut paces = BTreeMap::new();
    for (name, profile) in &chosen {
        let arrivals = Arrivals::Closed(profile.concurrency);
        let timeout = Duration::from_secs_f64(profile.timeout_s);
        let (mut summaries, mut pace) = (Vec::new(), Vec::new());
        // The first pass warms caches and is not counted.
        for repeat in 0..=args.repeats {
            let requests = profile.requests(&target, name, repeat, draft.seed);
            let before = pace_of(budget.yardstick_ms);
            let result = load::run(&target.server, &requests, arrivals, timeout).await;
            let after = pace_of(budget.yardstick_ms);
            let ids: Vec<String> = requests.iter().map(|request| request.id.clone()).collect();
            let missing = target.missing_traces(&ids, Duration::from_secs(5)).await?;
            if repeat == 0 {
                continue;
            }
            draft.check(
                &format!("trace_coverage_{name}_r{repeat}"),
                missing.is_empty(),
                format!("{} of {} traced", ids.len() - missing.len(), ids.len()),
            );
            summaries.push(result.summary());
            pace.push((before + after) / 2.0);
        }
        record(&mut draft, &format!("_{name}"), &summaries, profile.requests);
        rows.extend(judge(name, profile, &summaries, &pace, args.scale));
        paces.insert(name.to_string(), pace);
        all_summaries.push((name.to_string(), summaries));
    }
    for row in &rows {
        let detail =
            format!("{:.2} of at most {:.2} ({}, median {:.2})", row.judged, row.budget, row.noise, row.median);
        draft.check(&format!("budget_{}_{}", row.profile, row.metric), row.passed, detail);
    }
    draft.canary(halved_budget_canary(&chosen, &all_summaries));
    draft.detail("rows", &rows);
    draft.detail("pace", &paces);
    draft.detail("profiles", &all_summaries);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// How many times as long this machine takes now as the one that a budget is for.
fn pace_of(yardstick_ms: Option<f64>) -> f64 {
    yardstick_ms.map_or(1.0, |reference| crate::machine::yardstick_ms() / reference)
}

/// `pace` is of each repeat.
fn judge(name: &str, profile: &Profile, summaries: &[LoadSummary], pace: &[f64], scale: f64) -> Vec<Row> {
    profile
        .at_most
        .iter()
        .map(|(metric, limit)| {
            let by_repeat: Vec<f64> = summaries.iter().filter_map(|summary| value(summary, metric)).collect();
            let paced: Vec<f64> = by_repeat.iter().zip(pace).map(|(value, pace)| value / pace).collect();
            let sorted = crate::stats::Summary::of(&paced);
            let spread = (sorted.max - sorted.min) / sorted.p50.max(f64::MIN_POSITIVE);
            let budget = limit * scale;
            let noise = match by_repeat.len() {
                0 | 1 => "insufficient_repeats",
                _ if spread > STABLE_SPREAD => "noisy",
                _ => "stable",
            };
            let judged = if noise == "noisy" { sorted.min } else { sorted.p50 };
            Row {
                profile: name.into(),
                metric: metric.clone(),
                median: sorted.p50,
                judged,
                budget,
                noise,
                tail_sample_sufficient: summaries.iter().all(|summary| samples(summary, metric) >= 30),
                passed: !by_repeat.is_empty() && sorted.n == summaries.len() && judged > 0.0 && judged <= budget,
                by_repeat,
            }
        })
        .collect()
}

/// The measured loads against budgets that none of them kept: half of the least that was seen.
fn halved_budget_canary(chosen: &[(&String, &Profile)], summaries: &[(String, Vec<LoadSummary>)]) -> Canary {
    let caught = chosen.iter().zip(summaries).all(|((name, profile), (_, seen))| {
        let mut impossible = (*profile).clone();
        for (metric, limit) in &mut impossible.at_most {
            *limit = seen.iter().filter_map(|summary| value(summary, metric)).fold(f64::INFINITY, f64::min) / 2.0;
        }
        judge(name, &impossible, seen, &vec![1.0; seen.len()], 1.0).iter().all(|row| !row.passed)
    });
    Canary::planted("budgets of half of what was measured", caught)
}

/// A summary of nothing: which metrics exist.
static BLANK: std::sync::LazyLock<LoadSummary> =
    std::sync::LazyLock::new(|| load::LoadResult { wall: Duration::from_secs(1), completions: Vec::new() }.summary());

fn value(summary: &LoadSummary, metric: &str) -> Option<f64> {
    let (name, quantile) = metric.rsplit_once('_')?;
    let of = family(summary, name)?;
    Some(match quantile {
        "p50" => of.p50,
        "p90" => of.p90,
        "p95" => of.p95,
        "p99" => of.p99,
        "max" => of.max,
        "mean" => of.mean,
        _ => return None,
    })
}

fn samples(summary: &LoadSummary, metric: &str) -> usize {
    metric.rsplit_once('_').and_then(|(name, _)| family(summary, name)).map_or(0, |of| of.n)
}

fn family<'a>(summary: &'a LoadSummary, name: &str) -> Option<&'a crate::stats::Summary> {
    Some(match name {
        "ttft_ms" => &summary.ttft_ms,
        "tpot_ms" => &summary.tpot_ms,
        "itl_ms" => &summary.itl_ms,
        "e2e_ms" => &summary.e2e_ms,
        _ => return None,
    })
}
