// Number formats and conversions, minima and maxima, integer arithmetic: shared by all CPU kernels.
// Plain C++ without system headers. Functions are branch-free, so that loops over them become SIMD.
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
static_assert(sizeof(int64_t) == 8 && sizeof(int32_t) == 4, "an LP64 machine");

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define SPECIAL inline __attribute__((always_inline))

#ifdef _OPENMP
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
#else
inline int omp_get_thread_num() { return 0; }
inline int omp_get_num_threads() { return 1; }
#endif

// Shuffles the lanes of a and b: indices from `count` on select lanes of b. A constant order
// becomes one instruction.
#ifdef __clang__
template <class V, class O> INLINE V SHUFFLE_LANES(V a, V b, O order) {
  V result;
  const int count = sizeof(O) / sizeof(order[0]);
  for (int l = 0; l < count; ++l) {
    const int from = (int)order[l];
    result[l] = from < count ? a[from] : b[from - count];
  }
  return result;
}
#else
#define SHUFFLE_LANES __builtin_shuffle
#endif

INLINE uint32_t bits(float x) { return __builtin_bit_cast(uint32_t, x); }
INLINE float as_float(uint32_t x) { return __builtin_bit_cast(float, x); }

// Storage types: narrow in memory, computed in float.
struct bf16 { uint16_t code; };
struct f16 { uint16_t code; };
struct f8e4m3 { uint8_t code; };
struct f8e5m2 { uint8_t code; };
struct f8e4m3z { uint8_t code; };
struct f8e5m2z { uint8_t code; };
struct f8e8m0 { uint8_t code; };

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) { return as_float((uint32_t)x.code << 16); }

// Rounds to nearest even; NaN stays NaN.
INLINE uint16_t bf16_code(float x) {
  uint32_t u = bits(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)(x != x ? 0x7fc0u : rounded);
}

// Widens a small float with `exponent` and `mantissa` bits: normal numbers by moving the exponent,
// subnormal ones by an exact product with the smallest step.
template <int exponent, int mantissa, int bias = (1 << (exponent - 1)) - 1>
INLINE float widen_code(uint32_t code) {
  const int shift = 23 - mantissa;
  uint32_t sign = (code >> (exponent + mantissa)) << 31;
  uint32_t magnitude = code & ((1u << (exponent + mantissa)) - 1);
  float normal = as_float((magnitude << shift) + ((uint32_t)(127 - bias) << 23));
  float tiny = (float)(int32_t)magnitude * as_float((uint32_t)(127 + 1 - bias - mantissa) << 23);
  float value = magnitude < (1u << mantissa) ? tiny : normal;
  return as_float(bits(value) | sign);
}

// Rounds a float to such a format, to nearest even, subnormals too. The caller handles overflow.
template <int exponent, int mantissa, int bias = (1 << (exponent - 1)) - 1>
INLINE uint32_t narrow_code(float magnitude) {
  const int shift = 23 - mantissa;
  uint32_t u = bits(magnitude);
  uint32_t normal = u - ((uint32_t)(127 - bias) << 23);
  normal = (normal + ((1u << (shift - 1)) - 1) + ((normal >> shift) & 1u)) >> shift;
  // adding a number whose last bit is the smallest step rounds to a multiple of that step
  const float anchor = as_float((uint32_t)(127 + 1 - bias - mantissa + 23) << 23);
  uint32_t tiny = bits(magnitude + anchor) - bits(anchor);
  return magnitude < as_float((uint32_t)(128 - bias) << 23) ? tiny : normal;
}

INLINE float widen(f16 x) {
  float value = widen_code<5, 10>(x.code);
  uint32_t magnitude = x.code & 0x7fffu;
  uint32_t special = ((uint32_t)(x.code & 0x8000u) << 16) | 0x7f800000u | ((x.code & 0x3ffu) << 13);
  return magnitude >= 0x7c00u ? as_float(special) : value;
}
INLINE uint16_t f16_code(float x) {
  float magnitude = as_float(bits(x) & 0x7fffffffu);
  uint32_t code = narrow_code<5, 10>(magnitude);
  code = magnitude >= 65520.0f ? 0x7c00u : code;
  code = x != x ? 0x7e00u : code;
  return (uint16_t)(code | ((bits(x) >> 16) & 0x8000u));
}

