/* norm_gemm: out[r, :] = W · rms_norm(x[r, columns]) (+ bias)
 * Buffers   out [R, WEIGHT_N] f32 · x f32, rows X_STRIDE apart, columns from X_OFFSET on (FUSED), or h [R, WEIGHT_K] bf16, made by norm.cu
 *           weight packed [WEIGHT_N, WEIGHT_K] · norm [WEIGHT_K], bias [WEIGHT_N] f32
 * Launch    grid (row tiles / ROW_TILES, token tiles / TOKEN_TILES), block 256: warp = K slice
 *           FUSED: one token group, every block normalises all rows into shared memory
 *           HELD: pairs of k tiles in a warp's registers where all of a block's weights are asked for before the wait, the others in shared memory; else 0
 * Numerics  eight slices and their tree (gemm.cuh); norm.cuh; bias added in fp32
 * Pad rows  computed like any row                    Capture   no allocation, sync or readback
 * Cost      WEIGHT_N · WEIGHT_K · 2 B, memory-bound; no spills
 * Reference kernels/src/ops/norm_gemm.rs */
static_assert(WEIGHT_K % 16 == 0, "K must be whole tiles");
static_assert(SLICES == 8, "this kernel is written for eight slices, one a warp");

constexpr int K_TILES = WEIGHT_K / 16, STRIDE = ceil_div(WEIGHT_K, 64) * 64 + 32;
typedef Sliced<K_TILES, ROW_TILES, TOKEN_TILES, HELD, (HELD > 0)> Tile;
static_assert(HELD_SHARED == 8 * Tile::HELD_BYTES, "the host counts as gemm.cuh does");

KERNEL void __launch_bounds__(256, BLOCKS_PER_SM)
    norm_gemm(float* out, const void* x, const V4* weight, const float* norm, const float* bias, u32 rows) {
  DYNAMIC_SHARED;
  float* slices = (float*)(dynamic_shared + HELD_SHARED);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_tile = blockIdx.x * ROW_TILES, token = blockIdx.y * TOKEN_TILES * 8;
  const int first = slice_begin(warp, SLICES, K_TILES), end = slice_begin(warp + 1, SLICES, K_TILES);
  const V4* mine = weight + (u64)row_tile * K_TILES * 32 + lane;

  Tile::Work work;
  work.start(mine, first, end);
  if (HELD) work.hold((V4*)(dynamic_shared + warp * Tile::HELD_BYTES), mine, first, end);
#if FUSED
  norm_weights_early<WEIGHT_K>(norm);
#endif
  wait_and_let_start<AT_ONCE>(rows);
#if FUSED
  bf16* normed = (bf16*)(slices + Tile::SHARED_FLOATS);
  norm_rows_to_shared<WEIGHT_K, STRIDE>(normed, slices, rows, norm, __uint_as_float(EPS_BITS),
                                                         [&](int row) { return (const float*)x + (u64)row * X_STRIDE + X_OFFSET; });
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
    for (int i = threadIdx.x; i < TOKEN_TILES * 8 * 16; i += 256) {
      const int column = (row_tile + row) * 16 + i % 16, r = token + i / 16;
      if (r < (int)rows && column < WEIGHT_N) {
        float value = Tile::total(slices, i / 16, i % 16);
        if (HAS_BIAS) value = value + ld_weight_f32(bias + column);
        st_f32(out + (u64)r * WEIGHT_N + column, value);
      }
    }
  }
}
