//! API keys: who may use the guarded routes.
//!
//! **Invariant:** comparing takes the same time for every key of every length: only hashes are compared, and all of them.

use sha2::{Digest, Sha256};
use std::path::Path;
use subtle::{Choice, ConstantTimeEq};

/// The keys that are accepted; none at all means that no key is asked for.
#[derive(Clone, Default)]
pub struct Keys {
    hashes: Vec<[u8; 32]>,
}

impl Keys {
    pub fn new<K: AsRef<str>>(keys: impl IntoIterator<Item = K>) -> Self {
        let hashes = keys
            .into_iter()
            .map(|key| key.as_ref().trim().to_owned())
            .filter(|key| !key.is_empty())
            .map(|key| hash(&key))
            .collect();
        Keys { hashes }
    }
    /// Keys of a file, one a line.
    pub fn read(path: &Path) -> std::io::Result<Vec<String>> {
        Ok(std::fs::read_to_string(path)?.lines().map(str::to_owned).collect())
    }
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }
    /// Whether an Authorization header opens the door.
    pub fn admit(&self, authorization: Option<&str>) -> bool {
        if self.is_empty() {
            return true;
        }
        let Some((scheme, token)) = authorization.and_then(|header| header.split_once(' ')) else { return false };
        let given = hash(token.trim());
        let known = self.hashes.iter().fold(Choice::from(0), |found, key| found | key.ct_eq(&given));
        scheme.eq_ignore_ascii_case("bearer") && bool::from(known)
    }
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_open_and_close() {
        let open = Keys::new(Vec::<String>::new());
        assert!(open.admit(None) && open.admit(Some("Bearer ")));
        let keys = Keys::new(["one", " two\n", ""]);
        assert!(keys.admit(Some("Bearer one")) && keys.admit(Some("bearer two")));
        for header in
            [None, Some(""), Some("Bearer"), Some("Bearer "), Some("Bearer onee"), Some("Basic one"), Some("one")]
        {
            assert!(!keys.admit(header), "{header:?}");
        }
    }
}
