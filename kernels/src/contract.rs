//! The numeric contract: the one program that every device, bucket, phase, transport and rank count evaluates.
//!
//! Called by every op's CPU reference, by the plan builders (slices, shards) and by the CUDA compiler (each constant
//! becomes a `-D`). **Invariant:** who computes a value is free; the order in which it is summed and the points where
//! it is rounded are fixed here and nowhere else. Nothing here depends on a batch size, a bucket, or a device.

use sha2::{Digest, Sha256};

/// Bumped when the meaning of anything below changes without its value changing.
pub const VERSION: u32 = 1;

/// Width of one K tile of a GEMM; K is zero-padded to a multiple of it at packing.
pub const K_TILE: usize = 16;
/// Rows of one packed weight tile (the M of `mma.m16n8k16`).
pub const ROW_TILE: usize = 16;
/// Virtual expert shards. Every expert-parallel degree evaluates the balanced tree over these.
pub const EXPERT_SHARDS: usize = 8;
/// Tokens in one KV page.
pub const PAGE_TOKENS: usize = 64;
/// Keys in one attention group; groups combine by a left fold.
pub const ATTENTION_GROUP: usize = 256;
/// Keys in one online-softmax tile inside a group.
pub const ATTENTION_TILE: usize = 64;
/// Most alternatives a logprob record can carry.
pub const TOP_LOGPROBS_MAX: usize = 20;
/// Most stop token ids a request can carry (EOS ids of the model are counted apart).
pub const STOP_IDS_MAX: usize = 16;
/// Most EOS ids a model can declare.
pub const EOS_IDS_MAX: usize = 8;
/// Most `logit_bias` entries a request can carry.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Below this temperature sampling is greedy.
pub const GREEDY_TEMPERATURE: f32 = 1e-5;
/// Logits are summed (for the log-softmax normaliser) in this many strided lanes, then by the balanced tree:
/// lane j adds ids j, j+1024, j+2048 … in ascending order from +0.0.
pub const LOGSUMEXP_LANES: usize = 1024;
/// RMSNorm sums its squares in this many strided lanes (lane j adds columns j, j+256 … ascending, from +0.0; square
/// rounded, then sum), then by the balanced tree over the lanes.
pub const NORM_LANES: usize = 256;
/// Kernels use no multiply-add fusion but the intrinsics their headers name.
pub const NVRTC_NUMERIC_FLAGS: [&str; 4] = ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];

/// Which role a GEMM weight plays; with its shape it fixes the number of K slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GemmKind {
    /// q | kv_a, q_a | kv_a, q | k | v: projections into attention.
    AttnIn,
    /// q_b of a low-rank query.
    QueryB,
    /// Per-head absorbed key projection, `[heads][kv_lora, nope]`.
    KeyUp,
    /// Per-head absorbed value projection, `[heads][v, kv_lora]`.
    ValueUp,
    /// o_proj.
    AttnOut,
    /// Dense gate | up.
    GateUp,
    /// Dense down.
    Down,
    /// Router logits.
    Router,
    /// Shared experts' gate | up.
    SharedGateUp,
    /// Shared experts' down.
    SharedDown,
    /// One routed expert's gate | up.
    ExpertGateUp,
    /// One routed expert's down.
    ExpertDown,
    /// lm_head.
    Head,
}

/// Number of K slices S of a weight `[n, k]` (per group: one head, one expert).
///
/// With at least 1,000 row tiles in flight a single chain per warp keeps the memory system busy; with fewer, eight
/// slices hide the chain's latency (measured on H200, in microseconds at one row: routed gate_up 18.7 against 19.4,
/// o_proj 6.1 against 3.6).
pub fn slices(kind: GemmKind, n: usize, k: usize) -> usize {
    let _ = k;
    match kind {
        GemmKind::Head | GemmKind::ExpertGateUp | GemmKind::ExpertDown | GemmKind::KeyUp | GemmKind::ValueUp => 1,
        GemmKind::SharedDown => 2,
        GemmKind::AttnIn | GemmKind::QueryB | GemmKind::AttnOut | GemmKind::Router | GemmKind::SharedGateUp => 8,
        GemmKind::GateUp | GemmKind::Down => {
            if n.div_ceil(ROW_TILE) >= 1000 {
                1
            } else {
                8
            }
        }
    }
}

/// The K tiles of slice `slice` of `slices`, as `start..end` over `tiles` tiles: ⌊iT/S⌋ … ⌊(i+1)T/S⌋−1.
pub fn slice_tiles(slice: usize, slices: usize, tiles: usize) -> std::ops::Range<usize> {
    slice * tiles / slices..(slice + 1) * tiles / slices
}

/// The balanced tree ((s0+s1)+(s2+s3))+… over 1, 2, 4 or 8 (any power of two) partial sums.
pub fn tree(parts: &[f32]) -> f32 {
    assert!(parts.len().is_power_of_two(), "the balanced tree needs a power of two, got {}", parts.len());
    if parts.len() == 1 { parts[0] } else { tree(&parts[..parts.len() / 2]) + tree(&parts[parts.len() / 2..]) }
}

/// The virtual shard of expert `expert` of `experts`: ⌊8e/E⌋, for E ≥ 8.
pub fn shard_of(expert: usize, experts: usize) -> usize {
    EXPERT_SHARDS * expert / experts
}

