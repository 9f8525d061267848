/* sample: logprobs of the raw distribution and the next token of each logit row (contract §7)
 * Buffers   token, rank, nan [L] u32, logprob [L] f32 · top_ids u32, top_logprobs f32 [L, TOP_LOGPROBS_MAX] · logits [L, VOCAB] f32, the same after
 *           as before · slot, position [R], logit_row, logit_kind, logit_target [L], step [16] u32 · generated [S], params [S, SLOT_WORDS],
 *           bias [S, LOGIT_BIAS_MAX, 2], counts [S, VOCAB] u32
 *           scratch [L, SCRATCH] f32 · arrivals [L] u32, zero before and after
 * Launch    grid (SPLITS, L), block 1024; dynamic smem SELECT_BYTES. A plain row (greedy or temperature alone, no logprobs) is shared by the SPLITS
 *           blocks, and the one that arrives last picks among their bests; the first block takes any other row alone, where thread j is lane j of
 *           the contract's log-softmax
 * Numerics  raw: exp_fast, lanes ascending, the balanced tree; logprob = (l − max) − ln sum. Draw: Philox4x32-10 and logf, argmax(l / T − ln(−ln u)).
 *           top_k and top_p select by radix on the ordered bits of l / T; top_p's masses are exp_fast in multiples of 2⁻⁴⁰, so that their sums
 *           do not depend on an order (kernels/src/math/sample.rs sums them in f32)
 * Pad rows  zeros                                    Capture   no allocation, sync or readback
 * Cost      VOCAB · 4 B a pass; one pass for a plain row; a drawn one is bound by its noise, two logf an id
 * Reference kernels/src/ops/sample.rs */
constexpr int LANES = 1024, WARPS = LANES / 32;
static_assert(LOGSUMEXP_LANES == LANES, "a thread is a lane");
constexpr int BINS = 256;
constexpr float FIXED_ONE = 1099511627776.0f; /* 2^40 */
#define NOBODY 0xffffffffu

struct Best {
  float value;
  u32 id;
  DI void consider(float v, u32 other) {
    if (v > value || (v == value && other < id)) value = v, id = other;
  }
};

/* The best over the block; every thread gets it. Begins and ends with a barrier. */
DI Best block_best(Best mine, Best* shared) {
  for (int mask = 16; mask; mask /= 2) mine.consider(xor_f32(mine.value, mask), xor_u32(mine.id, mask));
  sync_block();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  sync_block();
  mine = shared[threadIdx.x % 32];
  for (int mask = 16; mask; mask /= 2) mine.consider(xor_f32(mine.value, mask), xor_u32(mine.id, mask));
  return mine;
}

/* The balanced tree over the block's lanes. */
DI float block_tree(float v, float* shared) {
  v = warp_tree(v);
  sync_block();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  sync_block();
  return warp_tree(shared[threadIdx.x % 32]);
}

/* Bits of a float in the order of its value. */
DI u32 ordered(float v) {
  const u32 bits = __float_as_uint(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Selection {
  u32 key;   /* where the weight of the keys at or above it first reaches the target */
  u64 above; /* the weight of the keys above it */
};

/* By radix from the top byte: `visit(emit)` calls emit(key, weight) for this thread's members. Every thread gets the result. */
template <class Visit> DI Selection select(u64 target, u64* histograms, const Visit& visit) {
  __shared__ Selection found;
  u64* mine = histograms + threadIdx.x / 32 * BINS;
  u32 prefix = 0;
  u64 above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    sync_block();
    for (int i = threadIdx.x; i < WARPS * BINS; i += LANES) histograms[i] = 0;
    sync_block();
    visit([&](u32 key, u64 weight) {
      if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(mine + (key >> shift & 255), weight);
    });
    sync_block();
    if (threadIdx.x < BINS) {
      u64 sum = 0;
      for (int warp = 0; warp < WARPS; warp++) sum += histograms[warp * BINS + threadIdx.x];
      histograms[threadIdx.x] = sum;
    }
    sync_block();
    if (threadIdx.x == 0) {
      u64 so_far = above;
      int bin = BINS - 1;
      while (bin > 0 && so_far + histograms[bin] < target) so_far += histograms[bin--];
      found = Selection{prefix << 8 | (u32)bin, so_far};
    }
    sync_block();
    prefix = found.key, above = found.above;
  }
  return Selection{prefix, above};
}

DI void philox(u32 (&c)[4], u32 key0, u32 key1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u32 high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0], high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
    c[0] = high1 ^ c[1] ^ key0, c[1] = low1, c[2] = high0 ^ c[3] ^ key1, c[3] = low0;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
}
/* u = ((word >> 9) + 1/2) · 2^-23, exact and inside (0, 1): with 24 bits the sum could round to 1. */
DI float gumbel(u32 word) { return -logf(-logf(((float)(word >> 9) + 0.5f) * 1.1920928955078125e-7f)); }
/* Not below gumbel(word), and cheap: with n leading ones u is below 1 - 2^-(n + 1), so -ln u is above 2^-(n + 1) and the noise below (n + 1) · ln 2.
 * The margin is far more than two logarithms are wrong by. */
