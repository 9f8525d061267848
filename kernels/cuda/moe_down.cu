/* moe_down: y_e = W_down[e] · act, w_e · y_e summed per virtual shard in ascending id, the balanced tree over this rank's shards, shared experts
 * Buffers   RESIDUAL: x [R, WEIGHT_N] f32, x = (tree + shared) + x · else partial (the tree), shared_out [R, WEIGHT_N] f32
 *           act [R, TOP_K, WEIGHT_K] bf16 · expert_id [R, TOP_K] u32, expert_weight [R, TOP_K] f32 · shared_act [R, SHARED_K] bf16
 *           weight packed, EXPERTS groups of [WEIGHT_N, WEIGHT_K] · shared_weight packed [WEIGHT_N, SHARED_K], two slices
 *           y [R, TOP_K, WEIGHT_N] f32, y_shared [2, R, WEIGHT_N] f32 (many rows)
 * Launch    few rows: moe_down, grid (row tiles), block 256: a block owns 16 outputs of all rows; its warps take experts and slices of the shared
 *           experts in turn and leave y in shared memory; one barrier; then the sums in order
 *           many rows: moe_down_lines, grid: the GPU's blocks, block 32 · WARPS: a warp takes (slice of the shared experts, row tile) and (active expert,
 *           row tile) items in strides and leaves y in the workspace; moe_down_sum, grid R · WEIGHT_N / 1024: the sums in order. A block's warps
 *           share an expert, so its activations cross L2 once for their row tiles
 * Numerics  one slice an expert, two slices and their sum for the shared experts (gemm.cuh); p = p + w · y from +0.0, product rounded
 * Pad rows  have no expert: only the shared experts' output   Capture   no allocation, sync or readback
 * Cost      (active experts · WEIGHT_K + SHARED_K) · WEIGHT_N · 2 B, memory-bound; no spills
 * Reference kernels/src/ops/moe_down.rs */
static_assert(WEIGHT_K % 32 == 0 && SHARED_K % 64 == 0, "chains must be whole pairs of tiles");
static_assert(SHARDS <= EXPERT_SHARDS && (SHARDS & (SHARDS - 1)) == 0, "a rank owns 1, 2, 4 or 8 shards");

constexpr int K_TILES = WEIGHT_K / 16, N_TILES = ceil_div(WEIGHT_N, 16), HALF_TILES = SHARED_K / 32; /* k tiles of one slice of the shared experts */
DI constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int DEPTH = dividing(HALF_TILES ? common_divisor(K_TILES / 2, HALF_TILES / 2) : K_TILES / 2, DEPTH_MAX);
typedef Chain<1, TOKEN_TILES, 2, DEPTH, false> Work; /* even tiles only, so the tail rule of the type never applies */
typedef GlobalTokens<2, TOKEN_TILES, X_AHEAD> Tokens;

/* The sums of one output: `y_of(choice)` are its experts' outputs, ascending ids. */
template <class Output> DI float shard_tree(const u32* ids, const float* weights, const Output& y_of) {
  float shard[SHARDS];
#pragma unroll
  for (int v = 0; v < SHARDS; v++) shard[v] = 0.0f;
#pragma unroll
  for (int choice = 0; choice < TOP_K; choice++) {
    const u32 local = ids[choice] - FIRST_EXPERT;
    if (local < EXPERTS) {
      const int v_of = (local + FIRST_EXPERT) * EXPERT_SHARDS / EXPERTS_ALL - FIRST_SHARD;
      const float term = weights[choice] * y_of(choice);
#pragma unroll
      for (int v = 0; v < SHARDS; v++)
        if (v == v_of) shard[v] = shard[v] + term;
    }
  }
#pragma unroll
  for (int width = SHARDS / 2; width > 0; width /= 2)
#pragma unroll
    for (int v = 0; v < width; v++) shard[v] = shard[2 * v] + shard[2 * v + 1];
  return shard[0];
}

