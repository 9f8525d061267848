/* routes: which lines (row · top_k + choice) go to which expert, built by a block in shared memory from the chosen ids. A stable counting
 * sort: an expert's lines ascend, whatever the neighbours. Built again by each block: cheaper than a node of its own up to 2,048 rows. */
template <int EXPERTS, int LINES_MAX, int WARPS> struct Routes {
  u32 count[EXPERTS], start[EXPERTS];
  u32 histogram[WARPS][EXPERTS];
  u16 active[EXPERTS]; /* experts with lines, ascending */
  u16 line[LINES_MAX]; /* by expert, then ascending */
  u32 active_count;

  /* `ids`: of the chunk's first line. Ids outside first … first + EXPERTS − 1 (other ranks', pad rows') are left out. Ends with a barrier. */
  DI void build(const u32* ids, int lines, u32 first) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int per_warp = ceil_div(ceil_div(lines, 32), WARPS) * 32;
    for (int i = threadIdx.x; i < WARPS * EXPERTS; i += WARPS * 32) ((u32*)histogram)[i] = 0;
    sync_block();
    for (int step = 0; step < per_warp; step += 32) {
      const int at = warp * per_warp + step + lane;
      const u32 id = at < lines ? ld_early_u32(ids + at) - first : 0xffffffffu;
      const u32 same = __match_any_sync(0xffffffffu, id);
      if (id < EXPERTS && (same & ((1u << lane) - 1)) == 0) histogram[warp][id] += __popc(same);
      sync_warp();
    }
    sync_block();
    if (warp == 0) { /* exclusive sums over experts, then over the warps of an expert */
      u32 lines_before = 0, active_before = 0;
      for (int base = 0; base < EXPERTS; base += 32) {
        const int expert = base + lane;
        u32 total = 0;
        if (expert < EXPERTS)
          for (int w = 0; w < WARPS; w++) total += histogram[w][expert];
        u32 sum = total;
        for (int d = 1; d < 32; d *= 2) {
          const u32 other = __shfl_up_sync(0xffffffffu, sum, d);
          if (lane >= d) sum += other;
        }
        const u32 some = ballot(total > 0);
        if (expert < EXPERTS) {
          u32 at = lines_before + sum - total;
          count[expert] = total, start[expert] = at;
          if (total) active[active_before + __popc(some & ((1u << lane) - 1))] = (u16)expert;
          for (int w = 0; w < WARPS; w++) {
            const u32 here = histogram[w][expert];
            histogram[w][expert] = at;
            at += here;
          }
        }
        lines_before += from_lane_u32(sum, 31), active_before += __popc(some);
      }
      if (lane == 0) active_count = active_before;
    }
    sync_block();
    for (int step = 0; step < per_warp; step += 32) {
      const int at = warp * per_warp + step + lane;
      const u32 id = at < lines ? ld_early_u32(ids + at) - first : 0xffffffffu;
      const u32 same = __match_any_sync(0xffffffffu, id), before = __popc(same & ((1u << lane) - 1));
      u32 to = 0;
      if (id < EXPERTS) to = histogram[warp][id] + before, line[to] = (u16)at;
      sync_warp();
      if (id < EXPERTS && before == 0) histogram[warp][id] = to + __popc(same);
      sync_warp();
    }
    sync_block();
  }
};

/* The same of at most 32 lines, in the registers of every warp: no barrier, no shared memory. Lane l holds line l. */
template <int EXPERTS> struct FewRoutes {
  u32 id, same;  /* expert of this lane's line; the lines of that expert, 0 if it is not ours */
  u32 order;     /* of the expert among the active ones */
  u32 active_count;

  DI void build(const u32* ids, int lines, u32 first) {
    const int lane = threadIdx.x % 32;
    id = lane < lines ? ld_early_u32(ids + lane) - first : 0xffffffffu;
    same = __match_any_sync(0xffffffffu, id);
    if (id >= EXPERTS) same = 0;
    const u32 leaders = ballot(same != 0 && (same & ((1u << lane) - 1)) == 0);
    active_count = __popc(leaders), order = 0;
    for (u32 left = leaders; left; left &= left - 1) order += from_lane_u32(id, __ffs(left) - 1) < id;
  }
  /* A lane that holds a line of the i-th active expert. */
  DI int holder(int i) const { return __ffs(ballot(same != 0 && order == (u32)i)) - 1; }
  /* Bit n of `lines` that is set, counted from the lowest. */
  static DI int line(u32 lines, int n) {
    for (; n > 0; n--) lines &= lines - 1;
    return __ffs(lines) - 1;
  }
};
