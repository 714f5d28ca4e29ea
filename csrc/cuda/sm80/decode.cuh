// Decoding: attention of few queries over a KV cache. A CTA processes a contiguous run of key tiles
// (decode_schedule.cuh).
//
//   s = q k^T          score options; -inf where hidden
//   m' = max(m, max s), p = 2^(s - m'), l = l 2^(m - m') + sum p
//   o = o 2^(m - m') + p v
//   o / l, lse = m + log l; partial results if other CTAs own keys of the same unit
//
// The rows of a tile are all queries of all heads that share a key/value head, so that k and v are
// read once for them. Each warp owns 16 keys of a tile and has its own softmax state; the states
// are combined at the end. docs/attention.md, sections 2 and 5.
#pragma once

#include "cuda/common/softmax.cuh"
#include "cuda/sm80/decode_schedule.cuh"

namespace tk::cuda {

template <typename Element, int kWidth>
constexpr DecodeTile kDecodeTile = decode_tile(kArch, sizeof(Element), kWidth);

// One head of q, k or v. Each row is in a page, or in a batch entry.
template <typename Element>
struct KeyRows {
  const Element* data;
  int64_t page_stride, stride;
  int width;
  bool in_chunks;  // true if rows consist of aligned 16-byte chunks

  TK_DEVICE_METHOD const Element* at(int page, int row) const {
    return data + page * page_stride + row * stride;
  }
};

template <typename Element>
TK_DEVICE KeyRows<Element> key_rows(const Strided& x, int h, int64_t width) {
  const Element* const data = static_cast<const Element*>(x.data) + h * x.stride[1];
  const uint64_t bits = reinterpret_cast<uint64_t>(data) |
                        static_cast<uint64_t>((x.stride[0] | x.stride[2] | width) *
                                              static_cast<int64_t>(sizeof(Element)));
  return {data, x.stride[0], x.stride[2], static_cast<int>(width), bits % 16 == 0};
}

// Page table of one sequence: key j is row row_of(j) of page page_of(j).
struct KeyPages {
  const int32_t* table;  // null = not paged: the batch entry is one page
  int page_size, pages;
  Divisor by_page_size;
  int b, begin, end;  // begin <= j < end are the live keys

