/* fetch: the first node of a step: the ring entry of this step to the slot tables and the row buffers
 * Buffers   row_slot, row_token, row_position, row_live [R], logit_row, logit_kind, logit_target [L], step [16] u32
 *           slot_token, slot_position, slot_generation, slot_ended, slot_generated [SLOTS], slot_pages [SLOTS, PAGES_PER_SLOT],
 *           slot_params [SLOTS, SLOT_WORDS], slot_bias [SLOTS, LOGIT_BIAS_MAX, 2], slot_counts [SLOTS, VOCAB] u32
 *           input_ring [ENTRIES, ENTRY_WORDS] u32, pinned · step_counter [4] u32
 * Launch    one block of 512: the sections depend on each other, barriers between them. The entry's first STAGED words, all of a decode step's, come
 *           at once; each further trip to the host's memory takes more than a microsecond
 * Numerics  moves words; counts of tokens by integer atomics (order does not matter)
 * Pad rows  made here: pad slot SLOTS − 1, token 0, position 0, live 0; a pad logit row is kind 0, row 0
 * Capture   no allocation, sync or readback; the entry's place comes from step_counter
 * Reference kernels/src/ops/fetch.rs */
constexpr u32 PAD_SLOT = SLOTS - 1, THREADS = 512;
constexpr u32 STAGED = ENTRY_WORDS < 4 * THREADS ? ENTRY_WORDS / 4 * 4 : 4 * THREADS;
static_assert(ENTRY_WORDS % 4 == 0 && STAGED >= HEADER_WORDS, "entries are read 16 bytes at a time");

