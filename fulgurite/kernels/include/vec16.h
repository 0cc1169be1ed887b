// SIMD vectors of sixteen floats, in the vector extensions of GCC and Clang: any instruction set. Multiply-adds
// are contracted to FMAs here where the CPU has them, in every tile (see GCC_FLAGS of native.py). Generated kernels don't allow that, nor do kernels that define ROUND_EACH_STEP.

#if defined(ROUND_EACH_STEP)
#elif defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

const int LANES = 16;
// loops over arrays of vectors must be unrolled, or the arrays would be in memory, not registers
#define UNROLL _Pragma("GCC unroll 16")

INLINE vec broadcast(float x) { return vec{} + x; }
INLINE vec load(const float* from) { vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store_vec(float* to, vec v) { __builtin_memcpy(to, &v, sizeof v); }
INLINE vec blend(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
INLINE vec vec_max(vec a, vec b) { return blend(a > b, a, b); }

// ---- sixteen numbers of any storage type as floats ---------------------------------------------------

// Narrow floats: an exact multiplication moves the exponent, which also makes subnormal numbers right.
INLINE vec widen_bits(uvec magnitude, uvec sign, float factor, uvec special) {
  uvec value = (uvec)((vec)magnitude * broadcast(factor));
  return (vec)(value | special | sign);
}
INLINE vec load_widened(const float* from) { return load(from); }
INLINE vec load_widened(const bf16* from) {
  u16x16 code;
  __builtin_memcpy(&code, from, sizeof code);
  return (vec)(__builtin_convertvector(code, uvec) << 16);
}
INLINE vec half_to_float(uvec code) {
  uvec magnitude = code & 0x7fffu;
  uvec special = (uvec)(magnitude >= 0x7c00u) & 0x7f800000u;
  return widen_bits(magnitude << 13, (code & 0x8000u) << 16, 0x1p112f, special);
}
INLINE vec load_widened(const f16* from) {
  u16x16 code;
  __builtin_memcpy(&code, from, sizeof code);
  return half_to_float(__builtin_convertvector(code, uvec));
}
// by way of 16 bits: GCC 12 converts bytes to 32 bits one by one
INLINE uvec load_u8(const void* from) {
  u8x16 code;
  __builtin_memcpy(&code, from, sizeof code);
  return __builtin_convertvector(__builtin_convertvector(code, u16x16), uvec);
}
INLINE vec load_widened(const f8e5m2* from) { return half_to_float(load_u8(from) << 8); }
INLINE vec load_widened(const f8e4m3* from) {
  uvec code = load_u8(from);
  uvec magnitude = code & 0x7fu;
  uvec special = (uvec)(magnitude == 0x7fu) & 0x7fc00000u;
  return widen_bits(magnitude << 20, (code & 0x80u) << 24, 0x1p120f, special);
}

// `count` numbers as floats, padded with zeros to the next multiple of sixteen
template <class T> INLINE void widen_row(const T* from, int64_t count, float* to) {
  int64_t c = 0;
  for (; c + LANES <= count; c += LANES) store_vec(to + c, load_widened(from + c));
  if (c < count) {
    T last[LANES] = {};
    for (int64_t l = c; l < count; ++l) last[l - c] = from[l];
    store_vec(to + c, load_widened(last));
  }
}

// ---- functions of a vector ---------------------------------------------------------------------------

INLINE vec vector_exp(vec x) {  // 2 ulp for x <= 88; below -87 it is 0
  vec y = blend(x < -87.0f, broadcast(-87.0f), x);
  y = blend(y > 88.0f, broadcast(88.0f), y);
  const float shift = 12582912.0f;
  vec n = (y * 1.44269504f + shift) - shift;
  vec r = n * -0.693145752f + y;
  r = n * -1.42860677e-06f + r;
  vec p = r * 2.49510474e-05f + 0.00019972084f;
  p = p * r + 0.00138886361f;
  p = p * r + 0.00833315629f;
  p = p * r + 0.041666668f;
  p = p * r + 0.166666673f;
  p = p * r + 0.5f;
  p = r * r * p + r + 1.0f;
  ivec whole = __builtin_convertvector(n, ivec);
  vec result = (vec)((ivec)p + (whole << 23));
  result = blend(x < -87.0f, vec{}, result);
  return blend(x != x, x, result);
}

INLINE vec vector_tanh(vec x) {
  vec a = (vec)((ivec)x & 0x7fffffff);
  vec z = x * x;
  vec p = z * 0.00224931645f + -0.00830510065f;
  p = p * z + 0.0217569269f;
  p = p * z + -0.0539577757f;
  p = p * z + 0.133332973f;
  p = p * z + -0.333333331f;
  vec small = p * z * x + x;
  vec large = 1.0f - 2.0f / (vector_exp(a + a) + 1.0f);
  large = (vec)((ivec)large | ((ivec)x & (int32_t)0x80000000));
  return blend(a < 0.63f, small, large);
}

// A vector of f(lane), written out so that it is a constant: a loop would run each time.
#define EACH_LANE(f) \
  ivec{f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#define LANE_INDEX(l) (l)

// adds lanes that are `step` apart, of a and then of b
template <int step> INLINE vec add_halves(vec a, vec b) {
#define LOW(l) (((l) & step ? LANES : 0) + ((l) & ~(2 * step - 1)) + ((l) & (step - 1)))
#define HIGH(l) (LOW(l) + step)
  return SHUFFLE_LANES(a, b, EACH_LANE(LOW)) + SHUFFLE_LANES(a, b, EACH_LANE(HIGH));
#undef LOW
#undef HIGH
}
template <int step> INLINE void exchange_halves(vec* row) {
#define LOW(l) ((l) & step ? LANES + (l) - step : (l))
#define HIGH(l) ((l) & step ? LANES + (l) : (l) + step)
  UNROLL
  for (int k = 0; k < LANES; ++k) {
    if (k & step) continue;
    vec a = SHUFFLE_LANES(row[k], row[k + step], EACH_LANE(LOW));
    row[k + step] = SHUFFLE_LANES(row[k], row[k + step], EACH_LANE(HIGH));
    row[k] = a;
  }
#undef LOW
#undef HIGH
}
INLINE void transpose_16x16(vec* row) {
  exchange_halves<8>(row);
  exchange_halves<4>(row);
  exchange_halves<2>(row);
  exchange_halves<1>(row);
}

// lane l of the result is the sum of all lanes of v[l]
INLINE vec row_sums(vec* v) {
  UNROLL
  for (int k = 0; k < 8; ++k) v[k] = add_halves<8>(v[k], v[k + 8]);
  UNROLL
  for (int k = 0; k < 4; ++k) v[k] = add_halves<4>(v[k], v[k + 4]);
  v[0] = add_halves<2>(v[0], v[2]);
  v[1] = add_halves<2>(v[1], v[3]);
  return add_halves<1>(v[0], v[1]);
}

template <int step> INLINE vec xor_lanes(vec v) {
#define PARTNER(l) ((l) ^ step)
  return SHUFFLE_LANES(v, v, EACH_LANE(PARTNER));
#undef PARTNER
}
INLINE float lane_sum(vec v) {
  v += xor_lanes<8>(v);
  v += xor_lanes<4>(v);
  v += xor_lanes<2>(v);
  v += xor_lanes<1>(v);
  return v[0];
}
INLINE float lane_max(vec v) {
  v = vec_max(v, xor_lanes<8>(v));
  v = vec_max(v, xor_lanes<4>(v));
  v = vec_max(v, xor_lanes<2>(v));
  v = vec_max(v, xor_lanes<1>(v));
  return v[0];
}
