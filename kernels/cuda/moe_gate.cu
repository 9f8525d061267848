/* moe_gate: h = rms_norm(x) rounded; expert choice and weights from softmax(W_router · h); shared_act = silu(gate) · up of the shared experts
 * Buffers   h [R, WEIGHT_K] bf16 (FUSED: written by the router's block; else made by norm.cu) · expert_id u32, expert_weight f32 [R, TOP_K]
 *           shared_act [R, SHARED_N / 2] bf16 · x [R, WEIGHT_K] f32 · router packed [EXPERTS, WEIGHT_K] · shared packed [SHARED_N, WEIGHT_K]
 *           live [R] u32 · step [16] u32, words 5 and 6 counted up
 * Launch    grid (1 + shared row tiles / ROW_TILES, token tiles / TOKEN_TILES), block 256: warp = K slice; block x = 0 routes
 * Numerics  eight slices (gemm.cuh), norm.cuh; softmax in fp32: exp_fast, the sum by lanes id mod 32 ascending, then the tree over lanes
 *           (kernels/src/math/route.rs sums by ascending id); ties to the lowest id; the sum of norm_topk_prob by ascending id
 * Pad rows  expert u32::MAX, weight 0, not counted      Capture   no allocation, sync or readback
 * Cost      (EXPERTS + SHARED_N) · WEIGHT_K · 2 B, memory-bound; no spills
 * Reference kernels/src/ops/moe_gate.rs */
static_assert(WEIGHT_K % 16 == 0 && SLICES == 8, "this kernel is written for eight slices, one a warp");
static_assert(TOP_K <= 32, "a lane holds a choice");

constexpr int K_TILES = WEIGHT_K / 16, STRIDE = ceil_div(WEIGHT_K, 64) * 64 + 32, INNER = SHARED_N / 2;
constexpr int ROUTER_TILES = ceil_div(EXPERTS, 16), EXPERTS_PADDED = ROUTER_TILES * 16, LANE_EXPERTS = ceil_div(EXPERTS, 32);
constexpr int TOKENS = TOKEN_TILES * 8;
typedef Sliced<K_TILES, ROW_TILES, TOKEN_TILES> SharedTile;
typedef Sliced<K_TILES, 1, TOKEN_TILES> RouterTile;

/* One warp chooses the experts of one row. `score`: the row's logits in shared memory, overwritten by scores. */
DI void choose(float* score, u32* ids, float* weights, int lane) {
  float mine[LANE_EXPERTS], max = __uint_as_float(0xff800000u), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++)
    if (i * 32 + lane < EXPERTS) max = fmaxf(max, score[i * 32 + lane]);
  max = warp_max(max);
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++) {
    mine[i] = i * 32 + lane < EXPERTS ? exp_fast(score[i * 32 + lane] - max) : 0.0f;
    sum = sum + mine[i];
  }
  sum = warp_tree(sum);
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++) {
    mine[i] = mine[i] / sum;
    if (i * 32 + lane < EXPERTS) score[i * 32 + lane] = mine[i];
  }
  sync_warp();
#if ROUTE_GROUPS > 1
  float best_of = -1.0f; /* lane = group */
  if (lane < ROUTE_GROUPS)
    for (int i = 0; i < EXPERTS / ROUTE_GROUPS; i++) best_of = fmaxf(best_of, score[lane * (EXPERTS / ROUTE_GROUPS) + i]);
  int better = 0;
  for (int other = 0; other < ROUTE_GROUPS; other++) {
    const float theirs = from_lane_f32(best_of, other);
    better += theirs > best_of || (theirs == best_of && other < lane);
  }
  const u32 kept = ballot(lane < ROUTE_GROUPS && better < ROUTE_TOPK_GROUPS);
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++) {
    const int id = i * 32 + lane;
    if (id < EXPERTS && !(kept >> (id / (EXPERTS / ROUTE_GROUPS)) & 1)) score[id] = mine[i] = 0.0f;
  }
  sync_warp();
#endif
  u32 taken = 0, choice = 0xffffffffu; /* bit i: this lane's i-th expert is taken; lane j ends with the j-th choice */
#pragma unroll 1
  for (int j = 0; j < TOP_K; j++) {
    float best = -2.0f;
    u32 best_id = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) {
      const u32 id = i * 32 + lane;
      const float value = mine[i] >= 0.0f ? mine[i] : -1.0f; /* a NaN is never highest */
      if (id < EXPERTS && !(taken >> i & 1) && value > best) best = value, best_id = id;
    }
    for (int mask = 16; mask; mask /= 2) {
      const float value = xor_f32(best, mask);
      const u32 id = xor_u32(best_id, mask);
      if (value > best || (value == best && id < best_id)) best = value, best_id = id;
    }
    if (best_id % 32 == (u32)lane) taken |= 1u << best_id / 32;
    if (lane == j) choice = best_id;
  }
  int rank = 0; /* ascending ids */
  for (int j = 0; j < TOP_K; j++) rank += from_lane_u32(choice, j) < choice;
  float weight = lane < TOP_K ? score[choice] : 0.0f;
