// Sixteen rows at a time with AVX-512 and VNNI: one register holds four codes of each row, one
// 32-bit sum of each row, or one float of each row.
// The header's allocator would bring in all of the C library's.
#define _MM_MALLOC_H_INCLUDED
#define __MM_MALLOC_H
#include <immintrin.h>

#define INSTRUCTIONS "avx512_vnni"
// panels and tokens whose sums fit the registers at once: 24 of 32

typedef __m512i Bytes;
typedef __m512i Ints;
typedef __m512 Floats;

INLINE Bytes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
INLINE Bytes byte_table(const uint8_t* sixteen) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)sixteen));
}
INLINE Bytes low_codes(Bytes table, Bytes packed) {
  return _mm512_shuffle_epi8(table, _mm512_and_si512(packed, _mm512_set1_epi8(15)));
}
INLINE Bytes high_codes(Bytes table, Bytes packed) {
  return low_codes(table, _mm512_srli_epi16(packed, 4));
}

INLINE Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Floats all(float x) { return _mm512_set1_ps(x); }
INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// sum + codes . x of each row: unsigned codes, four signed numbers of x; exact
INLINE Ints dot_bytes(Ints sum, Bytes codes, const int8_t* x) {
  return _mm512_dpbusd_epi32(sum, codes, all_ints(*(const int32_t*)x));
}
INLINE Ints dot_nibbles(Ints sum, Bytes codes, const int8_t* x) { return dot_bytes(sum, codes, x); }

INLINE Floats load_f32(const float* from) { return _mm512_loadu_ps(from); }
INLINE Floats load_f16(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
INLINE Floats load_u8(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
INLINE Floats load_i8(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
INLINE Floats load_bf16(const uint16_t* from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE void store_f32(float* to, Floats x) { _mm512_storeu_ps(to, x); }

// one code of each row as a float: the nibble at bit `shift` through a table of sixteen
template <int shift> INLINE Floats nibble_value(const float* table, Bytes packed) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(packed, shift), load_f32(table));
}
// the byte at bit `shift`, minus an offset
template <int shift> INLINE Floats byte_value(Bytes packed, float offset) {
  __m512i code = _mm512_and_si512(_mm512_srli_epi32(packed, shift), _mm512_set1_epi32(255));
  const Floats value = _mm512_cvtepi32_ps(code);
  return offset == 0.0f ? value : _mm512_sub_ps(value, _mm512_set1_ps(offset));
}
// the byte at bit `shift` as a small float, times a power of two: its exponent lies at bit `down` under
// the sign's
template <int shift, int down, uint32_t mask> INLINE Floats float_bits(Bytes packed) {
  __m512i top = _mm512_slli_epi32(packed, 24 - shift);
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_srai_epi32(top, down), _mm512_set1_epi32((int32_t)mask)));
}

// A block of 32 as q8_0, by the rule of activations.h, which has it in plain C++.
#define QUANTIZE_BLOCK
INLINE __m512 finite_magnitude(__m512 x) {
  const __m512 magnitude = _mm512_abs_ps(x), infinity = _mm512_set1_ps(__builtin_inff());
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(magnitude, infinity, _CMP_LT_OQ), magnitude);
}
INLINE __m512i away_from_zero(__m512 x, __m512 inverse) {
  __m512 step = _mm512_mul_ps(x, inverse);
  step = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(step, step, _CMP_ORD_Q), step);
  step = _mm512_max_ps(_mm512_min_ps(step, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-127.0f));
  const __m512 whole = _mm512_roundscale_ps(step, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(step, whole);
  return _mm512_cvttps_epi32(_mm512_add_ps(whole, _mm512_roundscale_ps(_mm512_add_ps(rest, rest),
                                           _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)));
}
INLINE float quantize_block(const float* from, int8_t* to, int32_t* sums) {
  const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
  const float amax = _mm512_reduce_max_ps(_mm512_max_ps(finite_magnitude(a), finite_magnitude(b)));
  float scale = amax / 127.0f;
  scale = scale > 65504.0f ? 65504.0f : scale;
  const __m512 inverse = _mm512_set1_ps(scale == 0.0f ? 0.0f : 1.0f / scale);
  const __m512i first = away_from_zero(a, inverse), second = away_from_zero(b, inverse);
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(first));
  _mm_storeu_si128((__m128i*)(to + 16), _mm512_cvtepi32_epi8(second));
  sums[0] = _mm512_reduce_add_epi32(first);
  sums[1] = _mm512_reduce_add_epi32(second);
  const bool strange = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q);
  return strange ? __builtin_nanf("") : _cvtsh_ss(_cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT));
}
