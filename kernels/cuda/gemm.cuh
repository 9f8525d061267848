/* gemm: the one recipe for W · x (kernels/src/contract.rs). Weights are the A operand of mma.m16n8k16, tokens its 8 columns; a slice
 * of K is one accumulator chain, k tiles ascending; slices meet in the balanced tree. A column's bits do not depend on its index
 * or on the other columns, so every grouping of rows and tokens below gives the same bits.
 *
 * Packed weights are [row tile][k tile][lane][8 bf16] (kernels/src/pack.rs). Inside a pair of k tiles lane quad t owns k = 32·pair + 8t … + 7,
 * so a pair of a token is one 16-byte load a lane. A last tile without partner gives quad t k = 4t … 4t + 3.
 *
 * Terms: g = lane / 4 is the token column whose activations a lane loads (and a row of the accumulator); t = lane % 4 its quad. */

/* First k tile of slice `slice`. */
DI int slice_begin(int slice, int slices, int k_tiles) { return slice * k_tiles / slices; }

/* A dead column repeats a live one: no column's bits reach another, and nobody stores it. */

/* Activations of `live` token columns in shared memory, row-major. STRIDE (elements) is 32 mod 64, so that the lanes of a 16-byte load
 * fall into different banks. */
template <int K_TILES, int STRIDE> struct SharedTokens {
  static constexpr int AHEAD_REGISTERS = 0;
  const bf16* rows;
  int column, last, quad;
  DI SharedTokens(const bf16* rows, int live, int lane) : rows(rows), column(lane / 4), last(live - 1), quad(lane % 4) {}
  DI V4 pair(int tile, int pair) const {
    const bf16* from = rows + min_of(tile * 8 + column, last) * STRIDE + pair * 32;
    if (K_TILES % 2 == 1 && pair == K_TILES / 2) {
      const V2 alone = *(const V2*)(from + 4 * quad);
      return V4{alone.x, alone.y, 0, 0};
    }
    return *(const V4*)(from + 8 * quad);
  }
};

/* Activations in global memory, rows named one by one. */
template <int K_TILES, int TOKEN_TILES, int AHEAD = 32> struct GlobalTokens {
  static constexpr int AHEAD_REGISTERS = AHEAD; /* what may be asked for before it is needed: L2 answers after some 300 cycles */
  const bf16* x;
  u32 offset[TOKEN_TILES]; /* of this lane's column, in elements */
  int quad;
  DI GlobalTokens(const bf16* x, int lane) : x(x), quad(lane % 4) {}
  DI V4 pair(int tile, int pair) const {
    const bf16* from = x + offset[tile] + pair * 32;
    if (K_TILES % 2 == 1 && pair == K_TILES / 2) {
      const V2 alone = ld_act8(from + 4 * quad);
      return V4{alone.x, alone.y, 0, 0};
    }
    return ld_act16(from + 8 * quad);
  }
};

/* Consecutive rows of STRIDE elements from `first` on, of which `rows` − first are live. */
template <int K_TILES, int TOKEN_TILES, int STRIDE> DI GlobalTokens<K_TILES, TOKEN_TILES> rows_of(const bf16* x, int first, int rows, int lane) {
  GlobalTokens<K_TILES, TOKEN_TILES> tokens(x, lane);
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; tile++) tokens.offset[tile] = (u32)min_of(first + tile * 8 + lane / 4, rows - 1) * STRIDE;
  return tokens;
}

/* The largest divisor of `whole` that is at most `limit`; 1 at least. */
DI constexpr int dividing(int whole, int limit) {
  for (int part = limit < whole ? limit : whole; part > 1; part--)
    if (whole % part == 0) return part;
  return 1;
}

/* A chain in flight: DEPTH pairs of k tiles of ROWS row tiles in registers, each reloaded as soon as it is used. GUARDED handles slices
 * that begin or end inside a pair, and lengths that DEPTH does not divide; without it there are no tests in the loop. */
