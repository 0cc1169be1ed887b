// Sampling, one row of logits a thread: bias, mask and penalties, then the likeliest token or a draw. A row is
// computed the same way whatever the other rows are. The steps are those of kernels/sampling/ops.py.

const int64_t NAN_LOGITS = -1, NO_ALLOWED_TOKEN = -2;  // as in sampling/table.py
const int HAS_BIAS = 1, HAS_MASK = 2, HAS_PENALTIES = 4;
const float NEGATIVE_INFINITY = -__builtin_inff();
const float FLOORS[2] = {1e-3f, 1e-6f};  // p relative to the largest, above which tokens are compared first

struct Settings { double temperature, min_p, top_k, top_p, random; };
struct Processing { double row, flags, repetition, frequency, presence; };
struct Scratch { float *x, *p; uint64_t *list, *work; };  // size + 16 each

// ---- bias, mask, penalties -----------------------------------------------------------------------------

INLINE void add_bias(float* x, const float* bias, int64_t size) {
  for (int64_t i = 0; i < size; ++i) x[i] += bias[i];
}
INLINE void apply_mask(float* x, const uint32_t* allowed, int64_t size) {
  for (int64_t start = 0; start < size; start += 32) {
    const uint32_t word = allowed[start / 32];
    if (word == 0xffffffffu) continue;
    const int64_t end = start + 32 < size ? start + 32 : size;
    for (int64_t i = start; i < end; ++i)
      if (!(word >> (i - start) & 1)) x[i] = NEGATIVE_INFINITY;
  }
}
// counts: 2 * occurrences in the reply, + 1 if the prompt has the token
INLINE void apply_penalties(float* x, const int32_t* counts, int64_t size, const Processing& s) {
  const float repetition = (float)s.repetition;
  for (int64_t start = 0; start < size; start += LANES) {
    const int64_t end = start + LANES < size ? start + LANES : size;
    int32_t any = 0;
    for (int64_t i = start; i < end; ++i) any |= counts[i];
    if (!any) continue;
    for (int64_t i = start; i < end; ++i) {
      if (!counts[i]) continue;
      x[i] = x[i] < 0 ? x[i] * repetition : x[i] / repetition;
      if (counts[i] > 1) x[i] -= (float)(s.frequency * (counts[i] >> 1) + s.presence);
    }
  }
}

// ---- one row -------------------------------------------------------------------------------------------

// The largest number; NaN if there is one. `x` is padded with -inf.
INLINE float find_max(const float* x, int64_t size) {
  vec largest = broadcast(NEGATIVE_INFINITY);
  ivec is_nan = {};
  for (int64_t i = 0; i < size; i += LANES) {
    const vec v = load(x + i);
    largest = vec_max(v, largest);
    is_nan |= v != v;
  }
  for (int l = 0; l < LANES; ++l)
    if (is_nan[l]) return __builtin_nanf("");
  return lane_max(largest);
}
INLINE int64_t find_first(const float* x, float wanted) {
  int64_t i = 0;
  while (x[i] != wanted) ++i;
  return i;
}

// A token's key: larger p first, then smaller ids. All keys differ.
INLINE uint64_t make_key(float p, int64_t id) { return (uint64_t)bits(p) << 32 | (0xffffffffu - (uint32_t)id); }
INLINE float key_p(uint64_t key) { return as_float((uint32_t)(key >> 32)); }
INLINE int64_t key_id(uint64_t key) { return 0xffffffffu - (uint32_t)key; }

