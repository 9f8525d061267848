//! The checkpoint's tokenizer: text to ids, ids to text, and what each id is in bytes.
//!
//! Loaded once at start from `tokenizer.json`; shared by every request. **Invariant:** decoding equals Hugging Face's
//! `decode(ids, skip_special_tokens)` without its optional clean-up of blanks.

use std::collections::HashMap;
use tokenizers::DecoderWrapper;

/// Why a tokenizer cannot be used, or a text not encoded.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {reason}")]
pub struct TokenizerError {
    pub file: &'static str,
    pub reason: String,
}

pub struct Tokenizer {
    /// None for a stand-in.
    inner: Option<tokenizers::Tokenizer>,
    /// Ids that Hugging Face leaves out of text when it skips special tokens.
    special: Vec<bool>,
    /// Bytes of each id when the decoder is byte-level: then text is these bytes joined, read as UTF-8.
    bytes: Option<Vec<Vec<u8>>>,
    /// Most bytes of text that one token can stand for, or None when the tokenizer may shorten text before it splits it.
    longest: Option<usize>,
}

impl Tokenizer {
    /// Parses a `tokenizer.json`.
    pub fn parse(json: &[u8]) -> Result<Tokenizer, TokenizerError> {
        let refuse = |reason: String| TokenizerError { file: "tokenizer.json", reason };
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| refuse(error.to_string()))?;
        // A request's length is its own affair: neither cut nor filled up.
        inner.with_truncation(None).map_err(|error| refuse(error.to_string()))?;
        inner.with_padding(None);
        let ids = inner.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
        let mut special = vec![false; ids];
        for (id, token) in inner.get_added_tokens_decoder() {
            if let Some(slot) = special.get_mut(id as usize) {
                *slot = token.special;
            }
        }
        let bytes = is_byte_level(inner.get_decoder()).then(|| {
            let alphabet = byte_alphabet();
            (0..ids).map(|id| token_bytes(inner.id_to_token(id as u32), &alphabet)).collect::<Vec<_>>()
        });
        let longest = bytes
            .as_ref()
            .filter(|_| inner.get_normalizer().is_none())
            .map(|bytes| bytes.iter().map(Vec::len).max().unwrap_or(1).max(1));
        Ok(Tokenizer { inner: Some(inner), special, bytes, longest })
    }

    /// A stand-in for a model without a tokenizer: ids below 256 are bytes, the others are printable characters.
    pub fn bytes_only(vocab: usize) -> Tokenizer {
        let spelled = |id: usize| vec![if id < 256 { id as u8 } else { b' ' + (id % 95) as u8 }];
        let bytes = Some((0..vocab).map(spelled).collect());
        Tokenizer { inner: None, special: vec![false; vocab], bytes, longest: Some(1) }
    }

    /// Ids of a text. `add_special` is what Hugging Face does by default: BOS and the like, as the tokenizer is configured.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let Some(inner) = &self.inner else { return Ok(text.bytes().map(u32::from).collect()) };
        match inner.encode_fast(text, add_special) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(TokenizerError { file: "tokenizer.json", reason: error.to_string() }),
        }
    }
    /// A number of tokens that `text` cannot be shorter than: lets absurd prompts be refused without encoding them.
    pub fn tokens_at_least(&self, text: &str) -> usize {
        self.longest.map_or(0, |longest| text.len() / longest)
    }
    /// Text of a complete list of ids.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        match &self.bytes {
            Some(_) => {
                let bytes: Vec<u8> = ids
                    .iter()
                    .filter(|id| !(skip_special && self.is_special(**id)))
                    .flat_map(|id| self.bytes(*id))
                    .copied()
                    .collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            None => self.library(ids, skip_special),
        }
    }
    /// Whether text is the ids' bytes joined.
    pub fn is_byte_level(&self) -> bool {
        self.bytes.is_some()
    }
    /// Bytes of one id in a byte-level vocabulary; empty for ids without a token.
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.bytes.as_ref().and_then(|bytes| bytes.get(id as usize)).map_or(&[], Vec::as_slice)
    }
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
    /// The bytes that an id adds to text: in a vocabulary of pieces, its piece with `▁` as a blank and `<0x0A>` as that byte.
    pub fn alone(&self, id: u32) -> Vec<u8> {
        if self.bytes.is_some() {
            return self.bytes(id).to_vec();
        }
        let piece = self.piece(id).unwrap_or_default();
        let byte = piece.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => vec![byte],
            None => piece.replace('▁', " ").into_bytes(),
        }
    }
    /// The token as the vocabulary spells it.
    pub fn piece(&self, id: u32) -> Option<String> {
        self.inner.as_ref()?.id_to_token(id)
    }
    fn library(&self, ids: &[u32], skip_special: bool) -> String {
        self.inner.as_ref().and_then(|inner| inner.decode(ids, skip_special).ok()).unwrap_or_default()
    }
}

fn is_byte_level(decoder: Option<&DecoderWrapper>) -> bool {
    match decoder {
        Some(DecoderWrapper::ByteLevel(_)) => true,
        Some(DecoderWrapper::Sequence(list)) => {
            matches!(list.get_decoders(), [DecoderWrapper::ByteLevel(_)])
        }
        _ => false,
    }
}

/// A token's bytes: each character of the byte alphabet is a byte; a token with any other character stands for its own text.
fn token_bytes(token: Option<String>, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let Some(token) = token else { return Vec::new() };
    match token.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Vec<u8>>>() {
        Some(bytes) => bytes,
        None => token.into_bytes(),
    }
}

/// The byte-level alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100u32;
    (0..=255u8)
        .map(|byte| {
            let c = match printable(byte) {
                true => char::from(byte),
                false => {
                    next += 1;
                    char::from_u32(next - 1).expect("U+0100 to U+0143 are characters")
                }
            };
            (c, byte)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> Tokenizer {
        Tokenizer::parse(include_bytes!("../../tests/models/shakespeare-dsv2/tokenizer.json")).unwrap()
    }

    #[test]
    fn the_fast_decoder_equals_the_librarys() {
        let tokenizer = demo();
        let mut state = 7u32;
        for length in 0..200 {
            let ids: Vec<u32> = (0..length)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 8) % 2100
                })
                .collect();
            for skip in [true, false] {
                assert_eq!(tokenizer.decode(&ids, skip), tokenizer.library(&ids, skip));
            }
        }
    }

    #[test]
    fn bos_is_added_as_the_tokenizer_says() {
        let tokenizer = demo();
        assert_eq!(tokenizer.encode("Hello", true).unwrap(), [0, 42, 422, 81]);
        assert_eq!(tokenizer.encode("Hello", false).unwrap(), [42, 422, 81]);
        assert_eq!(tokenizer.encode("", true).unwrap(), [0]);
    }

    #[test]
    fn the_lower_bound_holds() {
        let tokenizer = demo();
        for text in ["", "a", "Hello there, good Horatio", &" ".repeat(500), "日本語 🙂"] {
            assert!(tokenizer.tokens_at_least(text) <= tokenizer.encode(text, false).unwrap().len(), "{text}");
        }
    }
}
