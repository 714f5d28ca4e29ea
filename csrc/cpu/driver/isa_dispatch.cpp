#include "cpu/driver/isa_dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <stdexcept>

namespace tk::cpu {

namespace {

struct Candidate {
  const char* name;
  const Kernels* kernels;
  const LinearKernels* linear;
  const DeltaKernels* delta;
  const ConvKernels* conv;
  bool (*runs_here)();
  bool (*is_preferred)() = [] { return true; };
  const Kernels* bfloat16 = kernels;  // for calls in bfloat16
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// The test build emulates vdpbf16ps (cpu/engine/dot.h) and AMX (cpu/engine/amx_tiles_emulated.h) by
// AVX-512.
#if defined(TK_EMULATE_BFLOAT16)
constexpr bool kEmulatesBFloat16 = true;
#else
constexpr bool kEmulatesBFloat16 = false;
#endif

bool has_avx512_bf16() {
  return has_avx512() && (kEmulatesBFloat16 || __builtin_cpu_supports("avx512bf16"));
}

// On AMD's Zen 4, vdpbf16ps is as fast as a multiply-add of floats; on Intel's Xeon it is slower
// (docs/cpu.md, section 1).
bool has_fast_avx512_bf16() { return __builtin_cpu_is("amd"); }

// CPUID leaf 7: not every compiler's __builtin_cpu_supports knows AMX.
bool has_amx_tiles() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAmxBf16) && (d & kAmxTile);
}

// Linux enables AMX state per process, on request. Once granted it holds for all threads.
bool request_amx_permission() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx_bf16() {
  static const bool has = kEmulatesBFloat16 || (has_amx_tiles() && request_amx_permission());
  return has;
}

bool has_amx() { return has_avx512() && has_amx_bf16(); }
#endif

// In ascending order of preference.
const Candidate kCandidates[] = {
    {"portable", &portable::kKernels, &portable::kLinearKernels, &portable::kDeltaKernels,
     &portable::kConvKernels, [] { return true; }},
#if defined(TK_HAVE_AVX2)
    {"avx2", &avx2::kKernels, &avx2::kLinearKernels, &avx2::kDeltaKernels, &avx2::kConvKernels,
     has_avx2},
#endif
#if defined(TK_HAVE_AVX512)
    {"avx512", &avx512::kKernels, &avx512::kLinearKernels, &avx512::kDeltaKernels,
     &avx512::kConvKernels, has_avx512},
#endif
#if defined(TK_HAVE_AVX512_BF16)
    {"avx512_bf16", &avx512::kKernels, &avx512::kLinearKernels, &avx512::kDeltaKernels,
     &avx512::kConvKernels, has_avx512_bf16, has_fast_avx512_bf16, &avx512_bf16::kKernels},
#endif
#if defined(TK_HAVE_AMX)
    // Convolutions multiply no matrices.
    {"amx", &amx::kKernels, &amx::kLinearKernels, &amx::kDeltaKernels, &avx512::kConvKernels,
     has_amx},
#endif
};

const Candidate* best() {
  const Candidate* chosen = nullptr;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs_here() && candidate.is_preferred()) chosen = &candidate;
  }
  return chosen;
}

std::atomic<const Candidate*> forced{nullptr};

// The forced candidate, else the best that this CPU supports.
const Candidate& chosen() {
  static const Candidate* const best_here = best();
  const Candidate* const forced_here = forced.load(std::memory_order_relaxed);
  return forced_here ? *forced_here : *best_here;
}

}  // namespace

std::vector<Feature> cpu_features() {
#if defined(__x86_64__)
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},
          {"fma", __builtin_cpu_supports("fma") != 0},
          {"f16c", __builtin_cpu_supports("f16c") != 0},
          {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
          {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
          {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
          {"avx512_bf16", has_avx512_bf16()},
          {"amx_bf16", has_amx_bf16()}};
#else
  return {};
#endif
}

std::vector<std::string> built_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : kCandidates) names.emplace_back(candidate.name);
  return names;
}

const Kernels& kernels(DType dtype) {
  return dtype == DType::kBFloat16 ? *chosen().bfloat16 : *chosen().kernels;
}

const LinearKernels& linear_kernels() { return *chosen().linear; }

const DeltaKernels& delta_kernels() { return *chosen().delta; }

const ConvKernels& conv_kernels() { return *chosen().conv; }

std::string isa() { return chosen().name; }

void force_isa(const std::string& name) {
  if (name == "auto") {
    forced = nullptr;
    return;
  }
  for (const Candidate& candidate : kCandidates) {
    if (name != candidate.name) continue;
    if (!candidate.runs_here()) throw std::invalid_argument("this CPU lacks " + name);
    forced = &candidate;
    return;
  }
  throw std::invalid_argument("no kernels are built for '" + name + "'");
}

}  // namespace tk::cpu
