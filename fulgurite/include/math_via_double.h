// Less frequent functions of a float, computed in double, each within 1 ulp everywhere: pow, log10,
// sinh, cosh, asinh, acosh, atanh, asin, acos, atan, atan2, hypot. Branch-free, like those of
// math.h.

INLINE uint64_t code(double x) { return __builtin_bit_cast(uint64_t, x); }
INLINE double as_double(uint64_t x) { return __builtin_bit_cast(double, x); }

// log(x) for a normal x, relative error 2^-44: x = m 2^k, log m = 2 artanh((m - 1) / (m + 1))
INLINE double log_wide(double x) {
  int64_t k = (int64_t)(code(x) - 0x3fe6a09e667f3bcdull) >> 52;
  double m = as_double(code(x) - ((uint64_t)k << 52));
  double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = __builtin_fma(1.0 / 15, z, 1.0 / 13);
  p = __builtin_fma(p, z, 1.0 / 11);
  p = __builtin_fma(p, z, 1.0 / 9);
  p = __builtin_fma(p, z, 1.0 / 7);
  p = __builtin_fma(p, z, 1.0 / 5);
  p = __builtin_fma(p, z, 1.0 / 3);
  double y = __builtin_fma((double)k, 0.6931471805599453, 2.0 * __builtin_fma(p * z, s, s));
  return x == 0.0 ? -__builtin_inf() : x == __builtin_inf() ? x : x >= 0.0 ? y : __builtin_nan("");
}

// e^x, relative error 2^-40. The argument is clamped where the result is beyond the range of
// floats.
INLINE double exp_wide(double x) {
  double y = x > 111.0 ? 111.0 : x;
  y = y < -111.0 ? -111.0 : y;
  const double integers = 0x1.8p52;
  double sum = __builtin_fma(y, 1.4426950408889634, integers), n = sum - integers;
  double r = __builtin_fma(n, -0.6931471805599453, y);
  double p = __builtin_fma(2.473291542417613e-05, r, 0.0001991466421028195);
  p = __builtin_fma(p, r, 0.001388915509065361);
  p = __builtin_fma(p, r, 0.008333268783985144);
  p = __builtin_fma(p, r, 0.04166666453652667);
  p = __builtin_fma(p, r, 0.1666666687319341);
  p = __builtin_fma(p, r, 0.5000000000458165);
  p = __builtin_fma(p, r, 0.9999999999830753);
  p = __builtin_fma(p, r, 1.0);
  return as_double(code(p) + (code(sum) << 52));
}

INLINE float log10(float x) { return (float)(log_wide((double)x) * 0.4342944819032518); }

// |a|^b with the sign of a where b is odd; special values as in C's pow.
INLINE float pow(float a, float b) {
  double size = __builtin_fabs((double)a), exponent = (double)b;
  double t = size == 1.0 ? 0.0 : exponent * log_wide(size);
  float y = (float)exp_wide(t);
  y = t != t ? __builtin_nanf("") : y;
  float half = b * 0.5f;
  bool whole = __builtin_truncf(b) == b, odd = whole & (__builtin_truncf(half) != half);
  y = odd & (bits(a) >> 31) ? -y : y;
  y = (a < 0.0f) & (a > -__builtin_inff()) & !whole ? __builtin_nanf("") : y;
  return (b == 0.0f) | (a == 1.0f) ? 1.0f : y;
}

// Below 1/2 by its series, because the difference of exponentials loses digits there.
INLINE float sinh(float x) {
  double a = __builtin_fabs((double)x), e = exp_wide(a), z = a * a;
  double p = __builtin_fma(1.0 / 362880, z, 1.0 / 5040);
  p = __builtin_fma(p, z, 1.0 / 120);
  p = __builtin_fma(p, z, 1.0 / 6);
  double small = __builtin_fma(p * z, a, a), large = 0.5 * (e - 1.0 / e);
  float y = (float)(a < 0.5 ? small : large);
  return __builtin_copysignf(x != x ? x : y, x);
}
INLINE float cosh(float x) {
  double e = exp_wide(__builtin_fabs((double)x));
  return x != x ? x : (float)(0.5 * (e + 1.0 / e));
}

INLINE float asinh(float x) {
  double a = __builtin_fabs((double)x);
  float y = (float)log_wide(a + __builtin_sqrt(__builtin_fma(a, a, 1.0)));
  return __builtin_copysignf(a < 0x1p-14 ? __builtin_fabsf(x) : y, x);
}
INLINE float acosh(float x) {
  double a = (double)x;
  float y = (float)log_wide(a + __builtin_sqrt((a - 1.0) * (a + 1.0)));
  return x >= 1.0f ? y : __builtin_nanf("");
}
INLINE float atanh(float x) {
  double a = __builtin_fabs((double)x);
  float y = (float)(0.5 * log_wide((1.0 + a) / (1.0 - a)));
  return __builtin_copysignf(a < 0x1p-14 ? __builtin_fabsf(x) : y, x);
}

// The angle of (x, y), by the quotient of the smaller and the larger coordinate.
INLINE double angle_wide(double y, double x) {
  double up = __builtin_fabs(y), along = __builtin_fabs(x);
  bool steep = up > along;
  double low = steep ? along : up, high = steep ? up : along;
  double q = low == high ? (low == 0.0 ? 0.0 : 1.0) : low / high, z = q * q;
  double p = __builtin_fma(0.001113790715266453, z, -0.00731796601310673);
  p = __builtin_fma(p, z, 0.02253988643691094);
  p = __builtin_fma(p, z, -0.04468996349578684);
  p = __builtin_fma(p, z, 0.06741598594711903);
  p = __builtin_fma(p, z, -0.08811091967230274);
  p = __builtin_fma(p, z, 0.1105822382605041);
  p = __builtin_fma(p, z, -0.1427983307124127);
  p = __builtin_fma(p, z, 0.1999967112419911);
  p = __builtin_fma(p, z, -0.3333332689957763);
  double r = __builtin_fma(p * z, q, q);
  r = steep ? 1.5707963267948966 - r : r;
  r = code(x) >> 63 ? 3.141592653589793 - r : r;
  r = (x != x) | (y != y) ? __builtin_nan("") : r;
  return __builtin_copysign(r, y);
}

INLINE float atan2(float y, float x) { return (float)angle_wide((double)y, (double)x); }
INLINE float atan(float x) { return (float)angle_wide((double)x, 1.0); }
INLINE float asin(float x) {
  double a = (double)x;
  return (float)angle_wide(a, __builtin_sqrt((1.0 - a) * (1.0 + a)));
}
INLINE float acos(float x) {
  double a = (double)x;
  return (float)angle_wide(__builtin_sqrt((1.0 - a) * (1.0 + a)), a);
}

INLINE float hypot(float a, float b) {
  double y = (double)a * a + (double)b * b;
  bool infinite = (__builtin_fabsf(a) == __builtin_inff()) | (__builtin_fabsf(b) == __builtin_inff());
  return infinite ? __builtin_inff() : (float)__builtin_sqrt(y);
}
