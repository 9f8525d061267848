/* exchange: gathered[n, first + r, :] = rank n's partial[first + r, :], pushed over peer memory in one shot, and moe_combine of these rows on the
 * way; one launch a piece of rows
 * Buffers   gathered [RANKS, rows, HIDDEN] f32 · partial [rows, HIDDEN] f32 · own, peer0 … peer7: each rank's scratch as this GPU sees it
 *           (ops/exchange.rs, `Scratch`; peers from RANKS on are NULL) · status: words in pinned host memory (`status` there)
 *           x [rows, HIDDEN] f32, updated in place · shared [rows, HIDDEN] f32
 * Scalars   rank (this one), rows, first and count of the piece: constants of the step shape
 * Launch    grid BLOCKS whatever the size, block THREADS; all blocks are resident at once, since each may spin on its namesake elsewhere
 *           LINES (few rows): each float travels with its epoch in eight bytes that are stored and seen as one, so the reader looks for the data
 *           itself: no fence, no flag after the data, no barrier; twice the bytes. Else data, then a flag a block
 * Numerics  bytes are moved, then added as moe_combine.cu adds them (combine.cuh)        Pad rows  moved like any row
 * Capture   no allocation, sync or readback: the epoch is in device memory, so a replayed graph moves on by itself
 * Order     Every launch of either form is one epoch of all blocks on all ranks. Staging and lines are used in two halves by the epoch's parity.
 *           A rank writes a half again at epoch e + 2, after its launch e + 1 has ended, in which it saw a flag or a line of epoch e + 1 from every
 *           peer; and a peer sends that only after its launch e, which read the half, has ended (the stream's order, or the wait of a programmatic
 *           edge: the launch lets its successor start early, but reads and writes nothing before its own wait, and ends after it). A line holds
 *           the epoch that it was last used in, so an old one is taken for new only 2^32 exchanges later, none of them of LINES.
 * Failure   A spin that lasts longer than the status page's limit, or is told to stop, says which rank it waited for, the epoch it
 *           wanted and the one it saw; it then goes on, and no later launch waits again. The host loses the device.
 * Cost      count · HIDDEN · 4 B (LINES: 8 B) · (RANKS - 1) over the links    Reference kernels/src/ops/exchange.rs, moe_combine.rs */
static_assert(HIDDEN % 4 == 0, "rows are moved 16 bytes at a time");
static_assert(RANKS == 2 || RANKS == 4 || RANKS == 8, "peers are two, four or eight");
static_assert(BLOCKS * PEERS_MAX * 4 <= EPOCHS_AT && EPOCHS_AT + BLOCKS * 4 <= FAILED_AT && FAILED_AT + 4 <= DATA_AT, "the header's parts do not overlap");

/* Looks at a flag between two looks at the clock and at the host's words, which lie over a bus: some milliseconds. Thousands of threads that looked
 * there as often as every 200 µs held their own rank up for longer than the other had been late. */
constexpr u32 LOOKS = 4096;
/* Vectors that a thread has on their way: enough to fill a link, few enough to leave other blocks registers. */
constexpr int UNROLL = RANKS == 2 ? 4 : 1;

DI u32* word_at(u8* scratch, u32 bytes) { return (u32*)(scratch + bytes); }

/* Whether a spin that wants `epoch` of rank `peer`, and saw `seen`, goes on no longer. The first to give up says why. */
DI bool gives_up(u8* own, u32* status, u32 rank, u32 peer, u32 epoch, u32 seen, u32 rows, u64& start) {
  if (ld_fresh_u32(word_at(own, FAILED_AT)) != 0) return true;
  const u64 now = global_time_ns();
  if (start == 0) start = now;
  const bool told = ld_system_u32(status + STATUS_STOP) != 0;
  if (!told && now - start < (u64)ld_system_u32(status + STATUS_LIMIT_MS) * 1000000) return false;
  if (atomicExch(word_at(own, FAILED_AT), 1u) == 0) {
    st_u32(status + STATUS_RANK, rank);
    st_u32(status + STATUS_PEER, peer);
    st_u32(status + STATUS_WANTED, epoch);
    st_u32(status + STATUS_SEEN, seen);
    st_u32(status + STATUS_ROWS, rows);
    st_release_system(status + STATUS_CODE, told ? STATUS_STOPPED : STATUS_TIMEOUT);
  }
  return true;
}

