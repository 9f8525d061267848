//! Bytes with positioned reads: a file, or bytes in memory. No mapping, so a file that shrinks is an error and not a signal.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// How every Git LFS pointer file starts.
pub const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// What to say of one.
pub const LFS_REASON: &str = "is a Git LFS pointer, not the file itself; run `git lfs pull` in the folder";

#[derive(Debug)]
pub enum Blob {
    File { file: File, len: u64 },
    Bytes(Cow<'static, [u8]>),
}

impl Blob {
    pub fn file(file: File) -> io::Result<Blob> {
        let len = file.metadata()?.len();
        Ok(Blob::File { file, len })
    }
    /// Length when it was opened.
    pub fn len(&self) -> u64 {
        match self {
            Blob::File { len, .. } => *len,
            Blob::Bytes(bytes) => bytes.len() as u64,
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills `out` from `offset` on; fails if the bytes end before that.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        match self {
            Blob::File { file, .. } => file.read_exact_at(out, offset),
            Blob::Bytes(bytes) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                let from = bytes[start..].get(..out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                out.copy_from_slice(from);
                Ok(())
            }
        }
    }
}
