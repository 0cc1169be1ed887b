// Fused elementwise kernels of a transformer layer: RMS norm, RoPE, activation-and-multiply, add.
// Everything is computed in float32 and rounded once to the output dtype.

INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float unpack_double(int64_t bits64) { return (float)__builtin_bit_cast(double, bits64); }
INLINE void store(float* to, float x) { *to = x; }

// load and store of up to sixteen numbers
template <class T> INLINE vec load_partial(const T* from, int64_t count) {
  if (count >= LANES) return load_widened(from);
  T last[LANES] = {};
  for (int64_t l = 0; l < count; ++l) last[l] = from[l];
  return load_widened(last);
}
template <class T> INLINE void store_partial(T* to, vec v, int64_t count) {
  for (int64_t l = 0; l < min_i64(count, LANES); ++l) store(to + l, v[l]);
}
INLINE void store_partial(float* to, vec v, int64_t count) {
  if (count >= LANES) return store_vec(to, v);
  for (int64_t l = 0; l < count; ++l) to[l] = v[l];
}

// One instantiation per dtype code: 0 float, 1 bf16, 2 f16.
#define DISPATCH_DTYPE(dtype, call) \
  switch (dtype) { \
    case 0: call(float); break; \
    case 1: call(bf16); break; \
    default: call(f16); \
  }

// out = x / sqrt(mean(x^2) + eps) * (weight + offset), row by row
template <class T, class W>
static void norm_row(const T* x, const W* weight, T* out, int64_t size, float eps, float offset) {
  vec squares[4] = {};
  for (int64_t c = 0; c < size; c += 4 * LANES) {
    UNROLL
    for (int64_t k = 0; k < 4; ++k) {
      if (c + k * LANES >= size) continue;
      const vec v = load_partial(x + c + k * LANES, size - c - k * LANES);
      squares[k] += v * v;
    }
  }
  const float mean = lane_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size;
  const float factor = rsqrt(mean + eps);
  for (int64_t c = 0; c < size; c += LANES) {
    const int64_t left = size - c;
    store_partial(out + c, load_partial(x + c, left) * factor * (load_partial(weight + c, left) + offset), left);
  }
}
template <class T> static void norm_rows(const int64_t* a) {
  const int64_t rows = a[3], inner = a[4], size = a[5], weight_dtype = a[9];
  const float eps = unpack_double(a[10]), offset = unpack_double(a[11]);
  const int threads = choose_num_threads(rows * size, 1 << 15, (int)a[12]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = (const T*)a[0] + r / inner * a[6] + r % inner * a[7];
    T* out = (T*)a[2] + r * size;
    if (weight_dtype == 0) norm_row(x, (const float*)a[1], out, size, eps, offset);
    else if (weight_dtype == 1) norm_row(x, (const bf16*)a[1], out, size, eps, offset);
    else norm_row(x, (const f16*)a[1], out, size, eps, offset);
  }
}
// a: x, weight, out, rows, rows per group, row size, strides of groups and of rows, dtype of x, dtype of weight,
// eps, offset, threads
EXPORT int64_t rms_norm(const int64_t* a) {
#define CALL(T) norm_rows<T>(a)
  DISPATCH_DTYPE(a[8], CALL)
#undef CALL
  return 0;
}

// RoPE: (a, b) -> (a cos - b sin, b cos + a sin) for each pair of the first 2 * pairs numbers of a head
template <class T>
static void rope_head(const T* x, const float* cos, const float* sin, T* out, int64_t pairs, int64_t size,
                      bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < pairs; ++i) {
      const float first = widen(x[2 * i]), second = widen(x[2 * i + 1]);
      store(out + 2 * i, first * cos[i] - second * sin[i]);
      store(out + 2 * i + 1, second * cos[i] + first * sin[i]);
    }
  } else {
    for (int64_t i = 0; i < pairs; i += LANES) {
      const int64_t left = pairs - i;
      const vec first = load_partial(x + i, left), second = load_partial(x + pairs + i, left);
      const vec c = load_partial(cos + i, left), s = load_partial(sin + i, left);
      store_partial(out + i, first * c - second * s, left);
      store_partial(out + pairs + i, second * c + first * s, left);
    }
  }
  for (int64_t i = 2 * pairs; i < size; ++i) out[i] = x[i];
}
template <class T> static void rope_rows(const int64_t* a) {
  const int64_t tokens = a[4], heads = a[5], size = a[6], pairs = a[7];
  const int threads = choose_num_threads(tokens * heads * size, 1 << 15, (int)a[12]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t n = 0; n < heads; ++n)
      rope_head((const T*)a[0] + t * a[8] + n * a[9], (const float*)a[1] + t * pairs, (const float*)a[2] + t * pairs,
                (T*)a[3] + (t * heads + n) * size, pairs, size, a[10]);
}
// a: x, cos, sin, out, tokens, heads, head size, pairs, strides of x (token, head), interleaved, dtype, threads
EXPORT int64_t apply_rope(const int64_t* a) {
#define CALL(T) rope_rows<T>(a)
  DISPATCH_DTYPE(a[11], CALL)
#undef CALL
  return 0;
}

INLINE vec silu(vec x) { return x / (1.0f + vector_exp(-x)); }
INLINE vec gelu_tanh(vec x) {
  return 0.5f * x * (1.0f + vector_tanh(0.797884561f * (x + 0.044715f * x * x * x)));
}
INLINE vec gelu(vec x) {
  vec y;
  for (int l = 0; l < LANES; ++l) y[l] = 0.5f * x[l] * (1.0f + erf(x[l] * 0.707106781f));
  return y;
}

// out = x + y, or activation(x) * y
template <class T> static void elementwise_binary(const int64_t* a) {
  const int64_t rows = a[3], size = a[4], operation = a[8];
  const float scale = unpack_double(a[10]);
  const bool is_factor = a[11];
  const int threads = choose_num_threads(rows * size, 1 << 14, (int)a[9]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const T *x = (const T*)a[0] + r * a[5], *y = (const T*)a[1] + r * a[6];
    T* out = (T*)a[2] + r * size;
    for (int64_t c = 0; c < size; c += LANES) {
      const int64_t left = size - c;
      const vec first = is_factor ? broadcast(widen(x[0])) : load_partial(x + c, left);
      const vec second = load_partial(y + c, left);
      vec result = first + scale * second;
      if (operation == 1) result = silu(first) * second;
      if (operation == 2) result = gelu(first) * second;
      if (operation == 3) result = gelu_tanh(first) * second;
      if (operation == 4) result = second / (1.0f + vector_exp(-first));
      if (operation == 5) result = first * second;
      if (operation == 6) result = vector_tanh(first) * second;
      store_partial(out + c, result, left);
    }
  }
}
// a: x, y, out, rows, row size, row strides of x and y, dtype, operation (BINARY_OP_CODES), threads,
// scale of y in a sum, whether x has one number a row
EXPORT int64_t elementwise_binary(const int64_t* a) {
#define CALL(T) elementwise_binary<T>(a)
  DISPATCH_DTYPE(a[7], CALL)
#undef CALL
  return 0;
}
