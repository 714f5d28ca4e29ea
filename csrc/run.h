// One call of the kernels, whoever asks: operators.cpp for torch's dispatcher, direct.cpp past it.
#pragma once

#include <cstdint>

#include "cpu/workers.h"
#include "params.h"

namespace tk {

// A CPU tensor of four dimensions, as its owner describes it.
struct View {
  void* data;
  DType dtype;
  const int64_t* size;
  const int64_t* stride;
};

// Dimensions of size 1 get stride 0: they may stand for any index.
Strided strided(const View& x);

// Sets sizes, strides and dtype; whether the three fit together.
bool set_tensors(Problem& problem, const View& q, const View& k, const View& v);

// What remains when all else is set: which keys are used, threads and workspace. A forward call
// whose params have no lse wants none.
void run_forward(ForwardParams& params);
void run_backward(BackwardParams& params);

// torch's own threads; operators.cpp lends them.
cpu::Workers workers();

}  // namespace tk
