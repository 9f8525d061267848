//! The launch that asks a packed weight for every sum twice, by mma.sync and by wgmma, and compares bits (`forms.cu`).
//!
//! Asked by a probe of a loaded model; never part of a step. **Invariant:** slices and their order are the contract's for the
//! weight's kind and shape, so what is compared is what steps compute.

use super::{Arg, GpuFacts, Kernel, Launch, define};
use crate::contract::{self, GemmKind, K_TILE, ROW_TILE};
use crate::pack::is_gate_up;
use crate::spec::WeightForm;

/// Words that the kernel counts in.
pub const FOUND_WORDS: usize = 4;

/// A width of wgmma, and how many of its columns hold a token: an odd number, so that the last group of eight is uneven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width {
    pub columns: usize,
    pub tokens: usize,
}

/// The narrowest form, and the one that takes whole tiles of 64 tokens.
pub const WIDTHS: [Width; 2] = [Width { columns: 8, tokens: 5 }, Width { columns: 64, tokens: 61 }];

/// A packed GEMM weight as the comparison sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compared {
    pub kind: GemmKind,
    groups: usize,
    n: usize,
    k_tiles: usize,
    slices: usize,
}

impl Compared {
    /// None for what is no GEMM.
    pub fn of(form: &WeightForm) -> Option<Compared> {
        let WeightForm::Gemm { kind, groups, n, k } = *form else { return None };
        Some(Compared { kind, groups, n, k_tiles: k.div_ceil(K_TILE), slices: contract::slices(kind, n, k) })
    }

    /// Sums that `tokens` tokens have.
    pub fn sums(&self, tokens: usize) -> u64 {
        (self.groups * self.n * tokens) as u64
    }

    /// Elements of one token's activations.
    pub fn row_elements(&self) -> usize {
        self.k_tiles * K_TILE
    }

    /// Whether the longest slice has two tiles, between which a chain can be cut.
    pub fn can_be_cut(&self) -> bool {
        self.k_tiles.div_ceil(self.slices) >= 2
    }

    /// The launch: counts into `Arg::Counters` (`FOUND_WORDS` u32, zero before) from the weight at `Arg::Packed` and the
    /// activations at `Arg::Staging`.
    pub fn launch(&self, width: Width) -> Launch {
        assert!((1..=width.columns).contains(&width.tokens), "a column holds at most one token");
        assert!(matches!(self.slices, 1 | 2 | 4 | 8), "the kernel's tree has three levels");
        let word = |value: usize| Arg::U32(u32::try_from(value).expect("a weight's extents fit 32 bits"));
        Launch {
            kernel: Kernel { source: "forms.cu", function: "forms", defines: vec![define("COLUMNS", width.columns)] },
            grid: [self.n.div_ceil(ROW_TILE).div_ceil(4) as u32, self.groups as u32, 1],
            block: 128,
            args: vec![
                Arg::Counters,
                Arg::Packed,
                Arg::Staging,
                word(self.n),
                word(self.k_tiles),
                word(self.slices),
                word(usize::from(is_gate_up(self.kind))),
                word(width.tokens),
            ],
            pdl: false,
            ..Launch::plain()
        }
    }
}

impl GpuFacts {
    /// Whether the target has wgmma, the second form.
    pub fn has_wgmma(&self) -> bool {
        self.arch == "sm_90a"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(kind: GemmKind, groups: usize, n: usize, k: usize) -> Compared {
        Compared::of(&WeightForm::Gemm { kind, groups, n, k }).unwrap()
    }

    #[test]
    fn blocks_cover_every_row_tile_of_every_group() {
        let wide = WIDTHS[1];
        let experts = compared(GemmKind::ExpertGateUp, 64, 2816, 2048);
        let launch = experts.launch(wide);
        assert_eq!((launch.grid, launch.block, launch.shared_bytes, launch.pdl), ([44, 64, 1], 128, 0, false));
        let scalars: Vec<Arg> = launch.args[3..].to_vec();
        assert_eq!(scalars, [2816, 128, 1, 1, 61].map(Arg::U32), "one slice, gate and up interleaved");
        assert_eq!(experts.sums(wide.tokens), 64 * 2816 * 61);

        // 20 rows are two tiles, the second padded; K of 40 is three tiles, the last without a partner.
        let odd = compared(GemmKind::AttnOut, 1, 20, 40);
        assert_eq!((odd.launch(wide).grid, odd.row_elements()), ([1, 1, 1], 48));
        assert_eq!(odd.launch(WIDTHS[0]).args[3..], [20, 3, 8, 0, 5].map(Arg::U32));
        assert!(!odd.can_be_cut() && compared(GemmKind::AttnOut, 1, 20, 144).can_be_cut());
        assert_eq!(Compared::of(&WeightForm::Vector { n: 4 }), None);
    }

    #[test]
    fn the_last_slice_is_the_longest() {
        for (k_tiles, slices) in [(3, 8), (9, 8), (16, 8), (128, 8), (684, 8), (5, 2), (7, 1)] {
            let last = contract::slice_tiles(slices - 1, slices, k_tiles).len();
            assert_eq!(last, k_tiles.div_ceil(slices), "that one is cut");
        }
    }

    #[test]
    fn widths_have_dead_columns_and_an_uneven_last_group() {
        for width in WIDTHS {
            assert!(width.tokens < width.columns && width.tokens % 8 != 0 && width.tokens % 2 == 1);
        }
    }
}
