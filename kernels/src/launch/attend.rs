//! Geometry of attention: a block takes one row, the heads that share their keys, and a run of key groups or a tile of one. No choice here
//! changes a bit.
//!
//! Few rows split their groups over blocks until the GPU is full; many rows take a block each and fold as they go. **Invariant:** the blocks
//! of a launch that splits rows fit on the GPU all at once, because they wait for each other (`fold.cuh`).

use super::gemm::define_bits;
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, Successor, define};
use crate::Specs;
use crate::contract::{ATTENTION_GROUP, PAGE_TOKENS};
use crate::ops::{GqaAttend, MlaAttend, Paged};
use crate::spec::BufferId;

/// Query heads that one block can take: the rows of an mma.
const HEADS_MAX: usize = 16;
/// Tiles of a key group, and so the blocks of a team.
const GROUP_TILES: usize = ATTENTION_GROUP / PAGE_TOKENS;
/// Shared memory that the GPU keeps of every resident block.
const RESERVED: usize = 1024;

/// Rows times kv head groups above which nothing else starts beside attention.
const CROWDED: usize = 8;

/// What `attend.cuh` is compiled for.
struct Shape {
    op: &'static str,
    /// Heads of one block, and of all.
    heads: usize,
    head_blocks: usize,
    key_width: usize,
    value_width: usize,
    shared_width: usize,
    cache_width: usize,
    /// Whether several blocks may share a group (`team.cuh`).
    teams: bool,
    scale: f32,
}

/// How a block goes through its keys (`attend.cuh`, Compile-time).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    warps: usize,
    step_tiles: usize,
    slot_keys: usize,
    slots: usize,
    blocks_per_sm: usize,
}

impl Form {
    const fn new(warps: usize, step_tiles: usize, slot_keys: usize, slots: usize, blocks_per_sm: usize) -> Form {
        // A step lies in one group.
        let step_tiles = if GROUP_TILES.is_multiple_of(step_tiles) { step_tiles } else { 1 };
        Form { warps, step_tiles, slot_keys, slots, blocks_per_sm }
    }
}

/// Measured on an H200; the last of each that fits is for smaller GPUs.
const MLA: [Form; 4] =
    [Form::new(8, 1, 32, 5, 1), Form::new(8, 1, 32, 4, 1), Form::new(8, 1, 32, 3, 1), Form::new(8, 1, 32, 2, 1)];
/// For one row, all latency: twice the warps share a tile's values (2.19 → 2.15 ms a step at 32,000 tokens, the same at short contexts).
const MLA_ONE: [Form; 5] = [Form::new(16, 1, 32, 5, 1), MLA[0], MLA[1], MLA[2], MLA[3]];
/// For at most one block, two blocks, and more blocks an SM.
const GQA_FEW: [Form; 3] = [Form::new(8, 4, 64, 5, 1), Form::new(8, 4, 64, 4, 1), Form::new(4, 1, 64, 1, 1)];
const GQA_SOME: [Form; 3] = [Form::new(4, 2, 64, 3, 2), Form::new(4, 1, 64, 2, 2), Form::new(4, 1, 64, 1, 1)];
const GQA_MANY: [Form; 3] = [Form::new(4, 1, 64, 2, 3), Form::new(4, 1, 64, 1, 2), Form::new(4, 1, 64, 1, 1)];

/// The buffers of an attention op.
struct Buffers {
    queries: Vec<BufferId>,
    out: BufferId,
    paged: Paged,
    slot: BufferId,
    position: BufferId,
    partials: BufferId,
}

impl Shape {
    /// Bytes of shared memory (`attend.cuh`, SHARED_BYTES).
    fn shared_bytes(&self, form: Form, team: usize) -> usize {
        let (wide, lines) =
            (form.step_tiles.max(team), if self.heads < HEADS_MAX { self.heads + 1 } else { HEADS_MAX });
        let ring = form.slots * form.slot_keys * (self.shared_width + 8) * 2 + 64;
        let q = lines * (self.key_width + 8) * 2;
        let s = self.heads * (form.step_tiles * PAGE_TOKENS + 4) * 4;
        let p = lines * (wide * PAGE_TOKENS + 8) * 2;
        ring + q + s + p + HEADS_MAX * 4 * (wide + 2)
    }

