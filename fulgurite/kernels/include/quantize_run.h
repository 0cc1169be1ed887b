// Quantize rows of one or several matrices, divided among threads.
struct QuantizeArgs {
  const char* x;  // [matrices * rows, columns], rows `stride` elements apart
  uint8_t* data;
  void* scales;
  void* aux;      // NVFP4: tensor scales; asymmetric int4: zero points
  int64_t matrices, rows, columns, stride;
  int64_t type;   // of x: 0 float, 1 bf16, 2 f16
  int64_t format;
  int64_t has_scales;  // the scales (NVFP4: the tensor scales) are static
  int64_t threads;
  int64_t width;  // columns that share an FP8 scale; 0: the whole matrix
};
// FORMAT_CODES of quantize/cpu.py
enum FormatCode { FP8_E4M3, FP8_E5M2, INT8_ROWS, FP8_E4M3_128X128, FP8_E5M2_128X128, NV, MX4, MX8_E4M3, MX8_E5M2,
             INT4_32, INT4_64, INT4_128, UINT4_32, UINT4_64, UINT4_128, GGUF_Q4_0, GGUF_Q4_1, GGUF_Q8_0 };

const int64_t BLOCK_128 = 128;      // rows and columns of a 128x128 block
const int64_t CHUNK_ELEMENTS = 2048;  // values widened at a time: sixteen of the widest blocks

INLINE float compute_scale(float amax, float max_value) { return compute_scales(broadcast(amax), max_value)[0]; }
INLINE int choose_threads(const QuantizeArgs& args) {
  return choose_num_threads(args.matrices * args.rows * args.columns, QUANTIZE_MIN_PARALLEL_WORK, (int)args.threads);
}

// Up to CHUNK_ELEMENTS values of a row as floats: in place, or widened into `scratch`.
INLINE const float* load_chunk(const QuantizeArgs& args, int64_t row, int64_t start, int64_t n, float* scratch) {
  const int64_t at = row * args.stride + start;
  if (args.type == 0) return (const float*)args.x + at;
  if (args.type == 1) widen_row((const bf16*)args.x + at, n, scratch);
  else widen_row((const f16*)args.x + at, n, scratch);
  return scratch;
}

// Compared as integers, so that NaN is the largest if it counts.
template <bool keep_nan>
static ivec row_amax(const QuantizeArgs& args, int64_t row, int64_t start, int64_t n, ivec amax_bits) {
  float scratch[CHUNK_ELEMENTS];
  for (int64_t k = 0; k < n; k += CHUNK_ELEMENTS) {
    const int64_t length = min_i64(CHUNK_ELEMENTS, n - k);
    amax_bits = row_amax_bits<keep_nan>(load_chunk(args, row, start + k, length, scratch), length, amax_bits);
  }
  return amax_bits;
}
INLINE float amax_to_float(ivec amax_bits) { return as_float((uint32_t)max_lane(amax_bits)); }

template <class E> static void quantize_row(const QuantizeArgs& args, int64_t row, int64_t start, int64_t n,
                                         const Divisor& by, bool by_inverse) {
  float scratch[CHUNK_ELEMENTS];
  for (int64_t k = 0; k < n; k += CHUNK_ELEMENTS) {
    const int64_t length = min_i64(CHUNK_ELEMENTS, n - k);
    const float* x = load_chunk(args, row, start + k, length, scratch);
    uint8_t* to = args.data + row * args.columns + start + k;
    if (by_inverse) quantize_run<E, true>(x, length, by, to);
    else quantize_run<E, false>(x, length, by, to);
  }
}

// Formats of small blocks. The last blocks of a row are padded with zeros to sixteen.
template <class F> static void quantize_blocks(const QuantizeArgs& args) {
  const int64_t count = args.columns / F::width;
#pragma omp parallel for schedule(static) num_threads(choose_threads(args))
  for (int64_t row = 0; row < args.matrices * args.rows; ++row) {
    const float of_matrix = args.format == NV ? ((const float*)args.aux)[row / args.rows] : 0.0f;
    float scratch[CHUNK_ELEMENTS], padded[CHUNK_ELEMENTS];
    for (int64_t b = 0; b < count; b += LANES) {
      const int64_t n = min_i64(LANES, count - b), at = row * count + b;
      const float* x = load_chunk(args, row, b * F::width, n * F::width, scratch);
      if (n < LANES) {
        __builtin_memset(padded, 0, LANES * F::width * 4);
        __builtin_memcpy(padded, x, n * F::width * 4);
        x = padded;
      }
      BlockBatch out;
      F::quantize_blocks(x, of_matrix, out);
      __builtin_memcpy(args.data + at * F::bytes, out.data, n * F::bytes);
      if (F::scale_bytes == 4) __builtin_memcpy((float*)args.scales + at, out.scales, n * 4);
      if (F::scale_bytes == 1) __builtin_memcpy((uint8_t*)args.scales + at, out.small, n);
      if (F::second_bytes == 1) __builtin_memcpy((uint8_t*)args.aux + at, out.small, n);
    }
  }
}

