/* gqa_prep: per head (qk-norm,) RoPE, rounding, and the append of k and v
 * Buffers   q [R, HEADS, HEAD_DIM] bf16 · kv pages [.., PAGE_TOKENS, 2 · KV_HEADS · HEAD_DIM] bf16: k, then v · qkv [R, (HEADS + 2 · KV_HEADS) · HEAD_DIM] f32
 *           q_norm, k_norm [HEAD_DIM] f32 (QK_NORM) · rope [positions, HEAD_DIM / 2, 2] f32 · slot, position [R] u32 · block_table [.., PAGES_PER_SLOT] u32
 * Launch    grid ceil(R · (HEADS + 2 · KV_HEADS) / 8), block 256: a warp takes one head of one row
 * Numerics  norm.cuh; the norm output is rounded, then the rotated value; a·cos − b·sin, b·cos + a·sin, products rounded
 * Pad rows  write line 0 of page 0                   Capture   no allocation, sync or readback
 * Cost      latency                                  Reference kernels/src/ops/gqa_prep.rs */
static_assert(HEAD_DIM % 8 == 0, "a norm's lane takes eight columns at a time");
constexpr int UNITS = HEADS + 2 * KV_HEADS, PAIRS = HEAD_DIM / 2, WIDTH = 2 * KV_HEADS * HEAD_DIM;

KERNEL void __launch_bounds__(256) gqa_prep(bf16* q, bf16* kv, const float* qkv, const float* q_norm, const float* k_norm, const float* rope, const u32* slot,
                                            const u32* position, const u32* block_table, u32 rows) {
  __shared__ float heads[8][HEAD_DIM];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, unit = blockIdx.x * 8 + warp, row = unit / UNITS, head = unit % UNITS;
  const bool live = row < rows;
  u32 at = 0, line = 0;
  if (live) {
    at = ld_early_u32(position + row);
    line = ld_early_u32(block_table + (u64)ld_early_u32(slot + row) * PAGES_PER_SLOT + at / PAGE_TOKENS) * PAGE_TOKENS + at % PAGE_TOKENS;
  }
  const bool is_value = head >= HEADS + KV_HEADS;
  const float* norm = head < HEADS ? q_norm : k_norm;
  /* Weights that the step has driven from the L2 since they were read last: asked for before the wait, the angles into registers. */
  constexpr int EACH = ceil_div(PAIRS, 32);
  float cos[EACH], sin[EACH];
  if (live && !is_value) {
    if (QK_NORM && lane * 32 < HEAD_DIM) prefetch_l2(norm + lane * 32);
    const float* angles = rope + (u64)at * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane < PAIRS) cos[i] = ld_weight_f32(angles + 2 * (i * 32 + lane)), sin[i] = ld_weight_f32(angles + 2 * (i * 32 + lane) + 1);
  }
  wait_and_let_start<SUCCESSOR>(rows);
  if (!live) return;
  const float* from = qkv + ((u64)row * UNITS + head) * HEAD_DIM;
  float* x = heads[warp];
  if (QK_NORM && !is_value) {
    norm_row_by_warp<HEAD_DIM>(from, norm, __uint_as_float(EPS_BITS), lane, [&](int column, V4 y) {
      const u32 pair[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[column + 2 * i] = bf16_low(pair[i]);
        x[column + 2 * i + 1] = bf16_high(pair[i]);
      }
    });
  } else {
    for (int column = lane; column < HEAD_DIM; column += 32) x[column] = ld_act_f32(from + column);
  }
  sync_warp();
  bf16* to = head < HEADS ? q + ((u64)row * HEADS + head) * HEAD_DIM : kv + (u64)line * WIDTH + (head - HEADS) * HEAD_DIM;
  if (is_value) {
    for (int pair = lane; pair < PAIRS; pair += 32) st_u32((u32*)(to + 2 * pair), bf16_pair(x[2 * pair], x[2 * pair + 1]));
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int pair = i * 32 + lane;
      if (pair >= PAIRS) break;
      const float a = x[pair], b = x[pair + PAIRS];
      st_bf16(to + pair, bf16_round(a * cos[i] - b * sin[i]));
      st_bf16(to + pair + PAIRS, bf16_round(b * cos[i] + a * sin[i]));
    }
  }
}
