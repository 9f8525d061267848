/* mla_prep: everything between the projections and attention of multi-head latent attention, in absorbed form
 *   q_lat[h] = W_UK[h] · round(q_nope[h]), rounded · q_rope rotated, rounded · latent = rms_norm(kv_a), k_rope rotated, rounded: appended
 * Buffers   q_lat [R, HEADS, LORA], q_rope [R, HEADS, ROPE_DIM] bf16 · kv pages [.., PAGE_TOKENS, LORA + ROPE_DIM] bf16: latent, then k_rope
 *           q f32, rows Q_STRIDE apart from Q_OFFSET on, a head's NOPE_DIM then ROPE_DIM · kv_a f32, rows KV_STRIDE apart from KV_OFFSET on
 *           w_uk packed, HEADS groups of [LORA, NOPE_DIM] · kv_norm [LORA] f32 · rope [positions, ROPE_DIM / 2, 2] f32 · slot, position [R] u32
 *           block_table [.., PAGES_PER_SLOT] u32
 * Launch    grid (heads · row tiles / WARPS + row blocks, token groups), block 32 · WARPS: warps of the first blocks take a row tile of the y-th token
 *           group, warps of the others one part of one row
 * Numerics  one slice (gemm.cuh), norm.cuh; a·cos − b·sin, b·cos + a·sin over pairs (2i, 2i + 1), products rounded
 * Pad rows  write line 0 of page 0                   Capture   no allocation, sync or readback
 * Cost      HEADS · LORA · NOPE_DIM · 2 B, latency   Reference kernels/src/ops/mla_prep.rs */
static_assert(NOPE_DIM % 16 == 0 && LORA % 16 == 0, "K and the latent must be whole tiles");
static_assert(ROPE_DIM % 8 == 0 && LORA % 8 == 0, "rows are read and written 16 bytes at a time");
static_assert(Q_OFFSET % 4 == 0 && Q_STRIDE % 4 == 0 && KV_OFFSET % 4 == 0 && KV_STRIDE % 4 == 0, "rows are read 16 bytes at a time");

constexpr int K_TILES = NOPE_DIM / 16, N_TILES = LORA / 16, HEAD_WIDTH = NOPE_DIM + ROPE_DIM, KV_WIDTH = LORA + ROPE_DIM;
/* Of a row, side by side because each is a chain of latencies: the latent, k's rope, the ropes of some heads of q. */
constexpr int HEADS_A_PART = 4, Q_PARTS = ceil_div(HEADS, HEADS_A_PART), PARTS = 2 + Q_PARTS;
static_assert(N_TILES % WARPS == 0, "the warps of a block belong to one head");

/* q_nope of a head for token columns in global fp32, rounded on the way. */
struct NopeTokens {
  static constexpr int AHEAD_REGISTERS = 16;
  const float* at; /* row first + g, this head */
  int quad, live;
  DI V4 pair(int tile, int pair) const {
    V4 v = {0, 0, 0, 0};
    if (tile * 8 < live) {
      const bool alone = K_TILES % 2 == 1 && pair == K_TILES / 2;
      const float* from = at + (u64)(tile * 8) * Q_STRIDE + pair * 32 + (alone ? 4 : 8) * quad;
      const F4 low = ld_act_f4(from);
      v.x = bf16_pair(low.x, low.y);
      v.y = bf16_pair(low.z, low.w);
      if (!alone) {
        const F4 high = ld_act_f4(from + 4);
        v.z = bf16_pair(high.x, high.y);
        v.w = bf16_pair(high.z, high.w);
      }
    }
    return v;
  }
};

/* Rotates pair `pair` of a head and stores it. */
DI void rotate(bf16* to, const float* from, const float* angles, int pair) {
  const float a = ld_act_f32(from + 2 * pair), b = ld_act_f32(from + 2 * pair + 1);
  const float cos = ld_weight_f32(angles + 2 * pair), sin = ld_weight_f32(angles + 2 * pair + 1);
  st_u32((u32*)(to + 2 * pair), bf16_pair(a * cos - b * sin, b * cos + a * sin));
}

KERNEL void __launch_bounds__(32 * WARPS)
    mla_prep(bf16* q_lat, bf16* q_rope, bf16* kv, const float* q, const float* kv_a, const V4* w_uk, const float* kv_norm, const float* rope, const u32* slot,
             const u32* position, const u32* block_table, u32 rows) {
  constexpr int GEMM_BLOCKS = HEADS * N_TILES / WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x < GEMM_BLOCKS) {
    const int tile = blockIdx.x * WARPS + warp, head = tile / N_TILES, first = blockIdx.y * TOKEN_TILES * 8;
    const V4* mine = w_uk + (u64)tile * K_TILES * 32 + lane;
    typedef Whole<K_TILES, 1, TOKEN_TILES>::Work Work;
    Work work;
    work.start(mine, 0, K_TILES);
    wait_and_let_start<SUCCESSOR>(rows);
    const int g = lane / 4, t = lane % 4;
    const NopeTokens tokens = {q + Q_OFFSET + head * HEAD_WIDTH + (u64)(first + g) * Q_STRIDE, t, (int)rows - first - g};
    work.pass<TOKEN_TILES>(mine, 0, K_TILES, nullptr, tokens);
    const int column = tile % N_TILES * 16 + g;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; i++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int row = first + i * 8 + 2 * t + odd;
        if (row < (int)rows) {
          bf16* to = q_lat + ((u64)row * HEADS + head) * LORA + column;
          st_bf16(to, bf16_round(work.sum[0][i][odd]));
          st_bf16(to + 8, bf16_round(work.sum[0][i][2 + odd]));
        }
      }
    return;
  }

  const u32 block = blockIdx.y * (gridDim.x - GEMM_BLOCKS) + blockIdx.x - GEMM_BLOCKS;
  const u32 unit = block * WARPS + warp, row = unit / PARTS, part = unit % PARTS;
  const bool live = row < rows;
  u32 at = 0, line = 0;
  if (live) {
    at = ld_early_u32(position + row);
    line = ld_early_u32(block_table + (u64)ld_early_u32(slot + row) * PAGES_PER_SLOT + at / PAGE_TOKENS) * PAGE_TOKENS + at % PAGE_TOKENS;
  }
  const float* angles = rope + (u64)at * ROPE_DIM;
  if (live && lane * 32 < ROPE_DIM) prefetch_l2(angles + lane * 32);
  if (live && part == 0)
    for (int column = lane * 32; column < LORA; column += 1024) prefetch_l2(kv_norm + column);
  wait_and_let_start<SUCCESSOR>(rows);
  if (!live) return;
  const float* from = kv_a + (u64)row * KV_STRIDE + KV_OFFSET;
  bf16* to = kv + (u64)line * KV_WIDTH;
  if (part == 0) {
    norm_row_by_warp<LORA>(from, kv_norm, __uint_as_float(EPS_BITS), lane, [&](int column, V4 y) { st16(to + column, y); });
  } else if (part == 1) {
    for (int pair = lane; pair < ROPE_DIM / 2; pair += 32) rotate(to + LORA, from + LORA, angles, pair);
  } else {
    for (int i = lane; i < HEADS_A_PART * (ROPE_DIM / 2); i += 32) {
      const int head = (part - 2) * HEADS_A_PART + i / (ROPE_DIM / 2), pair = i % (ROPE_DIM / 2);
      if (head < HEADS)
        rotate(q_rope + ((u64)row * HEADS + head) * ROPE_DIM, q + (u64)row * Q_STRIDE + Q_OFFSET + head * HEAD_WIDTH + NOPE_DIM, angles, pair);
    }
  }
}
