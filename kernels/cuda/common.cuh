/* common: types, conversions and one wrapper for every PTX instruction that the kernels use.
 * The host puts the contract's constants, this file and the other headers in front of each kernel source; no file includes another.
 *
 * Memory rules (every kernel follows them)
 *   weights      ld_weight*: non-coherent, read once, may be issued before wait_for_predecessor()
 *   activations  ld_act*:    ordered. Never __ldg or const __restrict__: such loads are invariant to the compiler and may be
 *                            hoisted above the wait (seen on H200: wrong bits, only with programmatic edges)
 *   early        ld_early*:  data of two or more nodes back (row slots, positions, block tables, expert choices), read before the wait
 *   fresh        ld_fresh*:  written by other blocks of this launch before an arrival was counted; bypasses L1
 *   handed over  ld_relaxed*: words that other blocks of this launch store while they are polled, each its own arrival (fold.cuh)
 * Programmatic edges: every block waits before its first global write and before its first read of anything but weights and early data. So
 * "my predecessor has finished", known after the wait, is transitive. Most kernels let their successor start only after they have waited:
 * then whatever lies two launches back has finished when the successor starts. An eager kernel lets it start at once, so that it asks for its
 * weights sooner; then early data must be older than the nearest launch that is not eager. Eager are: norm_rows, norm_gemm, gemm_add, norm_gate_up of
 * a dense layer, moe_gate, moe_up (EARLY), moe_down, moe_combine, gqa_prep; mla_prep and mla_uv of one row. Never: fetch, embed, attention, exchange,
 * sample, on which feed's early words lean, and norm_gate_up of shared experts, on which moe_up's early choice leans.
 * Numerics: no fused multiply-add but inside mma; ex2.approx is the only approximate instruction (exp_fast). */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 bf16; /* storage only */

#define DI __device__ __forceinline__
/* So that an untouched maximum loses to every value. */
#define MINUS_INFINITY_BITS 0xff800000u
#define MINUS_INFINITY __uint_as_float(MINUS_INFINITY_BITS)
#define KERNEL extern "C" __global__
#define DYNAMIC_SHARED extern __shared__ __align__(128) u8 dynamic_shared[]

struct __align__(8) V2 { u32 x, y; };
struct __align__(16) V4 { u32 x, y, z, w; };
struct __align__(16) F4 { float x, y, z, w; };

DI int min_of(int a, int b) { return a < b ? a : b; }
DI constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* ---- bf16: round to nearest even ---- */
DI float bf16_float(bf16 value) { return __uint_as_float((u32)value << 16); }
DI float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DI float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DI u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DI bf16 bf16_round(float value) { return (bf16)bf16_pair(value, 0.0f); }

/* ---- loads ---- */
DI V4 ld_weight16(const void* at) {
  V4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
/* A weight that several warps of the block read: kept in L1. */
DI V4 ld_weight16_shared(const void* at) {
  V4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
/* Brings a weight that is read after the wait into the L2 meanwhile, 128 bytes. */
DI void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
DI float ld_weight_f32(const float* at) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(at));
  return v;
}
DI F4 ld_weight_f4(const float* at) {
  F4 v;
  asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
  return v;
}
DI u32 ld_act_u32(const u32* at) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DI float ld_act_f32(const float* at) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}
DI V2 ld_act8(const void* at) {
  V2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}
