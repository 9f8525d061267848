/* attend: attention of some query heads of one row over the paged cache, for latent and grouped-query attention alike (contract §4). A block
 * handles one row, at most 16 heads that share their keys and values, and a run of key groups, or one tile of a group.
 *
 * The frame  keys in groups of ATTENTION_GROUP from position 0, a group's tiles of ATTENTION_TILE keys by the online softmax starting fresh,
 *            groups by a left fold, O / l at the end. So bits depend on the row's own length alone.
 * A tile     S[16 heads, 64 keys] = Q · Kᵀ: one chain for 8 keys, widths ascending.
 *            p = exp_fast(s − m) against the group's running maximum; l = l · corr + (the balanced tree over lanes of p[lane] + p[lane + 32]);
 *            O = O · corr, then the chain O += bf16(p) · V over the tile's keys, ascending.
 * Who does what, decided from the row's length on the device:
 *   a run    a block takes whole groups, STEP_TILES tiles at a time. The first block of a row folds as it goes; the others leave one partial a
 *            group, and all of them fold, each some columns (fold.cuh).
 *   a team   TEAM blocks take one group, a tile each: scores of the own tile, left for the others, then all tiles for one TEAMth of the value
 *            columns. Used while a row's blocks suffice for it: the latency of little more than one tile.
 * Keys past the row's length are zeros in shared memory and −inf in S, so what a page holds there cannot matter.
 *
 * Compile-time: HEADS (of the block, ≤ 16), HEADS_ALL, KEY_WIDTH, VALUE_WIDTH, VALUE_AT (column of the values in a shared row), PARTS of PART_WIDTH
 * (pieces of a cache row that make a shared row), CACHE_WIDTH, PAGES_PER_SLOT, GROUPS, WARPS, STEP_TILES, SLOT_KEYS and SLOTS (the ring of keys in
 * shared memory), TEAM (1 is none), SUCCESSOR (common.cuh). */
static_assert(ATTENTION_TILE == 64 && PAGE_TOKENS == 64 && ATTENTION_GROUP % 64 == 0, "a tile is one page of 64 keys");

template <int HEADS, int HEADS_ALL, int KEY_WIDTH, int VALUE_WIDTH, int VALUE_AT, int PARTS, int PART_WIDTH, int CACHE_WIDTH, int PAGES_PER_SLOT, int GROUPS,
          int WARPS, int STEP_TILES, int SLOT_KEYS, int SLOTS, int TEAM, int SUCCESSOR>
struct Attend : Keys<CACHE_WIDTH, PAGES_PER_SLOT, WARPS> {
  typedef ::Keys<CACHE_WIDTH, PAGES_PER_SLOT, WARPS> Keys;
  using Keys::fresh;
  using Keys::lane;
  using Keys::length;
  using Keys::row;
  using Keys::THREADS;
  using Keys::warp;
  static constexpr int SHARED_WIDTH = PARTS * PART_WIDTH;
  static_assert(HEADS <= 16, "query heads are the 16 rows of an mma");
  static_assert(KEY_WIDTH % 16 == 0 && VALUE_WIDTH % 16 == 0 && SHARED_WIDTH % 16 == 0, "widths must be whole fragments");
  static_assert(SHARED_WIDTH / 8 <= WARPS * 32, "a thread loads one piece of a fresh key");
  static_assert(PART_WIDTH % 8 == 0 && SLOT_KEYS % 32 == 0 && 64 % SLOT_KEYS == 0, "copies take 16 bytes, transposed loads 32 keys of one slot");