DI float gumbel_at_most(u32 word) { return (float)(__clz(~word) + 1) * 0.69314718f + 0.001f; }

/* A slot's parameters and what the step's mask leaves of them. */
struct Draw {
  const u32* params;
  const u32* counts; /* null: no penalties */
  float presence, frequency, repetition, temperature;
  bool random;

  DI u32 word(int field) const { return ld_early_u32(params + field); }
  DI float number(int field) const { return __uint_as_float(word(field)); }
  /* A logit after penalties and temperature. */
  DI float value(float l, u32 id) const {
    if (counts) {
      const u32 count = ld_act_u32(counts + id), generated = count & 0x7fffffffu;
      if (count) {
        l = l > 0.0f ? l / repetition : l * repetition;
        if (generated) l = l - frequency * (float)generated - presence;
      }
    }
    return random ? l / temperature : l;
  }
};

/* Members of a truncated distribution: at or above `least` (or the best itself), and not behind either bound. */
struct Kept {
  float least, max;
  u32 key[2], id[2];
  int bounds;
  DI bool has(float v, u32 other) const {
    if (!(v >= least || v == max)) return false;
    const u32 k = ordered(v);
    for (int i = 0; i < 2; i++)
      if (i < bounds && (k < key[i] || (k == key[i] && other > id[i]))) return false;
    return true;
  }
};

/* What a block found in its part of a plain row. */
struct Found {
  Best raw, drawn;
  u32 nan;
  DI void join(const Found& other) {
    raw.consider(other.raw.value, other.raw.id);
    drawn.consider(other.drawn.value, other.drawn.id);
    nan |= other.nan;
  }
  DI void join_warp() {
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
      join(Found{{xor_f32(raw.value, mask), xor_u32(raw.id, mask)}, {xor_f32(drawn.value, mask), xor_u32(drawn.id, mask)}, xor_u32(nan, mask)});
  }
};
constexpr int FOUND_WORDS = 8;
static_assert(SPLITS * FOUND_WORDS <= SCRATCH, "the scratch of a row holds every block's bests");

DI void clear_top(u32* top_ids, float* top_logprobs, int at) {
  const int i = at * TOP_LOGPROBS_MAX + (int)threadIdx.x;
  if (threadIdx.x < TOP_LOGPROBS_MAX) st_u32(top_ids + i, 0), st_f32(top_logprobs + i, 0.0f);
}