  TK_DEVICE_METHOD bool is_live(int j) const { return j >= begin && j < end; }
  // True if keys j to j + count - 1 are all live.
  TK_DEVICE_METHOD bool are_live(int j, int count) const { return j >= begin && j + count <= end; }
  // True if keys j to j + 15 are in one page for every multiple j of 16.
  TK_DEVICE_METHOD bool share_page() const {
    return !table || page_size % DecodeTile::kQueries == 0;
  }
  TK_DEVICE_METHOD int row_of(int j) const { return table ? by_page_size.divide(j).remainder : j; }
  // -1 if there is no such page: the table is on the device and not validated.
  TK_DEVICE_METHOD int page_of(int j) const {
    if (!table) return b;
    const int page = is_live(j) ? __ldg(table + by_page_size.divide(j).quotient) : -1;
    return page < pages ? page : -1;
  }
  // The page of `count` keys from j on, which share a page; -1 if none of them is live.
  TK_DEVICE_METHOD int page_of(int j, int count) const {
    return begin < j + count && j < end ? page_of(max(j, begin)) : -1;
  }
};

TK_DEVICE KeyPages key_pages(const DecodeArguments& a, const DecodeSequence& s) {
  const KVCache& cache = a.cache;
  const int32_t* const table =
      cache.page_size > 0 ? cache.block_table + s.b * cache.max_pages : nullptr;
  return {table,
          static_cast<int>(cache.page_size),
          static_cast<int>(cache.pages),
          a.by_page_size,
          s.b,
          s.begin,
          s.end};
}

// Starts an asynchronous copy of `rows` rows into a tile, from row `row` on, by thread `n` of
// `threads`. Row r is read from at(r), and filled with zeros if that is null. `any` is a readable
// address, passed to copies that read nothing.
template <typename Element, int kRows, int kWidth, typename At>
TK_DEVICE void start_rows(const SharedTile<Element, kRows, kWidth>& tile, int row, int rows,
                          unsigned n, unsigned threads, int width, bool in_chunks, const void* any,
                          const At& at) {
  constexpr int kPerChunk = 16 / sizeof(Element), kChunks = kWidth / kPerChunk;
#pragma unroll 1
  for (unsigned k = n; k < static_cast<unsigned>(rows * kChunks); k += threads) {
    const int r = static_cast<int>(k / kChunks), column = static_cast<int>(k % kChunks * kPerChunk);
    const Element* const from = column < width ? at(r) : nullptr;
    Element* const to = tile.at(row + r, column);
    if (in_chunks) {
      copy_async_16(to, from ? from + column : any, from != nullptr);
      continue;
    }
#pragma unroll 1
    for (int c = 0; c < kPerChunk; ++c) {
      to[c] = from && column + c < width ? from[column + c] : Element{};
    }
  }
}

// The same for the calling warp, with rows of `stride` from `from` on, all of which are read: the
// lanes keep their columns, so that addresses are computed once.
template <int kCopied, typename Element, int kRows, int kWidth>
TK_DEVICE void start_all_rows(const SharedTile<Element, kRows, kWidth>& tile, int row,
                              unsigned lane, const Element* from, int64_t stride, int width) {
  using Tile = SharedTile<Element, kRows, kWidth>;
  constexpr int kChunks = kWidth / Tile::kPerChunk, kStep = kWarp / kChunks;
  const int r = static_cast<int>(lane / kChunks);
  const int column = static_cast<int>(lane % kChunks * Tile::kPerChunk);
  const bool copied = column < width;
  if (copied) from += r * stride + column;
  const int offset = tile.offset(row + r, column);
#pragma unroll
  for (int n = 0; n < kCopied; n += kStep) {
    const int exchange = Tile::kPanelBytes == 128 ? n & 7 : n >> 1 & 3;  // r and n share no bits
    copy_async_16(tile.data + (offset ^ exchange * Tile::kPerChunk) + n * Tile::kPanel, from,
                  copied);
    from += kStep * stride;
  }
}

// Starts to copy a warp's kShare keys (or values) of the tile whose first key is `first`. `page` is
// their page if they share one.
template <int kShare, typename Element, int kRows, int kWidth>
TK_DEVICE void start_keys(const SharedTile<Element, kRows, kWidth>& tile, unsigned thread,
                          const KeyRows<Element>& keys, const KeyPages& pages, int first,
                          int page) {
  constexpr int kChunks = kWidth * static_cast<int>(sizeof(Element)) / 16;
  constexpr bool kWholeRows = kWarp % kChunks == 0;  // a warp copies whole rows at a time
  const unsigned lane = thread % kWarp;
  const int row = static_cast<int>(thread / kWarp) * kShare, j0 = first + row;
  const auto start = [&](const auto& at) {
    start_rows(tile, row, kShare, lane, kWarp, keys.width, keys.in_chunks, keys.data, at);
  };
  if (pages.share_page()) {
    const Element* const from = page < 0 ? nullptr : keys.at(page, pages.row_of(j0));
    if constexpr (kWholeRows) {
      if (keys.in_chunks && from && pages.are_live(j0, kShare)) {
        return start_all_rows<kShare>(tile, row, lane, from, keys.stride, keys.width);
      }
    }
    start([&](int r) { return from && pages.is_live(j0 + r) ? from + r * keys.stride : nullptr; });
  } else {
    start([&](int r) {
      const int key_page = pages.is_live(j0 + r) ? pages.page_of(j0 + r) : -1;
      return key_page < 0 ? nullptr : keys.at(key_page, pages.row_of(j0 + r));
    });
  }
}

// Shared memory of a CTA: two tiles of keys, two of values, and warps_m tiles of queries.
template <typename Element, int kWidth>
struct DecodeShared {
  static constexpr int kBlockN = kDecodeTile<Element, kWidth>.block_n;
  using KeyTile = SharedTile<Element, kBlockN, kWidth>;
  using QueryTile = SharedTile<Element, DecodeTile::kQueries, kWidth>;

  Element* data;

