//! A copy of a bundled model that a test may break, and what its refusal must say.

use serde_json::Value;
use slotgraph_kernels::{TensorPart, WeightForm, WeightSpec};
use slotgraph_runtime::checkpoint::Checkpoint;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub const FIRST: &str = "model-00001-of-00002.safetensors";
pub const SECOND: &str = "model-00002-of-00002.safetensors";
pub const INDEX: &str = "model.safetensors.index.json";

/// A copy of a bundled model that a test may break.
pub struct Copy(TempDir);

impl Copy {
    pub fn of(model: &str) -> Copy {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models").join(model);
        let copy = Copy(tempfile::tempdir().unwrap());
        for entry in fs::read_dir(source).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.path(path.file_name().unwrap().to_str().unwrap())).unwrap();
        }
        copy
    }
    pub fn demo() -> Copy {
        Copy::of("shakespeare-dsv2")
    }
    pub fn folder(&self) -> &Path {
        self.0.path()
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    pub fn size(&self, name: &str) -> u64 {
        fs::metadata(self.path(name)).unwrap().len()
    }
    pub fn truncate(&self, name: &str, size: u64) {
        OpenOptions::new().write(true).open(self.path(name)).unwrap().set_len(size).unwrap();
    }
    pub fn overwrite(&self, name: &str, at: u64, bytes: &[u8]) {
        let mut file = OpenOptions::new().write(true).open(self.path(name)).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(bytes).unwrap();
    }
    pub fn header(&self, name: &str) -> Value {
        let mut file = File::open(self.path(name)).unwrap();
        let mut length = [0; 8];
        file.read_exact(&mut length).unwrap();
        let mut json = vec![0; u64::from_le_bytes(length) as usize];
        file.read_exact(&mut json).unwrap();
        serde_json::from_slice(&json).unwrap()
    }
    /// Gives a file another header over the same data.
    pub fn reheader(&self, name: &str, header: &[u8]) {
        let old = fs::read(self.path(name)).unwrap();
        let start = 8 + u64::from_le_bytes(old[..8].try_into().unwrap()) as usize;
        let mut new = (header.len() as u64).to_le_bytes().to_vec();
        new.extend_from_slice(header);
        new.extend_from_slice(&old[start..]);
        fs::write(self.path(name), new).unwrap();
    }
    pub fn edit_header(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut header = self.header(name);
        edit(&mut header);
        self.reheader(name, header.to_string().as_bytes());
    }
    pub fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value: Value = serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap();
        edit(&mut value);
        fs::write(self.path(name), value.to_string()).unwrap();
    }
    /// The refusal; it must be one line and hold every one of `words`.
    pub fn refused(&self, words: &[&str]) -> String {
        refused(self.0.path(), words)
    }
}

pub fn refused(path: &Path, words: &[&str]) -> String {
    let message = match Checkpoint::open(path) {
        Ok(_) => panic!("{} was accepted", path.display()),
        Err(error) => error.to_string(),
    };
    assert!(!message.contains('\n'), "more than one line: {message}");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
    message
}

/// A weight that is one whole vector of the checkpoint.
pub fn vector(tensor: &str, n: usize) -> WeightSpec {
    let part =
        TensorPart { tensor: tensor.into(), tensor_shape: vec![n], rows: 0..n, transpose: false, group: 0, dst_row: 0 };
    WeightSpec { name: "a_vector".into(), form: WeightForm::Vector { n }, parts: vec![part] }
}
