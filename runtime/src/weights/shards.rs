//! A checkpoint's weight files: found, opened, their headers checked, and compared with what the model needs.
//!
//! Used by `Checkpoint::load`, before any device work. **Invariant:** after `open` and `check`, every tensor the model
//! needs is wholly in one file with the right shape and a dtype that can be read; every problem found is in one
//! message.

use super::Required;
use super::blob::Blob;
use super::header::{self, Tensor};
use crate::checkpoint::{CheckpointError, Folder, parse_object};
use safetensors::tensor::Dtype;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Names listed in a message before it says how many more there are.
const NAMES_SHOWN: usize = 400;
/// Up to this much data is hashed whole (under 0.1 s); of more, the start of every tensor.
const HASHED_WHOLE_BYTES: u64 = 64 << 20;
const HASHED_START_BYTES: u64 = 4096;

/// One weight file.
#[derive(Debug)]
pub struct Shard {
    pub name: String,
    /// How messages name it.
    pub label: String,
    pub blob: Blob,
    pub data_start: u64,
}

/// A tensor, and the index of its file in `Shards::files`.
pub type Placed = (usize, Tensor);

/// The weight files and where each tensor lies.
#[derive(Debug)]
pub struct Shards {
    pub files: Vec<Shard>,
    /// By name.
    pub tensors: HashMap<String, Placed>,
}

impl Shards {
    /// Opens the weight files of `folder`: `model.safetensors`, else the shards that the index lists (the hub's own
    /// order).
    pub fn open(folder: &Folder) -> Result<Shards, CheckpointError> {
        if folder.has(SINGLE) {
            let (files, tensors) = read_all(folder, &[SINGLE.to_string()])?;
            return Ok(Shards { files, tensors: tensors.into_iter().map(|t| (t.1.name.clone(), t)).collect() });
        }
        let Some(index) = folder.read(INDEX)? else {
            let other = ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().find(|name| folder.has(name));
            let hint = other.map_or(String::new(), |name| format!(" ({name} is there, but only safetensors are read)"));
            return Err(CheckpointError::file(folder.label(SINGLE), format!("is missing, and so is {INDEX}{hint}")));
        };
        let label = folder.label(INDEX);
        let map = weight_map(&label, &index)?;
        let mut names: Vec<String> = map.values().cloned().collect();
        names.sort();
        names.dedup();
        let missing: Vec<&String> = names.iter().filter(|name| !folder.has(name)).collect();
        if !missing.is_empty() {
            let listed = some(missing.iter().map(|name| folder.label(name)));
            return Err(CheckpointError::Weights(format!("missing weight files that {label} lists: {listed}")));
        }
        let (files, tensors) = read_all(folder, &names)?;
        Ok(Shards { tensors: placed(&label, &files, map, tensors)?, files })
    }

    /// Compares with what the model needs; returns what is worth a warning.
    pub fn check(&self, required: &Required, tied_head: bool) -> Result<Vec<String>, CheckpointError> {
        let missing: Vec<&String> = required.keys().filter(|name| !self.tensors.contains_key(*name)).collect();
        let mut problems = Vec::new();
        if !missing.is_empty() {
            problems.push(format!("missing tensors (in no weight file): {}", some(missing)));
        }
        let mut converted: BTreeMap<String, usize> = BTreeMap::new();
        for (name, shape) in required {
            let Some((file, tensor)) = self.tensors.get(name) else { continue };
            let label = &self.files[*file].label;
            if &tensor.shape != shape {
                problems.push(format!("{label}: {name}: found shape {:?}, expected {shape:?}", tensor.shape));
            }
            match tensor.dtype {
                Dtype::BF16 => {}
                Dtype::F16 | Dtype::F32 => *converted.entry(format!("{:?}", tensor.dtype)).or_default() += 1,
                other => problems.push(format!("{label}: {name}: found dtype {other:?}, expected BF16 (or F16, F32)")),
            }
        }
        if !problems.is_empty() {
            return Err(CheckpointError::Weights(problems.join("; ")));
        }
        let mut warnings: Vec<String> = converted
            .iter()
            .map(|(dtype, count)| format!("{count} tensors are {dtype} and are rounded once to bf16 (nearest even)"))
            .collect();
        warnings.extend(self.unused(required, tied_head));
        Ok(warnings)
    }

    fn unused(&self, required: &Required, tied_head: bool) -> Vec<String> {
        let mut unused: Vec<&String> = self.tensors.keys().filter(|name| !required.contains_key(*name)).collect();
        unused.sort();
        let mut warnings = Vec::new();
        if tied_head && self.tensors.contains_key("lm_head.weight") {
            warnings
                .push("lm_head.weight is ignored: tie_word_embeddings is true, so the embedding is the head".into());
        }
        let known = |name: &str| name.ends_with("rotary_emb.inv_freq") || tied_head && name == "lm_head.weight";
        unused.retain(|name| !known(name));
        if !unused.is_empty() {
            warnings.push(format!(
                "{} tensors are not part of the model and are ignored: {}",
                unused.len(),
                few(&unused)
            ));
        }
        warnings
    }

