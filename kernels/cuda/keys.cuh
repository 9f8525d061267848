/* keys: where the keys of one row lie, and how they come to shared memory (attend.cuh).
 * Keys of earlier steps come before the wait, those that this step's rows write (from `fresh` on) after it. The pages that the rows write are
 * looked up, so this holds for steps that mix prefill and decode, and for shared pages. */
static_assert(PAGE_TOKENS == 64, "a page is a tile of keys");

template <int CACHE_WIDTH, int PAGES_PER_SLOT, int WARPS> struct Keys {
  static constexpr int THREADS = WARPS * 32;
  /* Nothing comes before the wait in a step of more rows (prefill). */
  static constexpr int EARLY_ROWS = 128;

  int warp, lane;
  const bf16* pool;
  const u32 *table, *pages; /* block tables of all slots, of the row's slot */
  const u32 *row_slot, *row_position;
  int row, length, fresh;
  u32 page_ids; /* lane's page of 32 tiles from page_base on */
  int page_base;

  DI Keys(const bf16* pool_, const u32* table_, const u32* slot, const u32* position, int row_)
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), pool(pool_), table(table_), row_slot(slot), row_position(position), row(row_) {
    const u32 mine = ld_early_u32(slot + row);
    length = (int)ld_early_u32(position + row) + 1;
    pages = table + (u64)mine * PAGES_PER_SLOT;
  }

  /* All lanes of a warp that copies. */
  DI void read_pages(int tile) {
    page_base = tile;
    page_ids = tile + lane < ceil_div(length, 64) ? ld_early_u32(pages + tile + lane) : 0;
  }
  DI const bf16* page_of(int tile) {
    if (tile - page_base >= 32) read_pages(tile);
    return pool + (u64)from_lane_u32(page_ids, tile - page_base) * 64 * CACHE_WIDTH;
  }
  /* The pages from tile `first` on, and `fresh`, the first key of `count` tiles that a row of this step writes. Nothing is early in a step of many rows. */
  DI void look_up(int first, int count, u32 rows) {
    constexpr int EACH = EARLY_ROWS / 32; /* rows a lane, all asked for at once */
    u32 slot[EACH], at[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const u32 other = min_of(i * 32 + lane, (int)rows - 1);
      slot[i] = 0, at[i] = 0;
      if (i * 32 < (int)rows) slot[i] = ld_early_u32(row_slot + other), at[i] = ld_early_u32(row_position + other);
    }
    read_pages(first);
    fresh = rows > EARLY_ROWS ? 0 : length;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 < (int)rows) slot[i] = ld_early_u32(table + (u64)slot[i] * PAGES_PER_SLOT + at[i] / 64);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 < (int)rows)
#pragma unroll 1
        for (int tile = 0; tile < count; tile++)
          if (slot[i] == from_lane_u32(page_ids, tile)) fresh = min_of(fresh, (first + tile) * 64 + (int)(at[i] % 64));
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) fresh = min_of(fresh, (int)xor_u32(fresh, mask));
  }

  /* Eight lanes a key ask for keys 0 … KEYS − 1 at `from`, `parts` of WIDTH elements, into rows `stride` apart: those below `old` or past `keys`, the
   * latter as zeros. Addresses differ by constants. */
  template <int KEYS, int PIECES, int WIDTH, class PartAt>
  DI void copy_keys(bf16* to, int stride, const bf16* from, int keys, int old, const PartAt& part_at) {
    constexpr int CHUNKS = WIDTH / 8, AT_ONCE = THREADS / 8;
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int base = 0; base < KEYS; base += AT_ONCE) {
      const int key = base + (int)threadIdx.x / 8;
      if ((KEYS % AT_ONCE == 0 || key < KEYS) && (key < old || key >= keys)) {
        const u32 bytes = key < keys ? 16 : 0;
        bf16* to_key = to + key * stride + chunk * 8;
        const bf16* from_key = from + (u64)key * CACHE_WIDTH + chunk * 8;
#pragma unroll
        for (int part = 0; part < PIECES; part++) {
          const bf16* from_part = from_key + part_at(part);
#pragma unroll
          for (int i = 0; i < CHUNKS; i += 8)
            if (CHUNKS % 8 == 0 || i + chunk < CHUNKS) copy_async16(to_key + part * WIDTH + i * 8, from_part + i * 8, bytes);
        }
      }
    }
  }
};
