// The instruction stmatrix.
#include <cstring>

#include "cuda/platform/sm90_ptx.h"
#include "emulator/machine.h"

namespace tk::emulator {

namespace {

struct MatrixStore {
  unsigned char* row;
  const uint32_t* x;
  Site site;
};

// The lane that holds a number counts as its writer, not the lane that provides the address.
void store(void* at, const void* from, size_t bytes, int lane, Site site) {
  if (races.on) {
    races.access(at, bytes, Access::kWrite, {site}, current->index / kWarp * kWarp + lane);
  }
  memcpy(at, from, bytes);
}

void run_store(uint32_t, void* const* operands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& mine = *static_cast<MatrixStore*>(operands[lane]);
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto& to = *static_cast<MatrixStore*>(operands[matrix * 8 + lane / 4]);
      store(to.row + lane % 4 * 4, mine.x + matrix, 4, lane, mine.site);
    }
  }
}

const Collective kStore{"stmatrix", run_store, true};

}  // namespace

}  // namespace tk::emulator

namespace tk::cuda {

void store_matrices(void* shared_row, const uint32_t (&x)[4], Site site) {
  emulator::check_shared(shared_row, 16, 16, emulator::kStore.name, site);
  emulator::MatrixStore operand{static_cast<unsigned char*>(shared_row), x, site};
  emulator::warp_collective(emulator::kStore, emulator::kAllLanes, &operand, site);
}

}  // namespace tk::cuda
