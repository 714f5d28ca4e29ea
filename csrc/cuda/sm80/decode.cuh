// Decoding: few queries against a cache, of which a block takes a stretch (decode_schedule.cuh).
//
//   s = q k^T          scale, softcap, ALiBi; -inf where hidden
//   m' = max(m, max s), p = 2^(s - m'), l = l 2^(m - m') + sum p
//   o = o 2^(m - m') + p v
//   o / l, lse = m + log l; partial where other blocks have keys of the unit too
//
// Rows are all queries of all heads that share a key head: k and v are read once for them. Of a
// tile each warp takes 16 keys, so that it has a softmax of its own; warps are merged at the end.
// docs/attention.md, sections 2 and 5.
#pragma once

#include "cuda/common/softmax.cuh"
#include "cuda/sm80/decode_schedule.cuh"

namespace tk::cuda {

template <typename Element, int kWidth>
constexpr DecodeTile kDecodeTile = decode_tile(kArch, sizeof(Element), kWidth);

// One head of k or v. A row lies in a page, or in the batch entry.
template <typename Element>
struct KeyRows {
  const Element* data;
  int64_t page_stride, stride;
  int width;
  bool in_chunks;  // of 16 bytes, aligned

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

// Where a sequence's keys lie: key j is row_of(j) of page_of(j).
struct KeyPages {
  const int32_t* table;  // null = the batch entry is one page
  int page_size, pages;
  int b, begin, end;  // keys that are used