template <int ROWS, int TOKENS, int K_TILES, int DEPTH, bool GUARDED, bool HELD = false> struct Chain {
  V4 ring[DEPTH][ROWS][2];
  const V4* tail; /* HELD: this lane's part of the pairs after the first DEPTH, in shared memory */
  float sum[ROWS][TOKENS][4];

  DI void load(int slot, const V4* weights, int pair, int first, int end) {
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int k_tile = 2 * pair + half;
        if (!GUARDED || (k_tile >= first && k_tile < end)) ring[slot][row][half] = ld_weight16(weights + ((u64)row * K_TILES + k_tile) * 32);
      }
  }
  /* Asks for the first DEPTH pairs of tiles first … end − 1. `weights`: this lane's part of the first row tile. */
  DI void start(const V4* weights, int first, int end) {
    const int pair_first = first / 2, pair_end = (end + 1) / 2;
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++)
      if (!GUARDED || pair_first + slot < pair_end) load(slot, weights, pair_first + slot, first, end);
  }
  /* HELD: asks for all other pairs, into `shared`, which only this warp uses: ROWS KiB a pair. Wait for the copies before the pass. */
  DI void hold(V4* shared, const V4* weights, int first, int end) {
    V4* to = shared + threadIdx.x % 32;
    tail = to;
    const int pair_end = (end + 1) / 2;
    for (int pair = first / 2 + DEPTH; pair < pair_end; pair++)
#pragma unroll
      for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int half = 0; half < 2; half++, to += 32) {
          const int k_tile = 2 * pair + half;
          if (!GUARDED || k_tile < end) copy_async16(to, weights + ((u64)row * K_TILES + k_tile) * 32, 16);
        }
    copy_commit();
  }
  DI void load_held(int slot, int after) {
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
      for (int half = 0; half < 2; half++) ring[slot][row][half] = tail[((after * ROWS + row) * 2 + half) * 32];
  }
  /* Runs the chain over the first LIVE token tiles; asks for the first pairs of `next` (the same tiles of another row tile) on the way, if there is
   * `more` (a null pointer for "no more" was loaded from by code that ptxas made of it). Activations are asked for AHEAD pairs before their turn. */
  template <int LIVE, class Tokens> DI void pass(const V4* weights, int first, int end, bool more, const V4* next, const Tokens& tokens) {
    constexpr int AHEAD = dividing(DEPTH, Tokens::AHEAD_REGISTERS / (4 * LIVE));
    const int pair_first = first / 2, pair_end = (end + 1) / 2;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
      for (int tile = 0; tile < TOKENS; tile++)
#pragma unroll
        for (int q = 0; q < 4; q++) sum[row][tile][q] = 0.0f;
    V4 x[AHEAD][LIVE];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++)
      if (pair_first + ahead < pair_end)
#pragma unroll
        for (int tile = 0; tile < LIVE; tile++) x[ahead][tile] = tokens.pair(tile, pair_first + ahead);
#pragma unroll 1
    for (int base = pair_first; base < pair_end; base += DEPTH) {
#pragma unroll
      for (int slot = 0; slot < DEPTH; slot++) {
        const int pair = base + slot;
        if (GUARDED && pair >= pair_end) break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int k_tile = 2 * pair + half;
          if (GUARDED && (k_tile < first || k_tile >= end)) continue;
#pragma unroll
          for (int tile = 0; tile < LIVE; tile++) {
            const V4& b = x[slot % AHEAD][tile];
#pragma unroll
            for (int row = 0; row < ROWS; row++) mma(sum[row][tile], ring[slot][row][half], half ? b.z : b.x, half ? b.w : b.y);
          }
        }
        if (pair + AHEAD < pair_end)
#pragma unroll
          for (int tile = 0; tile < LIVE; tile++) x[slot % AHEAD][tile] = tokens.pair(tile, pair + AHEAD);
        if (HELD && pair + DEPTH < pair_end) {
          load_held(slot, pair - pair_first);
        } else if (pair + DEPTH < pair_end) {
          load(slot, weights, pair + DEPTH, first, end);
        } else if (!GUARDED && more) {
          load(slot, next, pair + DEPTH - (pair_end - pair_first), first, end);
        }
      }
    }
    if (GUARDED && more) start(next, first, end);
  }
  template <int LIVE, class Tokens> DI void pass(const V4* weights, int first, int end, decltype(nullptr), const Tokens& tokens) {
    pass<LIVE>(weights, first, end, false, weights, tokens);
  }
  /* The same of `token_tiles` live tiles, at most TOKENS. */
  template <class Tokens> DI void run(const V4* weights, int first, int end, bool more, const V4* next, const Tokens& tokens, int token_tiles) {
    if (token_tiles <= 1) {
      pass<1>(weights, first, end, more, next, tokens);
    } else if (TOKENS <= 2 || token_tiles == 2) {
      pass<TOKENS <= 2 ? TOKENS : 2>(weights, first, end, more, next, tokens);
    } else if (TOKENS <= 4 || token_tiles <= 4) {
      pass<TOKENS <= 4 ? TOKENS : 4>(weights, first, end, more, next, tokens);
    } else {
      pass<TOKENS>(weights, first, end, more, next, tokens);
    }
  }
};

