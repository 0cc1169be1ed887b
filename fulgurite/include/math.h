// Functions of a float, branch-free, so that loops over them become SIMD. Largest errors in ulp
// over the whole range, as measured by the tests:
//   exp 1   exp2 1   expm1 2   log 1.5   log2 2   log1p 2   tanh 2.5   sigmoid 2.5   erf 2
// NaN gives NaN; infinities, zeros and subnormal numbers give the limit. See also `trigonometry.h`
// and `math_via_double.h`. Functions of a double, erfc and lgamma are those of the C library.

INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE float floor(float x) { return __builtin_floorf(x); }
INLINE float ceil(float x) { return __builtin_ceilf(x); }
INLINE float trunc(float x) { return __builtin_truncf(x); }
INLINE float round_even(float x) { return __builtin_rintf(x); }
INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
INLINE float copysign(float a, float b) { return __builtin_copysignf(a, b); }
INLINE bool signbit(float x) { return bits(x) >> 31; }

// e^r for |r| <= log(2)/2
INLINE float exp_reduced(float r) {
  float p = fma(0.00138144326f, r, 0.00836879674f);
  p = fma(p, r, 0.0416683958f);
  p = fma(p, r, 0.1666652f);
  p = fma(p, r, 0.499999934f);
  p = fma(p, r, 1.0f);
  return fma(p, r, 1.0f);
}

// Adding a number to this rounds it to an integer: the last bits of the sum are that integer + 254.
const float INTEGERS = 12582912.0f + 254.0f;

// 2^n p for such a sum of n, in two factors, so that subnormal results are right.
INLINE float times_power(float p, int32_t sum) {
  uint32_t half = (uint32_t)sum >> 1;
  return p * as_float(half << 23) * as_float(((uint32_t)sum - half) << 23);
}

// Clamps such a sum to n <= 130. As integers, because a minimum of floats costs twice as much in
// SIMD.
INLINE int32_t clamp_to_130(float sum) {
  const int32_t limit = __builtin_bit_cast(int32_t, INTEGERS + 130.0f), u = (int32_t)bits(sum);
  return u < limit ? u : limit;
}

// e^x = 2^n e^r with |r| <= log(2)/2
INLINE float exp(float x) {
  float y = x < -104.0f ? -104.0f : x;
  int32_t sum = clamp_to_130(fma(y, 1.44269504f, INTEGERS));
  float n = as_float((uint32_t)sum) - INTEGERS;
  float r = fma(n, -0.693145752f, y);
  r = fma(n, -1.42860677e-06f, r);
  return times_power(exp_reduced(r), sum);
}

INLINE float exp2(float x) {
  float y = x < -151.0f ? -151.0f : x;
  int32_t sum = clamp_to_130(y + INTEGERS);
  float n = as_float((uint32_t)sum) - INTEGERS;
  return times_power(exp_reduced((y - n) * 0.693147182f), sum);
}

// e^r - 1 - r for |r| <= 0.52, divided by r^2
INLINE float exp_tail(float r) {
  float p = fma(2.49510474e-05f, r, 0.00019972084f);
  p = fma(p, r, 0.00138886361f);
  p = fma(p, r, 0.00833315629f);
  p = fma(p, r, 0.041666668f);
  p = fma(p, r, 0.166666673f);
  return fma(p, r, 0.5f);
}

INLINE float expm1(float x) {
  float small = fma(x * x, exp_tail(x), x);
  float large = exp(x) - 1.0f;
  float y = __builtin_fabsf(x) < 0.5f ? small : large;
  return x == 0.0f ? x : y;
}

// log(1 + f) - f for sqrt(1/2) <= 1 + f <= sqrt(2)
INLINE float log_tail(float f) {
  float p = fma(0.0714975389f, f, -0.115712007f);
  p = fma(p, f, 0.116615111f);
  p = fma(p, f, -0.124110507f);
  p = fma(p, f, 0.142499365f);
  p = fma(p, f, -0.166684802f);
  p = fma(p, f, 0.200007075f);
  p = fma(p, f, -0.24999989f);
  p = fma(p, f, 0.333333312f);
  float z = f * f;
  return fma(p * f, z, -0.5f * z);
}

struct split_float { float fraction, exponent; };

// x = (1 + fraction) * 2^exponent, also for subnormal x.
INLINE split_float split(float x) {
  bool tiny = x < 1.17549435e-38f;
  uint32_t u = bits(tiny ? x * 8388608.0f : x);
  int32_t e = (int32_t)(u - 0x3f3504f3u) >> 23;
  float m = as_float(u - ((uint32_t)e << 23));
  return {m - 1.0f, (float)(tiny ? e - 23 : e)};
}

// Logarithms of zero, infinity, NaN and negative numbers.
INLINE float log_limits(float x, float y) {
  y = x == __builtin_inff() ? x : y;
  y = x == 0.0f ? -__builtin_inff() : y;
  return x < 0.0f ? __builtin_nanf("") : x != x ? x : y;
}

INLINE float log(float x) {
  split_float s = split(x);
  float y = fma(s.exponent, -2.12194440e-4f, log_tail(s.fraction)) + s.fraction;
  return log_limits(x, fma(s.exponent, 0.693359375f, y));
}

INLINE float log2(float x) {
  split_float s = split(x);
  float tail = log_tail(s.fraction);
  float y = fma(tail, 1.44269504f, s.fraction * 0.44269504f) + s.fraction;
  return log_limits(x, y + s.exponent);
}