  TK_DEVICE_METHOD KeyTile k(int n) const { return {data + n % 2 * kBlockN * kWidth}; }
  TK_DEVICE_METHOD KeyTile v(int n) const { return {data + (2 + n % 2) * kBlockN * kWidth}; }
  TK_DEVICE_METHOD QueryTile q(int n) const {
    return {data + 4 * kBlockN * kWidth + n * DecodeTile::kQueries * kWidth};
  }
};

// Rows 16 n to 16 n + 15 of a tile.
template <typename Element, int kRows, int kWidth>
TK_DEVICE SharedTile<Element, kRows, kWidth> rows_16(const SharedTile<Element, kRows, kWidth>& tile,
                                                     int n) {
  return {tile.data + 16 * n * SharedTile<Element, kRows, kWidth>::kPanel};
}

// Starts to copy the queries of a unit, by all threads of the CTA.
template <typename Element, int kWidth>
TK_DEVICE void start_queries(const DecodeArguments& a, const DecodeSequence& s, int unit,
                             unsigned thread, const DecodeShared<Element, kWidth>& shared) {
  constexpr int kRows = DecodeTile::kQueries;
  constexpr int kThreads = kDecodeTile<Element, kWidth>.warps * kWarp;
  const Strided& given = a.params.q;
  const auto q = key_rows<Element>(given, 0, a.params.D);
  for (int n = 0; n < a.warps_m; ++n) {
    start_rows(shared.q(n), 0, kRows, thread, kThreads, q.width,
               q.in_chunks && given.stride[1] * sizeof(Element) % 16 == 0, q.data, [&](int r) {
                 const DecodeRow at = decode_row(a, unit, n * kRows + r);
                 return at.valid ? q.at(s.b, at.i) + at.h * given.stride[1] : nullptr;
               });
  }
}

// The two rows that a lane holds of 16; padding has head 0.
struct DecodeRows {
  int h[2];
  int i[2];
};

TK_DEVICE DecodeRows decode_rows(const DecodeArguments& a, int unit, int row) {
  DecodeRows x;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DecodeRow at = decode_row(a, unit, row + lane_index() / 4 + 8 * half);
    x.h[half] = at.valid ? at.h : 0;
    x.i[half] = at.i;
  }
  return x;
}

TK_DEVICE void apply(Accumulator<1, 2>& products, const DecodeArguments& a, const DecodeSequence& s,
                     const DecodeRows& x, int j0) {
  if (!a.score.has_options) return scale_products(a.score.scale, products);
  const ScoreParams& given = a.params.score;
  Scores scores = shared_scores(given, a.shift(s.N), static_cast<int>(a.params.M), s.N);
  const float slope[2] = {alibi_slope(given, s.b, x.h[0]), alibi_slope(given, s.b, x.h[1])};
  const auto to_score = [&](int row, int column, float& product) {
    scores.slope = row < 8 ? slope[0] : slope[1];
    scores.relative_bias = relative_table(given, row < 8 ? x.h[0] : x.h[1]);
    product = score(scores, product, row < 8 ? x.i[0] : x.i[1], j0 + column).value;
  };
  for_each_in_memory(to_score, products);
}

TK_DEVICE void apply_mask(Accumulator<1, 2>& scores, const DecodeRows& x, const DecodeSequence& s,
                          int j0) {
  scores.for_each([&](int row, int column, float& value) {
    const int i = row < 8 ? x.i[0] : x.i[1], j = j0 + column;
    if (j < s.row_begin(i) || j >= s.row_end(i)) value = -INFINITY;
  });
}

// The softmax states and sums of all warps, in shared memory.
template <int kWidth>
struct DecodeSums {
  static constexpr int kRow = kWidth + 8;  // padded: adjacent rows start in different banks
  float* o;                                // (warps, 16, kRow)
  float* m;                                // (warps, 16)
  float* l;                                // (warps, 16)

  TK_DEVICE_METHOD DecodeSums(void* memory, int warps) : o(static_cast<float*>(memory)) {
    m = o + warps * 16 * kRow;
    l = m + warps * 16;
  }
  static constexpr int kWarpBytes = 16 * (kRow + 2) * static_cast<int>(sizeof(float));
};

template <int kWidth>
TK_DEVICE void store_sums(const DecodeSums<kWidth>& sums, const SoftmaxState<1>& softmax,
                          const Accumulator<1, kWidth / 8>& o) {
  const int first = warp_index() * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + lane_index() / 4 + 8 * half;
    const float l = quad_sum(softmax.l[0][half]);
    if (lane_index() % 4 != 0) continue;
    sums.m[row] = softmax.m[0][half];
    sums.l[row] = l;
  }
  o.for_each_pair([&](int row, int column, float x, float y) {
    store_two(sums.o + (first + row) * DecodeSums<kWidth>::kRow + column, x, y);
  });
}

