//! soak: hours of mixed work, some of it cancelled, with a server that must not lose anything, slow down or grow.
//!
//! Time is cut into buckets; each ends with a drained server that must hold exactly what it held before the first. **Invariant:** every
//! request is counted in one bucket, has an absolute deadline and must have its trace; nothing is kept per request longer than its bucket.

mod load;
mod summary;

use crate::bench_http::describe_server;
use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::evidence::{Canary, Draft, Limit};
use crate::harness::{Target, TargetArgs, TraceTail};
use crate::manifest::hex;
use crate::scrape::Baseline;
use load::{Sent, work};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use summary::{After, Bucket, drift};

/// Mixed requests for a long time: no failure, no loss, no growth.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// Seconds.
    #[arg(long, default_value_t = 1800)]
    duration: u64,
    /// Seconds of a time bucket.
    #[arg(long, default_value_t = 60)]
    bucket: u64,
    /// Streams at once; buckets take them in turn.
    #[arg(long, value_delimiter = ',', default_value = "16")]
    concurrency: Vec<usize>,
    /// Share of requests whose client leaves early.
    #[arg(long, default_value_t = 0.2)]
    cancels: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Absolute deadline of a request, in seconds.
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
    /// Seconds before memory is compared.
    #[arg(long, default_value_t = 180)]
    settle: u64,
    /// Most that a latency may grow, or throughput fall, from the first quarter to the last, as a share. For a machine that does nothing
    /// else meanwhile.
    #[arg(long, value_name = "SHARE")]
    max_drift: Option<f64>,
    /// Writes traces.jsonl and prompts.jsonl of completed answers here, for replay.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Most answers that --keep writes.
    #[arg(long, default_value_t = 1000)]
    keep_max: usize,
    /// Seconds of the canary's soak, in which the server loses a page every --leak-every seconds; 0 leaves it out.
    #[arg(long, default_value_t = 75)]
    canary: u64,
    #[arg(long, default_value_t = 60)]
    leak_every: u64,
}

/// What a soak found.
struct Soaked {
    buckets: Vec<Bucket>,
    leaked_pages: f64,
    run_errors: Vec<String>,
    kept: usize,
}