#if !APART
KERNEL void __launch_bounds__(256, 1)
    moe_down(float* out, float* shared_out, const bf16* act, const u32* expert_id, const float* expert_weight, const V4* weight, const bf16* shared_act,
             const V4* shared_weight, u32 rows) {
  DYNAMIC_SHARED;
  float* y = (float*)dynamic_shared;                /* [LINES_MAX][16] */
  float* y_shared = y + LINES_MAX * 16;             /* [2][ROWS_MAX][16] */
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row_tile = blockIdx.x;
  /* Items: first the slices of the shared experts by groups of tokens, then the active experts. The experts were chosen two launches back. */
  const int groups = ceil_div(rows, TOKEN_TILES * 8), shared_items = SHARED_K ? 2 * groups : 0;
#if LINES_MAX <= 32
  FewRoutes<EXPERTS> routes;
  routes.build(expert_id, rows * TOP_K, FIRST_EXPERT);
  const int items = shared_items + routes.active_count;
  auto expert_of = [&](int i) { return from_lane_u32(routes.id, routes.holder(i)); };
#else
  typedef Routes<EXPERTS, LINES_MAX, 8> Table;
  Table& routes = *(Table*)(y_shared + 2 * ROWS_MAX * 16);
  routes.build(expert_id, rows * TOP_K, FIRST_EXPERT);
  const int items = shared_items + routes.active_count;
  auto expert_of = [&](int i) { return (u32)routes.active[i]; };
#endif
  auto weights_of = [&](int item) {
    if (item < shared_items) return shared_weight + ((u64)row_tile * (2 * HALF_TILES) + item % 2 * HALF_TILES) * 32 + lane;
    return weight + ((u64)expert_of(item - shared_items) * N_TILES + row_tile) * K_TILES * 32 + lane;
  };
  Work work;
  int item = warp;
  const V4* mine = nullptr;
  if (item < items) {
    mine = weights_of(item);
    work.start(mine, 0, 2 * DEPTH);
  }
  /* This thread's output, its experts and the sum so far: chosen and written at least two launches back, so asked for before the wait. */
  static_assert(ROWS_MAX * 16 <= 256, "a thread sums one output");
  const int row = threadIdx.x / 16, r = threadIdx.x % 16, column = row_tile * 16 + r;
  const bool sums = row < (int)rows && column < WEIGHT_N;
  const u64 at = (u64)row * WEIGHT_N + column;
  u32 ids[TOP_K];
  float weights[TOP_K], old = 0.0f;
  if (sums) {
#pragma unroll
    for (int choice = 0; choice < TOP_K; choice++) {
      ids[choice] = ld_early_u32(expert_id + row * TOP_K + choice);
      weights[choice] = __uint_as_float(ld_early_u32((const u32*)expert_weight + row * TOP_K + choice));
    }
    if (RESIDUAL) old = __uint_as_float(ld_early_u32((const u32*)out + at));
  }
  wait_and_let_start<AT_ONCE>(rows);
  while (item < items) {
    const bool more = item + 8 < items;
    const V4* next = more ? weights_of(item + 8) : mine;
    if (item < shared_items) {
      const int half = item % 2, first = item / 2 * TOKEN_TILES * 8;
      Tokens tokens(shared_act + half * HALF_TILES * 16, lane);
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++) tokens.offset[tile] = min_of(first + tile * 8 + g, rows - 1) * SHARED_K;
      work.run(mine, 0, HALF_TILES, more, next, tokens, ceil_div((int)rows - first, 8));
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int r = first + tile * 8 + 2 * t + side;
          float* to = y_shared + (half * ROWS_MAX + r) * 16;
          if (r < (int)rows) to[g] = work.sum[0][tile][side], to[g + 8] = work.sum[0][tile][2 + side];
        }
    } else {
      Tokens tokens(act, lane);
#if LINES_MAX <= 32
      const u32 lines = from_lane_u32(routes.same, routes.holder(item - shared_items));
      const int count = __popc(lines);
      auto line_of = [&](int i) { return routes.line(lines, i); };
#else
      const int count = routes.count[expert_of(item - shared_items)];
      const u16* lines = routes.line + routes.start[expert_of(item - shared_items)];
      auto line_of = [&](int i) { return (int)lines[i]; };
#endif
      for (int token = 0; token < count; token += TOKEN_TILES * 8) {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; tile++) tokens.offset[tile] = line_of(min_of(token + tile * 8 + g, count - 1)) * WEIGHT_K;
        const bool again = token + TOKEN_TILES * 8 < count;
        work.run(mine, 0, K_TILES, again || more, again ? mine : next, tokens, ceil_div(count - token, 8));
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
          for (int side = 0; side < 2; side++) {
            const int i = token + tile * 8 + 2 * t + side;
            if (i < count) {
              float* to = y + line_of(i) * 16;
              to[g] = work.sum[0][tile][side], to[g + 8] = work.sum[0][tile][2 + side];
            }
          }
      }
    }
    item += 8, mine = next;
  }
  sync_block();

  if (!sums) return;
  const float tree = shard_tree(ids, weights, [&](int choice) { return y[(row * TOP_K + choice) * 16 + r]; });
  const float both = SHARED_K ? y_shared[row * 16 + r] + y_shared[(ROWS_MAX + row) * 16 + r] : 0.0f;
#if RESIDUAL
  st_f32(out + at, (tree + both) + old);
#else
  st_f32(out + at, tree);
  st_f32(shared_out + at, both);
#endif
}
#else
/* Leaves the sums of a tile of tokens: `row_of(i)` is where column i's y lies in the workspace. */
template <class RowOf> DI void leave(const Work& work, int row_tile, int token, int count, int lane, const RowOf& row_of) {
  const int g = lane / 4, t = lane % 4, column = row_tile * 16 + g;
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
    for (int side = 0; side < 2; side++) {
      const int i = token + tile * 8 + 2 * t + side;
      if (i < count) {
        float* to = row_of(i);
        if (column < WEIGHT_N) st_f32(to + column, work.sum[0][tile][side]);
        if (column + 8 < WEIGHT_N) st_f32(to + column + 8, work.sum[0][tile][2 + side]);
      }
    }
}

