//! The command line: which probes exist, where a report goes, and the exit code that its verdict means.

use crate::evidence::Evidence;
use crate::harness::raise_descriptor_limit;
use crate::{
    bench_decode, bench_http, combine, exactness, manifest, matrix, plan, readiness, reliability, replay, slo, soak,
};
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Asks one question about this build on this machine and answers it with evidence.
///
/// Exit codes: 0 pass, 1 fail, 2 usage or configuration, 3 skipped (with the reason; a skip is not a pass).
#[derive(Debug, Parser)]
#[command(name = "slotgraph-probe", version)]
struct Cli {
    /// Write the evidence to this file; without it the JSON goes to standard output.
    #[arg(long, global = true, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    BenchDecode(bench_decode::Args),
    BenchHttp(bench_http::Args),
    Combine(combine::Args),
    Exactness(exactness::Args),
    GraphReadiness(readiness::Args),
    HttpReliability(reliability::Args),
    Manifest(manifest::Args),
    Matrix(matrix::Args),
    Plan(plan::Args),
    Replay(replay::Args),
    Slo(slo::Args),
    Soak(soak::Args),
}

/// What a probe hands back.
#[derive(Debug)]
pub enum Outcome {
    Evidence(Box<Evidence>),
    /// Plain text for standard output: not evidence of anything.
    Text(String),
}

/// Why a probe has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The command cannot mean anything here: exit 2.
    #[error("{0}")]
    Usage(String),
    /// The probe broke before it had a verdict: exit 1.
    #[error("{0}")]
    Failed(String),
}

pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match &cli.command {
        Command::BenchDecode(args) => bench_decode::run(args),
        Command::BenchHttp(args) => over_http(bench_http::run(args)),
        Command::Combine(args) => combine::run(args),
        Command::Exactness(args) => exactness::run(args),
        Command::GraphReadiness(args) => readiness::run(args),
        Command::HttpReliability(args) => over_http(reliability::run(args)),
        Command::Manifest(args) => manifest::run(args),
        Command::Matrix(args) => over_http(matrix::run(args)),
        Command::Plan(args) => plan::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Soak(args) => over_http(soak::run(args)),
        Command::Slo(args) => over_http(slo::run(args)),
    };
    match outcome.and_then(|outcome| deliver(outcome, cli.out.as_deref())) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("slotgraph-probe: {error}");
            ExitCode::from(if matches!(error, ProbeError::Usage(_)) { 2 } else { 1 })
        }
    }
}

/// Runs a probe that speaks HTTP.
fn over_http(probe: impl Future<Output = Result<Outcome, ProbeError>>) -> Result<Outcome, ProbeError> {
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.map_err(|e| ProbeError::Failed(e.to_string()))?.block_on(probe)
}

fn deliver(outcome: Outcome, out: Option<&std::path::Path>) -> Result<ExitCode, ProbeError> {
    match outcome {
        Outcome::Text(text) => {
            match out {
                Some(path) => {
                    std::fs::write(path, text).map_err(|e| ProbeError::Usage(format!("{}: {e}", path.display())))?
                }
                None => print!("{text}"),
            }
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Evidence(evidence) => {
            eprint!("{}", evidence.summary());
            match out {
                Some(path) => evidence.write(path).map_err(|e| ProbeError::Usage(e.to_string()))?,
                None => println!("{}", serde_json::to_string(&evidence).expect("evidence is plain data")),
            }
            Ok(evidence.verdict.exit_code())
        }
    }
}
