// Formats of small blocks, sixteen blocks at a time: their magnitudes meet in one vector, so that scales
// too are made sixteen at a time. A format reads `width` columns a block and writes `bytes` of data, and
// `scale_bytes` and `second_bytes` beside it; the float is the scale of the whole matrix, or nothing.
struct Sixteen {
  uint8_t data[LANES * 64];
  float scales[LANES];
  uint8_t small[LANES];  // scales, or zero points, of one byte
};

template <int width, bool keep_nan> INLINE vec magnitudes(const float* x) {
  ivec most[LANES];
  UNROLL
  for (int b = 0; b < LANES; ++b) {
    most[b] = counted<keep_nan>(load(x + b * width));
    for (int k = LANES; k < width; k += LANES)
      most[b] = larger(most[b], counted<keep_nan>(load(x + b * width + k)));
  }
  return (vec)over_lanes<Larger<ivec>>(most);
}

// The least and the largest finite number of each block, widened to reach `start`; NaN in `high`.
template <int width> INLINE void ranges(const float* x, float start, vec* low, vec* high) {
  vec lows[LANES], highs[LANES];
  UNROLL
  for (int b = 0; b < LANES; ++b) {
    lows[b] = broadcast(start), highs[b] = broadcast(-start);
    for (int k = 0; k < width; k += LANES) {
      const vec v = finite(load(x + b * width + k));
      lows[b] = smaller(v, lows[b]);
      highs[b] = larger(v, highs[b]);
    }
  }
  *low = over_lanes<Smaller<vec>>(lows);
  *high = over_lanes<Larger<vec>>(highs);
}

template <class E, int width, bool product>
INLINE void divide_blocks(const float* x, const float* scales, const float* inverses, uint8_t* to) {
  for (int b = 0; b < LANES; ++b) {
    const Divisor by = divisor_of(scales[b], inverses[b], E::largest);
    for (int k = b * width; k < (b + 1) * width; k += LANES)
      put_pairs(to + k / 2, E::template code<product>(quotient<product>(load(x + k), by)));
  }
}
template <class E, int width> INLINE void divide_nibbles(const float* x, vec scale, uint8_t* to) {
  float scales[LANES], inverses[LANES];
  store_vec(scales, scale);
  store_vec(inverses, 1.0f / scale);
  if (products_are_exact(scale)) divide_blocks<E, width, true>(x, scales, inverses, to);
  else divide_blocks<E, width, false>(x, scales, inverses, to);
}

template <class E> struct MX {  // scale = 2^(floor(log2 amax) - emax), so division is an exact product
  static constexpr int width = 32, bytes = E::bits * 4, scale_bytes = 1, second_bytes = 0;
  INLINE void blocks(const float* x, float, Sixteen& out) {
    const ivec amax = (ivec)magnitudes<width, E::bits == 4>(x);
    const ivec exponent = larger((amax >> 23) - E::exponent, ivec{}), nan = amax > INFINITE;
    put_bytes(out.small, (uvec)select(nan, ivec{} + 255, exponent));
    float factors[LANES];
    store_vec(factors, (vec)select(nan, ivec{} + 0x7fc00000, (254 - exponent) << 23));
    for (int b = 0; b < LANES; ++b)
      for (int k = b * width; k < (b + 1) * width; k += LANES) {
        const uvec codes = E::code(load(x + k) * factors[b]);
        if (E::bits == 4) put_pairs(out.data + k / 2, codes);
        else put_bytes(out.data + k, codes);
      }
  }
};
struct NVFP4 {
  static constexpr int width = 16, bytes = 8, scale_bytes = 1, second_bytes = 0;
  INLINE void blocks(const float* x, float tensor_scale, Sixteen& out) {
    const vec amax = magnitudes<width, true>(x);
    vec wanted = amax / 6.0f / tensor_scale;
    wanted = pick(wanted < 0x1p-9f, broadcast(0x1p-9f), wanted);
    put_bytes(out.small, E4M3::code(pick(amax == 0.0f, broadcast(1.0f), wanted)));
    divide_nibbles<E2M1, width>(x, load_widened((const f8e4m3*)out.small) * tensor_scale, out.data);
  }
};
template <int columns> struct SignedInt4 {
  static constexpr int width = columns, bytes = columns / 2, scale_bytes = 4, second_bytes = 0;
  INLINE void blocks(const float* x, float, Sixteen& out) {
    const vec scale = scales_for(magnitudes<width, true>(x), Int4::largest);
    store_vec(out.scales, scale);
    divide_nibbles<Int4, width>(x, scale, out.data);
  }
};
template <int columns> struct UnsignedInt4 {
  static constexpr int width = columns, bytes = columns / 2, scale_bytes = 4, second_bytes = 1;
  INLINE void blocks(const float* x, float, Sixteen& out) {
    vec low, high;
    ranges<width>(x, 0.0f, &low, &high);
    vec scale = high / 15.0f - low / 15.0f;
    scale = pick(scale < SMALLEST_SCALE, broadcast(SMALLEST_SCALE), scale);
    scale = pick((low == 0.0f) & (high == 0.0f), broadcast(1.0f), scale);
    const uvec zero = whole(number(clamped(-low / scale, vec{}, broadcast(15.0f))));
    store_vec(out.scales, scale);
    put_bytes(out.small, zero);
    for (int b = 0; b < LANES; ++b)
      for (int k = b * width; k < (b + 1) * width; k += LANES) {
        const vec step = clamped(number(load(x + k) / out.scales[b]), broadcast(-64.0f), broadcast(64.0f));
        const ivec code = (ivec)whole(step) + (int32_t)out.small[b];
        put_pairs(out.data + k / 2, (uvec)smaller(larger(code, ivec{}), ivec{} + 15));
      }
  }
};

