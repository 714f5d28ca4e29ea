// Matrix products of shared-memory tiles on tensor cores: fragments, accumulators and operands.
//
// mma.m16n8k16 multiplies 16 x 16 elements of a by 16 x 8 of b; a lane holds 8 and 4 of them. Lane
// 4 g + t holds rows g and g + 8 and columns 2 t, 2 t + 1 of the result (PTX ISA, "Matrix Fragments
// for mma.m16n8k16"). A float32 operand is split into three bfloat16 parts. Six of the nine partial
// products are computed; the others are below 2^-24 of the result. TwoParts is split into two,
// whose four products are all computed.
#pragma once

#include <type_traits>

#include "cuda/common/shared_tile.cuh"
#include "cuda/platform/major.h"

namespace tk::cuda {

TK_DEVICE int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }
TK_DEVICE int warp_index() { return static_cast<int>(threadIdx.x) / kWarp; }

// Element of a shared-memory tile: a float32 number of which 16 bits are multiplied.
struct TwoParts {
  float value;
};
TK_DEVICE float to_float(const TwoParts& x) { return x.value; }
TK_DEVICE void store_two(TwoParts* to, float x, float y) {
  to[0].value = x;
  to[1].value = y;
}

// Number of bfloat16 parts of an operand; 1 for the half types themselves.
template <typename Element>
constexpr int kParts = sizeof(Element) == 4 ? 3 : 1;
template <>
constexpr int kParts<TwoParts> = 2;

// A 16 x 16 operand fragment: one of a, or two adjacent 16 x 8 ones of b.
template <typename Element>
struct Fragment {
  uint32_t x[kParts<Element>][4];
};

// Calls visit(m, n, e) for element e of each 16 x 8 tile (m, n) of an accumulator. The loops are
// unrolled, so that m, n and e are compile-time constants.
template <int kM, int kN, typename Visit>
TK_DEVICE void for_each_element(const Visit& visit) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(m, n, e);
    }
  }
}

// Row and column of a lane's element e within a 16 x 8 tile.
TK_DEVICE int row_of(int e) { return lane_index() / 4 + e / 2 * 8; }
TK_DEVICE int column_of(int e) { return lane_index() % 4 * 2 + e % 2; }

// The dimension along the rows of an accumulator of scores; its columns are the other one.
enum class RowsAre { kQueries, kKeys };

// A warp's float32 accumulator of 16 kM x 8 kN elements.
template <int kM, int kN>
struct Accumulator {
  static constexpr int kRows = 16 * kM, kColumns = 8 * kN;
  float x[kM][kN][4];

  TK_DEVICE_METHOD void clear() {
    for_each_element<kM, kN>([&](int m, int n, int e) { x[m][n][e] = 0.0f; });
  }

  // Calls visit(row, column, element) for the elements of this lane.
  template <typename Visit>
  TK_DEVICE_METHOD void for_each(const Visit& visit) {
    for_each_element<kM, kN>(
        [&](int m, int n, int e) { visit(16 * m + row_of(e), 8 * n + column_of(e), x[m][n][e]); });
  }

  // Calls visit(column, first, second) for adjacent elements in row 16 k + row_of(2 half).
  template <typename Visit>
  TK_DEVICE_METHOD void for_each_pair_of(int k, int half, const Visit& visit) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      visit(8 * n + column_of(0), x[k][n][2 * half], x[k][n][2 * half + 1]);
    }
  }

  // Calls visit(m, n, half, first, second) for adjacent elements of row 16 m + row_of(2 half) and
  // columns from 8 n + column_of(0) on.
  template <typename Visit>
  TK_DEVICE_METHOD void for_each_pair_index(const Visit& visit) const {
    for_each_element<kM, kN>([&](int m, int n, int e) {
      if (e % 2 == 0) visit(m, n, e / 2, x[m][n][e], x[m][n][e + 1]);
    });
  }

  // Calls visit(row, column, first, second) for adjacent elements of a row.
  template <typename Visit>
  TK_DEVICE_METHOD void for_each_pair(const Visit& visit) const {
    for_each_pair_index([&](int m, int n, int half, float first, float second) {
      visit(16 * m + row_of(2 * half), 8 * n + column_of(0), first, second);
    });
  }
};