#if LINES
/* Two floats of rank `peer` in this epoch, for each lane that wants some; whatever is there once waiting has failed. The warp waits as one, and its
 * first lane asks whether to go on. */
DI V2 await_line(const u8* line, bool wanted, u8* own, u32* status, u32 rank, u32 peer, u32 epoch, u32 rows, bool& failed) {
  u64 start = 0;
  for (u32 look = 1;; look++) {
    V4 seen = {0, epoch, 0, epoch};
    if (wanted) seen = ld_system_pairs(line);
    const u32 late = ballot(seen.y != epoch || seen.w != epoch);
    if (late == 0 || failed) return V2{seen.x, seen.z};
    if (look % LOOKS == 0) {
      const u32 saw = from_lane_u32(seen.y == epoch ? seen.w : seen.y, __ffs(late) - 1);
      u32 over = 0;
      if (threadIdx.x % 32 == 0) over = gives_up(own, status, rank, peer, epoch, saw, rows, start);
      failed = from_lane_u32(over, 0) != 0;
    }
  }
}

KERNEL void __launch_bounds__(THREADS, 1)
    exchange(float* gathered, const float* partial, u8* own, u8* peer0, u8* peer1, u8* peer2, u8* peer3, u8* peer4, u8* peer5, u8* peer6, u8* peer7,
             u32* status, u32 rank, u32 rows, u32 first, u32 count, float* x, const float* shared) {
  wait_and_let_start<AFTER_WAIT>(rows);
  u8* const peers[PEERS_MAX] = {peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7};
  const u32 epoch = ld_act_u32(word_at(own, EPOCHS_AT + blockIdx.x * 4)) + 1;
  bool failed = ld_act_u32(word_at(own, FAILED_AT)) != 0;
  /* Warps of all blocks in turn: one row of 2048 is a warp a block. */
  const u32 lines = count * (HIDDEN / 2), begin = (threadIdx.x / 32 * BLOCKS + blockIdx.x) * 32, step = BLOCKS * THREADS, lane = threadIdx.x % 32;
  const u64 half = LINES_AT + (u64)(epoch & 1) * RANKS * LINES_BYTES;
  const u64 piece = (u64)first * HIDDEN, whole = (u64)rows * HIDDEN;

  for (u32 i = begin + lane; i < lines; i += step) {
    const V2 v = ld_act8(partial + piece + 2 * i);
#pragma unroll
    for (u32 n = 0; n < RANKS; n++)
      if (n != rank) st_system_pairs(peers[n] + half + (u64)rank * LINES_BYTES + 16 * i, V4{v.x, epoch, v.y, epoch});
    st8(gathered + (u64)rank * whole + piece + 2 * i, v);
  }
  for (u32 start = begin; start < lines; start += step) {
    const u32 i = start + lane;
    const u64 at = piece + 2 * i;
    V2 old = {0, 0}, add = {0, 0}, part[RANKS];
    if (i < lines) old = ld_act8(x + at), add = ld_act8(shared + at), part[0] = ld_act8(partial + at);
    const V2 mine = part[0];
#pragma unroll
    for (u32 n = 0; n < RANKS; n++) {
      part[n] = mine;
      if (n == rank) continue;
      part[n] = await_line(own + half + (u64)n * LINES_BYTES + 16 * i, i < lines, own, status, rank, n, epoch, rows, failed);
      if (i < lines) st8(gathered + (u64)n * whole + at, part[n]);
    }
    if (i < lines) st8(x + at, combine_ranks<RANKS>(old, part, add));
  }
  sync_block(); /* Every thread has read the epoch. */
  if (threadIdx.x == 0) st_u32(word_at(own, EPOCHS_AT + blockIdx.x * 4), epoch);
}
#else
/* Thread `peer` of a block waits until rank `peer` has raised the block's flag to `epoch`. */
DI void await_flag(u8* own, u32* status, u32 rank, u32 peer, u32 epoch, u32 rows) {
  const u32* flag = word_at(own, (blockIdx.x * PEERS_MAX + peer) * 4);
  u64 start = 0;
  for (u32 look = 1;; look++) {
    const u32 seen = ld_acquire_system(flag);
    if ((int)(seen - epoch) >= 0) return;
    if (look % LOOKS == 0 && gives_up(own, status, rank, peer, epoch, seen, rows, start)) return;
  }
}

