// Formats of small blocks, sixteen blocks at a time: their amax values share a vector, so sixteen
// scales are computed at once. A format reads `width` columns of a block and writes `bytes` of
// codes, `scale_bytes` and `second_bytes` (zero points). The float argument is the tensor scale, if
// the format has one.
struct BlockBatch {
  uint8_t data[LANES * 64];
  float scales[LANES];
  uint8_t small[LANES];  // scales, or zero points, of one byte
};

template <int width, bool keep_nan> INLINE vec block_amax(const float* x) {
  ivec amax_bits[LANES];
  UNROLL
  for (int b = 0; b < LANES; ++b) {
    amax_bits[b] = magnitude_bits<keep_nan>(load(x + b * width));
    for (int k = LANES; k < width; k += LANES)
      amax_bits[b] = max_vec(amax_bits[b], magnitude_bits<keep_nan>(load(x + b * width + k)));
  }
  return (vec)reduce_lanes<MaxOp<ivec>>(amax_bits);
}

// The smallest and largest finite value of each block, and `start`; NaN in `high`.
template <int width> INLINE void block_ranges(const float* x, float start, vec* low, vec* high) {
  vec lows[LANES], highs[LANES];
  UNROLL
  for (int b = 0; b < LANES; ++b) {
    lows[b] = broadcast(start), highs[b] = broadcast(-start);
    for (int k = 0; k < width; k += LANES) {
      const vec v = infinity_to_zero(load(x + b * width + k));
      lows[b] = min_vec(v, lows[b]);
      highs[b] = max_vec(v, highs[b]);
    }
  }
  *low = reduce_lanes<MinOp<vec>>(lows);
  *high = reduce_lanes<MaxOp<vec>>(highs);
}

template <class E, int width, bool by_inverse>
INLINE void quantize_blocks_4bit(const float* x, const float* scales, const float* inverses, uint8_t* to) {
  for (int b = 0; b < LANES; ++b) {
    const Divisor by = make_divisor(scales[b], inverses[b], E::max_value);
    for (int k = b * width; k < (b + 1) * width; k += LANES)
      store_nibbles(to + k / 2, E::template code<by_inverse>(divide<by_inverse>(load(x + k), by)));
  }
}
template <class E, int width> INLINE void quantize_4bit(const float* x, vec scale, uint8_t* to) {
  float scales[LANES], inverses[LANES];
  store_vec(scales, scale);
  store_vec(inverses, 1.0f / scale);
  if (can_divide_by_inverse(scale)) quantize_blocks_4bit<E, width, true>(x, scales, inverses, to);
  else quantize_blocks_4bit<E, width, false>(x, scales, inverses, to);
}

template <class E> struct MX {  // scale = 2^(floor(log2 amax) - emax), so division is an exact product
  static constexpr int width = 32, bytes = E::bits * 4, scale_bytes = 1, second_bytes = 0;
  INLINE void quantize_blocks(const float* x, float, BlockBatch& out) {
    const ivec amax = (ivec)block_amax<width, E::bits == 4>(x);
    const ivec exponent = max_vec((amax >> 23) - E::exponent, ivec{}), nan = amax > INFINITY_BITS;
    store_bytes(out.small, (uvec)select(nan, ivec{} + 255, exponent));
    float factors[LANES];
    store_vec(factors, (vec)select(nan, ivec{} + 0x7fc00000, (254 - exponent) << 23));
    for (int b = 0; b < LANES; ++b)
      for (int k = b * width; k < (b + 1) * width; k += LANES) {
        const uvec codes = E::code(load(x + k) * factors[b]);
        if (E::bits == 4) store_nibbles(out.data + k / 2, codes);
        else store_bytes(out.data + k, codes);
      }
  }
};
struct NVFP4 {
  static constexpr int width = 16, bytes = 8, scale_bytes = 1, second_bytes = 0;
  INLINE void quantize_blocks(const float* x, float tensor_scale, BlockBatch& out) {
    const vec amax = block_amax<width, true>(x);
    vec wanted = amax / 6.0f / tensor_scale;
    wanted = pick(wanted < 0x1p-9f, broadcast(0x1p-9f), wanted);
    store_bytes(out.small, E4M3::code(pick(amax == 0.0f, broadcast(1.0f), wanted)));
    quantize_4bit<E2M1, width>(x, load_widened((const f8e4m3*)out.small) * tensor_scale, out.data);
  }
};
template <int columns> struct SignedInt4 {
  static constexpr int width = columns, bytes = columns / 2, scale_bytes = 4, second_bytes = 0;
  INLINE void quantize_blocks(const float* x, float, BlockBatch& out) {
    const vec scale = compute_scales(block_amax<width, true>(x), Int4::max_value);
    store_vec(out.scales, scale);
    quantize_4bit<Int4, width>(x, scale, out.data);
  }
};
template <int columns> struct UnsignedInt4 {
  static constexpr int width = columns, bytes = columns / 2, scale_bytes = 4, second_bytes = 1;
  INLINE void quantize_blocks(const float* x, float, BlockBatch& out) {
    vec low, high;
    block_ranges<width>(x, 0.0f, &low, &high);
    vec scale = high / 15.0f - low / 15.0f;
    scale = pick(scale < MIN_SCALE, broadcast(MIN_SCALE), scale);
    scale = pick((low == 0.0f) & (high == 0.0f), broadcast(1.0f), scale);
    const uvec zero = round_to_int(nan_to_zero(clamp_vec(-low / scale, vec{}, broadcast(15.0f))));
    store_vec(out.scales, scale);
    store_bytes(out.small, zero);
    for (int b = 0; b < LANES; ++b)
      for (int k = b * width; k < (b + 1) * width; k += LANES) {
        const vec step = clamp_vec(nan_to_zero(load(x + k) / out.scales[b]), broadcast(-64.0f), broadcast(64.0f));
        const ivec code = (ivec)round_to_int(step) + (int32_t)out.small[b];
        store_nibbles(out.data + k / 2, (uvec)min_vec(max_vec(code, ivec{}), ivec{} + 15));
      }
  }
};