// log(1 + x) = log(u) + (x - (u - 1)) / u with u = 1 + x rounded
INLINE float log1p(float x) {
  float u = 1.0f + x;
  float lost = (x - (u - 1.0f)) / u;
  float y = log(u) + (u == __builtin_inff() ? 0.0f : lost);
  y = u == 0.0f ? -__builtin_inff() : y;
  return __builtin_fabsf(x) < 1e-8f ? x : y;
}

INLINE float sigmoid(float x) {
  float e = exp(-__builtin_fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// (e^2x - 1) / (e^2x + 1); 1 from 9.02 on.
INLINE float tanh(float x) {
  float a = __builtin_fabsf(x);
  float y = a > 9.02f ? 18.04f : a + a;
  float sum = fma(y, 1.44269504f, INTEGERS - 127.0f);
  float n = sum - (INTEGERS - 127.0f);
  float r = fma(n, -0.693145752f, y);
  r = fma(n, -1.42860677e-06f, r);
  float power = as_float(bits(sum) << 23);
  float e = fma(fma(r * r, exp_tail(r), r), power, power - 1.0f);
  return __builtin_copysignf(e / (e + 2.0f), x);
}

// Below 1 an odd polynomial, above it 1 - e^(polynomial of |x|), 1 from 4 on.
INLINE float erf(float x) {
  float a = __builtin_fabsf(x);
  float z = x * x;
  float p = fma(1.05952676e-06f, z, -1.39116975e-05f);
  p = fma(p, z, 0.000119569462f);
  p = fma(p, z, -0.000854267051f);
  p = fma(p, z, 0.005223785f);
  p = fma(p, z, -0.0268661336f);
  p = fma(p, z, 0.112837913f);
  p = fma(p, z, -0.376126389f);
  p = fma(p, z, 0.128379167f);
  float t = a > 4.0f ? 4.0f : a;
  float q = fma(1.59522461e-06f, t, -4.5229348e-05f);
  q = fma(q, t, 0.00058982046f);
  q = fma(q, t, -0.00472686722f);
  q = fma(q, t, 0.026328094f);
  q = fma(q, t, -0.109916087f);
  q = fma(q, t, -0.632000754f);
  q = fma(q, t, -1.13013075f);
  q = fma(q, t, 0.000294660886f);
  float large = __builtin_copysignf(1.0f - exp(q), x);
  return a < 1.0f ? fma(p, x, x) : x != x ? x : large;
}

INLINE float erfc(float x) { return __builtin_erfcf(x); }
INLINE float lgamma(float x) { return __builtin_lgammaf(x); }
INLINE float nextafter(float a, float b) { return __builtin_nextafterf(a, b); }

INLINE double floor(double x) { return __builtin_floor(x); }
INLINE double ceil(double x) { return __builtin_ceil(x); }
INLINE double trunc(double x) { return __builtin_trunc(x); }
INLINE double round_even(double x) { return __builtin_rint(x); }
INLINE double sqrt(double x) { return __builtin_sqrt(x); }
INLINE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
INLINE double copysign(double a, double b) { return __builtin_copysign(a, b); }
INLINE bool signbit(double x) { return __builtin_signbit(x); }
INLINE double exp(double x) { return __builtin_exp(x); }
INLINE double exp2(double x) { return __builtin_exp2(x); }
INLINE double expm1(double x) { return __builtin_expm1(x); }
INLINE double log(double x) { return __builtin_log(x); }
INLINE double log2(double x) { return __builtin_log2(x); }
INLINE double log10(double x) { return __builtin_log10(x); }
INLINE double log1p(double x) { return __builtin_log1p(x); }
INLINE double tanh(double x) { return __builtin_tanh(x); }
INLINE double sigmoid(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }
INLINE double erf(double x) { return __builtin_erf(x); }
INLINE double erfc(double x) { return __builtin_erfc(x); }
INLINE double sin(double x) { return __builtin_sin(x); }
INLINE double cos(double x) { return __builtin_cos(x); }
INLINE double tan(double x) { return __builtin_tan(x); }
INLINE double asin(double x) { return __builtin_asin(x); }
INLINE double acos(double x) { return __builtin_acos(x); }
INLINE double atan(double x) { return __builtin_atan(x); }
INLINE double sinh(double x) { return __builtin_sinh(x); }
INLINE double cosh(double x) { return __builtin_cosh(x); }
INLINE double asinh(double x) { return __builtin_asinh(x); }
INLINE double acosh(double x) { return __builtin_acosh(x); }
INLINE double atanh(double x) { return __builtin_atanh(x); }
INLINE double lgamma(double x) { return __builtin_lgamma(x); }
INLINE double atan2(double a, double b) { return __builtin_atan2(a, b); }
INLINE double hypot(double a, double b) { return __builtin_hypot(a, b); }
INLINE double pow(double a, double b) { return __builtin_pow(a, b); }
INLINE double nextafter(double a, double b) { return __builtin_nextafter(a, b); }

// log(e^a + e^b), for scans.
INLINE double log_add_exp(double a, double b) {
  const double high = nan_max(a, b), low = nan_min(a, b);
  const bool same = (high == low) & (__builtin_fabs(high) == __builtin_inf());
  return same ? high : high + log1p(exp(low - high));
}