/* DEPTH for chains of `pairs` pairs: the largest divisor of it that keeps ROWS · DEPTH at most `limit` (2 KB a lane-row in flight at 8). */
DI constexpr int chain_depth(int pairs, int rows, int limit) {
  for (int depth = limit / rows; depth > 1; depth--)
    if (pairs % depth == 0) return depth;
  return 1;
}

/* ---- Eight slices, one warp each: a block of 256 threads owns ROWS row tiles of TOKENS · 8 tokens. ---- */
template <int K_TILES, int ROWS, int TOKENS, int DEPTH_LIMIT = 0, bool HELD = false> struct Sliced {
  static constexpr int SLICES = 8;
  static constexpr bool WHOLE = K_TILES % (2 * SLICES) == 0;
  static constexpr int PAIRS = WHOLE ? K_TILES / (2 * SLICES) : ceil_div(K_TILES, 2 * SLICES) + 1;
  static constexpr int LIMIT = DEPTH_LIMIT ? DEPTH_LIMIT : TOKENS >= 8 ? 4 : TOKENS >= 4 ? 6 : PAIRS <= 10 ? 10 : 8;
  static constexpr int DIVIDING = chain_depth(PAIRS, ROWS, LIMIT);
  static constexpr bool GUARDED = !WHOLE || DIVIDING * ROWS < 3;
  static constexpr int DEPTH = GUARDED ? (PAIRS < LIMIT / ROWS ? PAIRS : LIMIT / ROWS) : DIVIDING;
  typedef Chain<ROWS, TOKENS, K_TILES, DEPTH, GUARDED, HELD> Work;
  static constexpr int HELD_BYTES = HELD ? (PAIRS - DEPTH) * ROWS * 1024 : 0; /* of a warp */
  static constexpr int STRIDE = 20; /* floats of a token's 16 rows in `slices`: no bank conflicts at the store */
  static constexpr int SHARED_FLOATS = SLICES * TOKENS * 8 * STRIDE;

  /* Puts row tile `row` of every slice into shared memory; ends with a barrier. */
  static DI void share(float* slices, const Work& work, int row, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TOKENS; tile++) {
      float* to = slices + (warp * TOKENS * 8 + tile * 8 + 2 * t) * STRIDE + g;
      to[0] = work.sum[row][tile][0];
      to[STRIDE] = work.sum[row][tile][1];
      to[8] = work.sum[row][tile][2];
      to[STRIDE + 8] = work.sum[row][tile][3];
    }
    sync_block();
  }
  /* The tree over the slices of one token and one row of the tile. */
  static DI float total(const float* slices, int token, int row) {
    const float* s = slices + token * STRIDE + row;
    constexpr int NEXT = TOKENS * 8 * STRIDE;
    return ((s[0] + s[NEXT]) + (s[2 * NEXT] + s[3 * NEXT])) + ((s[4 * NEXT] + s[5 * NEXT]) + (s[6 * NEXT] + s[7 * NEXT]));
  }
};

/* ---- One slice: a warp owns ROWS row tiles and the whole of K. ---- */
template <int K_TILES, int ROWS, int TOKENS> struct Whole {
  static constexpr int PAIRS = ceil_div(K_TILES, 2);
  static constexpr int LIMIT = TOKENS >= 8 ? 4 : 8;
  static constexpr int DIVIDING = chain_depth(PAIRS, ROWS, PAIRS == 44 ? 11 : PAIRS % 10 == 0 && TOKENS <= 2 ? 10 : LIMIT);
  static constexpr bool GUARDED = K_TILES % 2 == 1 || (DIVIDING < PAIRS && DIVIDING * ROWS < 3);
  static constexpr int DEPTH = GUARDED ? (PAIRS < LIMIT / ROWS ? PAIRS : LIMIT / ROWS) : DIVIDING;
  typedef Chain<ROWS, TOKENS, K_TILES, DEPTH, GUARDED> Work;
};