KERNEL void __launch_bounds__(THREADS)
    fetch(u32* row_slot, u32* row_token, u32* row_position, u32* row_live, u32* logit_row, u32* logit_kind, u32* logit_target, u32* step, u32* slot_token,
          u32* slot_position, u32* slot_generation, u32* slot_ended, u32* slot_generated, u32* slot_pages, u32* slot_params, u32* slot_bias, u32* slot_counts,
          const u32* input_ring, const u32* step_counter, u32 rows, u32 logit_rows) {
  __shared__ __align__(16) u32 staged[STAGED];
  __shared__ u32 pad_rows;
  const u32 thread = threadIdx.x, threads = THREADS;
  const u32* const header = staged;
  wait_for_predecessor(rows);
  let_successor_start();
  const u64 start_ns = global_time_ns();
  const u64 done = ld_act_u32(step_counter) | (u64)ld_act_u32(step_counter + 1) << 32;
  const u32* entry = input_ring + done % ENTRIES * ENTRY_WORDS;
  if (thread < STAGED / 4) *(V4*)(staged + 4 * thread) = ld_system16(entry + 4 * thread);
  if (thread == 0) pad_rows = 0;
  sync_block();
  auto word = [&](u32 at) { return at < STAGED ? staged[at] : ld_system_u32(entry + at); };

  const u32 retired = header[HEADER_RETIRED_AT];
  for (u32 i = thread; i < header[HEADER_RETIRED]; i += threads) {
    const u32 slot = word(retired + i * RETIRED_WORDS), generation = word(retired + i * RETIRED_WORDS + 1);
    if (ld_act_u32(slot_generation + slot) == generation) st_u32(slot_ended + slot, 1);
  }
  if (header[HEADER_NEW_SLOTS]) {
    sync_block(); /* a slot that is retired may be seated again */
    const u32 seats = header[HEADER_NEW_SLOTS_AT], bias = header[HEADER_BIAS_AT];
    for (u32 seat = 0; seat < header[HEADER_NEW_SLOTS]; seat++) {
      const u32 params = seats + seat * SLOT_WORDS;
      const u32 slot = word(params + SLOT_SLOT);
      if (thread < SLOT_WORDS) st_u32(slot_params + slot * SLOT_WORDS + thread, word(params + thread));
      if (thread == 0) {
        st_u32(slot_generation + slot, word(params + SLOT_GENERATION));
        st_u32(slot_ended + slot, 0);
        st_u32(slot_generated + slot, word(params + SLOT_GENERATED));
      }
      for (u32 i = thread; i < PAGES_PER_SLOT; i += threads) st_u32(slot_pages + (u64)slot * PAGES_PER_SLOT + i, 0);
      if (word(params + SLOT_FLAGS) & SLOT_FLAG_PENALTIES)
        for (u32 i = thread; i < VOCAB; i += threads) st_u32(slot_counts + (u64)slot * VOCAB + i, 0);
      const u32 pairs = bias + word(params + SLOT_BIAS_START) * BIAS_WORDS;
      const u32 words = word(params + SLOT_BIAS_COUNT) * BIAS_WORDS;
      for (u32 i = thread; i < words; i += threads) st_u32(slot_bias + (u64)slot * LOGIT_BIAS_MAX * BIAS_WORDS + i, word(pairs + i));
    }
  }
  if (header[HEADER_NEW_SLOTS] + header[HEADER_RETIRED]) sync_block();

  const u32 pages = header[HEADER_PAGES_AT];
  for (u32 i = thread; i < header[HEADER_PAGES]; i += threads) {
    const u32 slot = word(pages + i * PAGE_WORDS), index = word(pages + i * PAGE_WORDS + 1);
    st_u32(slot_pages + (u64)slot * PAGES_PER_SLOT + index, word(pages + i * PAGE_WORDS + 2));
  }

  const u32 lines = header[HEADER_ROWS_AT];
  for (u32 row = thread; row < rows; row += threads) {
    u32 slot = PAD_SLOT, token = 0, position = 0, live = 0;
    if (row < header[HEADER_ROWS]) {
      const u32 line = lines + row * ROW_WORDS;
      const u32 named = word(line + ROW_SLOT);
      if (named < PAD_SLOT) {
        /* All of the slot at once: the tables are a trip to the L2 away. */
        const u32 generation = ld_act_u32(slot_generation + named), ended = ld_act_u32(slot_ended + named);
        const u32 next = ld_act_u32(slot_token + named), at = ld_act_u32(slot_position + named);
        const u32 wants = ld_act_u32(slot_params + named * SLOT_WORDS + SLOT_FLAGS), flags = word(line + ROW_FLAGS);
        if (generation == word(line + ROW_GENERATION) && ended == 0) {
          slot = named;
          live = 1;
          if (flags & ROW_FROM_SLOT) {
            token = next;
            position = at;
          } else {
            token = word(line + ROW_TOKEN);
            position = word(line + ROW_POSITION);
            if (wants & SLOT_FLAG_PENALTIES) {
              u32* count = slot_counts + (u64)slot * VOCAB + token;
              if (flags & ROW_GENERATED) add_counter(count, 1);
              else or_bits(count, 1u << 31);
            }
          }
        }
      }
    }
    if (!live) add_shared(&pad_rows, 1);
    st_u32(row_slot + row, slot);
    st_u32(row_token + row, token);
    st_u32(row_position + row, position);
    st_u32(row_live + row, live);
  }
  sync_block();

  const u32 wanted = header[HEADER_LOGIT_ROWS_AT];
  for (u32 at = thread; at < logit_rows; at += threads) {
    u32 row = 0, kind = 0, target = 0;
    if (at < header[HEADER_LOGIT_ROWS]) {
      const u32 line = wanted + at * LOGIT_ROW_WORDS;
      row = word(line + LOGIT_ROW_ROW);
      kind = word(line + LOGIT_ROW_KIND);
      target = word(line + LOGIT_ROW_TARGET);
    }
    if (ld_act_u32(row_live + row) == 0) row = kind = target = 0;
    st_u32(logit_row + at, row);
    st_u32(logit_kind + at, kind);
    st_u32(logit_target + at, target);
  }
  if (thread < STEP_WORDS) {
    u32 value = 0;
    if (thread == STEP_FEATURES) value = header[HEADER_FEATURES];
    if (thread == STEP_ROWS) value = header[HEADER_ROWS];
    if (thread == STEP_LOGIT_ROWS) value = header[HEADER_LOGIT_ROWS];
    if (thread == STEP_STEP_LO) value = header[HEADER_STEP_LO];
    if (thread == STEP_STEP_HI) value = header[HEADER_STEP_HI];
    if (thread == STEP_PAD_ROWS) value = pad_rows;
    if (thread == STEP_START_NS) value = (u32)start_ns;
    if (thread == STEP_START_NS + 1) value = (u32)(start_ns >> 32);
    st_u32(step + thread, value);
  }
}
