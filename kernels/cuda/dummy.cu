/* dummy: one part of a dummy matrix (rows of one tensor, or their transpose) into the row-major group that holds it
 * Buffers   group [.., k] bf16
 * Scalars   key of the tensor · first_row, rows of the tensor · columns of the tensor · k, dst_row of the group · transpose
 * Launch    grid-stride, block 256; before any graph exists
 * Numerics  integer sum of twelve 16-bit uniforms, exact as f32; one product with DUMMY_SCALE; one rounding to bf16
 * Reference kernels/src/dummy.rs element */
DI u64 splitmix(u64 key, u64 counter) {
  u64 z = key + (counter + 1) * DUMMY_GOLDEN;
  z = (z ^ z >> 30) * DUMMY_MIX_A;
  z = (z ^ z >> 27) * DUMMY_MIX_B;
  return z ^ z >> 31;
}

KERNEL void dummy_part(bf16* group, u64 key, u64 first_row, u64 rows, u64 columns, u64 k, u64 dst_row, u32 transpose) {
  const u64 items = rows * columns, stride = (u64)gridDim.x * blockDim.x;
  for (u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x; item < items; item += stride) {
    const u64 row = item / columns, column = item % columns, index = (first_row + row) * columns + column;
    int sum = 0;
#pragma unroll
    for (int part = 0; part < 3; part++) {
      const u64 word = splitmix(key, 3 * index + part);
      sum += (int)(word & 0xffff) + (int)(word >> 16 & 0xffff) + (int)(word >> 32 & 0xffff) + (int)(word >> 48);
    }
    const bf16 value = bf16_round((float)(sum - DUMMY_MEAN) * __uint_as_float(DUMMY_SCALE_BITS));
    st_bf16(group + (transpose ? (dst_row + column) * k + row : (dst_row + row) * k + column), value);
  }
}
