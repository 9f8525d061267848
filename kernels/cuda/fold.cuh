/* fold: how the blocks of one launch hand each other their partials, and the left fold of these (contract §4). All blocks of such a launch fit on
 * the GPU at once, so that one may wait for another.
 *
 * A word of a partial is stored xored with bits that no value has. It is zero before it has come, and zero again once its only reader has it: a
 * word tells by itself that it has come, without a fence, a counter and the trips to the L2 that they take. m and l of a group leave before its
 * values are summed. Who folds waits for them alone, so that waiting costs the L2 nothing, works out its factors, and finds the rest there. */
constexpr u32 NOT_COME = 0x7fc12345u; /* a NaN that arithmetic does not make */
DI void hand_over(float* at, float first, float second) { st_relaxed8(at, V2{__float_as_uint(first) ^ NOT_COME, __float_as_uint(second) ^ NOT_COME}); }
DI float handed_over(u32 word) { return __uint_as_float(word ^ NOT_COME); }

/* A row's partials, from this block's first head on: o [groups, HEADS_ALL, VALUE_WIDTH], and m with l [PARTIAL_COPIES, HEADS_ALL, groups, 2]: a copy for
 * each block that may take columns of one head. */
struct Partials {
  float *o, *ml;
};

/* Who folds what: of `blocks` blocks, `copies` take columns of the same head, or one takes `heads` whole heads. */
template <int HEADS, int VALUE_WIDTH> struct Shares {
  int copies, heads, columns;
  DI Shares(int blocks) : copies(min_of(blocks / HEADS, PARTIAL_COPIES)), heads(1), columns(0) {
    if (copies == 0) copies = 1, heads = ceil_div(HEADS, blocks);
    columns = ceil_div(ceil_div(VALUE_WIDTH, copies), 16) * 16;
    copies = ceil_div(VALUE_WIDTH, columns); /* none of them without a reader */
  }
};

/* The fold of `count` partials, the first of which is the total of the first groups, over the columns of one share. Passes of whole heads and at most
 * four columns a thread, in which the partials come through BYTES of shared memory: `held` at a time, each head's factors before them. */
template <int HEADS, int HEADS_ALL, int VALUE_WIDTH, int GROUPS, int WARPS, int BYTES> struct Fold {
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int PASS = (4 * THREADS / VALUE_WIDTH < HEADS ? 4 * THREADS / VALUE_WIDTH : HEADS) * VALUE_WIDTH; /* whole heads, whose m and l are read once */
  static_assert(VALUE_WIDTH % 16 == 0, "a block's columns are whole pieces of 16 bytes");
  static_assert(PASS > 0, "a pass takes a head at least");
  static_assert((BYTES - 64) / (PASS / VALUE_WIDTH * 16 + PASS * 4) >= 4, "a batch of partials fits into shared memory");
  typedef ::Shares<HEADS, VALUE_WIDTH> Shares;

  const Partials& partials; /* from the total on */
  int count, copy;
  float* largest; /* [16] of the partials so far, by head of the pass */
  F4* factors;    /* [heads of the pass][held] of the total, of the partial, l · b, unused */
  float* staged;  /* [held][columns of the pass] */

  /* Partials that are summed in one go. The last batch is filled up with some that leave every sum as it is, of both zeros too: sum · 1 + −0 · 1. */
  static constexpr int BATCH = 4;
  DI static int whole_batches(int n) { return ceil_div(n, BATCH) * BATCH; }

  /* Factors of 128 partials from first + base on: a warp takes a head, a lane every 32nd partial; the running maximum by a scan. `come()` is called
   * once they have come. */
  template <class Come> DI void work_out_factors(int head, int at, int first, int base, int n, int held, const Come& come) {
    const int lane = threadIdx.x % 32;
    float* ml_at = partials.ml + (((u64)copy * HEADS_ALL + head) * GROUPS + first + base + lane) * 2;
    float so_far = first + base == 0 ? MINUS_INFINITY : largest[at], own[4], upto[4], before[4], last[4];
    V2 ml[4];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        ml[j] = V2{MINUS_INFINITY_BITS ^ NOT_COME, NOT_COME};
        if (base + j * 32 + lane < n) ml[j] = ld_relaxed8(ml_at + j * 64);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) missing = missing || ml[j].x == 0 || ml[j].y == 0;
    } while (ballot(missing));
    come();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (base + j * 32 + lane < n) st8(ml_at + j * 64, V2{0, 0});
      own[j] = upto[j] = handed_over(ml[j].x);
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float other = __shfl_up_sync(0xffffffffu, upto[j], d);
        if (lane >= d) upto[j] = fmaxf(other, upto[j]);
      }
