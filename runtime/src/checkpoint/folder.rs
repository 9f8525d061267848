//! A checkpoint folder as named files: on disk, or bytes in the binary.
//!
//! **Invariant:** a missing file is None, anything else that goes wrong is an error that names the file; a Git LFS pointer is never taken
//! for the file it stands for.

use super::CheckpointError;
use crate::weights::blob::{self, Blob};
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::PathBuf;

/// Where a checkpoint's files are.
#[derive(Clone, Debug)]
pub enum Folder {
    Disk(PathBuf),
    /// Bytes in the binary: (file name, contents).
    Embedded {
        name: &'static str,
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl Folder {
    /// The folder's own name.
    pub fn name(&self) -> String {
        match self {
            Folder::Disk(path) => {
                let resolved = path.canonicalize().unwrap_or_else(|_| path.clone());
                resolved.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
            }
            Folder::Embedded { name, .. } => (*name).to_string(),
        }
    }
    /// How messages name file `name`.
    pub fn label(&self, name: &str) -> String {
        match self {
            Folder::Disk(path) => path.join(name).display().to_string(),
            Folder::Embedded { name: folder, .. } => format!("{folder}/{name} (bundled)"),
        }
    }
    /// Refuses a path that is not a folder.
    pub fn check(&self) -> Result<(), CheckpointError> {
        let Folder::Disk(path) = self else { return Ok(()) };
        let shown = path.display().to_string();
        match fs::metadata(path) {
            Ok(facts) if facts.is_dir() => Ok(()),
            Ok(_) => Err(CheckpointError::file(shown, "is a file; a model is a folder with config.json in it")),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(CheckpointError::file(shown, "no such folder; a model is the path of a local checkpoint folder"))
            }
            Err(error) => Err(CheckpointError::file(shown, error.to_string())),
        }
    }
    pub fn has(&self, name: &str) -> bool {
        match self {
            Folder::Disk(path) => path.join(name).exists(),
            Folder::Embedded { files, .. } => files.iter().any(|(file, _)| *file == name),
        }
    }
    /// The contents of file `name`.
    pub fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        let bytes: Cow<'static, [u8]> = match self {
            Folder::Disk(path) => match fs::read(path.join(name)) {
                Ok(bytes) => bytes.into(),
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(CheckpointError::file(self.label(name), error.to_string())),
            },
            Folder::Embedded { files, .. } => match files.iter().find(|(file, _)| *file == name) {
                Some((_, bytes)) => (*bytes).into(),
                None => return Ok(None),
            },
        };
        if bytes.starts_with(blob::LFS_POINTER) {
            return Err(CheckpointError::file(self.label(name), blob::LFS_REASON));
        }
        Ok(Some(bytes))
    }
    /// File `name`, opened for positioned reads.
    pub fn blob(&self, name: &str) -> Result<Option<Blob>, CheckpointError> {
        match self {
            Folder::Disk(path) => match File::open(path.join(name)).and_then(Blob::file) {
                Ok(blob) => Ok(Some(blob)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(CheckpointError::file(self.label(name), error.to_string())),
            },
            Folder::Embedded { files, .. } => {
                Ok(files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| Blob::Bytes((*bytes).into())))
            }
        }
    }
}
