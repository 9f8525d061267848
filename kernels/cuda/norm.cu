/* norm: h[r, :] = rms_norm(x[row_of(r), :]): the norm apart, for steps of many rows, where every block of a GEMM would repeat it
 * Buffers   h [R, NORM_K] bf16 · x f32, rows X_STRIDE apart, columns from X_OFFSET on · weight [NORM_K] f32 · row_of [R] u32 (head: the row of each logit row)
 * Scalars   EPS_BITS, compiled in; SUCCESSOR: common.cuh                    Launch    grid rows, block 256: a block a row, which at few rows is all latency
 * Numerics  norm.cuh                                 Pad rows  computed like any row
 * Capture   no allocation, sync or readback          Cost      memory-bound, rows · NORM_K · 6 B
 * Reference kernels/src/ops/norm_gemm.rs */

DI void norm_row_of(bf16* h, const float* x, const float* weight, u32 rows, const u32* row_of) {
  __shared__ float sums[8];
  norm_weights_early<NORM_K>(weight);
  wait_and_let_start<SUCCESSOR>(rows);
  const u64 row = blockIdx.x, source = row_of ? ld_act_u32(row_of + row) : row;
  norm_rows_by_block<NORM_K, NORM_K>(1, weight, __uint_as_float(EPS_BITS), sums, h + row * NORM_K,
                                     [&](int) { return x + source * X_STRIDE + X_OFFSET; });
}

KERNEL void __launch_bounds__(256) norm_rows(bf16* h, const float* x, const float* weight, u32 rows) { norm_row_of(h, x, weight, rows, nullptr); }

KERNEL void __launch_bounds__(256) norm_logit_rows(bf16* h, const float* x, const float* weight, u32 rows, const u32* row_of) {
  norm_row_of(h, x, weight, rows, row_of);
}
