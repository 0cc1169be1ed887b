// The GEMM of grouped_gemm.h: rows of x times BLOCK_N rows of a dense weight, both contiguous along K.
//
//   sums[m][n] = x[m] . w[n]
//
// Each sum is one chain of multiply-adds in the order of K, whatever the number of rows, so the
// result of a row does not depend on the other rows. A vector holds sixteen columns of the output:
// squares of 16 x 16 words of the weight are transposed in registers. Few rows (small M) are
// multiplied right there, and each byte of the weight is read once. Many rows (large M) share a block
// of the weight that is transposed into L1.
//
// A word is one float, or two 16-bit numbers, which halves the work of transposing them:
//   F32Words    w float, x float
//   PairWords   w bf16, x bf16: products of pairs in one instruction (AVX512_BF16)
//   SplitWords  w bf16 or f16, x float: a word becomes two vectors of floats

const int64_t BLOCK_N = 32;      // columns of a work item (of each half, with a gate)
const int SMALL_M_ROWS = 12;     // rows up to which a square is multiplied in registers
const int64_t CACHE_LINE_BYTES = 64;

#ifdef __AVX512F__
// the header's allocator would bring in all of the C library's
#define _MM_MALLOC_H_INCLUDED
#define __MM_MALLOC_H
#include <immintrin.h>
#endif
#ifdef __AVX512BF16__
#define HAS_PAIR_WORDS 1
#else
#define HAS_PAIR_WORDS 0
#endif

struct F32Words {
  typedef float X;
  static const int per_word = 1;
  INLINE vec multiply_add(vec word, const float* x, vec total) { return total + word * x[0]; }
};
struct PairWords {
  typedef uint16_t X;
  static const int per_word = 2;
  INLINE vec multiply_add(vec word, const uint16_t* x, vec total) {
#if HAS_PAIR_WORDS
    uint32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(total, (__m512bh)word, (__m512bh)_mm512_set1_epi32((int32_t)pair));
#else
    return total;
#endif
  }
};
template <class W> struct SplitWords;
template <> struct SplitWords<bf16> {
  typedef float X;
  static const int per_word = 2;
  INLINE vec low(vec word) { return (vec)((uvec)word << 16); }
  INLINE vec high(vec word) { return (vec)((uvec)word & 0xffff0000u); }
  INLINE vec multiply_add(vec word, const float* x, vec total) {
    total += low(word) * x[0];
    return total + high(word) * x[1];
  }
};
template <> struct SplitWords<f16> {
  typedef float X;
  static const int per_word = 2;
#ifdef __AVX512F__
  INLINE vec low(vec word) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)word)); }
#else
  INLINE vec low(vec word) { return half_to_float((uvec)word & 0xffffu); }
#endif
  INLINE vec high(vec word) { return low((vec)((uvec)word >> 16)); }
  INLINE vec multiply_add(vec word, const float* x, vec total) {
    total += low(word) * x[0];
    return total + high(word) * x[1];
  }
};

// Sixteen words of a row of the weight, `bytes` of which exist; zeros after them.
INLINE vec load_words(const char* from, int64_t bytes) {
  vec words = vec{};
  if (bytes >= 64) __builtin_memcpy(&words, from, 64);
  else __builtin_memcpy(&words, from, bytes);
  return words;
}

// A square of the weight: sixteen words of `valid` rows, transposed. Lane n of square[l] is word l of row n.
INLINE void load_square(const char* w, int64_t step, int64_t valid, int64_t bytes, vec* square) {
  if (bytes >= 64 && valid >= LANES) {
    UNROLL
    for (int64_t l = 0; l < LANES; ++l) square[l] = load_words(w + l * step, 64);
  } else {
    for (int64_t l = 0; l < LANES; ++l) square[l] = l < valid ? load_words(w + l * step, bytes) : vec{};
  }
  transpose_16x16(square);
}

// ---- small M -----------------------------------------------------------------------------------------

// `rows` x 16 sums of `valid` columns. The next sixteen columns are prefetched meanwhile.
template <class Words, int rows>
static void small_m_tile(const typename Words::X* x, int64_t x_step, const char* w, int64_t step, int64_t valid,
                         int64_t bytes, float* out) {
  vec total[rows] = {};
  for (int64_t at = 0; at < bytes; at += 64, x += LANES * Words::per_word) {
    vec square[LANES];
    UNROLL
    for (int64_t l = 0; l < LANES; ++l) __builtin_prefetch(w + (LANES + l) * step + at, 0, 2);
    load_square(w + at, step, valid, bytes - at, square);
    UNROLL
    for (int l = 0; l < LANES; ++l)
      UNROLL
      for (int r = 0; r < rows; ++r)
        total[r] = Words::multiply_add(square[l], x + r * x_step + l * Words::per_word, total[r]);
  }
  UNROLL
  for (int r = 0; r < rows; ++r) store_vec(out + r * BLOCK_N, total[r]);
}

