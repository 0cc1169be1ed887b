// Latent attention on the CPU. PAGE is what latents are kept in: float, bf16, f16, or f8e4m3 for packed
// rows (`mla_reference.packed_row`), one library a type.
//
//   key_j = (U_k c_j, r_j), value_j = U_v c_j,  out[t, n] = sum_j softmax_j(scale q[t, n] . key_j) value_j
//
// Queries lie in the lanes of vectors, keys come one number at a time: scores, maxima, weights and what is
// gathered are vectors over queries, so softmax needs no sum within a vector and no key is ever turned
// over. Everything is one small product: `product`.
//
// absorbed: a lane is a (token, head), its query U_k^T q; a key is (c, r) and the value c itself.
// expanded: a lane is a token of one head; a block of keys and values is expanded, used by all of the
//           sequence's new tokens, and forgotten: no expanded key ever leaves the second level cache.

const int WIDE = 2 * LANES;  // lanes of a tile
const int TILES = 4;         // tiles that share a block of keys
const int BLOCK = 64;        // keys of a block
const int64_t SPAN = 256;    // keys worth a span of their own

// ---- the product everything is made of ---------------------------------------------------------------

// to[r][0 .. vecs] (+)= sum over k of a[r * a_row + k * a_step] * b[k * b_step + 0 .. vecs]
// Every fourth row has a pointer of its own: sixteen strides would not fit the registers. `side_by_side`: a_row is 1.
// Meanwhile what `ahead` says is fetched into the second level cache, a little with each k.
struct Ahead {
  const char* const* from;  // one for every eight rows
  int64_t step;             // bytes for each k
};
template <int rows, int vecs, bool side_by_side, bool fetch, class B>
INLINE void product(const float* a, int64_t a_row, int64_t a_step, const B* b, int64_t b_step, int64_t depth,
                    float* to, int64_t to_row, bool add, Ahead ahead) {
  vec total[rows][vecs];
  const float* from[(rows + 3) / 4];
  UNROLL
  for (int r = 0; r < rows; r += 4) from[r / 4] = a + r * a_row;
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int v = 0; v < vecs; ++v) total[r][v] = add ? load(to + r * to_row + v * LANES) : vec{};
  for (int64_t k = 0; k < depth; ++k) {
    vec right[vecs];
    UNROLL
    for (int v = 0; v < vecs; ++v) right[v] = wide(b + k * b_step + v * LANES);
    UNROLL
    for (int r = 0; r < rows; ++r) {
      const float left = side_by_side ? a[r] : from[r / 4][r % 4 * a_row];
      UNROLL
      for (int v = 0; v < vecs; ++v) total[r][v] += right[v] * left;
    }
    if (fetch)
      UNROLL
      for (int r = 0; r < rows; r += 8) __builtin_prefetch(ahead.from[r / 8] + k * ahead.step, 0, 2);
    if (side_by_side) a += a_step;
    UNROLL
    for (int r = 0; r < rows; r += 4) from[r / 4] += a_step;
  }
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int v = 0; v < vecs; ++v) put(to + r * to_row + v * LANES, total[r][v]);
}

template <int vecs, bool side_by_side, bool fetch = false, class B>
INLINE void product_rows(int64_t rows, const float* a, int64_t a_row, int64_t a_step, const B* b, int64_t b_step,
                         int64_t depth, float* to, int64_t to_row, bool add, Ahead ahead = {}) {
  const int many = 16 / vecs;
  int64_t r = 0;
#define SOME(n, fetches) \
  for (; r + n <= rows; r += n) \
    product<n, vecs, side_by_side, fetches>(a + r * a_row, a_row, a_step, b, b_step, depth, to + r * to_row, to_row, \
                                            add, Ahead{ahead.from + r / 8, ahead.step});
  SOME(many, fetch)
  if (many > 4) SOME(4, false)
  SOME(1, false)
#undef SOME
}

