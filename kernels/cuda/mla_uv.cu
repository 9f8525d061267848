/* mla_uv: out[r, h · V_DIM …] = W_UV[h] · o_lat[r, h, :], rounded
 * Buffers   out [R, HEADS · V_DIM] bf16 · o_lat [R, HEADS, LORA] bf16 · w_uv packed, HEADS groups of [V_DIM, LORA]
 * Launch    grid (heads · row tiles / WARPS, token groups), block 32 · WARPS: a warp takes one row tile
 * Numerics  one slice (gemm.cuh), one rounding at store
 * Pad rows  computed like any row                    Capture   no allocation, sync or readback
 * Cost      HEADS · V_DIM · LORA · 2 B, latency      Reference kernels/src/ops/mla_uv.rs */
static_assert(V_DIM % 16 == 0 && LORA % 16 == 0, "K and a head's outputs must be whole tiles");

constexpr int K_TILES = LORA / 16, N_TILES = V_DIM / 16, PAIRS = ceil_div(K_TILES, 2);
/* One token tile leaves room for the whole row tile: 16 KB a warp in flight before the wait. */
constexpr bool RESIDENT = TOKEN_TILES == 1 && K_TILES % 2 == 0 && PAIRS <= 16;
constexpr int DEPTH = RESIDENT ? PAIRS : Whole<K_TILES, 1, TOKEN_TILES>::DEPTH;
constexpr bool GUARDED = RESIDENT ? false : Whole<K_TILES, 1, TOKEN_TILES>::GUARDED;

KERNEL void __launch_bounds__(32 * WARPS) mla_uv(bf16* out, const bf16* o_lat, const V4* w_uv, u32 rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x * WARPS + warp, head = tile / N_TILES, first = blockIdx.y * TOKEN_TILES * 8;
  const V4* mine = w_uv + (u64)tile * K_TILES * 32 + lane;
  Chain<1, TOKEN_TILES, K_TILES, DEPTH, GUARDED> work;
  work.start(mine, 0, K_TILES);
  wait_for_predecessor(rows);
  let_successor_start();
  const auto tokens = rows_of<K_TILES, TOKEN_TILES, HEADS * LORA>(o_lat + head * LORA, first, rows, lane);
  work.pass<TOKEN_TILES>(mine, 0, K_TILES, nullptr, tokens);
  const int column = tile * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const int row = first + i * 8 + lane % 4 * 2 + odd;
      if (row < (int)rows) {
        bf16* to = out + (u64)row * (HEADS * V_DIM) + column;
        st_bf16(to, bf16_round(work.sum[0][i][odd]));
        st_bf16(to + 8, bf16_round(work.sum[0][i][2 + odd]));
      }
    }
}
