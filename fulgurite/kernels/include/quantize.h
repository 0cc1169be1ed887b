// Sixteen floats to codes, given their scale, by the rules of fulgurite/quant, bit for bit.
//
// Magnitudes are compared as integers: NaN and infinity never count; where an element type has no NaN,
// the magnitude of a block with one is NaN itself, and so becomes its scale.
const float SMALLEST_SCALE = 0x1p-126f, F16_LARGEST = 65504.0f;
const float ROUND = 12582912.0f;  // added to |x| < 2^22 it rounds to nearest even
const int32_t INFINITE = 0x7f800000;

INLINE ivec select(ivec mask, ivec a, ivec b) { return mask ? a : b; }
INLINE vec pick(ivec mask, vec a, vec b) { return mask ? a : b; }

// What compilers don't find by themselves.
#ifdef __AVX512DQ__
#define _MM_MALLOC_H_INCLUDED
#define __MM_MALLOC_H
#include <immintrin.h>
const bool PRODUCTS = true;
INLINE vec fused(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vec clamped(vec x, vec low, vec high) {  // NaN stays
  return (vec)_mm512_min_ps((__m512)high, _mm512_max_ps((__m512)low, (__m512)x));
}
INLINE bool any(ivec mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
INLINE int32_t top(ivec v) { return _mm512_reduce_max_epi32((__m512i)v); }
INLINE void put_bytes(uint8_t* to, uvec codes) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)codes));
}
#else
const bool PRODUCTS = false;
INLINE vec fused(vec a, vec b, vec c) { return a * b + c; }
INLINE vec clamped(vec x, vec low, vec high) {
  x = pick(x < low, low, x);
  return pick(x > high, high, x);
}
INLINE bool any(ivec mask) {
  int32_t found = 0;
  for (int l = 0; l < LANES; ++l) found |= mask[l];
  return found != 0;
}
INLINE int32_t top(ivec v) {
  int32_t most = v[0];
  for (int l = 1; l < LANES; ++l) most = v[l] > most ? v[l] : most;
  return most;
}
INLINE void put_bytes(uint8_t* to, uvec codes) {
  const u8x16 narrow = __builtin_convertvector(codes, u8x16);
  __builtin_memcpy(to, &narrow, 16);
}
#endif

INLINE vec number(vec x) { return (vec)((ivec)x & (x == x)); }
INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }
INLINE vec finite(vec x) { return (vec)((ivec)x & ((ivec)magnitude(x) != INFINITE)); }
INLINE vec reciprocal(vec x) { return pick(x == 0.0f, vec{}, 1.0f / x); }
INLINE vec scales_for(vec amax, float largest) {
  const vec scale = amax / largest;
  return pick(amax == 0.0f, broadcast(1.0f), pick(scale < SMALLEST_SCALE, broadcast(SMALLEST_SCALE), scale));
}

// ---- magnitudes --------------------------------------------------------------------------------------

template <bool keep_nan> INLINE ivec counted(vec x) {
  const ivec m = (ivec)magnitude(x);
  return m & (keep_nan ? m != INFINITE : m < INFINITE);
}
INLINE ivec larger(ivec a, ivec b) { return a > b ? a : b; }
INLINE ivec smaller(ivec a, ivec b) { return a < b ? a : b; }
INLINE vec larger(vec a, vec b) { return pick((a > b) | (a != a), a, b); }  // NaN stays
INLINE vec smaller(vec a, vec b) { return pick(a < b, a, b); }
template <class V> struct Larger { INLINE V of(V a, V b) { return larger(a, b); } };
template <class V> struct Smaller { INLINE V of(V a, V b) { return smaller(a, b); } };

template <class F, int step, class V> INLINE V meet(V a, V b) {
#define LOW(l) (((l) & step ? LANES : 0) + ((l) & ~(2 * step - 1)) + ((l) & (step - 1)))
#define HIGH(l) (LOW(l) + step)
  return F::of(SHUFFLE_LANES(a, b, EACH_LANE(LOW)), SHUFFLE_LANES(a, b, EACH_LANE(HIGH)));
#undef LOW
#undef HIGH
}
// lane l of the result is F over the lanes of v[l]
template <class F, class V> INLINE V over_lanes(V* v) {
  UNROLL
  for (int k = 0; k < 8; ++k) v[k] = meet<F, 8>(v[k], v[k + 8]);
  UNROLL
  for (int k = 0; k < 4; ++k) v[k] = meet<F, 4>(v[k], v[k + 4]);
  v[0] = meet<F, 2>(v[0], v[2]);
  v[1] = meet<F, 2>(v[1], v[3]);
  return meet<F, 1>(v[0], v[1]);
}

// The largest of n numbers in a row, lane by lane.
template <bool keep_nan> INLINE ivec largest_of(const float* x, int64_t n, ivec most) {
  ivec other = {};
  int64_t k = 0;
  for (; k + 2 * LANES <= n; k += 2 * LANES) {
    most = larger(most, counted<keep_nan>(load(x + k)));
    other = larger(other, counted<keep_nan>(load(x + k + LANES)));
  }
  for (; k < n; k += LANES) {
    float last[LANES] = {};
    __builtin_memcpy(last, x + k, min_i64(LANES, n - k) * 4);
    most = larger(most, counted<keep_nan>(load(last)));
  }
  return larger(most, other);
}

