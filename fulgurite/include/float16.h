// Blocks of float16 in memory, converted by the instructions of the CPU, which g++ 12 does not use in
// vectorized loops.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__clang__)
typedef float floats_of_16 __attribute__((vector_size(64)));
typedef short halves_of_16 __attribute__((vector_size(32)));

INLINE floats_of_16 widen_16(halves_of_16 row) {
  return __builtin_ia32_vcvtph2ps512_mask(row, floats_of_16{}, 0xffff, 4);
}
INLINE halves_of_16 narrow_16(floats_of_16 row) {
  return __builtin_ia32_vcvtps2ph512_mask(row, 0, halves_of_16{}, 0xffff);
}
INLINE void widen_block(float* to, const f16* from, int64_t count) {
  const short* source = (const short*)from;
  int64_t k = 0;
  for (; k + 16 <= count; k += 16) {
    halves_of_16 row;
    __builtin_memcpy(&row, source + k, sizeof(row));
    const floats_of_16 wide = widen_16(row);
    __builtin_memcpy(to + k, &wide, sizeof(wide));
  }
  if (k < count) store_lanes(to + k, widen_16(load_lanes<halves_of_16>(source + k, count - k)), count - k);
}
INLINE void narrow_block(f16* to, const float* from, int64_t count) {
  short* target = (short*)to;
  int64_t k = 0;
  for (; k + 16 <= count; k += 16) {
    floats_of_16 wide;
    __builtin_memcpy(&wide, from + k, sizeof(wide));
    const halves_of_16 row = narrow_16(wide);
    __builtin_memcpy(target + k, &row, sizeof(row));
  }
  if (k < count) store_lanes(target + k, narrow_16(load_lanes<floats_of_16>(from + k, count - k)), count - k);
}
#else
INLINE void widen_block(float* to, const f16* from, int64_t count) {
  for (int64_t k = 0; k < count; ++k) to[k] = widen(from[k]);
}
INLINE void narrow_block(f16* to, const float* from, int64_t count) {
  for (int64_t k = 0; k < count; ++k) store(to + k, from[k]);
}
#endif