// Combines the sums of the warps that share row r of the unit (warps r / 16, r / 16 + warps_m, ...)
// and stores the result. One warp calls it for each row. `unit` converts scores to powers of 2,
// `natural` to natural logarithms.
template <typename Element, int kWidth>
TK_DEVICE void store_row(const DecodeArguments& a, const DecodeSequence& s, const DecodePart& part,
                         const DecodeSums<kWidth>& sums, int r, int warps, float unit,
                         float natural) {
  constexpr int kRow = DecodeSums<kWidth>::kRow;
  const DecodeRow at = decode_row(a, part.unit, r);
  if (!at.valid) return;
  const Problem& p = a.params;
  float m = -INFINITY, l = 0.0f;
  for (int n = r / 16; n < warps; n += a.warps_m) m = fmaxf(m, sums.m[n * 16 + r % 16]);
  const float base = m == -INFINITY ? 0.0f : m;
  for (int n = r / 16; n < warps; n += a.warps_m) {
    const int row = n * 16 + r % 16;
    l += sums.l[row] * weight(sums.m[row], base, unit);
  }
  const bool empty = m == -INFINITY && l == 0.0f;
  const float inverse = empty ? 0.0f : 1.0f / l;
  const float natural_max = __fmul_rn(m, natural);
  const auto o_rows = rows_of<Element>(a.params.o, s.b, at.h, 0, p.D_v);
  const int partial_row = part.partial * a.rows() + r;
  for (int c = lane_index(); c < o_rows.width; c += kWarp) {
    float sum = 0.0f;
    for (int n = r / 16; n < warps; n += a.warps_m) {
      const int row = n * 16 + r % 16;
      sum += sums.o[row * kRow + c] * weight(sums.m[row], base, unit);
    }
    if (part.partial < 0) {
      o_rows.at(at.i)[c] = to_element<Element>(sum * inverse);
    } else {
      a.o[partial_row * kWidth + c] = sum * inverse;
    }
  }
  if (lane_index() != 0) return;
  if (part.partial < 0) {
    LogSumExp lse;
    if (!empty) lse = log_sum_exp(natural_max, l);
    store_lse(a.params, (s.b * p.H_q + at.h) * p.lse_stride + at.i, lse);
  } else {
    a.m[partial_row] = natural_max;
    a.l[partial_row] = l;
  }
}

// Combines the sums of all warps in shared memory, which held the tiles, and stores the results.
template <typename Element, int kColumnTiles>
TK_DEVICE void combine_warps(const DecodeArguments& a, const DecodeSequence& s,
                             const DecodePart& part, unsigned char* memory,
                             const SoftmaxState<1>& softmax, const Accumulator<1, kColumnTiles>& o,
                             float unit, float natural) {
  constexpr int kWidth = 8 * kColumnTiles, kWarps = kDecodeTile<Element, kWidth>.warps;
  __syncthreads();  // all tiles have been read
  const DecodeSums<kWidth> sums(memory, kWarps);
  store_sums(sums, softmax, o);
  __syncthreads();  // all sums are written
  for (int r = warp_index(); r < a.rows(); r += kWarps) {
    store_row<Element>(a, s, part, sums, r, kWarps, unit, natural);
  }
}