    /// Adds the weights to a model's identity: names, sizes, headers, and the data (whole up to 64 MiB, else every
    /// tensor's start).
    pub fn hash(&self, sha: &mut Sha256) -> Result<(), CheckpointError> {
        let total: u64 = self.files.iter().map(|file| file.blob.len() - file.data_start).sum();
        let mut tensors: Vec<&Placed> = self.tensors.values().collect();
        tensors.sort_by_key(|(file, tensor)| (*file, tensor.start));
        let mut buffer = Vec::new();
        for shard in &self.files {
            sha.update((shard.name.len() as u64).to_le_bytes());
            sha.update(&shard.name);
            sha.update(shard.blob.len().to_le_bytes());
            hash_range(shard, 0, shard.data_start, sha, &mut buffer)?;
        }
        for (file, tensor) in tensors {
            let bytes = if total <= HASHED_WHOLE_BYTES { tensor.bytes } else { tensor.bytes.min(HASHED_START_BYTES) };
            hash_range(&self.files[*file], tensor.start, bytes, sha, &mut buffer)?;
        }
        Ok(())
    }
}

/// Opens every file and reads its header; one message names all that are broken.
fn read_all(folder: &Folder, names: &[String]) -> Result<(Vec<Shard>, Vec<Placed>), CheckpointError> {
    let (mut files, mut tensors, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    for name in names {
        let label = folder.label(name);
        let blob = folder.blob(name)?.ok_or_else(|| CheckpointError::file(&label, "is missing"))?;
        match header::read(&blob) {
            Ok(header) => {
                tensors.extend(header.tensors.into_iter().map(|tensor| (files.len(), tensor)));
                files.push(Shard { name: name.clone(), label, blob, data_start: header.data_start });
            }
            Err(problem) => problems.push(format!("{label}: {problem}")),
        }
    }
    if problems.is_empty() { Ok((files, tensors)) } else { Err(CheckpointError::Weights(problems.join("; "))) }
}

/// The tensors by name: those that the index lists where it lists them, then any others that a file holds.
fn placed(
    label: &str,
    files: &[Shard],
    map: BTreeMap<String, String>,
    found: Vec<Placed>,
) -> Result<HashMap<String, Placed>, CheckpointError> {
    let mut tensors = HashMap::with_capacity(found.len());
    let mut unlisted = Vec::new();
    for (file, tensor) in found {
        match map.get(&tensor.name) {
            Some(listed) if *listed == files[file].name => {
                tensors.insert(tensor.name.clone(), (file, tensor));
            }
            Some(_) => {}
            None => unlisted.push((file, tensor)),
        }
    }
    let mut absent: BTreeMap<&String, Vec<&String>> = BTreeMap::new();
    for (tensor, file) in map.iter().filter(|(tensor, _)| !tensors.contains_key(*tensor)) {
        absent.entry(file).or_default().push(tensor);
    }
    if !absent.is_empty() {
        let problems: Vec<String> =
            absent.iter().map(|(file, tensors)| format!("{file} does not hold {}", some(tensors))).collect();
        return Err(CheckpointError::Weights(format!(
            "{label} lists tensors that are not there: {}",
            problems.join("; ")
        )));
    }
    for (file, tensor) in unlisted {
        tensors.entry(tensor.name.clone()).or_insert((file, tensor));
    }
    Ok(tensors)
}

fn hash_range(
    shard: &Shard,
    start: u64,
    bytes: u64,
    sha: &mut Sha256,
    buffer: &mut Vec<u8>,
) -> Result<(), CheckpointError> {
    const PIECE: u64 = 1 << 20;
    let mut at = 0;
    while at < bytes {
        buffer.resize(PIECE.min(bytes - at) as usize, 0);
        shard.blob.read_at(start + at, buffer).map_err(|e| CheckpointError::file(&shard.label, e.to_string()))?;
        sha.update(&buffer);
        at += buffer.len() as u64;
    }
    Ok(())
}

/// The index's map from tensor to file name.
pub fn weight_map(label: &str, index: &[u8]) -> Result<BTreeMap<String, String>, CheckpointError> {
    let object = parse_object(label, index)?;
    let bad = |reason: String| CheckpointError::Key { file: label.into(), key: "weight_map".into(), reason };
    let entries = object.get("weight_map").and_then(|map| map.as_object());
    let entries = entries.ok_or_else(|| bad("is missing or not an object".into()))?;
    if entries.is_empty() {
        return Err(bad("is empty".into()));
    }
    let mut map = BTreeMap::new();
    for (tensor, file) in entries {
        let name = file
            .as_str()
            .filter(|name| !name.is_empty() && !name.contains(['/', '\\', '\0']) && *name != ".." && *name != ".");
        let name = name.ok_or_else(|| bad(format!("{tensor}: {file} is not a file name in the folder")))?;
        map.insert(tensor.clone(), name.to_string());
    }
    Ok(map)
}

fn some<T: AsRef<str>>(names: impl IntoIterator<Item = T>) -> String {
    listed(names, NAMES_SHOWN)
}

fn few(names: &[&String]) -> String {
    listed(names.iter().map(|name| name.as_str()), 5)
}

fn listed<T: AsRef<str>>(names: impl IntoIterator<Item = T>, shown: usize) -> String {
    let names: Vec<T> = names.into_iter().collect();
    let mut text = names.iter().take(shown).map(AsRef::as_ref).collect::<Vec<&str>>().join(", ");
    if names.len() > shown {
        text.push_str(&format!(" and {} more", names.len() - shown));
    }
    text
}