/* ---- One slice at many tokens: a block's WARPS warps, ROWS row tiles each, share the activations, which asynchronous copies bring to shared
 * memory. ---- A stage holds DEPTH pairs of TOKENS · 8 rows, a sheet [row][32] a pair, so that the lanes of a 16-byte load fall into
 * different banks; the weights of one stage are in registers. With as many stages as steps nothing is overwritten and all copies start at once. */
template <int K_TILES, int ROWS, int TOKENS, int WARPS, int DEPTH, int STAGES> struct Staged {
  static_assert(K_TILES % 2 == 0, "a stage is whole pairs");
  static constexpr int PAIRS = K_TILES / 2, STEPS = ceil_div(PAIRS, DEPTH);
  static constexpr int BUFFERS = STAGES < STEPS ? STAGES : STEPS, AHEAD = STAGES < STEPS ? STAGES - 1 : STEPS; /* stages that are asked for early */
  static_assert(DEPTH <= PAIRS && AHEAD > 0, "a chain has a whole stage, and a ring of stages two");
  static constexpr int SHEET = TOKENS * 8 * 32, STAGE = DEPTH * SHEET; /* elements */
  static constexpr int SHARED_BYTES = BUFFERS * STAGE * 2;
  static constexpr int COPIES = ceil_div(STAGE / 8, WARPS * 32);
  static constexpr int GROUP = TOKENS % 4 == 0 ? 4 : TOKENS < 4 ? TOKENS : 1; /* token tiles whose chains take turns */
  V4 ring[DEPTH][ROWS][2];
  float sum[ROWS][TOKENS][4];

  DI void load(int slot, const V4* weights, int pair) {
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
      for (int half = 0; half < 2; half++) ring[slot][row][half] = ld_weight16(weights + ((u64)row * K_TILES + 2 * pair + half) * 32);
  }
  /* Asks for the first DEPTH pairs. `weights`: this lane's part of the first row tile. */
  DI void start(const V4* weights) {
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++) load(slot, weights, slot);
  }
  /* `row_of(i)`: row i of the block's tokens (a dead column repeats a live one). Every thread of the block calls it;
   * `active`: this warp has row tiles. */
  template <class RowOf> DI void run(bf16* stages, const V4* weights, bool active, const RowOf& row_of) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    auto fetch = [&](int step) {
      bf16* stage = stages + step % BUFFERS * STAGE;
#pragma unroll COPIES > 4 ? 2 : COPIES
      for (int i = 0; i < COPIES; i++) {
        const int chunk = i * WARPS * 32 + (int)threadIdx.x, pair = step * DEPTH + chunk / (SHEET / 8);
        if ((STAGE / 8 % (WARPS * 32) == 0 || chunk < STAGE / 8) && (PAIRS % DEPTH == 0 || pair < PAIRS))
          copy_async16(stage + chunk * 8, row_of(chunk / 4 % (TOKENS * 8)) + pair * 32 + chunk % 4 * 8, 16);
      }
    };
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
      for (int tile = 0; tile < TOKENS; tile++)
#pragma unroll
        for (int q = 0; q < 4; q++) sum[row][tile][q] = 0.0f;
#pragma unroll
    for (int step = 0; step < AHEAD; step++) {
      fetch(step);
      copy_commit();
    }
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
      copy_wait<AHEAD - 1>();
      sync_block();
      if (step + AHEAD < STEPS) fetch(step + AHEAD);
      copy_commit();
      if (active) {
        const bf16* stage = stages + step % BUFFERS * STAGE + g * 32 + t * 8;
#pragma unroll
        for (int slot = 0; slot < DEPTH; slot++) {
          const int pair = step * DEPTH + slot;
          if (PAIRS % DEPTH != 0 && pair >= PAIRS) break;
#pragma unroll
          for (int tile = 0; tile < TOKENS; tile += GROUP) {
            V4 x[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) x[i] = *(const V4*)(stage + slot * SHEET + (tile + i) * 8 * 32);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
              for (int i = 0; i < GROUP; i++)
#pragma unroll
                for (int row = 0; row < ROWS; row++)
                  mma(sum[row][tile + i], ring[slot][row][half], half ? x[i].z : x[i].x, half ? x[i].w : x[i].y);
          }
          if (pair + DEPTH < PAIRS) load(slot, weights, pair + DEPTH);
        }
      }
    }
    copy_wait<0>();
  }
};
