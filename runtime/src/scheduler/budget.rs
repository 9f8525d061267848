//! How many prefill rows a step takes, and which bucket it runs in. Pure decisions.

use slotgraph_graphs::bucket;
use std::time::Duration;

/// The smallest bucket with at least `rows` rows.
pub(crate) fn bucket_for(buckets: &[usize], rows: usize) -> usize {
    bucket::smallest(buckets, rows).expect("fill keeps the rows of a step within the largest bucket")
}

/// Prefill rows of a step with `decode` decode rows, when `available` wait and `budget` may ride: as many as may, or fewer when that fills
/// the next smaller bucket and costs at most half of them.
pub(crate) fn prefill_rows(buckets: &[usize], decode: usize, available: usize, budget: usize) -> usize {
    let rows_max = *buckets.last().expect("a configuration has at least one bucket");
    let most = budget.min(rows_max.saturating_sub(decode));
    if available <= most {
        return available;
    }
    let full = buckets.iter().rev().find(|&&bucket| bucket <= decode + most).map_or(0, |&b| b.saturating_sub(decode));
    if 2 * full >= most { full } else { most }
}

/// Keeps the gap between a stream's tokens under a target by changing the prefill rows a step: fewer at once when a gap was too long,
/// more step by step while it is not.
#[derive(Clone, Debug)]
pub(crate) struct PrefillBudget {
    chunk: usize,
    target: Option<Duration>,
    rows: usize,
}

/// A target never stops prefill altogether.
const ROWS_MIN: usize = 4;

impl PrefillBudget {
    pub fn new(chunk: usize, target: Option<Duration>) -> Self {
        PrefillBudget { chunk, target, rows: chunk }
    }
    /// Rows that may ride with `decode` decode rows.
    pub fn rows(&self, decode: usize) -> usize {
        if decode == 0 { self.chunk } else { self.rows }
    }
    /// A step with decode and `prefill` prefill rows settled `gap` after the one before.
    pub fn observe(&mut self, prefill: usize, gap: Duration) {
        let Some(target) = self.target else { return };
        if prefill == 0 {
            return;
        }
        if gap > target {
            self.rows = (prefill.min(self.rows) / 2).max(ROWS_MIN.min(self.chunk));
        } else if prefill >= self.rows {
            self.rows = (self.rows + self.rows / 8 + 1).min(self.chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUCKETS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

    #[test]
    fn a_step_takes_the_smallest_bucket_that_holds_its_rows() {
        assert_eq!(bucket_for(&BUCKETS, 1), 1);
        assert_eq!(bucket_for(&BUCKETS, 17), 32);
        assert_eq!(bucket_for(&BUCKETS, 128), 128);
    }

    #[test]
    fn prefill_rows_fill_a_bucket_when_that_costs_little() {
        // All that wait ride when they may.
        assert_eq!(prefill_rows(&BUCKETS, 1, 17, 64), 17);
        // 1 + 64 rows would pad 63; 1 + 63 pad none.
        assert_eq!(prefill_rows(&BUCKETS, 1, 500, 64), 63);
        assert_eq!(prefill_rows(&BUCKETS, 16, 500, 64), 48);
        // Filling 64 would leave 4 of 64 prefill rows: pad instead.
        assert_eq!(prefill_rows(&BUCKETS, 60, 500, 64), 64);
        // Never past the largest bucket.
        assert_eq!(prefill_rows(&BUCKETS, 100, 500, 64), 28);
        assert_eq!(prefill_rows(&BUCKETS, 128, 500, 64), 0);
        assert_eq!(prefill_rows(&[4], 0, 9, 64), 4);
    }

    #[test]
    fn the_budget_falls_at_once_and_rises_slowly() {
        let target = Duration::from_millis(10);
        let mut budget = PrefillBudget::new(64, Some(target));
        budget.observe(64, Duration::from_millis(11));
        assert_eq!((budget.rows(3), budget.rows(0)), (32, 64));
        budget.observe(32, Duration::from_millis(9));
        assert_eq!(budget.rows(3), 37);
        // A step that did not use the budget says nothing of a larger one.
        budget.observe(5, Duration::from_millis(1));
        assert_eq!(budget.rows(3), 37);
        for _ in 0..20 {
            budget.observe(64, Duration::from_millis(50));
        }
        assert_eq!(budget.rows(3), ROWS_MIN);
        let mut off = PrefillBudget::new(64, None);
        off.observe(64, Duration::from_secs(9));
        assert_eq!(off.rows(3), 64);
    }
}
