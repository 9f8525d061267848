/* wgmma: the warpgroup's matrix instruction with the weight in registers, for the probes that compare it with mma.sync. No step uses it.
 * A lane's four registers are its warp's, as mma.sync has them; the activations lie in shared memory without swizzle, in core matrices. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int WGMMA_CORE_BYTES = 128; /* 8 tokens of 8 bf16 */

/* The operand at a shared address: core matrices of 8 tokens follow one another, chunks of 8 k lie `chunk_bytes` apart. */
DI u64 wgmma_operand(u32 address, u32 chunk_bytes) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(chunk_bytes >> 4) << 16 | (u64)(WGMMA_CORE_BYTES >> 4) << 32;
}
/* d[64 rows, 8 or 64 tokens] += a[64, 16] · operand. */
DI void wgmma(float (&d)[4], const V4& a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
DI void wgmma(float (&d)[32], const V4& a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
        "+f"(d[31])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
#endif