// The smallest key of the shortest prefix, in falling order, whose weight reaches `wanted`; 0 if all together don't.
// The weight of a key is 1 or its p. Quickselect: reorders `keys`.
template <bool BY_COUNT> static uint64_t select_prefix(uint64_t* keys, int64_t count, double wanted) {
  int64_t first = 0, last = count;  // the answer is in keys[first:last], and `reached` lies before
  double reached = 0;
  while (first < last) {
    const uint64_t a = keys[first], b = keys[first + (last - first) / 2], c = keys[last - 1];
    const uint64_t pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
    int64_t middle = first;
    double weight = 0;
    for (int64_t i = first; i < last; ++i) {
      const uint64_t key = keys[i];
      if (key < pivot) continue;
      weight += BY_COUNT ? 1.0 : (double)key_p(key);
      keys[i] = keys[middle];
      keys[middle++] = key;
    }
    if (reached + weight < wanted) {  // all of them, and more
      reached += weight;
      first = middle;
    } else if (middle - first == 1) {
      return keys[first];
    } else if (middle == last) {  // the pivot is the smallest: split it off
      int64_t at = first;
      while (keys[at] != pivot) ++at;
      keys[at] = keys[last - 1];
      keys[--last] = pivot;
      double before = 0;
      for (int64_t i = first; i < last; ++i) before += BY_COUNT ? 1.0 : (double)key_p(keys[i]);
      if (reached + before < wanted) return pivot;
    } else {
      last = middle;
    }
  }
  return 0;
}

// The sum of all p of at least min_p.
INLINE double sum_probabilities(const float* p, int64_t size, float min_p) {
  double sums[LANES] = {};
  for (int64_t i = 0; i < size; i += LANES)
    for (int l = 0; l < LANES; ++l) sums[l] += p[i + l] >= min_p ? (double)p[i + l] : 0.0;
  double total = 0;
  for (int l = 0; l < LANES; ++l) total += sums[l];
  return total;
}

// Keys of all tokens with p >= floor, in order of ids.
INLINE int64_t list_tokens(const float* p, int64_t size, float floor, uint64_t* list) {
  int64_t count = 0;
  for (int64_t start = 0; start < size; start += LANES) {
    const ivec is_above = load(p + start) >= floor;
    int32_t any = 0;
    for (int l = 0; l < LANES; ++l) any |= is_above[l];
    if (!any) continue;
    const int64_t end = start + LANES < size ? start + LANES : size;
    for (int64_t i = start; i < end; ++i)
      if (p[i] >= floor) list[count++] = make_key(p[i], i);
  }
  return count;
}

// The smallest key that min-p, top-k and top-p keep. Few tokens are likely, so only those above a floor are listed;
// more only if these don't decide. `count`: the length of the list in `scratch.list`.
static uint64_t filter_tokens(const Scratch& scratch, int64_t size, const Settings& s, int64_t& count) {
  const float min_p = (float)s.min_p;
  const double total = s.top_p < 1 ? sum_probabilities(scratch.p, size, min_p) : 0;
  for (int level = 0; level < 3; ++level) {
    if (level < 2 && FLOORS[level] <= min_p) continue;
    const float floor = level < 2 ? FLOORS[level] : min_p;
    count = list_tokens(scratch.p, size, floor, scratch.list);
    const bool has_top_k = s.top_k > 0 && s.top_k <= count;
    const bool is_complete = level == 2 || has_top_k;  // no token below the floor is kept
    if (!is_complete && (s.top_k > 0 || s.top_p >= 1)) continue;
    uint64_t least = 1;
    double left = total;
    for (int64_t i = 0; i < count; ++i) scratch.work[i] = scratch.list[i];
    if (has_top_k) {
      least = select_prefix<true>(scratch.work, count, s.top_k);
      left = 0;
      for (int64_t i = 0; i < count; ++i) left += scratch.list[i] >= least ? (double)key_p(scratch.list[i]) : 0.0;
    }
    if (s.top_p >= 1) return least;
    const uint64_t found = select_prefix<false>(scratch.work, count, s.top_p * left);
    if (found) return found > least ? found : least;
    if (is_complete) return least;
  }
  return 1;
}

