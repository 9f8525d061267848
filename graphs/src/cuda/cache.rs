//! The disk cache of compiled kernels: a compilation takes 0.1–0.5 s, a hit none.
//!
//! Used by `nvrtc`. **Invariants:** a key covers everything that the CUBIN depends on; a reader sees a whole file or none
//! (written beside, then renamed), and checks its digest; a cache that cannot be read or written costs time, never a start.

use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// First bytes of a file of ours.
const MAGIC: &[u8; 8] = b"sgcubin1";
const DIGEST_BYTES: usize = 32;

/// What a compilation depends on, hashed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CacheKey([u8; DIGEST_BYTES]);

impl CacheKey {
    /// Hash of parts; each is prefixed by its length, so that moving bytes between parts changes the key.
    pub fn of(parts: &[&[u8]]) -> CacheKey {
        let mut sha = Sha256::new();
        for part in parts {
            sha.update((part.len() as u64).to_le_bytes());
            sha.update(part);
        }
        CacheKey(sha.finalize().into())
    }

    fn file_name(&self) -> String {
        let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}.cubin")
    }
}

/// A folder of compiled kernels, or none.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// No cache: every compilation is fresh.
    pub fn off() -> Cache {
        Cache { folder: None }
    }

    pub fn in_folder(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: Some(folder.into()) }
    }

    /// SLOTGRAPH_CACHE_DIR (empty: no cache), else XDG_CACHE_HOME/slotgraph, else ~/.cache/slotgraph.
    pub fn of_user() -> Cache {
        Cache { folder: folder_of_user(|name| std::env::var_os(name)) }
    }

    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The image and log stored under `key`, if they are there and whole.
    pub fn read(&self, key: &CacheKey) -> Option<(Vec<u8>, String)> {
        let bytes = std::fs::read(self.folder.as_ref()?.join(key.file_name())).ok()?;
        decode(&bytes)
    }

    /// Stores image and log. Failures are silent: the cache is only a saving of time.
    pub fn write(&self, key: &CacheKey, image: &[u8], log: &str) {
        let Some(folder) = &self.folder else { return };
        let path = folder.join(key.file_name());
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let beside = folder.join(format!("{}.{}-{number}.tmp", key.file_name(), std::process::id()));
        let stored = std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&beside, encode(image, log)))
            .and_then(|()| std::fs::rename(&beside, &path));
        if stored.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
    }
}

fn folder_of_user(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(folder) = variable("SLOTGRAPH_CACHE_DIR") {
        return (!folder.is_empty()).then(|| PathBuf::from(folder));
    }
    let absolute = |value: OsString| Some(PathBuf::from(value)).filter(|path| path.is_absolute());
    let root = variable("XDG_CACHE_HOME")
        .and_then(absolute)
        .or_else(|| Some(variable("HOME").and_then(absolute)?.join(".cache")))?;
    Some(root.join("slotgraph"))
}

/// Magic, digest of the rest, length of the image, image, log.
fn encode(image: &[u8], log: &str) -> Vec<u8> {
    let mut body = (image.len() as u64).to_le_bytes().to_vec();
    body.extend_from_slice(image);
    body.extend_from_slice(log.as_bytes());
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&Sha256::digest(&body));
    bytes.extend_from_slice(&body);
    bytes
}

fn decode(bytes: &[u8]) -> Option<(Vec<u8>, String)> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (digest, body) = rest.split_at_checked(DIGEST_BYTES)?;
    if Sha256::digest(body)[..] != *digest {
        return None;
    }
    let (length, rest) = body.split_first_chunk::<8>()?;
    let (image, log) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    Some((image.to_vec(), String::from_utf8(log.to_vec()).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    #[test]
    fn what_is_written_is_read_back() {
        let root = TempDir::new().unwrap();
        let cache = Cache::in_folder(root.path().join("made/on/demand"));
        let key = CacheKey::of(&[b"source", b"options"]);
        assert_eq!(cache.read(&key), None);
        cache.write(&key, b"\x7fELF image", "a log");
        assert_eq!(cache.read(&key), Some((b"\x7fELF image".to_vec(), "a log".into())));
        let left: Vec<_> = std::fs::read_dir(cache.folder().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file stays");
    }

    #[test]
    fn keys_tell_parts_apart() {
        let keys = [
            CacheKey::of(&[b"ab", b"c"]),
            CacheKey::of(&[b"a", b"bc"]),
            CacheKey::of(&[b"abc", b""]),
            CacheKey::of(&[b"abc"]),
        ];
        for (i, a) in keys.iter().enumerate() {
            for b in &keys[i + 1..] {
                assert_ne!(a, b);
            }
        }
    }

    #[test]
    fn a_damaged_or_cut_file_is_a_miss() {
        let root = TempDir::new().unwrap();
        let cache = Cache::in_folder(root.path());
        let key = CacheKey::of(&[b"x"]);
        cache.write(&key, &[7; 100], "log");
        let path = root.path().join(key.file_name());
        let whole = std::fs::read(&path).unwrap();
        for (what, bytes) in [
            ("cut", whole[..whole.len() - 1].to_vec()),
            ("empty", Vec::new()),
            ("a flipped bit", {
                let mut bytes = whole.clone();
                bytes[60] ^= 1;
                bytes
            }),
        ] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(cache.read(&key), None, "{what}");
        }
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_silent() {
        let cache = Cache::in_folder("/proc/nowhere");
        let key = CacheKey::of(&[b"x"]);
        cache.write(&key, &[1], "");
        assert_eq!(cache.read(&key), None);
        Cache::off().write(&key, &[1], "");
        assert_eq!(Cache::off().read(&key), None);
    }

    #[test]
    fn the_folder_follows_the_variables() {
        let with = |variables: &[(&str, &str)]| {
            let variables: Vec<(String, OsString)> =
                variables.iter().map(|(name, value)| ((*name).into(), OsString::from(value))).collect();
            folder_of_user(|name| variables.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone()))
        };
        assert_eq!(with(&[("HOME", "/base/a")]), Some("/base/a/.cache/slotgraph".into()));
        assert_eq!(with(&[("HOME", "/base/a"), ("XDG_CACHE_HOME", "/c")]), Some("/c/slotgraph".into()));
        assert_eq!(
            with(&[("HOME", "/base/a"), ("XDG_CACHE_HOME", "relative")]),
            Some("/base/a/.cache/slotgraph".into())
        );
        assert_eq!(with(&[("HOME", "/base/a"), ("SLOTGRAPH_CACHE_DIR", "/own")]), Some("/own".into()));
        assert_eq!(with(&[("HOME", "/base/a"), ("SLOTGRAPH_CACHE_DIR", "")]), None);
        assert_eq!(with(&[]), None);
    }
}
