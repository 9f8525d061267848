/* combine: the rest of the shard tree, x + (the balanced tree over ranks of part[n] + shared), element by element. Used by moe_combine.cu and, where
 * partials come over peer memory, by exchange.cu. */
template <int RANKS> DI u32 combine_word(u32 old, const u32 (&part)[RANKS], u32 shared) {
  static_assert(RANKS == 1 || RANKS == 2 || RANKS == 4 || RANKS == 8, "the tree needs a power of two");
  float sum[RANKS];
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) sum[rank] = __uint_as_float(part[rank]);
#pragma unroll
  for (int width = RANKS / 2; width > 0; width /= 2)
#pragma unroll
    for (int pair = 0; pair < width; pair++) sum[pair] = sum[2 * pair] + sum[2 * pair + 1];
  return __float_as_uint(__uint_as_float(old) + (sum[0] + __uint_as_float(shared)));
}
template <int RANKS> DI V2 combine_ranks(const V2& old, const V2 (&part)[RANKS], const V2& shared) {
  u32 x[RANKS], y[RANKS];
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) x[rank] = part[rank].x, y[rank] = part[rank].y;
  return V2{combine_word<RANKS>(old.x, x, shared.x), combine_word<RANKS>(old.y, y, shared.y)};
}
template <int RANKS> DI V4 combine_ranks(const V4& old, const V4 (&part)[RANKS], const V4& shared) {
  V2 low[RANKS], high[RANKS];
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) low[rank] = V2{part[rank].x, part[rank].y}, high[rank] = V2{part[rank].z, part[rank].w};
  const V2 a = combine_ranks<RANKS>(V2{old.x, old.y}, low, V2{shared.x, shared.y});
  const V2 b = combine_ranks<RANKS>(V2{old.z, old.w}, high, V2{shared.z, shared.w});
  return V4{a.x, a.y, b.x, b.y};
}
