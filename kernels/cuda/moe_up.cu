/* moe_up: act[r, i, :] = silu(gate) · up of the row's i-th expert, rounded, for the experts that this rank owns
 * Buffers   act [R, TOP_K, WEIGHT_N / 2] bf16, other ranks' entries untouched · h [R, WEIGHT_K] bf16 · expert_id [R, TOP_K] u32
 *           weight packed, EXPERTS groups of [WEIGHT_N, WEIGHT_K], gate and up rows of an output in one tile
 * Launch    grid: the GPU's blocks, block 256; a warp takes (active expert, row tile) items in strides, all tokens of the expert
 * Numerics  one slice (gemm.cuh); silu(g) = g / (1 + exp(−g)), product in fp32, one rounding
 * Pad rows  have no expert, so nothing is written     Capture   no allocation, sync or readback
 * Cost      active experts · WEIGHT_N · WEIGHT_K · 2 B, memory-bound; no spills
 * Reference kernels/src/ops/moe_up.rs */
static_assert(WEIGHT_K % 32 == 0 && WEIGHT_N % 16 == 0 && SLICES == 1, "K must be whole pairs of tiles, gate and up whole half tiles");

constexpr int K_TILES = WEIGHT_K / 16, N_TILES = WEIGHT_N / 16, INNER = WEIGHT_N / 2;
typedef Whole<K_TILES, 1, TOKEN_TILES> Tile;
typedef Routes<EXPERTS, LINES_MAX, 8> Table;

KERNEL void __launch_bounds__(256, BLOCKS_PER_SM) moe_up(bf16* act, const bf16* h, const u32* expert_id, const V4* weight, u32 rows) {
  DYNAMIC_SHARED;
  Table& routes = *(Table*)dynamic_shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  wait_for_predecessor(rows);
  let_successor_start();
  routes.build(expert_id, rows * TOP_K, FIRST_EXPERT);
  const int items = routes.active_count * N_TILES, stride = gridDim.x * 8;
  auto weights_of = [&](int item) { return weight + ((u64)routes.active[item / N_TILES] * N_TILES + item % N_TILES) * K_TILES * 32 + lane; };

  int item = blockIdx.x * 8 + warp;
  if (item >= items) return;
  Tile::Work work;
  const V4* mine = weights_of(item);
  work.start(mine, 0, K_TILES);
  while (true) {
    const int expert = routes.active[item / N_TILES], row_tile = item % N_TILES;
    const int count = routes.count[expert];
    const u16* lines = routes.line + routes.start[expert];
    const int next_item = item + stride;
    const V4* next = next_item < items ? weights_of(next_item) : nullptr;
    for (int token = 0; token < count; token += TOKEN_TILES * 8) {
      const int tiles = min_of(TOKEN_TILES, ceil_div(count - token, 8));
      GatheredTokens<K_TILES, TOKEN_TILES> tokens;
      tokens.x = h, tokens.quad = t;
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++) {
        const int i = token + tile * 8 + g;
        tokens.offset[tile] = i < count ? lines[i] / TOP_K * WEIGHT_K : tokens.DEAD;
      }
      work.run(mine, 0, K_TILES, token + TOKEN_TILES * 8 < count ? mine : next, tokens, tiles);
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int i = token + tile * 8 + 2 * t + side;
          if (i < count) st_bf16(act + (u64)lines[i] * INNER + row_tile * 8 + g, bf16_round(silu(work.sum[0][tile][side]) * work.sum[0][tile][2 + side]));
        }
    }
    if (!next) return;
    item = next_item, mine = next;
  }
}
