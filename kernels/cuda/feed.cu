/* feed: the last node of a step: advances the slot table, decides ends, writes the step's records and publishes them
 * Buffers   output_ring [ENTRIES, OUTPUT_WORDS] u32, pinned · slot_token, slot_position, slot_ended, slot_generated [SLOTS], slot_counts [SLOTS, VOCAB] u32,
 *           step_counter [4] u32, updated in place · slot_generation [SLOTS], slot_params [SLOTS, SLOT_WORDS], row_slot, row_position [R],
 *           logit_row, logit_kind [L], step [16] u32 · token, rank, nan [L] u32, logprob [L] f32, top_ids u32, top_logprobs f32 [L, TOP_LOGPROBS_MAX]
 * Launch    one block of 256: threads take logit rows, then record words
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
  const u32 n = ld_act_u32(params + count);
  for (u32 i = 0; i < n; i++)
    if (ld_act_u32(params + ids + i) == token) return true;
  return false;
}

/* Whether and why a slot ends with the token that made its `generated`-th; 0 when it goes on. The context holds position + 2 tokens. */
DI u32 end_reason(const u32* params, u32 token, u32 generated, u32 position) {
  if (!(ld_act_u32(params + SLOT_FLAGS) & SLOT_FLAG_IGNORE_EOS) && among(params, SLOT_EOS_COUNT, SLOT_EOS_IDS, token)) return RECORD_REASON_EOS;
  if (among(params, SLOT_STOP_COUNT, SLOT_STOP_IDS, token)) return RECORD_REASON_STOP_ID;
  if (generated >= ld_act_u32(params + SLOT_MAX_TOKENS)) return RECORD_REASON_MAX_TOKENS;
  if (position + 2 >= ld_act_u32(params + SLOT_CONTEXT)) return RECORD_REASON_CONTEXT;
  return 0;
}

