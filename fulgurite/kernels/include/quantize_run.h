// The loops over blocks: rows of one or several matrices, shared out to threads.
struct Job {
  const char* x;  // [matrices * rows, columns], rows `stride` elements apart
  uint8_t* data;
  void* scales;
  void* second;   // NVFP4: a float32 scale a matrix; int4 with zero points: those
  int64_t matrices, rows, columns, stride;
  int64_t type;   // of x: 0 float, 1 bf16, 2 f16
  int64_t format;
  int64_t given;  // the scales (NVFP4: of the matrix) are there already
  int64_t threads;
  int64_t width;  // columns that share an FP8 scale; 0: the whole matrix
};
// the formats as Python numbers them
enum Coder { FP8_E4M3, FP8_E5M2, INT8_ROWS, FP8_E4M3_TILES, FP8_E5M2_TILES, NV, MX4, MX8_E4M3, MX8_E5M2,
             INT4_32, INT4_64, INT4_128, UINT4_32, UINT4_64, UINT4_128, GGUF_Q4_0, GGUF_Q4_1, GGUF_Q8_0 };

const int64_t TILE = 128;      // rows and columns of an FP8 tile
const int64_t SEGMENT = 2048;  // numbers widened at a time: sixteen of the widest blocks

INLINE float scale_for(float amax, float largest) { return scales_for(broadcast(amax), largest)[0]; }
INLINE int threads_of(const Job& job) {
  return choose_num_threads(job.matrices * job.rows * job.columns, 1 << 15, (int)job.threads);
}

// Up to SEGMENT numbers of a row as floats: where they lie, or in `room`.
INLINE const float* segment(const Job& job, int64_t row, int64_t start, int64_t n, float* room) {
  const int64_t at = row * job.stride + start;
  if (job.type == 0) return (const float*)job.x + at;
  if (job.type == 1) widen_row((const bf16*)job.x + at, n, room);
  else widen_row((const f16*)job.x + at, n, room);
  return room;
}

// Compared as integers, so that NaN, where it counts, is the largest.
template <bool keep_nan>
static ivec row_largest(const Job& job, int64_t row, int64_t start, int64_t n, ivec most) {
  float room[SEGMENT];
  for (int64_t k = 0; k < n; k += SEGMENT) {
    const int64_t part = min_i64(SEGMENT, n - k);
    most = largest_of<keep_nan>(segment(job, row, start + k, part, room), part, most);
  }
  return most;
}
INLINE float as_magnitude(ivec most) { return as_float((uint32_t)top(most)); }

template <class E> static void row_bytes(const Job& job, int64_t row, int64_t start, int64_t n,
                                         const Divisor& by, bool product) {
  float room[SEGMENT];
  for (int64_t k = 0; k < n; k += SEGMENT) {
    const int64_t part = min_i64(SEGMENT, n - k);
    const float* x = segment(job, row, start + k, part, room);
    uint8_t* to = job.data + row * job.columns + start + k;
    if (product) divide_run<E, true>(x, part, by, to);
    else divide_run<E, false>(x, part, by, to);
  }
}

// Formats of small blocks, all whole. What is left of a row after its sixteens is padded with zeros.
template <class F> static void blocks(const Job& job) {
  const int64_t count = job.columns / F::width;
#pragma omp parallel for schedule(static) num_threads(threads_of(job))
  for (int64_t row = 0; row < job.matrices * job.rows; ++row) {
    const float of_matrix = job.format == NV ? ((const float*)job.second)[row / job.rows] : 0.0f;
    float room[SEGMENT], padded[SEGMENT];
    for (int64_t b = 0; b < count; b += LANES) {
      const int64_t n = min_i64(LANES, count - b), at = row * count + b;
      const float* x = segment(job, row, b * F::width, n * F::width, room);
      if (n < LANES) {
        __builtin_memset(padded, 0, LANES * F::width * 4);
        __builtin_memcpy(padded, x, n * F::width * 4);
        x = padded;
      }
      Sixteen out;
      F::blocks(x, of_matrix, out);
      __builtin_memcpy(job.data + at * F::bytes, out.data, n * F::bytes);
      if (F::scale_bytes == 4) __builtin_memcpy((float*)job.scales + at, out.scales, n * 4);
      if (F::scale_bytes == 1) __builtin_memcpy((uint8_t*)job.scales + at, out.small, n);
      if (F::second_bytes == 1) __builtin_memcpy((uint8_t*)job.second + at, out.small, n);
    }
  }
}