  static constexpr int GROUP_TILES = ATTENTION_GROUP / 64;
  static constexpr int KV_STRIDE = SHARED_WIDTH + 8;           /* elements; an odd number of 16-byte units, so ldmatrix meets no conflict */
  static constexpr int WIDE = STEP_TILES > TEAM ? STEP_TILES : TEAM; /* tiles whose p are kept */
  static constexpr int Q_STRIDE = KEY_WIDTH + 8, S_STRIDE = STEP_TILES * 64 + 4, P_STRIDE = WIDE * 64 + 8;
  static constexpr int LINES = HEADS < 16 ? HEADS + 1 : 16;    /* rows of Q and p: the dead heads share a row of zeros */
  static constexpr int KEY_STEPS = KEY_WIDTH / 16;
  /* Two runs of 8 keys a warp at least: they share the fragments of Q, whose traffic bounds the scores. */
  static constexpr int SCORE_WARPS = WARPS < STEP_TILES * 4 ? WARPS : STEP_TILES * 4, KEY_COLUMNS = STEP_TILES * 8 / SCORE_WARPS;
  static constexpr int VALUE_TILES = VALUE_WIDTH / 8, VALUE_COLUMNS = ceil_div(VALUE_TILES, WARPS);
  static constexpr int WARP_HEADS = ceil_div(HEADS, WARPS);
  static constexpr int RING = SLOTS * SLOT_KEYS, STEP_SLOTS = STEP_TILES * 64 / SLOT_KEYS;
  /* Nothing comes before the wait with more fresh keys than this in the ring. */
  static constexpr int LATE_KEYS = 8;
  static_assert(STEP_TILES * 8 % SCORE_WARPS == 0, "the key columns of a step are dealt to whole warps");
  static_assert(GROUP_TILES % STEP_TILES == 0 && SLOTS >= STEP_SLOTS, "a step lies in one group and in the ring");

  /* A team's block: its tile at the start of the ring, behind it the value columns of the other tiles. */
  static constexpr int SLICE = VALUE_WIDTH / TEAM, SLICE_STRIDE = SLICE + 8, SLICE_TILES = SLICE / 8, SLICE_COLUMNS = ceil_div(SLICE_TILES, WARPS);
  static_assert(TEAM == 1 || (TEAM == GROUP_TILES && STEP_TILES == 1 && PARTS == 1 && SLICE % 16 == 0), "a team takes one group");
  static_assert(TEAM == 1 || 64 * KV_STRIDE + (TEAM - 1) * 64 * SLICE_STRIDE <= RING * KV_STRIDE, "a team's keys and values fit into the ring");

  /* Shared memory, in order. The slack lets the last ldmatrix of an odd number of key steps read past its row. */
  static constexpr int Q_AT = RING * KV_STRIDE * 2 + 64;
  static constexpr int S_AT = Q_AT + LINES * Q_STRIDE * 2;
  static constexpr int P_AT = S_AT + HEADS * S_STRIDE * 4;
  static constexpr int CORR_AT = P_AT + LINES * P_STRIDE * 2;
  static constexpr int SHARED_BYTES = CORR_AT + 16 * 4 * (WIDE + 2);
  typedef ::Fold<HEADS, HEADS_ALL, VALUE_WIDTH, GROUPS, WARPS, RING * KV_STRIDE * 2> Fold;
  typedef ::Shares<HEADS, VALUE_WIDTH> Shares;

  bf16* kv;
  bf16* q;
  float* s;
  bf16* p;
  float* corr;   /* [WIDE][16] factors of O for the tiles of a step */
  float* fold_a; /* [16] factors of the fold, total · a + group · b */
  float* fold_b;
  float scale;
  int g, t;

  float m[WARP_HEADS], l[WARP_HEADS], total_m[WARP_HEADS], total_l[WARP_HEADS];
  float o[VALUE_COLUMNS][4], total[VALUE_COLUMNS][4];

  DI Attend(u8* shared, const bf16* pool, const u32* table, const u32* slot, const u32* position, int row, float scale_)
      : Keys(pool, table, slot, position, row), kv((bf16*)shared), q((bf16*)(shared + Q_AT)), s((float*)(shared + S_AT)), p((bf16*)(shared + P_AT)),
        corr((float*)(shared + CORR_AT)), fold_a(corr + 16 * WIDE), fold_b(fold_a + 16), scale(scale_), g(lane / 4), t(lane % 4) {}

  /* Asks for slot `slot` of the run of tiles first … end − 1; fresh keys are left out when `early`. */
  template <class PartAt> DI void fetch(int first, int end, int slot, bool early, const PartAt& part_at) {
    const int begin = first * 64 + slot * SLOT_KEYS, keys = length - begin;
    if (begin < end * 64)
      this->template copy_keys<SLOT_KEYS, PARTS, PART_WIDTH>(kv + slot % SLOTS * SLOT_KEYS * KV_STRIDE, KV_STRIDE, this->page_of(begin / 64) + (u64)(begin % 64) * CACHE_WIDTH, keys,
                                              early ? fresh - begin : keys, part_at);
    copy_commit();
  }