// GGUF: x is multiplied by the reciprocal of the scale before the scale is rounded to float16.
// Scales are stored in the data; element i is a low nibble and i + 16 a high one.
INLINE void store_f16(uint8_t* to, float x) {
  const uint16_t code = f16_code(x);
  __builtin_memcpy(to, &code, 2);
}
INLINE void store_gguf_nibbles(uint8_t* to, vec first, vec second) {
  const ivec low = __builtin_convertvector(clamp_vec(first, vec{}, broadcast(15.5f)), ivec);
  const ivec high = __builtin_convertvector(clamp_vec(second, vec{}, broadcast(15.5f)), ivec);
  store_bytes(to, (uvec)(low | high << 4));
}
struct GGUF {
  static constexpr int width = 32, scale_bytes = 0, second_bytes = 0;
};
struct Q4_0 : GGUF {  // the first element of largest magnitude becomes -8
  static constexpr int bytes = 18;
  INLINE void quantize_blocks(const float* x, float, BlockBatch& out) {
    const ivec amax = (ivec)block_amax<width, true>(x);
    const ivec lane = EACH_LANE(LANE_INDEX);
    int32_t amax_bits[LANES];
    __builtin_memcpy(amax_bits, &amax, sizeof amax_bits);
    ivec keys[LANES];  // its index, and in the last bit its sign
    for (int b = 0; b < LANES; ++b) {
      keys[b] = ivec{} + 4 * width;
      for (int half = 0; half < 2; ++half) {
        const vec v = infinity_to_zero(load(x + b * width + half * LANES));
        const ivec key = (lane + half * LANES) * 2 + (ivec)((uvec)v >> 31);
        keys[b] = min_vec(keys[b], select((ivec)magnitude(v) == amax_bits[b], key, keys[b]));
      }
    }
    const ivec sign = (reduce_lanes<MinOp<ivec>>(keys) & 1) << 31;
    const vec limit = broadcast(MAX_F16);
    const vec scale = clamp_vec((vec)(amax | sign) / -8.0f, -limit, limit);
    float inverses[LANES];
    store_vec(inverses, reciprocal(scale));
    store_vec(out.scales, scale);
    for (int b = 0; b < LANES; ++b) {
      vec step[2];
      for (int half = 0; half < 2; ++half) {
        step[half] = load(x + b * width + half * LANES) * inverses[b] + 8.5f;
        step[half] = pick(step[half] == step[half], step[half], broadcast(8.0f));
      }
      store_f16(out.data + b * bytes, out.scales[b]);
      store_gguf_nibbles(out.data + b * bytes + 2, step[0], step[1]);
    }
  }
};
struct Q4_1 : GGUF {
  static constexpr int bytes = 20;
  INLINE void quantize_blocks(const float* x, float, BlockBatch& out) {
    vec low, high;
    block_ranges<width>(x, __builtin_inff(), &low, &high);
    vec scale = (high - low) / 15.0f;
    scale = pick(scale > MAX_F16, broadcast(MAX_F16), scale);
    low = pick(high == high, clamp_vec(low, broadcast(-MAX_F16), broadcast(MAX_F16)), high);
    float inverses[LANES], lows[LANES];
    store_vec(inverses, reciprocal(scale));
    store_vec(lows, low);
    store_vec(out.scales, scale);
    for (int b = 0; b < LANES; ++b) {
      vec step[2];
      for (int half = 0; half < 2; ++half)
        step[half] = nan_to_zero((load(x + b * width + half * LANES) - lows[b]) * inverses[b] + 0.5f);
      store_f16(out.data + b * bytes, out.scales[b]);
      store_f16(out.data + b * bytes + 2, lows[b]);
      store_gguf_nibbles(out.data + b * bytes + 4, step[0], step[1]);
    }
  }
};
struct Q8_0 : GGUF {  // rounds half away from zero
  static constexpr int bytes = 34;
  INLINE void quantize_blocks(const float* x, float, BlockBatch& out) {
    vec scale = block_amax<width, true>(x) / 127.0f;
    scale = pick(scale > MAX_F16, broadcast(MAX_F16), scale);
    float inverses[LANES];
    store_vec(inverses, reciprocal(scale));
    store_vec(out.scales, scale);
    for (int b = 0; b < LANES; ++b) {
      store_f16(out.data + b * bytes, out.scales[b]);
      for (int half = 0; half < 2; ++half) {
        const vec scaled = nan_to_zero(load(x + b * width + half * LANES) * inverses[b]);
        const vec step = clamp_vec(scaled, broadcast(-127.0f), broadcast(127.0f));
        const ivec cut = __builtin_convertvector(step, ivec);
        const vec rest = step - __builtin_convertvector(cut, vec);
        const ivec more = __builtin_convertvector(rest + rest, ivec);
        store_bytes(out.data + b * bytes + 2 + half * LANES, (uvec)(cut + more));
      }
    }
  }
};
