/* fold: where blocks of one launch meet, and the left fold of what they leave there (contract §4). All blocks of such a launch fit on the GPU at
 * once, so that one may wait for another. */

/* Waits until `blocks` blocks have come; what they wrote before is visible. The counter holds arrivals below and leavers above, and ends at 0. */
DI void meet(u32* counter, u32 blocks) {
  sync_block();
  if (threadIdx.x == 0) {
    arrive_device(counter, 1);
    while ((ld_acquire_device(counter) & 0xffffu) < blocks) {
    }
  }
  sync_block();
}
DI void part(u32* counter, u32 blocks) {
  if (threadIdx.x == 0 && atomicAdd(counter, 0x10000u) >> 16 == blocks - 1) st_u32(counter, 0);
}

/* Where a row's partials lie: o [groups, HEADS_ALL, VALUE_WIDTH], and m with l [groups, HEADS_ALL, 2], from this block's first head on. */
struct Partials {
  float *o, *ml;
};

/* The fold of `count` partials (index 0, the total of the first groups, then groups `next` …) over the columns of one of `shares` blocks. Passes of at
 * most four columns a thread, in which the partials come through BYTES of shared memory: `held` at a time, each head's factors before them. */
template <int HEADS, int HEADS_ALL, int VALUE_WIDTH, int WARPS, int BYTES> struct Fold {
  static constexpr int THREADS = 32 * WARPS, COLUMNS = HEADS * VALUE_WIDTH;
  static_assert(VALUE_WIDTH % 16 == 0, "a block's columns are whole pieces of 16 bytes");

  const Partials& partials;
  int next, count;
  float* largest; /* [16] of the partials so far, by head of the pass */
  F4* factors;    /* [heads of the pass][held] of the total, of the partial, l · b, l */
  float* staged;  /* [held][columns of the pass] */

  DI int group_of(int i) const { return i == 0 ? 0 : next + i - 1; }

  /* A warp takes a head, a lane the partials first + lane …; the running maximum by a scan. */
  DI void work_out_factors(int head, int at, int first, int n, int held) {
    const int lane = threadIdx.x % 32;
    float so_far = first == 0 ? MINUS_INFINITY : largest[at];
#pragma unroll 1
    for (int base = 0; base < n; base += 128) {
      V2 ml[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int i = base + j * 32 + lane;
        ml[j] = V2{MINUS_INFINITY_BITS, 0};
        if (i < n) ml[j] = ld_fresh8(partials.ml + (group_of(first + i) * HEADS_ALL + head) * 2);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int i = base + j * 32 + lane;
        if (base + j * 32 >= n) break;
        const float own = __uint_as_float(ml[j].x), l = __uint_as_float(ml[j].y);
        float upto = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const float other = __shfl_up_sync(0xffffffffu, upto, d);
          if (lane >= d) upto = fmaxf(other, upto);
        }
        upto = fmaxf(so_far, upto);
        float before = __shfl_up_sync(0xffffffffu, upto, 1);
        if (lane == 0) before = so_far;
        so_far = from_lane_f32(upto, 31);
        const float b = exp_fast(own - upto);
        if (i < n) factors[at * held + i] = F4{exp_fast(before - upto), b, l * b, l};
      }
    }
    sync_warp();
    if (lane == 0) largest[at] = so_far;
  }

  template <int EACH> DI void pass(bf16* out, int column, int columns, u8* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = threadIdx.x * EACH;
    const int first_head = column / VALUE_WIDTH, heads = (column + columns - 1) / VALUE_WIDTH - first_head + 1;
    const int held = min_of(count, (BYTES - 64) / (heads * 16 + columns * 4));
    largest = (float*)shared, factors = (F4*)(shared + 64), staged = (float*)(factors + heads * held);
    const F4* mine = factors + ((column + min_of(own, columns - 1)) / VALUE_WIDTH - first_head) * held;
    float sum[EACH], norm = 0.0f;
#pragma unroll
    for (int j = 0; j < EACH; j++) sum[j] = 0.0f;
    for (int first = 0; first < count; first += held) {
      const int n = min_of(count - first, held);
      sync_block();
#pragma unroll 1
      for (int i = warp; i < n; i += WARPS) {
        const float* from = partials.o + (u64)group_of(first + i) * HEADS_ALL * VALUE_WIDTH + column;
        for (int piece = lane; piece < columns / 4; piece += 32) copy_async16(staged + i * columns + piece * 4, from + piece * 4, 16);
      }
      copy_commit();
#pragma unroll 1
      for (int at = warp; at < heads; at += WARPS) work_out_factors(first_head + at, at, first, n, held);
      copy_wait<0>();
      sync_block();
      if (own >= columns) continue;
#pragma unroll 4
      for (int i = 0; i < n; i++) {
        const F4 f = mine[i];
        float v[EACH];
        if constexpr (EACH == 4) {
          const F4 four = *(const F4*)(staged + i * columns + own);
          v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        } else {
          v[0] = staged[i * columns + own];
        }
        const bool begins = first + i == 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) sum[j] = begins ? v[j] : sum[j] * f.x + v[j] * f.y;
        norm = begins ? f.w : norm * f.x + f.z;
      }
    }
    if (own >= columns) return;
    if constexpr (EACH == 4)
      st8(out + column + own, V2{bf16_pair(sum[0] / norm, sum[1] / norm), bf16_pair(sum[2] / norm, sum[3] / norm)});
    else
      st_bf16(out + column + own, bf16_round(sum[0] / norm));
  }

  static DI void run(bf16* out, const Partials& partials, int next, int count, int share, int shares, u8* shared) {
    Fold fold = {partials, next, count};
    const int columns = ceil_div(ceil_div(COLUMNS, shares), 16) * 16, end = min_of((share + 1) * columns, COLUMNS);
    const bool four = columns > THREADS;
    for (int column = share * columns; column < end;) {
      const int width = min_of(end - column, four ? 4 * THREADS : THREADS);
      if (four) {
        fold.template pass<4>(out, column, width, shared);
      } else {
        fold.template pass<1>(out, column, width, shared);
      }
      column += width;
    }
  }
};
