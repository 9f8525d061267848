//! Makes a checkpoint folder with dummy weights of a given shape: config.json, sharded safetensors, an index, and the tokenizer's files if
//! the source has them. Called by `slotgraph-probe make-checkpoint`; never while serving.
//!
//! Streams: memory stays at a few megabytes whatever the model's size. **Invariant:** the folder holds exactly what `--load-format dummy`
//! with the same seed computes, so both give the same answers; a shard appears under its name only when it is whole.

use super::{CONFIG, CheckpointError, Parsed, required};
use crate::checkpoint::Folder;
use crate::weights::{Required, dummy};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Files copied from the folder that config.json came from.
const COPIED: [&str; 6] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// Elements generated at a time, in parallel.
const BLOCK: usize = 1 << 20;
/// Elements one task generates.
const TASK: usize = 1 << 14;

/// What to make.
#[derive(Clone, Debug)]
pub struct Order<'a> {
    /// Has config.json, and perhaps tokenizer files.
    pub shape: &'a Path,
    /// Must not exist, or be empty.
    pub out: &'a Path,
    pub seed: u64,
    /// Data of one shard at most, unless a single tensor is larger.
    pub shard_bytes: u64,
}

/// What was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    pub tensors: usize,
    pub parameters: u64,
    pub bytes: u64,
    pub shards: usize,
}

/// Makes the folder; `progress` hears the bytes written so far and in all.
pub fn write_dummy(order: &Order, mut progress: impl FnMut(u64, u64)) -> Result<Made, CheckpointError> {
    let source = Folder::Disk(order.shape.to_path_buf());
    let parsed = Parsed::read(&source)?;
    let required = required(&parsed.spec)
        .map_err(|reason| CheckpointError::Plan { file: source.label(CONFIG), reason: reason.into() })?;
    let at =
        |path: PathBuf| move |error: io::Error| CheckpointError::file(path.display().to_string(), error.to_string());
    let out = order.out;
    fs::create_dir_all(out).map_err(at(out.into()))?;
    if fs::read_dir(out).map_err(at(out.into()))?.next().is_some() {
        return Err(CheckpointError::file(out.display().to_string(), "is not empty; name a new folder"));
    }
    fs::write(out.join(CONFIG), &parsed.config).map_err(at(out.join(CONFIG)))?;
    for name in COPIED {
        if let Some(bytes) = source.read(name)? {
            fs::write(out.join(name), bytes).map_err(at(out.join(name)))?;
        }
    }
    let shards = split(&required, order.shard_bytes);
    let total: u64 = required.values().map(|shape| bytes_of(shape)).sum();
    let mut weight_map = Map::new();
    let mut written = 0;
    for (index, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", index + 1, shards.len());
        let (partial, path) = (out.join(format!("{name}.part")), out.join(&name));
        let mut report = |bytes: u64| {
            written += bytes;
            progress(written, total);
        };
        write_shard(&partial, tensors, order.seed, &mut report).map_err(at(partial.clone()))?;
        fs::rename(&partial, &path).map_err(at(path))?;
        weight_map.extend(tensors.iter().map(|(tensor, _)| (tensor.to_string(), json!(name))));
    }
    let parameters = total / 2;
    let index = json!({"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map});
    let text = serde_json::to_string_pretty(&index).expect("an index of strings and numbers is JSON");
    let path = out.join("model.safetensors.index.json");
    fs::write(&path, text + "\n").map_err(at(path))?;
    Ok(Made { tensors: required.len(), parameters, bytes: total, shards: shards.len() })
}

fn bytes_of(shape: &[usize]) -> u64 {
    2 * shape.iter().map(|n| *n as u64).product::<u64>()
}

type Named<'a> = (&'a str, &'a [usize]);

/// Tensors in name order, cut into shards.
fn split(required: &Required, shard_bytes: u64) -> Vec<Vec<Named<'_>>> {
    let mut shards: Vec<Vec<Named>> = vec![Vec::new()];
    let mut filled = 0;
    for (name, shape) in required {
        let bytes = bytes_of(shape);
        if filled > 0 && filled + bytes > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        shards.last_mut().expect("there is a first shard").push((name, shape));
    }
    shards
}

fn write_shard(path: &Path, tensors: &[Named], seed: u64, report: &mut impl FnMut(u64)) -> io::Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for (name, shape) in tensors {
        let end = at + bytes_of(shape) as usize;
        let info = TensorInfo { dtype: Dtype::BF16, shape: shape.to_vec(), data_offsets: (at, end) };
        header.insert(name.to_string(), serde_json::to_value(info)?);
        at = end;
    }
    let mut header = Value::Object(header).to_string();
    // The data start on a multiple of 8, as other writers have it.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::new(File::create_new(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut block = vec![0u16; BLOCK];
    for (name, shape) in tensors {
        let elements = bytes_of(shape) / 2;
        for first in (0..elements).step_by(BLOCK) {
            let block = &mut block[..BLOCK.min((elements - first) as usize)];
            block.par_chunks_mut(TASK).enumerate().for_each(|(task, out)| {
                dummy::fill(seed, name, shape.len(), first + (task * TASK) as u64, out);
                out.iter_mut().for_each(|value| *value = value.to_le());
            });
            file.write_all(bytemuck::cast_slice(block))?;
            report(2 * block.len() as u64);
        }
    }
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}