#pragma unroll
    for (int j = 0; j < 4; j++) before[j] = __shfl_up_sync(0xffffffffu, upto[j], 1), last[j] = from_lane_f32(upto[j], 31);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int i = base + j * 32 + lane;
      upto[j] = fmaxf(so_far, upto[j]);
      before[j] = lane == 0 ? so_far : fmaxf(so_far, before[j]);
      so_far = fmaxf(so_far, last[j]);
      const float b = exp_fast(own[j] - upto[j]), l = handed_over(ml[j].y);
      if (i < n) {
        factors[at * held + i] = F4{exp_fast(before[j] - upto[j]), b, l * b, 0.0f};
      } else if (i < whole_batches(n)) {
        factors[at * held + i] = F4{1.0f, 1.0f, -0.0f, 0.0f};
      }
    }
    sync_warp();
    if (lane == 0) largest[at] = so_far;
    sync_warp();
  }

  /* Columns column … of the partials first … first + n − 1 to shared memory, in pieces of 16 bytes. */
  DI void stage(int column, int columns, int first, int n) {
    constexpr int AT_ONCE = 6, STRIDE = HEADS_ALL * VALUE_WIDTH;
    const int pieces = columns / 4, lane = threadIdx.x % 32, further = THREADS / pieces, across = THREADS % pieces;
    float* from = partials.o + (u64)first * STRIDE + column;
    int i = threadIdx.x / pieces, piece = threadIdx.x % pieces;
#pragma unroll 1
    for (int base = threadIdx.x; base - lane < n * pieces; base += AT_ONCE * THREADS) {
      const int mine = n * pieces - base; /* word j is there when j · THREADS < mine */
      int at[AT_ONCE];
      V4 v[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        at[j] = i * STRIDE + piece * 4;
        i += further, piece += across;
        if (piece >= pieces) i++, piece -= pieces;
      }
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) v[j] = j * THREADS < mine ? ld_relaxed16(from + at[j]) : V4{1, 1, 1, 1};
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) missing = missing || v[j].x == 0 || v[j].y == 0 || v[j].z == 0 || v[j].w == 0;
      } while (ballot(missing));
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++)
        if (j * THREADS < mine) {
          st16(from + at[j], V4{0, 0, 0, 0});
          *(F4*)(staged + (base + j * THREADS) * 4) = F4{handed_over(v[j].x), handed_over(v[j].y), handed_over(v[j].z), handed_over(v[j].w)};
        }
    }
  }

  /* What BATCH partials give to EACH columns and their norm. */
  template <int EACH> struct Given {
    F4 f[BATCH];
    float v[BATCH][EACH];
    DI void load(const F4* factors, const float* values, int columns) {
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        f[j] = factors[j];
        if constexpr (EACH == 4) {
          const F4 four = *(const F4*)(values + j * columns);
          v[j][0] = four.x, v[j][1] = four.y, v[j][2] = four.z, v[j][3] = four.w;
        } else {
          v[j][0] = values[j * columns];
        }
      }
    }
  };
  /* Adds `n` partials, whole batches, to EACH columns from `values` on and to their norm. A sum waits for the one before it and for nothing else: the next
   * batch is asked of shared memory meanwhile. */
  template <int EACH> DI static void sum_up(float (&sum)[4], float& norm, const F4* factors, const float* values, int columns, int n) {
    Given<EACH> now, next;
    now.load(factors, values, columns);
#pragma unroll 1
    for (int i = 0; i < n; i += BATCH) {
      const int then = min_of(i + BATCH, n - BATCH);
      next.load(factors + then, values + then * columns, columns);
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
#pragma unroll
        for (int k = 0; k < EACH; k++) sum[k] = sum[k] * now.f[j].x + now.v[j][k] * now.f[j].y;
        norm = norm * now.f[j].x + now.f[j].z;
      }
      now = next;
    }
  }

  DI void pass(bf16* out, int column, int columns, bool four, u8* shared) {
    const int warp = threadIdx.x / 32, own = threadIdx.x * (four ? 4 : 1);
    const int first_head = column / VALUE_WIDTH, heads = (column + columns - 1) / VALUE_WIDTH - first_head + 1;
    const int held = min_of(whole_batches(count), (BYTES - 64) / (heads * 16 + columns * 4) / BATCH * BATCH);
    largest = (float*)shared, factors = (F4*)(shared + 64), staged = (float*)(factors + heads * held);
    /* The first partial is the total so far: its factors are 0 and 1. */
    float sum[4] = {-0.0f, -0.0f, -0.0f, -0.0f}, norm = -0.0f;
#pragma unroll 1
    for (int first = 0; first < count; first += held) {
      const int n = min_of(count - first, held);
      sync_block();
      bool met = false; /* the others ask for values once this warp knows that m and l have come, and not before: they would only ask again */
#pragma unroll 1
      for (int at = warp; at < heads; at += WARPS)
#pragma unroll 1
        for (int base = 0; base < n; base += 128)
          work_out_factors(first_head + at, at, first, base, n, held, [&] {
            if (at + WARPS < heads || base + 128 < n) return;
            met = true;
            sync_block();
          });
      if (!met) sync_block();
      stage(column, columns, first, n);
      for (int i = n * columns + threadIdx.x; i < whole_batches(n) * columns; i += THREADS) staged[i] = -0.0f;
      sync_block();
      if (own >= columns) continue;
      const F4* mine = factors + ((column + own) / VALUE_WIDTH - first_head) * held;
      const float* values = staged + own;
      if (four) {
        sum_up<4>(sum, norm, mine, values, columns, whole_batches(n));
      } else {
        sum_up<1>(sum, norm, mine, values, columns, whole_batches(n));
      }
    }
    if (own >= columns) return;
    if (four)
      st8(out + column + own, V2{bf16_pair(sum[0] / norm, sum[1] / norm), bf16_pair(sum[2] / norm, sum[3] / norm)});
    else
      st_bf16(out + column + own, bf16_round(sum[0] / norm));
  }

  static DI void run(bf16* out, const Partials& partials, int count, int share, const Shares& shares, u8* shared) {
    const int head = share / shares.copies * shares.heads, copy = share % shares.copies;
    Fold fold = {partials, count, copy};
    const int begin = head * VALUE_WIDTH + copy * shares.columns, last = min_of(head + shares.heads, HEADS) * VALUE_WIDTH;
    const int end = shares.heads > 1 ? last : min_of(begin + shares.columns, last);
    const bool four = shares.heads * shares.columns > THREADS;
    for (int column = begin; column < end; column += PASS) fold.pass(out, column, min_of(end - column, PASS), four, shared);
  }
};
