/* attend: attention of some query heads of one row over the paged cache, for latent and grouped-query attention alike (contract §4).
 * A block handles one row, at most 16 heads that share their keys and values, and a run of key groups.
 *
 * The frame  keys in groups of ATTENTION_GROUP from position 0, a group's tiles of ATTENTION_TILE keys by the online softmax starting fresh,
 *            groups by a left fold, O / l at the end. A block that starts at group 0 folds as it goes; the others leave one partial a group
 *            and the block that arrives last folds them in order. So bits depend on the row's own length alone.
 * A tile     S[16 heads, 64 keys] = Q · Kᵀ: warp w takes key columns w, w + WARPS, … of 8; one chain a column, widths ascending.
 *            p = exp_fast(s − m) against the group's running maximum; l = l · corr + (the balanced tree over lanes of p[lane] + p[lane + 32]);
 *            O = O · corr, then the chain O += bf16(p) · V over the tile's keys, ascending.
 * Keys past the row's length are zeros in shared memory and −inf in S, so what a page holds there cannot matter.
 *
 * Compile-time: HEADS (of the block, ≤ 16), KEY_WIDTH, VALUE_WIDTH, VALUE_AT (column of the values in a shared row), SHARED_WIDTH (of a
 * shared row), CACHE_WIDTH (of a cache row), WARPS, STAGES. */
static_assert(ATTENTION_TILE == PAGE_TOKENS, "a tile is one page");
static_assert(ATTENTION_TILE == 64 && ATTENTION_GROUP % 64 == 0, "the tile below is 64 keys");

/* -inf, so that an untouched maximum loses to every score. */
#define MINUS_INFINITY __uint_as_float(0xff800000u)

