// The schedule of decoding: every tile is processed once, in contiguous runs of equal length, and
// units are divided only where whole ones would take longer.
#include <algorithm>

#include "cases.h"
#include "cuda/sm80/decode_launches.cuh"

using namespace tk::cuda;

namespace {

constexpr int kBlockN = 64;
constexpr int kSizes[] = {1, 2, 3, 5, 16, 31, 32, 33, 100};

std::string text(int x) { return std::to_string(x); }

TK_CASE(runs_are_contiguous_and_equal) {
  for (int blocks = 1; blocks < 40; ++blocks) {
    for (int total = blocks; total < 300; ++total) {
      const DecodeRuns runs = DecodeRuns::of(total, blocks);
      const std::string of = text(total) + " tiles, " + text(blocks) + " runs: ";
      expect_equal(runs.begin_of(0), 0, of + "begin");
      expect_equal(runs.begin_of(blocks), total, of + "end");
      for (int n = 0; n < blocks; ++n) {
        const int length = runs.begin_of(n + 1) - runs.begin_of(n);
        expect(length == runs.longest() || length == total / blocks, of + "length of a run");
        for (int x = runs.begin_of(n); x < runs.begin_of(n + 1); ++x) {
          expect_equal(runs.block_of(x), n, of + "run of tile " + text(x));
        }
      }
    }
  }
}

TK_CASE(runs_of_many_tiles) {
  constexpr int kMost = 1 << 30;
  for (const int blocks : {1, 2, 7, 264, 396, 1000}) {
    for (const int total : {kMost, kMost - 1, kMost / 3}) {
      const DecodeRuns runs = DecodeRuns::of(total, blocks);
      expect_equal(runs.begin_of(blocks), total, "end");
      for (int n = 0; n < blocks; ++n) {
        expect_equal(runs.block_of(runs.begin_of(n)), n, "run of its first tile");
        expect_equal(runs.block_of(runs.begin_of(n + 1) - 1), n, "run of its last tile");
      }
    }
  }
}

// A part as a CTA has processed it.
struct Processed {
  int b, unit, first, last, partial;
};

struct Output {
  Processed* parts;  // (blocks, most parts of a CTA)
  int* count;        // (blocks)
  int most;
};

TK_KERNEL(32, 1)
schedule_kernel(const __grid_constant__ DecodeArguments a, const __grid_constant__ Output output) {
  const int block = static_cast<int>(blockIdx.x);
  int count = 0;
  for_each_part(a, kBlockN, [&](const DecodeSequence& s, const DecodePart& part) {
    if (threadIdx.x == 0 && count < output.most) {
      output.parts[block * output.most + count] = {s.b, part.unit, part.first, part.last,
                                                   part.partial};
    }
    ++count;
  });
  if (threadIdx.x == 0) output.count[block] = count;
}

// A call of attention_decode with one query, and the schedule that it should have.
struct Call {
  std::vector<int> lengths;
  int heads, blocks;

