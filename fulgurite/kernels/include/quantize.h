// Sixteen floats to codes by their scale, equal to fulgurite/quant bit for bit.
//
//   code = round(x / scale)
//
// Magnitudes are compared as integers. NaN and infinity don't count. If an element type has no NaN,
// the amax of a block with a NaN is NaN, and so is its scale.
const float MIN_SCALE = 0x1p-126f, MAX_F16 = 65504.0f;
const float ROUND_MAGIC = 12582912.0f;  // added to |x| < 2^22 it rounds to nearest even
const int32_t INFINITY_BITS = 0x7f800000;

INLINE ivec select(ivec mask, ivec a, ivec b) { return mask ? a : b; }
INLINE vec pick(ivec mask, vec a, vec b) { return mask ? a : b; }

// Intrinsics that compilers don't generate.
#ifdef __AVX512DQ__
#define _MM_MALLOC_H_INCLUDED
#define __MM_MALLOC_H
#include <immintrin.h>
const bool HAS_FMA_DIVISION = true;
INLINE vec fma_vec(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vec clamp_vec(vec x, vec low, vec high) {  // NaN stays
  return (vec)_mm512_min_ps((__m512)high, _mm512_max_ps((__m512)low, (__m512)x));
}
INLINE bool any_lane(ivec mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
INLINE int32_t max_lane(ivec v) { return _mm512_reduce_max_epi32((__m512i)v); }
INLINE void store_bytes(uint8_t* to, uvec codes) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)codes));
}
#else
const bool HAS_FMA_DIVISION = false;
INLINE vec fma_vec(vec a, vec b, vec c) { return a * b + c; }
INLINE vec clamp_vec(vec x, vec low, vec high) {
  x = pick(x < low, low, x);
  return pick(x > high, high, x);
}
INLINE bool any_lane(ivec mask) {
  int32_t found = 0;
  for (int l = 0; l < LANES; ++l) found |= mask[l];
  return found != 0;
}
INLINE int32_t max_lane(ivec v) {
  int32_t amax_bits = v[0];
  for (int l = 1; l < LANES; ++l) amax_bits = v[l] > amax_bits ? v[l] : amax_bits;
  return amax_bits;
}
INLINE void store_bytes(uint8_t* to, uvec codes) {
  const u8x16 narrow = __builtin_convertvector(codes, u8x16);
  __builtin_memcpy(to, &narrow, 16);
}
#endif

INLINE vec nan_to_zero(vec x) { return (vec)((ivec)x & (x == x)); }
INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }
INLINE vec infinity_to_zero(vec x) { return (vec)((ivec)x & ((ivec)magnitude(x) != INFINITY_BITS)); }
INLINE vec reciprocal(vec x) { return pick(x == 0.0f, vec{}, 1.0f / x); }
INLINE vec compute_scales(vec amax, float max_value) {
  const vec scale = amax / max_value;
  return pick(amax == 0.0f, broadcast(1.0f), pick(scale < MIN_SCALE, broadcast(MIN_SCALE), scale));
}

// ---- magnitudes --------------------------------------------------------------------------------------

template <bool keep_nan> INLINE ivec magnitude_bits(vec x) {
  const ivec m = (ivec)magnitude(x);
  return m & (keep_nan ? m != INFINITY_BITS : m < INFINITY_BITS);
}
INLINE ivec max_vec(ivec a, ivec b) { return a > b ? a : b; }
INLINE ivec min_vec(ivec a, ivec b) { return a < b ? a : b; }
INLINE vec max_vec(vec a, vec b) { return pick((a > b) | (a != a), a, b); }  // NaN stays
INLINE vec min_vec(vec a, vec b) { return pick(a < b, a, b); }
template <class V> struct MaxOp { INLINE V of(V a, V b) { return max_vec(a, b); } };
template <class V> struct MinOp { INLINE V of(V a, V b) { return min_vec(a, b); } };

template <class F, int step, class V> INLINE V reduce_pair(V a, V b) {
#define LOW(l) (((l) & step ? LANES : 0) + ((l) & ~(2 * step - 1)) + ((l) & (step - 1)))
#define HIGH(l) (LOW(l) + step)
  return F::of(SHUFFLE_LANES(a, b, EACH_LANE(LOW)), SHUFFLE_LANES(a, b, EACH_LANE(HIGH)));
#undef LOW
#undef HIGH
}
// Lane l of the result is F over the lanes of v[l].
template <class F, class V> INLINE V reduce_lanes(V* v) {
  UNROLL
  for (int k = 0; k < 8; ++k) v[k] = reduce_pair<F, 8>(v[k], v[k + 8]);
  UNROLL
  for (int k = 0; k < 4; ++k) v[k] = reduce_pair<F, 4>(v[k], v[k + 4]);
  v[0] = reduce_pair<F, 2>(v[0], v[2]);
  v[1] = reduce_pair<F, 2>(v[1], v[3]);
  return reduce_pair<F, 1>(v[0], v[1]);
}

// The largest magnitudes of n values of a row, lane by lane.
template <bool keep_nan> INLINE ivec row_amax_bits(const float* x, int64_t n, ivec amax_bits) {
  ivec other = {};
  int64_t k = 0;
  for (; k + 2 * LANES <= n; k += 2 * LANES) {
    amax_bits = max_vec(amax_bits, magnitude_bits<keep_nan>(load(x + k)));
    other = max_vec(other, magnitude_bits<keep_nan>(load(x + k + LANES)));
  }
  for (; k < n; k += LANES) {
    float last[LANES] = {};
    __builtin_memcpy(last, x + k, min_i64(LANES, n - k) * 4);
    amax_bits = max_vec(amax_bits, magnitude_bits<keep_nan>(load(last)));
  }
  return max_vec(amax_bits, other);
}

