/* team: TEAM blocks that take one key group of a row together, a tile each (attend.cuh). Scores of the own tile are left for the others; then each
 * block sums all tiles' values for one TEAMth of the columns. */

/* Takes tile `rank` of group `group` and value columns rank · SLICE …. `inboxes` [TEAM][TEAM][HEADS][64] of the team, a block's scores from all: a word
 * is stored xored (fold.cuh), zero until its score comes and again when its only reader has it. */
template <class PartAt, class LoadQuery, int HEADS, int HEADS_ALL, int KEY_WIDTH, int VALUE_WIDTH, int VALUE_AT, int PARTS, int PART_WIDTH, int CACHE_WIDTH,
          int PAGES_PER_SLOT, int GROUPS, int WARPS, int STEP_TILES, int SLOT_KEYS, int SLOTS, int TEAM, int SUCCESSOR>
DI auto run_team(Attend<HEADS, HEADS_ALL, KEY_WIDTH, VALUE_WIDTH, VALUE_AT, PARTS, PART_WIDTH, CACHE_WIDTH, PAGES_PER_SLOT, GROUPS, WARPS, STEP_TILES, SLOT_KEYS,
                        SLOTS, TEAM, SUCCESSOR>& block,
                 const PartAt& part_at, const LoadQuery& load_query, bf16* out, const Partials& partials, u32* inboxes, int group, int rank, int groups,
                 u32 rows) {
  typedef Attend<HEADS, HEADS_ALL, KEY_WIDTH, VALUE_WIDTH, VALUE_AT, PARTS, PART_WIDTH, CACHE_WIDTH, PAGES_PER_SLOT, GROUPS, WARPS, STEP_TILES, SLOT_KEYS, SLOTS,
                 TEAM, SUCCESSOR>
      Block;
  constexpr int INBOX = TEAM * HEADS * 64;
  const int first = group * Block::GROUP_TILES, tiles = min_of(Block::GROUP_TILES, ceil_div(block.length, 64) - first);
  const int end = min_of((first + tiles) * 64, block.length);
  bf16* slices = block.kv + 64 * Block::KV_STRIDE;
  /* The tile's rows: all of them in the own tile, this block's columns elsewhere. */
  auto rows_of = [&](int tile) { return tile == rank ? block.kv : slices + (tile < rank ? tile : tile - 1) * 64 * Block::SLICE_STRIDE; };
  auto copy = [&](bool early) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
      const bf16* page = block.page_of(first + tile);
      const int keys = block.length - (first + tile) * 64, old = early ? block.fresh - (first + tile) * 64 : keys;
      if (tile == rank) {
        block.template copy_keys<64, PARTS, PART_WIDTH>(block.kv, Block::KV_STRIDE, page, keys, old, part_at);
      } else {
        block.template copy_keys<64, 1, Block::SLICE>(rows_of(tile), Block::SLICE_STRIDE, page, keys, old, [&](int) { return VALUE_AT + rank * Block::SLICE; });
      }
    }
    copy_commit();
  };
  block.look_up(first, tiles, rows);
  if (end - block.fresh > Block::LATE_KEYS) block.fresh = first * 64;
  const bool early = block.fresh > first * 64;
  if (early) copy(true);
  wait_and_let_start<SUCCESSOR>(rows);
  if (!early) copy(false), block.fresh = end;
  block.load_q(load_query, end, [&](int key, const auto& store) {
    const int tile = key / 64 - first;
    const bf16* from = block.page_of(key / 64) + (u64)(key % 64) * CACHE_WIDTH;
    if (tile == rank) {
      for (int i = threadIdx.x; i < Block::SHARED_WIDTH / 8; i += Block::THREADS)
        store(block.kv + key % 64 * Block::KV_STRIDE + i * 8, ld_act16(from + i * 8));
    } else if (threadIdx.x < Block::SLICE / 8) {
      store(rows_of(tile) + key % 64 * Block::SLICE_STRIDE + threadIdx.x * 8, ld_act16(from + VALUE_AT + rank * Block::SLICE + threadIdx.x * 8));
    }
  });
  block.start_group();
  copy_wait<0>();
  sync_block();
  if (rank < tiles)
    block.scores(first + rank, 0, [&](int head, int key, V2 pair) {
#pragma unroll
      for (int to = 0; to < TEAM; to++)
        st_relaxed8(inboxes + to * INBOX + (rank * HEADS + head) * 64 + key, V2{pair.x ^ NOT_COME, pair.y ^ NOT_COME});
    });
  V4 v[TEAM][Block::SLICE_COLUMNS][2], a[TEAM][4];