// e4m3fn has no infinities, and 0x7f is NaN. Numbers beyond the largest (448) become E4M3_OVERFLOW,
// as in the installed torch: 0x7e (saturates) or 0x7f (NaN).
INLINE float widen(f8e4m3 x) {
  float value = widen_code<4, 3>(x.code);
  return (x.code & 0x7fu) == 0x7fu ? as_float(0x7fc00000u | ((uint32_t)(x.code & 0x80u) << 24)) : value;
}
INLINE uint8_t f8e4m3_code(float x) {
  float magnitude = as_float(bits(x) & 0x7fffffffu);
  uint32_t code = narrow_code<4, 3>(magnitude);
  code = magnitude < 480.0f && code < 0x7fu ? code : E4M3_OVERFLOW;
  code = x != x ? 0x7fu : code;
  return (uint8_t)(code | ((bits(x) >> 24) & 0x80u));
}

INLINE float widen(f8e5m2 x) {
  float value = widen_code<5, 2>(x.code);
  uint32_t magnitude = x.code & 0x7fu;
  uint32_t special = ((uint32_t)(x.code & 0x80u) << 24) | 0x7f800000u | ((x.code & 3u) << 21);
  return magnitude >= 0x7cu ? as_float(special) : value;
}
INLINE uint8_t f8e5m2_code(float x) {
  float magnitude = as_float(bits(x) & 0x7fffffffu);
  uint32_t code = narrow_code<5, 2>(magnitude);
  code = magnitude >= 61440.0f ? 0x7cu : code;
  code = x != x ? 0x7fu : code;
  return (uint8_t)(code | ((bits(x) >> 24) & 0x80u));
}

// The fnuz formats have neither -0 nor infinities: 0x80 is NaN, and overflow is NaN.
template <int exponent, int mantissa, int bias>
INLINE float widen_unsigned_zero(uint32_t code) {
  float value = widen_code<exponent, mantissa, bias>(code);
  return code == 0x80u ? __builtin_nanf("") : value;
}
template <int exponent, int mantissa, int bias>
INLINE uint8_t unsigned_zero_code(float x, float largest) {
  float magnitude = as_float(bits(x) & 0x7fffffffu);
  uint32_t code = narrow_code<exponent, mantissa, bias>(magnitude);
  code = code == 0 ? 0 : code | ((bits(x) >> 24) & 0x80u);
  return (uint8_t)(magnitude < largest ? code : 0x80u);
}
INLINE float widen(f8e4m3z x) { return widen_unsigned_zero<4, 3, 8>(x.code); }
INLINE float widen(f8e5m2z x) { return widen_unsigned_zero<5, 2, 16>(x.code); }
INLINE uint8_t f8e4m3z_code(float x) { return unsigned_zero_code<4, 3, 8>(x, 248.0f); }
INLINE uint8_t f8e5m2z_code(float x) { return unsigned_zero_code<5, 2, 16>(x, 61440.0f); }

// e8m0 is a power of two without sign; 0xff is NaN; halves round up.
INLINE float widen(f8e8m0 x) {
  float value = x.code == 0 ? as_float(0x00400000u) : as_float((uint32_t)x.code << 23);
  return x.code == 0xffu ? __builtin_nanf("") : value;
}
INLINE uint8_t f8e8m0_code(float x) {
  uint32_t u = bits(x) & 0x7fffffffu;
  uint32_t exponent = u >> 23, rest = u & 0x7fffffu;
  uint32_t up = (rest > 0x400000u) | ((rest == 0x400000u) & (exponent > 0));
  return (uint8_t)(exponent == 0xffu ? 0xffu : exponent + up);
}

