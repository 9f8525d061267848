/* forms: does wgmma give every sum of a packed weight the bits that mma.sync gives it? Asked by `exactness` of a loaded model, never by a step.
 * Buffers   found [4] u32, zero before: sums compared · sums whose two forms differ · sums that are zero or not finite · sums that a cut
 *           chain changes. weights: one packed GEMM, [groups][row tiles][k tiles][lane][8] bf16. x [tokens, 16·k_tiles] bf16 row-major,
 *           rows 16-byte aligned
 * Scalars   n, k_tiles, slices of the weight; gate_up: rows 0–7 of a tile are gate, 8–15 up; tokens: live columns, at most COLUMNS
 * Launch    grid (ceil(row tiles / 4), groups), block 128: a warp has 16 rows, a block 64 rows and every token; sm_90a alone
 * Capture   never captured
 * Numerics  kernels/src/contract.rs: K ascending in one accumulator a slice, slices in the balanced tree; both forms, bit for bit
 * Cost      the weight is read three times at COLUMNS = 64, twice at 8; no spills
 * Reference the mma.sync form, whose sums `--check-ops` compares with the CPU's
 *
 * Why one packing serves both. wgmma m64nNk16 takes its A operand from registers as mma.m16n8k16 does: each warp of the warpgroup holds 16
 * of the 64 rows, and lane 4g + t of it holds, in this order, positions (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8) and
 * each one's neighbour along k. So a lane's 16 packed bytes are its A operand in either form. "Position" and not "k": in packed order quad t
 * of k tile `tile` owns k = first_k … first_k + 3 (the permutation inside a pair), at positions 2t, 2t + 1, 2t + 8, 2t + 9. mma.sync's B
 * operand follows by itself: lane 4g + t holds column g at positions 2t, 2t + 1 and 2t + 8, 2t + 9, that is, x[first_k … first_k + 3], one
 * 8-byte load. wgmma's B operand lies in shared memory by position, so it is stored there in the same order: of the four values from
 * first_k on, the first two at positions 2t, 2t + 1, the others eight further. Then each instruction of either form multiplies the same
 * sixteen k at the same positions, and tiles ascend. */
static_assert(COLUMNS == 8 || COLUMNS == 64, "the widths of wgmma that are written out below");

constexpr int THREADS = 128, GROUPS = COLUMNS / 8, SUMS = 4 * GROUPS, STAGE = 8, LEVELS = 3;
/* Column groups that mma.sync takes at once: what fits registers beside the tree. */
constexpr int TOGETHER = GROUPS < 4 ? GROUPS : 4;
/* No swizzle: a core matrix is 8 tokens of 8 positions, 16 bytes a token; those of 8 positions (a chunk) lie together, a k tile is two chunks. */
constexpr int CORE_BYTES = WGMMA_CORE_BYTES, CHUNK_BYTES = GROUPS * CORE_BYTES, TILE_BYTES = 2 * CHUNK_BYTES;
/* Dead columns of wgmma hold this twice, 2^126: a sum that took anything of a neighbour would show it. */
constexpr u32 HUGE_PAIR = 0x7e807e80u;

/* The first of the four k that lane quad `quad` owns in k tile `tile`; the last tile of an odd number has no partner. */
DI int first_k(int tile, int k_tiles, int quad) {
  const bool alone = k_tiles % 2 == 1 && tile == k_tiles - 1;
  return alone ? tile * 16 + 4 * quad : tile / 2 * 32 + 8 * quad + tile % 2 * 4;
}

/* The balanced tree over 1, 2, 4 or 8 slices as they come in: `left` holds, by level, the sums that wait for the one to their right. After the
 * last slice `sum` is the total; that slice changes no `left` that it reads, so another form of it may be joined too. */
template <int N> DI void join(float (&left)[LEVELS][N], float (&sum)[N], int slice) {
  bool rising = true;
#pragma unroll
  for (int level = 0; level < LEVELS; level++) {
    const bool is_right = slice >> level & 1;
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (rising && is_right) sum[i] = left[level][i] + sum[i];
      if (rising && !is_right) left[level][i] = sum[i];
    }
    rising = rising && is_right;
  }
}

