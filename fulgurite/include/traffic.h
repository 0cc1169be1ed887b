// What moves between memory and the cores: rows that are fetched before they are needed, results
// that go past the caches, and quotients by a number that is the same along a row.

// Asks for `count` elements from `from` on; an address past the end is never touched, only asked for.
template <class T> INLINE void fetch(const T* from, int64_t count) {
  for (int64_t k = 0; k < count; k += 64 / (int64_t)sizeof(T)) __builtin_prefetch(from + k, 0, 2);
}

// The same for some rows, `step` elements apart.
template <class T> INLINE void fetch_rows(const T* from, int64_t step, int64_t count, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) fetch(from + row * step, count);
}

// One line of 64 bytes from `from` (any address) to `to` (the start of a line), past the caches: no
// line is read that is about to be overwritten. The locked operations of a team's barrier order these.
INLINE void stream_line(char* to, const char* from) {
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
  typedef float vector __attribute__((vector_size(64)));
  vector line;
  __builtin_memcpy(&line, from, 64);
  __builtin_ia32_movntps512((float*)to, line);
#elif defined(__AVX__) && defined(__GNUC__) && !defined(__clang__)
  typedef float vector __attribute__((vector_size(32)));
  vector low, high;
  __builtin_memcpy(&low, from, 32);
  __builtin_memcpy(&high, from + 32, 32);
  __builtin_ia32_movntps256((float*)to, low);
  __builtin_ia32_movntps256((float*)to + 8, high);
#else
  __builtin_memcpy(to, from, 64);
#endif
}

// `count` elements to memory that is not read soon: whole lines past the caches, ends as usual.
template <class T> INLINE void stream(T* to, const T* from, int64_t count) {
  char* target = (char*)to;
  const char* source = (const char*)from;
  int64_t left = count * (int64_t)sizeof(T);
  int64_t head = least((64 - (int64_t)((uint64_t)target & 63)) & 63, left);
  for (int64_t k = 0; k < head; ++k) target[k] = source[k];
  int64_t k = head;
  for (; k + 64 <= left; k += 64) stream_line(target + k, source + k);
  for (; k < left; ++k) target[k] = source[k];
}

// x / c for a c that many x share: three products instead of a division. The same result, but within
// one ulp where x or the quotient is below 2^-100. `scale` brings a c near the range's ends to its middle.
struct Inverse { float value, inverse, scale; };

INLINE Inverse inverse(float c) {
  float size = __builtin_fabsf(c);
  float scale = size > 0x1p100f ? 0x1p-32f : size < 0x1p-100f ? 0x1p32f : 1.0f;
  float value = c * scale;
  return {value, 1.0f / value, scale};
}

INLINE float operator/(float x, Inverse by) {
  float y = x * by.scale;
  float quotient = y * by.inverse;
  float left = __builtin_fmaf(-quotient, by.value, y);
  float better = __builtin_fmaf(left, by.inverse, quotient);
  return __builtin_fabsf(better) > 0.0f ? better : quotient;  // zeros and infinities are right already
}
