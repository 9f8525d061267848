//! One small, uneven case of every op that computes rows.

use crate::rig::{Net, Random, bf16};
use crate::{attention, moe, projections};
use slotgraph_kernels::cpu::{CpuBuffer, CpuMemory};
use slotgraph_kernels::{BufferId, DType, Op, Precision};
use std::collections::BTreeMap;

/// What one buffer should hold: the lines that `of` names, or all of it.
pub struct Expected {
    pub buffer: BufferId,
    /// Element ranges of the buffer, in order; empty: the whole buffer.
    pub ranges: Vec<std::ops::Range<usize>>,
    pub values: Vec<f64>,
}

impl Expected {
    pub fn whole(buffer: BufferId, values: Vec<f64>) -> Self {
        Expected { buffer, ranges: Vec::new(), values }
    }

    pub fn lines(&self, buffer: &[f32]) -> Vec<f32> {
        if self.ranges.is_empty() {
            return buffer.to_vec();
        }
        self.ranges.iter().flat_map(|range| buffer[range.clone()].to_vec()).collect()
    }
}

type Expect = Box<dyn Fn(&Net, &CpuMemory, &CpuMemory) -> Vec<Expected> + Send + Sync>;

pub struct Case {
    pub name: String,
    pub net: Net,
    pub op: Op,
    /// Float buffers whose contents the checks look at.
    pub writes: Vec<BufferId>,
    /// u32 inputs; floats are random.
    pub words: BTreeMap<u32, Vec<u32>>,
    /// From the memory before and after the op: what floats it should have written.
    pub expect: Expect,
}

impl Case {
    pub fn new(name: impl Into<String>, net: Net, op: Op, writes: Vec<BufferId>, expect: Expect) -> Self {
        let case = Case { name: name.into(), net, op, writes, words: BTreeMap::new(), expect };
        case.op.check(&case.net).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        case
    }

    pub fn words(mut self, buffer: BufferId, words: Vec<u32>) -> Self {
        self.words.insert(buffer.0, words);
        self
    }

    /// Seeded inputs: bf16 buffers hold bf16 values in both precisions.
    pub fn memory(&self, precision: Precision) -> CpuMemory {
        let mut memory = self.net.memory(precision);
        let mut random = Random(self.name.len() as u64);
        for (at, spec) in self.net.buffers.iter().enumerate() {
            match (&mut memory.buffers[at], self.words.get(&(at as u32))) {
                (CpuBuffer::U32(values), Some(words)) => values[..words.len()].copy_from_slice(words),
                (CpuBuffer::F32(values), None) => {
                    let round = |x: f32| if spec.dtype == DType::Bf16 { bf16(x) } else { x };
                    values.iter_mut().for_each(|x| *x = round(random.float(1.0)));
                }
                _ => {}
            }
        }
        memory
    }

    pub fn run(&self, mut memory: CpuMemory) -> CpuMemory {
        self.op.run(&mut memory).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        memory
    }
}

pub fn all() -> Vec<Case> {
    let mut cases = projections::cases();
    cases.extend(attention::cases());
    cases.extend(moe::cases());
    cases
}
