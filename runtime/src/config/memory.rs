//! The memory split: what one rank's device memory is for, from the plan that it will run.

use super::{Config, DeviceKind};
use slotgraph_graphs::model::build;
use slotgraph_graphs::plan::{PlanError, RankShape};
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_kernels::{BufferSpec, DType, Role, pack};

/// Bytes of rank 0. On a GPU they are exact but for graphs and libraries; on the CPU weights may be padded differently by a few rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemorySplit {
    pub weight_bytes: u64,
    /// None where the pool is a fraction of what is free once the weights are loaded.
    pub kv_bytes: Option<u64>,
    /// Page 0 included.
    pub kv_pages: Option<usize>,
    /// Tokens that requests can hold together.
    pub kv_tokens: Option<usize>,
    pub page_bytes: u64,
    /// Activations and scratch of the widest step.
    pub activation_bytes: u64,
    pub slot_bytes: u64,
    pub exchange_bytes: u64,
    /// Pinned host memory.
    pub ring_bytes: u64,
}

/// The split of `config`'s rank 0 with a pool of `pages`, if that is known yet.
pub fn memory_split(config: &Config, spec: &ModelSpec, pages: Option<usize>) -> Result<MemorySplit, PlanError> {
    let limits = config.limits(pages.unwrap_or(2));
    let plan = build(spec, &limits, RankShape { rank: 0, ranks: config.ep }, limits.rows_max())?;
    let by_role = |roles: &[Role]| {
        plan.buffers.iter().filter(|buffer| roles.contains(&buffer.role)).map(|b| stored_bytes(b, config.device)).sum()
    };
    Ok(MemorySplit {
        weight_bytes: plan.weights.iter().map(|weight| pack::bytes(&weight.form) as u64).sum(),
        kv_bytes: pages.map(|_| by_role(&[Role::Kv])),
        kv_pages: pages,
        kv_tokens: pages.map(|pages| (pages - 1) * slotgraph_kernels::contract::PAGE_TOKENS),
        page_bytes: config.page_bytes,
        activation_bytes: by_role(&[Role::Activation, Role::Scratch]),
        slot_bytes: by_role(&[Role::SlotState]),
        exchange_bytes: by_role(&[Role::Exchange]),
        ring_bytes: by_role(&[Role::InputRing, Role::OutputRing]),
    })
}

/// The CPU keeps bf16 buffers as f32.
fn stored_bytes(buffer: &BufferSpec, device: DeviceKind) -> u64 {
    let element = match (buffer.dtype, device) {
        (DType::Bf16, DeviceKind::Cpu) => 4,
        (dtype, _) => dtype.bytes(),
    };
    (buffer.elements() * element) as u64
}
