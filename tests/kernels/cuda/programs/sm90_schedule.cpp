// The orders of tiles, and simulations of the schedules of both passes on an H200.
#include <functional>
#include <limits>
#include <map>
#include <queue>

#include "cases.h"
#include "cuda/sm90/tile_scheduler.cuh"

using namespace tk::cuda;

namespace {

TK_CASE(divisions) {
  constexpr int kLargest = std::numeric_limits<int>::max();
  for (const int divisor : {1, 2, 3, 5, 7, 10, 48, 641, 65537, (1 << 30) + 1, kLargest}) {
    const Divisor by(divisor);
    for (const int multiple : {0, 1, 2, 1000, kLargest / divisor - 1, kLargest / divisor}) {
      for (const int64_t distance : {-1, 0, 1, divisor - 1}) {
        const int64_t wide = int64_t{multiple} * divisor + distance;
        if (wide < 0 || wide > kLargest) continue;
        const int x = static_cast<int>(wide);
        const auto [quotient, remainder] = by.divide(x);
        expect_equal(quotient, x / divisor, "quotient");
        expect_equal(remainder, x % divisor, "remainder");
      }
    }
  }
}

// Two sequences of seven query heads, with five row blocks each.
TK_CASE(every_tile_once) {
  for (const int group_heads : {1, 2, 3, 7, 14}) {
    const sm90::TileScheduler scheduler(TileOrder(14, 7, 5, group_heads), 1, nullptr);
    std::vector<int> times(static_cast<size_t>(scheduler.count()));
    for (int n = 0; n < scheduler.count(); ++n) {
      const auto [b, h, block] = scheduler.position(n);
      expect(b >= 0 && b < 2 && h >= 0 && h < 7 && block >= 0 && block < 5,
             "a tile that does not exist");
      ++times[static_cast<size_t>((b * 7 + h) * 5 + block)];
    }
    expect_equal(static_cast<int>(times.size()), 70, "tiles");
    for (const int one : times) expect_equal(one, 1, "times that a tile is taken");
  }
}

TK_CASE(query_heads_share_key_heads) {
  const sm90::TileScheduler scheduler(TileOrder(12, 12, 1, 12), 4, nullptr);
  for (int h = 0; h < 12; ++h) expect_equal(scheduler.key_head(h), h / 4, "key head");
}

// Three heads share key head 2. Blocks 3 to 8 see its keys.
TK_CASE(query_tiles_are_divided) {
  const Divisor by_sharing(3);
  for (const int splits : {1, 2, 4, 16, 32}) {
    std::map<std::pair<int, int>, int> times;
    for (int split = 0; split < splits; ++split) {
      const QueryTiles tiles({3, 9}, 2, by_sharing, split, splits);
      int before = 9;
      for (int n = tiles.range().first; n < tiles.range().last; ++n) {
        const auto [block, h] = tiles.at(n);
        expect(block <= before, "a later block after an earlier one");
        before = block;
        ++times[{block, h}];
      }
    }
    expect_equal(static_cast<int>(times.size()), 18, "tiles");
    for (int block = 3; block < 9; ++block) {
      for (int h = 6; h < 9; ++h) expect_equal(times[{block, h}], 1, "times that a tile is taken");
    }
  }
  expect_equal(QueryTiles({0, 0}, 2, by_sharing, 1, 4).range().last, 0, "tiles of hidden keys");
}

constexpr int kMultiprocessors = 132;

struct Layer {
  const char* mask;  // "full", "causal" or "window", of an eighth of the length
  int width, length;
  int heads, sharing = 1;  // key heads over all sequences, query heads that share one

  Sequence sequence() const {
    Sequence s{0, 0, 0, 0, length, length, -length, length, 0, length};
    if (mask != std::string("full")) s.high = 0;
    if (mask == std::string("window")) s.low = 1 - length / 8;
    return s;
  }
  tk::Problem problem() const {
    tk::Problem p{};
    p.H_kv = heads;
    p.H_q = heads * sharing;
    p.D = p.D_v = width;
    return p;
  }
  void expect_at_least(double share, double bound) const {
    expect(share >= bound, std::string(mask) + ", width " + std::to_string(width) + ", S " +
                               std::to_string(length) + ", heads " + std::to_string(heads) + " x " +
                               std::to_string(sharing) + ": " + std::to_string(share));
  }
};

// The times at which the multiprocessors of an H200 are free, if each takes the next tile as soon
// as it has finished one.
class Multiprocessors {
 public:
  Multiprocessors() {
    for (int n = 0; n < kMultiprocessors; ++n) free_at_.push(0.0);
  }
  // Time at which the next CTA starts.
  double next() const { return free_at_.top(); }
  // That CTA has `work` to do, and has finished at `end`, after waiting for others.
  void run(double end, double work) {
    free_at_.pop();
    free_at_.push(end);
    work_ += work;
    end_ = std::max(end_, end);
  }
  // Share of the time that they work.
  double busy() const { return work_ / (end_ * kMultiprocessors); }

