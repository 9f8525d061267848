/* mla_uv: out[r, h · V_DIM …] = W_UV[h] · o_lat[r, h, :], rounded
 * Buffers   out [R, HEADS · V_DIM] bf16 · o_lat [R, HEADS, LORA] bf16 · w_uv packed, HEADS groups of [V_DIM, LORA]
 * Launch    grid (heads · row tiles, token groups), block 32 · WARPS: the warps of a block take one row tile, a tile of 8 tokens each
 * Numerics  one slice (gemm.cuh), one rounding at store
 * Pad rows  computed like any row                    Capture   no allocation, sync or readback
 * Cost      HEADS · V_DIM · LORA · 2 B, latency      Reference kernels/src/ops/mla_uv.rs */
static_assert(V_DIM % 16 == 0 && LORA % 16 == 0, "K and a head's outputs must be whole tiles");

constexpr int K_TILES = LORA / 16, N_TILES = V_DIM / 16, PAIRS = ceil_div(K_TILES, 2);
/* The whole row tile (in flight before the wait) and the whole of a warp's tokens fit into registers: two latencies in all. */
constexpr bool RESIDENT = K_TILES % 2 == 0 && PAIRS <= 16;

KERNEL void __launch_bounds__(32 * WARPS) mla_uv(bf16* out, const bf16* o_lat, const V4* w_uv, u32 rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x, head = tile / N_TILES, first = (blockIdx.y * WARPS + warp) * 8;
  const V4* mine = w_uv + (u64)tile * K_TILES * 32 + lane;
  const auto tokens = rows_of<K_TILES, 1, HEADS * LORA>(o_lat + head * LORA, first, rows, lane);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if constexpr (RESIDENT) {
    V4 w[K_TILES], x[PAIRS];
#pragma unroll
    for (int i = 0; i < K_TILES; i++) w[i] = WARPS == 1 ? ld_weight16(mine + i * 32) : ld_weight16_shared(mine + i * 32);
    wait_and_let_start<SUCCESSOR>(rows);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) x[pair] = tokens.pair(0, pair);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      mma(sum, w[2 * pair], x[pair].x, x[pair].y);
      mma(sum, w[2 * pair + 1], x[pair].z, x[pair].w);
    }
  } else {
    Whole<K_TILES, 1, 1>::Work work;
    work.start(mine, 0, K_TILES);
    wait_and_let_start<SUCCESSOR>(rows);
    work.pass<1>(mine, 0, K_TILES, nullptr, tokens);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = work.sum[0][0][i];
  }
  const int column = tile * 16 + lane / 4;
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    const int row = first + lane % 4 * 2 + odd;
    if (row < (int)rows) {
      bf16* to = out + (u64)row * (HEADS * V_DIM) + column;
      st_bf16(to, bf16_round(sum[odd]));
      st_bf16(to + 8, bf16_round(sum[2 + odd]));
    }
  }
}
