//! Slices of a JSON text: the members of an object, the elements of an array, what kind a value is.
//!
//! Used by `api` and `request` to look at a body without building a tree of it, so that memory stays within a small multiple of the body
//! and depth costs no stack. **Invariant:** every function here is given text that `check` accepted; it never recurses.

use std::borrow::Cow;

/// What a JSON value is, by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Null,
    Boolean,
    Number,
    String,
    Array,
    Object,
}

impl Kind {
    pub fn of(raw: &str) -> Kind {
        match raw.as_bytes().first() {
            Some(b'n') => Kind::Null,
            Some(b't' | b'f') => Kind::Boolean,
            Some(b'"') => Kind::String,
            Some(b'[') => Kind::Array,
            Some(b'{') => Kind::Object,
            _ => Kind::Number,
        }
    }
    pub fn name(self) -> &'static str {
        match self {
            Kind::Null => "null",
            Kind::Boolean => "a boolean",
            Kind::Number => "a number",
            Kind::String => "a string",
            Kind::Array => "an array",
            Kind::Object => "an object",
        }
    }
}

/// Checks that `text` is one JSON value and nothing else; returns it without the blanks around it. Depth is not limited: nothing recurses.
pub fn check(text: &str) -> Result<&str, serde_json::Error> {
    serde_json::from_str::<serde::de::IgnoredAny>(text)?;
    Ok(text.trim_matches(is_blank))
}

/// A string value; an error for escapes that are not Unicode (lone surrogates).
pub fn string(raw: &str) -> Result<String, serde_json::Error> {
    serde_json::from_str(raw)
}

/// The elements of a checked array.
pub fn elements(array: &str) -> Elements<'_> {
    Elements { rest: inside(array) }
}

/// The members of a checked object: key (decoded where it has escapes) and value.
pub fn members(object: &str) -> Members<'_> {
    Members { rest: inside(object) }
}

pub struct Elements<'a> {
    rest: &'a str,
}

pub struct Members<'a> {
    rest: &'a str,
}

impl<'a> Iterator for Elements<'a> {
    type Item = &'a str;
    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (value, rest) = split(self.rest, b',');
        self.rest = rest;
        Some(value)
    }
}

impl<'a> Iterator for Members<'a> {
    type Item = (Cow<'a, str>, &'a str);
    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let (key, rest) = split(self.rest, b':');
        let (value, rest) = split(rest, b',');
        self.rest = rest;
        let bare = key.get(1..key.len().saturating_sub(1)).unwrap_or_default();
        let key = match bare.contains('\\') {
            false => Cow::Borrowed(bare),
            true => Cow::Owned(string(key).unwrap_or_else(|_| bare.to_owned())),
        };
        Some((key, value))
    }
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

/// The text between the brackets.
fn inside(value: &str) -> &str {
    value.get(1..value.len().saturating_sub(1)).unwrap_or_default().trim_matches(is_blank)
}

/// The value in front of the next `separator` at this depth, and what follows it.
fn split(text: &str, separator: u8) -> (&str, &str) {
    let bytes = text.as_bytes();
    let mut depth = 0usize;
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = string_end(bytes, at),
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            byte if byte == separator && depth == 0 => {
                return (text[..at].trim_matches(is_blank), text[at + 1..].trim_matches(is_blank));
            }
            _ => {}
        }
        at += 1;
    }
    (text.trim_matches(is_blank), "")
}

/// Index of the quote that closes the string opened at `open`.
fn string_end(bytes: &[u8], open: usize) -> usize {
    let mut at = open + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_and_elements_are_found() {
        let text = check(" {\"a\" : [1, \"]\\\"\", {\"b\":2}] , \"\\u0063\":\"x,y\"}\n").unwrap();
        let found: Vec<_> = members(text).collect();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].0, "a");
        assert_eq!(elements(found[0].1).collect::<Vec<_>>(), ["1", "\"]\\\"\"", "{\"b\":2}"]);
        assert_eq!(found[1], (Cow::Borrowed("c"), "\"x,y\""));
        assert_eq!(elements("[]").count(), 0);
        assert_eq!(members("{ }").count(), 0);
    }

    #[test]
    fn depth_costs_no_stack() {
        let deep = format!("{{\"zzz\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let text = check(&deep).unwrap();
        let (key, value) = members(text).next().unwrap();
        assert_eq!((key.as_ref(), value.len()), ("zzz", 200_000));
    }

    #[test]
    fn text_that_is_not_one_value_is_refused() {
        for text in ["", "{", "{} x", "{\"a\":NaN}", "{\"a\":1,}", "[1 2]", "nul"] {
            assert!(check(text).is_err(), "{text}");
        }
    }
}
