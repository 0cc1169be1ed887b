// What lies between the linears and the attention of a layer: norms, rotations, gates, sums.
// Numbers are floats while they are worked on, and rounded once to the kind they are kept in.

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float number_in(int64_t bits64) { return (float)__builtin_bit_cast(double, bits64); }
INLINE void store(float* to, float x) { *to = x; }
INLINE float widen(float x) { return x; }

// up to sixteen numbers from memory and back
template <class T> INLINE vec some(const T* from, int64_t count) {
  if (count >= LANES) return wide(from);
  T last[LANES] = {};
  for (int64_t l = 0; l < count; ++l) last[l] = from[l];
  return wide(last);
}
template <class T> INLINE void keep(T* to, vec v, int64_t count) {
  for (int64_t l = 0; l < least(count, LANES); ++l) store(to + l, v[l]);
}
INLINE void keep(float* to, vec v, int64_t count) {
  if (count >= LANES) return put(to, v);
  for (int64_t l = 0; l < count; ++l) to[l] = v[l];
}

// Every kernel once for each kind of number: 0 float, 1 bf16, 2 f16.
#define BY_KIND(kind, call) \
  switch (kind) { \
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
      const vec v = some(x + c + k * LANES, size - c - k * LANES);
      squares[k] += v * v;
    }
  }
  const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size;
  const float factor = rsqrt(mean + eps);
  for (int64_t c = 0; c < size; c += LANES) {
    const int64_t left = size - c;
    keep(out + c, some(x + c, left) * factor * (some(weight + c, left) + offset), left);
  }
}
template <class T> static void norm_rows(const int64_t* a) {
  const int64_t rows = a[3], inner = a[4], size = a[5], weight_kind = a[9];
  const float eps = number_in(a[10]), offset = number_in(a[11]);
  const int threads = threads_for(rows * size, 1 << 15, (int)a[12]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = (const T*)a[0] + r / inner * a[6] + r % inner * a[7];
    T* out = (T*)a[2] + r * size;
    if (weight_kind == 0) norm_row(x, (const float*)a[1], out, size, eps, offset);
    else if (weight_kind == 1) norm_row(x, (const bf16*)a[1], out, size, eps, offset);
    else norm_row(x, (const f16*)a[1], out, size, eps, offset);
  }
}
// a: x, weight, out, rows, rows that lie together, size, strides of those groups and of rows, kind of x,
// kind of weight, eps, offset, threads
EXPORT int64_t rms_norm(const int64_t* a) {
#define CALL(T) norm_rows<T>(a)
  BY_KIND(a[8], CALL)
#undef CALL
  return 0;
}

// (a, b) -> (a cos - b sin, b cos + a sin) for each pair of the first 2 * pairs numbers of a head
template <class T>
static void rotate_head(const T* x, const float* cos, const float* sin, T* out, int64_t pairs, int64_t size,
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
      const vec first = some(x + i, left), second = some(x + pairs + i, left);
      const vec c = some(cos + i, left), s = some(sin + i, left);
      keep(out + i, first * c - second * s, left);
      keep(out + pairs + i, second * c + first * s, left);
    }
  }
  for (int64_t i = 2 * pairs; i < size; ++i) out[i] = x[i];
}
template <class T> static void rotate_all(const int64_t* a) {
  const int64_t tokens = a[4], heads = a[5], size = a[6], pairs = a[7];
  const int threads = threads_for(tokens * heads * size, 1 << 15, (int)a[12]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t n = 0; n < heads; ++n)
      rotate_head((const T*)a[0] + t * a[8] + n * a[9], (const float*)a[1] + t * pairs, (const float*)a[2] + t * pairs,
                  (T*)a[3] + (t * heads + n) * size, pairs, size, a[10]);
}
// a: x, cos, sin, out, tokens, heads, size, pairs, strides of x: token, head; interleaved, kind, threads
EXPORT int64_t rotate(const int64_t* a) {
#define CALL(T) rotate_all<T>(a)
  BY_KIND(a[11], CALL)
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

// out = activation(x) * y; x + y without one
template <class T> static void combine(const int64_t* a) {
  const int64_t rows = a[3], size = a[4], kind = a[8];
  const int threads = threads_for(rows * size, 1 << 14, (int)a[9]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const T *x = (const T*)a[0] + r * a[5], *y = (const T*)a[1] + r * a[6];
    T* out = (T*)a[2] + r * size;
    for (int64_t c = 0; c < size; c += LANES) {
      const int64_t left = size - c;
      const vec first = some(x + c, left), second = some(y + c, left);
      vec result = first + second;
      if (kind == 1) result = silu(first) * second;
      if (kind == 2) result = gelu(first) * second;
      if (kind == 3) result = gelu_tanh(first) * second;
      keep(out + c, result, left);
    }
  }
}
// a: x, y, out, rows, size, strides of rows of x and y, kind of numbers, what to do, threads
EXPORT int64_t combine(const int64_t* a) {
#define CALL(T) combine<T>(a)
  BY_KIND(a[7], CALL)
#undef CALL
  return 0;
}
