/* moe_gate: h = rms_norm(x) rounded; expert choice and weights from softmax(W_router · h)
 * Buffers   h [R, WEIGHT_K] bf16 · expert_id u32, expert_weight f32 [R, TOP_K] · x [R, WEIGHT_K] f32 · router packed [EXPERTS, WEIGHT_K]
 *           norm [WEIGHT_K] f32 · live [R] u32 · step [16] u32, words 5 and 6 counted up
 * Launch    grid CLUSTER · ceil(R / 8), cluster CLUSTER, block 256 · PARTS: a cluster routes eight rows. Every block norms them and has the logits of each
 *           CLUSTER · PARTSth group of ROW_TILES row tiles, a warp a K slice, whose weights are in registers (RING pairs) and shared memory, or come in
 *           BULK, before the wait (one multiprocessor alone takes 5 µs to ask for a router's 256 KB, and what it asks for then comes after them); a row's
 *           logits meet in the block that chooses its experts
 *           (the shared experts' first half is the next launch, norm_gate_up.cu on h; it hides the start of moe_up)
 * Numerics  eight slices (gemm.cuh), norm.cuh; softmax in fp32: exp_fast, the sum by lanes id mod 32 ascending, then the tree over lanes
 *           (kernels/src/math/route.rs sums by ascending id); ties to the lowest id; the sum of norm_topk_prob by ascending id
 * Pad rows  expert u32::MAX, weight 0, not counted      Capture   no allocation, sync or readback
 * Cost      EXPERTS · WEIGHT_K · 2 B a cluster, latency; no spills
 * Reference kernels/src/ops/moe_gate.rs */
static_assert(WEIGHT_K % 16 == 0 && SLICES == 8, "this kernel is written for eight slices, one a warp");
static_assert(TOP_K <= 32, "a lane holds a choice");

constexpr int K_TILES = WEIGHT_K / 16, STRIDE = ceil_div(WEIGHT_K, 64) * 64 + 32, TOKENS = 8;
constexpr int ROUTER_TILES = ceil_div(EXPERTS, 16), EXPERTS_PADDED = ROUTER_TILES * 16, LANE_EXPERTS = ceil_div(EXPERTS, 32);

/* One warp chooses the experts of one row; lane j returns choice j. `score`: the row's logits in shared memory, overwritten by scores. */
DI u32 choose(float* score, u32* ids, float* weights, int lane) {
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
  sync_warp(); /* other lanes' scores were read above */
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++) {
    const int id = i * 32 + lane;
    if (id < EXPERTS && !(kept >> (id / (EXPERTS / ROUTE_GROUPS)) & 1)) score[id] = mine[i] = 0.0f;
  }
  sync_warp();
#endif
  u32 key[LANE_EXPERTS]; /* orders like the score, which is never negative; a NaN is below every score, 0 is taken or no expert */
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++) key[i] = i * 32 + lane >= EXPERTS ? 0 : mine[i] >= 0.0f ? __float_as_uint(mine[i]) + 2 : 1;
  u32 choice = 0xffffffffu; /* lane j ends with the j-th choice */
#pragma unroll 1
  for (int j = 0; j < TOP_K; j++) {
    u32 best = 0, id = 0xffffffffu;
#pragma unroll
    for (int i = LANE_EXPERTS - 1; i >= 0; i--)
      if (key[i] >= best) best = key[i], id = i * 32 + lane;
    const u32 highest = __reduce_max_sync(0xffffffffu, best);
    const u32 lowest_id = __reduce_min_sync(0xffffffffu, best == highest ? id : 0xffffffffu);
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++)
      if ((u32)(i * 32 + lane) == lowest_id) key[i] = 0;
    if (lane == j) choice = lowest_id;
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
  return choice;
}

/* One warp writes row r's choice and counts it. `score`: choose(). */
DI void route(float* score, u32* expert_id, float* expert_weight, bool live, u32* step, int r, int lane) {
  u32* ids = expert_id + (u64)r * TOP_K;
  float* weights = expert_weight + (u64)r * TOP_K;
  if (live) {
    const u32 chosen = choose(score, ids, weights, lane) - FIRST_EXPERT;
    const u32 here = __popc(ballot(lane < TOP_K && chosen < LOCAL_EXPERTS));
    if (lane == 0 && here) add_counter(step + STEP_ROUTES_LOCAL, here);
    if (lane == 0 && TOP_K - here) add_counter(step + STEP_ROUTES_REMOTE, TOP_K - here);
  } else if (lane < TOP_K) {
    st_u32(ids + lane, 0xffffffffu), st_f32(weights + lane, 0.0f);
  }
}

constexpr int THREADS = 256 * PARTS, SHARES = CLUSTER * PARTS;
static_assert(TOKENS % CLUSTER == 0, "a block chooses for as many rows as another");
typedef Sliced<K_TILES, ROW_TILES, 1, RING, HELD> Tile;
constexpr int BULK_BYTES = K_TILES * 512;
static_assert(HELD_SHARED == (BULK ? BULK_BYTES : 8 * PARTS * Tile::HELD_BYTES), "the host counts as gemm.cuh does");
static_assert(!BULK || (CLUSTER >= ROUTER_TILES && PARTS == 1 && ROW_TILES == 1), "a block's only row tile comes in bulk");

