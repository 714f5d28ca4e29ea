// Shuffles, votes, ldmatrix and mma: what the lanes of a warp do together.
#include <cstring>

#include "machine.h"
#include "sm80_ptx.h"

namespace tk::emulator {

namespace {

template <typename Do>
void each_lane(uint32_t lanes, Do&& run) {
  for (; lanes; lanes &= lanes - 1) run(__builtin_ctz(lanes));
}

void run_shuffle(uint32_t lanes, void* const* operands) {
  uint64_t value[kWarp];
  each_lane(lanes, [&](int lane) { value[lane] = static_cast<Exchange*>(operands[lane])->value; });
  each_lane(lanes, [&](int lane) {
    Exchange& mine = *static_cast<Exchange*>(operands[lane]);
    if (!(lanes >> (mine.source & 31) & 1)) {
      machine().fail("shuffle: lane " + std::to_string(lane) + " reads lane " +
                     std::to_string(mine.source) + ", which takes no part");
    }
    mine.value = value[mine.source & 31];
  });
}

void run_ballot(uint32_t lanes, void* const* operands) {
  uint32_t votes = 0;
  each_lane(lanes, [&](int lane) {
    votes |= static_cast<uint32_t>(static_cast<Exchange*>(operands[lane])->value) << lane;
  });
  each_lane(lanes, [&](int lane) { static_cast<Exchange*>(operands[lane])->value = votes; });
}

void run_nothing(uint32_t, void* const*) {}

struct MatrixLoad {
  uint32_t* x;
  const unsigned char* row;
};

// mma.m16n8k16 of a lane: x.y of a and b are two neighbouring columns of k.
struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

void run_load(uint32_t, void* const* operands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    uint32_t* x = static_cast<MatrixLoad*>(operands[lane])->x;
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto& from = *static_cast<MatrixLoad*>(operands[matrix * 8 + lane / 4]);
      memcpy(x + matrix, from.row + lane % 4 * 4, 4);
    }
  }
}

void run_load_transposed(uint32_t, void* const* operands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    uint32_t* x = static_cast<MatrixLoad*>(operands[lane])->x;
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (int n = 0; n < 2; ++n) {
        const int row = matrix * 8 + lane % 4 * 2 + n;
        memcpy(pair + n, static_cast<MatrixLoad*>(operands[row])->row + lane / 4 * 2, 2);
      }
      memcpy(x + matrix, pair, 4);
    }
  }
}

typedef float Row __attribute__((vector_size(32)));

template <typename Element>
float half_of(uint32_t pair, int n) {
  return cuda::to_float(Element{static_cast<uint16_t>(pair >> 16 * n)});
}

template <typename Element>
void run_product(uint32_t, void* const* operands) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const Product& mine = *static_cast<Product*>(operands[lane]);
    const int row = lane / 4, column = lane % 4 * 2;
    for (int n = 0; n < 2; ++n) {
      for (int r = 0; r < 4; ++r) {
        a[row + r % 2 * 8][column + r / 2 * 8 + n] = half_of<Element>(mine.a[r], n);
      }
      for (int r = 0; r < 2; ++r) b[column + r * 8 + n][row] = half_of<Element>(mine.b[r], n);
    }
  }
  Row columns[16];
  memcpy(columns, b, sizeof b);
  for (int i = 0; i < 16; ++i) {
    Row sum{};
    for (int k = 0; k < 16; ++k) sum += a[i][k] * columns[k];
    for (int j = 0; j < 8; ++j) {
      const int lane = i % 8 * 4 + j / 2;
      static_cast<Product*>(operands[lane])->c[i / 8 * 2 + j % 2] += sum[j];
    }
  }
}

const Collective kLoad{"ldmatrix", run_load, true};
const Collective kLoadTransposed{"ldmatrix.trans", run_load_transposed, true};
const Collective kProductHalf{"mma", run_product<cuda::Half>, true};
const Collective kProductBFloat16{"mma", run_product<cuda::BFloat16>, true};

}  // namespace

const Collective kShuffle{"shuffle", run_shuffle, true};
const Collective kBallot{"vote", run_ballot, true};
const Collective kSyncWarp{"__syncwarp", run_nothing, false};

}  // namespace tk::emulator

namespace tk::cuda {

using namespace emulator;

void load_matrices(uint32_t (&x)[4], const void* shared_row, Site site) {
  check_shared(shared_row, 16, 16, "ldmatrix", site);
  MatrixLoad load{x, static_cast<const unsigned char*>(shared_row)};
  emulator::together(kLoad, kEveryLane, &load, site);
}

void load_matrices_transposed(uint32_t (&x)[4], const void* shared_row, Site site) {
  check_shared(shared_row, 16, 16, "ldmatrix", site);
  MatrixLoad load{x, static_cast<const unsigned char*>(shared_row)};
  emulator::together(kLoadTransposed, kEveryLane, &load, site);
}

void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Half,
                         Site site) {
  Product product{c, a, {b0, b1}};
  emulator::together(kProductHalf, kEveryLane, &product, site);
}

void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BFloat16,
                         Site site) {
  Product product{c, a, {b0, b1}};
  emulator::together(kProductBFloat16, kEveryLane, &product, site);
}

}  // namespace tk::cuda