INLINE void store(f8e4m3z* to, float x) { to->code = f8e4m3z_code(x); }
INLINE void store(f8e5m2z* to, float x) { to->code = f8e5m2z_code(x); }
INLINE void store(f8e8m0* to, float x) { to->code = f8e8m0_code(x); }
INLINE float round_f8e4m3z(float x) { return widen(f8e4m3z{f8e4m3z_code(x)}); }
INLINE float round_f8e5m2z(float x) { return widen(f8e5m2z{f8e5m2z_code(x)}); }
INLINE float round_f8e8m0(float x) { return widen(f8e8m0{f8e8m0_code(x)}); }

INLINE void store(bf16* to, float x) { to->code = bf16_code(x); }
INLINE void store(f16* to, float x) { to->code = f16_code(x); }
INLINE void store(f8e4m3* to, float x) { to->code = f8e4m3_code(x); }
INLINE void store(f8e5m2* to, float x) { to->code = f8e5m2_code(x); }

// Rounds to a narrow format and back to float.
INLINE float round_bf16(float x) { return widen(bf16{bf16_code(x)}); }
INLINE float round_f16(float x) { return widen(f16{f16_code(x)}); }
INLINE float round_f8e4m3(float x) { return widen(f8e4m3{f8e4m3_code(x)}); }
INLINE float round_f8e5m2(float x) { return widen(f8e5m2{f8e5m2_code(x)}); }

// NaN if either is; of equal numbers (-0 and +0) the second one.
template <class T> INLINE T nan_max(T a, T b) { return (a > b) | (a != a) ? a : b; }
template <class T> INLINE T select(bool condition, T a, T b) { return condition ? a : b; }
template <class T> INLINE T nan_min(T a, T b) { return (a < b) | (a != a) ? a : b; }
// The same for scalars in random order: no branch depends on which one is larger (maxss, minss).
template <class T> INLINE T nan_max_scalar(T a, T b) {
  const T larger = a > b ? a : b;
  return __builtin_expect(a != a, 0) ? a : larger;
}
template <class T> INLINE T nan_min_scalar(T a, T b) {
  const T smaller = a < b ? a : b;
  return __builtin_expect(a != a, 0) ? a : smaller;
}
// The other one if one is NaN (fmax, fmin); of equal numbers the second one.
template <class T> INLINE T number_max(T a, T b) { return (a > b) | (b != b) ? a : b; }
template <class T> INLINE T number_min(T a, T b) { return (a < b) | (b != b) ? a : b; }

template <class T> INLINE T lowest() { return (T)1 << (sizeof(T) * 8 - 1); }
template <> SPECIAL float lowest<float>() { return -__builtin_inff(); }
template <> SPECIAL double lowest<double>() { return -__builtin_inf(); }
template <> SPECIAL bool lowest<bool>() { return false; }
template <> SPECIAL uint8_t lowest<uint8_t>() { return 0; }
template <> SPECIAL uint16_t lowest<uint16_t>() { return 0; }
template <> SPECIAL uint32_t lowest<uint32_t>() { return 0; }
template <> SPECIAL uint64_t lowest<uint64_t>() { return 0; }
template <class T> INLINE T highest() { return (T)~lowest<T>(); }
template <> SPECIAL float highest<float>() { return __builtin_inff(); }
template <> SPECIAL double highest<double>() { return __builtin_inf(); }
template <> SPECIAL bool highest<bool>() { return true; }

#define REDUCTIONS(T) \
  _Pragma(STRING(omp declare reduction(nan_max : T : omp_out = nan_max(omp_out, omp_in)) \
                 initializer(omp_priv = lowest<T>()))) \
  _Pragma(STRING(omp declare reduction(nan_min : T : omp_out = nan_min(omp_out, omp_in)) \
                 initializer(omp_priv = highest<T>())))
