//! The CPU device on a model of `tests/models`, without an engine: what its requests say, as bits.

use crate::drive::{Ask, Drive, Packing};
use crate::{model, oracle};
use slotgraph_graphs::cpu::{CpuDevice, CpuOptions};
use slotgraph_graphs::device::Device;
use slotgraph_graphs::source::Source;
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::{Record, StepLimits};
use slotgraph_kernels::Precision;
use slotgraph_runtime::checkpoint::Checkpoint;
use std::sync::{Arc, OnceLock};

/// The packing that references are made with.
pub const DEFAULT: Packing = Packing { chunk: 32, bucket_min: 1 };

/// An opened model.
pub struct Model {
    pub spec: ModelSpec,
    pub source: Arc<dyn Source>,
}

impl Model {
    pub fn open(name: &str) -> Model {
        let checkpoint = Checkpoint::open(&model(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        Model { source: checkpoint.source(), spec: checkpoint.spec }
    }

    /// A device of one rank with `change`d options.
    pub fn device<'a>(&'a self, limits: &'a StepLimits, change: impl FnOnce(&mut CpuOptions<'a>)) -> CpuDevice {
        let mut options = CpuOptions::new(&self.spec, limits, &*self.source);
        change(&mut options);
        CpuDevice::prepare(options).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// The model that is bundled with the server.
pub fn demo() -> &'static Model {
    static DEMO: OnceLock<Model> = OnceLock::new();
    DEMO.get_or_init(|| Model::open("shakespeare-dsv2"))
}

/// What `asks` say on `device`.
pub fn said(device: &mut dyn Device, limits: &StepLimits, packing: Packing, asks: &[Ask]) -> Vec<Vec<String>> {
    bits(&Drive::new(limits).run(device, packing, asks))
}

/// Prompts of uneven lengths from the oracle, some of them longer than a page.
pub fn asks(tokens: usize) -> Vec<Ask> {
    let cases = oracle::cases("dsv2");
    cases.iter().filter(|case| case.prompt_ids.len() <= 160).map(|case| Ask::greedy(&case.prompt_ids, tokens)).collect()
}

/// Everything in a record, floats by their bits.
pub fn bits(records: &[Vec<Record>]) -> Vec<Vec<String>> {
    let line = |record: &Record| {
        let top: Vec<(u32, u32)> = record.top.iter().map(|&(id, logprob)| (id, logprob.to_bits())).collect();
        format!("{} {} {:08x} {} {top:x?}", record.position, record.token, record.logprob.to_bits(), record.rank)
    };
    records.iter().map(|records| records.iter().map(line).collect()).collect()
}

/// What the demo model says one request at a time.
pub fn alone(precision: Precision) -> Vec<Vec<String>> {
    let limits = crate::drive::limits(1, 0);
    let mut device = demo().device(&limits, |options| options.precision = precision);
    said(&mut device, &limits, DEFAULT, &asks(12))
}

/// What the demo model says one request at a time, in fp32.
pub fn reference() -> &'static [Vec<String>] {
    static ALONE: OnceLock<Vec<Vec<String>>> = OnceLock::new();
    ALONE.get_or_init(|| alone(Precision::Oracle))
}
