//! mla_prep: everything between the projections and attention of multi-head latent attention, in absorbed form
//! (DeepSeek-V2, arXiv 2405.04434, §2.1.2): q_nope rounded, q_lat[h] = q_nope[h] · W_UK[h] rounded; q_rope rotated and rounded;
//! latent = rms_norm(kv_a[..lora]) rounded and appended; k_rope rotated, rounded and appended.
//!
//! Rotation is of interleaved pairs (2i, 2i+1). The row's page is `block_table[slot][position / PAGE_TOKENS]`; pad rows write page 0.
//! Cache row = latent (lora) then k_rope (rope).

use super::Paged;
use crate::spec::{BufferId, Cols, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MlaPrep {
    /// Out `[R, heads, lora]` bf16.
    pub q_lat: BufferId,
    /// Out `[R, heads, rope]` bf16.
    pub q_rope: BufferId,
    /// In/out: width lora + rope.
    pub paged: Paged,
    /// In f32, width heads·(nope + rope), per head nope then rope.
    pub q: Cols,
    /// In f32, width lora + rope.
    pub kv_a: Cols,
    /// Vector `[lora]`.
    pub kv_norm: WeightId,
    /// Gemm, `heads` groups of `[lora, nope]`.
    pub w_uk: WeightId,
    pub rope: WeightId,
    pub slot: BufferId,
    pub position: BufferId,
    pub heads: usize,
    pub nope_dim: usize,
    pub rope_dim: usize,
    pub lora: usize,
    pub eps: f32,
}
