//! Seeded mutations: bytes that look enough like a corpus's inputs to get past the first check.
//!
//! **Invariant:** an input depends on the seed, its number and the corpus alone.

/// Longest input that mutations make.
const BYTES_MAX: usize = 16 << 10;

/// What parsers treat specially.
const WORDS: [&[u8]; 58] = [
    b"null",
    b"true",
    b"false",
    b"0",
    b"-1",
    b"1",
    b"-0",
    b"1e400",
    b"1e-400",
    b"0.5",
    b"2.01",
    b"NaN",
    b"9223372036854775807",
    b"9223372036854775808",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"4294967296",
    b"2147483648",
    b"[]",
    b"{}",
    b"\"\"",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b"\"",
    b"\\",
    b"\\u0000",
    b"\\ud83d",
    b"\\udc00\\ud800",
    b"\\ud83d\\ude00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xf0\x9f\x98\x80",
    b"\xe2\x80\xa8",
    b"\x00",
    b"\n",
    b"model",
    b"prompt",
    b"messages",
    b"role",
    b"content",
    b"max_tokens",
    b"stop",
    b"logit_bias",
    b"stream_options",
    b"chat_template_kwargs",
    b"dtype",
    b"shape",
    b"data_offsets",
    b"rope_scaling",
    b"{{",
    b"}}",
    b"{%",
    b"%}",
    b"%2F",
];

/// SplitMix64.
pub struct Draws(u64);

impl Draws {
    pub fn new(seed: u64) -> Draws {
        Draws(seed)
    }
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    /// Below `bound`; 0 if that is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.draw() % bound as u64) as usize }
    }
}

/// Input `number` of the run that `seed` begins.
pub fn input(corpus: &[Vec<u8>], seed: u64, number: u64) -> Vec<u8> {
    let mut draws = Draws::new(seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
    let mut bytes = corpus.get(draws.below(corpus.len())).cloned().unwrap_or_default();
    for _ in 0..=draws.below(6) {
        change(&mut bytes, corpus, &mut draws);
    }
    bytes.truncate(BYTES_MAX);
    bytes
}

fn change(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], draws: &mut Draws) {
    let at = draws.below(bytes.len() + 1);
    let length = draws.below(bytes.len() - at + 1).min(1 + draws.below(64));
    match draws.below(9) {
        0 if !bytes.is_empty() => {
            let at = at.min(bytes.len() - 1);
            bytes[at] ^= 1 << draws.below(8);
        }
        1 => drop(bytes.drain(at..at + length)),
        2 => {
            let copied = bytes[at..at + length].to_vec();
            let most = if draws.below(20) == 0 { 400 } else { 3 };
            let times = 1 + draws.below(most);
            insert(bytes, at, &copied.repeat(times));
        }
        3 | 4 => insert(bytes, at, WORDS[draws.below(WORDS.len())]),
        5 => replace_number(bytes, at, draws),
        6 => replace_value(bytes, at, draws),
        7 => {
            let other = &corpus[draws.below(corpus.len())];
            let from = draws.below(other.len() + 1);
            let length = draws.below(other.len() - from + 1).min(200);
            insert(bytes, at, &other[from..from + length]);
        }
        _ => bytes.truncate(at),
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, new: &[u8]) {
    if bytes.len() + new.len() <= BYTES_MAX {
        bytes.splice(at..at, new.iter().copied());
    }
}

/// Puts a word in the place of the number that follows `from`.
fn replace_number(bytes: &mut Vec<u8>, from: usize, draws: &mut Draws) {
    let digit = |byte: &u8| byte.is_ascii_digit();
    let Some(start) = bytes[from..].iter().position(digit).map(|offset| from + offset) else { return };
    let end = bytes[start..].iter().position(|byte| !digit(byte)).map_or(bytes.len(), |offset| start + offset);
    let number = draws.draw() >> draws.below(64);
    let text = number.to_string();
    let new = if draws.below(2) == 0 { text.as_bytes() } else { WORDS[draws.below(20)] };
    bytes.splice(start..end, new.iter().copied());
}

/// Puts a word in the place of the JSON value that follows the colon after `from`, up to the next comma or bracket.
fn replace_value(bytes: &mut Vec<u8>, from: usize, draws: &mut Draws) {
    let Some(colon) = bytes[from..].iter().position(|byte| *byte == b':').map(|offset| from + offset + 1) else {
        return;
    };
    let ends = |byte: &u8| matches!(byte, b',' | b'}' | b']');
    let end = bytes[colon..].iter().position(ends).map_or(bytes.len(), |offset| colon + offset);
    bytes.splice(colon..end, WORDS[draws.below(36)].iter().copied());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_depend_on_seed_and_number_alone() {
        let corpus = [b"{\"a\": 12}".to_vec(), b"xyz".to_vec()];
        let all: Vec<Vec<u8>> = (0..200).map(|number| input(&corpus, 7, number)).collect();
        assert_eq!(all, (0..200).map(|number| input(&corpus, 7, number)).collect::<Vec<_>>());
        assert_ne!(all, (0..200).map(|number| input(&corpus, 8, number)).collect::<Vec<_>>());
        assert!(all.iter().collect::<std::collections::HashSet<_>>().len() > 100);
    }
}