KERNEL void __launch_bounds__(THREADS, 1)
    exchange(float* gathered, const float* partial, u8* own, u8* peer0, u8* peer1, u8* peer2, u8* peer3, u8* peer4, u8* peer5, u8* peer6, u8* peer7,
             u32* status, u32 rank, u32 rows, u32 first, u32 count, float* x, const float* shared) {
  wait_and_let_start<AFTER_WAIT>(rows);
  u8* const peers[PEERS_MAX] = {peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7};
  const u32 epoch = ld_act_u32(word_at(own, EPOCHS_AT + blockIdx.x * 4)) + 1;
  const bool failed = ld_act_u32(word_at(own, FAILED_AT)) != 0;
  const u64 vectors = (u64)count * (HIDDEN / 4), begin = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)BLOCKS * THREADS;
  /* Where this half of a staging area begins, the piece in `partial`, and how far ranks are apart in `gathered`. */
  const u64 half = DATA_AT + (u64)(epoch & 1) * RANKS * PIECE_BYTES;
  const u64 piece = (u64)first * HIDDEN, whole = (u64)rows * HIDDEN;

  /* This rank is a peer of its own: one way for all. */
#pragma unroll UNROLL
  for (u64 i = begin; i < vectors; i += step) {
    const V4 v = ld_act16(partial + piece + 4 * i);
#pragma unroll
    for (u32 n = 0; n < RANKS; n++) st16(peers[n] + half + (u64)rank * PIECE_BYTES + 16 * i, v);
  }
  /* Every thread has read the epoch, and every store of the block comes before the flags. */
  sync_block();
  if ((u64)blockIdx.x * THREADS < vectors) {
    if (threadIdx.x < RANKS && threadIdx.x != rank) {
      u8* peer = own;
#pragma unroll
      for (u32 n = 0; n < RANKS; n++)
        if (n == threadIdx.x) peer = peers[n];
      st_release_system(word_at(peer, (blockIdx.x * PEERS_MAX + rank) * 4), epoch);
      if (!failed) await_flag(own, status, rank, threadIdx.x, epoch, rows);
    }
    sync_block();
#pragma unroll UNROLL
    for (u64 i = begin; i < vectors; i += step) {
      const u64 at = piece + 4 * i;
      constexpr bool LATE = RANKS == 8; /* so that eight ranks' parts leave registers to other blocks */
      V4 old, add, part[RANKS];
      if (!LATE) old = ld_act16(x + at), add = ld_act16(shared + at);
#pragma unroll
      for (u32 n = 0; n < RANKS; n++) part[n] = ld_system16(own + half + (u64)n * PIECE_BYTES + 16 * i);
#pragma unroll
      for (u32 n = 0; n < RANKS; n++) st16(gathered + (u64)n * whole + at, part[n]);
      if (LATE) old = ld_act16(x + at), add = ld_act16(shared + at);
      st16(x + at, combine_ranks<RANKS>(old, part, add));
    }
  }
  if (threadIdx.x == 0) st_u32(word_at(own, EPOCHS_AT + blockIdx.x * 4), epoch);
}
#endif
