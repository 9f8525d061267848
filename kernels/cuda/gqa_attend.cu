/* gqa_attend: out[r, h, :] = Σ softmax(scale · q[r, h] · k[h / (heads / kv heads)]) · v over keys 0 … position of the row's slot
 * Buffers   out, q [R, HEADS · KV_HEADS, HEAD_DIM] bf16 · pool [pages, 64, CACHE_WIDTH] bf16: k of all kv heads, then v
 *           block_table [slots, PAGES_PER_SLOT], slot, position [R] u32 · partials [rows, GROUPS, HEADS · KV_HEADS, HEAD_DIM + 2] f32
 *           arrivals [R, HEADS · KV_HEADS] u32, zero before and after
 * Launch    grid (rows, kv heads, splits of the keys), block 32 · WARPS; HEADS query heads share a kv head
 * Numerics  attend.cuh
 * Pad rows  attend to key 0 of page 0            Capture   lengths are read on the device; no allocation, sync or readback
 * Cost      kv_len · CACHE_WIDTH · 2 B a row, memory-bound; no spills
 * Reference kernels/src/ops/gqa_attend.rs */
constexpr int HEAD_DIM = VALUE_WIDTH, HEAD_CHUNKS = HEAD_DIM / 8;
static_assert(KEY_WIDTH == HEAD_DIM && VALUE_AT == HEAD_DIM && SHARED_WIDTH == 2 * HEAD_DIM, "a shared row is k, then v, of one kv head");
static_assert(CACHE_WIDTH == 2 * KV_HEADS * HEAD_DIM, "a cache row is k of all kv heads, then v");

typedef Attend<HEADS, KEY_WIDTH, VALUE_WIDTH, VALUE_AT, SHARED_WIDTH, CACHE_WIDTH, WARPS, STAGES> Block;

KERNEL void __launch_bounds__(WARPS * 32)
    gqa_attend(bf16* out, const bf16* q, const bf16* pool, const u32* block_table, const u32* slot, const u32* position, float* partials, u32* arrivals,
               u32 rows) {
  DYNAMIC_SHARED;
  const int row = blockIdx.x, kv_head = blockIdx.y, head = kv_head * HEADS;
  Block attend(dynamic_shared, pool, block_table + (u64)ld_early_u32(slot + row) * PAGES_PER_SLOT, (int)ld_early_u32(position + row) + 1,
               __uint_as_float(SCALE_BITS));
  const u64 query = (u64)row * (HEADS * KV_HEADS) + head;
  attend.run([=](int chunk) { return (chunk < HEAD_CHUNKS ? kv_head * HEAD_CHUNKS + chunk : (KV_HEADS + kv_head - 1) * HEAD_CHUNKS + chunk) * 8; },
             [&](int h, int chunk) { return ld_act16(q + (query + h) * HEAD_DIM + chunk * 8); }, out + query * HEAD_DIM,
             partials + ((u64)row * GROUPS * (HEADS * KV_HEADS) + head) * (HEAD_DIM + 2), (u64)(HEADS * KV_HEADS) * (HEAD_DIM + 2), arrivals + query,
             blockIdx.z, gridDim.z, rows);
}
