// wgmma. A product is computed, 16 rows for each warp, when the first warp of the warpgroup waits
// for it. Until then its operands must not change. Accumulators are poison until their warp waits.
#include "cuda/platform/sm90_wgmma.h"

#include <algorithm>
#include <cstring>

#include "emulator/halves.h"
#include "emulator/machine.h"

namespace tk::emulator {

namespace {

constexpr int kWarpsPerGroup = 4;
constexpr int kRows = 16;   // of each warp
constexpr int kDepth = 16;  // k extent of one product
// A signaling NaN: any arithmetic changes its bits, so that a touched accumulator is detected.
constexpr uint32_t kAccumulatorPoison = 0x7fa5a5a5;

WarpProducts& products_of(int warp) { return sm90().products[static_cast<size_t>(warp)]; }

int this_warp() { return current->index / kWarp; }

MatrixDescriptor decode(uint64_t descriptor, bool mn_major, Site site) {
  const auto field = [descriptor](int shift) {
    return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4;
  };
  constexpr uint64_t kUnused =
      ~(0x3fffu | uint64_t{0x3fff} << 16 | uint64_t{0x3fff} << 32 | uint64_t{3} << 62);
  if (descriptor & kUnused) {
    fail(site, "wgmma: the descriptor %016llx sets a base offset or reserved bits",
         static_cast<unsigned long long>(descriptor));
  }
  return {field(0), field(16), field(32),
          cuda::swizzle_chunks(static_cast<cuda::Swizzle>(descriptor >> 62)), mn_major};
}

// Address of 16-byte chunk (x, y). K-major: row x, chunk y along k. MN-major: chunk x along m or n,
// row y of k.
unsigned char* chunk_at(Block& block, const MatrixDescriptor& place, unsigned x, unsigned y) {
  const unsigned w = place.chunks;
  uint32_t offset;
  if (place.mn_major) {
    offset = w == 1 ? x * place.stride + y / 8 * place.leading + y % 8 * 16
                    : x / w * place.leading + x % w * 16 + y / 8 * place.stride + y % 8 * w * 16;
  } else {
    offset = x / 8 * place.stride + x % 8 * w * 16 + y * (w == 1 ? place.leading : 16);
  }
  const uint32_t address = place.start + offset;
  return block.shared.at(address ^ (address >> 7 & (w - 1)) << 4);
}

// Calls run(chunk, index, k) for each chunk of the rows or columns [first, first + count), where
// (index, k) is the first element of the chunk.
template <typename Do>
void for_each_chunk(Block& block, const MatrixDescriptor& place, unsigned first, unsigned count,
                    Do&& run) {
  if (place.mn_major) {
    for (unsigned x = first / 8; x < (first + count) / 8; ++x) {
      for (unsigned k = 0; k < kDepth; ++k) run(chunk_at(block, place, x, k), x * 8 - first, k);
    }
  } else {
    for (unsigned x = first; x < first + count; ++x) {
      for (unsigned y = 0; y < kDepth / 8; ++y) run(chunk_at(block, place, x, y), x - first, y * 8);
    }
  }
}

struct Operands {
  bool a_in_shared;
  MatrixDescriptor a, b;
  unsigned first_row, columns;
};

Operands operands_of(const WarpProduct& product, int warp, int count) {
  Operands operands{!product.a_registers[0],
                    {},
                    decode(product.b, product.b_mn_major, product.site),
                    static_cast<unsigned>(warp % kWarpsPerGroup * kRows),
                    static_cast<unsigned>(count) * 2};
  if (operands.a_in_shared) operands.a = decode(product.a, product.a_mn_major, product.site);
  return operands;
}

template <typename Do>
void for_each_operand_chunk(const Operands& operands, Do&& run) {
  Block& block = *current->block;
  const auto chunk = [&](unsigned char* at, unsigned, unsigned) { run(at); };
  if (operands.a_in_shared) for_each_chunk(block, operands.a, operands.first_row, kRows, chunk);
  for_each_chunk(block, operands.b, 0, operands.columns, chunk);
}

uint64_t hash_operands(const WarpProduct& product, const Operands& operands) {
  uint64_t hash = 0;
  for_each_operand_chunk(
      operands, [&](const unsigned char* at) { hash = hash_chunk(hash, *current->block, at); });
  for (int lane = 0; lane < kWarp && !operands.a_in_shared; ++lane) {
    for (int n = 0; n < 4; ++n) {
      hash = (hash ^ product.a_registers[lane][n]) * 0x9E3779B97F4A7C15u ^ hash >> 31;
    }
  }
  return hash;
}

// Advances along k must stay in the first row of the swizzle pattern.
void check_pattern(const MatrixDescriptor& place, const char* name, Site site) {
  if (place.chunks > 1 && place.start % (place.chunks * 128) >= place.chunks * 16) {
    fail(site, "wgmma: %s begins at address %u, not in the first row of its swizzle pattern", name,
         place.start);
  }
}

void compare(const IssuedProduct& first, const IssuedProduct& mine) {
  const auto differ = [&](const char* what) {
    fail(mine.site, "wgmma: its %s differs from that of the warpgroup's first warp, at %s", what,
         describe(first.site).c_str());
  };
  if (first.a != mine.a) differ("descriptor of a");
  if (first.b != mine.b) differ("descriptor of b");
  if (first.count != mine.count || first.a_in_registers != mine.a_in_registers ||
      first.a_mn_major != mine.a_mn_major || first.b_mn_major != mine.b_mn_major ||
      first.bfloat16 != mine.bfloat16) {
    differ("kind");
  }
  if (first.accumulate != mine.accumulate) differ("scale-d");
}

void check_lanes(void* const* operands) {
  const auto& first = *static_cast<ProductIssue*>(operands[0]);
  for (int lane = 1; lane < kWarp; ++lane) {
    const auto& mine = *static_cast<ProductIssue*>(operands[lane]);
    if (mine.a != first.a || mine.b != first.b || mine.accumulate != first.accumulate) {
      fail(mine.site, "wgmma: the operands of lanes 0 and %d differ", lane);
    }
  }
}

void begin_accumulator(Accumulator& accumulator, void* const* operands, int count) {
  accumulator.count = count;
  accumulator.values.resize(static_cast<size_t>(kWarp * count));
  for (int lane = 0; lane < kWarp; ++lane) {
    float* const c = static_cast<ProductIssue*>(operands[lane])->c;
    accumulator.lane_registers[lane] = c;
    memcpy(accumulator.values.data() + lane * count, c, static_cast<size_t>(count) * 4);
    for (int i = 0; i < count; ++i) memcpy(c + i, &kAccumulatorPoison, 4);
  }
}

void run_issue(uint32_t, void* const* operands) {
  check_lanes(operands);
  const auto& issue = *static_cast<ProductIssue*>(operands[0]);
  Block& block = *current->block;
  const int w = this_warp(), group = w / kWarpsPerGroup;
  WarpProducts& warp = products_of(w);
  if (block.warp_count < (group + 1) * kWarpsPerGroup) {
    fail(issue.site, "wgmma: warp %d is not in a complete warpgroup", w);
  }
  const bool in_flight = warp.accumulators.count(issue.c);
  if (!warp.fenced && (!in_flight || issue.a_registers)) {
    fail(issue.site, "wgmma: no wgmma.fence since registers may have changed");
  }
  std::vector<IssuedProduct>& issues = sm90().issues[static_cast<size_t>(group)];
  const IssuedProduct mine{
      issue.a,          issue.b,          issue.count,    issue.a_registers != nullptr,
      issue.a_mn_major, issue.b_mn_major, issue.bfloat16, issue.accumulate,
      issue.site};
  if (warp.steps.size() == issues.size()) {
    issues.push_back(mine);
  } else {
    compare(issues[warp.steps.size()], mine);
  }
  WarpProduct product{issue.c,          issue.a,        issue.b,          {}, issue.a_mn_major,
                      issue.b_mn_major, issue.bfloat16, issue.accumulate, 0,  issue.site};
  for (int lane = 0; lane < kWarp; ++lane) {
    product.a_registers[lane] = static_cast<ProductIssue*>(operands[lane])->a_registers;
  }
  const Operands places = operands_of(product, w, issue.count);
  if (places.a_in_shared) check_pattern(places.a, "a", issue.site);
  check_pattern(places.b, "b", issue.site);
  for_each_operand_chunk(
      places, [&](const unsigned char* at) { check_shared(at, 16, 16, "wgmma", issue.site); });
  Step step;
  if (races.on) {
    step = warp.uncommitted ? warp.steps.back() : races.begin_async();
    races.continue_async(step);
    for_each_operand_chunk(places, [&](const unsigned char* at) {
      races.access(at, 16, Access::kAsyncRead, {issue.site}, step.thread);
    });
  }
  product.hash = hash_operands(product, places);
  if (!in_flight) begin_accumulator(warp.accumulators[issue.c], operands, issue.count);
  ++warp.accumulators[issue.c].products;
  warp.products.push_back(product);
  warp.steps.push_back(step);
  ++warp.uncommitted;
}

void load_a(const WarpProduct& product, const Operands& operands, float (&a)[kRows][kDepth]) {
  Block& block = *current->block;
  Row row;
  if (operands.a_in_shared) {
    for_each_chunk(block, operands.a, operands.first_row, kRows,
                   [&](const unsigned char* at, unsigned i, unsigned k) {
                     load_row(row, async_view(block, at), product.bfloat16);
                     for (unsigned n = 0; n < 8; ++n) {
                       (product.a_mn_major ? a[i + n][k] : a[i][k + n]) = row[n];
                     }
                   });
    return;
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    load_row(row, product.a_registers[lane], product.bfloat16);
    for (int n = 0; n < 8; ++n) {
      a[lane / 4 + n / 2 % 2 * 8][lane % 4 * 2 + n % 2 + n / 4 * 8] = row[n];
    }
  }
}

void run_product(const WarpProduct& product, const Operands& operands, Accumulator& accumulator) {
  alignas(32) float a[kRows][kDepth], b[kDepth][256], c[kRows][256];
  Block& block = *current->block;
  load_a(product, operands, a);
  for_each_chunk(block, operands.b, 0, operands.columns,
                 [&](const unsigned char* at, unsigned j, unsigned k) {
                   Row row;
                   load_row(row, async_view(block, at), product.bfloat16);
                   for (unsigned n = 0; n < 8; ++n) {
                     (product.b_mn_major ? b[k][j + n] : b[k + n][j]) = row[n];
                   }
                 });
  for (int i = 0; i < kRows; ++i) {
    for (unsigned j = 0; j < operands.columns; j += 8) {
      Row sum{}, term;
      for (int k = 0; k < kDepth; ++k) {
        memcpy(&term, b[k] + j, sizeof term);
        sum += a[i][k] * term;
      }
      memcpy(c[i] + j, &sum, sizeof sum);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    float* const values = accumulator.values.data() + lane * accumulator.count;
    for (int i = 0; i < accumulator.count; ++i) {
      const float term = c[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
      values[i] = product.accumulate ? add_truncating(values[i], term) : term;
    }
  }
}

void write_back(Accumulator& accumulator, Site site) {
  for (int lane = 0; lane < kWarp; ++lane) {
    float* const c = accumulator.lane_registers[lane];
    for (int i = 0; i < accumulator.count; ++i) {
      if (memcmp(c + i, &kAccumulatorPoison, 4) == 0) continue;
      fail(site, "wgmma: its accumulator c[%d] was written before it was waited for", i);
    }
    memcpy(c, accumulator.values.data() + lane * accumulator.count,
           static_cast<size_t>(accumulator.count) * 4);
  }
}

struct Wait {
  size_t pending;
  size_t until;  // products of the warp that must be complete
};

// Computes how many products the lanes wait for. All warps of the group must have issued these.
void run_wait(uint32_t, void* const* operands) {
  const WarpProducts& warp = products_of(this_warp());
  size_t until = warp.waited;
  const size_t pending = static_cast<Wait*>(operands[0])->pending;
  for (size_t g = 0; g + pending < warp.groups.size(); ++g) until += warp.groups[g];
  for (int lane = 0; lane < kWarp; ++lane) static_cast<Wait*>(operands[lane])->until = until;
}

bool all_warps_issued(size_t until) {
  const int first = this_warp() / kWarpsPerGroup * kWarpsPerGroup;
  for (int w = first; w < first + kWarpsPerGroup && w < current->block->warp_count; ++w) {
    if (products_of(w).steps.size() < until) return false;
  }
  return true;
}

void observe_completion(size_t number) {
  const int first = this_warp() / kWarpsPerGroup * kWarpsPerGroup;
  for (int w = first; w < first + kWarpsPerGroup; ++w) {
    for (int lane = 0; lane < kWarp; ++lane) {
      races.end_async(*current->block, products_of(w).steps[number], this_warp() * kWarp + lane);
    }
  }
}

// Computes the products of one warp. A product completes for the whole warpgroup at once.
void compute(int w, size_t until) {
  WarpProducts& warp = products_of(w);
  for (; warp.done < until; ++warp.done) {
    const WarpProduct& product = warp.products[warp.done - warp.waited];
    Accumulator& accumulator = warp.accumulators.at(product.key);
    const Operands places = operands_of(product, w, accumulator.count);
    if (hash_operands(product, places) != product.hash) {
      fail(product.site, "wgmma: its operands changed before it was waited for");
    }
    run_product(product, places, accumulator);
  }
}

void run_retire(uint32_t, void* const* operands) {
  const auto& wait = *static_cast<Wait*>(operands[0]);
  const int first = this_warp() / kWarpsPerGroup * kWarpsPerGroup;
  WarpProducts& warp = products_of(this_warp());
  warp.fenced = false;
  if (wait.until == warp.waited) return;
  for (int w = first; w < first + kWarpsPerGroup; ++w) compute(w, wait.until);
  const size_t count = wait.until - warp.waited;
  for (size_t n = 0; n < count; ++n) {
    const WarpProduct& product = warp.products[n];
    if (races.on) observe_completion(warp.waited + n);
    Accumulator& accumulator = warp.accumulators.at(product.key);
    if (--accumulator.products) continue;
    write_back(accumulator, product.site);
    warp.accumulators.erase(product.key);
  }
  warp.products.erase(warp.products.begin(), warp.products.begin() + static_cast<long>(count));
  warp.groups.erase(
      warp.groups.begin(),
      warp.groups.end() - static_cast<long>(std::min(wait.pending, warp.groups.size())));
  warp.waited = wait.until;
}

void run_fence(uint32_t, void* const*) { products_of(this_warp()).fenced = true; }

void run_commit(uint32_t, void* const*) {
  WarpProducts& warp = products_of(this_warp());
  warp.groups.push_back(warp.uncommitted);
  warp.uncommitted = 0;
}

const Collective kIssue{"wgmma", run_issue, true};
const Collective kFence{"wgmma.fence", run_fence, true};
const Collective kCommit{"wgmma.commit_group", run_commit, true};
const Collective kWait{"wgmma.wait_group", run_wait, true};
const Collective kRetire{"wgmma.wait_group", run_retire, true};

}  // namespace

void issue_product(const ProductIssue& issue) {
  ProductIssue mine = issue;
  warp_collective(kIssue, kAllLanes, &mine, issue.site);
}

}  // namespace tk::emulator

namespace tk::cuda {

using namespace emulator;

void wgmma_fence(Site site) { emulator::warp_collective(kFence, kAllLanes, nullptr, site); }

void wgmma_commit(Site site) { emulator::warp_collective(kCommit, kAllLanes, nullptr, site); }

void wgmma_wait_for(int pending, Site site) {
  Wait wait{static_cast<size_t>(pending), 0};
  emulator::warp_collective(kWait, kAllLanes, &wait, site);
  while (!all_warps_issued(wait.until)) emulator::spin("wgmma.wait_group", site);
  emulator::warp_collective(kRetire, kAllLanes, &wait, site);
}

}  // namespace tk::cuda
