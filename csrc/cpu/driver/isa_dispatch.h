// Which instruction set runs. Includes no torch header and none of the instruction sets' own.
#pragma once

#include <string>
#include <vector>

#include "cpu/attention/kernels.h"

namespace tk::cpu {

struct Feature {
  const char* name;
  bool present;
};

// What the CPU has, of what kernels may use.
std::vector<Feature> cpu_features();

// The instruction sets that were compiled in, least first.
std::vector<std::string> built_isas();

// The kernels in use: those forced, or else the best that this CPU runs.
const Kernels& kernels();
std::string isa();

// Forces one of built_isas() until called again; "auto" lets the CPU decide. Throws
// std::invalid_argument for a name that is not built, or that this CPU cannot run.
void force_isa(const std::string& name);

}  // namespace tk::cpu
