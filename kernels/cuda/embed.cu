/* embed: x[r, :] = table[token[r], :], widened
 * Buffers   x [R, HIDDEN] f32 · token [R] u32 · table [VOCAB, HIDDEN] bf16
 * Launch    grid R, block 256                        Numerics  exact
 * Pad rows  token 0, like any row                    Capture   no allocation, sync or readback
 * Cost      R · HIDDEN · 6 B                         Reference kernels/src/ops/embed.rs */
static_assert(HIDDEN % 8 == 0, "rows are read 16 bytes at a time");

KERNEL void __launch_bounds__(256) embed(float* x, const u32* token, const bf16* table, u32 rows) {
  wait_for_predecessor(rows);
  let_successor_start();
  const u32 row = blockIdx.x;
  const bf16* from = table + (u64)ld_act_u32(token + row) * HIDDEN;
  float* to = x + (u64)row * HIDDEN;
  for (u32 column = threadIdx.x * 8; column < HIDDEN; column += 256 * 8) {
    const V4 v = ld_weight16(from + column);
    st_f4(to + column, F4{bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y)});
    st_f4(to + column + 4, F4{bf16_low(v.z), bf16_high(v.z), bf16_low(v.w), bf16_high(v.w)});
  }
}
