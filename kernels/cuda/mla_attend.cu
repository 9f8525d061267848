/* mla_attend: o_lat[r, h, :] = Σ softmax(scale · (q_lat · latent + q_rope · k_rope)) · latent over keys 0 … position of the row's slot
 * Buffers   o_lat, q_lat [R, HEADS_ALL, VALUE_WIDTH], q_rope [R, HEADS_ALL, ROPE_DIM] bf16 · pool [pages, 64, CACHE_WIDTH] bf16
 *           block_table [slots, PAGES_PER_SLOT], slot, position [R] u32 · partials f32, of rows · GROUPS · HEADS_ALL · (VALUE_WIDTH + 16) (fold.cuh)
 *           inboxes u32, TEAM · HEADS · 64 a block; partials and inboxes are zero before and after
 * Launch    grid (splits of the keys, rows, heads / 16), block 32 · WARPS
 * Numerics  attend.cuh
 * Pad rows  attend to key 0 of page 0            Capture   lengths are read on the device; no allocation, sync or readback
 * Cost      kv_len · CACHE_WIDTH · 2 B a row, memory-bound; no spills
 * Reference kernels/src/ops/mla_attend.rs */
constexpr int ROPE_DIM = KEY_WIDTH - VALUE_WIDTH;
static_assert(ROPE_DIM % 8 == 0 && VALUE_WIDTH % 8 == 0, "a chunk of 8 lies in one of the two parts");

typedef Attend<HEADS, HEADS_ALL, KEY_WIDTH, VALUE_WIDTH, 0, 1, CACHE_WIDTH, CACHE_WIDTH, PAGES_PER_SLOT, GROUPS, WARPS, STEP_TILES, SLOT_KEYS, SLOTS, TEAM,
               SUCCESSOR>
    Block;

KERNEL void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    mla_attend(bf16* o_lat, const bf16* q_lat, const bf16* q_rope, const bf16* pool, const u32* block_table, const u32* slot, const u32* position,
               float* partials, u32* inboxes, u32 rows) {
  DYNAMIC_SHARED;
  const int row = blockIdx.y, head = blockIdx.z * 16;
  Block block(dynamic_shared, pool, block_table, slot, position, row, __uint_as_float(SCALE_BITS));
  const u64 query = (u64)row * HEADS_ALL + head;
  block.attend([](int) { return 0; },
               [&](int h, int chunk) {
                 return chunk * 8 < VALUE_WIDTH ? ld_act16(q_lat + (query + h) * VALUE_WIDTH + chunk * 8)
                                                : ld_act16(q_rope + (query + h) * ROPE_DIM + chunk * 8 - VALUE_WIDTH);
               },
               o_lat + query * VALUE_WIDTH, partials, inboxes, head, rows);
}
