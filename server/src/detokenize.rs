//! Ids to text while they arrive: a character appears when its last byte has, and never as a replacement mark before that.
//!
//! One `Detokenizer` a choice, fed by `answer`. **Invariant:** all text returned by `push` and `finish`, joined, equals decoding all ids at
//! once (with a decoder that is not byte-level: as long as it does not decode what was shown before in another way; text never stops
//! coming, and the work for an id is bounded).

use crate::tokenizer::Tokenizer;

/// State of one growing text.
#[derive(Debug)]
pub struct Detokenizer {
    skip_special: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Byte-level vocabulary: the bytes of a character that is not complete yet.
    Bytes(Vec<u8>),
    /// Any other decoder: ids from `shown_from` on give the context, ids from `pending_from` on are not in the text yet.
    Window { ids: Vec<u32>, pending_from: usize },
}

/// Ids of context that the window keeps in front of pending ids: enough for decoders that look at their neighbour.
const CONTEXT_IDS: usize = 6;
/// Ids that the window holds back for a character that is not complete: one more than its most bytes. Past it, the bytes are no character.
const PENDING_IDS_MAX: usize = 5;

impl Detokenizer {
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let state = match tokenizer.is_byte_level() {
            true => State::Bytes(Vec::new()),
            false => State::Window { ids: Vec::new(), pending_from: 0 },
        };
        Detokenizer { skip_special, state }
    }

    /// Appends to `text` what `id` completes.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        match &mut self.state {
            State::Bytes(tail) => {
                if !(self.skip_special && tokenizer.is_special(id)) {
                    tail.extend_from_slice(tokenizer.bytes(id));
                    take_complete(tail, text);
                }
            }
            State::Window { ids, pending_from } => {
                ids.push(id);
                let before = tokenizer.decode(&ids[..*pending_from], self.skip_special);
                let after = tokenizer.decode(ids, self.skip_special);
                if after.ends_with('\u{fffd}') && ids.len() - *pending_from < PENDING_IDS_MAX {
                    return;
                }
                text.push_str(past_common(&before, &after));
                let keep = ids.len().saturating_sub(CONTEXT_IDS).min(*pending_from);
                ids.drain(..keep);
                *pending_from = ids.len();
            }
        }
    }

    /// Appends what is left: an incomplete character is one U+FFFD, as in decoding all at once.
    pub fn finish(&mut self, tokenizer: &Tokenizer, text: &mut String) {
        match &mut self.state {
            State::Bytes(tail) => {
                text.push_str(&String::from_utf8_lossy(tail));
                tail.clear();
            }
            State::Window { ids, pending_from } => {
                let before = tokenizer.decode(&ids[..*pending_from], self.skip_special);
                let after = tokenizer.decode(ids, self.skip_special);
                text.push_str(past_common(&before, &after));
                *pending_from = ids.len();
            }
        }
    }
}

/// What `after` has behind the start that it shares with `before`: new text, also where the library decodes context that was shown before in
/// another way (a run of bytes that another byte makes invalid).
fn past_common<'a>(before: &str, after: &'a str) -> &'a str {
    let same = before.chars().zip(after.chars()).take_while(|(old, new)| old == new);
    &after[same.map(|(old, _)| old.len_utf8()).sum::<usize>()..]
}

/// Moves every complete character (and every sequence that can never become one, as U+FFFD) from `tail` to `text`.
fn take_complete(tail: &mut Vec<u8>, text: &mut String) {
    let mut done = 0;
    loop {
        match std::str::from_utf8(&tail[done..]) {
            Ok(rest) => {
                text.push_str(rest);
                done = tail.len();
                break;
            }
            Err(error) => {
                let valid = done + error.valid_up_to();
                text.push_str(std::str::from_utf8(&tail[done..valid]).expect("valid_up_to ends valid UTF-8"));
                done = valid;
                let Some(bad) = error.error_len() else { break };
                text.push('\u{fffd}');
                done += bad;
            }
        }
    }
    tail.drain(..done);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> Tokenizer {
        Tokenizer::parse(include_bytes!("../../tests/models/shakespeare-dsv2/tokenizer.json")).unwrap()
    }

    #[test]
    fn joined_pieces_equal_decoding_at_once() {
        let tokenizer = demo();
        let mut state = 3u32;
        for round in 0..300 {
            // Mostly single-byte tokens, so that characters split and break in every way.
            let ids: Vec<u32> = (0..round % 40)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let draw = state >> 8;
                    if draw.is_multiple_of(4) { draw % 2048 } else { draw % 260 }
                })
                .collect();
            let mut detokenizer = Detokenizer::new(&tokenizer, true);
            let mut text = String::new();
            for id in &ids {
                detokenizer.push(&tokenizer, *id, &mut text);
            }
            detokenizer.finish(&tokenizer, &mut text);
            assert_eq!(text, tokenizer.decode(&ids, true));
        }
    }

    #[test]
    fn a_split_character_waits_for_its_last_byte() {
        let tokenizer = demo();
        let ids = tokenizer.encode("é👨‍👩‍👧‍👦한", false).unwrap();
        let mut detokenizer = Detokenizer::new(&tokenizer, true);
        let mut text = String::new();
        for id in &ids {
            detokenizer.push(&tokenizer, *id, &mut text);
            assert!(!text.contains('\u{fffd}'), "{text}");
        }
        assert_eq!(text, "é👨‍👩‍👧‍👦한");
        let mut cut = Detokenizer::new(&tokenizer, true);
        let mut text = String::new();
        cut.push(&tokenizer, ids[0], &mut text);
        assert_eq!(text, "");
        cut.finish(&tokenizer, &mut text);
        assert_eq!(text, "\u{fffd}");
    }

    /// A tokenizer of pieces with byte fallback, as SentencePiece models have.
    fn pieces() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        for (id, piece) in ["<unk>", "▁a", "b", "▁"].into_iter().enumerate() {
            vocab.insert(piece.into(), id.into());
        }
        (0..256).for_each(|byte| drop(vocab.insert(format!("<0x{byte:02X}>"), (4 + byte).into())));
        let json = serde_json::json!({
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "unk_token": "<unk>"},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            ]},
        });
        Tokenizer::parse(json.to_string().as_bytes()).unwrap()
    }

    /// The text after each id, and at the end.
    fn grown(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer, true);
        let mut text = String::new();
        let mut seen: Vec<String> = ids
            .iter()
            .map(|id| {
                detokenizer.push(tokenizer, *id, &mut text);
                text.clone()
            })
            .collect();
        detokenizer.finish(tokenizer, &mut text);
        seen.push(text);
        seen
    }

    #[test]
    fn pieces_with_byte_fallback_wait_for_a_character_too() {
        let tokenizer = pieces();
        let byte = |byte: u32| 4 + byte;
        let seen = grown(&tokenizer, &[1, byte(0xc3), byte(0xa9), 2]);
        assert_eq!(seen, [" a", " a", " aé", " aéb", " aéb"]);
    }

    #[test]
    fn bytes_that_are_no_text_do_not_hold_the_text_back() {
        let tokenizer = pieces();
        let byte = |byte: u32| 4 + byte;
        // A byte that makes the run in front of it invalid, and a run that never ends.
        let spoiled = grown(&tokenizer, &[1, byte(0xc3), byte(0xa9), byte(0x80), 2, 1]);
        assert!(spoiled[5].ends_with("b a"), "{spoiled:?}");
        let mut ids = vec![byte(0x80); 200];
        ids.extend([1, 2]);
        let endless = grown(&tokenizer, &ids);
        assert!(!endless[20].is_empty() && endless[201].ends_with(" ab"), "{endless:?}");
    }
}
