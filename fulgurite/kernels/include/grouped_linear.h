// Rows sorted by expert times quantized weights: `linear`, one expert after the other.
//
// a: addresses of the experts' weights, x (float), out (float), offsets, number of experts, columns
// of x and of out, strides of both, integer, threads, rows of both
EXPORT int64_t grouped_linear(const int64_t* a) {
  const Weight* const* weights = (const Weight* const*)a[0];
  const int32_t* offsets = (const int32_t*)a[3];
  for (int64_t e = 0; e < a[4]; ++e)
    if (offsets[e] < 0 || offsets[e] > a[11]) return 2;  // OFFSET_OUT_OF_RANGE of grouped_gemm.h
  int64_t start = 0;
  for (int64_t e = 0; e < a[4]; ++e) {
    const int64_t end = offsets[e];
    if (end > start) {
      LinearArgs call = {};
      call.weight = weights[e];
      call.x = (const float*)a[1] + start * a[7];
      call.out = (float*)a[2] + start * a[8];
      call.tokens = end - start;
      call.given = a[5];
      call.x_stride = a[7];
      call.out_stride = a[8];
      call.type = TYPE_F32;
      call.integer = (int32_t)a[9];
      call.threads = (int32_t)a[10];
      linear(&call);
    }
    start = end;
  }
  return 0;
}
