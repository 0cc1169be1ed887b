// Prefetches and non-temporal stores.

// Prefetches `count` elements. Addresses past the end are allowed: a prefetch never faults.
template <class T> INLINE void prefetch(const T* from, int64_t count) {
  for (int64_t k = 0; k < count; k += 64 / (int64_t)sizeof(T)) __builtin_prefetch(from + k, 0, 2);
}

// The same for some rows, `stride` elements apart.
template <class T>
INLINE void prefetch_rows(const T* from, int64_t stride, int64_t count, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) prefetch(from + row * stride, count);
}

// Copies 64 bytes from any address to the start of a cache line, bypassing the caches: the line is
// not read before it is overwritten. The locked operations of OpenMP's barrier order these stores.
INLINE void store_line_nontemporal(char* to, const char* from) {
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

// Copies `count` elements to memory that is not read soon: full cache lines non-temporally, the
// ends as usual.
template <class T> INLINE void store_nontemporal(T* to, const T* from, int64_t count) {
  char* target = (char*)to;
  const char* source = (const char*)from;
  int64_t left = count * (int64_t)sizeof(T);
  int64_t head = min_i64((64 - (int64_t)((uint64_t)target & 63)) & 63, left);
  for (int64_t k = 0; k < head; ++k) target[k] = source[k];
  int64_t k = head;
  for (; k + 64 <= left; k += 64) store_line_nontemporal(target + k, source + k);
  for (; k < left; ++k) target[k] = source[k];
}