// GGUF's own rules: x times the reciprocal of the scale before that is rounded to float16. Its scales lie
// in the data; element i is a low nibble and i + 16 a high one.
INLINE void put_f16(uint8_t* to, float x) {
  const uint16_t code = f16_code(x);
  __builtin_memcpy(to, &code, 2);
}
INLINE void put_halves(uint8_t* to, vec first, vec second) {
  const ivec low = __builtin_convertvector(clamped(first, vec{}, broadcast(15.5f)), ivec);
  const ivec high = __builtin_convertvector(clamped(second, vec{}, broadcast(15.5f)), ivec);
  put_bytes(to, (uvec)(low | high << 4));
}
struct GGUF {
  static constexpr int width = 32, scale_bytes = 0, second_bytes = 0;
};
struct Q4_0 : GGUF {  // the first element of largest magnitude becomes -8
  static constexpr int bytes = 18;
  INLINE void blocks(const float* x, float, Sixteen& out) {
    const ivec amax = (ivec)magnitudes<width, true>(x);
    const ivec lane = EACH_LANE(LANE_INDEX);
    int32_t most[LANES];
    __builtin_memcpy(most, &amax, sizeof most);
    ivec keys[LANES];  // its place, and in the last bit its sign
    for (int b = 0; b < LANES; ++b) {
      keys[b] = ivec{} + 4 * width;
      for (int half = 0; half < 2; ++half) {
        const vec v = finite(load(x + b * width + half * LANES));
        const ivec key = (lane + half * LANES) * 2 + (ivec)((uvec)v >> 31);
        keys[b] = smaller(keys[b], select((ivec)magnitude(v) == most[b], key, keys[b]));
      }
    }
    const ivec sign = (over_lanes<Smaller<ivec>>(keys) & 1) << 31;
    const vec limit = broadcast(F16_LARGEST);
    const vec scale = clamped((vec)(amax | sign) / -8.0f, -limit, limit);
    float inverses[LANES];
    store_vec(inverses, reciprocal(scale));
    store_vec(out.scales, scale);
    for (int b = 0; b < LANES; ++b) {
      vec step[2];
      for (int half = 0; half < 2; ++half) {
        step[half] = load(x + b * width + half * LANES) * inverses[b] + 8.5f;
        step[half] = pick(step[half] == step[half], step[half], broadcast(8.0f));
      }
      put_f16(out.data + b * bytes, out.scales[b]);
      put_halves(out.data + b * bytes + 2, step[0], step[1]);
    }
  }
};
struct Q4_1 : GGUF {
  static constexpr int bytes = 20;
  INLINE void blocks(const float* x, float, Sixteen& out) {
    vec low, high;
    ranges<width>(x, __builtin_inff(), &low, &high);
    vec scale = (high - low) / 15.0f;
    scale = pick(scale > F16_LARGEST, broadcast(F16_LARGEST), scale);
    low = pick(high == high, clamped(low, broadcast(-F16_LARGEST), broadcast(F16_LARGEST)), high);
    float inverses[LANES], lows[LANES];
    store_vec(inverses, reciprocal(scale));
    store_vec(lows, low);
    store_vec(out.scales, scale);
    for (int b = 0; b < LANES; ++b) {
      vec step[2];
      for (int half = 0; half < 2; ++half)
        step[half] = number((load(x + b * width + half * LANES) - lows[b]) * inverses[b] + 0.5f);
      put_f16(out.data + b * bytes, out.scales[b]);
      put_f16(out.data + b * bytes + 2, lows[b]);
      put_halves(out.data + b * bytes + 4, step[0], step[1]);
    }
  }
};
struct Q8_0 : GGUF {  // halves away from zero
  static constexpr int bytes = 34;
  INLINE void blocks(const float* x, float, Sixteen& out) {
    vec scale = magnitudes<width, true>(x) / 127.0f;
    scale = pick(scale > F16_LARGEST, broadcast(F16_LARGEST), scale);
    float inverses[LANES];
    store_vec(inverses, reciprocal(scale));
    store_vec(out.scales, scale);
    for (int b = 0; b < LANES; ++b) {
      put_f16(out.data + b * bytes, out.scales[b]);
      for (int half = 0; half < 2; ++half) {
        const vec product = number(load(x + b * width + half * LANES) * inverses[b]);
        const vec step = clamped(product, broadcast(-127.0f), broadcast(127.0f));
        const ivec cut = __builtin_convertvector(step, ivec);
        const vec rest = step - __builtin_convertvector(cut, vec);
        const ivec more = __builtin_convertvector(rest + rest, ivec);
        put_bytes(out.data + b * bytes + 2 + half * LANES, (uvec)(cut + more));
      }
    }
  }
};
