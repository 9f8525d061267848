//! Stop strings across tokens: text is held back while it may still become one.
//!
//! One `StopMatcher` a choice, fed by `answer` with detokenized text. The stop string that completes first wins (of two that complete at the
//! same character, the longer), so the answer does not depend on how text is cut into tokens. **Invariant:** released text is always a
//! prefix of the final text.

/// Looks for stop strings in a growing text.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    include: bool,
    /// Text not released yet: the longest suffix that may begin a stop string.
    held: String,
}

/// What a piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matched {
    /// No stop string is complete.
    No,
    /// One is: the text ends here.
    Yes,
}

impl StopMatcher {
    /// `include`: the stop string itself is released too.
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        StopMatcher { stops, include, held: String::new() }
    }

    /// Takes new text; appends to `out` what is safe to release. While `armed` is false (below min_tokens) no stop string can complete.
    pub fn push(&mut self, text: &str, armed: bool, out: &mut String) -> Matched {
        if self.stops.is_empty() {
            out.push_str(text);
            return Matched::No;
        }
        let fresh = self.held.len();
        self.held.push_str(text);
        if armed && let Some((start, end)) = self.first_match(fresh) {
            out.push_str(&self.held[..if self.include { end } else { start }]);
            self.held.clear();
            return Matched::Yes;
        }
        let release = self.held.len() - self.undecided();
        out.push_str(&self.held[..release]);
        self.held.drain(..release);
        Matched::No
    }

    /// No more text comes: what was held is text after all.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// The occurrence that ends first, and after byte `fresh` (earlier ends were looked at before, or came before min_tokens).
    fn first_match(&self, fresh: usize) -> Option<(usize, usize)> {
        self.stops
            .iter()
            .filter_map(|stop| {
                let from = (fresh + 1).saturating_sub(stop.len());
                (from..self.held.len())
                    .filter(|at| self.held.is_char_boundary(*at))
                    .find(|at| at + stop.len() > fresh && self.held[*at..].starts_with(stop.as_str()))
                    .map(|at| (at, at + stop.len()))
            })
            .min_by_key(|(start, end)| (*end, *start))
    }

    /// Bytes at the end that may begin a stop string.
    fn undecided(&self) -> usize {
        self.stops
            .iter()
            .flat_map(|stop| {
                stop.char_indices().skip(1).map(|(at, _)| at).filter(|at| self.held.ends_with(&stop[..*at]))
            })
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|stop| stop.to_string()).collect(), false);
        let mut out = String::new();
        for piece in pieces {
            if matcher.push(piece, true, &mut out) == Matched::Yes {
                return (out, true);
            }
        }
        matcher.finish(&mut out);
        (out, false)
    }

    #[test]
    fn every_cut_gives_the_same_answer() {
        let text = "one, two; éthree, two!";
        for stops in [&["o; é"][..], &["wo", "two; é"], &["three, two!"], &["zzz"], &[", two!", "hree"]] {
            let whole: Vec<String> = text.chars().map(String::from).collect();
            let expected = run(stops, &whole.iter().map(String::as_str).collect::<Vec<_>>());
            for size in 1..8 {
                let chars: Vec<char> = text.chars().collect();
                let pieces: Vec<String> = chars.chunks(size).map(|chunk| chunk.iter().collect()).collect();
                assert_eq!(
                    run(stops, &pieces.iter().map(String::as_str).collect::<Vec<_>>()),
                    expected,
                    "{stops:?} {size}"
                );
            }
        }
    }

    #[test]
    fn held_text_is_a_prefix_and_is_not_lost() {
        assert_eq!(run(&["abcd"], &["xab", "c"]), ("xabc".into(), false));
        assert_eq!(run(&["abcd"], &["xab", "cd tail"]), ("x".into(), true));
        assert_eq!(run(&["aab"], &["aa", "ab"]), ("a".into(), true));
    }

    #[test]
    fn nothing_completes_below_min_tokens() {
        let mut matcher = StopMatcher::new(vec!["ab".into()], false);
        let mut out = String::new();
        assert_eq!(matcher.push("ab", false, &mut out), Matched::No);
        assert_eq!(matcher.push("xab", true, &mut out), Matched::Yes);
        assert_eq!(out, "abx");
        let mut matcher = StopMatcher::new(vec!["ab".into()], true);
        let mut out = String::new();
        assert_eq!(matcher.push("a", false, &mut out), Matched::No);
        assert_eq!(matcher.push("b!", true, &mut out), Matched::Yes);
        assert_eq!(out, "ab");
    }
}
