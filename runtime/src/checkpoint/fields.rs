//! A JSON object read key by key: every wrong type is named with its file and key, and keys that nobody read are found at the end.
//!
//! Used for config.json (and its rope objects) and generation_config.json. `null` counts as absent, as it does in Transformers.

use super::CheckpointError;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::HashSet;

/// Larger than any extent of a real model; products of two stay far from overflow.
const SIZE_MAX: usize = 1 << 26;

/// The object, and which of its keys have been asked for.
pub struct Fields<'a> {
    file: &'a str,
    /// Path of the object inside the file: empty, or `rope_scaling.`.
    prefix: String,
    object: &'a Map<String, Value>,
    read: RefCell<HashSet<&'a str>>,
}

/// A value as it is quoted in a message.
pub fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// Parses a JSON file that must hold one object.
pub fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, CheckpointError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(CheckpointError::file(file, format!("holds {}, not a JSON object", shown(&other)))),
        Err(error) => Err(CheckpointError::file(file, format!("is not valid JSON: {error}"))),
    }
}

impl<'a> Fields<'a> {
    pub fn new(file: &'a str, object: &'a Map<String, Value>) -> Self {
        Fields { file, prefix: String::new(), object, read: RefCell::default() }
    }
    /// The error for `key`.
    pub fn error(&self, key: &str, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::Key {
            file: self.file.to_string(),
            key: format!("{}{key}", self.prefix),
            reason: reason.into(),
        }
    }
    /// The value of `key`, or None when it is absent or null.
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        let (key, value) = self.object.get_key_value(key)?;
        self.read.borrow_mut().insert(key);
        (!value.is_null()).then_some(value)
    }
    /// Whether `key` is there, be it null.
    pub fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }
    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match convert(value) {
                Some(typed) => Ok(Some(typed)),
                None => Err(self.error(key, format!("is {}, expected {expected}", shown(value)))),
            },
        }
    }
    pub fn integer(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        self.typed(key, "an integer from 0", |value| {
            value.as_u64().and_then(|n| u32::try_from(n).ok()).map(|n| n as usize)
        })
    }
    pub fn number(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.typed(key, "a finite number", |value| value.as_f64().filter(|n| n.is_finite()))
    }
    pub fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(key, "true or false", Value::as_bool)
    }
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.typed(key, "a string", Value::as_str)
    }
    pub fn list(&self, key: &str) -> Result<Option<&'a Vec<Value>>, CheckpointError> {
        self.typed(key, "a list", Value::as_array)
    }
    pub fn object(&self, key: &str) -> Result<Option<Fields<'a>>, CheckpointError> {
        let object = self.typed(key, "an object", Value::as_object)?;
        Ok(object.map(|object| Fields {
            file: self.file,
            prefix: format!("{}{key}.", self.prefix),
            object,
            read: RefCell::default(),
        }))
    }
    /// A positive integer that has no default.
    pub fn size(&self, key: &str) -> Result<usize, CheckpointError> {
        self.size_up_to(key, SIZE_MAX)
    }
    /// The same, at most `max`.
    pub fn size_up_to(&self, key: &str, max: usize) -> Result<usize, CheckpointError> {
        match self.integer(key)? {
            None => Err(self.error(key, "is missing")),
            Some(n) if (1..=max).contains(&n) => Ok(n),
            Some(n) => Err(self.error(key, format!("is {n}, expected 1 to {max}"))),
        }
    }
    /// A number above 0; `default` when absent.
    pub fn positive(&self, key: &str, default: f64) -> Result<f64, CheckpointError> {
        match self.number(key)? {
            None => Ok(default),
            Some(n) if n > 0.0 => Ok(n),
            Some(n) => Err(self.error(key, format!("is {n}, expected more than 0"))),
        }
    }
    /// Refuses `key` unless it is absent, null, or one of `allowed`.
    pub fn only(&self, key: &str, allowed: &[Value]) -> Result<(), CheckpointError> {
        match self.value(key) {
            Some(value) if !allowed.contains(value) => {
                let allowed: Vec<String> = allowed.iter().map(Value::to_string).collect();
                let allowed = if allowed.is_empty() { "leaving it out".to_string() } else { allowed.join(" or ") };
                Err(self.error(key, format!("{} is not implemented (only {allowed} is)", shown(value))))
            }
            _ => Ok(()),
        }
    }
    /// Refuses the first key that nobody read, unless its value is null, false or empty, or it is known to be `harmless`.
    pub fn finish(&self, harmless: impl Fn(&str) -> bool) -> Result<(), CheckpointError> {
        let read = self.read.borrow();
        for (key, value) in self.object {
            let says_nothing = match value {
                Value::Null | Value::Bool(false) => true,
                Value::Array(items) => items.is_empty(),
                Value::Object(items) => items.is_empty(),
                _ => false,
            };
            if !read.contains(key.as_str()) && !says_nothing && !harmless(key) {
                let reason = format!("{} is not known here and may change the computation", shown(value));
                return Err(self.error(key, reason));
            }
        }
        Ok(())
    }
}
