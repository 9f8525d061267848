//! make-checkpoint: a checkpoint folder of any shape with seeded weights, to measure loading and to test without a download.

use crate::cli::{Outcome, ProbeError};
use slotgraph_runtime::checkpoint::write::{Order, write_dummy};
use std::path::PathBuf;

/// Write a checkpoint folder with seeded weights for a config.json.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder that has config.json, and perhaps a tokenizer.
    shape: PathBuf,
    /// New or empty folder.
    folder: PathBuf,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Largest shard, in 10⁹ bytes.
    #[arg(long, default_value_t = 5.0)]
    shard_gb: f64,
}

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let order = Order {
        shape: &args.shape,
        out: &args.folder,
        seed: args.seed,
        shard_bytes: (args.shard_gb * 1e9).max(1.0) as u64,
    };
    let mut shown = 0;
    let made = write_dummy(&order, |done, all| {
        let percent = 100 * done / all.max(1);
        if percent >= shown + 10 {
            shown = percent;
            eprintln!("make-checkpoint: {percent} %");
        }
    })
    .map_err(|e| ProbeError::Usage(e.to_string()))?;
    Ok(Outcome::Text(format!(
        "{} tensors, {} parameters, {} bytes in {} shards\n",
        made.tensors, made.parameters, made.bytes, made.shards
    )))
}
