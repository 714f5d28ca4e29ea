// Instructions of sm_80: ldmatrix and mma.
#include <cstring>

#include "cuda/platform/sm80_ptx.h"
#include "emulator/halves.h"
#include "emulator/machine.h"

namespace tk::emulator {

namespace {

struct MatrixLoad {
  uint32_t* x;
  const unsigned char* row;
  Site site;
};

// The lane that receives a number counts as its reader, not the lane that provides the address.
void record_read(const void* at, size_t bytes, int lane, Site site) {
  races.access(at, bytes, Access::kRead, {site}, current->index / kWarp * kWarp + lane);
}

void run_load(uint32_t, void* const* operands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& mine = *static_cast<MatrixLoad*>(operands[lane]);
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto& from = *static_cast<MatrixLoad*>(operands[matrix * 8 + lane / 4]);
      if (races.on) record_read(from.row + lane % 4 * 4, 4, lane, mine.site);
      memcpy(mine.x + matrix, from.row + lane % 4 * 4, 4);
    }
  }
}

void run_load_transposed(uint32_t, void* const* operands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& mine = *static_cast<MatrixLoad*>(operands[lane]);
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (int n = 0; n < 2; ++n) {
        const auto& from = *static_cast<MatrixLoad*>(operands[matrix * 8 + lane % 4 * 2 + n]);
        if (races.on) record_read(from.row + lane / 4 * 2, 2, lane, mine.site);
        memcpy(pair + n, from.row + lane / 4 * 2, 2);
      }
      memcpy(mine.x + matrix, pair, 4);
    }
  }
}

// Operands of one lane of mma.m16n8k16.
//   a[r]: row lane / 4 + 8 (r % 2), columns 2 (lane % 4) + 8 (r / 2) and the next
//   b[r]: column lane / 4, rows 2 (lane % 4) + 8 r and the next
//   c[r]: row lane / 4 + 8 (r / 2), column 2 (lane % 4) + r % 2
struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

template <typename Element>
void run_product(uint32_t, void* const* operands) {
  uint32_t a[16][8], b[8][8];  // pairs of adjacent k: a[row][pair], b[pair][column]
  for (int lane = 0; lane < kWarp; ++lane) {
    const Product& mine = *static_cast<Product*>(operands[lane]);
    for (int r = 0; r < 4; ++r) a[lane / 4 + r % 2 * 8][lane % 4 + r / 2 * 4] = mine.a[r];
    for (int r = 0; r < 2; ++r) b[lane % 4 + r * 4][lane / 4] = mine.b[r];
  }
  Row b_even[8], b_odd[8];
  for (int pair = 0; pair < 8; ++pair) {
    Bits bits;
    memcpy(&bits, b[pair], sizeof bits);
    to_row(b_even[pair], bits & 0xffffu, Element{});
    to_row(b_odd[pair], bits >> 16, Element{});
  }
  float c[16][8];
  for (int i = 0; i < 16; ++i) {
    Bits bits;
    memcpy(&bits, a[i], sizeof bits);
    Row even, odd;
    to_row(even, bits & 0xffffu, Element{});
    to_row(odd, bits >> 16, Element{});
    Row sum{};
    for (int pair = 0; pair < 8; ++pair) sum += even[pair] * b_even[pair] + odd[pair] * b_odd[pair];
    memcpy(c[i], &sum, sizeof sum);
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    float* mine = static_cast<Product*>(operands[lane])->c;
    for (int r = 0; r < 4; ++r) {
      mine[r] = add_truncating(mine[r], c[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2]);
    }
  }
}

const Collective kLoad{"ldmatrix", run_load, true};
const Collective kLoadTransposed{"ldmatrix.trans", run_load_transposed, true};
const Collective kProductHalf{"mma", run_product<cuda::Half>, true};
const Collective kProductBFloat16{"mma", run_product<cuda::BFloat16>, true};

}  // namespace

}  // namespace tk::emulator

namespace tk::cuda {

using namespace emulator;

void load_matrices(uint32_t (&x)[4], const void* shared_row, Site site) {
  check_shared(shared_row, 16, 16, "ldmatrix", site);
  MatrixLoad load{x, static_cast<const unsigned char*>(shared_row), site};
  emulator::warp_collective(kLoad, kAllLanes, &load, site);
}

void load_matrices_transposed(uint32_t (&x)[4], const void* shared_row, Site site) {
  check_shared(shared_row, 16, 16, "ldmatrix", site);
  MatrixLoad load{x, static_cast<const unsigned char*>(shared_row), site};
  emulator::warp_collective(kLoadTransposed, kAllLanes, &load, site);
}

void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Half,
                         Site site) {
  Product product{c, a, {b0, b1}};
  emulator::warp_collective(kProductHalf, kAllLanes, &product, site);
}

void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BFloat16,
                         Site site) {
  Product product{c, a, {b0, b1}};
  emulator::warp_collective(kProductBFloat16, kAllLanes, &product, site);
}

}  // namespace tk::cuda
