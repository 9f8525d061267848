//! A plan as text: `slotgraph-probe plan` prints it, golden files hold it.
//!
//! Layers that differ in nothing but their number are printed once. Every field that decides what a plan computes shows,
//! lists of many tensors as a count and a digest.

use super::Plan;
use sha2::{Digest, Sha256};
use slotgraph_kernels::ops::{MoeSum, Op, TopkMethod};
use slotgraph_kernels::spec::RopeTable;
use slotgraph_kernels::{BufferSpec, Cols, DType, Specs, TensorPart, WeightForm, WeightSpec};
use std::fmt::{self, Write as _};

/// Parts that are printed one by one; of more, the first and a digest of all.
const PARTS_SHOWN: usize = 3;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { model, rank, rows, logit_rows, buffers, weights, ops } = self;
        writeln!(f, "plan {model}, rank {} of {}: {rows} rows, {logit_rows} logit rows", rank.rank, rank.ranks)?;
        writeln!(f, "{} buffers, {} weights, {} ops", buffers.len(), weights.len(), ops.len())?;
        writeln!(f, "\nbuffers")?;
        let lines = buffers.iter().map(|spec| (layer_of(&spec.name), buffer_line(spec)));
        by_layer(f, lines)?;
        writeln!(f, "\nweights")?;
        let lines = weights.iter().map(|spec| (layer_of(&spec.name), weight_line(spec)));
        by_layer(f, lines)?;
        writeln!(f, "\nops")?;
        by_layer(f, ops.iter().map(|placed| (placed.layer, op_line(self, &placed.op))))
    }
}

/// The layer in a name such as `layer.3.kv`.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("layer.")?.split('.').next()?.parse().ok()
}

/// A name inside its layer's block.
fn short(name: &str) -> &str {
    match layer_of(name) {
        Some(_) => name.splitn(3, '.').nth(2).unwrap_or(name),
        None => name,
    }
}

/// Prints lines under their layers, equal consecutive layers once.
fn by_layer(f: &mut fmt::Formatter<'_>, lines: impl Iterator<Item = (Option<usize>, String)>) -> fmt::Result {
    let mut blocks: Vec<(Option<(usize, usize)>, String)> = Vec::new();
    let mut layer_before = None;
    for (layer, line) in lines {
        let starts_block = blocks.is_empty() || layer != layer_before;
        layer_before = layer;
        let indent = if layer.is_some() { "    " } else { "  " };
        if starts_block {
            merge_equal(&mut blocks);
            blocks.push((layer.map(|layer| (layer, layer)), String::new()));
        }
        let (_, text) = blocks.last_mut().expect("a block was just made");
        writeln!(text, "{indent}{}", line.trim_end())?;
    }
    merge_equal(&mut blocks);
    for (layers, text) in blocks {
        match layers {
            Some((first, last)) if first == last => writeln!(f, "  layer {first}")?,
            Some((first, last)) => writeln!(f, "  layers {first} to {last}, each")?,
            None => {}
        }
        f.write_str(&text)?;
    }
    Ok(())
}

/// Folds the last block into the one before when only the layer's number differs.
fn merge_equal(blocks: &mut Vec<(Option<(usize, usize)>, String)>) {
    if let [.., (Some((_, before)), text), (Some((first, last)), newer)] = blocks.as_mut_slice()
        && *before + 1 == *first
        && text == newer
    {
        *before = *last;
        blocks.pop();
    }
}

fn dtype(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::Bf16 => "bf16",
        DType::U32 => "u32",
    }
}

fn buffer_line(spec: &BufferSpec) -> String {
    let shape = format!("{:?}", spec.shape);
    format!("{:<22} {:<4} {shape:<22} {:?}", short(&spec.name), dtype(spec.dtype), spec.role)
}

fn weight_line(spec: &WeightSpec) -> String {
    let form = match &spec.form {
        WeightForm::Gemm { kind, groups: 1, n, k } => format!("{kind:?} [{n}, {k}]"),
        WeightForm::Gemm { kind, groups, n, k } => format!("{kind:?} {groups} × [{n}, {k}]"),
        WeightForm::Vector { n } => format!("vector [{n}]"),
        WeightForm::Table { rows, cols } => format!("table [{rows}, {cols}]"),
        WeightForm::Rope(table) => return format!("{:<24} {}", short(&spec.name), rope(table)),
    };
    format!("{:<24} {form:<30} {}", short(&spec.name), parts(spec))
}

fn rope(table: &RopeTable) -> String {
    let bytes: Vec<u8> = table.inv_freq_bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let (pairs, scale) = (table.inv_freq_bits.len(), f32::from_bits(table.scale_bits));
    format!("rope [{}, {pairs}, 2] scale {scale}, inv_freq {}", table.positions, digest(&bytes))
}

