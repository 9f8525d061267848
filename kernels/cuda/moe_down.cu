/* moe_down: y_e = W_down[e] · act, w_e · y_e summed per virtual shard in ascending id, the balanced tree over this rank's shards, shared experts
 * Buffers   RESIDUAL: x [R, WEIGHT_N] f32, x = (tree + shared) + x · else partial (the tree), shared_out [R, WEIGHT_N] f32
 *           act [R, TOP_K, WEIGHT_K] bf16 · expert_id [R, TOP_K] u32, expert_weight [R, TOP_K] f32 · shared_act [R, SHARED_K] bf16
 *           weight packed, EXPERTS groups of [WEIGHT_N, WEIGHT_K] · shared_weight packed [WEIGHT_N, SHARED_K], two slices
 * Launch    grid (row tiles, chunks of CHUNK rows), block 256: a block owns 16 outputs of a chunk's rows; its warps take experts and slices of
 *           the shared experts in turn and leave y in shared memory; one barrier; then the sums in order
 * Numerics  one slice an expert, two slices and their sum for the shared experts (gemm.cuh); p = p + w · y from +0.0, product rounded
 * Pad rows  have no expert: only the shared experts' output   Capture   no allocation, sync or readback
 * Cost      (active experts · WEIGHT_K + SHARED_K) · WEIGHT_N · 2 B, memory-bound; no spills
 * Reference kernels/src/ops/moe_down.rs */
static_assert(WEIGHT_K % 32 == 0 && SHARED_K % 64 == 0, "chains must be whole pairs of tiles");
static_assert(SHARDS <= EXPERT_SHARDS && (SHARDS & (SHARDS - 1)) == 0, "a rank owns 1, 2, 4 or 8 shards");

constexpr int K_TILES = WEIGHT_K / 16, N_TILES = WEIGHT_N / 16, HALF_TILES = SHARED_K / 32; /* k tiles of one slice of the shared experts */
DI constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int DEPTH = chain_depth(HALF_TILES ? common_divisor(K_TILES / 2, HALF_TILES / 2) : K_TILES / 2, 1, TOKEN_TILES >= 4 ? 6 : 11);
typedef Chain<1, TOKEN_TILES, 2, DEPTH, false> Work; /* even tiles only, so the tail rule of the type never applies */
typedef Routes<EXPERTS, CHUNK * TOP_K, 8> Table;

KERNEL void __launch_bounds__(256, 1)
    moe_down(float* out, float* shared_out, const bf16* act, const u32* expert_id, const float* expert_weight, const V4* weight, const bf16* shared_act,
             const V4* shared_weight, u32 rows) {
  DYNAMIC_SHARED;
  float* y = (float*)dynamic_shared;                 /* [CHUNK · TOP_K lines][16] */
  float* y_shared = y + CHUNK * TOP_K * 16;          /* [2][CHUNK][16] */
  Table& routes = *(Table*)(y_shared + 2 * CHUNK * 16);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_tile = blockIdx.x, first_row = blockIdx.y * CHUNK, live = min_of((int)rows - first_row, CHUNK);
  const u32* ids = expert_id + (u64)first_row * TOP_K;
  routes.build(ids, live * TOP_K, FIRST_EXPERT); /* chosen two nodes back */

  /* Items: first the slices of the shared experts by groups of tokens, then the active experts. */
  const int groups = ceil_div(live, TOKEN_TILES * 8), shared_items = SHARED_K ? 2 * groups : 0, items = shared_items + routes.active_count;
  auto weights_of = [&](int item) {
    if (item < shared_items) return shared_weight + ((u64)row_tile * (2 * HALF_TILES) + item % 2 * HALF_TILES) * 32 + lane;
    return weight + ((u64)routes.active[item - shared_items] * N_TILES + row_tile) * K_TILES * 32 + lane;
  };
  Work work;
  int item = warp;
  const V4* mine = nullptr;
  if (item < items) {
    mine = weights_of(item);
    work.start(mine, 0, 2 * DEPTH);
  }
  wait_for_predecessor(rows);
  let_successor_start();
  while (item < items) {
    const bool is_shared = item < shared_items;
    const int half = item % 2, expert = is_shared ? 0 : routes.active[item - shared_items];
    const int count = is_shared ? live : (int)routes.count[expert], first = is_shared ? item / 2 * TOKEN_TILES * 8 : 0;
    const int end = is_shared ? min_of(first + TOKEN_TILES * 8, live) : count;
    const u16* lines = routes.line + routes.start[expert];
    const V4* next = item + 8 < items ? weights_of(item + 8) : nullptr;
    for (int token = first; token < end; token += TOKEN_TILES * 8) {
      const int tiles = min_of(TOKEN_TILES, ceil_div(end - token, 8));
      GatheredTokens<2, TOKEN_TILES> tokens;
      tokens.quad = t;
      tokens.x = is_shared ? shared_act + (u64)first_row * SHARED_K + half * HALF_TILES * 16 : act + (u64)first_row * TOP_K * WEIGHT_K;
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++) {
        const int i = token + tile * 8 + g;
        tokens.offset[tile] = i >= count ? tokens.DEAD : is_shared ? i * SHARED_K : lines[i] * WEIGHT_K;
      }
      work.run(mine, 0, is_shared ? HALF_TILES : K_TILES, token + TOKEN_TILES * 8 < end ? mine : next, tokens, tiles);
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int i = token + tile * 8 + 2 * t + side;
          if (i < count) {
            float* to = is_shared ? y_shared + (half * CHUNK + i) * 16 : y + lines[i] * 16;
            to[g] = work.sum[0][tile][side], to[g + 8] = work.sum[0][tile][2 + side];
          }
        }
    }
    item += 8, mine = next;
  }
  sync_block();

  for (int i = threadIdx.x; i < live * 16; i += 256) {
    const int row = i / 16, r = i % 16, column = row_tile * 16 + r;
    float shard[SHARDS];
#pragma unroll
    for (int v = 0; v < SHARDS; v++) shard[v] = 0.0f;
#pragma unroll
    for (int choice = 0; choice < TOP_K; choice++) {
      const int line = row * TOP_K + choice;
      const u32 local = ld_early_u32(ids + line) - FIRST_EXPERT;
      if (local < EXPERTS) {
        const int v_of = (local + FIRST_EXPERT) * EXPERT_SHARDS / EXPERTS_ALL - FIRST_SHARD;
        const float term = ld_act_f32(expert_weight + (u64)first_row * TOP_K + line) * y[line * 16 + r];
#pragma unroll
        for (int v = 0; v < SHARDS; v++)
          if (v == v_of) shard[v] = shard[v] + term;
      }
    }
#pragma unroll
    for (int width = SHARDS / 2; width > 0; width /= 2)
#pragma unroll
      for (int v = 0; v < width; v++) shard[v] = shard[2 * v] + shard[2 * v + 1];
    const float both = SHARED_K ? y_shared[row * 16 + r] + y_shared[(CHUNK + row) * 16 + r] : 0.0f;
    const u64 at = (u64)(first_row + row) * WEIGHT_N + column;
    if (column < WEIGHT_N) {
#if RESIDUAL
      st_f32(out + at, (shard[0] + both) + ld_act_f32(out + at));
#else
      st_f32(out + at, shard[0]);
      st_f32(shared_out + at, both);
#endif
    }
  }
}
