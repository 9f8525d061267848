//! The rules of a plan. Nothing is repaired: a plan keeps every rule or no device sees it.
//!
//! 1. Names are unique; ids exist; every buffer has a user, every weight but the rotary table exactly one.
//! 2. Every op fits the shapes of what it names (`Op::check`), and writes nothing that it names twice but what it updates
//!    in place by definition.
//! 3. `fetch` is first, `feed` last, `embed`, `head` and `sample` stand once; layers ascend.
//! 4. An activation is written before it is read, and read before it is written anew. From one layer to the next go only
//!    buffers that are updated in place. A cache is appended to by one op, before attention reads it. Rings are touched by
//!    the ends alone.
//! 5. Pad rows have their place: rows, positions and liveness are those that `fetch` filled, block tables those of the
//!    slot table, which has a seat more than one; the pool has page 0 and another.
//! 6. The parts of a weight lie inside their tensor and their group, overlap nowhere, and cover all of a matrix.

use super::{PlacedOp, Plan, PlanError, Site};
use slotgraph_kernels::ops::{MoeSum, Op, Paged, RowBuffers, SlotBuffers};
use slotgraph_kernels::{BufferId, Role, Specs, TensorPart, WeightForm, WeightSpec};
use std::collections::HashSet;

type Verified = Result<(), PlanError>;

pub(super) fn verify(plan: &Plan) -> Verified {
    unique("buffer", plan.buffers.iter().map(|buffer| &buffer.name))?;
    unique("weight", plan.weights.iter().map(|weight| &weight.name))?;
    plan.ops.iter().try_for_each(|placed| known_ids(plan, placed))?;
    let ends = ends(plan)?;
    for placed in &plan.ops {
        placed.op.check(plan).map_err(|source| PlanError::Shape { layer: placed.layer, source })?;
        aliasing(plan, placed)?;
        roles(plan, placed)?;
        pad_contract(plan, placed, &ends)?;
    }
    data_flow(plan)?;
    uses(plan)?;
    plan.weights.iter().try_for_each(parts)
}

fn site(placed: &PlacedOp) -> Site {
    Site { op: placed.op.name(), layer: placed.layer }
}

fn unique<'a>(what: &'static str, names: impl Iterator<Item = &'a String>) -> Verified {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(PlanError::DuplicateName { what, name: name.clone() });
        }
    }
    Ok(())
}

fn known_ids(plan: &Plan, placed: &PlacedOp) -> Verified {
    let unknown = |what, id, count| Err(PlanError::UnknownId { site: site(placed), what, id, count });
    for id in placed.op.reads().into_iter().chain(placed.op.writes()) {
        if id.0 as usize >= plan.buffers.len() {
            return unknown("buffer", id.0, plan.buffers.len());
        }
    }
    for id in placed.op.weights() {
        if id.0 as usize >= plan.weights.len() {
            return unknown("weight", id.0, plan.weights.len());
        }
    }
    Ok(())
}

/// What `fetch` fills: the only legal per-row and per-slot inputs of the other ops.
struct Ends {
    rows: RowBuffers,
    slots: SlotBuffers,
}