KERNEL void __launch_bounds__(256)
    feed(u32* output_ring, u32* slot_token, u32* slot_position, u32* slot_ended, u32* slot_generated, u32* slot_counts, u32* step_counter,
         const u32* slot_generation, const u32* slot_params, const u32* row_slot, const u32* row_position, const u32* logit_row, const u32* logit_kind,
         const u32* step, const u32* token, const u32* rank, const u32* nan, const float* logprob, const u32* top_ids, const float* top_logprobs,
         u32 logit_rows) {
  __shared__ u32 flags[(OUTPUT_WORDS - OUTPUT_HEADER_WORDS) / RECORD_WORDS]; /* of each record */
  __shared__ u32 checksum;
  __shared__ u64 end_ns;
  const u32 thread = threadIdx.x, threads = blockDim.x;
  wait_for_predecessor(logit_rows);
  let_successor_start();
  const u64 done = ld_act_u32(step_counter) | (u64)ld_act_u32(step_counter + 1) << 32;
  u32* output = output_ring + done % ENTRIES * OUTPUT_WORDS;
  const u32 records = ld_act_u32(step + STEP_LOGIT_ROWS), features = ld_act_u32(step + STEP_FEATURES);
  if (thread == 0) checksum = 0;

  for (u32 at = thread; at < records; at += threads) {
    const u32 kind = ld_act_u32(logit_kind + at);
    u32 flag = 0;
    if (kind) {
      const u32 row = ld_act_u32(logit_row + at), slot = ld_act_u32(row_slot + row), position = ld_act_u32(row_position + row);
      const u32 sampled = ld_act_u32(token + at);
      const bool failed = ld_act_u32(nan + at) != 0, scored = kind == LOGIT_ROW_SCORE;
      u32 reason = failed ? RECORD_REASON_NAN : 0;
      if (!scored) {
        const u32* params = slot_params + slot * SLOT_WORDS;
        const u32 generated = ld_act_u32(slot_generated + slot) + 1;
        st_u32(slot_generated + slot, generated);
        st_u32(slot_token + slot, sampled);
        st_u32(slot_position + slot, position + 1);
        if (!failed && (ld_act_u32(params + SLOT_FLAGS) & SLOT_FLAG_PENALTIES)) {
          u32* count = slot_counts + (u64)slot * VOCAB + sampled;
          st_u32(count, ld_act_u32(count) + 1);
        }
        if (!failed) reason = end_reason(params, sampled, generated, position);
      }
      if (reason) st_u32(slot_ended + slot, 1);
      flag = RECORD_LIVE | (scored ? RECORD_SCORED : 0) | (reason ? RECORD_ENDED | reason << RECORD_REASON_SHIFT : 0);
    }
    flags[at] = flag;
  }
  sync_block();

  u32 mixed = 0;
  for (u32 i = thread; i < records * RECORD_WORDS; i += threads) {
    const u32 at = i / RECORD_WORDS, field = i % RECORD_WORDS, flag = flags[at];
    u32 word = 0;
    if (flag) {
      const u32 row = ld_act_u32(logit_row + at), slot = ld_act_u32(row_slot + row);
      const bool failed = ld_act_u32(nan + at) != 0;
      const u32 wanted = ld_act_u32(slot_params + slot * SLOT_WORDS + SLOT_TOP_LOGPROBS);
      const u32 cap = VOCAB < TOP_LOGPROBS_MAX ? VOCAB : TOP_LOGPROBS_MAX;
      const u32 top = !failed && (features & FEATURE_TOP_LOGPROBS) ? (wanted < cap ? wanted : cap) : 0;
      if (field == RECORD_SLOT) word = slot;
      if (field == RECORD_GENERATION) word = ld_act_u32(slot_generation + slot);
      if (field == RECORD_TOKEN) word = ld_act_u32(token + at);
      if (field == RECORD_FLAGS) word = flag;
      if (field == RECORD_LOGPROB) word = __float_as_uint(ld_act_f32(logprob + at));
      if (field == RECORD_POSITION) word = ld_act_u32(row_position + row);
      if (field == RECORD_TOP_COUNT) word = top;
      if (field == RECORD_TOKEN_RANK) word = ld_act_u32(rank + at);
      if (field >= RECORD_TOP_IDS && field < RECORD_TOP_IDS + top) word = ld_act_u32(top_ids + at * TOP_LOGPROBS_MAX + field - RECORD_TOP_IDS);
      if (field >= RECORD_TOP_LOGPROBS && field < RECORD_TOP_LOGPROBS + top)
        word = __float_as_uint(ld_act_f32(top_logprobs + at * TOP_LOGPROBS_MAX + field - RECORD_TOP_LOGPROBS));
    }
    st_u32(output + OUTPUT_HEADER_WORDS + i, word);
    mixed ^= mix(i, word);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) mixed ^= xor_u32(mixed, mask);
  if (thread % 32 == 0) xor_shared(&checksum, mixed);
  sync_block();

  if (thread == 0) end_ns = global_time_ns();
  sync_block();
  if (thread < OUTPUT_HEADER_WORDS && thread != OUTPUT_STEP_LO && thread != OUTPUT_STEP_HI) {
    u32 word = 0;
    if (thread == OUTPUT_RECORDS) word = records;
    if (thread == OUTPUT_START_NS) word = ld_act_u32(step + STEP_START_NS);
    if (thread == OUTPUT_START_NS + 1) word = ld_act_u32(step + STEP_START_NS + 1);
    if (thread == OUTPUT_END_NS) word = (u32)end_ns;
    if (thread == OUTPUT_END_NS + 1) word = (u32)(end_ns >> 32);
    if (thread == OUTPUT_ROUTES_LOCAL) word = ld_act_u32(step + STEP_ROUTES_LOCAL);
    if (thread == OUTPUT_ROUTES_REMOTE) word = ld_act_u32(step + STEP_ROUTES_REMOTE);
    if (thread == OUTPUT_PAD_ROWS) word = ld_act_u32(step + STEP_PAD_ROWS);
    if (thread == OUTPUT_CHECKSUM) word = checksum;
    st_u32(output + thread, word);
  }
  fence_system();
  sync_block();
  if (thread == 0) {
    const u64 next = done + 1;
    st_u32(step_counter, (u32)next);
    st_u32(step_counter + 1, (u32)(next >> 32));
    const u64 number = ld_act_u32(step + STEP_STEP_LO) | (u64)ld_act_u32(step + STEP_STEP_HI) << 32;
    st_release_system64((u64*)(output + OUTPUT_STEP_LO), number);
  }
}