/// The experts that rank `rank` of `ranks` owns: those of its 8/N consecutive shards.
pub fn experts_of_rank(rank: usize, ranks: usize, experts: usize) -> std::ops::Range<usize> {
    let first_of_shard = |shard: usize| (shard * experts).div_ceil(EXPERT_SHARDS);
    let per = EXPERT_SHARDS / ranks;
    first_of_shard(rank * per)..first_of_shard((rank + 1) * per)
}

/// What evaluates the contract on the CPU.
const REFERENCES: &[(&str, &str)] = &[
    ("cpu/weight.rs", include_str!("cpu/weight.rs")),
    ("math/attend.rs", include_str!("math/attend.rs")),
    ("math/bf16.rs", include_str!("math/bf16.rs")),
    ("math/exp.rs", include_str!("math/exp.rs")),
    ("math/gemm.rs", include_str!("math/gemm.rs")),
    ("math/mod.rs", include_str!("math/mod.rs")),
    ("math/norm.rs", include_str!("math/norm.rs")),
    ("math/philox.rs", include_str!("math/philox.rs")),
    ("math/rope.rs", include_str!("math/rope.rs")),
    ("math/route.rs", include_str!("math/route.rs")),
    ("math/sample.rs", include_str!("math/sample.rs")),
    ("ops/embed.rs", include_str!("ops/embed.rs")),
    ("ops/exchange.rs", include_str!("ops/exchange.rs")),
    ("ops/feed.rs", include_str!("ops/feed.rs")),
    ("ops/fetch.rs", include_str!("ops/fetch.rs")),
    ("ops/gemm_add.rs", include_str!("ops/gemm_add.rs")),
    ("ops/gqa_attend.rs", include_str!("ops/gqa_attend.rs")),
    ("ops/gqa_prep.rs", include_str!("ops/gqa_prep.rs")),
    ("ops/head.rs", include_str!("ops/head.rs")),
    ("ops/mla_attend.rs", include_str!("ops/mla_attend.rs")),
    ("ops/mla_prep.rs", include_str!("ops/mla_prep.rs")),
    ("ops/mla_uv.rs", include_str!("ops/mla_uv.rs")),
    ("ops/mod.rs", include_str!("ops/mod.rs")),
    ("ops/moe_combine.rs", include_str!("ops/moe_combine.rs")),
    ("ops/moe_down.rs", include_str!("ops/moe_down.rs")),
    ("ops/moe_gate.rs", include_str!("ops/moe_gate.rs")),
    ("ops/moe_up.rs", include_str!("ops/moe_up.rs")),
    ("ops/norm_gate_up.rs", include_str!("ops/norm_gate_up.rs")),
    ("ops/norm_gemm.rs", include_str!("ops/norm_gemm.rs")),
    ("ops/rows.rs", include_str!("ops/rows.rs")),
    ("ops/sample.rs", include_str!("ops/sample.rs")),
];

/// SHA-256 over the contract: this file's text, the CPU references' and CUDA sources that evaluate it, and `device`
/// (for a GPU: architecture, compiler version and options; for the CPU: `cpu` and the precision).
pub fn hash(device: &str) -> [u8; 32] {
    let mut sha = Sha256::new();
    sha.update(VERSION.to_le_bytes());
    sha.update(include_str!("contract.rs"));
    for (name, text) in REFERENCES.iter().chain(crate::cuda_sources()) {
        sha.update((name.len() as u64).to_le_bytes());
        sha.update(name);
        sha.update((text.len() as u64).to_le_bytes());
        sha.update(text);
    }
    for flag in NVRTC_NUMERIC_FLAGS {
        sha.update(flag);
    }
    sha.update(device);
    sha.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_every_tile_once_in_order() {
        for tiles in [1, 4, 5, 16, 128, 684] {
            for slices in [1, 2, 4, 8] {
                let seen: Vec<usize> = (0..slices).flat_map(|s| slice_tiles(s, slices, tiles)).collect();
                assert_eq!(seen, (0..tiles).collect::<Vec<_>>());
            }
        }
        assert_eq!(slice_tiles(0, 8, 684).len(), 85);
        assert_eq!(slice_tiles(1, 8, 684).len(), 86);
    }

    #[test]
    fn the_tree_is_balanced_and_not_a_left_sum() {
        let parts = [1.0e8_f32, 1.0, -1.0e8, 1.0];
        assert_eq!(tree(&parts), (1.0e8_f32 + 1.0) + (-1.0e8 + 1.0));
        assert_ne!(tree(&parts), ((1.0e8_f32 + 1.0) + -1.0e8) + 1.0);
    }

    #[test]
    fn the_hash_covers_every_reference() {
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for folder in ["math", "ops"] {
            for file in std::fs::read_dir(source.join(folder)).unwrap() {
                let file = file.unwrap().file_name().into_string().unwrap();
                let listed = REFERENCES.iter().any(|(name, _)| *name == format!("{folder}/{file}"));
                assert!(listed || file == "tests.rs", "{folder}/{file} is not in the hash");
            }
        }
        assert_ne!(hash("cpu oracle"), hash("cpu contract"));
    }

    #[test]
    fn ranks_partition_the_experts_by_whole_shards() {
        for experts in [8, 12, 16, 64, 160] {
            for ranks in [1, 2, 4, 8] {
                let all: Vec<usize> = (0..ranks).flat_map(|r| experts_of_rank(r, ranks, experts)).collect();
                assert_eq!(all, (0..experts).collect::<Vec<_>>());
                for rank in 0..ranks {
                    for expert in experts_of_rank(rank, ranks, experts) {
                        assert_eq!(shard_of(expert, experts) / (EXPERT_SHARDS / ranks), rank);
                    }
                }
            }
        }
    }
}