fn ends(plan: &Plan) -> Result<Ends, PlanError> {
    let wrong = |reason: String| Err(PlanError::Ends(reason));
    let (Some(Op::Fetch(fetch)), Some(Op::Feed(feed))) =
        (plan.ops.first().map(|placed| &placed.op), plan.ops.last().map(|placed| &placed.op))
    else {
        return wrong("fetch is not first or feed is not last".into());
    };
    for name in ["fetch", "embed", "head", "sample", "feed"] {
        let count = plan.ops.iter().filter(|placed| placed.op.name() == name).count();
        if count != 1 {
            return wrong(format!("{name} stands {count} times"));
        }
    }
    let layers: Vec<_> = plan.ops.iter().filter_map(|placed| placed.layer).collect();
    let framed = |placed: &PlacedOp| {
        let end = matches!(placed.op, Op::Fetch(_) | Op::Embed(_) | Op::Head(_) | Op::Sample(_) | Op::Feed(_));
        end == placed.layer.is_none()
    };
    if !layers.is_sorted() || !plan.ops.iter().all(framed) {
        return wrong("layers do not ascend between embed and head".into());
    }
    for placed in &plan.ops {
        let same = match &placed.op {
            Op::Embed(op) => op.token == fetch.rows.token,
            Op::Head(op) => op.logit_row == fetch.rows.logit_row,
            Op::Sample(op) => op.rows == fetch.rows && op.slots == fetch.slots && *op == feed.sample,
            Op::Feed(op) => op.rows == fetch.rows && op.slots == fetch.slots && op.step_counter == fetch.step_counter,
            Op::Exchange(op) => op.rank == plan.rank.rank && op.ranks == plan.rank.ranks,
            Op::MoeCombine(op) => op.ranks == plan.rank.ranks,
            _ => true,
        };
        if !same {
            return wrong(format!("{} disagrees with fetch, feed or the plan's rank", site(placed)));
        }
    }
    if fetch.entries != feed.entries || plan.logit_rows > plan.rows || plan.rows == 0 {
        return wrong("ring entries or row counts disagree".into());
    }
    Ok(Ends { rows: fetch.rows, slots: fetch.slots })
}

/// The buffer that an op updates in place by definition, apart from state that outlives the step.
fn in_place(op: &Op) -> Option<BufferId> {
    match op {
        Op::GemmAdd(op) => Some(op.x),
        Op::MoeDown(op) => match op.sum {
            MoeSum::Residual { x } => Some(x),
            MoeSum::Partial { .. } => None,
        },
        Op::MoeCombine(op) => Some(op.x),
        Op::MoeGate(op) => Some(op.step),
        Op::Sample(op) => Some(op.logits),
        _ => None,
    }
}

fn aliasing(plan: &Plan, placed: &PlacedOp) -> Verified {
    let (reads, writes) = (placed.op.reads(), placed.op.writes());
    let updated = in_place(&placed.op);
    for (at, &id) in writes.iter().enumerate() {
        let spec = plan.buffer(id);
        let lasting = matches!(spec.role, Role::SlotState | Role::Kv | Role::Scratch);
        let read_too = reads.contains(&id) && !lasting && updated != Some(id);
        if writes[..at].contains(&id) || read_too {
            return Err(PlanError::Alias { site: site(placed), buffer: spec.name.clone() });
        }
    }
    Ok(())
}

fn roles(plan: &Plan, placed: &PlacedOp) -> Verified {
    let op = &placed.op;
    let allowed = |id: &BufferId, write: bool| match plan.buffer(*id).role {
        Role::InputRing => matches!(op, Op::Fetch(_)) && !write,
        Role::OutputRing => matches!(op, Op::Feed(_)) && write,
        Role::SlotState if write => matches!(op, Op::Fetch(_) | Op::Feed(_)),
        Role::Kv => match op {
            Op::MlaPrep(op) => op.paged.kv == *id,
            Op::GqaPrep(op) => op.paged.kv == *id,
            Op::MlaAttend(op) => op.paged.kv == *id && !write,
            Op::GqaAttend(op) => op.paged.kv == *id && !write,
            _ => false,
        },
        Role::Exchange if write => matches!(op, Op::MoeDown(_) | Op::Exchange(_)),
        Role::Exchange => matches!(op, Op::Exchange(_) | Op::MoeCombine(_)),
        Role::Scratch => matches!(op, Op::MlaAttend(_) | Op::GqaAttend(_) | Op::Sample(_)),
        Role::Activation | Role::SlotState => true,
    };
    let refused = op.reads().into_iter().find(|id| !allowed(id, false));
    let refused = refused.or_else(|| op.writes().into_iter().find(|id| !allowed(id, true)));
    let refused = refused
        .or_else(|| required_roles(op).into_iter().find(|&(id, role)| plan.buffer(id).role != role).map(|(id, _)| id));
    match refused {
        None => Ok(()),
        Some(id) => {
            let spec = plan.buffer(id);
            Err(PlanError::Role { site: site(placed), buffer: spec.name.clone(), role: spec.role })
        }
    }
}

