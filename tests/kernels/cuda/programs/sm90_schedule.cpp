// The tile scheduler of the forward pass, and simulations of the schedules of both passes.
#include <functional>
#include <limits>
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
  for (const int swizzle_heads : {1, 2, 3, 7, 14}) {
    const sm90::TileScheduler scheduler(14, 7, 1, 5, swizzle_heads, nullptr);
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
  const sm90::TileScheduler scheduler(12, 12, 4, 1, 12, nullptr);
  for (int h = 0; h < 12; ++h) expect_equal(scheduler.key_head(h), h / 4, "key head");
}

constexpr int kLength = 16384, kMultiprocessors = 132;

// True if some query i0 <= i < i1 sees some key j0 <= j < j1.
using Visible = bool (*)(int i0, int i1, int j0, int j1);

bool causal(int, int i1, int j0, int) { return j0 < i1; }
bool window(int i0, int i1, int j0, int j1) { return j0 < i1 && j1 > i0 - kLength / 8; }

// Time of a CTA or tile: its visible blocks, and two for its beginning and end.
double time_of(int visible_blocks) { return visible_blocks + 2; }

// Visible key blocks of the row blocks, and visible query blocks of the key blocks.
struct VisibleBlocks {
  std::vector<int> keys, queries;

  VisibleBlocks(Visible visible, int block_m, int block_n)
      : keys(static_cast<size_t>(ceil_divide(kLength, block_m))),
        queries(static_cast<size_t>(ceil_divide(kLength, block_n))) {
    for (size_t m = 0; m < keys.size(); ++m) {
      for (size_t n = 0; n < queries.size(); ++n) {
        const int i0 = static_cast<int>(m) * block_m, j0 = static_cast<int>(n) * block_n;
        if (!visible(i0, min(i0 + block_m, kLength), j0, min(j0 + block_n, kLength))) continue;
        ++keys[m];
        ++queries[n];
      }
    }
  }
};

// Share of the time that the multiprocessors of an H200 are busy, if each takes the next tile as
// soon as it has finished one.
double busy_share(const std::vector<double>& times) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int n = 0; n < kMultiprocessors; ++n) free_at.push(0.0);
  double work = 0.0, end = 0.0;
  for (const double time : times) {
    const double finished = free_at.top() + time;
    free_at.pop();
    free_at.push(finished);
    work += time;
    end = finished > end ? finished : end;
  }
  return work / (end * kMultiprocessors);
}

// Times of the tiles of the forward pass, in the order of its scheduler.
std::vector<double> forward_times(Visible visible, int width, int heads) {
  const HopperForwardTile tile = hopper_forward_tile(width);
  const VisibleBlocks blocks(visible, tile.block_m(), tile.block_n);
  tk::Problem p{};
  p.H_q = p.H_kv = heads;
  p.D = p.D_v = width;
  const sm90::TileScheduler scheduler(heads, heads, 1, static_cast<int64_t>(blocks.keys.size()),
                                      sm90::swizzle_heads_of(p, kLength, heads), nullptr);
  std::vector<double> times;
  for (int n = 0; n < scheduler.count(); ++n) {
    times.push_back(time_of(blocks.keys[static_cast<size_t>(scheduler.position(n).block)]));
  }
  return times;
}

// Times of the CTAs of the backward pass, in the order in which they start.
std::vector<double> backward_times(Visible visible, int width, int heads) {
  const HopperBackwardTile tile = hopper_backward_tile(width);
  const VisibleBlocks blocks(visible, tile.block_m, tile.block_n);
  const int count = static_cast<int>(blocks.queries.size());
  std::vector<double> times;
  for (int program = 0; program < count * heads; ++program) {
    const int n = sm90::KeyBlock::of(program, count, heads).n;
    times.push_back(time_of(blocks.queries[static_cast<size_t>(n)]));
  }
  return times;
}

using Times = std::vector<double> (*)(Visible visible, int width, int heads);

// Least busy share with 8, 16, and more heads. With masks under which all tiles take the same time,
// it does not depend on their order.
struct Least {
  double eight, sixteen, more;
};

void expect_busy(Times times_of, const char* mask, Visible visible, const Least& least) {
  for (const int heads : {8, 16, 32, 64}) {
    for (const int width : {64, 128, 256}) {
      const double share = busy_share(times_of(visible, width, heads));
      const double bound = heads == 8 ? least.eight : heads == 16 ? least.sixteen : least.more;
      expect(share >= bound, std::string(mask) + ", width " + std::to_string(width) + ", heads " +
                                 std::to_string(heads) + ": busy " + std::to_string(share));
    }
  }
}

void multiprocessors_are_busy(Times times_of) {
  expect_busy(times_of, "causal", causal, {0.97, 0.98, 0.99});
  expect_busy(times_of, "window", window, {0.94, 0.97, 0.98});
}

TK_CASE(forward_tiles_are_balanced) { multiprocessors_are_busy(forward_times); }
TK_CASE(backward_ctas_are_balanced) { multiprocessors_are_busy(backward_times); }

}  // namespace
