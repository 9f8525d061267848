//! Which row counts get a plan, and which plan a step runs in.
//!
//! Used by the configuration (lists) and the scheduler (choice). **Invariant:** lists ascend without repeats; a step runs in
//! the smallest bucket that holds its rows, whatever they are.

/// Most rows of a step.
pub const ROWS_MAX: usize = 2048;
/// The last bucket is a multiple of this (one tile of rows), or a power of two.
const ROWS_STEP: usize = 16;

/// Powers of two up to the smallest that holds every seat.
pub fn decode_buckets(slots_max: usize) -> Vec<usize> {
    let last = slots_max.next_power_of_two();
    (0..=last.trailing_zeros()).map(|power| 1 << power).collect()
}

/// `decode` and the buckets of mixed steps beyond it: powers of two, the last one trimmed to what a step can hold, which is
/// every seat and a whole prefill chunk.
pub fn with_prefill(decode: &[usize], slots_max: usize, prefill_chunk: usize) -> Vec<usize> {
    let widest = (slots_max + prefill_chunk).next_multiple_of(ROWS_STEP).min(ROWS_MAX);
    let mut buckets = decode.to_vec();
    while buckets.last().is_none_or(|&last| last < widest) {
        let last = buckets.last().copied().unwrap_or(0);
        buckets.push((last + 1).next_power_of_two().min(widest));
    }
    buckets
}

/// The smallest bucket of at least `rows` rows.
pub fn smallest(buckets: &[usize], rows: usize) -> Option<usize> {
    buckets.get(buckets.partition_point(|&bucket| bucket < rows)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults(slots_max: usize, prefill_chunk: usize) -> Vec<usize> {
        with_prefill(&decode_buckets(slots_max), slots_max, prefill_chunk)
    }

    #[test]
    fn defaults_cover_every_seat_and_then_a_prefill_chunk() {
        assert_eq!(decode_buckets(16), [1, 2, 4, 8, 16]);
        assert_eq!(decode_buckets(17), [1, 2, 4, 8, 16, 32]);
        assert_eq!(decode_buckets(1), [1]);
        assert_eq!(defaults(16, 64), [1, 2, 4, 8, 16, 32, 64, 80]);
        assert_eq!(defaults(128, 512), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 640]);
        assert_eq!(defaults(128, 2048).last(), Some(&ROWS_MAX));
    }

    #[test]
    fn a_list_of_ones_own_is_kept() {
        assert_eq!(with_prefill(&[1, 3, 24], 24, 64), [1, 3, 24, 32, 64, 96]);
        assert_eq!(with_prefill(&[4, 200], 16, 64), [4, 200]);
    }

    #[test]
    fn a_step_runs_in_the_smallest_bucket_that_holds_it() {
        let buckets = [1, 2, 4, 8];
        let chosen: Vec<_> = (0..=9).map(|rows| smallest(&buckets, rows)).collect();
        let expected = [1, 1, 2, 4, 4, 8, 8, 8, 8].map(Some);
        assert_eq!(chosen[..9], expected);
        assert_eq!(chosen[9], None);
    }
}