// Processes one part of a unit.
template <typename Element, int kWidth>
TK_DEVICE void decode_part(const DecodeArguments& a, const DecodeSequence& s,
                           const DecodePart& part, unsigned char* memory) {
  constexpr DecodeTile kTile = kDecodeTile<Element, kWidth>;
  constexpr int kBlockN = kTile.block_n, kWarps = kTile.warps, kRows = DecodeTile::kQueries;
  constexpr int kShare = kBlockN / kWarps;  // keys that each warp loads
  using Shared = DecodeShared<Element, kWidth>;
  static_assert(kBlockN == 16 * kWarps);
  static_assert(kWarps * DecodeSums<kWidth>::kWarpBytes <= 4 * Shared::KeyTile::kBytes);

  // Opaque: addresses are not computed before the loop over parts, ahead of the first copy.
  const unsigned thread = static_cast<unsigned>(opaque(static_cast<int>(threadIdx.x)));
  const Problem& p = a.params;
  const int head = a.by_row_tiles.divide(part.unit).quotient, M = static_cast<int>(p.M);
  const int warps_n = a.warps_n, warp_m = warp_index() & (a.warps_m - 1);
  const int warp_n = warp_index() * warps_n / kWarps;  // warp_index() / warps_m
  const Shared shared{reinterpret_cast<Element*>(memory)};
  const auto k = key_rows<Element>(p.k, head, p.D);
  const auto v = key_rows<Element>(p.v, head, p.D_v);
  const KeyPages pages = key_pages(a, s);
  const bool plain = a.score.plain;
  const float scale = a.score.scale;
  const float unit = plain ? scale * kLog2E : kLog2E;  // converts scores to powers of 2

  const int count = part.last - part.first;
  const auto first_key = [&](int n) { return (s.first + part.first + n) * kBlockN; };
  const auto page = [&](int n) {
    const int j = first_key(n) + static_cast<int>(thread / kWarp) * kShare;
    return pages.share_page() && n < count ? pages.page_of(j, kShare) : -1;
  };
  const auto start_k = [&](int n, int its_page) {
    if (n < count) start_keys<kShare>(shared.k(n), thread, k, pages, first_key(n), its_page);
    commit_copies();
  };
  const auto start_v = [&](int n, int its_page) {
    if (n < count) start_keys<kShare>(shared.v(n), thread, v, pages, first_key(n), its_page);
    commit_copies();
  };

  // The page of a tile is looked up one iteration before it is needed.
  const int first_pages = page(lane_index());
  const int page_0 = __shfl_sync(~0u, first_pages, 0);
  int page_1 = __shfl_sync(~0u, first_pages, 1), page_2 = __shfl_sync(~0u, first_pages, 2);
  start_queries(a, s, part.unit, thread, shared);
  start_k(0, page_0);
  start_v(0, page_0);
  start_k(1, page_1);

  const bool alone = a.warps_m == 1;  // each warp reads only the keys that it has loaded
  const DecodeRows rows = decode_rows(a, part.unit, warp_m * kRows);
  Accumulator<1, kWidth / 8> o;
  SoftmaxState<1> softmax;
  o.clear();
  softmax.clear();
  for (int n = 0; n < count; ++n) {
    wait_copies<2>();
    __syncwarp();
    if (!alone || n == 0) __syncthreads();  // q and k have arrived; the previous v has been read
    start_v(n + 1, page_1);
    Accumulator<1, 2> scores[kWarps];  // element c: the warp's c-th group of 16 keys
#pragma unroll
    for (int c = 0; c < kWarps; ++c) {
      if (c >= a.warps_m) break;
      scores[c].clear();
      add_product<Major::kK, Major::kK, kWidth>(scores[c], shared.q(warp_m), 0,
                                                rows_16(shared.k(n), c * warps_n + warp_n), 0);
    }

    wait_copies<2>();
    __syncwarp();
    if (!alone) __syncthreads();  // v has arrived; k has been read
    start_k(n + 2, page_2);
    page_1 = page_2;
    page_2 = page(n + 3);
    const int j0 = first_key(n);
    const bool full = j0 >= s.row_begin(M - 1) && j0 + kBlockN <= s.row_end(0);
#pragma unroll
    for (int c = 0; c < kWarps; ++c) {
      if (c >= a.warps_m) break;
      const int group = c * warps_n + warp_n, j = j0 + 16 * group;
      if (!plain) apply(scores[c], a, s, rows, j);
      if (!full) apply_mask(scores[c], rows, s, j);
      softmax.template update<Element>(scores[c], o, unit);
      add_product<Major::kMN>(o, scores[c], rows_16(shared.v(n), group));
    }
  }
  combine_warps<Element>(a, s, part, memory, softmax, o, unit, plain ? scale : 1.0f);
}

template <typename Element, int kWidth>
TK_KERNEL((kDecodeTile<Element, kWidth>.threads()), (kDecodeTile<Element, kWidth>.blocks))
decode_kernel(const __grid_constant__ DecodeArguments a) {
  TK_SHARED_MEMORY(memory);
  const auto process = [&](const DecodeSequence& s, const DecodePart& part) {
    decode_part<Element, kWidth>(a, s, part, memory);
  };
  for_each_part(a, kDecodeTile<Element, kWidth>.block_n, process);
}

}  // namespace tk::cuda