  /* Q, and by plain loads the fresh keys that did not come early: `late(key, store)` calls store(to, value) for this thread's piece of a key. */
  template <class LoadQuery, class Late> DI void load_q(const LoadQuery& load_query, int late_end, const Late& late) {
    constexpr int KEY_CHUNKS = KEY_WIDTH / 8, N = ceil_div(LINES * KEY_CHUNKS, THREADS);
    V4 v[N], mine = {0, 0, 0, 0};
    bf16* to = nullptr;
    if (fresh < late_end) late(fresh, [&](bf16* at, V4 value) { to = at, mine = value; });
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int i = j * THREADS + (int)threadIdx.x, head = i / KEY_CHUNKS;
      v[j] = V4{0, 0, 0, 0};
      if (head < HEADS) v[j] = load_query(head, i % KEY_CHUNKS);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int i = j * THREADS + (int)threadIdx.x, head = i / KEY_CHUNKS;
      if (head < LINES) *(V4*)(q + head * Q_STRIDE + i % KEY_CHUNKS * 8) = v[j];
    }
    if (to) *(V4*)to = mine;
#pragma unroll 1
    for (int key = fresh + 1; key < late_end; key++) late(key, [&](bf16* at, V4 value) { *(V4*)at = value; });
    for (int i = threadIdx.x; i < (LINES - HEADS) * P_STRIDE / 2; i += THREADS) ((u32*)(p + HEADS * P_STRIDE))[i] = 0;
  }

  /* S = scale · Q · Kᵀ of the step that begins at tile `tile`, whose keys begin at row `at` of the ring; `put(head, key, pair)` takes two keys.
   * Fragments are loaded AHEAD pairs of 16 widths before their use. */
  template <class Put> DI void scores(int tile, int at, const Put& put) {
    if (SCORE_WARPS < WARPS && warp >= SCORE_WARPS) return;
    constexpr int PAIRS = ceil_div(KEY_STEPS, 2), AHEAD = KEY_COLUMNS > 2 ? 1 : 2;
    float c[KEY_COLUMNS][4];
    const bf16* b_at[KEY_COLUMNS];
    V4 a[AHEAD + 1][2], b[AHEAD + 1][KEY_COLUMNS];
#pragma unroll
    for (int column = 0; column < KEY_COLUMNS; column++) {
      int line = at + (column * SCORE_WARPS + warp) * 8;
      if (line >= RING) line -= RING;
      b_at[column] = kv + (line + lane % 8) * KV_STRIDE + lane / 8 * 8;
#pragma unroll
      for (int i = 0; i < 4; i++) c[column][i] = 0.0f;
    }
    const bf16* a_at = q + min_of(lane % 16, LINES - 1) * Q_STRIDE + lane / 16 * 8;
    auto load = [&](int pair) {
      a[pair % (AHEAD + 1)][0] = ldmatrix4(a_at + pair * 32);
      if (2 * pair + 1 < KEY_STEPS) a[pair % (AHEAD + 1)][1] = ldmatrix4(a_at + pair * 32 + 16);
#pragma unroll
      for (int column = 0; column < KEY_COLUMNS; column++) b[pair % (AHEAD + 1)][column] = ldmatrix4(b_at[column] + pair * 32);
    };
#pragma unroll
    for (int pair = 0; pair < AHEAD && pair < PAIRS; pair++) load(pair);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      if (pair + AHEAD < PAIRS) load(pair + AHEAD);
      const int now = pair % (AHEAD + 1);
#pragma unroll
      for (int column = 0; column < KEY_COLUMNS; column++) mma(c[column], a[now][0], b[now][column].x, b[now][column].y);
      if (2 * pair + 1 < KEY_STEPS)
#pragma unroll
        for (int column = 0; column < KEY_COLUMNS; column++) mma(c[column], a[now][1], b[now][column].z, b[now][column].w);
    }
    const int left = length - tile * 64;
