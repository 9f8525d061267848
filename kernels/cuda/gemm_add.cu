/* gemm_add: x[r, :] += W · input[r, :] (+ bias)
 * Buffers   x [R, WEIGHT_N] f32, updated in place · input [R, WEIGHT_K] bf16 · weight packed [WEIGHT_N, WEIGHT_K] · bias [WEIGHT_N] f32
 * Launch    grid (row tiles / ROW_TILES, token tiles / TOKEN_TILES), block 256: warp = K slice
 *           HELD, HELD_SHARED: as in norm_gemm.cu. SUCCESSOR: common.cuh
 * Numerics  eight slices and their tree (gemm.cuh); x + (sum + bias) in fp32; every element has one owner
 * Pad rows  computed like any row                    Capture   no allocation, sync or readback
 * Cost      WEIGHT_N · WEIGHT_K · 2 B, memory-bound; spills at most 8 B
 * Reference kernels/src/ops/gemm_add.rs */
static_assert(WEIGHT_K % 16 == 0, "K must be whole tiles");
static_assert(SLICES == 8, "this kernel is written for eight slices, one a warp");

constexpr int K_TILES = WEIGHT_K / 16;
typedef Sliced<K_TILES, ROW_TILES, TOKEN_TILES, HELD, (HELD > 0)> Tile;
static_assert(HELD_SHARED == 8 * Tile::HELD_BYTES, "the host counts as gemm.cuh does");

KERNEL void __launch_bounds__(256, BLOCKS_PER_SM) gemm_add(float* x, const bf16* input, const V4* weight, const float* bias, u32 rows) {
  DYNAMIC_SHARED;
  float* slices = (float*)(dynamic_shared + HELD_SHARED);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_tile = blockIdx.x * ROW_TILES, token = blockIdx.y * TOKEN_TILES * 8;
  const int first = slice_begin(warp, SLICES, K_TILES), end = slice_begin(warp + 1, SLICES, K_TILES);
  const V4* mine = weight + (u64)row_tile * K_TILES * 32 + lane;

  Tile::Work work;
  work.start(mine, first, end);
  if (HELD) work.hold((V4*)(dynamic_shared + warp * Tile::HELD_BYTES), mine, first, end);
  wait_and_let_start<SUCCESSOR>(rows);
  const auto tokens = rows_of<K_TILES, TOKEN_TILES, WEIGHT_K>(input, token, rows, lane);
  /* The sums so far, asked for now and needed last. */
  constexpr int EACH = ceil_div(TOKEN_TILES * 8 * 16, 256);
  float old[ROW_TILES][EACH];
#pragma unroll
  for (int row = 0; row < ROW_TILES; row++)
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int column = (row_tile + row) * 16 + threadIdx.x % 16, r = token + (i * 256 + (int)threadIdx.x) / 16;
      if (i * 256 + (int)threadIdx.x < TOKEN_TILES * 8 * 16 && r < (int)rows && column < WEIGHT_N) old[row][i] = ld_act_f32(x + (u64)r * WEIGHT_N + column);
    }
  if (HELD) copy_wait<0>(); /* a lane reads what it copied itself */
  work.pass<TOKEN_TILES>(mine, first, end, nullptr, tokens);
  let_start_after_loads<SUCCESSOR>();

#pragma unroll
  for (int row = 0; row < ROW_TILES; row++) {
    if (row) sync_block();
    Tile::share(slices, work, row, warp, lane);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = i * 256 + (int)threadIdx.x, column = (row_tile + row) * 16 + at % 16, r = token + at / 16;
      if (at < TOKEN_TILES * 8 * 16 && r < (int)rows && column < WEIGHT_N) {
        float value = Tile::total(slices, at / 16, at % 16);
        if (HAS_BIAS) value = value + ld_weight_f32(bias + column);
        st_f32(x + (u64)r * WEIGHT_N + column, old[row][i] + value);
      }
    }
  }
}
