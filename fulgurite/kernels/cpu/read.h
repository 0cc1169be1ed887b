// A plain read of memory by all threads: the floor under a product with one row of x.
EXPORT uint64_t plain_read(const uint64_t* from, int64_t bytes, int threads) {
  typedef uint64_t Line __attribute__((vector_size(64)));
  const Line* line = (const Line*)from;
  const int64_t lines = bytes / 64;
  uint64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
    Line a = {}, b = {}, c = {}, d = {};
    for (int64_t i = lines * thread / count; i + 4 <= lines * (thread + 1) / count; i += 4) {
      a += line[i];
      b += line[i + 1];
      c += line[i + 2];
      d += line[i + 3];
    }
    a += b + c + d;
    for (int i = 0; i < 8; ++i) total += a[i];
  }
  return total;
}