/// Roles that decide where a device allocates: they must be as the op needs them.
fn required_roles(op: &Op) -> Vec<(BufferId, Role)> {
    match op {
        Op::Fetch(op) => {
            let rows = &op.rows;
            let slots = &op.slots;
            let rows = [
                rows.slot,
                rows.token,
                rows.position,
                rows.live,
                rows.logit_row,
                rows.logit_kind,
                rows.logit_target,
                rows.step,
            ];
            let lasting = [
                slots.token,
                slots.position,
                slots.generation,
                slots.ended,
                slots.generated,
                slots.pages,
                slots.params,
                slots.bias,
                slots.counts,
                op.step_counter,
            ];
            let rows = rows.map(|id| (id, Role::Activation));
            let lasting = lasting.map(|id| (id, Role::SlotState));
            [&rows[..], &lasting[..], &[(op.input_ring, Role::InputRing)]].concat()
        }
        Op::Feed(op) => vec![(op.output_ring, Role::OutputRing)],
        Op::Exchange(op) => vec![(op.partial, Role::Exchange), (op.gathered, Role::Exchange)],
        Op::MoeCombine(op) => vec![(op.shared, Role::Activation)],
        _ => Vec::new(),
    }
}

fn pad_contract(plan: &Plan, placed: &PlacedOp, ends: &Ends) -> Verified {
    let broken = |reason: String| Err(PlanError::PadContract { site: site(placed), reason });
    let paged = |paged: Paged, slot: BufferId, position: BufferId| {
        let (kv, table) = (plan.buffer(paged.kv), plan.buffer(paged.block_table));
        if slot != ends.rows.slot || position != ends.rows.position {
            broken("its rows are not those that fetch filled".into())
        } else if paged.block_table != ends.slots.pages {
            broken(format!("{} is not the slot table's block table", table.name))
        } else if kv.role != Role::Kv || kv.shape[0] < 2 {
            broken(format!("{} is not a pool of page 0 and at least one more", kv.name))
        } else {
            Ok(())
        }
    };
    match &placed.op {
        Op::Fetch(op) => {
            let seats = plan.buffer(op.slots.generation);
            if seats.shape[0] < 2 {
                return broken(format!("{} has no seat beside the pad slot", seats.name));
            }
            Ok(())
        }
        Op::MlaPrep(op) => paged(op.paged, op.slot, op.position),
        Op::MlaAttend(op) => paged(op.paged, op.slot, op.position),
        Op::GqaPrep(op) => paged(op.paged, op.slot, op.position),
        Op::GqaAttend(op) => paged(op.paged, op.slot, op.position),
        Op::MoeGate(op) if op.live != ends.rows.live || op.step != ends.rows.step => {
            broken("liveness or route counters are not those that fetch filled".into())
        }
        _ => Ok(()),
    }
}

/// What is known of a buffer's contents while the plan is walked.
#[derive(Clone, Copy)]
enum Contents {
    /// Nothing of this step.
    Stale,
    /// Written by op `by`; `read` tells whether anything looked since.
    Written { by: usize, read: bool },
}

fn data_flow(plan: &Plan) -> Verified {
    let mut contents = vec![Contents::Stale; plan.buffers.len()];
    let mut appended = HashSet::new();
    for (at, placed) in plan.ops.iter().enumerate() {
        let writes = placed.op.writes();
        for id in placed.op.reads() {
            let spec = plan.buffer(id);
            let must_be_written = match spec.role {
                Role::Activation | Role::Exchange => true,
                Role::Kv => !writes.contains(&id),
                _ => false,
            };
            let fresh = match &mut contents[id.0 as usize] {
                Contents::Written { by, read } => {
                    *read = true;
                    let writer = &plan.ops[*by];
                    writer.layer.is_none() || writer.layer == placed.layer || in_place(&writer.op) == Some(id)
                }
                Contents::Stale => false,
            };
            if must_be_written && !fresh {
                return Err(PlanError::ReadBeforeWrite { site: site(placed), buffer: spec.name.clone() });
            }
        }
        for id in writes {
            let spec = plan.buffer(id);
            if matches!(spec.role, Role::Activation | Role::Exchange) {
                lost(plan, id, contents[id.0 as usize])?;
            }
            if spec.role == Role::Kv && !appended.insert(id) {
                return Err(PlanError::Alias { site: site(placed), buffer: spec.name.clone() });
            }
            // What an op adds to in place may stay unread: counters and adjusted logits.
            let read = in_place(&placed.op) == Some(id);
            contents[id.0 as usize] = Contents::Written { by: at, read };
        }
    }
    (0u32..).zip(contents).try_for_each(|(id, contents)| match plan.buffer(BufferId(id)).role {
        Role::Activation | Role::Exchange | Role::Kv => lost(plan, BufferId(id), contents),
        _ => Ok(()),
    })
}