#pragma unroll
    for (int column = 0; column < KEY_COLUMNS; column++) {
      const int key = (column * SCORE_WARPS + warp) * 8 + 2 * t;
#pragma unroll
      for (int half = 0; half < (HEADS > 8 ? 2 : 1); half++)
        if (HEADS == 16 || g + 8 * half < HEADS)
          put(g + 8 * half, key,
              V2{__float_as_uint(key < left ? c[column][2 * half] * scale : MINUS_INFINITY),
                 __float_as_uint(key + 1 < left ? c[column][2 * half + 1] * scale : MINUS_INFINITY)});
    }
  }

  /* p, l and the factors of O for TILES tiles of one group; `load(head, x)` fills x[TILES][2], lane's scores of keys lane and 32 + lane. A tile past
   * the length changes nothing: its factor is exactly 1 and its p are 0. All heads and tiles of a warp go side by side. */
  template <int TILES, class Load> DI void softmax(const Load& load) {
    if (warp >= HEADS) return;
    constexpr int SUMS = WARP_HEADS * TILES;
    float x[WARP_HEADS][TILES][2], sum[SUMS], factor[SUMS];
    load(x);
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++)
#pragma unroll
      for (int j = 0; j < TILES; j++) sum[i * TILES + j] = warp_max(fmaxf(x[i][j][0], x[i][j][1]));
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++)
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const float max = fmaxf(m[i], sum[i * TILES + j]);
        factor[i * TILES + j] = exp_fast(m[i] - max);
        m[i] = max;
        x[i][j][0] = exp_fast(x[i][j][0] - max), x[i][j][1] = exp_fast(x[i][j][1] - max);
        sum[i * TILES + j] = x[i][j][0] + x[i][j][1];
      }
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++)
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int head = i * WARPS + warp;
        if (HEADS % WARPS != 0 && head >= HEADS) continue;
        p[head * P_STRIDE + j * 64 + lane] = bf16_round(x[i][j][0]);
        p[head * P_STRIDE + j * 64 + 32 + lane] = bf16_round(x[i][j][1]);
        if (lane == 0) corr[j * 16 + head] = factor[i * TILES + j];
      }
    warp_trees<SUMS>(sum);
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++)
#pragma unroll
      for (int j = 0; j < TILES; j++) l[i] = l[i] * factor[i * TILES + j] + sum[i * TILES + j];
  }
  /* O = O · corr + p · V of one tile and COLUMNS columns of 8 values: `v`: each column's fragments of the tile's two halves. */
  template <int COLUMNS> DI static void value_chains(float (*c)[4], const V4 (&a)[4], float low, float high, const V4 (*v)[2]) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) c[i][0] = c[i][0] * low, c[i][1] = c[i][1] * low, c[i][2] = c[i][2] * high, c[i][3] = c[i][3] * high;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) mma(c[i], a[0], v[i][0].x, v[i][0].y);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) mma(c[i], a[1], v[i][0].z, v[i][0].w);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) mma(c[i], a[2], v[i][1].x, v[i][1].y);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) mma(c[i], a[3], v[i][1].z, v[i][1].w);
  }
  DI void load_p(V4 (&a)[4], int tile) {
#pragma unroll
    for (int step = 0; step < 4; step++) a[step] = ldmatrix4(p + min_of(lane % 16, LINES - 1) * P_STRIDE + tile * 64 + step * 16 + lane / 16 * 8);
  }
  /* Column `i` of this warp, or the last one there is: a warp without it computes that one again and stores it nowhere. */
  template <int TILES> DI int column_of_warp(int i) {
    const int column = i * WARPS + warp;
    return TILES % WARPS == 0 ? column : min_of(column, TILES - 1);
  }

  /* O of the first `tiles` tiles of a step. */
  DI void values(int tiles, int at) {
    constexpr int BATCH = VALUE_COLUMNS % 4 == 0 ? 4 : VALUE_COLUMNS % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int j = 0; j < STEP_TILES; j++) {
      if (j >= tiles) break;
      V4 a[4], v[2][BATCH][2];
      int line = at + j * 64, next = line + 32;
      if (line >= RING) line -= RING;
      if (next >= RING) next -= RING;
      const bf16 *first = kv + (line + lane) * KV_STRIDE + VALUE_AT, *second = kv + (next + lane) * KV_STRIDE + VALUE_AT;
      auto load = [&](int batch) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          const int column = column_of_warp<VALUE_TILES>(batch * BATCH + i);
          v[batch % 2][i][0] = ldmatrix4_transposed(first + column * 8), v[batch % 2][i][1] = ldmatrix4_transposed(second + column * 8);
        }
      };
      load_p(a, j);
      load(0);
      const float low = corr[j * 16 + g], high = corr[j * 16 + g + 8];