    /// Whether a team's block has room for its tile and its columns of the other tiles.
    fn team_fits(&self, form: Form) -> bool {
        let columns = self.value_width / GROUP_TILES;
        let need = PAGE_TOKENS * (self.shared_width + 8) + (GROUP_TILES - 1) * PAGE_TOKENS * (columns + 8);
        GROUP_TILES > 1
            && form.step_tiles == 1
            && self.value_width.is_multiple_of(GROUP_TILES * 16)
            && need <= form.slots * form.slot_keys * (self.shared_width + 8)
    }

    fn launch(
        &self,
        specs: &dyn Specs,
        gpu: &GpuFacts,
        forms: &[Form],
        buffers: Buffers,
        own: Vec<(&'static str, String)>,
    ) -> Result<Launch, LaunchError> {
        let op = self.op;
        let shape = |what, got, need: &str| Err(LaunchError::Shape { op, what, got, need: need.into() });
        if !self.key_width.is_multiple_of(16) {
            return shape("the width of a key", self.key_width, "a multiple of 16");
        }
        if !self.value_width.is_multiple_of(16) {
            return shape("the width of a value", self.value_width, "a multiple of 16");
        }
        let rows = specs.rows();
        let [scratch_rows, groups, ..] = specs.buffer(buffers.partials).shape[..] else {
            return shape("the rank of the partials", specs.buffer(buffers.partials).shape.len(), "4");
        };
        let (head_rows, split) = (rows * self.head_blocks, rows <= scratch_rows);
        let team_of = |form: Form| {
            let fits = self.teams && split && GROUP_TILES * head_rows <= gpu.sm_count && self.team_fits(form);
            if fits { GROUP_TILES } else { 1 }
        };
        let room = |form: &Form| (gpu.shared_max + RESERVED) / form.blocks_per_sm - RESERVED;
        let fitting = forms.iter().find(|form| self.shared_bytes(**form, team_of(**form)) <= room(form));
        let form = *fitting.or(forms.last()).expect("there is a form");
        let team = team_of(form);
        let shared_bytes = self.shared_bytes(form, team);
        gpu.require_shared(op, shared_bytes)?;
        let splits = match split {
            true => (gpu.sm_count * form.blocks_per_sm / head_rows).clamp(1, groups * team) / team * team,
            false => 1,
        };
        // Blocks that each fill a multiprocessor: what follows waits for them rather than crowd on those that are done.
        let successor = if head_rows > CROWDED { Successor::AtExit } else { Successor::AfterWait };
        let mut defines = vec![
            define("HEADS", self.heads),
            define("KEY_WIDTH", self.key_width),
            define("VALUE_WIDTH", self.value_width),
            define("CACHE_WIDTH", self.cache_width),
            define("WARPS", form.warps),
            define("STEP_TILES", form.step_tiles),
            define("SLOT_KEYS", form.slot_keys),
            define("SLOTS", form.slots),
            define("BLOCKS_PER_SM", form.blocks_per_sm),
            define("TEAM", team),
            define("GROUPS", groups),
            define("PAGES_PER_SLOT", specs.buffer(buffers.paged.block_table).shape[1]),
            define_bits("SCALE_BITS", self.scale),
            successor.define(),
        ];
        defines.extend(own);
        let mut args = vec![Arg::Buffer(buffers.out)];
        args.extend(buffers.queries.into_iter().map(Arg::Buffer));
        args.extend(
            [buffers.paged.kv, buffers.paged.block_table, buffers.slot, buffers.position, buffers.partials]
                .map(Arg::Buffer),
        );
        args.extend(self.teams.then_some(Arg::Counters));
        args.push(Arg::U32(rows as u32));
        let source = if op == "mla_attend" { "mla_attend.cu" } else { "gqa_attend.cu" };
        Ok(Launch {
            kernel: Kernel { source, function: op, defines },
            grid: [splits as u32, rows as u32, self.head_blocks as u32],
            block: (form.warps * 32) as u32,
            shared_bytes: shared_bytes as u32,
            counters: if team > 1 { head_rows * splits * team * self.heads * PAGE_TOKENS } else { 0 },
            args,
            ..Launch::plain()
        })
    }
}

impl MlaAttend {
    pub(super) fn launch(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let op = "mla_attend";
        let heads = self.heads.min(HEADS_MAX);
        if !self.heads.is_multiple_of(heads) {
            let need = format!("at most {HEADS_MAX}, or a multiple of it");
            return Err(LaunchError::Shape { op, what: "the number of heads", got: self.heads, need });
        }
        let width = self.lora + self.rope_dim;
        let shape = Shape {
            op,
            heads,
            head_blocks: self.heads / heads,
            key_width: width,
            value_width: self.lora,
            shared_width: width,
            cache_width: width,
            teams: true,
            scale: self.scale,
        };
        let buffers = Buffers {
            queries: vec![self.q_lat, self.q_rope],
            out: self.o_lat,
            paged: self.paged,
            slot: self.slot,
            position: self.position,
            partials: self.partials,
        };
        let forms: &[Form] = if specs.rows() == 1 { &MLA_ONE } else { &MLA };
        shape.launch(specs, gpu, forms, buffers, vec![define("HEADS_ALL", self.heads)])
    }
}

impl GqaAttend {
    pub(super) fn launch(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let op = "gqa_attend";
        let heads = self.heads / self.kv_heads;
        if heads > HEADS_MAX {
            let need = format!("at most {HEADS_MAX}");
            return Err(LaunchError::Shape { op, what: "query heads of a kv head", got: heads, need });
        }
        let shape = Shape {
            op,
            heads,
            head_blocks: self.kv_heads,
            key_width: self.head_dim,
            value_width: self.head_dim,
            shared_width: 2 * self.head_dim,
            cache_width: 2 * self.kv_heads * self.head_dim,
            teams: false,
            scale: self.scale,
        };
        let forms = match (specs.rows() * self.kv_heads).div_ceil(gpu.sm_count) {
            0..=1 => &GQA_FEW,
            2 => &GQA_SOME,
            _ => &GQA_MANY,
        };
        let buffers = Buffers {
            queries: vec![self.q],
            out: self.out,
            paged: self.paged,
            slot: self.slot,
            position: self.position,
            partials: self.partials,
        };
        shape.launch(specs, gpu, forms, buffers, vec![define("KV_HEADS", self.kv_heads)])
    }
}

const _: () = assert!(ATTENTION_GROUP.is_multiple_of(PAGE_TOKENS), "a group is whole pages");

#[cfg(test)]
mod tests {
    use super::*;