/* The token of a plain row, from before the wait on. */
DI void sample_plain(u32* token_out, float* logprob_out, u32* rank_out, u32* nan_out, u32* top_ids, float* top_logprobs, const float* l, const Draw& draw,
                     u32 position, float* scratch, u32* arrivals, int at, u32 rows) {
  __shared__ Found founds[WARPS];
  constexpr int QUADS = ceil_div(VOCAB, 4), PART = ceil_div(QUADS, SPLITS);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, end = min_of(QUADS, ((int)blockIdx.x + 1) * PART);
  const float temperature = draw.temperature;
  const bool random = draw.random;
  const float inverse = 1.0f / temperature;
  const u32 key0 = draw.word(SLOT_SEED_LO), key1 = draw.word(SLOT_SEED_HI), choice = draw.word(SLOT_CHOICE);
  wait_for_predecessor(rows);
  let_successor_start();
  if (blockIdx.x == 0) clear_top(top_ids, top_logprobs, at);
  Found found = {{MINUS_INFINITY, NOBODY}, {MINUS_INFINITY, NOBODY}, 0};
  float reached = MINUS_INFINITY; /* by some lane of the warp: an id that cannot draw as much is not drawn for */
  for (int base = blockIdx.x * PART + warp * 32; base < end; base += LANES) {
    const int quad = base + lane;
    if (quad < end) {
      float v[4];
      if (VOCAB % 4 == 0) {
        const F4 four = ld_act_f4(l + quad * 4);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = quad * 4 + i < VOCAB ? ld_act_f32(l + quad * 4 + i) : MINUS_INFINITY;
      }
      u32 words[4] = {choice, position, (u32)quad, 0};
      if (random) philox(words, key0, key1);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int id = quad * 4 + i;
        if (VOCAB % 4 != 0 && id >= VOCAB) break;
        found.nan |= v[i] != v[i];
        found.raw.consider(v[i], id);
        if (random) {
          /* Not below v / T, and cheaper: the product is within two parts in 2^23 of it. Infinities make a NaN, which is looked at. */
          const float near = v[i] * inverse, at_most = near + fabsf(near) * 4e-7f;
          if (!(at_most + gumbel_at_most(words[i]) < reached)) found.drawn.consider(v[i] / temperature + gumbel(words[i]), id);
        }
      }
    }
    if (random) reached = warp_max(found.drawn.value);
  }
  found.join_warp();
  if (lane == 0) founds[warp] = found;
  sync_block();
  if (warp != 0) return;
  found = founds[lane];
  found.join_warp();
  if (SPLITS > 1) {
    float* mine = scratch + (u64)at * SCRATCH;
    u32 place = 0;
    if (lane == 0) {
      float* to = mine + blockIdx.x * FOUND_WORDS;
      st16(to, V4{__float_as_uint(found.raw.value), found.raw.id, __float_as_uint(found.drawn.value), found.drawn.id});
      st_u32((u32*)to + 4, found.nan);
      fence_device();
      place = count_arrival(arrivals + at);
    }
    if (from_lane_u32(place, 0) != SPLITS - 1) return;
    fence_device();
    for (int i = lane; i < SPLITS; i += 32) {
      const V4 other = ld_fresh16(mine + i * FOUND_WORDS);
      found.join(Found{{__uint_as_float(other.x), other.y}, {__uint_as_float(other.z), other.w}, ld_fresh_u32((const u32*)mine + i * FOUND_WORDS + 4)});
    }
    found.join_warp();
    if (lane == 0) st_u32(arrivals + at, 0);
  }
  if (lane == 0) {
    st_u32(token_out + at, found.nan ? 0 : random ? found.drawn.id : found.raw.id);
    st_f32(logprob_out + at, 0.0f), st_u32(rank_out + at, 0), st_u32(nan_out + at, found.nan);
  }
}