  TK_DEVICE_METHOD bool is_used(int j) const { return j >= begin && j < end; }
  // Keys j to j + 15, of which j is a multiple of 16, lie in one page.
  TK_DEVICE_METHOD bool together() const { return !table || page_size % DecodeTile::kQueries == 0; }
  TK_DEVICE_METHOD int row_of(int j) const { return table ? j % page_size : j; }
  // -1 where there is none: nobody has looked at the table.
  TK_DEVICE_METHOD int page_of(int j) const {
    if (!table) return b;
    const int page = is_used(j) ? __ldg(table + j / page_size) : -1;
    return page < pages ? page : -1;
  }
  // The page of keys that lie together, of which some may be used.
  TK_DEVICE_METHOD int page_of(int j, int count) const {
    return begin < j + count && j < end ? page_of(max(j, begin)) : -1;
  }
};

TK_DEVICE KeyPages key_pages(const DecodeArguments& a, const DecodeSequence& s) {
  const KVCache& cache = a.cache;
  const int32_t* const table =
      cache.page_size > 0 ? cache.block_table + s.b * cache.max_pages : nullptr;
  return {table, static_cast<int>(cache.page_size), static_cast<int>(cache.pages), s.b, s.begin,
          s.end};
}

// Starts to copy `rows` rows of a tile from `row` on, by `threads` threads of which this is the
// n-th: row r from at(r), zeros where that is null. `any` is an address that can be read.
template <typename Element, int kRows, int kWidth, typename At>
TK_DEVICE void start_rows(const SharedTile<Element, kRows, kWidth>& tile, int row, int rows, int n,
                          int threads, int width, bool in_chunks, const void* any, const At& at) {
  constexpr int kPerChunk = 16 / sizeof(Element), kChunks = kWidth / kPerChunk;
  if (in_chunks) {
#pragma unroll 4
    for (int k = n; k < rows * kChunks; k += threads) {
      const int r = k / kChunks, column = k % kChunks * kPerChunk;
      const Element* const from = column < width ? at(r) : nullptr;
      copy_async_16(tile.at(row + r, column), from ? from + column : any, from != nullptr);
    }
  } else {
#pragma unroll 1
    for (int k = n; k < rows * kWidth; k += threads) {
      const int r = k / kWidth, column = k % kWidth;
      const Element* const from = column < width ? at(r) : nullptr;
      *tile.at(row + r, column) = from ? from[column] : Element{};
    }
  }
}

// A warp's share of a tile of keys or values: `kShare` keys from j0 on, the tile's row j0 - first.
template <int kShare, typename Element, int kRows, int kWidth>
TK_DEVICE void start_keys(const SharedTile<Element, kRows, kWidth>& tile,
                          const KeyRows<Element>& keys, const KeyPages& pages, int first,
                          int page) {
  const int row = warp_index() * kShare, j0 = first + row;
  const auto start = [&](const auto& at) {
    start_rows(tile, row, kShare, lane_index(), kWarp, keys.width, keys.in_chunks, keys.data, at);
  };
  if (pages.together()) {
    const Element* const from = page < 0 ? nullptr : keys.at(page, pages.row_of(j0));
    start([&](int r) { return from && pages.is_used(j0 + r) ? from + r * keys.stride : nullptr; });
  } else {
    start([&](int r) {
      const int own = pages.is_used(j0 + r) ? pages.page_of(j0 + r) : -1;
      return own < 0 ? nullptr : keys.at(own, pages.row_of(j0 + r));
    });
  }
}

// Of a tile, 16 rows from 16 n on.
template <typename Element, int kRows, int kWidth>
TK_DEVICE SharedTile<Element, kRows, kWidth> sixteen(const SharedTile<Element, kRows, kWidth>& tile,
                                                     int n) {
  return {tile.data + 16 * n * SharedTile<Element, kRows, kWidth>::kPanel};
}

// Part of a unit.
struct DecodePart {
  int unit;
  int first, last;  // tiles, of the sequence's
  int64_t partial;  // where the result goes, if it is not the unit's whole; else -1
};

// The scores of 16 rows that a lane has two of.
struct DecodeScores {
  Scores scores;
  float slope[2];
  int i[2];
};

TK_DEVICE DecodeScores decode_scores(const DecodeArguments& a, const DecodeSequence& s, int unit,
                                     int row) {
  const ScoreParams& given = a.params.score;
  DecodeScores x{};
  x.scores.scale = static_cast<float>(given.scale);
  x.scores.softcap = static_cast<float>(given.softcap);
  x.scores.alibi_offset = s.N - static_cast<int>(a.params.M);
  const float* const slopes = static_cast<const float*>(given.alibi_slopes);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DecodeRow at = decode_row(a, unit, row + lane_index() / 4 + 8 * half);
    x.i[half] = at.i;
    x.slope[half] = slopes && at.there ? slopes[at.h] : 0.0f;
  }
  return x;
}

TK_DEVICE void apply(Accumulator<1, 2>& products, const DecodeScores& x, int j0) {
  const auto to_score = [&](int row, int column, float& s) {
    Scores own = x.scores;
    own.slope = row < 8 ? x.slope[0] : x.slope[1];
    s = score(own, s, row < 8 ? x.i[0] : x.i[1], j0 + column).value;
  };
  for_each_in_memory(to_score, products);
}

TK_DEVICE void apply_mask(Accumulator<1, 2>& scores, const DecodeScores& x, const DecodeSequence& s,
                          int j0) {
  scores.for_each([&](int row, int column, float& value) {
    const int i = row < 8 ? x.i[0] : x.i[1], j = j0 + column;
    if (j < s.row_begin(i) || j >= s.row_end(i)) value = -INFINITY;
  });
}

// What warps have summed, brought together in shared memory.
template <int kWidth>
struct DecodeSums {
  static constexpr int kRow = kWidth + 8;  // neighbours begin in different banks
  float* o;                                // (warps, 16, kRow)
  float* m;                                // (warps, 16)
  float* l;                                // (warps, 16)