DI V4 ld_act16(const void* at) {
  V4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
DI F4 ld_act_f4(const float* at) {
  F4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
  return v;
}
DI u32 ld_early_u32(const u32* at) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DI u32 ld_fresh_u32(const u32* at) {
  u32 v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DI V4 ld_fresh16(const void* at) {
  V4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
/* Words that another block of this launch stores, polled; each for itself whole. */
DI u32 ld_relaxed_u32(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DI V2 ld_relaxed8(const void* at) {
  V2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}
DI V4 ld_relaxed16(const void* at) {
  V4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

/* ---- stores ---- */
DI void st_u32(u32* at, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
DI void st_f32(float* at, float v) { asm volatile("st.global.f32 [%0], %1;" ::"l"(at), "f"(v) : "memory"); }
DI void st_bf16(bf16* at, bf16 v) { asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(v) : "memory"); }
DI void st8(void* at, V2 v) { asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory"); }
DI void st16(void* at, V4 v) { asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
DI void st_relaxed8(void* at, V2 v) { asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory"); }
DI void st_f4(float* at, F4 v) { asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory"); }

/* ---- order between kernels, blocks and machines ---- */
/* `rows` is the kernel's own parameter and never ~0: a branch on a value that ptxas does not know keeps it from moving the wait above the
 * weight loads that come before it (it did, in the SASS of every kernel here). */
DI void wait_for_predecessor(u32 rows) {
#if __CUDA_ARCH__ >= 900
  if (rows != 0xffffffffu) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DI void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Both of the above, in the order that the launch asks for: when the successor may start. */
enum Start {
  AT_EXIT = -1,   /* when this kernel's blocks leave: where they fill the GPU, blocks that start earlier crowd on the SMs that are free first */
  AFTER_WAIT = 0, /* once this kernel has waited */
  AT_ONCE = 1,    /* before this kernel's predecessor has finished, to ask for its weights meanwhile (eager) */
  AFTER_LOADS = 2 /* once this kernel has asked for its last weights (let_start_after_loads) */
};
template <int SUCCESSOR> DI void wait_and_let_start(u32 rows) {
  if (SUCCESSOR == AT_ONCE) let_successor_start();
  wait_for_predecessor(rows);
  if (SUCCESSOR == AFTER_WAIT) let_successor_start();
}
template <int SUCCESSOR> DI void let_start_after_loads() {
  if (SUCCESSOR == AFTER_LOADS) let_successor_start();
}
DI void fence_device() { __threadfence(); }
DI u32 count_arrival(u32* counter) { return atomicAdd(counter, 1u); }
DI void add_counter(u32* counter, u32 amount) { atomicAdd(counter, amount); }
DI void or_bits(u32* word, u32 bits) { atomicOr(word, bits); }
/* In shared memory; integers, so the order does not matter. */
DI void add_shared(u32* word, u32 amount) { atomicAdd(word, amount); }
DI void xor_shared(u32* word, u32 bits) { atomicXor(word, bits); }
DI u64 global_time_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
DI u32 ld_system_u32(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DI V4 ld_system16(const void* at) {
  V4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
/* Two pairs of words, each of which is loaded and stored as one whole: who sees a pair's second word has its first. */
DI V4 ld_system_pairs(const void* at) {
  u64 a, b;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
  return V4{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
DI void st_system_pairs(void* at, V4 v) {
  const u64 a = v.x | (u64)v.y << 32, b = v.z | (u64)v.w << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(at), "l"(a), "l"(b) : "memory");
}
DI u32 ld_acquire_system(const u32* at) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DI void st_release_system(u32* at, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
DI void st_release_system64(u64* at, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory"); }

/* ---- clusters: blocks of one launch that reach each other's shared memory (sm_90 and later) ---- */
DI u32 cluster_rank() {
  u32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
/* All threads of all blocks of the cluster arrive, then wait; what was stored before an arrival is seen after the wait. */
DI void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DI void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/* To the same place of block `rank`'s shared memory as `mine` is of this block's. */
DI void st_cluster_f32(float* mine, u32 rank, float v) {
#if __CUDA_ARCH__ >= 900
  u32 theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"((u32)__cvta_generic_to_shared(mine)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(theirs), "f"(v) : "memory");
#endif
}

/* ---- shared memory and the matrix unit ---- */
DI u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
/* 16 bytes from global to shared; the last 16 - `bytes` are zeros, and nothing is read when `bytes` is 0. */
DI void copy_async16(void* shared, const void* global, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}
DI void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DI void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DI V4 ldmatrix4(const void* shared) {
  V4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(shared)) : "memory");
  return v;
}
DI V4 ldmatrix4_transposed(const void* shared) {
  V4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(shared)) : "memory");
  return v;
}
/* A copy of bytes in a row from global to shared memory by the copy engine (sm_90 and later), which no other load of this multiprocessor waits behind.
 * One thread starts it, with a barrier of its own; all may wait for it after a block barrier. */
DI void start_bulk_copy(u64* barrier, void* shared, const void* global, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)), "l"(global), "r"(bytes),
               "r"(shared_address(barrier))
               : "memory");
#endif
}
DI void wait_for_bulk_copy(u64* barrier) {
#if __CUDA_ARCH__ >= 900
  u32 done = 0;
  while (!done)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(shared_address(barrier)) : "memory");
#endif
}
/* One link of an accumulator chain: c[16 rows, 8 columns] += a[16, 16] · b[16, 8]. Lane 4g + t holds c at rows g, g + 8 and columns 2t, 2t + 1. */
DI void mma(float (&c)[4], const V4& a, u32 b_low, u32 b_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b_low), "r"(b_high));
}

/* ---- warps and blocks ---- */
DI float xor_f32(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DI u32 xor_u32(u32 v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DI float from_lane_f32(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
DI u32 from_lane_u32(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
DI u32 ballot(bool v) { return __ballot_sync(0xffffffffu, v); }
DI void sync_warp() { __syncwarp(); }
DI void sync_block() { __syncthreads(); }
/* The balanced tree over lanes 0…31 (neighbours first); every lane gets the same bits, because a + b = b + a. */
DI float warp_tree(float v) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) v = v + xor_f32(v, mask);
  return v;
}
/* warp_tree of each of N values, the same bits with fewer exchanges: while there are several, a lane keeps half of the values that it holds. */
template <int N> DI void warp_trees(float (&v)[N]) {
  const int lane = threadIdx.x % 32;
  if constexpr (N == 8 || N == 4 || N == 2) {
    int mask = 1;
#pragma unroll
    for (int held = N; held > 1; held /= 2, mask *= 2)
#pragma unroll
      for (int i = 0; i < held / 2; i++) {
        const bool odd = lane & mask;
        const float mine = odd ? v[i + held / 2] : v[i], other = odd ? v[i] : v[i + held / 2];
        v[i] = mine + xor_f32(other, mask);
      }
#pragma unroll
    for (; mask < 32; mask *= 2) v[0] = v[0] + xor_f32(v[0], mask);
    const float held = v[0]; /* of value i in the lane whose low bits, read backwards, are i */
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = from_lane_f32(held, N == 8 ? (i & 1) * 4 + (i & 2) + (i >> 2) : N == 4 ? (i & 1) * 2 + (i >> 1) : i);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = warp_tree(v[i]);
  }
}
/* The largest over the lanes, by the integer maximum of bits in the order of their values. */
DI float warp_max(float v) {
  const int bits = __float_as_int(v), largest = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
  return __int_as_float(largest ^ (largest >> 31 & 0x7fffffff));
}

/* ---- functions ---- */
DI float exp2_approx(float v) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
/* exp by ex2.approx; exp_fast(0) is exactly 1. */
DI float exp_fast(float v) { return exp2_approx(v * 1.4426950408889634f); }
DI float silu(float gate) { return gate / (1.0f + exp_fast(-gate)); }
