/* feed: the last node of a step: advances the slot table, decides ends, writes the step's records and publishes them
 * Buffers   output_ring [ENTRIES, OUTPUT_WORDS] u32, pinned · slot_token, slot_position, slot_ended, slot_generated [SLOTS], slot_counts [SLOTS, VOCAB] u32,
 *           step_counter [4] u32, updated in place · slot_generation [SLOTS], slot_params [SLOTS, SLOT_WORDS], row_slot, row_position [R],
 *           logit_row, logit_kind [L], step [16] u32 · token, rank, nan [L] u32, logprob [L] f32, top_ids u32, top_logprobs f32 [L, TOP_LOGPROBS_MAX]
 * Launch    one block of 512: threads take logit rows, then record words. What the launches before sampling wrote is asked for before the wait
 * Numerics  moves words                              Pad rows  a pad logit row's record is zeros
 * Capture   no allocation, sync or readback; the host polls the step number, which is written last with system-scope release
 * Reference kernels/src/ops/feed.rs */

/* One record word's share of the checksum (kernels/src/entry.rs mix). */
DI u32 mix(u32 at, u32 word) {
  u32 h = word ^ at * 0x9e3779b9u;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

DI bool among(const u32* params, int count, int ids, u32 token) {
  const u32 n = ld_early_u32(params + count);
  for (u32 i = 0; i < n; i++)
    if (ld_early_u32(params + ids + i) == token) return true;
  return false;
}

/* Whether and why a slot ends with the token that made its `generated`-th; 0 when it goes on. The context holds position + 2 tokens. */
DI u32 end_reason(const u32* params, u32 token, u32 generated, u32 position) {
  if (!(ld_early_u32(params + SLOT_FLAGS) & SLOT_FLAG_IGNORE_EOS) && among(params, SLOT_EOS_COUNT, SLOT_EOS_IDS, token)) return RECORD_REASON_EOS;
  if (among(params, SLOT_STOP_COUNT, SLOT_STOP_IDS, token)) return RECORD_REASON_STOP_ID;
  if (generated >= ld_early_u32(params + SLOT_MAX_TOKENS)) return RECORD_REASON_MAX_TOKENS;
  if (position + 2 >= ld_early_u32(params + SLOT_CONTEXT)) return RECORD_REASON_CONTEXT;
  return 0;
}

constexpr u32 THREADS = 512;
/* The words of a record before its alternatives. */
constexpr u32 HEAD_WORDS = 8;
static_assert(RECORD_SLOT < HEAD_WORDS && RECORD_GENERATION < HEAD_WORDS && RECORD_TOKEN < HEAD_WORDS && RECORD_FLAGS < HEAD_WORDS &&
                  RECORD_LOGPROB < HEAD_WORDS && RECORD_POSITION < HEAD_WORDS && RECORD_TOP_COUNT < HEAD_WORDS && RECORD_TOKEN_RANK < HEAD_WORDS &&
                  RECORD_TOP_IDS == HEAD_WORDS,
              "a record is its head and alternatives");
static_assert(OUTPUT_HEADER_WORDS <= 32, "one warp writes the header");

KERNEL void __launch_bounds__(THREADS)
    feed(u32* output_ring, u32* slot_token, u32* slot_position, u32* slot_ended, u32* slot_generated, u32* slot_counts, u32* step_counter,
         const u32* slot_generation, const u32* slot_params, const u32* row_slot, const u32* row_position, const u32* logit_row, const u32* logit_kind,
         const u32* step, const u32* token, const u32* rank, const u32* nan, const float* logprob, const u32* top_ids, const float* top_logprobs,
         u32 logit_rows) {
  __shared__ u32 heads[THREADS][HEAD_WORDS]; /* of one round of records */
  __shared__ u32 checksum;
  const u32 thread = threadIdx.x;
  const u64 done = ld_early_u32(step_counter) | (u64)ld_early_u32(step_counter + 1) << 32;
  u32* output = output_ring + done % ENTRIES * OUTPUT_WORDS;
  const u32 records = ld_early_u32(step + STEP_LOGIT_ROWS), features = ld_early_u32(step + STEP_FEATURES);
  const u32 header = thread < STEP_WORDS ? ld_early_u32(step + thread) : 0; /* of the step, a word a lane of the first warp */
  if (thread == 0) checksum = 0;
  u32 mixed = 0;
  bool waited = false;
  auto wait = [&] {
    if (waited) return;
    waited = true;
    wait_for_predecessor(logit_rows);
    let_successor_start();
  };

#pragma unroll 1
  for (u32 first = 0; first < records; first += THREADS) {
    const u32 at = first + thread;
    u32* head = heads[thread];
    if (first) sync_block(); /* the round before is written */
    if (at < records) {
      const u32 kind = ld_early_u32(logit_kind + at), row = ld_early_u32(logit_row + at);
      const u32 slot = ld_early_u32(row_slot + row), position = ld_early_u32(row_position + row);
      const u32* params = slot_params + slot * SLOT_WORDS;
      const u32 generation = ld_early_u32(slot_generation + slot), generated = ld_early_u32(slot_generated + slot) + 1;
      const u32 wanted = ld_early_u32(params + SLOT_TOP_LOGPROBS), flags = ld_early_u32(params + SLOT_FLAGS);
      wait();
      const u32 sampled = ld_act_u32(token + at), failed = ld_act_u32(nan + at);
      const u32 ranked = ld_act_u32(rank + at), logged = __float_as_uint(ld_act_f32(logprob + at));
      u32 flag = 0, top = 0;
      if (kind) {
        const bool scored = kind == LOGIT_ROW_SCORE;
        u32 reason = failed ? RECORD_REASON_NAN : 0;
        if (!scored) {
          st_u32(slot_generated + slot, generated);
          st_u32(slot_token + slot, sampled);
          st_u32(slot_position + slot, position + 1);
          if (!failed && (flags & SLOT_FLAG_PENALTIES)) {
            u32* count = slot_counts + (u64)slot * VOCAB + sampled;
            st_u32(count, ld_act_u32(count) + 1);
          }
          if (!failed) reason = end_reason(params, sampled, generated, position);
        }
        if (reason) st_u32(slot_ended + slot, 1);
        flag = RECORD_LIVE | (scored ? RECORD_SCORED : 0) | (reason ? RECORD_ENDED | reason << RECORD_REASON_SHIFT : 0);
        constexpr u32 CAP = VOCAB < TOP_LOGPROBS_MAX ? VOCAB : TOP_LOGPROBS_MAX;
        top = !failed && (features & FEATURE_TOP_LOGPROBS) ? (wanted < CAP ? wanted : CAP) : 0;
      }
      head[RECORD_SLOT] = flag ? slot : 0;
      head[RECORD_GENERATION] = flag ? generation : 0;
      head[RECORD_TOKEN] = flag ? sampled : 0;
      head[RECORD_FLAGS] = flag;
      head[RECORD_LOGPROB] = flag ? logged : 0;
      head[RECORD_POSITION] = flag ? position : 0;
      head[RECORD_TOP_COUNT] = top;
      head[RECORD_TOKEN_RANK] = flag ? ranked : 0;
    }
    wait();
    sync_block();
    const u32 words = (records - first < THREADS ? records - first : THREADS) * RECORD_WORDS;
    for (u32 i = thread; i < words; i += THREADS) {
      const u32 record = i / RECORD_WORDS, field = i % RECORD_WORDS, top = heads[record][RECORD_TOP_COUNT], out = first * RECORD_WORDS + i;
      u32 word = 0;
      if (field < HEAD_WORDS) word = heads[record][field];
      if (field >= RECORD_TOP_IDS && field < RECORD_TOP_IDS + top) word = ld_act_u32(top_ids + (first + record) * TOP_LOGPROBS_MAX + field - RECORD_TOP_IDS);
      if (field >= RECORD_TOP_LOGPROBS && field < RECORD_TOP_LOGPROBS + top)
        word = __float_as_uint(ld_act_f32(top_logprobs + (first + record) * TOP_LOGPROBS_MAX + field - RECORD_TOP_LOGPROBS));
      st_u32(output + OUTPUT_HEADER_WORDS + out, word);
      mixed ^= mix(out, word);
    }
  }
  wait();
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) mixed ^= xor_u32(mixed, mask);
  if (thread % 32 == 0) xor_shared(&checksum, mixed);
  sync_block();

  /* What the block wrote is ordered by its barrier and the release of the thread that publishes it. */
  if (thread >= 32) return;
  const u64 now = global_time_ns();
  const u32 end_low = from_lane_u32((u32)now, 0), end_high = from_lane_u32((u32)(now >> 32), 0);
  auto of_step = [&](int word) { return from_lane_u32(header, word); };
  const u32 start_low = of_step(STEP_START_NS), start_high = of_step(STEP_START_NS + 1), pad_rows = of_step(STEP_PAD_ROWS);
  const u32 local = of_step(STEP_ROUTES_LOCAL), remote = of_step(STEP_ROUTES_REMOTE), step_low = of_step(STEP_STEP_LO), step_high = of_step(STEP_STEP_HI);
  if (thread < OUTPUT_HEADER_WORDS && thread != OUTPUT_STEP_LO && thread != OUTPUT_STEP_HI) {
    u32 word = 0;
    if (thread == OUTPUT_RECORDS) word = records;
    if (thread == OUTPUT_START_NS) word = start_low;
    if (thread == OUTPUT_START_NS + 1) word = start_high;
    if (thread == OUTPUT_END_NS) word = end_low;
    if (thread == OUTPUT_END_NS + 1) word = end_high;
    if (thread == OUTPUT_ROUTES_LOCAL) word = local;
    if (thread == OUTPUT_ROUTES_REMOTE) word = remote;
    if (thread == OUTPUT_PAD_ROWS) word = pad_rows;
    if (thread == OUTPUT_CHECKSUM) word = checksum;
    st_u32(output + thread, word);
  }
  sync_warp();
  if (thread == 0) {
    const u64 next = done + 1;
    st_u32(step_counter, (u32)next);
    st_u32(step_counter + 1, (u32)(next >> 32));
    st_release_system64((u64*)(output + OUTPUT_STEP_LO), (u64)step_low | (u64)step_high << 32);
  }
}