// ---- quotients ---------------------------------------------------------------------------------------
// x / scale, rounded once. A division takes as long as all the rest, so where nothing over- or underflows
// it is a product with the inverse, corrected by its own remainder, which gives the same number (unless
// all bits of the divisor are set). There x saturates before, so that no infinity meets its remainder.
INLINE bool products_are_exact(vec scale) {
  const ivec odd = ~((scale > 0x1p-60f) & (scale < 0x1p100f)) | (((ivec)scale & 0x7fffff) == 0x7fffff);
  return PRODUCTS && !any(odd);
}
struct Divisor { vec scale, inverse, bound; };
INLINE Divisor divisor_of(float scale, float inverse, float largest) {
  return {broadcast(scale), broadcast(inverse), broadcast(scale * largest * 1.001f)};
}
template <bool product> INLINE vec quotient(vec x, const Divisor& by) {
  if (!product) return x / by.scale;
  x = clamped(x, -by.bound, by.bound);
  const vec first = x * by.inverse;
  const vec corrected = fused(fused(-first, by.scale, x), by.inverse, first);
  return (vec)(((ivec)corrected & 0x7fffffff) | ((ivec)x & (int32_t)0x80000000));  // -0 stays
}

// ---- codes -------------------------------------------------------------------------------------------

template <int exponent, int mantissa> INLINE uvec narrowed(vec m) {  // as narrow_code of numbers.h
  const int shift = 23 - mantissa, bias = (1 << (exponent - 1)) - 1;
  uvec normal = (uvec)m - ((uint32_t)(127 - bias) << 23);
  normal = (normal + ((1u << (shift - 1)) - 1) + ((normal >> shift) & 1u)) >> shift;
  const float anchor = as_float((uint32_t)(127 + 1 - bias - mantissa + 23) << 23);
  const uvec tiny = (uvec)(m + anchor) - bits(anchor);
  return (uvec)select(m < as_float((uint32_t)(128 - bias) << 23), (ivec)tiny, (ivec)normal);
}
template <int exponent_bits, int mantissa, int last_bits, int most_exponent> struct SmallFloat {
  static constexpr float largest = (2.0f - 2.0f / (1 << last_bits)) * (1 << most_exponent);
  static constexpr int exponent = most_exponent, bits = 1 + exponent_bits + mantissa;
  template <bool bounded = false> INLINE uvec code(vec x) {  // bounded: hardly over the largest
    vec m = magnitude(x);
    if (!bounded) m = pick(m > largest, broadcast(largest), m);
    const uvec sign = ((uvec)x & 0x80000000u) >> (32 - bits);
    const uvec code = narrowed<exponent_bits, mantissa>(m) | sign;
    const uvec none = uvec{} + (bits == 8 ? 0x7fu : 0u);
    return (uvec)select(x == x, (ivec)code, (ivec)none);
  }
};
using E4M3 = SmallFloat<4, 3, 3, 8>;   // 448: the last code of its mantissa is NaN
using E5M2 = SmallFloat<5, 2, 3, 15>;  // 57344
using E2M1 = SmallFloat<2, 1, 2, 2>;   // 6
static_assert(E4M3::largest == 448.0f && E5M2::largest == 57344.0f && E2M1::largest == 6.0f, "ends");

INLINE uvec whole(vec x) { return (uvec)(x + ROUND) - bits(ROUND); }
struct Int8 {
  static constexpr float largest = 127.0f;
  template <bool bounded = false> INLINE uvec code(vec x) {
    return whole(bounded ? number(x) : clamped(number(x), broadcast(-127.0f), broadcast(127.0f)));
  }
};
struct Int4 {
  static constexpr float largest = 7.5f;
  template <bool = false> INLINE uvec code(vec x) {  // its scale puts the largest between two codes
    return whole(clamped(number(x), broadcast(-8.0f), broadcast(7.0f))) + 8u;
  }
};

INLINE void put_pairs(uint8_t* to, uvec codes) {  // low nibble first
  typedef uint64_t pairs __attribute__((vector_size(64)));
  typedef uint8_t eight __attribute__((vector_size(8)));
  const pairs both = (pairs)codes;
  const eight narrow = __builtin_convertvector(both | both >> 28, eight);
  __builtin_memcpy(to, &narrow, 8);
}

// n numbers of one scale as bytes
template <class E, bool product>
INLINE void divide_run(const float* x, int64_t n, const Divisor& by, uint8_t* to) {
  int64_t k = 0;
  for (; k + LANES <= n; k += LANES)
    put_bytes(to + k, E::template code<product>(quotient<product>(load(x + k), by)));
  if (k < n) {
    float last[LANES] = {};
    uint8_t codes[LANES];
    __builtin_memcpy(last, x + k, (n - k) * 4);
    put_bytes(codes, E::template code<product>(quotient<product>(load(last), by)));
    __builtin_memcpy(to + k, codes, n - k);
  }
}