/* One slice of a row tile in shared memory. */
template <class Tokens> DI void pass_in_shared(float (&sum)[4], const V4* weights, int first, int end, const Tokens& tokens) {
  sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll 4
  for (int pair = first / 2; pair < (end + 1) / 2; pair++) {
    const V4 b = tokens.pair(0, pair);
    if (2 * pair >= first) mma(sum, weights[2 * pair * 32], b.x, b.y);
    if (2 * pair + 1 < end) mma(sum, weights[(2 * pair + 1) * 32], b.z, b.w);
  }
}

KERNEL void __launch_bounds__(THREADS, 1)
    moe_gate(bf16* h, u32* expert_id, float* expert_weight, const float* x, const float* norm, const V4* router, const u32* live, u32* step, u32 rows) {
  DYNAMIC_SHARED;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / 8, slice = warp % 8;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, token = blockIdx.x / CLUSTER * TOKENS, tokens_here = min_of((int)rows - token, TOKENS);
  V4* held = (V4*)(dynamic_shared + warp * Tile::HELD_BYTES);
  float* all_slices = (float*)(dynamic_shared + HELD_SHARED);
  float* slices = all_slices + part * Tile::SHARED_FLOATS;
  float* logits = all_slices + PARTS * Tile::SHARED_FLOATS; /* [TOKENS][EXPERTS_PADDED], of the rows that this block chooses for */
  bf16* normed = (bf16*)(logits + TOKENS * EXPERTS_PADDED);
  const int first = slice_begin(slice, SLICES, K_TILES), end = slice_begin(slice + 1, SLICES, K_TILES);

  if (CLUSTER > 1) cluster_arrive(); /* every block has started before another stores into it */
  Tile::Work work;
  int row_tile = (rank * PARTS + part) * ROW_TILES;
  const V4* mine = router + (u64)row_tile * K_TILES * 32 + lane;
  __shared__ u64 come;
  if (row_tile < ROUTER_TILES) {
    if (BULK) {
      if (threadIdx.x == 0) start_bulk_copy(&come, dynamic_shared, mine - lane, BULK_BYTES);
    } else {
      work.start(mine, first, end);
      if (HELD) work.hold(held, mine, first, end);
    }
  }
  u32 alive = 0; /* of row `lane` of the cluster; used last, so that nothing waits for it */
  if (lane < tokens_here) alive = ld_early_u32(live + token + lane);
  norm_weights_early<WEIGHT_K>(norm);
  wait_and_let_start<AT_ONCE>(rows); /* the shared experts' launch reads nothing early */
  norm_rows_to_shared<WEIGHT_K, STRIDE, 2>(normed, all_slices, tokens_here, norm, __uint_as_float(EPS_BITS),
                                           [&](int row) { return x + (u64)(token + row) * WEIGHT_K; });
  for (int i = rank * THREADS + threadIdx.x; i < tokens_here * (WEIGHT_K / 8); i += CLUSTER * THREADS) {
    const int row = i / (WEIGHT_K / 8), chunk = i % (WEIGHT_K / 8);
    st16(h + (u64)(token + row) * WEIGHT_K + chunk * 8, *(const V4*)(normed + row * STRIDE + chunk * 8));
  }
  if (CLUSTER > 1) cluster_wait();
  const SharedTokens<K_TILES, STRIDE> tokens(normed, tokens_here, lane);
#pragma unroll 1
  for (int round = 0; round < ROUTER_TILES; round += SHARES * ROW_TILES) { /* all threads of the block meet in each round */
    const bool active = row_tile < ROUTER_TILES;
    if (HELD) copy_wait<0>(); /* a lane reads what it copied itself */
    if (active) {
      if (BULK) {
        wait_for_bulk_copy(&come);
        pass_in_shared(work.sum[0][0], (const V4*)dynamic_shared + lane, first, end, tokens);
      } else {
        work.pass<1>(mine, first, end, nullptr, tokens);
      }
    }
    const V4* next = mine + (u64)SHARES * ROW_TILES * K_TILES * 32;
    const bool more = row_tile + SHARES * ROW_TILES < ROUTER_TILES;
    if (more) { /* `sum` stays */
      work.start(next, first, end);
      if (HELD) work.hold(held, next, first, end);
    }
#pragma unroll
    for (int row = 0; row < ROW_TILES; row++) {
      if (row) sync_block();
      Tile::share(slices, work, row, slice, lane);
      const int i = threadIdx.x % 256, at = i / 16;
      if (active && at < tokens_here) {
        float* logit = logits + at * EXPERTS_PADDED + (row_tile + row) * 16 + i % 16;
        const float value = Tile::total(slices, at, i % 16);
        if (CLUSTER == 1) {
          *logit = value;
        } else {
          st_cluster_f32(logit, at % CLUSTER, value);
        }
      }
    }
    if (round + SHARES * ROW_TILES < ROUTER_TILES || CLUSTER == 1) sync_block();
    row_tile += SHARES * ROW_TILES, mine = next;
  }
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }
  const int chosen = warp * CLUSTER + rank;
  if (chosen < tokens_here) route(logits + chosen * EXPERTS_PADDED, expert_id, expert_weight, from_lane_u32(alive, chosen) != 0, step, token + chosen, lane);
}
