// Sixteen rows at a time with AVX2 in two registers of eight; VNNI where AVX has it.
// The header's allocator would bring in all of the C library's.
#define _MM_MALLOC_H_INCLUDED
#define __MM_MALLOC_H
#include <immintrin.h>

#define INSTRUCTIONS "avx2"
// panels and tokens whose sums fit the registers at once: 8 of 16

struct Bytes { __m256i a, b; };
struct Ints { __m256i a, b; };
struct Floats { __m256 a, b; };

INLINE Bytes load_bytes(const uint8_t* from) {
  return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)(from + 32))};
}
INLINE Bytes byte_table(const uint8_t* sixteen) {
  __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)sixteen));
  return {table, table};
}
INLINE __m256i look_up(__m256i table, __m256i codes) {
  return _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
}
INLINE Bytes low_codes(Bytes table, Bytes packed) {
  return {look_up(table.a, packed.a), look_up(table.b, packed.b)};
}
INLINE Bytes high_codes(Bytes table, Bytes packed) {
  return {look_up(table.a, _mm256_srli_epi16(packed.a, 4)),
          look_up(table.b, _mm256_srli_epi16(packed.b, 4))};
}

INLINE Ints all_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE Floats multiply(Floats a, Floats b) {
  return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)};
}
INLINE Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}

// Products of nibbles fit the 16-bit sums of maddubs; those of whole bytes don't, so even and odd
// bytes are multiplied as 16-bit numbers.
INLINE __m256i dot_nibbles(__m256i sum, __m256i codes, __m256i x) {
  __m256i pairs = _mm256_maddubs_epi16(codes, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE __m256i dot_bytes(__m256i sum, __m256i codes, __m256i x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
  __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255));
  __m256i odd = _mm256_srli_epi16(codes, 8);
  __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
  __m256i x_odd = _mm256_srai_epi16(x, 8);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, x_even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, x_odd));
#endif
}
INLINE Ints dot_bytes(Ints sum, Bytes codes, const int8_t* x) {
  __m256i four = _mm256_set1_epi32(*(const int32_t*)x);
  return {dot_bytes(sum.a, codes.a, four), dot_bytes(sum.b, codes.b, four)};
}
INLINE Ints dot_nibbles(Ints sum, Bytes codes, const int8_t* x) {
  __m256i four = _mm256_set1_epi32(*(const int32_t*)x);
#ifdef __AVXVNNI__
  return {dot_bytes(sum.a, codes.a, four), dot_bytes(sum.b, codes.b, four)};
#else
  return {dot_nibbles(sum.a, codes.a, four), dot_nibbles(sum.b, codes.b, four)};
#endif
}

INLINE Floats load_f32(const float* from) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
INLINE Floats load_f16(const uint16_t* from) {
#ifdef __F16C__
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)))};
#else
  float wide[16];
  for (int i = 0; i < 16; ++i) wide[i] = widen(f16{from[i]});
  return load_f32(wide);
#endif
}
INLINE __m256 widen_bf16(const uint16_t* from) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE Floats load_bf16(const uint16_t* from) { return {widen_bf16(from), widen_bf16(from + 8)}; }
INLINE Floats load_u8(const uint8_t* from) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8))))};
}
INLINE Floats load_i8(const int8_t* from) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8))))};
}
INLINE void store_f32(float* to, Floats x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}

INLINE __m256 look_up(__m256 first, __m256 second, __m256i codes) {
  __m256 low = _mm256_permutevar8x32_ps(first, codes), high = _mm256_permutevar8x32_ps(second, codes);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}
template <int shift> INLINE Floats nibble_value(const float* table, Bytes packed) {
  Floats values = load_f32(table);
  return {look_up(values.a, values.b, _mm256_srli_epi32(packed.a, shift)),
          look_up(values.a, values.b, _mm256_srli_epi32(packed.b, shift))};
}
template <int shift> INLINE __m256 byte_value(__m256i packed, float offset) {
  __m256i code = _mm256_and_si256(_mm256_srli_epi32(packed, shift), _mm256_set1_epi32(255));
  return _mm256_sub_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(offset));
}
template <int shift> INLINE Floats byte_value(Bytes packed, float offset) {
  return {byte_value<shift>(packed.a, offset), byte_value<shift>(packed.b, offset)};
}
template <int shift, int down, uint32_t mask> INLINE __m256 float_bits(__m256i packed) {
  __m256i top = _mm256_slli_epi32(packed, 24 - shift);
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32(top, down), _mm256_set1_epi32((int32_t)mask)));
}
template <int shift, int down, uint32_t mask> INLINE Floats float_bits(Bytes packed) {
  return {float_bits<shift, down, mask>(packed.a), float_bits<shift, down, mask>(packed.b)};
}