KERNEL void __launch_bounds__(1024)
    sample(u32* token_out, float* logprob_out, u32* rank_out, u32* nan_out, u32* top_ids, float* top_logprobs, float* logits, const u32* row_slot,
           const u32* row_position, const u32* logit_row, const u32* logit_kind, const u32* logit_target, const u32* step, const u32* generated,
           const u32* params, const u32* bias, const u32* counts, float* scratch, u32* arrivals, u32 rows) {
  DYNAMIC_SHARED;
  u64* histograms = (u64*)dynamic_shared;
  __shared__ Best bests[WARPS];
  __shared__ float sums[WARPS];
  __shared__ float saved[LOGIT_BIAS_MAX + EOS_IDS_MAX + STOP_IDS_MAX];
  const int at = blockIdx.y, lane = threadIdx.x;
  const u32 kind = ld_early_u32(logit_kind + at), target = ld_early_u32(logit_target + at);
  const u32 row = ld_early_u32(logit_row + at), slot = ld_early_u32(row_slot + row), features = ld_early_u32(step);
  float* l = logits + (u64)at * VOCAB;
  Draw draw;
  draw.params = params + (u64)slot * SLOT_WORDS;
  const u32 flags = draw.word(SLOT_FLAGS);
  const bool scored = kind == LOGIT_ROW_SCORE;
  const bool wanted = scored ? (features & FEATURE_SCORE) != 0 : (features & FEATURE_LOGPROBS) && (flags & SLOT_FLAG_LOGPROBS);
  const bool biased = (features & FEATURE_BIAS) && (flags & SLOT_FLAG_BIAS), penalties = (features & FEATURE_PENALTIES) && (flags & SLOT_FLAG_PENALTIES);
  const bool early = (features & FEATURE_MIN_TOKENS) && ld_early_u32(generated + slot) < draw.word(SLOT_MIN_TOKENS);
  const bool truncated = (features & FEATURE_TRUNCATION) && (flags & SLOT_FLAG_TRUNCATION);
  draw.temperature = draw.number(SLOT_TEMPERATURE);
  draw.random = (features & FEATURE_RANDOM) && draw.temperature >= __uint_as_float(GREEDY_TEMPERATURE_BITS);
  if (kind == LOGIT_ROW_SAMPLE && !(wanted || biased || penalties || early || truncated)) {
    sample_plain(token_out, logprob_out, rank_out, nan_out, top_ids, top_logprobs, l, draw, ld_early_u32(row_position + row), scratch, arrivals, at, rows);
    return;
  }
  wait_for_predecessor(rows);
  let_successor_start();
  if (blockIdx.x != 0) return;
  clear_top(top_ids, top_logprobs, at);
  if (kind == 0) {
    if (lane == 0) st_u32(token_out + at, 0), st_f32(logprob_out + at, 0.0f), st_u32(rank_out + at, 0), st_u32(nan_out + at, 0);
    return;
  }

  /* The raw row: NaN, the best, and each lane's own best. */
  Best lane_best = {MINUS_INFINITY, NOBODY};
  bool nan = false;
#pragma unroll 8
  for (int id = lane; id < VOCAB; id += LANES) {
    const float v = ld_act_f32(l + id);
    nan = nan || v != v;
    lane_best.consider(v, id);
  }
  if (__syncthreads_or(nan)) {
    if (lane == 0) st_u32(token_out + at, scored ? target : 0), st_f32(logprob_out + at, 0.0f), st_u32(rank_out + at, 0), st_u32(nan_out + at, 1);
    return;
  }
  const Best raw_best = block_best(lane_best, bests);

  float ln_sum = 0.0f;
  if (wanted) {
    float sum = 0.0f;
#pragma unroll 4
    for (int id = lane; id < VOCAB; id += LANES) sum = sum + exp_fast(ld_act_f32(l + id) - raw_best.value);
    ln_sum = logf(block_tree(sum, sums));
    if (features & FEATURE_TOP_LOGPROBS) {
      const int count = min_of(min_of((int)draw.word(SLOT_TOP_LOGPROBS), TOP_LOGPROBS_MAX), VOCAB);
      for (int i = 0; i < count; i++) {
        const Best next = block_best(lane_best, bests);
        if (lane == 0) {
          st_u32(top_ids + at * TOP_LOGPROBS_MAX + i, next.id);
          st_f32(top_logprobs + at * TOP_LOGPROBS_MAX + i, (next.value - raw_best.value) - ln_sum);
        }
        if (next.id % LANES == (u32)lane) { /* its lane looks for what comes after it */
          lane_best = Best{MINUS_INFINITY, NOBODY};
#pragma unroll 8
          for (int id = lane; id < VOCAB; id += LANES) {
            const float v = ld_act_f32(l + id);
            if (v < next.value || (v == next.value && (u32)id > next.id)) lane_best.consider(v, id);
          }
        }
      }
    }
  }

  u32 token = scored ? target : raw_best.id;
  if (!scored) {
    const u32 bias_count = biased ? draw.word(SLOT_BIAS_COUNT) : 0;
    const u32 eos = early ? draw.word(SLOT_EOS_COUNT) : 0, banned = early ? eos + draw.word(SLOT_STOP_COUNT) : 0;
    draw.counts = penalties ? counts + (u64)slot * VOCAB : nullptr;
    draw.presence = draw.number(SLOT_PRESENCE), draw.frequency = draw.number(SLOT_FREQUENCY), draw.repetition = draw.number(SLOT_REPETITION);
    const u32* pair = bias + (u64)slot * (LOGIT_BIAS_MAX * BIAS_WORDS);
    auto banned_id = [&](u32 i) { return i < eos ? draw.word(SLOT_EOS_IDS + i) : draw.word(SLOT_STOP_IDS + i - eos); };

    /* Bias and bans go into the row and out of it again; an id may be biased and banned, so bans are saved and undone inside. */
    if (bias_count || banned) {
      for (u32 i = lane; i < bias_count; i += LANES) {
        const u32 id = ld_act_u32(pair + 2 * i);
        if (id < VOCAB) {
          saved[i] = ld_act_f32(l + id);
          st_f32(l + id, saved[i] + __uint_as_float(ld_act_u32(pair + 2 * i + 1)));
        }
      }
      sync_block();
      if (lane == 0)
        for (u32 i = 0; i < banned; i++) {
          const u32 id = banned_id(i);
          if (id < VOCAB) saved[LOGIT_BIAS_MAX + i] = ld_act_f32(l + id), st_f32(l + id, MINUS_INFINITY);
        }
      sync_block();
    }

    if (bias_count || banned || penalties || draw.random) {
      Best best = {MINUS_INFINITY, NOBODY};
      if (bias_count || banned || penalties) {
        for (int id = lane; id < VOCAB; id += LANES) best.consider(draw.value(ld_act_f32(l + id), id), id);
        best = block_best(best, bests);
        if (best.id == NOBODY) best.id = 0; /* every id is banned */
      } else {
        best = Best{draw.value(raw_best.value, raw_best.id), raw_best.id};
      }
      token = best.id;
      if (draw.random) {
        Kept kept;
        kept.least = MINUS_INFINITY, kept.max = best.value, kept.bounds = 0;
        if (truncated) {
          const float min_p = draw.number(SLOT_MIN_P), top_p = draw.number(SLOT_TOP_P);
          const u32 top_k = draw.word(SLOT_TOP_K);
          if (min_p > 0.0f) kept.least = best.value + logf(min_p);
          auto members = [&](const auto& emit) {
            for (int id = lane; id < VOCAB; id += LANES) {
              const float v = draw.value(ld_act_f32(l + id), id);
              if (kept.has(v, id)) emit(v, (u32)id);
            }
          };
          auto mass = [&](float v) { return (u64)(exp_fast(v - best.value) * FIXED_ONE); };
          /* Adds the bound behind which the weight of the best has reached `target`. */
          auto bound = [&](u64 target, const auto& weight) {
            const Selection s = select(target, histograms, [&](const auto& emit) { members([&](float v, u32) { emit(ordered(v), weight(v)); }); });
            const u32 bits = s.key >> 31 ? s.key & 0x7fffffffu : ~s.key;
            const u64 each = weight(__uint_as_float(bits)), ties = each ? (target - s.above + each - 1) / each : 1;
            const Selection last = select(ties, histograms, [&](const auto& emit) {
              members([&](float v, u32 id) {
                if (ordered(v) == s.key) emit(~id, 1);
              });
            });
            kept.key[kept.bounds] = s.key, kept.id[kept.bounds] = ~last.key;
            kept.bounds++;
          };
          if (top_k > 0 && top_k < VOCAB) bound(top_k, [](float) { return (u64)1; });
          if (top_p < 1.0f) {
            __shared__ u64 total;
            sync_block();
            if (lane == 0) total = 0;
            sync_block();
            u64 own = 0;
            members([&](float v, u32) { own += mass(v); });
            atomicAdd(&total, own);
            sync_block();
            const u64 limit = (u64)((double)top_p * (double)total);
            bound(limit ? limit : 1, mass);
          }
        }
        const u32 key0 = draw.word(SLOT_SEED_LO), key1 = draw.word(SLOT_SEED_HI), choice = draw.word(SLOT_CHOICE);
        const u32 position = ld_early_u32(row_position + row);
        Best drawn = {MINUS_INFINITY, best.id};
        for (int block = lane; block < ceil_div(VOCAB, 4); block += LANES) {
          u32 words[4] = {choice, position, (u32)block, 0};
          philox(words, key0, key1);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int id = block * 4 + i;
            if (id >= VOCAB) break;
            const float v = draw.value(ld_act_f32(l + id), id);
            if (kept.has(v, id)) drawn.consider(v + gumbel(words[i]), id);
          }
        }
        token = block_best(drawn, bests).id;
      }
    }

    if (bias_count || banned) {
      sync_block();
      if (lane == 0)
        for (u32 i = banned; i-- > 0;) {
          const u32 id = banned_id(i);
          if (id < VOCAB) st_f32(l + id, saved[LOGIT_BIAS_MAX + i]);
        }
      sync_block();
      for (u32 i = lane; i < bias_count; i += LANES) {
        const u32 id = ld_act_u32(pair + 2 * i);
        if (id < VOCAB) st_f32(l + id, saved[i]);
      }
      sync_block();
    }
  }

  u32 rank = 0;
  float logprob = 0.0f;
  if (wanted) {
    const float mine = ld_act_f32(l + token);
    u32 before = 0;
#pragma unroll 4
    for (int id = lane; id < VOCAB; id += LANES) {
      const float v = ld_act_f32(l + id);
      before += v > mine || (v == mine && (u32)id < token);
    }
    __shared__ u32 total_before;
    if (lane == 0) total_before = 0;
    sync_block();
    if (before) atomicAdd(&total_before, before);
    sync_block();
    rank = 1 + total_before, logprob = (mine - raw_best.value) - ln_sum;
  }
  if (lane == 0) st_u32(token_out + at, token), st_f32(logprob_out + at, logprob), st_u32(rank_out + at, rank), st_u32(nan_out + at, 0);
}
