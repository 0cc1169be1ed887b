// Reductions of floats in one order of operations, whatever loop computes them. A row is reduced in
// blocks of 256 elements: element p of a block goes to lane p % 16, in order; then lane l is combined
// with lane l + 8, l + 4, l + 2 and l + 1. Absent elements count as the identity, which changes no bit.
struct Sum {
  template <class V> static SPECIAL V combine(V a, V b) { return a + b; }
  template <class T> static SPECIAL T identity() { return 0; }
};
struct Product {
  template <class V> static SPECIAL V combine(V a, V b) { return a * b; }
  template <class T> static SPECIAL T identity() { return 1; }
};
struct Maximum {
  template <class V> static SPECIAL V combine(V a, V b) { return (a > b) | (a != a) ? a : b; }
  template <class T> static SPECIAL T identity() { return lowest<T>(); }
};
struct Minimum {
  template <class V> static SPECIAL V combine(V a, V b) { return (a < b) | (a != a) ? a : b; }
  template <class T> static SPECIAL T identity() { return highest<T>(); }
};

template <class T> struct lane_number;
template <> struct lane_number<float> { typedef int32_t type; };
template <> struct lane_number<double> { typedef int64_t type; };

// Combines each lane with the one `distance` behind it.
template <class Op, int distance, class T, class V> INLINE V combine_lanes(V row) {
  const int count = sizeof(V) / sizeof(T);
  typedef typename lane_number<T>::type number;
  typedef number order __attribute__((vector_size(sizeof(V))));
  order behind;
  for (int l = 0; l < count; ++l) behind[l] = (number)((l + distance) % count);
  return Op::combine(row, (V)SHUFFLE_LANES(row, row, behind));
}

// The first `count` lanes of a vector, the others `rest`.
template <class V, class T> INLINE V load_first(const T* from, int64_t count, V rest) {
  const int width = sizeof(V) / sizeof(T);
  typedef typename lane_number<T>::type number;
  typedef number numbers __attribute__((vector_size(sizeof(V))));
  numbers lane;
  for (int l = 0; l < width; ++l) lane[l] = (number)l;
  return lane < (number)count ? load_lanes<V>(from, count) : rest;
}

// The same of elements that a loop has just stored: in pieces that are no wider than its stores. A wider
// load would wait until they are in the cache.
template <int count, class V, class T> INLINE V load_first_stored(const T* from, V row) {
  const volatile T* each = from;  // or g++ loads several at once
  if constexpr (count > 0) row[0] = each[0];
  if constexpr (count > 1) row[1] = each[1];
  if constexpr (count > 2) row[2] = each[2];
  if constexpr (count > 3) row[3] = each[3];
  if constexpr (count > 4) row[4] = each[4];
  if constexpr (count > 5) row[5] = each[5];
  if constexpr (count > 6) row[6] = each[6];
  return row;
}

template <class V, class T> INLINE V load_vector(const T* from) {
  V row;
  __builtin_memcpy(&row, from, sizeof(row));
  return row;
}

template <int length, bool is_stored, class V, class T>
INLINE V load_part(const T* from, int64_t count, V rest) {
  const int width = sizeof(V) / sizeof(T);
  if constexpr (length >= 0 && length < width && is_stored) return load_first_stored<length>(from, rest);
  else if (count < width) return load_first(from, count < 0 ? 0 : count, rest);
  return load_vector<V>(from);
}

// The 16 lanes of 1, 2 or 4 vectors combined in halves.
template <class Op, int parts, class T, class V> INLINE T combine_all_lanes(const V* total) {
  V row = total[0];
  if constexpr (parts == 2) row = Op::combine(total[0], total[1]);
  if constexpr (parts == 4)
    row = Op::combine(Op::combine(total[0], total[2]), Op::combine(total[1], total[3]));
  if constexpr (sizeof(V) / sizeof(T) == 16) row = combine_lanes<Op, 8, T>(row);
  if constexpr (sizeof(V) / sizeof(T) >= 8) row = combine_lanes<Op, 4, T>(row);
  row = combine_lanes<Op, 2, T>(row);
  return combine_lanes<Op, 1, T>(row)[0];
}