/* Keeps what reads or writes the accumulators on its own side: the compiler does not know that they belong to the matrix unit in between. */
DI void hold(float (&d)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(d[i])::"memory");
}
DI void wgmma_begin(float (&d)[SUMS]) {
  hold(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DI void wgmma_end(float (&d)[SUMS]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  hold(d);
}

/* One packed weight and the activations. */
struct Gemm {
  const V4* tiles; /* this lane's part of this warp's row tile */
  const bf16* x;
  int k_tiles, slices, tokens;

  /* The wgmma form of every total, in the accumulator layout of each group of 8 columns. All warps of the block. */
  DI void wide(u8* operand, float (&sum)[SUMS]) const {
    float left[LEVELS][SUMS];
#pragma unroll 1
    for (int slice = 0; slice < slices; slice++) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
      const int end = slice_begin(slice + 1, slices, k_tiles);
#pragma unroll 1
      for (int first = slice_begin(slice, slices, k_tiles); first < end; first += STAGE) {
        const int count = min_of(STAGE, end - first);
        V4 a[STAGE];
#pragma unroll
        for (int i = 0; i < STAGE; i++) a[i] = ld_weight16_shared(tiles + (u64)(first + min_of(i, count - 1)) * 32);
        sync_block(); /* every warp has multiplied by the stage before */
        store(operand, first, count);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync_block();
        const u32 base = shared_address(operand);
        if (count == STAGE) {
          wgmma_begin(sum);
#pragma unroll
          for (int i = 0; i < STAGE; i++) wgmma(sum, a[i], wgmma_operand(base + i * TILE_BYTES, CHUNK_BYTES));
          wgmma_end(sum);
        } else {
#pragma unroll
          for (int i = 0; i < STAGE; i++)
            if (i < count) {
              wgmma_begin(sum);
              wgmma(sum, a[i], wgmma_operand(base + i * TILE_BYTES, CHUNK_BYTES));
              wgmma_end(sum);
            }
        }
      }
      join(left, sum, slice);
    }
  }
  /* Activations of `count` k tiles from `first` on, by position. */
  DI void store(u8* operand, int first, int count) const {
    for (int i = threadIdx.x; i < count * COLUMNS * 4; i += THREADS) {
      const int quad = i % 4, token = i / 4 % COLUMNS, tile = i / (4 * COLUMNS);
      V2 four = {HUGE_PAIR, HUGE_PAIR};
      if (token < tokens) four = ld_act8(x + (u64)token * k_tiles * 16 + first_k(first + tile, k_tiles, quad));
      u8* to = operand + tile * TILE_BYTES + token / 8 * CORE_BYTES + token % 8 * 16 + quad * 4;
      *(u32*)to = four.x;
      *(u32*)(to + CHUNK_BYTES) = four.y;
    }
  }
  /* The mma.sync form of the totals of TOGETHER groups of columns from `group` on; `cut`: the same where the last slice, which is the longest,
   * is two chains. A dead column repeats a live one. */
  DI void narrow(int group, float (&sum)[4 * TOGETHER], float (&cut)[4 * TOGETHER]) const {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    float left[LEVELS][4 * TOGETHER], c[TOGETHER][4], second[TOGETHER][4];
    u64 row[TOGETHER];
#pragma unroll
    for (int j = 0; j < TOGETHER; j++) row[j] = (u64)min_of((group + j) * 8 + lane / 4, tokens - 1) * k_tiles * 16;
#pragma unroll 1
    for (int slice = 0; slice < slices; slice++) {
      const int first = slice_begin(slice, slices, k_tiles), end = slice_begin(slice + 1, slices, k_tiles);
      const int middle = slice + 1 == slices ? first + (end - first) / 2 : end;
#pragma unroll
      for (int j = 0; j < TOGETHER; j++)
#pragma unroll
        for (int q = 0; q < 4; q++) c[j][q] = 0.0f, second[j][q] = 0.0f, cut[j * 4 + q] = 0.0f;
#pragma unroll 1
      for (int tile = first; tile < end; tile++) {
        const V4 a = ld_weight16_shared(tiles + (u64)tile * 32);
        const int k = first_k(tile, k_tiles, quad);
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
          const V2 b = ld_act8(x + row[j] + k);
          if (tile == middle)
#pragma unroll
            for (int q = 0; q < 4; q++) cut[j * 4 + q] = c[j][q];
          mma(c[j], a, b.x, b.y);
          if (tile >= middle) mma(second[j], a, b.x, b.y);
        }
      }
#pragma unroll
      for (int j = 0; j < TOGETHER; j++)
#pragma unroll
        for (int q = 0; q < 4; q++) sum[j * 4 + q] = c[j][q], cut[j * 4 + q] = cut[j * 4 + q] + second[j][q];
      if (slice + 1 == slices) join(left, cut, slice);
      join(left, sum, slice);
    }
  }
};

KERNEL void __launch_bounds__(THREADS)
    forms(u32* found, const V4* weights, const bf16* x, u32 n, u32 k_tiles, u32 slices, u32 gate_up, u32 tokens) {
  __shared__ __align__(128) u8 operand[STAGE * TILE_BYTES];
  __shared__ float totals[SUMS][THREADS]; /* the wgmma form's, a thread's in its own column */
  __shared__ u32 counted[4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_tiles = ceil_div((int)n, 16), wanted = blockIdx.x * 4 + warp;
  /* A warp past the last tile repeats it, for the warpgroup needs four, and counts nothing. */
  const int row_tile = min_of(wanted, row_tiles - 1);
  const V4* tiles = weights + ((u64)blockIdx.y * row_tiles + row_tile) * k_tiles * 32 + lane;
  const Gemm gemm = {tiles, x, (int)k_tiles, (int)slices, (int)tokens};
  if (threadIdx.x < 4) counted[threadIdx.x] = 0;
  {
    float sum[SUMS];
    gemm.wide(operand, sum);
#pragma unroll
    for (int i = 0; i < SUMS; i++) totals[i][threadIdx.x] = sum[i];
  }
  sync_block(); /* the counts are zero */

  u32 compared = 0, different = 0, degenerate = 0, cut_seen = 0;
#pragma unroll 1
  for (int group = 0; group < GROUPS; group += TOGETHER) {
    float sum[4 * TOGETHER], cut[4 * TOGETHER];
    gemm.narrow(group, sum, cut);
#pragma unroll
    for (int i = 0; i < 4 * TOGETHER; i++) {
      const int row = g + i % 4 / 2 * 8, token = (group + i / 4) * 8 + 2 * t + i % 2;
      const bool is_row = gate_up ? row_tile * 8 + g < (int)n / 2 : row_tile * 16 + row < (int)n;
      if (wanted < row_tiles && is_row && token < (int)tokens) {
        const u32 wide = __float_as_uint(totals[group * 4 + i][threadIdx.x]);
        compared++;
        different += __float_as_uint(sum[i]) != wide;
        degenerate += sum[i] == 0.0f || !(fabsf(sum[i]) < 3e38f);
        cut_seen += __float_as_uint(cut[i]) != wide;
      }
    }
  }
  add_shared(counted, compared);
  add_shared(counted + 1, different);
  add_shared(counted + 2, degenerate);
  add_shared(counted + 3, cut_seen);
  sync_block();
  if (threadIdx.x < 4) add_counter(found + threadIdx.x, counted[threadIdx.x]);
}