#pragma unroll
      for (int batch = 0; batch < VALUE_COLUMNS / BATCH; batch++) {
        if (batch + 1 < VALUE_COLUMNS / BATCH) load(batch + 1);
        value_chains<BATCH>(o + batch * BATCH, a, low, high, v[batch % 2]);
      }
    }
  }

  DI void start_group() {
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) m[i] = MINUS_INFINITY, l[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUE_COLUMNS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) o[i][j] = 0.0f;
  }

  /* The left fold of the group just ended into the total; the first group is the total. */
  DI void fold(bool first) {
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) {
      if (first) {
        total_m[i] = m[i], total_l[i] = l[i];
        continue;
      }
      const int head = i * WARPS + warp;
      const float max = fmaxf(total_m[i], m[i]), a = exp_fast(total_m[i] - max), b = exp_fast(m[i] - max);
      total_m[i] = max;
      total_l[i] = total_l[i] * a + l[i] * b;
      if (lane == 0 && head < HEADS) fold_a[head] = a, fold_b[head] = b;
    }
    if (!first) sync_block();
#pragma unroll
    for (int i = 0; i < VALUE_COLUMNS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int head = j < 2 ? g : g + 8;
        total[i][j] = first ? o[i][j] : total[i][j] * fold_a[head] + o[i][j] * fold_b[head];
      }
  }

  /* Leaves a group, or the total of the first groups, to those who fold: TILES columns of 8 from column `first` on; m and l, by lanes for one each. */
  template <int N, int TILES> DI void leave(const Partials& partials, int group, const float (&values)[N][4], int first) {
    float* at = partials.o + (u64)group * HEADS_ALL * VALUE_WIDTH + first;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int column = i * WARPS + warp;
      if (TILES % WARPS != 0 && column >= TILES) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int head = g + 8 * half;
        if (head < HEADS)
          hand_over(at + head * VALUE_WIDTH + column * 8 + 2 * t, values[i][2 * half], values[i][2 * half + 1]);
      }
    }
  }
  DI void leave_ml(const Partials& partials, const Shares& shares, int group, const float (&max)[WARP_HEADS], const float (&sum)[WARP_HEADS]) {
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) {
      const int head = i * WARPS + warp;
      if (lane < shares.copies && head < HEADS) hand_over(partials.ml + (((u64)lane * HEADS_ALL + head) * GROUPS + group) * 2, max[i], sum[i]);
    }
  }

  /* out[head] = values / l, rounded; l of the heads in `fold_b`, behind a barrier. */
  template <int N, int TILES> DI void finish(bf16* out, const float (&values)[N][4], int first) {
    const float norm[2] = {fold_b[g], fold_b[g + 8]};
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int column = i * WARPS + warp;
      if (TILES % WARPS != 0 && column >= TILES) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int head = g + 8 * half;
        if (head < HEADS)
          st_u32((u32*)(out + head * VALUE_WIDTH + first + column * 8 + 2 * t), bf16_pair(values[i][2 * half] / norm[half], values[i][2 * half + 1] / norm[half]));
      }
    }
  }
  DI void share_norm(const float (&sum)[WARP_HEADS]) {
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++)
      if (lane == 0 && i * WARPS + warp < HEADS) fold_b[i * WARPS + warp] = sum[i];
  }

  /* What is left to fold (fold.cuh): nothing when `shares` is 0, else `count` partials from group `total` on. */
  struct Rest { int total, count, share, shares; };

  /* Takes an even share of the row's groups, the longer shares last, where the last group may be short; split 0 begins a total. */
  template <class PartAt, class LoadQuery>
  DI Rest run(const PartAt& part_at, const LoadQuery& load_query, bf16* out, const Partials& partials, int split, int splits, u32 rows) {
    const int groups = ceil_div(length, ATTENTION_GROUP), used = min_of(groups, splits), next = groups / used; /* split 0 has `next` groups */
    const int first = min_of(split, used) * groups / used * GROUP_TILES;
    const int end = min_of(min_of(split + 1, used) * groups / used * GROUP_TILES, ceil_div(length, 64));
    const int ring_end = min_of(min_of(end * 64, length), first * 64 + RING);
    const Shares shares(used);
    int slot = 0; /* the next to ask for */
    fresh = ring_end;
    if (first < end) {
      this->look_up(first, min_of(ceil_div(RING, 64), end - first), rows);
      if (ring_end - fresh > LATE_KEYS) fresh = first * 64;
      if (fresh > first * 64)
#pragma unroll 1
        for (; slot < SLOTS; slot++) fetch(first, end, slot, true, part_at);
    }
    wait_and_let_start<SUCCESSOR>(rows);
    if (first >= end) return Rest{};
    if (slot == 0)
#pragma unroll 1
      for (fresh = ring_end; slot < SLOTS; slot++) fetch(first, end, slot, false, part_at);
    load_q(load_query, ring_end, [&](int key, const auto& store) {
      const bf16* from = this->page_of(key / 64) + (u64)(key % 64) * CACHE_WIDTH;
      for (int i = threadIdx.x; i < SHARED_WIDTH / 8; i += THREADS)
        store(kv + (key - first * 64) * KV_STRIDE + i * 8, ld_act16(from + part_at(i / (PART_WIDTH / 8)) + i % (PART_WIDTH / 8) * 8));
    });
    start_group();

    int at = 0; /* row of the ring where the step begins */
#pragma unroll 1
    for (int tile = first; tile < end; tile += STEP_TILES) {
      if (tile > first) {
        sync_block();
#pragma unroll 1
        for (int i = 0; i < STEP_SLOTS; i++) fetch(first, end, slot++, false, part_at);
      }
      copy_wait<SLOTS - STEP_SLOTS>();
      sync_block();
      scores(tile, at, [&](int head, int key, V2 pair) { *(V2*)(s + head * S_STRIDE + key) = pair; });
      sync_block();
      softmax<STEP_TILES>([&](float (&x)[WARP_HEADS][STEP_TILES][2]) {
#pragma unroll
        for (int i = 0; i < WARP_HEADS; i++)
#pragma unroll
          for (int j = 0; j < 2 * STEP_TILES; j++) x[i][j / 2][j % 2] = s[min_of(i * WARPS + warp, HEADS - 1) * S_STRIDE + j * 32 + lane];
      });
      const int group = tile / GROUP_TILES;
      const bool ends = (tile + STEP_TILES) % GROUP_TILES == 0 || tile + STEP_TILES >= end;
      if (ends && used > 1 && (split > 0 || next == 1)) leave_ml(partials, shares, group, m, l);
      sync_block();
      values(end - tile, at);
      at += STEP_TILES * 64;
      if (at >= RING) at -= RING;
      if (ends) {
        if (split == 0) {
          fold(group == 0);
        } else {
          leave<VALUE_COLUMNS, VALUE_TILES>(partials, group, o, 0);
        }
        start_group();
      }
    }
    copy_wait<0>();

    if (used == 1) {
      sync_block();
      share_norm(total_l);
      sync_block();
      finish<VALUE_COLUMNS, VALUE_TILES>(out, total, 0);
      return Rest{};
    }
    if (split == 0) {
      if (next > 1) leave_ml(partials, shares, next - 1, total_m, total_l);
      leave<VALUE_COLUMNS, VALUE_TILES>(partials, next - 1, total, 0);
    }
    return Rest{next - 1, groups - next + 1, split, used};
  }

  /* The whole of it. `part_at(part)`: element of the cache row where the part starts; `load_query(head, chunk)`: 8 elements of a head's query;
   * `out`: this block's heads of the row, `head` its first; `scratch` and `inboxes`: zero before and after. */
  template <class PartAt, class LoadQuery>
  DI void attend(const PartAt& part_at, const LoadQuery& load_query, bf16* out, float* scratch, u32* inboxes, int head, u32 rows) {
    const int groups = ceil_div(length, ATTENTION_GROUP), split = blockIdx.x, splits = gridDim.x;
    const Partials partials = {scratch + ((u64)row * GROUPS * HEADS_ALL + head) * VALUE_WIDTH,
                               scratch + ((u64)rows * HEADS_ALL * VALUE_WIDTH + ((u64)row * PARTIAL_COPIES * HEADS_ALL + head) * 2) * GROUPS};
    Rest rest = {};
    if (TEAM > 1 && groups * TEAM <= splits) {
      if (split < groups * TEAM) {
        const int team = (row * (int)gridDim.z + (int)blockIdx.z) * (splits / TEAM) + split / TEAM;
        if constexpr (TEAM > 1)
          rest = run_team(*this, part_at, load_query, out, partials, inboxes + team * (TEAM * TEAM * HEADS * 64), split / TEAM, split % TEAM, groups, rows);
      } else {
        wait_and_let_start<SUCCESSOR>(rows);
      }
    } else {
      rest = run(part_at, load_query, out, partials, split, splits, rows);
    }
    if (rest.shares == 0) return;
    const Partials from_total = {partials.o + (u64)rest.total * HEADS_ALL * VALUE_WIDTH, partials.ml + rest.total * 2};
    Fold::run(out, from_total, rest.count, rest.share, Shares(rest.shares), (u8*)kv);
  }
};