#pragma unroll
  for (int tile = 0; tile < TEAM; tile++) {
    const int stride = tile == rank ? Block::KV_STRIDE : Block::SLICE_STRIDE;
    const bf16* at = rows_of(tile) + (tile == rank ? VALUE_AT + rank * Block::SLICE : 0) + block.lane * stride;
#pragma unroll
    for (int i = 0; i < Block::SLICE_COLUMNS; i++) {
      const int column = block.template column_of_warp<Block::SLICE_TILES>(i);
      v[tile][i][0] = ldmatrix4_transposed(at + column * 8), v[tile][i][1] = ldmatrix4_transposed(at + 32 * stride + column * 8);
    }
  }
  block.template softmax<TEAM>([&](float (&x)[Block::WARP_HEADS][TEAM][2]) {
    u32 word[Block::WARP_HEADS][TEAM][2];
    u32* mine = inboxes + rank * INBOX + block.lane;
    auto each = [&](const auto& act) {
#pragma unroll
      for (int i = 0; i < Block::WARP_HEADS; i++)
#pragma unroll
        for (int j = 0; j < 2 * TEAM; j++)
          act(word[i][j / 2][j % 2], mine + (j / 2 * HEADS + i * WARPS + block.warp) * 64 + j % 2 * 32,
              j / 2 < tiles && (HEADS % WARPS == 0 || i * WARPS + block.warp < HEADS), x[i][j / 2][j % 2]);
    };
    bool missing;
    do { /* all words of the warp at once, until all have come */
      missing = false;
      each([&](u32& w, const u32* at, bool sent, float&) { w = sent ? ld_relaxed_u32(at) : MINUS_INFINITY_BITS ^ NOT_COME; });
      each([&](u32& w, const u32*, bool, float&) { missing = missing || w == 0; });
    } while (ballot(missing));
    each([&](u32& w, u32* at, bool sent, float& score) {
      if (sent) st_u32(at, 0);
      score = __uint_as_float(w ^ NOT_COME);
    });
  });
  block.share_norm(block.l);
  if (rank == 0 && groups > 1) block.leave_ml(partials, typename Block::Shares(groups * TEAM), group, block.m, block.l);
  float c[Block::SLICE_COLUMNS][4];
#pragma unroll
  for (int i = 0; i < Block::SLICE_COLUMNS; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) c[i][j] = 0.0f;
  sync_block();
#pragma unroll
  for (int tile = 0; tile < TEAM; tile++)
    if (tile < tiles) block.load_p(a[tile], tile);
#pragma unroll
  for (int tile = 0; tile < TEAM; tile++)
    if (tile < tiles)
      block.template value_chains<Block::SLICE_COLUMNS>(c, a[tile], block.corr[tile * 16 + block.g], block.corr[tile * 16 + block.g + 8], v[tile]);
  if (groups == 1) {
    block.template finish<Block::SLICE_COLUMNS, Block::SLICE_TILES>(out, c, rank * Block::SLICE);
    return typename Block::Rest{};
  }
  block.template leave<Block::SLICE_COLUMNS, Block::SLICE_TILES>(partials, group, c, rank * Block::SLICE);
  return typename Block::Rest{0, groups, group * TEAM + rank, groups * TEAM};
}
