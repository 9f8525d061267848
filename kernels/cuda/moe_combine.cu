/* moe_combine: x[r, :] = x[r, :] + (tree over ranks of gathered[n, r, :] + shared[r, :]): the rest of the shard tree, on every rank
 * Buffers   x [R, HIDDEN] f32, updated in place · gathered [RANKS, R, HIDDEN] f32 · shared [R, HIDDEN] f32
 * Launch    grid-stride, block 256                   Numerics  the balanced tree over RANKS, fp32
 * Pad rows  computed like any row                    Capture   no allocation, sync or readback
 * Order     eager: the next layer's weights come while the exchange still waits
 * Cost      R · HIDDEN · (RANKS + 3) · 4 B           Reference kernels/src/ops/moe_combine.rs */
static_assert(HIDDEN % 4 == 0, "rows are read 16 bytes at a time");
static_assert(RANKS == 1 || RANKS == 2 || RANKS == 4 || RANKS == 8, "the tree needs a power of two");

KERNEL void __launch_bounds__(256) moe_combine(float* x, const float* gathered, const float* shared, u32 rows) {
  wait_and_let_start<AT_ONCE>(rows);
  const u64 count = (u64)rows * HIDDEN, stride = (u64)gridDim.x * blockDim.x * 4;
  for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4; i < count; i += stride) {
    F4 part[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++) part[rank] = ld_act_f4(gathered + rank * count + i);
#pragma unroll
    for (int width = RANKS / 2; width > 0; width /= 2)
#pragma unroll
      for (int pair = 0; pair < width; pair++) {
        const F4 a = part[2 * pair], b = part[2 * pair + 1];
        part[pair] = F4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
      }
    const F4 s = ld_act_f4(shared + i), old = ld_act_f4(x + i);
    st_f4(x + i, F4{old.x + (part[0].x + s.x), old.y + (part[0].y + s.y), old.z + (part[0].z + s.z), old.w + (part[0].w + s.w)});
  }
}