 private:
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at_;
  double work_ = 0.0, end_ = 0.0;
};

// Times, in blocks of scores: for the start and the end of a tile or CTA, for an addition to dq
// that another waits for, and for the stores of sums of a CTA that shares its key block.
constexpr double kEnds = 2.0, kAddition = 0.3, kSums = 0.5;

int first_row(const Layer& of, int block) {
  const int block_m = hopper_forward_tile(of.width).block_m();
  return block * block_m - sm90::rows_before(of.length, block_m);
}

BlockRange key_blocks_of(const Layer& of, int block) {
  const HopperForwardTile tile = hopper_forward_tile(of.width);
  const int i0 = first_row(of, block), i1 = min(i0 + tile.block_m(), of.length);
  return key_blocks(of.sequence(), max(i0, 0), i1, tile.block_n);
}

double forward_busy(const Layer& of) {
  const int blocks = ceil_divide(of.length, hopper_forward_tile(of.width).block_m());
  const sm90::TileScheduler scheduler(sm90::forward_order(of.problem(), 1, blocks, of.length),
                                      of.sharing, nullptr);
  Multiprocessors all;
  for (int n = 0; n < scheduler.count(); ++n) {
    const BlockRange keys = key_blocks_of(of, scheduler.position(n).block);
    const double work = keys.last - keys.first + kEnds;
    all.run(all.next() + work, work);
  }
  return all.busy();
}

// In deterministic mode a key block adds to dq of a query tile after those before it.
double backward_busy(const Layer& of, bool deterministic = false) {
  const HopperBackwardTile tile = hopper_backward_tile(of.width);
  const Sequence seq = of.sequence();
  const int blocks = ceil_divide(of.length, tile.block_n),
            rows = ceil_divide(of.length, tile.block_m);
  const TileOrder order = backward_order(of.problem(), 1, blocks, of.length);
  const bool uneven = of.mask != std::string("full");
  const auto splits = static_cast<int>(key_block_splits(
      order.count(), order.count(), int64_t{rows} * of.sharing, uneven, kMultiprocessors));
  const Divisor by_splits(splits), by_sharing(of.sharing);
  std::map<std::pair<int, int>, double> added;  // when a query tile may be added to
  Multiprocessors all;
  for (int program = 0; program < order.count() * splits; ++program) {
    const auto key_block = KeyBlock::of<1>(program, order, by_splits, tk::Varlen{});
    const int j0 = key_block.n * tile.block_n;
    const QueryTiles tiles(query_blocks(seq, j0, j0 + tile.block_n, tile.block_m), key_block.h_kv,
                           by_sharing, key_block.split, splits);
    const int count = tiles.range().last;
    double time = all.next() + kEnds / 2;
    for (int n = 0; n < count; ++n) {
      const auto [block, h] = tiles.at(n);
      time += 1.0;
      if (!deterministic) continue;
      double& ready = added[{block, h}];
      ready = time = std::max(time, ready + kAddition);
    }
    time += kEnds / 2 + (splits > 1 ? kSums : 0.0);
    all.run(time, count + kEnds / splits);
  }
  return all.busy();
}

// The shapes of the benchmarks: 16,384 tokens, 2048 columns.
template <typename Visit>
void for_each_length(const char* mask, const Visit& visit) {
  for (const int width : {64, 128, 192, 256}) {
    const int heads = 2048 / (width == 192 ? 128 : width);
    for (int length = 512; length <= 16384; length *= 2) {
      visit(Layer{mask, width, length, 16384 / length * heads});
    }
  }
}

// Causal layers of 8 to 64 heads, with two key blocks or more for each multiprocessor.
template <typename Visit>
void for_each_layer(const Visit& visit) {
  for (const int width : {64, 128, 256}) {
    for (const int heads : {8, 16, 32, 64}) {
      for (int length = 512; length <= 16384; length *= 2) {
        const int blocks = length / hopper_backward_tile(width).block_n;
        if (heads * blocks >= 2 * kMultiprocessors) visit(Layer{"causal", width, length, heads});
      }
    }
  }
}

TK_CASE(forward_tiles_are_balanced) {
  for_each_length("causal", [](const Layer& of) { of.expect_at_least(forward_busy(of), 0.96); });
  for_each_length("window", [](const Layer& of) { of.expect_at_least(forward_busy(of), 0.94); });
  for_each_layer([](const Layer& of) { of.expect_at_least(forward_busy(of), 0.89); });
}

// Share of the scores that the forward pass computes under a causal mask which are visible: its row
// blocks end with the last query, and a consumer skips a last key block that it does not see.
double visible_share(int width, int length) {
  const Layer of{"causal", width, length, 1};
  const HopperForwardTile tile = hopper_forward_tile(width);
  const int rows = tile.block_m() / tile.consumers;  // of a consumer
  double computed = 0.0;
  for (int block = 0; block < ceil_divide(length, tile.block_m()); ++block) {
    const BlockRange keys = key_blocks_of(of, block);
    int strips = (keys.last - keys.first) * tile.consumers;
    const int last = (keys.last - 1) * tile.block_n;
    if (keys.last - keys.first > 1 && tile.block_m() - rows >= tile.block_n) {
      strips -= sm90::dead_strips(of.sequence(), first_row(of, block), last, rows);
    }
    computed += strips * rows * tile.block_n;
  }
  return length * (length + 1.0) / 2.0 / computed;
}

TK_CASE(few_hidden_scores_are_computed) {
  const double least[] = {0.76, 0.86, 0.93, 0.96, 0.98, 0.99};  // from S = 512 on
  for (int n = 0; n < 6; ++n) {
    const double share = visible_share(64, 512 << n);
    expect(share >= least[n],
           "S " + std::to_string(512 << n) + ": visible " + std::to_string(share));
  }
}

TK_CASE(backward_ctas_are_balanced) {
  for_each_length("causal", [](const Layer& of) { of.expect_at_least(backward_busy(of), 0.975); });
  for_each_length("window", [](const Layer& of) { of.expect_at_least(backward_busy(of), 0.975); });
  for_each_layer([](const Layer& of) { of.expect_at_least(backward_busy(of), 0.969); });
}

TK_CASE(deterministic_mode_hardly_waits) {
  for (const char* const mask : {"full", "causal", "window"}) {
    for_each_length(mask, [](const Layer& of) {
      of.expect_at_least(backward_busy(of, true) / backward_busy(of), 0.98);
    });
  }
  for_each_layer([](const Layer& of) {
    of.expect_at_least(backward_busy(of, true) / backward_busy(of), 0.86);
  });
}

// Sequences of few tokens have more tiles than their rows fill: their sums must not take gigabytes.
TK_CASE(sums_of_shared_key_blocks_are_bounded) {
  for (const int sequences : {1, 10, 100, 1000, 100000}) {
    for (const int tokens : {1, 128, 1000, 17000}) {
      const int existing = ceil_divide(tokens, 128), launched = tokens / 128 + sequences;
      const int64_t splits = key_block_splits(existing, launched, 1 << 20, true, kMultiprocessors);
      expect(splits == 1 || launched * splits <= 4 * kMultiprocessors,
             std::to_string(sequences) + " sequences: " + std::to_string(splits));
    }
  }
  expect_equal(static_cast<double>(key_block_splits(128, 136, 128, true, kMultiprocessors)), 2,
               "CTAs for one packed sequence");
}

// Llama 8B (32 query heads share 8) and a layer of 16 heads, in batches of 1, 2 and 4.
TK_CASE(few_key_blocks_are_shared) {
  for (const int batch : {1, 2, 4}) {
    for (int length = 1024; length <= 8192; length *= 2) {
      const Layer llama{"causal", 128, length, 8 * batch, 4},
          heads16{"causal", 128, length, 16 * batch};
      llama.expect_at_least(backward_busy(llama), length == 1024 && batch == 1 ? 0.78 : 0.88);
      llama.expect_at_least(backward_busy(llama, true) / backward_busy(llama), 0.9);
      heads16.expect_at_least(backward_busy(heads16), length == 1024 && batch == 1 ? 0.7 : 0.9);
    }
  }
}

}  // namespace
