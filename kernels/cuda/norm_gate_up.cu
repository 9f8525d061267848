/* norm_gate_up: out[r, j] = silu(gate_j) · up_j with [gate | up] = W · rms_norm(x[r, :]), rounded
 * Buffers   out [R, WEIGHT_N / 2] bf16 · x [R, WEIGHT_K] f32 (FUSED), or h [R, WEIGHT_K] bf16, made by norm.cu
 *           weight packed [WEIGHT_N, WEIGHT_K], gate and up rows of an output in one tile · norm [WEIGHT_K] f32
 * Launch    SLICES 8: grid (row tiles / ROW_TILES, token tiles / TOKEN_TILES), block 256: warp = K slice
 *           SLICES 1: grid (stride over row tiles, token groups), block 32 · WARPS: warp = ROW_TILES row tiles, the group's tokens in shared memory
 *           STAGED (SLICES 1): grid (at least row tiles / (WARPS · ROW_TILES), token groups), the same block
 *           HELD: all weights of a block are in registers and shared memory before the wait. SUCCESSOR: common.cuh
 * Numerics  gemm.cuh, norm.cuh; silu(g) = g / (1 + exp(−g)), product in fp32, one rounding
 * Pad rows  computed like any row                    Capture   no allocation, sync or readback
 * Cost      WEIGHT_N · WEIGHT_K · 2 B, memory-bound; spills at most 44 B
 * Reference kernels/src/ops/norm_gate_up.rs */
static_assert(WEIGHT_K % 16 == 0 && WEIGHT_N % 16 == 0, "K must be whole tiles, gate and up whole half tiles");
static_assert(SLICES == 8 || SLICES == 1, "eight slices, one a warp, or one");

constexpr int K_TILES = WEIGHT_K / 16, N_TILES = WEIGHT_N / 16, INNER = WEIGHT_N / 2, STRIDE = ceil_div(WEIGHT_K, 64) * 64 + 32;

/* Lane 4g + t of a warp's tile holds gate (sum[0], sum[1]) and up (sum[2], sum[3]) of output g for tokens 2t and 2t + 1. */
DI void store_gated(bf16* out, const float (&sum)[4], int row_tile, int token, int rows, int lane) {
  const int output = row_tile * 8 + lane / 4, r = token + lane % 4 * 2;
  if (r < rows) st_bf16(out + (u64)r * INNER + output, bf16_round(silu(sum[0]) * sum[2]));
  if (r + 1 < rows) st_bf16(out + (u64)(r + 1) * INNER + output, bf16_round(silu(sum[1]) * sum[3]));
}

KERNEL void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) norm_gate_up(bf16* out, const void* x, const V4* weight, const float* norm, u32 rows) {
  DYNAMIC_SHARED;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if SLICES == 8
  typedef Sliced<K_TILES, ROW_TILES, TOKEN_TILES, HELD ? 4 : 0, HELD> Tile;
  static_assert(HELD_SHARED == 8 * Tile::HELD_BYTES, "the host counts as gemm.cuh does");
  float* slices = (float*)(dynamic_shared + 8 * Tile::HELD_BYTES);
  const int row_tile = blockIdx.x * ROW_TILES, token = blockIdx.y * TOKEN_TILES * 8;
  const int first = slice_begin(warp, SLICES, K_TILES), end = slice_begin(warp + 1, SLICES, K_TILES);
  const V4* mine = weight + (u64)row_tile * K_TILES * 32 + lane;
  Tile::Work work;
  work.start(mine, first, end);
  if (HELD) work.hold((V4*)(dynamic_shared + warp * Tile::HELD_BYTES), mine, first, end);
#if FUSED
  norm_weights_early<WEIGHT_K>(norm);
#endif
  wait_and_let_start<SUCCESSOR>(rows);
#if FUSED
  bf16* normed = (bf16*)(slices + Tile::SHARED_FLOATS);
  norm_rows_to_shared<WEIGHT_K, STRIDE>(normed, slices, rows, norm, __uint_as_float(EPS_BITS),
                                                         [&](int row) { return (const float*)x + (u64)row * WEIGHT_K; });
  const SharedTokens<K_TILES, STRIDE> tokens(normed, rows, lane);
#else
  const auto tokens = rows_of<K_TILES, TOKEN_TILES, WEIGHT_K>((const bf16*)x, token, rows, lane);
#endif
  if (HELD) copy_wait<0>(); /* a lane reads what it copied itself */
  work.pass<TOKEN_TILES>(mine, first, end, nullptr, tokens);
#pragma unroll
  for (int row = 0; row < ROW_TILES; row++) {
    if (row) sync_block();
    Tile::share(slices, work, row, warp, lane);
    for (int i = threadIdx.x; i < TOKEN_TILES * 8 * 8; i += 256) {
      const int r = token + i / 8;
      if (r < (int)rows) {
        const float gate = Tile::total(slices, i / 8, i % 8), up = Tile::total(slices, i / 8, i % 8 + 8);
        st_bf16(out + (u64)r * INNER + (row_tile + row) * 8 + i % 8, bf16_round(silu(gate) * up));
      }
    }
  }
#elif STAGED
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
    for (int tile = 0; tile < TOKEN_TILES; tile++) store_gated(out, work.sum[row][tile], row_tile + row, token + tile * 8, rows, lane);
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
                                                         [&](int row) { return (const float*)x + (u64)(token + row) * WEIGHT_K; });
  const SharedTokens<K_TILES, STRIDE> tokens(normed, live, lane);
  while (row_tile < N_TILES) {
    const V4* next = mine + (u64)step * K_TILES * 32;
    work.pass<TOKEN_TILES>(mine, 0, K_TILES, row_tile + step < N_TILES, next, tokens);
#pragma unroll
    for (int row = 0; row < ROW_TILES; row++)
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++) store_gated(out, work.sum[row][tile], row_tile + row, token + tile * 8, rows, lane);
    row_tile += step;
    mine = next;
  }
#endif
}
