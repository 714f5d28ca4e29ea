// Schemas of the emulated operators in the namespace TK_LIBRARY, and test settings of the emulator.
// cuda_operators.cpp and linear_cuda_operators.cpp of csrc/bindings implement them;
// tests/support/emulator.py builds and loads the library.
#include <string>
#include <utility>

#include "bindings/linear_call.h"
#include "bindings/namespace.h"
#include "bindings/operator_call.h"
#include "common/workspace.h"
#include "emulator/core.h"

namespace {

void want_poison(bool wanted) { tk::want_poison(wanted); }

int64_t poisoned_bytes() { return static_cast<int64_t>(tk::poisoned_bytes()); }

// Seed of the order in which lanes and warps run. Every order must give the same result.
void set_schedule(int64_t seed) { tk::emulator::settings().seed = static_cast<uint64_t>(seed); }

// Sets the emulated compute capability, 80 or 90; returns the previous one.
int64_t set_chip(int64_t capability) {
  return std::exchange(tk::emulator::settings().capability, static_cast<int>(capability));
}

// Sets the number of CTAs that launches aim at; 0: their own number. Returns the previous one.
int64_t set_aimed_ctas(int64_t count) {
  return std::exchange(tk::emulator::settings().aimed_ctas, static_cast<int>(count));
}

// Enables or disables the kernels; returns the previous state.
int64_t set_runs_kernels(int64_t wanted) {
  return std::exchange(tk::emulator::settings().runs_kernels, wanted != 0);
}

std::string latest_launch() { return tk::emulator::latest_launch(); }

// Enables the race detector, for kernels compiled with -fsanitize=thread.
void report_races(bool wanted) { tk::emulator::settings().races = wanted; }

}  // namespace

TK_DEFINE(TK_LIBRARY, m) {
  m.def(tk::forward_schema().c_str());
  m.def(tk::backward_schema().c_str());
  m.def(tk::describe_schema().c_str());
  m.def(tk::linear_forward_schema().c_str());
  m.def(tk::linear_backward_schema().c_str());
  m.def(tk::linear_steps_schema().c_str());
  m.def("want_poison(bool wanted) -> ()");
  m.def("poisoned_bytes() -> int");
  m.def("set_schedule(int seed) -> ()");
  m.def("report_races(bool wanted) -> ()");
  m.def("set_chip(int capability) -> int");
  m.def("set_aimed_ctas(int count) -> int");
  m.def("set_runs_kernels(int wanted) -> int");
  m.def("latest_launch() -> str");
}

TK_IMPLEMENT(TK_LIBRARY, CompositeExplicitAutograd, m) {
  m.impl("want_poison", TORCH_BOX(&want_poison));
  m.impl("poisoned_bytes", TORCH_BOX(&poisoned_bytes));
  m.impl("set_schedule", TORCH_BOX(&set_schedule));
  m.impl("report_races", TORCH_BOX(&report_races));
  m.impl("set_chip", TORCH_BOX(&set_chip));
  m.impl("set_aimed_ctas", TORCH_BOX(&set_aimed_ctas));
  m.impl("set_runs_kernels", TORCH_BOX(&set_runs_kernels));
  m.impl("latest_launch", TORCH_BOX(&latest_launch));
}