#define STRING(...) #__VA_ARGS__
REDUCTIONS(float)
REDUCTIONS(double)
REDUCTIONS(bool)
REDUCTIONS(int8_t)
REDUCTIONS(int16_t)
REDUCTIONS(int32_t)
REDUCTIONS(int64_t)
REDUCTIONS(uint8_t)
REDUCTIONS(uint16_t)
REDUCTIONS(uint32_t)
REDUCTIONS(uint64_t)

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t floor_divide_i64(int64_t a, int64_t b) {
  return a / b - ((a % b != 0) & ((a % b < 0) != (b < 0)));
}
INLINE int64_t floor_mod_i64(int64_t a, int64_t b) {
  int64_t r = a % b;
  return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : 0);
}

// An indirect index. One that is out of range reads element 0 and reports error 1.
INLINE int64_t check_index(int64_t i, int64_t size, int64_t* error) {
  bool out = (i < 0) | (i >= size);
  if (__builtin_expect(out, 0)) *error = 1;
  return out ? 0 : i;
}
// The same; negative indices count from the end.
INLINE int64_t wrap_index(int64_t i, int64_t size, int64_t* error) {
  return check_index(i + (i < 0 ? size : 0), size, error);
}

// Converts a float to an integer. If the result becomes a float again, g++ would use `trunc`, which
// differs from torch for -0, NaN and numbers that no integer holds. A zero that g++ can't know
// prevents that.
EXPORT int64_t opaque_zero;
int64_t opaque_zero = 0;
template <class I, class F> INLINE I to_integer(F x) { return (I)x ^ (I)opaque_zero; }

// The number of threads for this much work: one thread a grain.
INLINE int choose_num_threads(int64_t work, int64_t grain, int max_threads) {
  int64_t wanted = work / grain;
  return wanted < 2 ? 1 : (int)min_i64(wanted, max_threads);
}

template <class T> INLINE T shift_left(T a, T b) {
  bool out = (b < 0) | ((uint64_t)b >= sizeof(T) * 8);
  return out ? (T)0 : (T)((uint64_t)a << (b & (T)63));
}
template <class T> INLINE T shift_right(T a, T b) {
  const T most = (T)(sizeof(T) * 8 - 1);
  bool out = (b < 0) | ((uint64_t)b > (uint64_t)most);
  return (T)(a >> (out ? most : b)) & (((T)-1 > 0) & out ? (T)0 : (T)-1);
}

template <class T> INLINE T sign(T a) { return (T)((a > 0) - (a < 0)); }
INLINE float sign(float a) { return (float)((a > 0) - (a < 0)); }
INLINE double sign(double a) { return (double)((a > 0) - (a < 0)); }
template <class T> INLINE T abs(T a) { return a < 0 ? (T)-a : a; }
INLINE float abs(float a) { return __builtin_fabsf(a); }
INLINE double abs(double a) { return __builtin_fabs(a); }

// The one quotient that overflows is the lowest number divided by -1.
template <class T> INLINE bool by_minus_one(T b) { return ((T)-1 < 0) & (b == (T)-1); }
template <class T> INLINE T truncated_divide(T a, T b) { return by_minus_one(b) ? (T)(0 - (uint64_t)a) : (T)(a / b); }
INLINE float truncated_divide(float a, float b) { return __builtin_truncf(a / b); }
INLINE double truncated_divide(double a, double b) { return __builtin_trunc(a / b); }
template <class T> INLINE T truncated_remainder(T a, T b) { return by_minus_one(b) ? (T)0 : (T)(a % b); }
INLINE float truncated_remainder(float a, float b) { return __builtin_fmodf(a, b); }
INLINE double truncated_remainder(double a, double b) { return __builtin_fmod(a, b); }
template <class T> INLINE T floored_remainder(T a, T b) {
  T r = truncated_remainder(a, b);
  return (r != 0) & ((r < 0) != (b < 0)) ? (T)(r + b) : r;
}
template <class T> INLINE T floored_divide(T a, T b) {
  T q = truncated_divide(a, b);
  T r = truncated_remainder(a, b);
  return (r != 0) & ((r < 0) != (b < 0)) ? (T)(q - 1) : q;
}
INLINE float floored_divide(float a, float b) {
  float r = __builtin_fmodf(a, b);
  float q = (a - r) / b;
  float low = (r != 0) & ((b < 0) != (r < 0)) ? q - 1 : q;
  float f = __builtin_floorf(low);
  f = low - f > 0.5f ? f + 1 : f;
  return b == 0 ? a / b : low != 0 ? f : __builtin_copysignf(0.0f, a / b);
}
INLINE double floored_divide(double a, double b) {
  double r = __builtin_fmod(a, b);
  double q = (a - r) / b;
  double low = (r != 0) & ((b < 0) != (r < 0)) ? q - 1 : q;
  double f = __builtin_floor(low);
  f = low - f > 0.5 ? f + 1 : f;
  return b == 0 ? a / b : low != 0 ? f : __builtin_copysign(0.0, a / b);
}