KERNEL void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    moe_down_lines(float* y, const bf16* act, const u32* expert_id, const V4* weight, const bf16* shared_act, const V4* shared_weight, u32 rows) {
  DYNAMIC_SHARED;
  typedef Routes<EXPERTS, LINES_MAX, WARPS> Table;
  Table& routes = *(Table*)dynamic_shared;
  float* y_shared = y + (u64)rows * TOP_K * WEIGHT_N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, stride = gridDim.x * WARPS;
  const int groups = SHARED_K ? ceil_div(rows, SHARED_TILES * 8) : 0, shared_items = 2 * groups * N_TILES;
  routes.build(expert_id, rows * TOP_K, FIRST_EXPERT);
  const int items = shared_items + routes.active_count * N_TILES;
  auto weights_of = [&](int item) {
    const int row_tile = item % N_TILES, which = item / N_TILES;
    if (item < shared_items) return shared_weight + ((u64)row_tile * (2 * HALF_TILES) + which % 2 * HALF_TILES) * 32 + lane;
    return weight + ((u64)routes.active[which - 2 * groups] * N_TILES + row_tile) * K_TILES * 32 + lane;
  };
  Work work;
  int item = blockIdx.x * WARPS + warp;
  const V4* mine = nullptr;
  if (item < items) {
    mine = weights_of(item);
    work.start(mine, 0, 2 * DEPTH);
  }
  wait_and_let_start<AT_ONCE>(rows);
  while (item < items) {
    const int row_tile = item % N_TILES, which = item / N_TILES;
    const bool more = item + stride < items;
    const V4* next = more ? weights_of(item + stride) : mine;
    const bool is_shared = item < shared_items;
    const int half = which % 2, expert = is_shared ? 0 : routes.active[which - 2 * groups];
    const int first = is_shared ? which / 2 * SHARED_TILES * 8 : 0, count = is_shared ? min_of(first + SHARED_TILES * 8, rows) : (int)routes.count[expert];
    const u16* lines = routes.line + routes.start[expert];
    Tokens tokens(is_shared ? shared_act + half * HALF_TILES * 16 : act, lane);
    for (int token = first; token < count; token += TOKEN_TILES * 8) {
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; tile++) {
        const int i = min_of(token + tile * 8 + g, count - 1);
        tokens.offset[tile] = is_shared ? i * SHARED_K : lines[i] * WEIGHT_K;
      }
      const bool again = token + TOKEN_TILES * 8 < count;
      work.run(mine, 0, is_shared ? HALF_TILES : K_TILES, again || more, again ? mine : next, tokens, ceil_div(count - token, 8));
      leave(work, row_tile, token, count, lane,
            [&](int i) { return is_shared ? y_shared + ((u64)half * rows + i) * WEIGHT_N : y + (u64)lines[i] * WEIGHT_N; });
    }
    item += stride, mine = next;
  }
}

KERNEL void __launch_bounds__(256)
    moe_down_sum(float* out, float* shared_out, const float* y, const u32* expert_id, const float* expert_weight, u32 rows) {
  const u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * 4, count = (u64)rows * WEIGHT_N;
  const u32 row = i / WEIGHT_N, column = i % WEIGHT_N;
  u32 ids[TOP_K];
  float weights[TOP_K];
  if (i < count)
#pragma unroll
    for (int choice = 0; choice < TOP_K; choice++) {
      ids[choice] = ld_early_u32(expert_id + row * TOP_K + choice);
      weights[choice] = __uint_as_float(ld_early_u32((const u32*)expert_weight + row * TOP_K + choice));
    }
  wait_and_let_start<AT_ONCE>(rows);
  if (i >= count) return;
  F4 each[TOP_K], old = {0, 0, 0, 0}, half[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
  for (int choice = 0; choice < TOP_K; choice++)
    if (ids[choice] - FIRST_EXPERT < EXPERTS) each[choice] = ld_act_f4(y + ((u64)row * TOP_K + choice) * WEIGHT_N + column);
  if (SHARED_K)
#pragma unroll
    for (int side = 0; side < 2; side++) half[side] = ld_act_f4(y + ((u64)rows * TOP_K + (u64)side * rows + row) * WEIGHT_N + column);
  if (RESIDUAL) old = ld_act_f4(out + i);
  const F4 both = {half[0].x + half[1].x, half[0].y + half[1].y, half[0].z + half[1].z, half[0].w + half[1].w};
  const F4 tree = {shard_tree(ids, weights, [&](int choice) { return each[choice].x; }), shard_tree(ids, weights, [&](int choice) { return each[choice].y; }),
                   shard_tree(ids, weights, [&](int choice) { return each[choice].z; }), shard_tree(ids, weights, [&](int choice) { return each[choice].w; })};
#if RESIDUAL
  st_f4(out + i, F4{(tree.x + both.x) + old.x, (tree.y + both.y) + old.y, (tree.z + both.z) + old.z, (tree.w + both.w) + old.w});
#else
  st_f4(out + i, tree);
  st_f4(shared_out + i, both);
#endif
}
#endif