pub async fn run(args: &Args) -> Result<Outcome, ProbeError> {
    if args.bucket == 0 || args.duration < args.bucket || args.concurrency.is_empty() || args.concurrency.contains(&0) {
        return Err(ProbeError::Usage(
            "--duration holds at least one --bucket, --concurrency at least one stream".into(),
        ));
    }
    let target = args.target.open(&[]).await?;
    let mut draft =
        Draft::new("soak", "does the server work for a long time without losing anything?", Claim::of(Label::Soak));
    describe_server(&mut draft, &target).await;
    draft.seed = args.seed;
    draft.config = json!({
        "target": args.target.config(), "model": target.model, "duration_s": args.duration, "bucket_s": args.bucket,
        "concurrency": args.concurrency, "cancels": args.cancels, "timeout_s": args.timeout, "settle_s": args.settle,
        "max_drift": args.max_drift,
    });
    let started = Instant::now();
    let soaked = soak(args, &target).await?;
    let lasted = started.elapsed().as_secs_f64();
    judge(&mut draft, args, &soaked, lasted);
    draft.detail("buckets", &soaked.buckets);
    draft.detail("kept_answers", soaked.kept);
    drop(target);
    draft.canary(leak_canary(args).await?);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

async fn soak(args: &Args, target: &Target) -> Result<Soaked, ProbeError> {
    let mut tail = TraceTail::of(target)?;
    let mut keeper = args.keep.as_ref().map(|folder| Keeper::new(folder, args.keep_max)).transpose()?;
    warm(args, target).await;
    let quiet = at_rest(target, &Baseline::default()).await?;
    let canary = load::canary(target).await;
    let mut soaked = Soaked { buckets: Vec::new(), leaked_pages: 0.0, run_errors: Vec::new(), kept: 0 };
    let started = Instant::now();
    let buckets = (args.duration / args.bucket) as usize;
    for number in 0..buckets {
        // A bucket that overran leaves the next one half of its time at least: no bucket is empty.
        let due = started + Duration::from_secs(args.bucket * (number as u64 + 1));
        let until = due.max(Instant::now() + Duration::from_secs(args.bucket) / 2);
        let streams = args.concurrency[number % args.concurrency.len()];
        let begun = Instant::now();
        let sent = work(args.into(), target, number, streams, until).await;
        let took = begun.elapsed();
        let calm = Baseline::wait_quiet(&target.server, target.pid(), &quiet, Duration::from_secs(3)).await;
        let baseline = at_rest(target, &quiet).await?;
        soaked.leaked_pages = (baseline.pages_used - quiet.pages_used).max(soaked.leaked_pages);
        let missing = tail.await_all(&sent.ids(), Duration::from_secs(10)).await?;
        if let Some(keeper) = &mut keeper {
            keeper.keep(&sent, &tail)?;
            soaked.kept = keeper.written;
        }
        let follow_up = load::canary(target).await;
        let after = After {
            ends: started.elapsed(),
            baseline,
            device_mib: target.pid().and_then(crate::scrape::device_mib),
            quiet: calm.is_ok(),
            missing_traces: missing.len(),
            clean_follow_up: follow_up == canary && canary.is_some(),
        };
        let bucket = Bucket::of(number, streams, took, &sent, after);
        tail.forget();
        eprintln!("soak: bucket {number} of {buckets}: {}", bucket.line());
        soaked.run_errors.extend(sent.errors().take(3));
        soaked.buckets.push(bucket);
        if !target.is_alive() {
            soaked.run_errors.push("the server process has left".into());
            break;
        }
    }
    Ok(soaked)
}

/// What the server holds once it has closed the sockets of clients that left, or a second later. Each reading is a connection of its own,
/// which the server may still hold: the least of several descriptor counts is the one at rest.
async fn at_rest(target: &Target, quiet: &Baseline) -> Result<Baseline, ProbeError> {
    let mut rest = target.baseline().await?;
    for reading in 0..50 {
        if reading >= 10 && rest.fds <= quiet.fds {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        let now = target.baseline().await?;
        rest = Baseline { fds: rest.fds.min(now.fds), ..now };
    }
    Ok(rest)
}

/// A few seconds of the same work, before anything is measured.
async fn warm(args: &Args, target: &Target) {
    let streams = args.concurrency.iter().max().copied().unwrap_or(1);
    work(args.into(), target, usize::MAX >> 20, streams, Instant::now() + Duration::from_secs(2)).await;
}

fn judge(draft: &mut Draft, args: &Args, soaked: &Soaked, lasted: f64) {
    let buckets = &soaked.buckets;
    let all = |holds: fn(&Bucket) -> bool| buckets.iter().all(holds);
    let sum = |of: fn(&Bucket) -> usize| buckets.iter().map(of).sum::<usize>();
    let planned = (args.duration / args.bucket) as usize;
    let sent = sum(|b| b.requests);
    let errors = soaked.run_errors.join("; ");
    draft.check(
        "bucket_coverage",
        buckets.len() == planned && all(|b| b.completed > 0),
        format!("{} of {planned} buckets", buckets.len()),
    );
    let covered = lasted / args.duration as f64;
    draft.check("duration_coverage", covered >= 0.98, format!("{lasted:.0} of {} s", args.duration));
    let streams: std::collections::BTreeSet<usize> = buckets.iter().map(|b| b.concurrency).collect();
    draft.check("concurrency_coverage", args.concurrency.iter().all(|c| streams.contains(c)), format!("{streams:?}"));
    draft.check("zero_failures", all(|b| b.failed == 0), format!("{} of {sent} {errors}", sum(|b| b.failed)));
    draft.check("zero_timeouts", all(|b| b.timeouts == 0), format!("{} of {sent}", sum(|b| b.timeouts)));
    draft.check(
        "trace_coverage",
        all(|b| b.missing_traces == 0),
        format!("{} missing of {sent}", sum(|b| b.missing_traces)),
    );
    draft.check("clean_follow_up", all(|b| b.clean_follow_up), "the canary after each bucket");
    draft.check("quiet_after_each_bucket", all(|b| b.quiet), format!("{} pages lost", soaked.leaked_pages));
    // The draw is the seed's: what the soak must do is leave where it was drawn to, unless the answer ended first.
    let (left, leavers) = (sum(|b| b.left), sum(|b| b.leavers));
    draft.check(
        "cancels_as_asked",
        left <= leavers && 10 * left >= 9 * leavers && (leavers > 0 || args.cancels == 0.0),
        format!("{left} of {leavers} left, {:.1} % of all", 100.0 * left as f64 / sent.max(1) as f64),
    );

    let settled: Vec<&Bucket> = buckets.iter().filter(|b| b.ends_s > args.settle as f64).collect();
    let drift = drift(&settled);
    draft.detail("drift", &drift);
    if let Some(rss) = drift.get("rss_bytes") {
        let allowed = (0.02 * rss.first).max((8 << 20) as f64);
        draft.metric(
            "rss_growth_bytes",
            rss.last - rss.first,
            "bytes",
            settled.len() as u64,
            Some(Limit::AtMost(allowed)),
        );
    }
    if let Some(fds) = drift.get("fds") {
        draft.metric("fd_growth", fds.last - fds.first, "descriptors", settled.len() as u64, Some(Limit::AtMost(0.0)));
    }
    if let Some(device) = drift.get("device_mib").filter(|_| all(|b| b.device_mib.is_some())) {
        let grown = device.last - device.first;
        draft.metric("device_memory_growth_mib", grown, "MiB", settled.len() as u64, Some(Limit::AtMost(0.0)));
    }
    for name in ["ttft_ms_p95", "tpot_ms_p95", "itl_ms_p95", "tok_s"] {
        let (Some(most), Some(seen)) = (args.max_drift, drift.get(name)) else { continue };
        let worse = if name == "tok_s" { -seen.change } else { seen.change };
        draft.metric(&format!("drift_{name}"), worse, "share", settled.len() as u64, Some(Limit::AtMost(most)));
    }
    draft.metric("requests", sent as f64, "requests", buckets.len() as u64, None);
    draft.metric(
        "tok_s_p50",
        crate::stats::median(&buckets.iter().map(|b| b.tok_s).collect::<Vec<_>>()),
        "tok/s",
        buckets.len() as u64,
        None,
    );
}

/// A server that loses one page a minute must not pass a soak of little more than a minute.
async fn leak_canary(args: &Args) -> Result<Canary, ProbeError> {
    let fault = format!("page-leak@{}", args.leak_every);
    if !args.target.starts_its_own() {
        return Ok(Canary::skipped(&fault, "only the server's address was given"));
    }
    if args.canary == 0 {
        return Ok(Canary::skipped(&fault, "--canary 0"));
    }
    let target = args.target.open(&["--fault", &fault]).await?;
    let short = Args { duration: args.canary, bucket: (args.canary / 3).max(1), keep: None, ..args.clone() };
    let soaked = soak(&short, &target).await?;
    Ok(Canary::planted(&fault, soaked.leaked_pages >= 1.0 && soaked.buckets.iter().any(|bucket| !bucket.quiet)))
}

/// Writes answers and their traces so that replay can verify them.
struct Keeper {
    traces: std::fs::File,
    prompts: std::fs::File,
    most: usize,
    written: usize,
    hash: Sha256,
}

impl Keeper {
    fn new(folder: &std::path::Path, most: usize) -> Result<Keeper, ProbeError> {
        let error = |e: std::io::Error| ProbeError::Usage(format!("--keep {}: {e}", folder.display()));
        std::fs::create_dir_all(folder).map_err(error)?;
        let file = |name: &str| std::fs::File::create(folder.join(name)).map_err(error);
        Ok(Keeper {
            traces: file("traces.jsonl")?,
            prompts: file("prompts.jsonl")?,
            most,
            written: 0,
            hash: Sha256::new(),
        })
    }

    /// Keeps some of a bucket's completed answers, spread over the whole run.
    fn keep(&mut self, sent: &Sent, tail: &TraceTail) -> Result<(), ProbeError> {
        use std::io::Write;
        let error = |e: std::io::Error| ProbeError::Failed(format!("--keep: {e}"));
        for line in sent.answers().take(32) {
            let id = line.request_id.clone().unwrap_or_default();
            let (true, Some(trace)) = (self.written < self.most, tail.get(&id)) else { continue };
            let trace = json!(trace).to_string();
            self.hash.update(&trace);
            writeln!(self.traces, "{trace}").map_err(error)?;
            writeln!(self.prompts, "{}", json!(line)).map_err(error)?;
            self.written += 1;
        }
        Ok(())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        eprintln!("soak: kept {} answers, sha256 of their traces {}", self.written, hex(&self.hash.clone().finalize()));
    }
}
