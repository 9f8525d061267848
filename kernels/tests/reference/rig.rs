//! A few buffers and weights around one op: specs, seeded contents, and their f64 reading.

use slotgraph_kernels::contract::GemmKind;
use slotgraph_kernels::cpu::{CpuMemory, CpuWeight};
use slotgraph_kernels::spec::RopeTable;
use slotgraph_kernels::{BufferId, BufferSpec, DType, Precision, Role, Specs, WeightForm, WeightId, WeightSpec};
use std::sync::Arc;

/// Seeded numbers (SplitMix64).
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Roughly normal with standard deviation `scale`.
    pub fn float(&mut self, scale: f32) -> f32 {
        let sum: f64 = (0..4).map(|_| (self.next() >> 40) as f64 / (1 << 24) as f64).sum();
        ((sum - 2.0) * 1.732) as f32 * scale
    }

    pub fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.float(scale)).collect()
    }
}

/// The nearest bf16, ties to even.
pub fn bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

#[derive(Clone, Default)]
pub struct Net {
    pub rows: usize,
    pub logit_rows: usize,
    pub buffers: Vec<BufferSpec>,
    pub weights: Vec<WeightSpec>,
    /// bf16 bits of each weight, group after group.
    bits: Vec<Vec<u16>>,
    packed: Vec<Arc<CpuWeight>>,
}

impl Specs for Net {
    fn buffer(&self, id: BufferId) -> &BufferSpec {
        &self.buffers[id.0 as usize]
    }
    fn weight(&self, id: WeightId) -> &WeightSpec {
        &self.weights[id.0 as usize]
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn logit_rows(&self) -> usize {
        self.logit_rows
    }
}

impl Net {
    pub fn new(rows: usize) -> Self {
        Net { rows, logit_rows: rows, ..Net::default() }
    }

    pub fn buffer(&mut self, name: &str, dtype: DType, shape: &[usize]) -> BufferId {
        self.buffers.push(BufferSpec { name: name.into(), dtype, shape: shape.to_vec(), role: Role::Activation });
        BufferId(self.buffers.len() as u32 - 1)
    }

    /// One line of `width` a row.
    pub fn per_row(&mut self, name: &str, dtype: DType, width: usize) -> BufferId {
        self.buffer(name, dtype, &[self.rows, width])
    }

    fn weight(&mut self, form: WeightForm, values: Vec<f32>) -> WeightId {
        let bits: Vec<u16> = values.into_iter().map(|x| half::bf16::from_f32(x).to_bits()).collect();
        let spec = WeightSpec { name: format!("weight {}", self.weights.len()), form, parts: Vec::new() };
        let packed = CpuWeight::from_bf16::<()>(&spec, |group, out| {
            out.copy_from_slice(&bits[group * out.len()..][..out.len()]);
            Ok(())
        });
        self.packed.push(Arc::new(packed.expect("reading from a vector succeeds")));
        self.weights.push(spec);
        self.bits.push(bits);
        WeightId(self.weights.len() as u32 - 1)
    }

    pub fn gemm(&mut self, random: &mut Random, kind: GemmKind, groups: usize, n: usize, k: usize) -> WeightId {
        let values = random.floats(groups * n * k, 1.0 / (k as f32).sqrt());
        self.weight(WeightForm::Gemm { kind, groups, n, k }, values)
    }

    /// Some groups of another net's weight.
    pub fn gemm_like(&mut self, other: &Net, id: WeightId, groups: std::ops::Range<usize>) -> WeightId {
        let WeightForm::Gemm { kind, n, k, .. } = other.weights[id.0 as usize].form else { panic!("not a gemm") };
        let bits = &other.bits[id.0 as usize][groups.start * n * k..groups.end * n * k];
        let values = bits.iter().map(|&bits| half::bf16::from_bits(bits).to_f32()).collect();
        self.weight(WeightForm::Gemm { kind, groups: groups.len(), n, k }, values)
    }

    /// Around 1, as norm weights are.
    pub fn vector(&mut self, random: &mut Random, n: usize) -> WeightId {
        let values = random.floats(n, 0.3).into_iter().map(|x| 1.0 + x).collect();
        self.weight(WeightForm::Vector { n }, values)
    }

    pub fn table(&mut self, random: &mut Random, rows: usize, cols: usize) -> WeightId {
        let values = random.floats(rows * cols, 1.0);
        self.weight(WeightForm::Table { rows, cols }, values)
    }

    pub fn rope(&mut self, positions: usize, pairs: usize, scale: f32) -> WeightId {
        let inv_freq = |pair: usize| 100.0_f32.powf(-(pair as f32) / pairs as f32);
        let table = RopeTable {
            positions,
            inv_freq_bits: (0..pairs).map(|pair| inv_freq(pair).to_bits()).collect(),
            scale_bits: scale.to_bits(),
        };
        self.weight(WeightForm::Rope(table), Vec::new())
    }

    pub fn memory(&self, precision: Precision) -> CpuMemory {
        let mut memory = CpuMemory::new(precision, &self.buffers, self.packed.clone().into());
        memory.plan_rows = self.rows;
        memory.plan_logit_rows = self.logit_rows;
        memory.rows = self.rows;
        memory.logit_rows = self.logit_rows;
        memory
    }

    /// Group `group` of a weight as `[n][k]` in f64.
    pub fn matrix(&self, id: WeightId, group: usize) -> Vec<Vec<f64>> {
        let (n, k) = match self.weights[id.0 as usize].form {
            WeightForm::Gemm { n, k, .. } => (n, k),
            WeightForm::Table { rows, cols } => (rows, cols),
            _ => panic!("not a matrix"),
        };
        let group = &self.bits[id.0 as usize][group * n * k..][..n * k];
        group.chunks(k).map(|row| row.iter().map(|&bits| widen(bits)).collect()).collect()
    }

    pub fn values(&self, id: WeightId) -> Vec<f64> {
        self.bits[id.0 as usize].iter().map(|&bits| widen(bits)).collect()
    }

    /// cos, sin of each pair at `position`, as f64 of the f32 angle.
    pub fn turn(&self, id: WeightId, position: usize) -> Vec<[f64; 2]> {
        let WeightForm::Rope(table) = &self.weights[id.0 as usize].form else { panic!("not a rope table") };
        let scale = f64::from(f32::from_bits(table.scale_bits));
        let angle = |bits: &u32| f64::from(position as f32 * f32::from_bits(*bits));
        table.inv_freq_bits.iter().map(|bits| [angle(bits).cos() * scale, angle(bits).sin() * scale]).collect()
    }
}

fn widen(bits: u16) -> f64 {
    half::bf16::from_bits(bits).to_f64()
}

/// Plain f64 arithmetic.
pub mod exactly {
    pub fn widened(x: &[f32]) -> Vec<f64> {
        x.iter().map(|&x| f64::from(x)).collect()
    }

    pub fn norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
    }

    pub fn dot(a: &[f64], b: &[f64]) -> f64 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    pub fn apply(matrix: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
        matrix.iter().map(|row| dot(row, x)).collect()
    }

    /// silu(gate) · up of gate rows, then up rows.
    pub fn gated(gate_up: &[f64]) -> Vec<f64> {
        let (gate, up) = gate_up.split_at(gate_up.len() / 2);
        gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    }

    pub fn softmax(x: &[f64]) -> Vec<f64> {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
        x.iter().map(|x| (x - max).exp() / sum).collect()
    }
}
