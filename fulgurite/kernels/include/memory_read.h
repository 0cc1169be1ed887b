// Reads memory with all threads and sums it: the lower bound on the time of a GEMV. Each thread reads from
// four addresses at once, four cache lines of each, and prefetches a line GEMM_PREFETCH_BYTES bytes further: the hardware
// prefetcher stops at the end of a page.
EXPORT uint64_t read_memory(const uint64_t* from, int64_t bytes, int threads) {
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
      for (int stream = 0; stream < 4; ++stream) {
        const Line* four = line + first + stream * each + i;
        UNROLL
        for (int l = 0; l < 4; ++l) {
          __builtin_prefetch((const char*)(four + l) + GEMM_PREFETCH_BYTES);
          sum[l] += four[l];
        }
      }
    const Line all_sums = sum[0] + sum[1] + sum[2] + sum[3];
    for (int i = 0; i < 8; ++i) total += all_sums[i];
  }
  return total;
}
