//! Changes to copies of weight files: a safetensors file taken apart into its header and data, and written again.

use serde_json::Value;
use std::path::{Path, PathBuf};

/// A file, taken apart.
pub struct Weights {
    path: PathBuf,
    pub header: Value,
    pub data: Vec<u8>,
}

impl Weights {
    pub fn read(path: PathBuf) -> Weights {
        let bytes = std::fs::read(&path).expect("a weight file");
        let length = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + length]).expect("a JSON header");
        Weights { path, header, data: bytes[8 + length..].to_vec() }
    }
    /// The only weight file of a folder.
    pub fn single(folder: &Path) -> Weights {
        Weights::read(folder.join("model.safetensors"))
    }
    /// Bytes of a tensor in `data`.
    pub fn range(&self, tensor: &str) -> std::ops::Range<usize> {
        let offset = |at: usize| self.header[tensor]["data_offsets"][at].as_u64().expect("an offset") as usize;
        offset(0)..offset(1)
    }
    /// Leaves a tensor out; those behind it move up.
    pub fn remove(&mut self, tensor: &str) {
        let gone = self.range(tensor);
        self.data.drain(gone.clone());
        let header = self.header.as_object_mut().expect("an object");
        header.shift_remove(tensor).expect("a tensor");
        for (_, entry) in header.iter_mut().filter(|(name, _)| *name != "__metadata__") {
            for at in 0..2 {
                let offset = entry["data_offsets"][at].as_u64().expect("an offset") as usize;
                if offset >= gone.end {
                    entry["data_offsets"][at] = (offset - gone.len()).into();
                }
            }
        }
    }
    pub fn write(&self) {
        let header = self.header.to_string();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &self.data].concat();
        std::fs::write(&self.path, bytes).expect("a weight file");
    }
}