#if NORM_TOPK
  float total = 0.0f;
  for (int j = 0; j < TOP_K; j++) {
    const u32 holder = ballot(lane < TOP_K && rank == j);
    total = total + from_lane_f32(weight, __ffs(holder) - 1);
  }
  weight = weight / (total + 1e-20f);
#else
  weight = weight * __uint_as_float(SCALING_BITS);
#endif
  if (lane < TOP_K) st_u32(ids + rank, choice), st_f32(weights + rank, weight);
}

KERNEL void __launch_bounds__(256, BLOCKS_PER_SM)
    moe_gate(bf16* h, u32* expert_id, float* expert_weight, bf16* shared_act, const void* x, const float* norm, const V4* router, const V4* shared,
             const u32* live, u32* step, u32 rows) {
  DYNAMIC_SHARED;
  float* slices = (float*)dynamic_shared;
  float* logits = slices + SharedTile::SHARED_FLOATS; /* [TOKENS][EXPERTS_PADDED] */
  bf16* normed = (bf16*)(logits + TOKENS * EXPERTS_PADDED);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y * TOKENS;
  const int first = slice_begin(warp, SLICES, K_TILES), end = slice_begin(warp + 1, SLICES, K_TILES);
  const bool routes = blockIdx.x == 0;
  const int row_tile = ((int)blockIdx.x - 1) * ROW_TILES;
  const V4* mine = routes ? router + lane : shared + (u64)row_tile * K_TILES * 32 + lane;

  SharedTile::Work work;
  RouterTile::Work route_work;
  if (routes) {
    route_work.start(mine, first, end);
  } else {
    work.start(mine, first, end);
  }
  wait_for_predecessor(rows);
  let_successor_start();
#if FUSED
  norm_rows_to_shared<WEIGHT_K, STRIDE, TOKENS>(normed, slices, rows, norm, __uint_as_float(EPS_BITS),
                                                [&](int row) { return (const float*)x + (u64)row * WEIGHT_K; });
  const SharedTokens<K_TILES, STRIDE> tokens(normed, lane);
#else
  const GlobalTokens<K_TILES, WEIGHT_K> tokens((const bf16*)x, token, rows, lane);
#endif
  if (!routes) {
    work.run(mine, first, end, nullptr, tokens, TOKEN_TILES);
#pragma unroll
    for (int row = 0; row < ROW_TILES; row++) {
      if (row) sync_block();
      SharedTile::share(slices, work, row, warp, lane);
      for (int i = threadIdx.x; i < TOKENS * 8; i += 256) {
        const int r = token + i / 8;
        if (r < (int)rows) {
          const float gate = SharedTile::total(slices, i / 8, i % 8), up = SharedTile::total(slices, i / 8, i % 8 + 8);
          st_bf16(shared_act + (u64)r * INNER + (row_tile + row) * 8 + i % 8, bf16_round(silu(gate) * up));
        }
      }
    }
    return;
  }

#pragma unroll 1
  for (int tile = 0; tile < ROUTER_TILES; tile++) {
    const V4* next = tile + 1 < ROUTER_TILES ? mine + (u64)K_TILES * 32 : nullptr;
    route_work.run(mine, first, end, next, tokens, TOKEN_TILES);
    RouterTile::share(slices, route_work, 0, warp, lane);
    for (int i = threadIdx.x; i < TOKENS * 16; i += 256) logits[i / 16 * EXPERTS_PADDED + tile * 16 + i % 16] = RouterTile::total(slices, i / 16, i % 16);
    sync_block();
    mine = next;
  }
  u32 local = 0, remote = 0;
  for (int i = warp; i < TOKENS && token + i < (int)rows; i += 8) {
    const int r = token + i;
    u32* ids = expert_id + (u64)r * TOP_K;
    if (ld_early_u32(live + r)) {
      choose(logits + i * EXPERTS_PADDED, ids, expert_weight + (u64)r * TOP_K, lane);
      sync_warp();
      const u32 mine_id = lane < TOP_K ? ld_fresh_u32(ids + lane) - FIRST_EXPERT : 0xffffffffu;
      const u32 here = __popc(ballot(mine_id < LOCAL_EXPERTS));
      local += here, remote += TOP_K - here;
    } else if (lane < TOP_K) {
      st_u32(ids + lane, 0xffffffffu), st_f32(expert_weight + (u64)r * TOP_K + lane, 0.0f);
    }
  }
  if (lane == 0 && local) add_counter(step + 5, local);
  if (lane == 0 && remote) add_counter(step + 6, remote);
#if FUSED
  for (int i = threadIdx.x; i < (int)rows * (WEIGHT_K / 8); i += 256) {
    const int row = i / (WEIGHT_K / 8), chunk = i % (WEIGHT_K / 8);
    st16(h + (u64)row * WEIGHT_K + chunk * 8, *(const V4*)(normed + row * STRIDE + chunk * 8));
  }
#endif
}
