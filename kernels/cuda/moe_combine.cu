/* moe_combine: x[r, :] = x[r, :] + (tree over ranks of gathered[n, r, :] + shared[r, :]): the rest of the shard tree, on every rank
 * Buffers   x [R, HIDDEN] f32, updated in place · gathered [RANKS, R, HIDDEN] f32 · shared [R, HIDDEN] f32
 * Launch    grid-stride, block 256                   Numerics  the balanced tree over RANKS, fp32 (combine.cuh)
 * Pad rows  computed like any row                    Capture   no allocation, sync or readback
 * Order     eager: the next layer's weights come while the exchange still waits
 * Cost      R · HIDDEN · (RANKS + 3) · 4 B           Reference kernels/src/ops/moe_combine.rs */
static_assert(HIDDEN % 4 == 0, "rows are read 16 bytes at a time");

KERNEL void __launch_bounds__(256) moe_combine(float* x, const float* gathered, const float* shared, u32 rows) {
  wait_and_let_start<AT_ONCE>(rows);
  const u64 count = (u64)rows * HIDDEN, stride = (u64)gridDim.x * blockDim.x * 4;
  for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4; i < count; i += stride) {
    V4 part[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++) part[rank] = ld_act16(gathered + rank * count + i);
    const V4 s = ld_act16(shared + i), old = ld_act16(x + i);
    st16(x + i, combine_ranks<RANKS>(old, part, s));
  }
}
