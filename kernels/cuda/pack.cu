/* pack: rows of one weight, row-major bf16 as the checkpoint has them, into the form that the kernels read (kernels/src/pack.rs)
 * Buffers   packed (device form of the whole group) · rows [count, WEIGHT_K] bf16, 16-byte aligned: rows first … first + count − 1
 * Launch    grid-stride, block 256; before any graph exists, so no programmatic edge
 * Numerics  moves bits; pack_vector widens bf16 to f32, which is exact
 * Pad rows  a range that ends at WEIGHT_N also writes the zero rows up to the next multiple of 16
 * Reference kernels/src/pack.rs pack_group */
static_assert(WEIGHT_K % 4 == 0 || WEIGHT_K == 1, "a quad of k must not cross a row");

/* Each thread moves four consecutive k of one row: two 4-byte words of one lane's 16 bytes. */
KERNEL void pack_gemm(u32* packed, const bf16* rows, u32 first, u32 count) {
  constexpr u64 QUADS = WEIGHT_K / 4, TILES = WEIGHT_K / 16, PADDED_N = (WEIGHT_N + 15) / 16 * 16;
  const u64 last = first + count == WEIGHT_N ? PADDED_N : first + count;
  const u64 items = (last - first) * QUADS, stride = (u64)gridDim.x * blockDim.x;
  for (u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x; item < items; item += stride) {
    const u64 row = first + item / QUADS, quad = item % QUADS;
    V2 value = {0, 0};
    if (row < WEIGHT_N) {
      const bf16* from = rows + (row - first) * WEIGHT_K + quad * 4;
      value.x = from[0] | (u32)from[1] << 16;
      value.y = from[2] | (u32)from[3] << 16;
    }
    /* Which 16-row tile, and which of its rows. */
    u64 tile, in_tile;
    if (GATE_UP && row < WEIGHT_N) {
      const u64 half = WEIGHT_N / 2, output = row % half;
      tile = output / 8;
      in_tile = output % 8 + (row < half ? 0 : 8);
    } else {
      tile = row / 16;
      in_tile = row % 16;
    }
    /* Which k tile and which quad of lanes. */
    const u64 k = quad * 4;
    u64 k_tile, lane_quad;
    if (TILES % 2 == 1 && k / 16 == TILES - 1) {
      k_tile = TILES - 1;
      lane_quad = quad % 4;
    } else {
      k_tile = k / 32 * 2 + (quad & 1);
      lane_quad = k % 32 / 8;
    }
    const u64 lane = in_tile % 8 * 4 + lane_quad;
    u32* to = packed + ((tile * TILES + k_tile) * 32 + lane) * 4 + in_tile / 8;
    st_u32(to, value.x);
    st_u32(to + 2, value.y);
  }
}

KERNEL void pack_vector(float* packed, const bf16* values, u32 first, u32 count) {
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) st_f32(packed + first + i, bf16_float(values[i]));
}

KERNEL void pack_table(bf16* packed, const bf16* rows, u32 first, u32 count) {
  const u64 items = (u64)count * WEIGHT_K, stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < items; i += stride) st_bf16(packed + (u64)first * WEIGHT_K + i, rows[i]);
}
