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
