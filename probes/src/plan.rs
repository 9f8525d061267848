//! plan: prints the ops of one step shape as text.

use crate::cli::{Outcome, ProbeError};
use crate::subject::{Subject, SubjectArgs};
use slotgraph_graphs::model;
use slotgraph_graphs::plan::RankShape;

/// Print the plan of one bucket: its ops, buffers and weights.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Rows of the step [default: the smallest bucket].
    #[arg(long)]
    bucket: Option<usize>,
    #[arg(long, default_value_t = 0)]
    rank: usize,
}

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let subject = Subject::open(&args.subject)?;
    let limits = subject.limits();
    let bucket = args.bucket.unwrap_or(limits.buckets[0]);
    let rank = RankShape { rank: args.rank, ranks: subject.config.ep };
    let plan =
        model::build(&subject.checkpoint.spec, &limits, rank, bucket).map_err(|e| ProbeError::Usage(e.to_string()))?;
    Ok(Outcome::Text(plan.to_string()))
}