// A block of `length` elements, at most 256; -1: of `count`.
template <class Op, int length, bool is_stored, class T>
INLINE T reduce_block(const T* from, int64_t count) {
  typedef T vector __attribute__((vector_size(32)));
  constexpr int width = 32 / sizeof(T), parts = 16 / width;
  const vector identity = vector{} + Op::template identity<T>();
  vector total[parts];
  for (int k = 0; k < parts; ++k) total[k] = identity;
  const int64_t whole = (length < 0 ? count : length) / 16 * 16;
  for (int64_t p = 0; p < whole; p += 16)
    for (int k = 0; k < parts; ++k)
      total[k] = Op::combine(total[k], load_vector<vector>(from + p + k * width));
  constexpr int rest = length < 0 ? -1 : length % 16;
#define REDUCE_PART(k) \
  if constexpr (k < parts && (rest < 0 || rest > k * width)) \
    total[k] = Op::combine(total[k], load_part<rest < 0 ? -1 : rest - k * width, is_stored>( \
        from + whole + k * width, count - whole - k * width, identity));
  REDUCE_PART(0)
  REDUCE_PART(1)
  REDUCE_PART(2)
  REDUCE_PART(3)
  return combine_all_lanes<Op, parts, T>(total);
}

// The same of some whole blocks at once: the additions of one wait for each other.
template <class Op, int blocks, class T> INLINE void reduce_whole_blocks(const T* from, T* results) {
  typedef T vector __attribute__((vector_size(64)));
  constexpr int width = 64 / sizeof(T), parts = 16 / width;
  const vector identity = vector{} + Op::template identity<T>();
  vector first[parts], second[parts], third[parts], fourth[parts];
  for (int k = 0; k < parts; ++k) first[k] = second[k] = third[k] = fourth[k] = identity;
  for (int64_t p = 0; p < 256; p += 16)
    for (int k = 0; k < parts; ++k) {
      const T* part = from + p + k * width;
      first[k] = Op::combine(first[k], load_vector<vector>(part));
      second[k] = Op::combine(second[k], load_vector<vector>(part + 256));
      if (blocks > 2) third[k] = Op::combine(third[k], load_vector<vector>(part + 512));
      if (blocks > 3) fourth[k] = Op::combine(fourth[k], load_vector<vector>(part + 768));
    }
  results[0] = combine_all_lanes<Op, parts, T>(first);
  results[1] = combine_all_lanes<Op, parts, T>(second);
  if (blocks > 2) results[2] = combine_all_lanes<Op, parts, T>(third);
  if (blocks > 3) results[3] = combine_all_lanes<Op, parts, T>(fourth);
}

// The results of all blocks of `count` elements.
template <class Op, class T>
INLINE void reduce_blocks(const T* from, int64_t count, T* results) {
  int64_t p = 0;
  for (; p + 1024 <= count; p += 1024) reduce_whole_blocks<Op, 4>(from + p, results + p / 256);
  if (p + 768 <= count) {
    reduce_whole_blocks<Op, 3>(from + p, results + p / 256);
    p += 768;
  } else if (p + 512 <= count) {
    reduce_whole_blocks<Op, 2>(from + p, results + p / 256);
    p += 512;
  }
  for (; p < count; p += 256)
    results[p / 256] = reduce_block<Op, -1, false>(from + p, min_i64(256, count - p));
}

// What `total` and the blocks of at most 1024 elements come to.
template <class Op, class R, class T> INLINE R combine_blocks(R total, const T* from, int64_t count) {
  T results[4];
  reduce_blocks<Op>(from, count, results);
  for (int64_t p = 0; p < count; p += 256) total = Op::combine(total, (R)results[p / 256]);
  return total;
}