fn parts(spec: &WeightSpec) -> String {
    let all: Vec<String> = spec.parts.iter().map(|part| part_text(spec, part)).collect();
    if all.len() <= PARTS_SHOWN {
        return all.join(", ");
    }
    format!("{} and {} more, {}", all[0], all.len() - 1, digest(all.join("\n").as_bytes()))
}

fn part_text(spec: &WeightSpec, part: &TensorPart) -> String {
    let mut text = match layer_of(&spec.name) {
        Some(layer) => part.tensor.replace(&format!("model.layers.{layer}."), ""),
        None => part.tensor.clone(),
    };
    if part.rows.len() != part.tensor_shape[0] {
        let _ = write!(text, "[{}..{}]", part.rows.start, part.rows.end);
    }
    if part.transpose {
        text.push('ᵀ');
    }
    match (part.group, part.dst_row) {
        (0, 0) => {}
        (0, row) => {
            let _ = write!(text, " at {row}");
        }
        (group, row) => {
            let _ = write!(text, " at {group}:{row}");
        }
    }
    text
}

/// The first 8 hex digits of SHA-256.
fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn op_line(plan: &Plan, op: &Op) -> String {
    let buffers = |ids: Vec<_>| ids.into_iter().map(|id| short(&plan.buffer(id).name)).collect::<Vec<_>>().join(" ");
    let weights = op.weights().into_iter().map(|id| short(&plan.weight(id).name)).collect::<Vec<_>>().join(" ");
    let (reads, writes) = match op {
        // Every row and slot buffer: the ends' own lists would only hide the rest.
        Op::Fetch(_) => ("ring.input".to_owned(), "rows, slots".to_owned()),
        Op::Feed(_) => ("rows, slots, sample".to_owned(), "slots, ring.output".to_owned()),
        op => (buffers(op.reads()), buffers(op.writes())),
    };
    let weights = if weights.is_empty() { weights } else { format!(" · {weights}") };
    let scalars = scalars(op);
    let scalars = if scalars.is_empty() { scalars } else { format!("  ({scalars})") };
    format!("{:<14} {writes} ← {reads}{weights}{scalars}", op.name())
}

/// The numbers that an op is compiled with.
fn scalars(op: &Op) -> String {
    match op {
        Op::Fetch(op) => format!("{} entries", op.entries),
        Op::Feed(op) => format!("{} entries", op.entries),
        Op::NormGemm(op) => format!("{}, eps {:e}", cols("x", op.x), op.eps),
        Op::NormGateUp(op) => format!("eps {:e}", op.eps),
        Op::Head(op) => format!("eps {:e}", op.eps),
        Op::MlaPrep(op) => format!(
            "{}, {}, {} heads of {} + {}, lora {}, eps {:e}",
            cols("q", op.q),
            cols("kv_a", op.kv_a),
            op.heads,
            op.nope_dim,
            op.rope_dim,
            op.lora,
            op.eps
        ),
        Op::MlaAttend(op) => {
            format!("{} heads of {} + {}, scale {}", op.heads, op.lora, op.rope_dim, op.scale)
        }
        Op::GqaPrep(op) => {
            format!("{} and {} heads of {}, eps {:e}", op.heads, op.kv_heads, op.head_dim, op.eps)
        }
        Op::GqaAttend(op) => {
            format!("{} over {} heads of {}, scale {}", op.heads, op.kv_heads, op.head_dim, op.scale)
        }
        Op::MoeGate(op) => {
            let routing = op.routing;
            let method = match routing.method {
                TopkMethod::Greedy => "greedy".to_owned(),
                TopkMethod::GroupLimitedGreedy { groups, topk_groups } => {
                    format!("greedy in {topk_groups} of {groups} groups")
                }
            };
            let norm = if routing.norm_topk_prob { ", normalised" } else { "" };
            format!(
                "top {} of {}, {method}{norm}, scaling {}, owns {}, eps {:e}",
                routing.top_k,
                routing.experts,
                routing.scaling,
                owned(op.first_expert, op.local_experts),
                op.eps
            )
        }
        Op::MoeUp(op) => format!("top {}, owns {}", op.top_k, owned(op.first_expert, op.local_experts)),
        Op::MoeDown(op) => {
            let sum = match op.sum {
                MoeSum::Residual { .. } => "into the residual",
                MoeSum::Partial { .. } => "partial",
            };
            format!("top {} of {}, owns {}, {sum}", op.top_k, op.experts, owned(op.first_expert, op.local_experts))
        }
        Op::Exchange(op) => format!("rank {} of {}", op.rank, op.ranks),
        Op::MoeCombine(op) => format!("{} ranks", op.ranks),
        Op::Embed(_) | Op::MlaUv(_) | Op::GemmAdd(_) | Op::Sample(_) => String::new(),
    }
}

fn cols(name: &str, cols: Cols) -> String {
    format!("{name} {}..{}", cols.offset, cols.offset + cols.width)
}

fn owned(first: usize, count: usize) -> String {
    format!("{first}..{}", first + count)
}