  TK_DEVICE_METHOD DecodeSums(void* memory, int warps) : o(static_cast<float*>(memory)) {
    m = o + warps * 16 * kRow;
    l = m + warps * 16;
  }
  static constexpr int kBytes = 16 * (kRow + 2) * static_cast<int>(sizeof(float));  // of a warp
};

template <int kWidth>
TK_DEVICE void put(const DecodeSums<kWidth>& sums, const SoftmaxState<1>& softmax,
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

// A row of the unit: warps that share it, from `first` on every `step`-th. A warp calls it
// together.
template <typename Element, int kWidth>
TK_DEVICE void finish_row(const DecodeArguments& a, const DecodeSequence& s, const DecodePart& part,
                          const DecodeSums<kWidth>& sums, int r, int warps, float unit,
                          float natural) {
  constexpr int kRow = DecodeSums<kWidth>::kRow;
  const DecodeRow at = decode_row(a, part.unit, r);
  if (!at.there) return;
  const Problem& p = a.params;
  float m = -INFINITY, l = 0.0f;
  for (int n = r / 16; n < warps; n += a.warps_m) m = fmaxf(m, sums.m[n * 16 + r % 16]);
  const float base = m == -INFINITY ? 0.0f : m;
  for (int n = r / 16; n < warps; n += a.warps_m) {
    const int row = n * 16 + r % 16;
    l += sums.l[row] * weight<Element>(sums.m[row], base, unit);
  }
  const bool empty = m == -INFINITY && l == 0.0f;
  const float inverse = empty ? 0.0f : 1.0f / l;
  const float lse = empty ? -INFINITY : m * natural + logf(l);
  const auto o_rows = rows_of<Element>(a.params.o, s.b, at.h, 0, p.D_v);
  const int64_t place = part.partial * a.rows() + r;
  for (int c = lane_index(); c < o_rows.width; c += kWarp) {
    float sum = 0.0f;
    for (int n = r / 16; n < warps; n += a.warps_m) {
      const int row = n * 16 + r % 16;
      sum += sums.o[row * kRow + c] * weight<Element>(sums.m[row], base, unit);
    }
    if (part.partial < 0) {
      o_rows.at(at.i)[c] = to_element<Element>(sum * inverse);
    } else {
      a.o[place * kWidth + c] = sum * inverse;
    }
  }
  if (lane_index() != 0) return;
  if (part.partial < 0) {
    static_cast<float*>(a.params.lse)[(s.b * p.H_q + at.h) * p.lse_stride + at.i] = lse;
  } else {
    a.lse[place] = lse;
  }
}

template <typename Element, int kWidth>
TK_DEVICE void decode_part(const DecodeArguments& a, const DecodeSequence& s,
                           const DecodePart& part, unsigned char* memory) {
  constexpr DecodeTile kTile = kDecodeTile<Element, kWidth>;
  constexpr int kBlockN = kTile.block_n, kWarps = kTile.warps, kRows = DecodeTile::kQueries;
  constexpr int kShare = kBlockN / kWarps;  // keys that a warp loads
  static_assert(kBlockN == 16 * kWarps);
  using Tile = SharedTile<Element, kBlockN, kWidth>;
  static_assert(kWarps * DecodeSums<kWidth>::kBytes <= 4 * Tile::kBytes);

  const Problem& p = a.params;
  const int head = part.unit / a.row_tiles, M = static_cast<int>(p.M);
  const int warp_m = warp_index() % a.warps_m, warps_n = kWarps / a.warps_m;
  const int warp_n = warp_index() / a.warps_m;
  Element* const keys_memory = reinterpret_cast<Element*>(memory);
  const auto k_tile = [&](int n) { return Tile{keys_memory + n % 2 * kBlockN * kWidth}; };
  const auto v_tile = [&](int n) { return Tile{keys_memory + (2 + n % 2) * kBlockN * kWidth}; };
  const auto q_tile = [&](int n) {
    Element* const q_memory = keys_memory + 4 * kBlockN * kWidth;
    return SharedTile<Element, kRows, kWidth>{q_memory + n * kRows * kWidth};
  };
  const auto k = key_rows<Element>(p.k, head, p.D);
  const auto v = key_rows<Element>(p.v, head, p.D_v);
  const KeyPages pages = key_pages(a, s);
  const bool plain = has_plain_scores<Element>(p.score);
  const float scale = static_cast<float>(p.score.scale);
  const float unit = plain ? scale * kLog2E : kLog2E;  // of a score, in powers of 2

  const int count = part.last - part.first;
  const auto first_key = [&](int n) { return (s.first + part.first + n) * kBlockN; };
  const auto page = [&](int n) {
    const int j = first_key(n) + warp_index() * kShare;
    return pages.together() && n < count ? pages.page_of(j, kShare) : -1;
  };
  const auto start_k = [&](int n, int its_page) {
    if (n < count) start_keys<kShare>(k_tile(n), k, pages, first_key(n), its_page);
    commit_copies();
  };
  const auto start_v = [&](int n, int its_page) {
    if (n < count) start_keys<kShare>(v_tile(n), v, pages, first_key(n), its_page);
    commit_copies();
  };

  // Pages are looked up a turn before they are needed.
  const int page_0 = page(0);
  int page_1 = page(1), page_2 = page(2);
  const auto q = key_rows<Element>(p.q, 0, p.D);
  for (int n = warp_index(); n < a.warps_m; n += kWarps) {
    start_rows(q_tile(n), 0, kRows, lane_index(), kWarp, q.width,
               q.in_chunks && p.q.stride[1] * sizeof(Element) % 16 == 0, q.data, [&](int r) {
                 const DecodeRow at = decode_row(a, part.unit, n * kRows + r);
                 return at.there ? q.at(s.b, at.i) + at.h * p.q.stride[1] : nullptr;
               });
  }
  start_k(0, page_0);
  start_v(0, page_0);
  start_k(1, page_1);

  const bool alone = a.warps_m == 1;
  const DecodeScores rows = decode_scores(a, s, part.unit, warp_m * kRows);
  Accumulator<1, kWidth / 8> o;
  SoftmaxState<1> softmax;
  o.clear();
  softmax.clear();
  for (int n = 0; n < count; ++n) {
    wait_copies<2>();
    __syncwarp();
    if (!alone || n == 0) __syncthreads();  // q and k are there, and the values before are read
    start_v(n + 1, page_1);
    Accumulator<1, 2> scores[kWarps];  // of the warp's first, second, ... 16 keys
#pragma unroll
    for (int c = 0; c < kWarps; ++c) {
      if (c >= a.warps_m) break;
      scores[c].clear();
      add_product<Major::kK, Major::kK, kWidth>(scores[c], q_tile(warp_m), 0,
                                                sixteen(k_tile(n), c * warps_n + warp_n), 0);
    }

    wait_copies<2>();
    __syncwarp();
    if (!alone) __syncthreads();  // v is there, and k read
    start_k(n + 2, page_2);
    page_1 = page_2;
    page_2 = page(n + 3);
    const int j0 = first_key(n);
    const bool full = j0 >= s.row_begin(M - 1) && j0 + kBlockN <= s.row_end(0);
#pragma unroll
    for (int c = 0; c < kWarps; ++c) {
      if (c >= a.warps_m) break;
      const int sixteenth = c * warps_n + warp_n, j = j0 + 16 * sixteenth;
      if (!plain) apply(scores[c], rows, j);
      if (!full) apply_mask(scores[c], rows, s, j);
      softmax.template update<Element>(scores[c], o, unit);
      add_product<Major::kMN>(o, scores[c], sixteen(v_tile(n), sixteenth));
    }
  }

  __syncthreads();  // all tiles are read
  const DecodeSums<kWidth> sums(memory, kWarps);
  put(sums, softmax, o);
  __syncthreads();  // all sums are there
  for (int r = warp_index(); r < a.rows(); r += kWarps) {
    finish_row<Element>(a, s, part, sums, r, kWarps, unit, plain ? scale : 1.0f);
  }
}

template <typename Element, int kWidth>
TK_KERNEL((kDecodeTile<Element, kWidth>.threads()), (kDecodeTile<Element, kWidth>.blocks))
decode_kernel(const __grid_constant__ DecodeArguments a) {
  TK_SHARED_MEMORY(memory);
  const DecodeSchedule schedule(a);
  const int64_t block = blockIdx.x;
  if (block >= schedule.blocks()) return;
  const int64_t last = schedule.begin_of(block + 1);
  for (int64_t x = schedule.begin_of(block); x < last;) {
    int64_t begin;
    const DecodeSequence s = schedule.at(x, begin);
    const int unit = static_cast<int>((x - begin) / s.tiles);
    const int first = static_cast<int>((x - begin) % s.tiles);
    const int64_t rest = last - x;
    const int end = rest < s.tiles - first ? first + static_cast<int>(rest) : s.tiles;
    const bool whole = first == 0 && end == s.tiles;
    decode_part<Element, kWidth>(
        a, s, {unit, first, end, whole ? -1 : partial_of(block, first == 0)}, memory);
    x += end - first;
    __syncthreads();  // the sums are read
  }
}

}  // namespace tk::cuda