// Like for_each, for the elements of one or two accumulators, but as a rolled loop over copies in
// local memory. It is for long and rare code (score options, a dense mask): unrolled, that
// would take registers from the main loop and multiply the compile time.
template <typename Visit, int kM, int kN, typename... Others>
TK_DEVICE void for_each_in_memory(const Visit& visit, Accumulator<kM, kN>& first,
                                  Others&... others) {
  constexpr int kNumbers = kM * kN * 4, kCount = 1 + sizeof...(Others);
  Accumulator<kM, kN>* const all[kCount] = {&first, &others...};
  float copy[kCount][kNumbers];
#pragma unroll
  for (int n = 0; n < kCount * kNumbers; ++n) {
    const int k = n % kNumbers;
    copy[n / kNumbers][k] = all[n / kNumbers]->x[k / 4 / kN][k / 4 % kN][k % 4];
  }
#pragma unroll 1
  for (int k = 0; k < kNumbers; ++k) {
    const int i = k / 4 / kN * 16 + row_of(k % 4), j = k / 4 % kN * 8 + column_of(k % 4);
    if constexpr (kCount == 1) {
      visit(i, j, copy[0][k]);
    } else {
      visit(i, j, copy[0][k], copy[1][k]);
    }
  }
#pragma unroll
  for (int n = 0; n < kCount * kNumbers; ++n) {
    const int k = n % kNumbers;
    all[n / kNumbers]->x[k / 4 / kN][k / 4 % kN][k % 4] = copy[n / kNumbers][k];
  }
}

template <typename Element>
TK_DEVICE void set_pair(Fragment<Element>& f, int n, float x, float y) {
  if constexpr (kParts<Element> == 1) {
    f.x[0][n] = pack(x, y, Element{});
  } else {
#pragma unroll
    for (int part = 0; part < kParts<Element>; ++part) {
      const uint32_t rounded = pack(x, y, BFloat16{});
      f.x[part][n] = rounded;
      x -= to_float(BFloat16{static_cast<uint16_t>(rounded)});
      y -= to_float(BFloat16{static_cast<uint16_t>(rounded >> 16)});
    }
  }
}

// Operand of a matrix product.
enum class Side { kA, kB };

// Loads 16 x 16 fragments of an operand from shared memory. A warp uses kAcross rows of a, or
// columns of b, from `first` on.
template <Side kSide, Major kMajor, int kAcross, typename Tile>
class Operand {
 public:
  using Element = std::remove_pointer_t<decltype(Tile::data)>;

  TK_DEVICE_METHOD Operand(const Tile& tile, int first) : tile_(tile), first_(first) {
    if constexpr (kMoves) lane_offset_ = opaque(tile.offset(row(0), column(0)));
  }

  // Loads the fragment at row (a) or column (b) first + across and at depth k. Both are
  // compile-time constants in unrolled loops.
  TK_DEVICE_METHOD void load(Fragment<Element>& f, int across, int k) const {
    if constexpr (sizeof(Element) == 4) {
      load_numbers(f, across, k);
    } else {
      const int rows = kMajor == Major::kK ? across : k;
      const int columns = kMajor == Major::kK ? k : across;
      const Element* const from =
          kMoves ? tile_.moved(lane_offset_, rows, columns) : tile_.at(row(rows), column(columns));
      if constexpr (kMajor == Major::kK) {
        load_matrices(f.x[0], from);
      } else {
        load_matrices_transposed(f.x[0], from);
      }
    }
  }

 private:
  // Constant offsets from one lane offset, instead of addresses that each need a register. This
  // requires that the warp's columns do not cross a panel boundary.
  static constexpr bool kMoves =
      sizeof(Element) == 2 && (kMajor == Major::kK || Tile::template kMovesAcross<kAcross>);

  // Row and column of this lane's ldmatrix address. The second of the four 8 x 8 matrices is below
  // the first for a, and beside it for b; each group of eight lanes addresses one matrix.
  TK_DEVICE_METHOD int row(int rows) const {
    constexpr bool kBelow = (kSide == Side::kA) == (kMajor == Major::kK);
    const int lane = lane_index(), within = kBelow ? lane % 16 : lane % 8 + lane / 16 * 8;
    return rows + within + (kMajor == Major::kK ? first_ : 0);
  }
  TK_DEVICE_METHOD int column(int columns) const {
    constexpr bool kBelow = (kSide == Side::kA) == (kMajor == Major::kK);
    const int lane = lane_index(), within = kBelow ? lane / 16 * 8 : lane / 8 % 2 * 8;
    return columns + within + (kMajor == Major::kMN ? first_ : 0);
  }

  TK_DEVICE_METHOD void load_numbers(Fragment<Element>& f, int across, int k) const {
    const int lane = lane_index();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int i = first_ + across + lane / 4 + (kSide == Side::kA ? n % 2 : n / 2) * 8;
      const int c = k + lane % 4 * 2 + (kSide == Side::kA ? n / 2 : n % 2) * 8;
      if constexpr (kMajor == Major::kK) {
        set_pair(f, n, to_float(*tile_.at(i, c)), to_float(*tile_.at(i, c + 1)));
      } else {
        set_pair(f, n, to_float(*tile_.at(c, i)), to_float(*tile_.at(c + 1, i)));
      }
    }
  }

  Tile tile_;
  int first_, lane_offset_;
};