    fn latent() -> Shape {
        Shape {
            op: "mla_attend",
            heads: 16,
            head_blocks: 1,
            key_width: 576,
            value_width: 512,
            shared_width: 576,
            cache_width: 576,
            teams: true,
            scale: 1.0,
        }
    }

    #[test]
    fn an_h200_takes_the_deepest_ring_and_teams() {
        let (shape, form) = (latent(), MLA[0]);
        assert!(shape.team_fits(form));
        assert!(shape.shared_bytes(form, GROUP_TILES) <= GpuFacts::h200().shared_max);
    }

    #[test]
    fn every_list_ends_with_a_form_for_small_shared_memory() {
        let grouped = Shape { key_width: 128, value_width: 128, shared_width: 256, heads: 4, ..latent() };
        for (shape, forms) in [(latent(), &MLA[..]), (grouped, &GQA_FEW[..])] {
            let last = forms[forms.len() - 1];
            assert!(shape.shared_bytes(last, 1) <= 99 * 1024, "{}", shape.shared_bytes(last, 1));
            assert!(!shape.team_fits(last));
        }
    }

    #[test]
    fn as_many_blocks_fit_on_a_multiprocessor_as_the_form_says() {
        let grouped = Shape { key_width: 128, value_width: 128, shared_width: 256, heads: 4, ..latent() };
        let of_sm = GpuFacts::h200().shared_max + RESERVED;
        for forms in [GQA_FEW, GQA_SOME, GQA_MANY] {
            let blocks = of_sm / (grouped.shared_bytes(forms[0], 1) + RESERVED);
            assert_eq!(blocks, forms[0].blocks_per_sm, "{:?}", forms[0]);
        }
    }
}
