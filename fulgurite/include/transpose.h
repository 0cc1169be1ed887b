// Transposes a tile: tile[u][v] = source[v * stride + u], in squares of vector registers.
template <int bytes> struct lanes_of;
template <> struct lanes_of<1> { typedef uint8_t lane; static const int count = 16; };
template <> struct lanes_of<2> { typedef uint16_t lane; static const int count = 16; };
template <> struct lanes_of<4> { typedef uint32_t lane; static const int count = 16; };
template <> struct lanes_of<8> { typedef uint64_t lane; static const int count = 8; };

// Exchanges the off-diagonal blocks of s lanes of rows k and k + s.
template <class V, class L, int n, int s> INLINE void exchange(V* row) {
  typedef L order __attribute__((vector_size(sizeof(L) * n)));
  order low, high;
  for (int l = 0; l < n; ++l) {
    low[l] = (L)((l & s) ? n + l - s : l);
    high[l] = (L)((l & s) ? n + l : l + s);
  }
  for (int k = 0; k < n; ++k) {
    if (k & s) continue;
    V a = SHUFFLE_LANES(row[k], row[k + s], low);
    V b = SHUFFLE_LANES(row[k], row[k + s], high);
    row[k] = a;
    row[k + s] = b;
  }
}

template <class L, int n>
INLINE void transpose_square(const L* source, int64_t stride, L* tile, int64_t width) {
  typedef L vector __attribute__((vector_size(sizeof(L) * n)));
  vector row[n];
  for (int k = 0; k < n; ++k) __builtin_memcpy(&row[k], source + k * stride, sizeof(vector));
  if (n > 8) exchange<vector, L, n, 8 % n>(row);
  exchange<vector, L, n, 4>(row);
  exchange<vector, L, n, 2>(row);
  exchange<vector, L, n, 1>(row);
  for (int k = 0; k < n; ++k) __builtin_memcpy(tile + k * width, &row[k], sizeof(vector));
}

// A square at the end of a tile: `rows` of `columns` elements.
template <class L, int n>
INLINE void transpose_part(
    const L* source, int64_t stride, L* tile, int64_t width, int64_t columns, int64_t rows) {
  typedef L vector __attribute__((vector_size(sizeof(L) * n)));
  vector row[n];
  for (int k = 0; k < n; ++k)
    row[k] = k < rows ? load_lanes<vector>(source + k * stride, columns) : vector{};
  if (n > 8) exchange<vector, L, n, 8 % n>(row);
  exchange<vector, L, n, 4>(row);
  exchange<vector, L, n, 2>(row);
  exchange<vector, L, n, 1>(row);
  for (int k = 0; k < n; ++k)
    if (k < columns) store_lanes(tile + k * width, row[k], rows);
}

template <class T>
INLINE void transpose_tile(
    const T* from, int64_t stride, T* to, int64_t width, int64_t us, int64_t vs) {
  typedef typename lanes_of<sizeof(T)>::lane L;
  const int n = lanes_of<sizeof(T)>::count;
  const L* source = (const L*)from;
  L* tile = (L*)to;
  const int64_t whole_u = us / n * n, whole_v = vs / n * n;
  for (int64_t v = 0; v < whole_v; v += n)
    for (int64_t u = 0; u < whole_u; u += n)
      transpose_square<L, n>(source + v * stride + u, stride, tile + u * width + v, width);
  for (int64_t v = 0; v < vs; v += n)
    for (int64_t u = v < whole_v ? whole_u : 0; u < us; u += n)
      transpose_part<L, n>(source + v * stride + u, stride, tile + u * width + v, width,
                           min_i64(n, us - u), min_i64(n, vs - v));
}