// Rows of a times b, of one or two vectors.
static void multiply(int64_t rows, int64_t lanes, const float* a, int64_t a_row, const float* b, int64_t depth,
                     float* to, int64_t to_row, bool add) {
  if (lanes > LANES) product_rows<2, false>(rows, a, a_row, 1, b, WIDE, depth, to, to_row, add);
  else product_rows<1, false>(rows, a, a_row, 1, b, WIDE, depth, to, to_row, add);
}
static void multiply_fetching(int64_t rows, int64_t lanes, const float* a, int64_t a_row, const float* b, int64_t depth,
                              float* to, int64_t to_row, Ahead ahead) {
  if (lanes > LANES) product_rows<2, false, true>(rows, a, a_row, 1, b, WIDE, depth, to, to_row, false, ahead);
  else product_rows<1, false, true>(rows, a, a_row, 1, b, WIDE, depth, to, to_row, false, ahead);
}
// Columns of a times b, onto what is there.
static void multiply_columns(int64_t columns, int64_t lanes, const float* a, int64_t a_step, const float* b,
                             int64_t depth, float* to) {
  if (lanes > LANES) product_rows<2, true>(columns, a, 1, a_step, b, WIDE, depth, to, WIDE, true);
  else product_rows<1, true>(columns, a, 1, a_step, b, WIDE, depth, to, WIDE, true);
}
// Few rows times a matrix that is read once, as it lies.
template <class B>
static void multiply_through(int64_t rows, int64_t width, const float* a, int64_t a_row, const B* b, int64_t b_step,
                             int64_t depth, float* to, int64_t to_row) {
  int64_t c = 0;
  for (; c + 16 * LANES <= width && rows < 4; c += 16 * LANES)
    product_rows<16, false>(rows, a, a_row, 1, b + c, b_step, depth, to + c, to_row, false);
  for (; c + 4 * LANES <= width; c += 4 * LANES)
    product_rows<4, false>(rows, a, a_row, 1, b + c, b_step, depth, to + c, to_row, false);
  for (; c < width; c += LANES)
    product_rows<1, false>(rows, a, a_row, 1, b + c, b_step, depth, to + c, to_row, false);
}

// ---- the problem -------------------------------------------------------------------------------------

INLINE int64_t rounded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float number_in(int64_t bits64) { return (float)__builtin_bit_cast(double, bits64); }
INLINE void store(float* to, float x) { *to = x; }

struct Problem {
  const char *q, *up;
  const float *cos, *sin;
  const char* pages;
  const int32_t *tables, *starts, *lengths;
  char* out;
  int64_t tokens, sequences, heads, plain, rope, rank, value, page;
  int64_t q_token, q_head, up_head, up_row, table_row;  // in numbers
  int64_t page_bytes, slot_bytes, rope_at, scale_at;    // in bytes
  int64_t kind, interleaved;                            // of q, up and out: 0 float, 1 bf16, 2 f16
  float scale;
  int threads;
  int64_t kept;   // floats of a key as it is worked on: rank rounded up, then the rotary part
  int64_t width;  // the rank rounded up to whole vectors
};

INLINE int64_t size_of(int64_t kind) { return kind ? 2 : 4; }
static void widen_kind(const char* from, int64_t at, int64_t kind, int64_t count, float* to) {
  if (kind == 0) widen_row((const float*)from + at, count, to);
  else if (kind == 1) widen_row((const bf16*)from + at, count, to);
  else widen_row((const f16*)from + at, count, to);
}
static void put_kind(char* to, int64_t at, int64_t kind, float x) {
  if (kind == 0) ((float*)to)[at] = x;
  else if (kind == 1) store((bf16*)to + at, x);
  else store((f16*)to + at, x);
}

// (a, b) -> (a cos - b sin, b cos + a sin) for each pair
static void turn(const float* x, const float* cos, const float* sin, int64_t rope, bool interleaved, float* to) {
  const int64_t pairs = rope / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = x[i * step], b = x[i * step + apart];
    to[i * step] = a * cos[i] - b * sin[i];
    to[i * step + apart] = b * cos[i] + a * sin[i];
  }
}

