/* head: logits[l, :] = W · rms_norm(x[logit_row[l], :]), fp32
 * Buffers   logits [L, WEIGHT_N] f32 · x [R, WEIGHT_K] f32 (FUSED), or h [L, WEIGHT_K] bf16, made by norm.cu · weight packed [WEIGHT_N, WEIGHT_K]
 *           norm [WEIGHT_K] f32 · logit_row [L] u32
 * Launch    grid (stride over row tiles, token groups), block 32 · WARPS: warp = ROW_TILES row tiles, the group's tokens in shared memory
 *           STAGED: grid (row tiles / (WARPS · ROW_TILES), token groups), the same block
 * Numerics  one slice (gemm.cuh), norm.cuh              Pad rows  computed like any row
 * Capture   no allocation, sync or readback            Cost      WEIGHT_N · WEIGHT_K · 2 B, memory-bound; spills at most 24 B
 * Reference kernels/src/ops/head.rs */
static_assert(WEIGHT_K % 16 == 0, "K must be whole tiles");
static_assert(SLICES == 1, "the head has one slice");

constexpr int K_TILES = WEIGHT_K / 16, N_TILES = (WEIGHT_N + 15) / 16, STRIDE = ceil_div(WEIGHT_K, 64) * 64 + 32;

DI void store_logits(float* logits, const float (&sum)[4], int row_tile, int token, int rows, int lane) {
  const int id = row_tile * 16 + lane / 4, l = token + lane % 4 * 2;
#pragma unroll
  for (int q = 0; q < 4; q++)
    if (l + q % 2 < rows && id + q / 2 * 8 < WEIGHT_N) st_f32(logits + (u64)(l + q % 2) * WEIGHT_N + id + q / 2 * 8, sum[q]);
}

KERNEL void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    head(float* logits, const void* x, const V4* weight, const float* norm, const u32* logit_row, u32 rows) {
  DYNAMIC_SHARED;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if STAGED
  typedef Staged<K_TILES, ROW_TILES, TOKEN_TILES, WARPS, STAGE_PAIRS, STAGES> Work;
  const int row_tile = (warp * gridDim.x + blockIdx.x) * ROW_TILES, token = blockIdx.y * TOKEN_TILES * 8;
  const bool active = row_tile < N_TILES;
  const V4* mine = weight + (u64)(active ? row_tile : 0) * K_TILES * 32 + lane;
  Work work;
  work.start(mine);
  wait_and_let_start<SUCCESSOR>(rows);
  work.run((bf16*)dynamic_shared, mine, active, [&](int i) { return (const bf16*)x + (u64)min_of(token + i, rows - 1) * WEIGHT_K; });
  if (!active) return;
#pragma unroll
  for (int row = 0; row < ROW_TILES; row++)
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; tile++) store_logits(logits, work.sum[row][tile], row_tile + row, token + tile * 8, rows, lane);
#else
  typedef Whole<K_TILES, ROW_TILES, TOKEN_TILES> Tile;
  float* sums = (float*)dynamic_shared;
  bf16* normed = (bf16*)(sums + 32);
  const int step = gridDim.x * WARPS * ROW_TILES, token = blockIdx.y * TOKEN_TILES * 8;
  const int live = min_of(rows - token, TOKEN_TILES * 8);
  int row_tile = (warp * gridDim.x + blockIdx.x) * ROW_TILES;
  const V4* mine = weight + (u64)row_tile * K_TILES * 32 + lane;
  Tile::Work work;
  if (row_tile < N_TILES) work.start(mine, 0, K_TILES);
  norm_weights_early<WEIGHT_K>(norm);
  wait_and_let_start<SUCCESSOR>(rows);
  norm_rows_to_shared<WEIGHT_K, STRIDE>(normed, sums, live, norm, __uint_as_float(EPS_BITS),
                                                         [&](int l) { return (const float*)x + (u64)ld_act_u32(logit_row + token + l) * WEIGHT_K; });
  const SharedTokens<K_TILES, STRIDE> tokens(normed, live, lane);
  while (row_tile < N_TILES) {
    const V4* next = mine + (u64)step * K_TILES * 32;
    work.pass<TOKEN_TILES>(mine, 0, K_TILES, row_tile + step < N_TILES, next, tokens);
#pragma unroll
    for (int row = 0; row < ROW_TILES; row++)
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++) store_logits(logits, work.sum[row][tile], row_tile + row, token + tile * 8, rows, lane);
    row_tile += step;
    mine = next;
  }
#endif
}
