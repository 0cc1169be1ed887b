// sin, cos and tan of a float for every argument: at most 2 ulp, tan 3.5 ulp. Range reduction
// (Payne-Hanek): x = m 2^k with an integer m is m t turns of the circle, where t is the fraction of
// 2^k / (2 pi). The table has 117 bits of t in two parts. A fused multiply-add subtracts whole
// quarters before it rounds.
struct TurnTable {
  double high[256] = {}, low[256] = {};

  // 64 bits of 1 / (2 pi) from bit `position` on
  static constexpr uint64_t digits(int position) {
    const uint64_t words[10] = {0x28be60db, 0x9391054a, 0x7f09d5f4, 0x7d4d3770, 0x36d8a566,
                                0x4f10e410, 0x7f9458ea, 0xf7aef158, 0x6dc91b8e, 0x909374b8};
    uint64_t both = words[position / 32] << 32 | words[position / 32 + 1];
    int rest = position % 32;
    return rest ? both << rest | words[position / 32 + 2] >> (32 - rest) : both;
  }

  constexpr TurnTable() {
    double scale = 0x1p-149;  // of the smallest exponents; 0 and 1 mean the same one
    for (int e = 0; e < 255; ++e) {
      int position = e < 150 ? 0 : e - 150;
      high[e] = (double)(digits(position) >> 11) * 0x1p-53 * scale;
      low[e] = (double)digits(position + 53) * 0x1p-117 * scale;
      if (e >= 1 && e < 150) scale *= 2;
    }
    high[255] = __builtin_nan("");  // infinities and NaN
  }
};
static constexpr TurnTable TURNS;

struct Angle { float rest; int32_t quarter; };  // x = quarter * pi/2 + rest, |rest| <= pi/4

INLINE Angle angle(float x) {
  int32_t code = (int32_t)(bits(x) & 0x7fffffffu), e = code >> 23;
  int32_t whole = (code & 0x7fffff) | (e > 0 ? 0x800000 : 0);
  double m = (double)whole;
  double high = TURNS.high[e];
  double quarter = __builtin_rint(4.0 * m * high);
  double rest = __builtin_fma(m, TURNS.low[e], __builtin_fma(m, high, -0.25 * quarter));
  return {(float)(rest * 6.283185307179586), (int32_t)quarter};
}

INLINE float sin_reduced(float r) {
  float z = r * r;
  float p = __builtin_fmaf(2.71808361e-06f, z, -0.000198393083f);
  p = __builtin_fmaf(p, z, 0.00833332929f);
  p = __builtin_fmaf(p, z, -0.166666667f);
  return __builtin_fmaf(p * z, r, r);
}

INLINE float cos_reduced(float r) {
  float z = r * r;
  float p = __builtin_fmaf(2.44327748e-05f, z, -0.0013887313f);
  p = __builtin_fmaf(p, z, 0.0416666456f);
  p = __builtin_fmaf(p, z, -0.5f);
  return __builtin_fmaf(p, z, 1.0f);
}

// The sine of the angle plus `add` quarters of a turn.
INLINE float shifted_sine(Angle a, int32_t add) {
  uint32_t quarter = (uint32_t)(a.quarter + add), odd = 0u - (quarter & 1u);
  uint32_t y = (bits(cos_reduced(a.rest)) & odd) | (bits(sin_reduced(a.rest)) & ~odd);
  return as_float(y ^ (quarter & 2u) << 30);
}

INLINE float sin(float x) {
  float y = shifted_sine(angle(x), 0);
  return as_float(bits(y) ^ (bits(x) & 0x80000000u));
}
INLINE float cos(float x) { return shifted_sine(angle(x), 1); }
INLINE float tan(float x) {
  Angle a = angle(x);
  float y = shifted_sine(a, 0) / shifted_sine(a, 1);
  return as_float(bits(y) ^ (bits(x) & 0x80000000u));
}
