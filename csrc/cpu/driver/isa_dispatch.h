// Selection of the instruction set at run time. Includes neither torch headers nor intrinsics.
#pragma once

#include <string>
#include <vector>

#include "common/params.h"
#include "cpu/attention/kernels.h"
#include "cpu/conv/kernels.h"
#include "cpu/delta/kernels.h"
#include "cpu/linear/kernels.h"

namespace tk::cpu {

struct Feature {
  const char* name;
  bool present;
};

// CPU features that the kernels can use, and whether this CPU has them.
std::vector<Feature> cpu_features();

// Instruction sets compiled in, in ascending order of preference.
std::vector<std::string> built_isas();

// The kernels in use: the forced ones, else the best that this CPU supports. Those of attention are
// for calls of one dtype.
const Kernels& kernels(DType dtype);
const LinearKernels& linear_kernels();
const DeltaKernels& delta_kernels();
const ConvKernels& conv_kernels();
std::string isa();

// Forces one of built_isas() until the next call; "auto" restores the default. Throws
// std::invalid_argument if the name is not built or not supported by this CPU.
void force_isa(const std::string& name);

}  // namespace tk::cpu
