// Sorts of one row. A key holds the value's order in its upper bits and its position in the row in
// its lower bits, so keys are distinct and a sort by them is stable.

// Rounded up to a multiple of 64 bytes, the size of a cache line.
INLINE int64_t align_64(int64_t bytes) { return (bytes + 63) & ~63l; }

// A 64-bit value leaves no room for a position.
struct SortPair { uint64_t key; uint64_t position; };
INLINE bool operator<(SortPair a, SortPair b) {
  return a.key < b.key || (a.key == b.key && a.position < b.position);
}

INLINE uint32_t pack_sort_key(int16_t value, int64_t position) {
  return ((uint32_t)(uint16_t)(value ^ (int16_t)0x8000) << 16) | (uint32_t)position;
}
INLINE uint64_t pack_sort_key(int32_t value, int64_t position) {
  return ((uint64_t)((uint32_t)value ^ 0x80000000u) << 32) | (uint64_t)position;
}
INLINE SortPair pack_sort_key(int64_t value, int64_t position) {
  return {(uint64_t)value ^ 0x8000000000000000ul, (uint64_t)position};
}
INLINE int64_t sorted_position(uint32_t key) { return key & 0xffffu; }
INLINE int64_t sorted_position(uint64_t key) { return key & 0xfffffffful; }
INLINE int64_t sorted_position(SortPair key) { return (int64_t)key.position; }

// The bytes of a value's order, the lowest first.
template <class K> struct SortKey;
template <> struct SortKey<uint32_t> {
  static constexpr int bytes = 2;
  static int byte(uint32_t key, int number) { return (key >> (16 + 8 * number)) & 255; }
};
template <> struct SortKey<uint64_t> {
  static constexpr int bytes = 4;
  static int byte(uint64_t key, int number) { return (key >> (32 + 8 * number)) & 255; }
};
template <> struct SortKey<SortPair> {
  static constexpr int bytes = 8;
  static int byte(SortPair pair, int number) { return (pair.key >> (8 * number)) & 255; }
};

template <class K> static void insertion_sort(K* keys, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const K key = keys[i];
    int64_t at = i;
    for (; at > 0 && key < keys[at - 1]; --at) keys[at] = keys[at - 1];
    keys[at] = key;
  }
}

// Sorts by one byte of the values after the other, from the lowest. Equal values stay in order.
template <class K> static void radix_sort(K* keys, K* other, int64_t n) {
  constexpr int passes = SortKey<K>::bytes;
  int32_t counts[passes][256] = {};
  for (int64_t i = 0; i < n; ++i) {
    for (int p = 0; p < passes; ++p) ++counts[p][SortKey<K>::byte(keys[i], p)];
  }
  K *from = keys, *to = other;
  for (int p = 0; p < passes; ++p) {
    if (counts[p][SortKey<K>::byte(keys[0], p)] == n) continue;  // the same byte everywhere
    int32_t offset = 0;
    for (int value = 0; value < 256; ++value) {
      const int32_t count = counts[p][value];
      counts[p][value] = offset;
      offset += count;
    }
    for (int64_t i = 0; i < n; ++i) to[counts[p][SortKey<K>::byte(from[i], p)]++] = from[i];
    K* swapped = from;
    from = to;
    to = swapped;
  }
  if (from != keys) {
    for (int64_t i = 0; i < n; ++i) keys[i] = from[i];
  }
}

template <class K> static void sort_all(K* keys, K* other, int64_t n) {
  if (n < 48) insertion_sort(keys, n);
  else radix_sort(keys, other, n);
}

// The smallest of n keys.
template <class K> INLINE K find_smallest(const K* keys, int64_t n) {
  K smallest = ~(K)0;
#pragma omp simd reduction(min : smallest)
  for (int64_t i = 0; i < n; ++i) smallest = keys[i] < smallest ? keys[i] : smallest;
  return smallest;
}
template <> SPECIAL SortPair find_smallest(const SortPair* keys, int64_t n) {
  SortPair smallest = keys[0];
  for (int64_t i = 1; i < n; ++i) smallest = keys[i] < smallest ? keys[i] : smallest;
  return smallest;
}

// Moves the `count` smallest keys, in order, to the front: one search for each.
template <class K> static void extract_smallest(K* keys, K* other, int64_t n, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    other[k] = find_smallest(keys, n);
    keys[sorted_position(other[k])] = ~(K)0;  // keys are still at their positions
  }
  for (int64_t k = 0; k < count; ++k) keys[k] = other[k];
}
template <> void extract_smallest(SortPair* keys, SortPair* other, int64_t n, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    other[k] = find_smallest(keys, n);
    keys[other[k].position] = {~0ul, ~0ul};
  }
  for (int64_t k = 0; k < count; ++k) keys[k] = other[k];
}

// The same for long rows: inserts what is below the largest of the smallest keys so far.
template <class K> static void insert_smallest(K* keys, int64_t n, int64_t count) {
  insertion_sort(keys, count);
  const int64_t block = 64;
  for (int64_t i = count; i < n; i += block) {
    const int64_t end = i + block < n ? i + block : n;
    if (!(find_smallest(keys + i, end - i) < keys[count - 1])) continue;
    for (int64_t j = i; j < end; ++j) {
      const K key = keys[j];
      if (!(key < keys[count - 1])) continue;
      int64_t at = count - 1;
      for (; at > 0 && key < keys[at - 1]; --at) keys[at] = keys[at - 1];
      keys[at] = key;
    }
  }
}

// Moves the key of one rank to its place: keeps the keys with its highest byte, then with the next.
template <class K> static void select_rank(K* keys, K* other, int64_t n, int64_t rank) {
  int64_t count = n, below = 0;  // candidates, and smaller keys
  const K* from = keys;
  for (int p = SortKey<K>::bytes - 1; p >= 0 && count > 48; --p) {
    int32_t counts[256] = {};
    for (int64_t i = 0; i < count; ++i) ++counts[SortKey<K>::byte(from[i], p)];
    int value = 0;
    for (; below + counts[value] <= rank; ++value) below += counts[value];
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const K key = from[i];
      other[kept] = key;
      kept += SortKey<K>::byte(key, p) == value;
    }
    count = kept;
    from = other;
  }
  if (from == keys) {
    for (int64_t i = 0; i < count; ++i) other[i] = keys[i];
  }
  // Candidates beyond 48 have equal values, and are in the order of their positions.
  if (count <= 48) insertion_sort(other, count);
  keys[rank] = other[rank - below];
}

// Sorts so far that the keys of the ranks low to high are in place; `other` has room for n keys.
template <class K> static void sort_ranks_of(
    K* keys, K* other, int64_t n, int64_t low, int64_t high) {
  if (high <= low) return;
  if (high * n <= 8192 && 2 * high <= n) extract_smallest(keys, other, n, high);
  else if (high <= 128 && 4 * high <= n) insert_smallest(keys, n, high);
  else if (high - low == 1) select_rank(keys, other, n, low);
  else sort_all(keys, other, n);
}
INLINE void sort_ranks(uint32_t* keys, uint32_t* other, int64_t n, int64_t low, int64_t high) {
  sort_ranks_of(keys, other, n, low, high);
}
INLINE void sort_ranks(uint64_t* keys, uint64_t* other, int64_t n, int64_t low, int64_t high) {
  sort_ranks_of(keys, other, n, low, high);
}
INLINE void sort_ranks(SortPair* keys, SortPair* other, int64_t n, int64_t low, int64_t high) {
  sort_ranks_of(keys, other, n, low, high);
}
