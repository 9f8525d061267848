//! Weights as the CPU keeps them: GEMM panels, vectors, tables, and the computed rotary table.
//!
//! Built once, while a device prepares. **Invariant:** packing moves bits and never changes a value; the order in which a
//! GEMM sums is the contract's, not the layout's.

use crate::contract::{self, GemmKind};
use crate::math::bf16;
use crate::spec::{RopeTable, WeightForm, WeightSpec};

/// Output features of one panel: for each k their weights lie side by side, so that a vector of outputs advances along K
/// together and each keeps its own order.
pub const PANEL: usize = 16;

/// One weight.
#[derive(Clone, Debug, PartialEq)]
pub enum CpuWeight {
    Gemm(PackedGemm),
    Vector(Vec<f32>),
    /// bf16 bits, row-major.
    Table {
        cols: usize,
        bits: Vec<u16>,
    },
    Rope(RopeValues),
}

/// `groups` matrices in panels `[group][panel][k / 2][PANEL]`; a word holds the bf16 bits of two neighbouring k, the even one
/// below (half the bytes of f32, the same values, and one shift or one mask to widen).
#[derive(Clone, Debug, PartialEq)]
pub struct PackedGemm {
    pub kind: GemmKind,
    pub groups: usize,
    pub n: usize,
    pub k: usize,
    /// K slices, as the contract has them for this kind and shape.
    pub slices: usize,
    /// Panels of one group. Gate | up kinds start `up` on a panel of its own.
    pub panels: usize,
    pub pairs: Vec<u32>,
}

/// cos and sin by position and pair.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeValues {
    pub pairs: usize,
    /// `[positions][pairs][2]`: cos, sin.
    pub cos_sin: Vec<f32>,
}

impl CpuWeight {
    /// Packs a weight. `read(group, out)` fills one group's bf16 bits, row-major; it is not called for computed forms.
    pub fn from_bf16<E>(
        spec: &WeightSpec,
        mut read: impl FnMut(usize, &mut [u16]) -> Result<(), E>,
    ) -> Result<CpuWeight, E> {
        match &spec.form {
            &WeightForm::Gemm { kind, groups, n, k } => {
                let mut packed = PackedGemm::zeroed(kind, groups, n, k);
                let mut rows = vec![0; n * k];
                for group in 0..groups {
                    read(group, &mut rows)?;
                    packed.pack(group, &rows);
                }
                Ok(CpuWeight::Gemm(packed))
            }
            &WeightForm::Vector { n } => {
                let mut bits = vec![0; n];
                read(0, &mut bits)?;
                Ok(CpuWeight::Vector(bits.into_iter().map(bf16::to_f32).collect()))
            }
            &WeightForm::Table { rows, cols } => {
                let mut bits = vec![0; rows * cols];
                read(0, &mut bits)?;
                Ok(CpuWeight::Table { cols, bits })
            }
            WeightForm::Rope(table) => Ok(CpuWeight::Rope(RopeValues::new(table))),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        match self {
            CpuWeight::Gemm(packed) => 4 * packed.pairs.len(),
            CpuWeight::Vector(values) => 4 * values.len(),
            CpuWeight::Table { bits, .. } => 2 * bits.len(),
            CpuWeight::Rope(rope) => 4 * rope.cos_sin.len(),
        }
    }

    pub(crate) fn gemm(&self) -> &PackedGemm {
        match self {
            CpuWeight::Gemm(packed) => packed,
            _ => panic!("the op's shape check asks for a gemm here"),
        }
    }

    pub(crate) fn vector(&self) -> &[f32] {
        match self {
            CpuWeight::Vector(values) => values,
            _ => panic!("the op's shape check asks for a vector here"),
        }
    }

    /// Columns and bits.
    pub(crate) fn table(&self) -> (usize, &[u16]) {
        match self {
            CpuWeight::Table { cols, bits } => (*cols, bits),
            _ => panic!("the op's shape check asks for a table here"),
        }
    }

    pub(crate) fn rope(&self) -> &RopeValues {
        match self {
            CpuWeight::Rope(rope) => rope,
            _ => panic!("the op's shape check asks for a rope table here"),
        }
    }
}

impl PackedGemm {
    fn zeroed(kind: GemmKind, groups: usize, n: usize, k: usize) -> Self {
        let panels = if halves(kind) { 2 * (n / 2).div_ceil(PANEL) } else { n.div_ceil(PANEL) };
        let slices = contract::slices(kind, n, k);
        PackedGemm { kind, groups, n, k, slices, panels, pairs: vec![0; groups * panels * k.div_ceil(2) * PANEL] }
    }

    /// Words of one panel.
    fn panel_words(&self) -> usize {
        self.k.div_ceil(2) * PANEL
    }

    /// Places one group's row-major `[n, k]`.
    fn pack(&mut self, group: usize, rows: &[u16]) {
        let (half, words) = (self.n / 2, self.panel_words());
        for (row, values) in rows.chunks_exact(self.k).enumerate() {
            let feature = if halves(self.kind) && row >= half { row - half + self.panels / 2 * PANEL } else { row };
            let at = (group * self.panels + feature / PANEL) * words + feature % PANEL;
            for (word, pair) in self.pairs[at..].iter_mut().step_by(PANEL).zip(values.chunks(2)) {
                *word = u32::from(pair[0]) | u32::from(pair.get(1).copied().unwrap_or(0)) << 16;
            }
        }
    }

    /// One panel: `[k / 2][PANEL]`.
    pub(crate) fn panel(&self, group: usize, panel: usize) -> &[u32] {
        let words = self.panel_words();
        &self.pairs[(group * self.panels + panel) * words..][..words]
    }
}

/// Whether the weight is gate rows, then up rows.
fn halves(kind: GemmKind) -> bool {
    matches!(kind, GemmKind::GateUp | GemmKind::SharedGateUp | GemmKind::ExpertGateUp)
}

impl RopeValues {
    fn new(table: &RopeTable) -> Self {
        let scale = f32::from_bits(table.scale_bits);
        let mut cos_sin = Vec::with_capacity(table.positions * table.inv_freq_bits.len() * 2);
        for position in 0..table.positions {
            for &bits in &table.inv_freq_bits {
                let angle = position as f32 * f32::from_bits(bits);
                cos_sin.extend([libm::cosf(angle) * scale, libm::sinf(angle) * scale]);
            }
        }
        RopeValues { pairs: table.inv_freq_bits.len(), cos_sin }
    }

    pub(crate) fn positions(&self) -> usize {
        self.cos_sin.len() / (2 * self.pairs)
    }

    /// cos, sin of each pair at `position`.
    pub(crate) fn at(&self, position: usize) -> &[f32] {
        &self.cos_sin[position * self.pairs * 2..(position + 1) * self.pairs * 2]
    }
}