// Converts 16 x 16 elements of an accumulator (weights) to an operand fragment a, rounded.
template <typename Element, int kM, int kN>
TK_DEVICE void to_a(Fragment<Element>& a, const Accumulator<kM, kN>& from, int m, int k16) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float (&x)[4] = from.x[m][2 * k16 + n / 2];
    set_pair(a, n, x[n % 2 * 2], x[n % 2 * 2 + 1]);
  }
}

template <typename Element>
TK_DEVICE void multiply(float (&c)[4], const Fragment<Element>& a, const Fragment<Element>& b,
                        int half) {
  if constexpr (kParts<Element> == 1) {
    multiply_accumulate(c, a.x[0], b.x[0][2 * half], b.x[0][2 * half + 1], Element{});
  } else {
    // Smallest parts first. Tensor cores truncate sums towards zero, and a long sum would drift. So
    // each product starts from zero, and is added to c by float32 additions, which round.
    float sum[4] = {};
    constexpr int kLast = kParts<Element> - 1;
#pragma unroll
    for (int order = 2; order >= 0; --order) {
#pragma unroll
      for (int n = kLast; n >= 0; --n) {
        if (order < n || order - n > kLast) continue;
        const uint32_t (&part)[4] = b.x[order - n];
        multiply_accumulate(sum, a.x[n], part[2 * half], part[2 * half + 1], BFloat16{});
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) c[n] += sum[n];
  }
}

// c += a b for 16 columns of a, from k on; `a` holds the fragments of the warp's rows.
template <int kM, int kN, typename Element, typename OperandB>
TK_DEVICE void add_product(Accumulator<kM, kN>& c, const Fragment<Element> (&a)[kM],
                           const OperandB& b_operand, int k) {
  static_assert(kN % 2 == 0);
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    Fragment<Element> b;
    b_operand.load(b, 8 * n, k);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      multiply(c.x[m][n], a[m], b, 0);
      multiply(c.x[m][n + 1], a[m], b, 1);
    }
  }
}

// c += a b, where c is the part of the product that begins at (row, column).
template <Major kA, Major kB, int kDepth, int kM, int kN, typename TileA, typename TileB>
TK_DEVICE void add_product(Accumulator<kM, kN>& c, const TileA& a_tile, int row,
                           const TileB& b_tile, int column) {
  using OperandA = Operand<Side::kA, kA, 16 * kM, TileA>;
  using Element = typename OperandA::Element;
  static_assert(kDepth % 16 == 0);
  const OperandA a_operand(a_tile, row);
  const Operand<Side::kB, kB, 8 * kN, TileB> b_operand(b_tile, column);
#pragma unroll(kParts<Element> == 1 ? kDepth / 16 : 1)
  for (int k = 0; k < kDepth; k += 16) {
    Fragment<Element> a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) a_operand.load(a[m], 16 * m, k);
    add_product(c, a, b_operand, k);
  }
}

// c += a b with a in registers.
template <Major kB, int kM, int kN, int kDepthTiles, typename TileB>
TK_DEVICE void add_product(Accumulator<kM, kN>& c, const Accumulator<kM, kDepthTiles>& a_numbers,
                           const TileB& b_tile) {
  const Operand<Side::kB, kB, 8 * kN, TileB> b_operand(b_tile, 0);
  using Element = typename decltype(b_operand)::Element;
#pragma unroll
  for (int k = 0; k < kDepthTiles / 2; ++k) {
    Fragment<Element> a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) to_a(a[m], a_numbers, m, k);
    add_product(c, a, b_operand, 16 * k);
  }
}

// Rounds an accumulator to the element type and stores it to shared memory at (row, column).
template <int kM, int kN, typename Element, int kRows, int kWidth>
TK_DEVICE void store_shared(const SharedTile<Element, kRows, kWidth>& tile, int row, int column,
                            const Accumulator<kM, kN>& from) {
  using Tile = SharedTile<Element, kRows, kWidth>;
  if constexpr (sizeof(Element) == 2 && Tile::template kMovesAcross<8 * kN>) {
    const int lane_offset = opaque(tile.offset(row + row_of(0), column + column_of(0)));
    from.for_each_pair_index([&](int m, int n, int half, float x, float y) {
      store_two(tile.moved(lane_offset, 16 * m + 8 * half, 8 * n), x, y);
    });
  } else {
    from.for_each_pair(
        [&](int i, int j, float x, float y) { store_two(tile.at(row + i, column + j), x, y); });
  }
}

}  // namespace tk::cuda
