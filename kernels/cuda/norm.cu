/* norm: h[r, :] = rms_norm(x[row_of(r), :]): the norm apart, for steps of many rows, where every block of a GEMM would repeat it
 * Buffers   h [R, NORM_K] bf16 · x f32, rows X_STRIDE apart, columns from X_OFFSET on · weight [NORM_K] f32 · row_of [R] u32 (head: the row of each logit row)
 * Scalars   EPS_BITS, compiled in                    Launch    grid ceil(rows / 8), block 256: a warp a row
 * Numerics  norm.cuh                                 Pad rows  computed like any row
 * Capture   no allocation, sync or readback          Cost      memory-bound, rows · NORM_K · 6 B
 * Reference kernels/src/ops/norm_gemm.rs */
static_assert(NORM_K % 8 == 0 && X_OFFSET % 4 == 0 && X_STRIDE % 4 == 0, "rows are read and written 16 bytes at a time");

DI void norm_rows_of(bf16* h, const float* x, const float* weight, u32 rows, const u32* row_of) {
  const u32 row = blockIdx.x * 8 + threadIdx.x / 32;
  wait_for_predecessor(rows);
  let_successor_start();
  if (row >= rows) return;
  const u64 source = row_of ? ld_act_u32(row_of + row) : row;
  bf16* to = h + (u64)row * NORM_K;
  norm_row_by_warp<NORM_K>(x + source * X_STRIDE + X_OFFSET, weight, __uint_as_float(EPS_BITS), threadIdx.x % 32,
                           [&](int column, V4 y) { st16(to + column, y); });
}

KERNEL void __launch_bounds__(256) norm_rows(bf16* h, const float* x, const float* weight, u32 rows) { norm_rows_of(h, x, weight, rows, nullptr); }

KERNEL void __launch_bounds__(256) norm_logit_rows(bf16* h, const float* x, const float* weight, u32 rows, const u32* row_of) {
  norm_rows_of(h, x, weight, rows, row_of);
}