template <class Words>
static void small_m_rows(const typename Words::X* x, int64_t x_step, int64_t count, const char* w, int64_t step,
                         int64_t width, int64_t bytes, float* out) {
  for (int64_t n = 0; n < width; n += LANES) {
    int64_t m = 0;
#define SMALL_M(rows) \
  for (; m + rows <= count; m += rows) \
    small_m_tile<Words, rows>(x + m * x_step, x_step, w + n * step, step, width - n, bytes, out + m * BLOCK_N + n);
    SMALL_M(12)
    SMALL_M(8)
    SMALL_M(4)
    SMALL_M(2)
    SMALL_M(1)
#undef SMALL_M
  }
}

// ---- large M -----------------------------------------------------------------------------------------

// A block of the weight: `width` rows, `bytes` of each, as [words][BLOCK_N].
static void transpose_block(const char* w, int64_t step, int64_t width, int64_t bytes, float* to) {
  for (int64_t n = 0; n < BLOCK_N; n += LANES)
    for (int64_t at = 0; at < bytes; at += 64) {
      vec square[LANES];
      load_square(w + n * step + at, step, width - n, bytes - at, square);
      for (int64_t l = 0; l < LANES; ++l) store_vec(to + (at / 4 + l) * BLOCK_N + n, square[l]);
    }
}

// What is transposed next: one cache line is prefetched at a time while others are multiplied.
struct PrefetchCursor {
  const char* at;  // `length` lines of a column; the next column is `step` bytes away
  int64_t step, length, left, line;
};
INLINE void prefetch_line(PrefetchCursor& prefetch) {
  __builtin_prefetch(prefetch.at + prefetch.line * CACHE_LINE_BYTES, 0, 2);
  if (++prefetch.line == prefetch.length) prefetch.line = 0, prefetch.at += prefetch.step;
}

// out [rows][BLOCK_N] += x [rows][words] @ panel [words][BLOCK_N]
template <class Words, int rows>
static void accumulate_tile(const typename Words::X* x, int64_t x_step, const float* panel, int64_t words, float* out,
                            PrefetchCursor& prefetch, int64_t prefetched_lines) {
  vec total[rows][2];
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int v = 0; v < 2; ++v) total[r][v] = load(out + r * BLOCK_N + v * LANES);
  // every fourth row has a pointer: one for each row would not fit the registers
  const typename Words::X* from[(rows + 3) / 4];
  UNROLL
  for (int r = 0; r < rows; r += 4) from[r / 4] = x + r * x_step;
  const auto add = [&](int64_t c) __attribute__((always_inline)) {
    const vec left = load(panel + c * BLOCK_N), right = load(panel + c * BLOCK_N + LANES);
    UNROLL
    for (int r = 0; r < rows; ++r) {
      const typename Words::X* at = from[r / 4] + r % 4 * x_step;
      total[r][0] = Words::multiply_add(left, at, total[r][0]);
      total[r][1] = Words::multiply_add(right, at, total[r][1]);
    }
    UNROLL
    for (int r = 0; r < rows; r += 4) from[r / 4] += Words::per_word;
  };
  int64_t c = 0;
  PrefetchCursor mine = prefetch;
  for (; c < prefetched_lines; ++c) add(c), prefetch_line(mine);
  prefetch = mine;
  for (; c < words; ++c) add(c);
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int v = 0; v < 2; ++v) store_vec(out + r * BLOCK_N + v * LANES, total[r][v]);
}

template <class Words>
static void large_m_rows(const typename Words::X* x, int64_t x_step, int64_t count, const char* w, int64_t step,
                         int64_t width, int64_t bytes, const char* after, float* panel, float* out) {
  const int64_t block_bytes = GROUPED_GEMM_BLOCK_WORDS * 4;
  __builtin_memset(out, 0, count * BLOCK_N * sizeof(float));
  for (int64_t from = 0; from < bytes; from += block_bytes, x += GROUPED_GEMM_BLOCK_WORDS * Words::per_word) {
    const int64_t depth = min_i64(bytes - from, block_bytes), words = (depth + 3) / 4, next = from + depth;
    transpose_block(w + from, step, width, depth, panel);
    const bool last = next == bytes;
    const int64_t length = (min_i64(last ? bytes : bytes - next, block_bytes) + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES;
    PrefetchCursor prefetch{last ? after : w + next, step, length, BLOCK_N * length, 0};
    int64_t m = 0;
#define LARGE_M(rows) \
  for (; m + rows <= count; m += rows) { \
    /* an even part of what is left to prefetch, at most one line a word */ \
    const int64_t tiles = (count - m + rows - 1) / rows; \
    const int64_t lines = min_i64(words, (prefetch.left + tiles - 1) / tiles); \
    prefetch.left -= lines; \
    accumulate_tile<Words, rows>(x + m * x_step, x_step, panel, words, out + m * BLOCK_N, prefetch, lines); \
  }
    LARGE_M(12)
    LARGE_M(4)
    LARGE_M(1)
#undef LARGE_M
  }
}

// Sums [count][BLOCK_N] of `width` columns. `after` is the weight that is read next.
template <class Words>
static void compute_sums(const char* x, int64_t x_step, int64_t count, const char* w, int64_t step, int64_t width,
                         int64_t bytes, const char* after, float* panel, float* out) {
  const typename Words::X* from = (const typename Words::X*)x;
  if (count <= SMALL_M_ROWS) small_m_rows<Words>(from, x_step, count, w, step, width, bytes, out);
  else large_m_rows<Words>(from, x_step, count, w, step, width, bytes, after, panel, out);
}