fn lost(plan: &Plan, id: BufferId, contents: Contents) -> Verified {
    match contents {
        Contents::Written { by, read: false } => {
            Err(PlanError::LostWrite { site: site(&plan.ops[by]), buffer: plan.buffer(id).name.clone() })
        }
        _ => Ok(()),
    }
}

fn uses(plan: &Plan) -> Verified {
    let mut buffers = vec![0; plan.buffers.len()];
    let mut weights = vec![0; plan.weights.len()];
    for PlacedOp { op, .. } in &plan.ops {
        op.reads().into_iter().chain(op.writes()).for_each(|id| buffers[id.0 as usize] += 1);
        op.weights().into_iter().for_each(|id| weights[id.0 as usize] += 1);
    }
    for (spec, &uses) in plan.buffers.iter().zip(&buffers) {
        if uses == 0 {
            return Err(PlanError::Uses { what: "buffer", name: spec.name.clone(), uses, expected: "one or more" });
        }
    }
    for (spec, &uses) in plan.weights.iter().zip(&weights) {
        let shared = matches!(spec.form, WeightForm::Rope(_));
        if uses == 0 || (uses > 1 && !shared) {
            let expected = if shared { "one or more" } else { "one" };
            return Err(PlanError::Uses { what: "weight", name: spec.name.clone(), uses, expected });
        }
    }
    Ok(())
}

fn parts(spec: &WeightSpec) -> Verified {
    let wrong = |reason: String| Err(PlanError::Parts { weight: spec.name.clone(), reason });
    let (groups, rows, cols, whole) = match spec.form {
        WeightForm::Gemm { groups, n, k, .. } => (groups, n, k, true),
        WeightForm::Table { rows, cols } => (1, rows, cols, true),
        WeightForm::Vector { n } => (1, n, 1, false),
        WeightForm::Rope(_) if spec.parts.is_empty() => return Ok(()),
        WeightForm::Rope(_) => return wrong("a computed table has no parts".into()),
    };
    let mut landings = Vec::with_capacity(spec.parts.len());
    for part in &spec.parts {
        let tensor = &part.tensor;
        let Some((&tensor_rows, rest)) = part.tensor_shape.split_first() else {
            return wrong(format!("{tensor} has no shape"));
        };
        if part.rows.is_empty() || part.rows.end > tensor_rows {
            return wrong(format!("{tensor} has {tensor_rows} rows, {:?} are taken", part.rows));
        }
        let (taken, width) = landed(part, rest.iter().product());
        if width != cols {
            return wrong(format!("{tensor} is {width} wide where it lands, not {cols}"));
        }
        if part.group >= groups || part.dst_row + taken > rows {
            return wrong(format!("{tensor} lands outside of group {} of {groups}", part.group));
        }
        landings.push((part.group, part.dst_row, part.dst_row + taken));
    }
    landings.sort_unstable();
    if landings.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1) {
        return wrong("parts overlap".into());
    }
    let covered: usize = landings.iter().map(|(_, start, end)| end - start).sum();
    if covered == 0 || (whole && covered != groups * rows) {
        return wrong(format!("parts cover {covered} of {} rows", groups * rows));
    }
    Ok(())
}

/// Rows and columns that a part fills.
fn landed(part: &TensorPart, tensor_width: usize) -> (usize, usize) {
    if part.transpose { (tensor_width, part.rows.len()) } else { (part.rows.len(), tensor_width) }
}