// 8-bit codes with a float32 scale for every `width` columns; the last group may be shorter.
template <class E, bool keep_nan> static void quantize_row_groups(const QuantizeArgs& args, int64_t width) {
  const int64_t count = (args.columns + width - 1) / width;
#pragma omp parallel for schedule(static) num_threads(choose_threads(args))
  for (int64_t row = 0; row < args.matrices * args.rows; ++row)
    for (int64_t b = 0; b < count; ++b) {
      const int64_t start = b * width, n = min_i64(width, args.columns - start);
      float& scale = ((float*)args.scales)[row * count + b];
      if (!args.has_scales)
        scale = compute_scale(amax_to_float(row_amax<keep_nan>(args, row, start, n, ivec{})), E::max_value);
      const Divisor by = make_divisor(scale, 1.0f / scale, E::max_value);
      quantize_row<E>(args, row, start, n, by, can_divide_by_inverse(by.scale));
    }
}

// The same with a scale for each 128x128 block, which stays in cache between its two reads.
template <class E> static void quantize_128x128(const QuantizeArgs& args) {
  const int64_t down = (args.rows + BLOCK_128 - 1) / BLOCK_128, across = (args.columns + BLOCK_128 - 1) / BLOCK_128;
#pragma omp parallel for schedule(static) num_threads(choose_threads(args))
  for (int64_t tile = 0; tile < args.matrices * down * across; ++tile) {
    const int64_t matrix = tile / (down * across), place = tile % (down * across);
    const int64_t first_row = place / across * BLOCK_128, start = place % across * BLOCK_128;
    const int64_t height = min_i64(BLOCK_128, args.rows - first_row), n = min_i64(BLOCK_128, args.columns - start);
    const int64_t first = matrix * args.rows + first_row;
    float& scale = ((float*)args.scales)[tile];
    if (!args.has_scales) {
      ivec amax_bits = {};
      for (int64_t row = first; row < first + height; ++row)
        amax_bits = row_amax<false>(args, row, start, n, amax_bits);
      scale = compute_scale(amax_to_float(amax_bits), E::max_value);
    }
    const Divisor by = make_divisor(scale, 1.0f / scale, E::max_value);
    const bool by_inverse = can_divide_by_inverse(by.scale);
    for (int64_t row = first; row < first + height; ++row)
      quantize_row<E>(args, row, start, n, by, by_inverse);
  }
}

// One float32 scale a matrix: scales[matrix] = amax / highest.
static void compute_tensor_scales(const QuantizeArgs& args, float* scales, float highest) {
  for (int64_t matrix = 0; matrix < args.matrices; ++matrix) {
    float amax = 0.0f;
#pragma omp parallel for schedule(static) num_threads(choose_threads(args)) reduction(max : amax)
    for (int64_t r = 0; r < args.rows; ++r) {
      const ivec amax_bits = row_amax<false>(args, matrix * args.rows + r, 0, args.columns, ivec{});
      const float m = amax_to_float(amax_bits);
      amax = m > amax ? m : amax;
    }
    scales[matrix] = compute_scale(amax, highest);
  }
}

template <class E> static void quantize_fp8(const QuantizeArgs& args) {
  if (args.width > 0) return quantize_row_groups<E, false>(args, args.width);
  if (!args.has_scales) compute_tensor_scales(args, (float*)args.scales, E::max_value);
#pragma omp parallel for schedule(static) num_threads(choose_threads(args))
  for (int64_t row = 0; row < args.matrices * args.rows; ++row) {
    const float scale = ((const float*)args.scales)[row / args.rows];
    const Divisor by = make_divisor(scale, 1.0f / scale, E::max_value);
    quantize_row<E>(args, row, 0, args.columns, by, can_divide_by_inverse(by.scale));
  }
}

static void quantize_nvfp4(const QuantizeArgs& args) {
  if (!args.has_scales) compute_tensor_scales(args, (float*)args.aux, E4M3::max_value * E2M1::max_value);
  quantize_blocks<NVFP4>(args);
}

EXPORT int64_t quantize(const int64_t* a) {
  const QuantizeArgs& args = *(const QuantizeArgs*)a;
  switch (args.format) {
    case FP8_E4M3: quantize_fp8<E4M3>(args); break;
    case FP8_E5M2: quantize_fp8<E5M2>(args); break;
    case INT8_ROWS: quantize_row_groups<Int8, true>(args, args.columns); break;
    case FP8_E4M3_128X128: quantize_128x128<E4M3>(args); break;
    case FP8_E5M2_128X128: quantize_128x128<E5M2>(args); break;
    case NV: quantize_nvfp4(args); break;
    case MX4: quantize_blocks<MX<E2M1>>(args); break;
    case MX8_E4M3: quantize_blocks<MX<E4M3>>(args); break;
    case MX8_E5M2: quantize_blocks<MX<E5M2>>(args); break;
    case INT4_32: quantize_blocks<SignedInt4<32>>(args); break;
    case INT4_64: quantize_blocks<SignedInt4<64>>(args); break;
    case INT4_128: quantize_blocks<SignedInt4<128>>(args); break;
    case UINT4_32: quantize_blocks<UnsignedInt4<32>>(args); break;
    case UINT4_64: quantize_blocks<UnsignedInt4<64>>(args); break;
    case UINT4_128: quantize_blocks<UnsignedInt4<128>>(args); break;
    case GGUF_Q4_0: quantize_blocks<Q4_0>(args); break;
    case GGUF_Q4_1: quantize_blocks<Q4_1>(args); break;
    default: quantize_blocks<Q8_0>(args);
  }
  return 0;
}
