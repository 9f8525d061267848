//! Which row counts get a plan, and which plan a step runs in.
//!
//! Used by the configuration (lists) and the scheduler (choice). **Invariant:** lists ascend without repeats; a step runs in
//! the smallest bucket that holds its rows, whatever they are.

/// Powers of two up to the smallest that holds every seat.
pub fn decode_buckets(slots_max: usize) -> Vec<usize> {
    powers_up_to(slots_max).collect()
}

/// `decode` and, beyond it, the powers of two that mixed steps need, up to the smallest that holds every seat and a whole
/// prefill chunk.
pub fn all_buckets(decode: &[usize], slots_max: usize, prefill_chunk: usize) -> Vec<usize> {
    let largest = decode.last().copied().unwrap_or(0);
    let rows_max = slots_max + prefill_chunk;
    let beyond = powers_up_to(rows_max).filter(|&bucket| bucket > largest && largest < rows_max);
    decode.iter().copied().chain(beyond).collect()
}

/// The smallest bucket of at least `rows` rows.
pub fn smallest(buckets: &[usize], rows: usize) -> Option<usize> {
    buckets.get(buckets.partition_point(|&bucket| bucket < rows)).copied()
}

fn powers_up_to(count: usize) -> impl Iterator<Item = usize> {
    let last = count.max(1).next_power_of_two();
    (0..=last.trailing_zeros()).map(|power| 1 << power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_cover_every_seat_and_then_a_prefill_chunk() {
        assert_eq!(decode_buckets(16), [1, 2, 4, 8, 16]);
        assert_eq!(decode_buckets(17), [1, 2, 4, 8, 16, 32]);
        assert_eq!(decode_buckets(1), [1]);
        assert_eq!(all_buckets(&decode_buckets(16), 16, 64), [1, 2, 4, 8, 16, 32, 64, 128]);
        assert_eq!(all_buckets(&decode_buckets(128), 128, 512), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
    }

    #[test]
    fn a_list_of_ones_own_is_kept() {
        assert_eq!(all_buckets(&[1, 3, 24], 24, 64), [1, 3, 24, 32, 64, 128]);
        assert_eq!(all_buckets(&[4, 200], 16, 64), [4, 200]);
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
