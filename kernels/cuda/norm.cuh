/* norm: RMSNorm of f32 rows into bf16, in the contract's order of sums (kernels/src/contract.rs NORM_LANES).
 * Lane j of 256 adds the squares of columns j, j + 256 … ascending from +0.0; then the balanced tree over the lanes;
 * y = (x · (1 / sqrt(sum / k + eps))) · weight, one rounding. Two forms, same bits: a block a row, and a warp a row. */

/* The factor of a row from its sum of squares. */
template <int K_WIDTH> DI float norm_factor(float squares, float eps) { return 1.0f / sqrtf(squares / (float)K_WIDTH + eps); }

/* A warp takes a row; lane l holds lanes 8l … 8l+7 of the contract. `x`, `out` 16-byte aligned, out in shared or global memory. */
template <int K_WIDTH, class Store> DI void norm_row_by_warp(const float* x, const float* weight, float eps, int lane, const Store& store) {
  static_assert(K_WIDTH % 8 == 0, "a lane takes eight columns at a time");
  constexpr int STEPS = ceil_div(K_WIDTH, 256);
  float square[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 4
  for (int step = 0; step < STEPS; step++) {
    const int column = step * 256 + lane * 8;
    if (K_WIDTH % 256 == 0 || column < K_WIDTH) {
      const F4 low = ld_act_f4(x + column), high = ld_act_f4(x + column + 4);
      square[0] = square[0] + low.x * low.x;
      square[1] = square[1] + low.y * low.y;
      square[2] = square[2] + low.z * low.z;
      square[3] = square[3] + low.w * low.w;
      square[4] = square[4] + high.x * high.x;
      square[5] = square[5] + high.y * high.y;
      square[6] = square[6] + high.z * high.z;
      square[7] = square[7] + high.w * high.w;
    }
  }
  const float mine = ((square[0] + square[1]) + (square[2] + square[3])) + ((square[4] + square[5]) + (square[6] + square[7]));
  const float factor = norm_factor<K_WIDTH>(warp_tree(mine), eps);
#pragma unroll 4
  for (int step = 0; step < STEPS; step++) {
    const int column = step * 256 + lane * 8;
    if (K_WIDTH % 256 == 0 || column < K_WIDTH) {
      const F4 low = ld_act_f4(x + column), high = ld_act_f4(x + column + 4);
      const F4 w_low = ld_weight_f4(weight + column), w_high = ld_weight_f4(weight + column + 4);
      V4 y;
      y.x = bf16_pair(low.x * factor * w_low.x, low.y * factor * w_low.y);
      y.y = bf16_pair(low.z * factor * w_low.z, low.w * factor * w_low.w);
      y.z = bf16_pair(high.x * factor * w_high.x, high.y * factor * w_high.y);
      y.w = bf16_pair(high.z * factor * w_high.z, high.w * factor * w_high.w);
      store(column, y);
    }
  }
}

/* A block of 256 takes a row; thread j is lane j of the contract. `sums` is 8 floats of shared memory. Ends without a barrier. */
template <int K_WIDTH> DI void norm_row_by_block(const float* x, const float* weight, float eps, float* sums, bf16* shared_out) {
  constexpr int STEPS = ceil_div(K_WIDTH, 256);
  float value[STEPS], square = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int column = step * 256 + (int)threadIdx.x;
    value[step] = K_WIDTH % 256 == 0 || column < K_WIDTH ? ld_act_f32(x + column) : 0.0f;
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) square = square + value[step] * value[step];
  square = warp_tree(square);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = square;
  sync_block();
  const float all = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  const float factor = norm_factor<K_WIDTH>(all, eps);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int column = step * 256 + (int)threadIdx.x;
    if (K_WIDTH % 256 == 0 || column < K_WIDTH) shared_out[column] = bf16_round(value[step] * factor * ld_weight_f32(weight + column));
  }
}

/* Rows of a block's token columns, normalised into shared memory: `rows` live rows at row_of(i), and zeros up to PADDED. */
template <int K_WIDTH, int STRIDE, int PADDED, class RowOf>
DI void norm_rows_to_shared(bf16* out, float* sums, int rows, const float* weight, float eps, const RowOf& row_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const V4 zero = {0, 0, 0, 0};
  for (int i = rows * STRIDE / 8 + (int)threadIdx.x; i < PADDED * STRIDE / 8; i += (int)blockDim.x) ((V4*)out)[i] = zero;
  if (rows <= 2 && blockDim.x == 256) {
    for (int row = 0; row < rows; row++) {
      if (row) sync_block(); /* `sums` is read by the row before */
      norm_row_by_block<K_WIDTH>(row_of(row), weight, eps, sums, out + row * STRIDE);
    }
  } else {
    for (int row = warp; row < rows; row += warps) {
      bf16* to = out + row * STRIDE;
      norm_row_by_warp<K_WIDTH>(row_of(row), weight, eps, lane, [&](int column, V4 y) { *(V4*)(to + column) = y; });
    }
  }
  sync_block();
}
