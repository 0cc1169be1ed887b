// A plain read of memory by all threads: the floor under a product with one row of x. Each thread reads
// four places at once, four lines of each, and asks for a line a page ahead: the processor's own
// prefetching stops at the end of a page.
EXPORT uint64_t plain_read(const uint64_t* from, int64_t bytes, int threads) {
  typedef uint64_t Line __attribute__((vector_size(64), aligned(8)));
  const Line* line = (const Line*)from;
  const int64_t lines = bytes / 64;
  uint64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
    const int64_t first = lines * thread / count, each = (lines * (thread + 1) / count - first) / 16 * 4;
    Line sum[4] = {};
    for (int64_t i = 0; i < each; i += 4)
      UNROLL
      for (int place = 0; place < 4; ++place) {
        const Line* four = line + first + place * each + i;
        UNROLL
        for (int l = 0; l < 4; ++l) {
          __builtin_prefetch((const char*)(four + l) + AHEAD);
          sum[l] += four[l];
        }
      }
    const Line all_sums = sum[0] + sum[1] + sum[2] + sum[3];
    for (int i = 0; i < 8; ++i) total += all_sums[i];
  }
  return total;
}