template <int HEADS, int KEY_WIDTH, int VALUE_WIDTH, int VALUE_AT, int SHARED_WIDTH, int CACHE_WIDTH, int WARPS, int STAGES> struct Attend {
  static_assert(HEADS <= 16, "query heads are the 16 rows of an mma");
  static_assert(KEY_WIDTH % 16 == 0 && VALUE_WIDTH % 8 == 0 && SHARED_WIDTH % 16 == 0, "widths must be whole fragments");

  static constexpr int THREADS = WARPS * 32, GROUP_TILES = ATTENTION_GROUP / 64;
  static constexpr int KV_STRIDE = SHARED_WIDTH + 8;           /* elements; an odd number of 16-byte units, so ldmatrix meets no conflict */
  static constexpr int Q_STRIDE = KEY_WIDTH + 8, S_STRIDE = 68, P_STRIDE = 72;
  static constexpr int KEY_STEPS = KEY_WIDTH / 16;
  static constexpr int KEY_COLUMNS = 8 / WARPS;                /* tiles of 8 keys a warp */
  static constexpr int VALUE_TILES = VALUE_WIDTH / 8, VALUE_COLUMNS = ceil_div(VALUE_TILES, WARPS);
  static constexpr int WARP_HEADS = 16 / WARPS;
  static constexpr int CHUNKS = SHARED_WIDTH / 8;              /* 16-byte pieces of a shared row */
  static constexpr int STAGE_ELEMENTS = 64 * KV_STRIDE;
  static_assert(8 % WARPS == 0, "the 8 key columns of a tile are dealt to whole warps");

  /* Shared memory, in order. The slack lets the last ldmatrix of an odd number of key steps read past its row. */
  static constexpr int Q_AT = STAGES * STAGE_ELEMENTS * 2 + 64;
  static constexpr int S_AT = Q_AT + (16 * Q_STRIDE * 2 + 15) / 16 * 16;
  static constexpr int P_AT = S_AT + 16 * S_STRIDE * 4;
  static constexpr int CORR_AT = P_AT + 16 * P_STRIDE * 2;
  static constexpr int SHARED_BYTES = CORR_AT + 16 * 4 * 3;

  bf16* kv;
  bf16* q;
  float* s;
  bf16* p;
  float* corr;   /* [16] factor of O for this tile */
  float* fold_a; /* [16] factors of the fold, total · a + group · b */
  float* fold_b;
  float scale;
  int warp, lane, g, t;
  const bf16* pool;
  const u32* pages; /* the slot's block table */
  int length;

  float m[WARP_HEADS], l[WARP_HEADS], total_m[WARP_HEADS], total_l[WARP_HEADS];
  float o[VALUE_COLUMNS][4], total[VALUE_COLUMNS][4];

  DI Attend(u8* shared, const bf16* pool_, const u32* pages_, int length_, float scale_)
      : kv((bf16*)shared), q((bf16*)(shared + Q_AT)), s((float*)(shared + S_AT)), p((bf16*)(shared + P_AT)), corr((float*)(shared + CORR_AT)),
        fold_a(corr + 16), fold_b(corr + 32), warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4), pool(pool_), pages(pages_),
        length(length_), scale(scale_) {}

  /* Asks for one tile of keys. `column_of(chunk)`: element of the cache row where the chunk of 8 starts. */
  template <class ColumnOf> DI void fetch(int tile, const ColumnOf& column_of) {
    const bf16* page = pool + (u64)ld_early_u32(pages + tile) * 64 * CACHE_WIDTH;
    bf16* stage = kv + tile % STAGES * STAGE_ELEMENTS;
    const int keys = length - tile * 64;
    for (int i = threadIdx.x; i < 64 * CHUNKS; i += THREADS) {
      const int key = i / CHUNKS, chunk = i % CHUNKS;
      copy_async16(stage + key * KV_STRIDE + chunk * 8, page + (u64)key * CACHE_WIDTH + column_of(chunk), key < keys ? 16 : 0);
    }
  }

  /* S = scale · Q · Kᵀ of one tile. */
  DI void scores(int tile) {
    const bf16* stage = kv + tile % STAGES * STAGE_ELEMENTS;
    float c[KEY_COLUMNS][4];
#pragma unroll
    for (int column = 0; column < KEY_COLUMNS; column++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[column][i] = 0.0f;
    const bf16* a_at = q + lane % 16 * Q_STRIDE + lane / 16 * 8;
#pragma unroll 4
    for (int step = 0; step < KEY_STEPS; step += 2) {
      const V4 a0 = ldmatrix4(a_at + step * 16);
      V4 a1 = {0, 0, 0, 0};
      if (step + 1 < KEY_STEPS) a1 = ldmatrix4(a_at + step * 16 + 16);
#pragma unroll
      for (int column = 0; column < KEY_COLUMNS; column++) {
        const V4 b = ldmatrix4(stage + ((column * WARPS + warp) * 8 + lane % 8) * KV_STRIDE + step * 16 + lane / 8 * 8);
        mma(c[column], a0, b.x, b.y);
        if (step + 1 < KEY_STEPS) mma(c[column], a1, b.z, b.w);
      }
    }
    const int left = length - tile * 64;
#pragma unroll
    for (int column = 0; column < KEY_COLUMNS; column++) {
      const int key = (column * WARPS + warp) * 8 + 2 * t;
      s[g * S_STRIDE + key] = key < left ? c[column][0] * scale : MINUS_INFINITY;
      s[g * S_STRIDE + key + 1] = key + 1 < left ? c[column][1] * scale : MINUS_INFINITY;
      s[(g + 8) * S_STRIDE + key] = key < left ? c[column][2] * scale : MINUS_INFINITY;
      s[(g + 8) * S_STRIDE + key + 1] = key + 1 < left ? c[column][3] * scale : MINUS_INFINITY;
    }
  }

  /* p, l and the factors of O for one tile. */
  DI void softmax() {
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) {
      const int head = i * WARPS + warp;
      if (head >= HEADS) continue;
      const float s0 = s[head * S_STRIDE + lane], s1 = s[head * S_STRIDE + 32 + lane];
      const float max = fmaxf(m[i], warp_max(fmaxf(s0, s1)));
      const float factor = exp_fast(m[i] - max), p0 = exp_fast(s0 - max), p1 = exp_fast(s1 - max);
      m[i] = max;
      l[i] = l[i] * factor + warp_tree(p0 + p1);
      p[head * P_STRIDE + lane] = bf16_round(p0);
      p[head * P_STRIDE + 32 + lane] = bf16_round(p1);
      if (lane == 0) corr[head] = factor;
    }
  }

  /* O = O · corr + p · V of one tile. */
  DI void values(int tile) {
    const bf16* stage = kv + tile % STAGES * STAGE_ELEMENTS;
    V4 a[4];
#pragma unroll
    for (int step = 0; step < 4; step++) a[step] = ldmatrix4(p + lane % 16 * P_STRIDE + step * 16 + lane / 16 * 8);
    const float low = corr[g], high = corr[g + 8];
#pragma unroll
    for (int i = 0; i < VALUE_COLUMNS; i++) {
      const int column = i * WARPS + warp;
      if (column >= VALUE_TILES) continue;
      o[i][0] = o[i][0] * low, o[i][1] = o[i][1] * low, o[i][2] = o[i][2] * high, o[i][3] = o[i][3] * high;
      const bf16* at = stage + lane * KV_STRIDE + VALUE_AT + column * 8;
      const V4 first = ldmatrix4_transposed(at), second = ldmatrix4_transposed(at + 32 * KV_STRIDE);
      mma(o[i], a[0], first.x, first.y);
      mma(o[i], a[1], first.z, first.w);
      mma(o[i], a[2], second.x, second.y);
      mma(o[i], a[3], second.z, second.w);
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

  /* The left fold of the group just ended into the total; the first group is the total. Ends with a barrier. */
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
      if (lane == 0) fold_a[head] = a, fold_b[head] = b;
    }
    sync_block();
#pragma unroll
    for (int i = 0; i < VALUE_COLUMNS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int head = j < 2 ? g : g + 8;
        total[i][j] = first ? o[i][j] : total[i][j] * fold_a[head] + o[i][j] * fold_b[head];
      }
    sync_block();
  }

  /* Leaves a group (or the total of the first groups) at `at`: [HEADS][VALUE_WIDTH + 2] floats, o then m, l; heads HEAD_STRIDE apart. */
  DI void leave(float* at, const float (&values)[VALUE_COLUMNS][4], const float (&max)[WARP_HEADS], const float (&sum)[WARP_HEADS]) {
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) {
      const int head = i * WARPS + warp;
      if (lane == 0 && head < HEADS) {
        st_f32(at + (u64)head * (VALUE_WIDTH + 2) + VALUE_WIDTH, max[i]);
        st_f32(at + (u64)head * (VALUE_WIDTH + 2) + VALUE_WIDTH + 1, sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < VALUE_COLUMNS; i++) {
      const int column = i * WARPS + warp;
      if (column >= VALUE_TILES) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int head = g + 8 * half;
        if (head < HEADS)
          st8(at + (u64)head * (VALUE_WIDTH + 2) + column * 8 + 2 * t, V2{__float_as_uint(values[i][2 * half]), __float_as_uint(values[i][2 * half + 1])});
      }
    }
  }

  /* The last block's fold over what the others left: total of the first groups at index 0, then groups `next` … `groups` − 1. Every thread
   * works out the factors of its two heads; a head's total_l is then in `norm`. */
  DI void fold_partials(const float* partials, u64 group_stride, int next, int groups, float (&norm)[2]) {
    float max[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int head = min_of(g + 8 * half, HEADS - 1);
      const float* at = partials + (u64)head * (VALUE_WIDTH + 2);
      max[half] = ld_fresh_f32(at + VALUE_WIDTH), norm[half] = ld_fresh_f32(at + VALUE_WIDTH + 1);
#pragma unroll
      for (int i = 0; i < VALUE_COLUMNS; i++) {
        const int column = min_of(i * WARPS + warp, VALUE_TILES - 1);
        total[i][2 * half] = ld_fresh_f32(at + column * 8 + 2 * t);
        total[i][2 * half + 1] = ld_fresh_f32(at + column * 8 + 2 * t + 1);
      }
    }
    for (int group = next; group < groups; group++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int head = min_of(g + 8 * half, HEADS - 1);
        const float* at = partials + group * group_stride + (u64)head * (VALUE_WIDTH + 2);
        const float group_m = ld_fresh_f32(at + VALUE_WIDTH), group_l = ld_fresh_f32(at + VALUE_WIDTH + 1);
        const float larger = fmaxf(max[half], group_m), a = exp_fast(max[half] - larger), b = exp_fast(group_m - larger);
        max[half] = larger;
        norm[half] = norm[half] * a + group_l * b;
#pragma unroll
        for (int i = 0; i < VALUE_COLUMNS; i++) {
          const int column = min_of(i * WARPS + warp, VALUE_TILES - 1);
          total[i][2 * half] = total[i][2 * half] * a + ld_fresh_f32(at + column * 8 + 2 * t) * b;
          total[i][2 * half + 1] = total[i][2 * half + 1] * a + ld_fresh_f32(at + column * 8 + 2 * t + 1) * b;
        }
      }
    }
  }

  /* out[head] = total / l, rounded. `out`: row of HEADS · VALUE_WIDTH elements. */
  DI void finish(bf16* out, const float (&norm)[2]) {
#pragma unroll
    for (int i = 0; i < VALUE_COLUMNS; i++) {
      const int column = i * WARPS + warp;
      if (column >= VALUE_TILES) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int head = g + 8 * half;
        if (head < HEADS)
          st_u32((u32*)(out + head * VALUE_WIDTH + column * 8 + 2 * t), bf16_pair(total[i][2 * half] / norm[half], total[i][2 * half + 1] / norm[half]));
      }
    }
  }

  /* The whole of it. `load_query(head, chunk)`: 8 elements of a head's query; `out`: this block's heads of the row. `partials`: of this row and
   * these heads, groups `group_stride` floats apart; split `split` of `splits` takes its run of groups. */
  template <class ColumnOf, class LoadQuery>
  DI void run(const ColumnOf& column_of, const LoadQuery& load_query, bf16* out, float* partials, u64 group_stride, u32* arrivals, int split, int splits, u32 rows) {
    const int groups = ceil_div(length, ATTENTION_GROUP), per_split = ceil_div(groups, splits), used = ceil_div(groups, per_split);
    const int first_group = split * per_split, end_group = min_of(first_group + per_split, groups);
    const int first = first_group * GROUP_TILES, end = min_of(end_group * GROUP_TILES, ceil_div(length, 64));
    if (first_group < groups && first * 64 + 64 < length) { /* an older tile: its page can come into L2 before the predecessor has finished */
      const bf16* page = pool + (u64)ld_early_u32(pages + first) * 64 * CACHE_WIDTH;
      for (int i = threadIdx.x; i < 64 * CACHE_WIDTH / 64; i += THREADS) prefetch_l2(page + i * 64);
    }
    wait_for_predecessor(rows);
    let_successor_start();
    if (first_group >= groups) return;

    for (int tile = first; tile < first + STAGES - 1; tile++) {
      if (tile < end) fetch(tile, column_of);
      copy_commit();
    }
    for (int i = threadIdx.x; i < 16 * (KEY_WIDTH / 8); i += THREADS) {
      const int head = i / (KEY_WIDTH / 8), chunk = i % (KEY_WIDTH / 8);
      V4 v = {0, 0, 0, 0};
      if (head < HEADS) v = load_query(head, chunk);
      *(V4*)(q + head * Q_STRIDE + chunk * 8) = v;
    }
    for (int i = threadIdx.x; i < 16 * P_STRIDE / 2; i += THREADS) ((u32*)p)[i] = 0;
    if (threadIdx.x < 48) corr[threadIdx.x] = 0.0f;
    start_group();

    for (int tile = first; tile < end; tile++) {
      if (STAGES == 1) {
        sync_block();
        fetch(tile, column_of);
        copy_commit();
        copy_wait<0>();
      } else {
        copy_wait<(STAGES >= 2 ? STAGES - 2 : 0)>();
      }
      sync_block();
      if (STAGES > 1) {
        if (tile + STAGES - 1 < end) fetch(tile + STAGES - 1, column_of);
        copy_commit();
      }
      scores(tile);
      sync_block();
      softmax();
      sync_block();
      values(tile);
      const bool group_ends = (tile + 1) % GROUP_TILES == 0 || tile + 1 == end;
      if (group_ends) {
        const int group = tile / GROUP_TILES;
        if (split == 0) {
          fold(group == 0);
        } else {
          leave(partials + group * group_stride, o, m, l);
        }
        start_group();
      }
    }
    copy_wait<0>();

    float norm[2];
    if (used == 1) {
#pragma unroll
      for (int i = 0; i < WARP_HEADS; i++)
        if (lane == 0) fold_b[i * WARPS + warp] = total_l[i];
      sync_block();
      norm[0] = fold_b[g], norm[1] = fold_b[g + 8];
      finish(out, norm);
      return;
    }
    if (split == 0) leave(partials, total, total_m, total_l);
    fence_device();
    sync_block();
    u32* last = (u32*)corr;
    if (threadIdx.x == 0) *last = count_arrival(arrivals);
    sync_block();
    if (*last != (u32)used - 1) return;
    fence_device();
    fold_partials(partials, group_stride, per_split, groups, norm);
    finish(out, norm);
    if (threadIdx.x == 0) st_u32(arrivals, 0);
  }
};