// Integer powers, wrapping; a negative power of anything but 1 and -1 is 0.
template <class T> INLINE T pow(T a, T b) {
  if (b < 0) return a == 1 ? (T)1 : a == (T)-1 ? (T)(b & 1 ? -1 : 1) : (T)0;
  uint64_t result = 1, factor = (uint64_t)a;
  for (uint64_t left = (uint64_t)b; left; left >>= 1) {
    if (left & 1) result *= factor;
    factor *= factor;
  }
  return (T)result;
}
template <class T> INLINE T int_gcd(T a, T b) {
  a = abs(a), b = abs(b);
  while (a != 0) {
    T rest = truncated_remainder(b, a);
    b = a, a = rest;
  }
  return b;  // as in torch, negative where an argument is the lowest number
}
template <class T> INLINE T int_lcm(T a, T b) {
  T g = int_gcd(a, b);
  if (g == 0) return 0;
  T factor = truncated_divide(a, g);
  if (sizeof(T) < 4) return (T)abs((int32_t)factor * (int32_t)b);
  return abs((T)((uint64_t)factor * (uint64_t)b));
}

// An integer divisor. Zero reports error 2 and becomes 1.
template <class T> INLINE T check_divisor(T b, int64_t* error) {
  if (__builtin_expect(b == 0, 0)) *error = 2;
  return b == 0 ? (T)1 : b;
}

// Word position % 4 of Philox 4x32-10 with the counter position / 4 and the key `seed`.
INLINE uint32_t philox_word(int64_t seed, int64_t position) {
  const uint64_t counter = (uint64_t)position >> 2;
  uint32_t a = (uint32_t)counter, b = (uint32_t)(counter >> 32), c = 0, d = 0;
  uint32_t left = (uint32_t)seed, right = (uint32_t)((uint64_t)seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t x = (uint64_t)a * 0xD2511F53u, y = (uint64_t)c * 0xCD9E8D57u;
    a = (uint32_t)(y >> 32) ^ b ^ left;
    b = (uint32_t)y;
    c = (uint32_t)(x >> 32) ^ d ^ right;
    d = (uint32_t)x;
    left += 0x9E3779B9u;
    right += 0xBB67AE85u;
  }
  const uint32_t low = position & 1 ? b : a, high = position & 1 ? d : c;
  return position & 2 ? high : low;
}
// uniform: 24 bits of a word, in [0, 1); uniform53: 53 bits of two words; random_integer: 63 bits.
INLINE float uniform(int64_t seed, int64_t position) {
  return (float)(int32_t)(philox_word(seed, position) >> 8) * (1.0f / 16777216.0f);
}
INLINE int64_t random_bits(int64_t seed, int64_t position, int upper, int lower) {
  const int64_t high = philox_word(seed, 2 * position) >> (32 - upper);
  return high << lower | philox_word(seed, 2 * position + 1) >> (32 - lower);
}
INLINE double uniform53(int64_t seed, int64_t position) {
  return (double)random_bits(seed, position, 27, 26) * (1.0 / 9007199254740992.0);
}
INLINE int64_t random_integer(int64_t seed, int64_t position) {
  return random_bits(seed, position, 31, 32);
}