// The first id at which the sum of kept p exceeds `random` times their total.
INLINE int64_t draw_listed(const uint64_t* list, int64_t count, uint64_t least, double random) {
  double total = 0, sum = 0;
  for (int64_t i = 0; i < count; ++i) total += list[i] >= least ? (double)key_p(list[i]) : 0.0;
  int64_t last = 0;  // that changed the sum: rounding may keep it from exceeding the target
  for (int64_t i = 0; i < count; ++i) {
    const double before = sum;
    sum += list[i] >= least ? (double)key_p(list[i]) : 0.0;
    last = sum > before ? key_id(list[i]) : last;
    if (sum > random * total) break;
  }
  return last;
}
INLINE int64_t draw_any(const float* p, int64_t size, float min_p, double random) {
  const int64_t BLOCK = 1024;
  double total = 0, sum = 0;
  int64_t last_block = 0;  // that changes the sum
  for (int64_t start = 0; start < size; start += BLOCK) {
    const double before = total;
    total += sum_probabilities(p + start, size - start < BLOCK ? size - start : BLOCK, min_p);
    last_block = total > before ? start : last_block;
  }
  int64_t last = 0;  // token that changed the sum: rounding may keep it from exceeding the target
  for (int64_t start = 0; start <= last_block; start += BLOCK) {
    const int64_t end = start + BLOCK < size ? start + BLOCK : size;
    const double inside = sum_probabilities(p + start, end - start, min_p);
    if (start < last_block && sum + inside <= random * total) {
      sum += inside;
      continue;
    }
    for (int64_t i = start; i < end; ++i) {
      const double before = sum;
      sum += p[i] >= min_p ? (double)p[i] : 0.0;
      last = sum > before ? i : last;
      if (sum > random * total) return i;
    }
  }
  return last;
}

static int64_t sample_row(const Scratch& scratch, int64_t size, const Settings& s) {
  const float largest = find_max(scratch.x, size);
  if (largest != largest) return NAN_LOGITS;
  if (largest == NEGATIVE_INFINITY) return NO_ALLOWED_TOKEN;
  if (s.temperature == 0 || largest == __builtin_inff()) return find_first(scratch.x, largest);
  const float temperature = (float)s.temperature;
  for (int64_t i = 0; i < size; i += LANES)
    store_vec(scratch.p + i, vector_exp((load(scratch.x + i) - largest) / temperature));
  if (s.top_k <= 0 && s.top_p >= 1) return draw_any(scratch.p, size, (float)s.min_p, s.random);
  int64_t count = 0;
  const uint64_t least = filter_tokens(scratch, size, s, count);
  return draw_listed(scratch.list, count, least, s.random);
}

// a: logits, settings, processing or 0, counts, bias, allowed, tokens, scratch, rows, vocabulary, stride of logits,
// words of a row of `allowed`, bytes of a thread's scratch, threads
EXPORT int64_t sample_tokens(const int64_t* a) {
  const Settings* settings = (const Settings*)a[1];
  const Processing* processing = (const Processing*)a[2];
  const int64_t rows = a[8], size = a[9], stride = a[10], words = a[11], padded = (size + LANES - 1) / LANES * LANES;
  const int threads = choose_num_threads(rows * size, 1 << 15, (int)a[13]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    char* memory = (char*)a[7] + omp_get_thread_num() * a[12];
    const Scratch scratch = {(float*)memory, (float*)memory + padded, (uint64_t*)((float*)memory + 2 * padded),
                             (uint64_t*)((float*)memory + 2 * padded) + padded};
    const float* logits = (const float*)a[0] + r * stride;
    for (int64_t i = 0; i < size; ++i) scratch.x[i] = logits[i];
    for (int64_t i = size; i < padded; ++i) scratch.x[i] = NEGATIVE_INFINITY;
    const int flags = processing ? (int)processing[r].flags : 0;
    const int64_t row = flags ? (int64_t)processing[r].row : 0;
    if (flags & HAS_BIAS) add_bias(scratch.x, (const float*)a[4] + row * size, size);
    if (flags & HAS_MASK) apply_mask(scratch.x, (const uint32_t*)a[5] + row * words, size);
    if (flags & HAS_PENALTIES) apply_penalties(scratch.x, (const int32_t*)a[3] + row * size, size, processing[r]);
    ((int64_t*)a[6])[r] = sample_row(scratch, size, settings[r]);
  }
  return 0;
}
