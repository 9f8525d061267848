/* gqa_attend: out[r, h, :] = Σ softmax(scale · q[r, h] · k[h / (heads / kv heads)]) · v over keys 0 … position of the row's slot
 * Buffers   out, q [R, HEADS · KV_HEADS, HEAD_DIM] bf16 · pool [pages, 64, CACHE_WIDTH] bf16: k of all kv heads, then v
 *           block_table [slots, PAGES_PER_SLOT], slot, position [R] u32 · partials f32, of
 *           rows · GROUPS · HEADS · KV_HEADS · (HEAD_DIM + 16), zero before and after (fold.cuh)
 * Launch    grid (splits of the keys, rows, kv heads), block 32 · WARPS; HEADS query heads share a kv head
 * Numerics  attend.cuh
 * Pad rows  attend to key 0 of page 0            Capture   lengths are read on the device; no allocation, sync or readback
 * Cost      kv_len · CACHE_WIDTH · 2 B a row, memory-bound; no spills
 * Reference kernels/src/ops/gqa_attend.rs */
constexpr int HEAD_DIM = VALUE_WIDTH;
static_assert(KEY_WIDTH == HEAD_DIM, "a shared row is k, then v, of one kv head");
static_assert(CACHE_WIDTH == 2 * KV_HEADS * HEAD_DIM, "a cache row is k of all kv heads, then v");

typedef Attend<HEADS, HEADS * KV_HEADS, KEY_WIDTH, VALUE_WIDTH, HEAD_DIM, 2, HEAD_DIM, CACHE_WIDTH, PAGES_PER_SLOT, GROUPS, WARPS, STEP_TILES, SLOT_KEYS, SLOTS, 1,
               SUCCESSOR>
    Block;

KERNEL void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    gqa_attend(bf16* out, const bf16* q, const bf16* pool, const u32* block_table, const u32* slot, const u32* position, float* partials,
               u32 rows) {
  DYNAMIC_SHARED;
  const int row = blockIdx.y, kv_head = blockIdx.z, head = kv_head * HEADS;
  Block block(dynamic_shared, pool, block_table, slot, position, row, __uint_as_float(SCALE_BITS));
  const u64 query = (u64)row * (HEADS * KV_HEADS) + head;
  block.attend([=](int part) { return (part * KV_HEADS + kv_head) * HEAD_DIM; },
               [&](int h, int chunk) { return ld_act16(q + (query + h) * HEAD_DIM + chunk * 8); }, out + query * HEAD_DIM, partials, nullptr, head, rows);
}
