// The tile scheduler of the forward pass: its order, and a simulation of its schedule.
#include <functional>
#include <queue>

#include "cases.h"
#include "cuda/sm90/tile_scheduler.cuh"

using namespace tk::cuda;

namespace {

void every_tile_once() {
  for (const int swizzle_heads : {1, 2, 3, 7}) {
    const sm90::TileScheduler scheduler{7, 5, swizzle_heads, nullptr};
    std::vector<int> times(static_cast<size_t>(scheduler.count()));
    for (int n = 0; n < scheduler.count(); ++n) {
      const auto [head, block] = scheduler.position(n);
      expect(head >= 0 && head < 7 && block >= 0 && block < 5, "a tile that does not exist");
      ++times[static_cast<size_t>(head * 5 + block)];
    }
    for (const int one : times) expect_equal(one, 1, "times that a tile is taken");
  }
}

// Share of the time that the 132 multiprocessors of an H200 are busy, under a causal mask: each
// takes the next tile as soon as it has finished one. A tile takes as long as its visible key
// blocks, and two for its beginning and end.
double busy_share(int width, int block_m, int block_n, int heads) {
  constexpr int kLength = 16384, kMultiprocessors = 132;
  tk::Problem p{};
  p.H_q = p.H_kv = heads;
  p.D = p.D_v = width;
  const int blocks = ceil_divide(kLength, block_m);
  const sm90::TileScheduler scheduler{heads, blocks, sm90::swizzle_heads_of(p, kLength, heads),
                                      nullptr};
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int n = 0; n < kMultiprocessors; ++n) free_at.push(0.0);
  double work = 0.0, end = 0.0;
  for (int n = 0; n < scheduler.count(); ++n) {
    const int rows = min((scheduler.position(n).block + 1) * block_m, kLength);
    const double time = ceil_divide(rows, block_n) + 2, finished = free_at.top() + time;
    free_at.pop();
    free_at.push(finished);
    work += time;
    end = finished > end ? finished : end;
  }
  return work / (end * kMultiprocessors);
}

void causal_tiles_are_balanced() {
  for (const int heads : {8, 16, 32, 64}) {
    for (const int width : {64, 128, 256}) {
      constexpr double kFew = 0.97, kMany = 0.98;
      const HopperForwardTile tile = hopper_forward_tile(width);
      const double share = busy_share(width, tile.block_m(), tile.block_n, heads);
      expect(share >= (heads == 8 ? kFew : kMany), "width " + std::to_string(width) + ", heads " +
                                                       std::to_string(heads) + ": busy " +
                                                       std::to_string(share));
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  return run_cases(count, arguments,
                   {{"every_tile_once", every_tile_once},
                    {"causal_tiles_are_balanced", causal_tiles_are_balanced}});
}
