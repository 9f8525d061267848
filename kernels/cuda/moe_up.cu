/* moe_up: act[r, i, :] = silu(gate) · up of the row's i-th expert, rounded, for the experts that this rank owns
 * Buffers   act [R, TOP_K, WEIGHT_N / 2] bf16, other ranks' entries untouched · h [R, WEIGHT_K] bf16 · expert_id [R, TOP_K] u32
 *           weight packed, EXPERTS groups of [WEIGHT_N, WEIGHT_K], gate and up rows of an output in one tile
 * Launch    grid: the GPU's blocks, block 256; a warp takes (active expert, row tile) items in strides, all tokens of the expert; the warps
 *           of a block mostly share an expert, so its activations come from L1
 *           EARLY: the experts were chosen two launches back, so routes and first weights need not wait for the predecessor, and the
 *           successor may start at once: it reads the choice early too
 * Numerics  one slice (gemm.cuh); silu(g) = g / (1 + exp(−g)), product in fp32, one rounding
 * Pad rows  have no expert, so nothing is written     Capture   no allocation, sync or readback
 * Cost      active experts · WEIGHT_N · WEIGHT_K · 2 B, memory-bound; no spills
 * Reference kernels/src/ops/moe_up.rs */
static_assert(WEIGHT_K % 32 == 0 && WEIGHT_N % 16 == 0 && SLICES == 1, "K must be whole pairs of tiles, gate and up whole half tiles");

constexpr int K_TILES = WEIGHT_K / 16, N_TILES = WEIGHT_N / 16, INNER = WEIGHT_N / 2;
typedef Chain<1, TOKEN_TILES, K_TILES, dividing(K_TILES / 2, DEPTH_MAX), false> Work;

DI void store_act(bf16* act, const float (&sum)[4], int side, u32 line, int row_tile, int g) {
  st_bf16(act + (u64)line * INNER + row_tile * 8 + g, bf16_round(silu(sum[side]) * sum[2 + side]));
}

KERNEL void __launch_bounds__(256, BLOCKS_PER_SM) moe_up(bf16* act, const bf16* h, const u32* expert_id, const V4* weight, u32 rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int stride = gridDim.x * 8;
  int item = blockIdx.x * 8 + warp;
  if (!EARLY) {
    wait_and_let_start<EARLY>(rows);
  }
  Work work;
#if LINES_MAX <= 32
  FewRoutes<EXPERTS> routes;
  routes.build(expert_id, rows * TOP_K, FIRST_EXPERT);
  const int items = routes.active_count * N_TILES;
  auto weights_of = [&](int item) {
    return weight + ((u64)from_lane_u32(routes.id, routes.holder(item / N_TILES)) * N_TILES + item % N_TILES) * K_TILES * 32 + lane;
  };
#else
  DYNAMIC_SHARED;
  typedef Routes<EXPERTS, LINES_MAX, 8> Table;
  Table& routes = *(Table*)dynamic_shared;
  routes.build(expert_id, rows * TOP_K, FIRST_EXPERT);
  const int items = routes.active_count * N_TILES;
  auto weights_of = [&](int item) { return weight + ((u64)routes.active[item / N_TILES] * N_TILES + item % N_TILES) * K_TILES * 32 + lane; };
#endif
  const V4* mine = nullptr;
  if (item < items) {
    mine = weights_of(item);
    work.start(mine, 0, K_TILES);
  }
  if (EARLY) {
    wait_and_let_start<EARLY>(rows);
  }
  while (item < items) {
    const int row_tile = item % N_TILES, next_item = item + stride;
    const bool more = next_item < items;
    const V4* next = more ? weights_of(next_item) : mine;
    GlobalTokens<K_TILES, TOKEN_TILES> tokens(h, lane);
#if LINES_MAX <= 32
    const u32 lines = from_lane_u32(routes.same, routes.holder(item / N_TILES));
    const int count = __popc(lines);
    tokens.offset[0] = (u32)routes.line(lines, min_of(g, count - 1)) / TOP_K * WEIGHT_K;
    work.pass<1>(mine, 0, K_TILES, more, next, tokens);
#pragma unroll
    for (int side = 0; side < 2; side++)
      if (2 * t + side < count) store_act(act, work.sum[0][0], side, routes.line(lines, 2 * t + side), row_tile, g);
#else
    const int expert = routes.active[item / N_TILES], count = routes.count[expert];
    const u16* lines = routes.line + routes.start[expert];
    for (int token = 0; token < count; token += TOKEN_TILES * 8) {
      const int tiles = min_of(TOKEN_TILES, ceil_div(count - token, 8));
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++)
        tokens.offset[tile] = (u32)lines[min_of(token + tile * 8 + g, count - 1)] / TOP_K * WEIGHT_K;
      const bool again = token + TOKEN_TILES * 8 < count;
      work.run(mine, 0, K_TILES, again || more, again ? mine : next, tokens, tiles);
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int i = token + tile * 8 + 2 * t + side;
          if (i < count) store_act(act, work.sum[0][tile], side, lines[i], row_tile, g);
        }
    }
#endif
    item = next_item, mine = next;
  }
}
