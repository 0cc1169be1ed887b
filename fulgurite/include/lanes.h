// Parts of vectors: loads and stores of fewer elements than there are lanes.

// The first `count` lanes of a vector, the others zero: memory behind them is not read.
template <class V, class L> INLINE V load_lanes(const L* from, int64_t count) {
  V row = {};
#if defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__clang__)
  typedef char bytes64 __attribute__((vector_size(64)));
  typedef char bytes32 __attribute__((vector_size(32)));
  typedef char bytes16 __attribute__((vector_size(16)));
  const int64_t size = count * (int64_t)sizeof(L);
  const uint64_t mask = size >= 64 ? ~0ull : (1ull << size) - 1;
  if constexpr (sizeof(V) == 64)
    row = (V)__builtin_ia32_loaddquqi512_mask((const char*)from, bytes64{}, mask);
  else if constexpr (sizeof(V) == 32)
    row = (V)__builtin_ia32_loaddquqi256_mask((const char*)from, bytes32{}, (uint32_t)mask);
  else
    row = (V)__builtin_ia32_loaddquqi128_mask((const char*)from, bytes16{}, (uint16_t)mask);
#else
  for (int64_t k = 0; k < count; ++k) ((L*)&row)[k] = from[k];
#endif
  return row;
}

template <class V, class L> INLINE void store_lanes(L* to, V row, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__clang__)
  typedef char bytes64 __attribute__((vector_size(64)));
  typedef char bytes32 __attribute__((vector_size(32)));
  typedef char bytes16 __attribute__((vector_size(16)));
  const int64_t size = count * (int64_t)sizeof(L);
  const uint64_t mask = size >= 64 ? ~0ull : (1ull << size) - 1;
  if constexpr (sizeof(V) == 64)
    __builtin_ia32_storedquqi512_mask((char*)to, (bytes64)row, mask);
  else if constexpr (sizeof(V) == 32)
    __builtin_ia32_storedquqi256_mask((char*)to, (bytes32)row, (uint32_t)mask);
  else
    __builtin_ia32_storedquqi128_mask((char*)to, (bytes16)row, (uint16_t)mask);
#else
  for (int64_t k = 0; k < count; ++k) to[k] = ((L*)&row)[k];
#endif
}

typedef uint8_t bytes_of_16 __attribute__((vector_size(16)));
typedef uint8_t bytes_of_32 __attribute__((vector_size(32)));
typedef uint8_t bytes_of_64 __attribute__((vector_size(64)));

template <class V> INLINE void copy_first(uint8_t* to, const uint8_t* from, int64_t size) {
  const V row = load_lanes<V>(from, size < 0 ? 0 : min_i64(size, sizeof(V)));
  __builtin_memcpy(to, &row, sizeof(V));
}
template <class V> INLINE void store_first(uint8_t* to, const uint8_t* from, int64_t size) {
  V row;
  __builtin_memcpy(&row, from, sizeof(V));
  store_lanes(to, row, size < 0 ? 0 : min_i64(size, sizeof(V)));
}

// The end of a row as a whole vector of `lanes` elements, `count` of them from memory, the others zero.
template <int lanes, class T> INLINE void load_tail(T* to, const T* from, int64_t count) {
  constexpr int total = lanes * sizeof(T);
  const int64_t size = count * (int64_t)sizeof(T);
  uint8_t* target = (uint8_t*)to;
  const uint8_t* source = (const uint8_t*)from;
  for (int k = 0; k + 64 <= total; k += 64) copy_first<bytes_of_64>(target + k, source + k, size - k);
  if constexpr (total == 32) copy_first<bytes_of_32>(target, source, size);
  if constexpr (total == 16) copy_first<bytes_of_16>(target, source, size);
}

template <int lanes, class T> INLINE void store_tail(T* to, const T* from, int64_t count) {
  constexpr int total = lanes * sizeof(T);
  const int64_t size = count * (int64_t)sizeof(T);
  uint8_t* target = (uint8_t*)to;
  const uint8_t* source = (const uint8_t*)from;
  for (int k = 0; k + 64 <= total; k += 64) store_first<bytes_of_64>(target + k, source + k, size - k);
  if constexpr (total == 32) store_first<bytes_of_32>(target, source, size);
  if constexpr (total == 16) store_first<bytes_of_16>(target, source, size);
}
