/* norm: RMSNorm of f32 rows into bf16, in the contract's order of sums (kernels/src/contract.rs NORM_LANES).
 * Lane j of 256 adds the squares of columns j, j + 256 … ascending from +0.0; then the balanced tree over the lanes;
 * y = (x · (1 / sqrt(sum / k + eps))) · weight, one rounding. Two forms, same bits: a block a row, and a warp a row. */

/* The factor of a row from its sum of squares. */
template <int K_WIDTH> DI float norm_factor(float squares, float eps) { return 1.0f / sqrtf(squares / (float)K_WIDTH + eps); }

/* Asks for the norm's weights, which a step's other weights have driven from the L2, before the wait: the block's threads 128 bytes each. */
template <int K_WIDTH> DI void norm_weights_early(const float* weight) {
  for (int column = threadIdx.x * 32; column < K_WIDTH; column += blockDim.x * 32) prefetch_l2(weight + column);
}

/* Eight squares more of a lane. */
DI void add_squares(float (&square)[8], const F4& low, const F4& high) {
  square[0] = square[0] + low.x * low.x;
  square[1] = square[1] + low.y * low.y;
  square[2] = square[2] + low.z * low.z;
  square[3] = square[3] + low.w * low.w;
  square[4] = square[4] + high.x * high.x;
  square[5] = square[5] + high.y * high.y;
  square[6] = square[6] + high.z * high.z;
  square[7] = square[7] + high.w * high.w;
}
DI V4 normed(const F4& low, const F4& high, const F4& w_low, const F4& w_high, float factor) {
  V4 y;
  y.x = bf16_pair(low.x * factor * w_low.x, low.y * factor * w_low.y);
  y.y = bf16_pair(low.z * factor * w_low.z, low.w * factor * w_low.w);
  y.z = bf16_pair(high.x * factor * w_high.x, high.y * factor * w_high.y);
  y.w = bf16_pair(high.z * factor * w_high.z, high.w * factor * w_high.w);
  return y;
}

/* A warp takes a row; lane l holds lanes 8l … 8l+7 of the contract. `x`, `out` 16-byte aligned, out in shared or global memory. A short row is loaded once,
 * with its weights. */
template <int K_WIDTH, int UNROLL = 4, class Store> DI void norm_row_by_warp(const float* x, const float* weight, float eps, int lane, const Store& store) {
  static_assert(K_WIDTH % 8 == 0, "a lane takes eight columns at a time");
  constexpr int STEPS = ceil_div(K_WIDTH, 256);
  constexpr bool SHORT = STEPS <= 2;
  F4 value[SHORT ? STEPS : 1][2], scale[SHORT ? STEPS : 1][2];
  float square[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  auto has = [&](int step) { return K_WIDTH % 256 == 0 || step * 256 + lane * 8 < K_WIDTH; };
  if constexpr (SHORT) {
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      if (has(step)) {
        const int column = step * 256 + lane * 8;
        value[step][0] = ld_act_f4(x + column), value[step][1] = ld_act_f4(x + column + 4);
        scale[step][0] = ld_weight_f4(weight + column), scale[step][1] = ld_weight_f4(weight + column + 4);
      }
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      if (has(step)) add_squares(square, value[step][0], value[step][1]);
  } else {
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; step++)
      if (has(step)) {
        const int column = step * 256 + lane * 8;
        const F4 low = ld_act_f4(x + column), high = ld_act_f4(x + column + 4);
        add_squares(square, low, high);
      }
  }
  const float mine = ((square[0] + square[1]) + (square[2] + square[3])) + ((square[4] + square[5]) + (square[6] + square[7]));
  const float factor = norm_factor<K_WIDTH>(warp_tree(mine), eps);
  if constexpr (SHORT) {
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      if (has(step)) store(step * 256 + lane * 8, normed(value[step][0], value[step][1], scale[step][0], scale[step][1], factor));
  } else {
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; step++)
      if (has(step)) {
        const int column = step * 256 + lane * 8;
        const F4 low = ld_act_f4(x + column), high = ld_act_f4(x + column + 4);
        const F4 w_low = ld_weight_f4(weight + column), w_high = ld_weight_f4(weight + column + 4);
        store(column, normed(low, high, w_low, w_high, factor));
      }
  }
}

/* 256 threads take a row; thread j is lane j of the contract. A block of 512 takes two rows at once, one a half; threads behind the last whole half
 * only keep the barriers. `rows` rows of the half, HALVES apart; `sums` is 8 floats of shared memory a half. Every thread of the block calls it. Ends
 * without a barrier. */
template <int K_WIDTH, int STRIDE, class RowOf>
DI void norm_rows_by_block(int rows, const float* weight, float eps, float* sums, bf16* out, const RowOf& row_of) {
  constexpr int STEPS = ceil_div(K_WIDTH, 256);
  const int lane = threadIdx.x % 256, half = threadIdx.x / 256, halves = blockDim.x / 256;
  const bool idle = half >= halves;
  if (!idle) sums += half * 8;
  float scale[STEPS];
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int column = step * 256 + lane;
    scale[step] = K_WIDTH % 256 == 0 || column < K_WIDTH ? ld_weight_f32(weight + column) : 0.0f;
  }
  for (int row = half; row - half < rows; row += halves) {
    const bool live = row < rows && !idle;
    float value[STEPS], square = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int column = step * 256 + lane;
      value[step] = live && (K_WIDTH % 256 == 0 || column < K_WIDTH) ? ld_act_f32(row_of(row) + column) : 0.0f;
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) square = square + value[step] * value[step];
    square = warp_tree(square);
    if (row != half) sync_block(); /* the sums of the row before are read */
    if (lane % 32 == 0 && !idle) sums[lane / 32] = square;
    sync_block();
    const float all = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    const float factor = norm_factor<K_WIDTH>(all, eps);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int column = step * 256 + lane;
      if (live && (K_WIDTH % 256 == 0 || column < K_WIDTH)) out[row * STRIDE + column] = bf16_round(value[step] * factor * scale[step]);
    }
  }
}

/* Rows of a block's token columns, normalised into shared memory: `rows` rows at row_of(i). `sums`: 16 floats. Ends with a barrier. */
template <int K_WIDTH, int STRIDE, int UNROLL = 4, class RowOf>
DI void norm_rows_to_shared(bf16* out, float* sums, int rows, const float* weight, float eps, const RowOf& row_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (rows <= (int)blockDim.x / 128) {
    norm_rows_by_block<K_WIDTH, STRIDE>(rows, weight, eps, sums, out, row_of);
  } else {
    for (int row = warp; row < rows; row += warps) {
      bf16* to = out + row * STRIDE;
      norm_row_by_warp<K_WIDTH, UNROLL>(row_of(row), weight, eps, lane, [&](int column, V4 y) { *(V4*)(to + column) = y; });
    }
  }
  sync_block();
}