  int tiles(int b) const {
    return std::max(1, ceil_divide(lengths[static_cast<size_t>(b)], kBlockN));
  }
  int B() const { return static_cast<int>(lengths.size()); }
  int units() const { return B() * heads; }
  int total() const {
    int sum = 0;
    for (int b = 0; b < B(); ++b) sum += tiles(b) * heads;
    return sum;
  }
  int largest() const {
    int most = 0;
    for (int b = 0; b < B(); ++b) most = std::max(most, tiles(b));
    return most;
  }
  // Tiles of the longest run, if units are divided.
  int longest() const {
    return ceil_divide(total(), std::min(blocks, ceil_divide(total(), kMinDecodeTiles)));
  }
  bool has_whole_units() const {
    const int units_of_a_cta = ceil_divide(units(), blocks);
    return units_of_a_cta * largest() * 100 <= longest() * 105;
  }
  std::string name() const {
    return text(B()) + " sequences, " + text(heads) + " heads, " + text(blocks) + " CTAs, first " +
           text(lengths[0]) + " keys: ";
  }
};

struct Result {
  Array<Processed> parts;
  Array<int> count;
  Array<DecodeOwners> owners;
  int most;
};

Result run(const Call& given) {
  tk::ForwardParams p{};
  p.B = given.B(), p.H_q = p.H_kv = given.heads, p.M = 1, p.D = p.D_v = 64;
  p.N = *std::max_element(given.lengths.begin(), given.lengths.end());
  p.mask.diagonal_low = INT64_MIN / 4, p.mask.diagonal_high = 0;
  tk::KVCache cache;
  Array<int32_t> lengths(given.lengths.begin(), given.lengths.end());
  cache.cache_seqlens = lengths.on_device();
  cache.bottom_right = true;
  DecodeSizes sizes(p, {kBlockN, 4, 1}, 2, 64);
  sizes.blocks = given.blocks;
  DecodeArguments a = decode_arguments(p, cache, sizes);

  Result result;
  const auto blocks = static_cast<size_t>(given.blocks);
  result.most = given.units() + 1;
  result.parts.resize(blocks * static_cast<size_t>(result.most));
  result.count.resize(blocks);
  result.owners.assign(static_cast<size_t>(given.units()), {-1, -1});
  a.owners = result.owners.on_device();
  TK_LAUNCH(schedule_kernel, dim3(static_cast<unsigned>(given.blocks)), 32, 0, nullptr, a,
            Output{result.parts.on_device(), result.count.on_device(), result.most});
  finish();
  return result;
}

// Follows the parts of all CTAs in order.
void check(const Call& given) {
  const Result result = run(given);
  const std::string name = given.name();
  const bool whole = given.has_whole_units();
  int unit = 0, tile = 0, longest = 0;
  for (int block = 0; block < given.blocks; ++block) {
    int tiles = 0;
    for (int n = 0; n < result.count[static_cast<size_t>(block)]; ++n) {
      const Processed& part = result.parts[static_cast<size_t>(block * result.most + n)];
      expect(unit < given.units(), name + "tiles that do not exist");
      const int b = unit / given.heads, count = given.tiles(b);
      expect(part.b == b && part.unit == unit % given.heads && part.first == tile,
             name + "a part that does not follow the one before it");
      expect(part.first < part.last && part.last <= count, name + "tiles of a part");
      const bool is_unit = part.first == 0 && part.last == count;
      expect_equal(part.partial, is_unit ? -1 : 2 * block + (part.first == 0), name + "slot");
      expect(is_unit || !whole, name + "a divided unit");
      const DecodeOwners& owners = result.owners[static_cast<size_t>(unit)];
      if (part.first == 0) expect_equal(owners.first, block, name + "first owner");
      if (part.last == count) expect_equal(owners.last, block, name + "last owner");
      tiles += part.last - part.first;
      tile = part.last == count ? 0 : part.last;
      unit += part.last == count;
    }
    longest = std::max(longest, tiles);
  }
  expect(unit == given.units() && tile == 0, name + "tiles that no CTA processes");
  expect(longest * 100 <= given.longest() * 105, name + "too long a run");
}

TK_CASE(equal_lengths) {
  for (const int B : kSizes) {
    for (const int heads : {1, 2, 8}) {
      for (const int blocks : {1, 2, 7, 40}) {
        for (const int length : {0, 64, 65, 640}) {
          check({std::vector<int>(static_cast<size_t>(B), length), heads, blocks});
        }
      }
    }
  }
}

TK_CASE(random_lengths) {
  Numbers numbers;
  for (const int B : kSizes) {
    for (const int heads : {1, 3}) {
      for (const int blocks : {1, 3, 7, 40}) {
        for (const float spread : {0.02f, 0.5f, 1.0f}) {
          std::vector<int> lengths;
          for (int b = 0; b < B; ++b) {
            lengths.push_back(static_cast<int>(1500.0f * (1.0f + spread * numbers.next())));
          }
          check({lengths, heads, blocks});
        }
      }
    }
  }
}

TK_CASE(one_long_sequence) {
  for (const int B : kSizes) {
    for (const int at : {0, B / 2, B - 1}) {
      std::vector<int> lengths(static_cast<size_t>(B), 3);
      lengths[static_cast<size_t>(at)] = 9000;
      check({lengths, 2, 7});
    }
  }
}

// Lengths on an H200, which holds 264 CTAs: batch size, and whether units are whole. A unit more
// than divide equally takes 2 / (512 / 264) - 1 = 3% longer.
TK_CASE(whole_units) {
  for (const auto& [B, whole] :
       {std::pair{64, true}, {33, true}, {32, true}, {40, false}, {1, false}}) {
    const Call given{std::vector<int>(static_cast<size_t>(B), 2048), 8, 264};
    expect(given.has_whole_units() == whole, given.name() + "whole units");
    check(given);
  }
}

}  // namespace
