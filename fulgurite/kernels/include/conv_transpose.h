// Transposed convolutions with a packed weight, also the gradient of a convolution's input:
//
//   out[n, h*SH - PH + kh*DH, w*SW - PW + kw*DW, o] += x[n,h,w,c] * weight[c,o,kh,kw], over all c, h, w, kh, kw
//
// Output rows h with the same remainder of (h + PH) / SH read the same rows of the filter. So a strided one is
// SH * SW convolutions with stride 1, one a remainder (phase), each with a part of the filter, rotated. They
// write to interleaved positions. The weight is packed for each phase like that of a convolution
// (`packing.pack_transposed`). Strides above 1 have no dilation.

// One dimension of a phase as a convolution with stride 1.
struct PhaseSide {
  int64_t taps, pad, first, count;  // filter rows, zeros before the input, the first output position, how many
};

INLINE PhaseSide phase_side(int64_t phase, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation, int64_t size) {
  const int64_t taps = phase < kernel ? (kernel - phase + stride - 1) / stride : 0;
  int64_t start = (pad - phase + stride - 1) / stride;  // the first t with t * stride + phase - pad >= 0
  if (pad < phase) start = 0;
  const int64_t first = start * stride + phase - pad;
  const int64_t count = first < size ? (size - 1 - first) / stride + 1 : 0;
  return PhaseSide{taps, (taps - 1) * dilation - start, first, count};
}

// a: as for `conv`. x is the transposed convolution's input; the output's size includes its output padding.
EXPORT int64_t conv_transpose(const int64_t* a) {
  const Conv whole = read_conv(a);
  const int64_t columns = whole.out_channels / whole.groups, padded = (columns + LANES - 1) / LANES * LANES;
  int64_t failed = 0;
  const float* weight = whole.weight;
  for (int64_t phase_h = 0; phase_h < whole.stride_h; ++phase_h)
    for (int64_t phase_w = 0; phase_w < whole.stride_w; ++phase_w) {
      const PhaseSide h = phase_side(phase_h, whole.kernel_h, whole.stride_h, whole.pad_h, whole.dilation_h, whole.out_height);
      const PhaseSide w = phase_side(phase_w, whole.kernel_w, whole.stride_w, whole.pad_w, whole.dilation_w, whole.out_width);
      Conv c = whole;
      c.weight = weight;
      weight += whole.groups * padded * (whole.channels / whole.groups) * h.taps * w.taps;
      // A phase without a filter is its epilogue: a filter of no rows, which reads nothing.
      const int is_empty = h.taps == 0 || w.taps == 0;
      c.kernel_h = is_empty ? 0 : h.taps;
      c.kernel_w = is_empty ? 0 : w.taps;
      c.pad_h = is_empty ? 0 : h.pad;
      c.pad_w = is_empty ? 0 : w.pad;
      c.stride_h = c.stride_w = 1;
      c.out_height = h.count;
      c.out_width = w.count;
      c.out_w = whole.stride_w * whole.out_w;
      c.out_h = whole.stride_h * whole.out_h;
      const int64_t first = h.first * whole.out_h + w.first * whole.out_w;
      c.out += first;
      if (c.residual) c.residual += first;
      failed |= run_conv(c, a[28]);
    }
  return failed;
}