// Bytes with a float32 scale a run of `width` columns, whose last may be shorter.
template <class E, bool keep_nan> static void runs(const Job& job, int64_t width) {
  const int64_t count = (job.columns + width - 1) / width;
#pragma omp parallel for schedule(static) num_threads(threads_of(job))
  for (int64_t row = 0; row < job.matrices * job.rows; ++row)
    for (int64_t b = 0; b < count; ++b) {
      const int64_t start = b * width, n = min_i64(width, job.columns - start);
      float& scale = ((float*)job.scales)[row * count + b];
      if (!job.given)
        scale = scale_for(as_magnitude(row_largest<keep_nan>(job, row, start, n, ivec{})), E::largest);
      const Divisor by = divisor_of(scale, 1.0f / scale, E::largest);
      row_bytes<E>(job, row, start, n, by, products_are_exact(by.scale));
    }
}

// The same with a scale a tile of 128 x 128, which stays in the cache between its two readings.
template <class E> static void tiles(const Job& job) {
  const int64_t down = (job.rows + TILE - 1) / TILE, across = (job.columns + TILE - 1) / TILE;
#pragma omp parallel for schedule(static) num_threads(threads_of(job))
  for (int64_t tile = 0; tile < job.matrices * down * across; ++tile) {
    const int64_t matrix = tile / (down * across), place = tile % (down * across);
    const int64_t top = place / across * TILE, start = place % across * TILE;
    const int64_t height = min_i64(TILE, job.rows - top), n = min_i64(TILE, job.columns - start);
    const int64_t first = matrix * job.rows + top;
    float& scale = ((float*)job.scales)[tile];
    if (!job.given) {
      ivec most = {};
      for (int64_t row = first; row < first + height; ++row)
        most = row_largest<false>(job, row, start, n, most);
      scale = scale_for(as_magnitude(most), E::largest);
    }
    const Divisor by = divisor_of(scale, 1.0f / scale, E::largest);
    const bool product = products_are_exact(by.scale);
    for (int64_t row = first; row < first + height; ++row)
      row_bytes<E>(job, row, start, n, by, product);
  }
}

// One float32 scale a matrix, from all of it: scales[matrix] = amax / highest.
static void whole_scales(const Job& job, float* scales, float highest) {
  for (int64_t matrix = 0; matrix < job.matrices; ++matrix) {
    float amax = 0.0f;
#pragma omp parallel for schedule(static) num_threads(threads_of(job)) reduction(max : amax)
    for (int64_t r = 0; r < job.rows; ++r) {
      const ivec most = row_largest<false>(job, matrix * job.rows + r, 0, job.columns, ivec{});
      const float m = as_magnitude(most);
      amax = m > amax ? m : amax;
    }
    scales[matrix] = scale_for(amax, highest);
  }
}

template <class E> static void fp8(const Job& job) {
  if (job.width > 0) return runs<E, false>(job, job.width);
  if (!job.given) whole_scales(job, (float*)job.scales, E::largest);
#pragma omp parallel for schedule(static) num_threads(threads_of(job))
  for (int64_t row = 0; row < job.matrices * job.rows; ++row) {
    const float scale = ((const float*)job.scales)[row / job.rows];
    const Divisor by = divisor_of(scale, 1.0f / scale, E::largest);
    row_bytes<E>(job, row, 0, job.columns, by, products_are_exact(by.scale));
  }
}

static void nvfp4(const Job& job) {
  if (!job.given) whole_scales(job, (float*)job.second, E4M3::largest * E2M1::largest);
  blocks<NVFP4>(job);
}

EXPORT int64_t quantize(const int64_t* a) {
  const Job& job = *(const Job*)a;
  switch (job.format) {
    case FP8_E4M3: fp8<E4M3>(job); break;
    case FP8_E5M2: fp8<E5M2>(job); break;
    case INT8_ROWS: runs<Int8, true>(job, job.columns); break;
    case FP8_E4M3_TILES: tiles<E4M3>(job); break;
    case FP8_E5M2_TILES: tiles<E5M2>(job); break;
    case NV: nvfp4(job); break;
    case MX4: blocks<MX<E2M1>>(job); break;
    case MX8_E4M3: blocks<MX<E4M3>>(job); break;
    case MX8_E5M2: blocks<MX<E5M2>>(job); break;
    case INT4_32: blocks<SignedInt4<32>>(job); break;
    case INT4_64: blocks<SignedInt4<64>>(job); break;
    case INT4_128: blocks<SignedInt4<128>>(job); break;
    case UINT4_32: blocks<UnsignedInt4<32>>(job); break;
    case UINT4_64: blocks<UnsignedInt4<64>>(job); break;
    case UINT4_128: blocks<UnsignedInt4<128>>(job); break;
    case GGUF_Q4_0: blocks<Q4_0>(job); break;
    case GGUF_Q4_1: blocks<Q4_1>(job); break;
    default: blocks<Q8_0>(job);
  }
  return 0;
}
