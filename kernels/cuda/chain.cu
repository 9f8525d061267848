/* chain: do this machine's tensor cores sum as the contract needs? Asked by `doctor`, never by a step.
 * Buffers   found [4] u32, zero before: sums compared · sums that moved with their column or neighbours · wgmma sums that are not the
 *           mma.sync chain's · sums that are not finite or are zero
 * Launch    grid any, block 128: a warp has 16 rows, a block 64 rows and 64 tokens       Capture   never captured
 * Numerics  K ascending in one accumulator (kernels/src/contract.rs); SPLIT makes it two, which must be seen
 * Cost      nothing to speak of
 * Reference the chain itself: every form against mma.m16n8k16 with a token in its own column */
static_assert(WGMMA == 0 || WGMMA == 1, "whether the target has wgmma");

constexpr int TOKENS = 64, K_TILES = 16, GROUPS = TOKENS / 8;
/* Two neighbouring values along K, exponents spread over 11 binades so that the order of sums shows. */
DI u32 values(u32 row, u32 k, u32 salt) {
  u32 bits = 0;
  for (u32 i = 0; i < 2; i++) {
    u32 h = (row * 0x9e3779b9u) ^ ((k + i) * 0x85ebca6bu) ^ (salt * 0xc2b2ae35u);
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    h ^= h >> 16;
    const u32 sign = h & 1, mantissa = (h >> 1) & 127, exponent = 120 + (h >> 8) % 11;
    bits |= (sign << 15 | exponent << 7 | mantissa) << (16 * i);
  }
  return bits;
}
DI u32 weights(u32 row, u32 k) { return values(row, k, 1); }
DI u32 activations(u32 token, u32 k) { return values(token, k, 2); }

#if WGMMA
/* A core matrix is 8 tokens of 8 bf16; those of one K chunk lie together. */
constexpr int CORE_BYTES = WGMMA_CORE_BYTES, CHUNK_BYTES = GROUPS * CORE_BYTES;
#endif

KERNEL void __launch_bounds__(128) chain(u32* found) {
  __shared__ float plain[4][16][8];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 row = blockIdx.x * 64 + warp * 16;
  V4 a[K_TILES];
#pragma unroll
  for (int tile = 0; tile < K_TILES; tile++) {
    const u32 k = tile * 16 + t * 2;
    a[tile].x = weights(row + g, k), a[tile].y = weights(row + g + 8, k);
    a[tile].z = weights(row + g, k + 8), a[tile].w = weights(row + g + 8, k + 8);
  }

#if WGMMA
  __shared__ __align__(128) u32 operand[TOKENS * K_TILES * 16 / 2];
  for (u32 i = threadIdx.x; i < TOKENS * K_TILES * 8; i += 128) {
    const u32 token = i % TOKENS, k = i / TOKENS * 2;
    operand[((k / 8) * CHUNK_BYTES + token / 8 * CORE_BYTES + token % 8 * 16 + k % 8 * 2) / 4] = activations(token, k);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  float wide[32];
#pragma unroll
  for (int i = 0; i < 32; i++) wide[i] = 0.f;
  const u32 base = (u32)__cvta_generic_to_shared(operand);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int tile = 0; tile < K_TILES; tile++) wgmma(wide, a[tile], wgmma_operand(base + tile * 2 * CHUNK_BYTES, CHUNK_BYTES));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif

  u32 compared = 0, moved = 0, other_form = 0, degenerate = 0;
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    float c[4] = {0.f, 0.f, 0.f, 0.f}, second[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int tile = 0; tile < K_TILES; tile++) {
      const u32 k = tile * 16 + t * 2, low = activations(group * 8 + g, k), high = activations(group * 8 + g, k + 8);
      if (SPLIT && tile >= K_TILES / 2) mma(second, a[tile], low, high);
      else mma(c, a[tile], low, high);
    }
    for (int i = 0; i < 4; i++) {
      if (SPLIT) c[i] = c[i] + second[i];
      compared++;
      degenerate += c[i] == 0.f || !(fabsf(c[i]) < 1e30f);
#if WGMMA
      other_form += __float_as_uint(c[i]) != __float_as_uint(wide[group * 4 + i]);
#endif
      plain[warp][g + i / 2 * 8][t * 2 + i % 2] = c[i];
    }
    __syncwarp();
    /* Every token in every other column; half of its neighbours are huge. */
#pragma unroll 1
    for (u32 shift = 1; shift < 8; shift++) {
      float again[4] = {0.f, 0.f, 0.f, 0.f};
      const u32 token = (g + shift) % 8;
      const bool huge = (token ^ shift) & 1;
#pragma unroll
      for (int tile = 0; tile < K_TILES; tile++) {
        const u32 k = tile * 16 + t * 2;
        mma(again, a[tile], huge ? 0x7e807e80u : activations(group * 8 + token, k), huge ? 0x7e807e80u : activations(group * 8 + token, k + 8));
      }
      for (int i = 0; i < 4; i++) {
        const u32 was = (t * 2 + i % 2 + shift) % 8;
        if (!((was ^ shift) & 1)) moved += __float_as_uint(again[i]) != __float_as_uint(plain[warp][g + i / 2 * 8][was]);
      }
    }
    __syncwarp();
  }
  add_counter(found, compared);
  add_counter(found + 1, moved);
  add_counter(found + 2, other_form);
  add_counter(found + 3, degenerate);
}
