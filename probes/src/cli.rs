//! The command line: which probes exist, where a report goes, and the exit code that its verdict means.

use crate::evidence::Evidence;
use crate::harness::raise_descriptor_limit;
use crate::{
    attribution, bench_decode, bench_http, combine, doctor, exactness, graph_dump, make_checkpoint, manifest, matrix,
    plan, readiness, reliability, replay, slo, soak,
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
    Attribution(attribution::Args),
    BenchDecode(bench_decode::Args),
    BenchHttp(bench_http::Args),
    Combine(combine::Args),
    Doctor(doctor::Args),
    Exactness(exactness::Args),
    GraphDiff(graph_dump::DiffArgs),
    GraphDump(graph_dump::DumpArgs),
    GraphReadiness(readiness::Args),
    HttpReliability(reliability::Args),
    MakeCheckpoint(make_checkpoint::Args),
    Manifest(manifest::Args),
    Matrix(matrix::Args),
    Plan(plan::Args),
    Replay(replay::Args),
    /// The server itself, as `slotgraph serve`: what a gate starts when it is given no server.
    Serve(Box<slotgraph_server::cli::Serve>),
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
    /// This machine has no GPU to ask: exit 3, or 1 where SLOTGRAPH_REQUIRE_GPU=1 says that it must have one.
    #[error("skipped: {0}")]
    Absent(String),
}

impl ProbeError {
    fn exit_code(&self) -> u8 {
        match self {
            ProbeError::Usage(_) => 2,
            ProbeError::Failed(_) => 1,
            ProbeError::Absent(_) => {
                if gpu_is_required() {
                    1
                } else {
                    3
                }
            }
        }
    }
}

/// Whether a missing GPU is a failure here.
pub fn gpu_is_required() -> bool {
    std::env::var_os("SLOTGRAPH_REQUIRE_GPU").is_some_and(|value| value == "1")
}

pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Serve(serve) = &cli.command {
        // A probe that is killed takes its server along. Refused nowhere on Linux; without it the server outlives the probe.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        return slotgraph_server::serve::run(serve);
    }
    let outcome = match &cli.command {
        Command::Attribution(args) => attribution::run(args),
        Command::BenchDecode(args) => bench_decode::run(args),
        Command::BenchHttp(args) => over_http(bench_http::run(args)),
        Command::Combine(args) => combine::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Exactness(args) => exactness::run(args),
        Command::GraphDiff(args) => graph_dump::diff(args),
        Command::GraphDump(args) => graph_dump::dump(args),
        Command::GraphReadiness(args) => readiness::run(args),
        Command::HttpReliability(args) => over_http(reliability::run(args)),
        Command::MakeCheckpoint(args) => make_checkpoint::run(args),
        Command::Manifest(args) => manifest::run(args),
        Command::Matrix(args) => over_http(matrix::run(args)),
        Command::Plan(args) => plan::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Serve(_) => unreachable!("a server is no probe"),
        Command::Soak(args) => over_http(soak::run(args)),
        Command::Slo(args) => over_http(slo::run(args)),
    };
    match outcome.and_then(|outcome| deliver(outcome, cli.out.as_deref())) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("slotgraph-probe: {error}");
            ExitCode::from(error.exit_code())
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