// ---- division ----------------------------------------------------------------------------------------
// x / scale, rounded once. A division takes as long as everything else. So where nothing over- or
// underflows, x is multiplied by the inverse and corrected by the remainder, which gives the same
// value (unless all bits of the divisor are set). x is clamped first, so that no infinity is
// corrected.
INLINE bool can_divide_by_inverse(vec scale) {
  const ivec odd = ~((scale > 0x1p-60f) & (scale < 0x1p100f)) | (((ivec)scale & 0x7fffff) == 0x7fffff);
  return HAS_FMA_DIVISION && !any_lane(odd);
}
struct Divisor { vec scale, inverse, bound; };
INLINE Divisor make_divisor(float scale, float inverse, float max_value) {
  return {broadcast(scale), broadcast(inverse), broadcast(scale * max_value * 1.001f)};
}
template <bool by_inverse> INLINE vec divide(vec x, const Divisor& by) {
  if (!by_inverse) return x / by.scale;
  x = clamp_vec(x, -by.bound, by.bound);
  const vec first = x * by.inverse;
  const vec corrected = fma_vec(fma_vec(-first, by.scale, x), by.inverse, first);
  return (vec)(((ivec)corrected & 0x7fffffff) | ((ivec)x & (int32_t)0x80000000));  // -0 stays
}

// ---- codes -------------------------------------------------------------------------------------------

template <int exponent, int mantissa> INLINE uvec round_to_minifloat(vec m) {  // as narrow_code of numbers.h
  const int shift = 23 - mantissa, bias = (1 << (exponent - 1)) - 1;
  uvec normal = (uvec)m - ((uint32_t)(127 - bias) << 23);
  normal = (normal + ((1u << (shift - 1)) - 1) + ((normal >> shift) & 1u)) >> shift;
  const float anchor = as_float((uint32_t)(127 + 1 - bias - mantissa + 23) << 23);
  const uvec tiny = (uvec)(m + anchor) - bits(anchor);
  return (uvec)select(m < as_float((uint32_t)(128 - bias) << 23), (ivec)tiny, (ivec)normal);
}
template <int exponent_bits, int mantissa, int last_bits, int most_exponent> struct MiniFloat {
  static constexpr float max_value = (2.0f - 2.0f / (1 << last_bits)) * (1 << most_exponent);
  static constexpr int exponent = most_exponent, bits = 1 + exponent_bits + mantissa;
  template <bool bounded = false> INLINE uvec code(vec x) {  // bounded: at most slightly above max_value
    vec m = magnitude(x);
    if (!bounded) m = pick(m > max_value, broadcast(max_value), m);
    const uvec sign = ((uvec)x & 0x80000000u) >> (32 - bits);
    const uvec code = round_to_minifloat<exponent_bits, mantissa>(m) | sign;
    const uvec none = uvec{} + (bits == 8 ? 0x7fu : 0u);
    return (uvec)select(x == x, (ivec)code, (ivec)none);
  }
};
using E4M3 = MiniFloat<4, 3, 3, 8>;   // 448: the last code of its mantissa is NaN
using E5M2 = MiniFloat<5, 2, 3, 15>;  // 57344
using E2M1 = MiniFloat<2, 1, 2, 2>;   // 6
static_assert(E4M3::max_value == 448.0f && E5M2::max_value == 57344.0f && E2M1::max_value == 6.0f, "ends");

INLINE uvec round_to_int(vec x) { return (uvec)(x + ROUND_MAGIC) - bits(ROUND_MAGIC); }
struct Int8 {
  static constexpr float max_value = 127.0f;
  template <bool bounded = false> INLINE uvec code(vec x) {
    return round_to_int(bounded ? nan_to_zero(x) : clamp_vec(nan_to_zero(x), broadcast(-127.0f), broadcast(127.0f)));
  }
};
struct Int4 {
  static constexpr float max_value = 7.5f;
  template <bool = false> INLINE uvec code(vec x) {  // its scale maps the amax between two codes
    return round_to_int(clamp_vec(nan_to_zero(x), broadcast(-8.0f), broadcast(7.0f))) + 8u;
  }
};

INLINE void store_nibbles(uint8_t* to, uvec codes) {  // low nibble first
  typedef uint64_t pairs __attribute__((vector_size(64)));
  typedef uint8_t eight __attribute__((vector_size(8)));
  const pairs both = (pairs)codes;
  const eight narrow = __builtin_convertvector(both | both >> 28, eight);
  __builtin_memcpy(to, &narrow, 8);
}

// n values of one scale to bytes.
template <class E, bool by_inverse>
INLINE void quantize_run(const float* x, int64_t n, const Divisor& by, uint8_t* to) {
  int64_t k = 0;
  for (; k + LANES <= n; k += LANES)
    store_bytes(to + k, E::template code<by_inverse>(divide<by_inverse>(load(x + k), by)));
  if (k < n) {
    float last[LANES] = {};
    uint8_t codes[LANES];
    __builtin_memcpy(last, x + k, (n - k) * 4);
    store_bytes(codes, E::template code<by_inverse>(divide<by_inverse>(load(last), by)));
    __builtin_memcpy(to + k, codes, n - k);
  }
}