// Key j of a sequence as floats: its latent, its rotary part.
INLINE float scale_at(const char* row, const Problem& p) {
  if (sizeof(PAGE) > 1) return 1.0f;
  float scale;
  __builtin_memcpy(&scale, row + p.scale_at, sizeof scale);
  return scale;
}
static void read_rope(const char* row, const Problem& p, float* to) {
  if (sizeof(PAGE) == 1) widen_row((const bf16*)(row + p.rope_at), p.rope, to);
  else widen_row((const PAGE*)(row + p.rope_at), p.rope, to);
}
static void read_block(const Problem& p, int64_t sequence, int64_t first, int64_t count, float* to) {
  const int32_t* table = p.tables + sequence * p.table_row;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t at = first + j;
    const char* row = p.pages + table[at / p.page] * p.page_bytes + at % p.page * p.slot_bytes;
    float* key = to + j * p.kept;
    widen_row((const PAGE*)row, p.rank, key);
    if (sizeof(PAGE) == 1) {
      const float scale = scale_at(row, p);
      for (int64_t c = 0; c < p.width; c += LANES) put(key + c, load(key + c) * scale);
    }
    read_rope(row, p, key + p.width);
  }
}

// Where every eighth key of the block from `first` on lies; the last one's place past the end, which is not read.
static void look_ahead(const Problem& p, int64_t sequence, int64_t first, int64_t end, const char** from) {
  const int32_t* table = p.tables + sequence * p.table_row;
  for (int64_t j = 0; j < BLOCK; j += 8) {
    const int64_t at = least(first + j, end - 1);
    from[j / 8] = p.pages + table[at / p.page] * p.page_bytes + at % p.page * p.slot_bytes;
  }
}

// Queries of up to WIDE rows, turned over: lane l of to[h * WIDE] is number h of row l.
static void turn_over(const float* rows, int64_t step, int64_t count, int64_t size, float* to) {
  for (int64_t h = 0; h < size; h += LANES)
    for (int64_t part = 0; part < WIDE; part += LANES) {
      vec row[LANES];
      UNROLL
      for (int64_t l = 0; l < LANES; ++l)
        row[l] = part + l < count ? load(rows + (part + l) * step + h) : vec{};
      turn_square(row);
      for (int64_t l = 0; l < least(LANES, size - h); ++l) put(to + (h + l) * WIDE + part, row[l]);
    }
}

// ---- softmax of one block ----------------------------------------------------------------------------

// What the lanes of a tile have gathered: maxima, sums; lane l sees keys below `to[l]`.
struct Tile {
  float *q, *largest, *sum, *gathered;
  int32_t to[WIDE];
};

// Scores [count][WIDE] become weights; what was gathered before, [values][WIDE], is scaled to the new maximum.
static void weigh(Tile& tile, float* scores, int64_t first, int64_t count, int64_t lanes, int64_t values, float scale) {
  for (int64_t part = 0; part < lanes; part += LANES) {
    ivec to;
    __builtin_memcpy(&to, tile.to + part, sizeof to);
    const vec nothing = spread(-__builtin_inff()), before = load(tile.largest + part);
    vec most = before;
    for (int64_t j = 0; j < count; ++j) {
      vec s = choose(to > (int32_t)(first + j), load(scores + j * WIDE + part) * scale, nothing);
      put(scores + j * WIDE + part, s);
      most = choose((most > s) | (most != most), most, s);  // NaN stays
    }
    const vec base = choose(most == nothing, vec{}, most);
    vec total = vec{};
    for (int64_t j = 0; j < count; ++j) {
      const vec weight = choose(to > (int32_t)(first + j), vector_exp(load(scores + j * WIDE + part) - base), vec{});
      put(scores + j * WIDE + part, weight);
      total += weight;
    }
    const ivec moved = before != most;
    const vec factor = vector_exp(before - base);
    put(tile.sum + part, load(tile.sum + part) * factor + total);
    put(tile.largest + part, most);
    bool any = false;
    for (int l = 0; l < LANES; ++l) any |= moved[l] != 0;
    if (!any) continue;
    for (int64_t v = 0; v < values; ++v)
      put(tile.gathered + v * WIDE + part, load(tile.gathered + v * WIDE + part) * factor);
  }
}

static void clear(Tile& tile, int64_t values) {
  for (int64_t part = 0; part < WIDE; part += LANES) {
    put(tile.largest + part, spread(-__builtin_inff()));
    put(tile.sum + part, vec{});
  }
  __builtin_memset(tile.gathered, 0, sizeof(float) * values * WIDE);
}
