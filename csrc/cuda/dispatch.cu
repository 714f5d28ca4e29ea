// Selects the kernels for a problem, and runs the mask kernels before them.
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/common/arena.h"
#include "cuda/common/launch_config.cuh"
#include "cuda/common/mask_kernels.cuh"
#include "cuda/dispatch.h"
#include "cuda/platform/element.h"
#include "cuda/sm80/kernels.h"
#ifdef TK_SM90
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/supported.h"
#endif
#include "cuda/common/tile_config.h"

namespace tk::cuda {

namespace {

template <typename Element, size_t... kIndex>
const Kernels& kernels_of(Products products, int width, std::index_sequence<kIndex...>) {
  const Kernels* found = nullptr;
  const auto consider = [&]<int kWidth>() {
    if (width != kWidth) return;
    if (products == Products::kPlain) {
      found = &kernels<Element, kWidth, Products::kPlain>();
    } else if constexpr (is_width_of(Products::kRelative, kWidth)) {
      found = &kernels<Element, kWidth, Products::kRelative>();
    }
  };
  (consider.template operator()<kWidths[kIndex]>(), ...);
  if (!found) throw std::runtime_error("head dimensions are wider than the widest tile, 256");
  return *found;
}

Products products_of(const Problem& p) {
  return p.score.relative_keys ? Products::kRelative : Products::kPlain;
}

int width_of(const Problem& p) {
  const int64_t widest = std::max(p.D, p.D_v);
  return width_for(products_of(p), widest < INT32_MAX ? static_cast<int>(widest) : INT32_MAX);
}

const Kernels& kernels_for(const Problem& p) {
  const Products products = products_of(p);
  const int width = width_of(p);
  constexpr auto kEach = std::make_index_sequence<std::size(kWidths)>();
  switch (p.dtype) {
    case DType::kFloat16:
      return kernels_of<Half>(products, width, kEach);
    case DType::kBFloat16:
      return kernels_of<BFloat16>(products, width, kEach);
    case DType::kFloat32:
      return kernels_of<float>(products, width, kEach);
    case DType::kFloat64:
      break;
  }
  throw std::runtime_error("float64: these kernels compute in float32");
}

// Distances modulo 2^32 must not be mistaken for others.
void check_distances(const Problem& p) {
  if (p.score.distances > INT32_MAX) {
    throw std::runtime_error("relative_bias has more than 2^31 - 1 distances");
  }
  if (p.score.relative_keys && p.score.distances > kMaxIndex) {
    throw std::runtime_error("relative_keys has more than 2^30 distances");
  }
}

// Indices and clamped diagonals must fit an int.
void check_lengths(const Problem& p) {
  check_distances(p);
  if (p.M > kMaxIndex || p.N > kMaxIndex) {
    throw std::runtime_error("the problem has more than 2^30 queries or keys");
  }
}

// True for few queries and many keys, for which the decode kernels divide the keys among CTAs.
bool runs_decode(const ForwardParams& p, const LaunchArgs& launch) {
  return decodes(p.B, p.H_q, p.H_kv, p.M, p.N) && !launch.varlen.cu_seqlens_q && !launch.seed &&
         !p.mask.block_mask && !p.score.bias.data && !p.score.relative_keys;
}

// Allocates the live keys, which element masks need, at the start of the workspace.
uint8_t* allocate_live_keys(Arena& arena, const Problem& p) {
  return p.mask.block_mask ? arena.take<uint8_t>(live_keys_size(p)) : nullptr;
}

void find_live_keys(Problem& p, uint8_t* live_keys, const LaunchArgs& launch) {
  if (!live_keys) return;
  set_live_keys(p, live_keys);
  Problem unranged = p;
  unranged.mask.key_start = unranged.mask.key_end = nullptr;
  const int64_t blocks = ceil_of(p.N, kBlockMaskSize), items = live_keys_size(p) / p.N;
  TK_LAUNCH(live_keys_kernel, grid(blocks * items), kLiveKeysWarps * kWarp,
            kLiveKeysWarps * sizeof(uint64_t), launch.stream, unranged, live_keys,
            static_cast<int>(blocks));
}

#ifdef TK_SM90
// Returns null if the sm80 kernels run the problem.
template <typename Params>
const sm90::Kernels* hopper_kernels_for(const Params& params) {
  return runs_hopper() ? sm90::kernels_for(params) : nullptr;
}

// The gradients that sm80 computes on Hopper, too; null if no bias needs one.
const char* bias_gradients_of(const BackwardParams& p) {
  if (p.dbias.data) return p.drelative_bias ? "dbias and drelative_bias" : "dbias";
  return p.drelative_bias ? "drelative_bias" : nullptr;
}
#endif

// ", bfloat16, width 64, sm_90".
std::string described(DType dtype, const std::string& width) {
  constexpr const char* kNames[] = {"float16", "bfloat16", "float32", "float64"};
  return std::string(", ") + kNames[static_cast<int>(dtype)] + ", width " + width + ", sm_" +
         std::to_string(compute_capability());
}

}  // namespace

void use_device(int device) { set_device(device); }

bool runs_hopper() {
#ifdef TK_SM90
  return sm90::is_wanted() && compute_capability() == 90;
#else
  return false;
#endif
}

size_t forward_workspace(const ForwardParams& params, const LaunchArgs& launch) {
  if (runs_decode(params, launch)) return decode_workspace(params);
  Arena arena(nullptr);
  allocate_live_keys(arena, params);
#ifdef TK_SM90
  if (const sm90::Kernels* const hopper = hopper_kernels_for(params)) {
    return arena.bytes() + hopper->forward_workspace;
  }
#endif
  return arena.bytes();
}

void forward(const ForwardParams& params, const LaunchArgs& launch, void* workspace) {
  check_lengths(params);
  if (runs_decode(params, launch)) return decode(params, KVCache{}, workspace, launch.stream);
  ForwardParams p = params;
  Arena arena(workspace);
  find_live_keys(p, allocate_live_keys(arena, p), launch);
#ifdef TK_SM90
  if (const sm90::Kernels* const hopper = hopper_kernels_for(p)) {
    return hopper->forward(p, launch, static_cast<char*>(workspace) + arena.bytes());
  }
#endif
  kernels_for(p).forward(p, launch);
}

size_t backward_workspace(const BackwardParams& params, const LaunchArgs& launch) {
  Arena arena(nullptr);
  allocate_live_keys(arena, params);
#ifdef TK_SM90
  if (const sm90::Kernels* const hopper = hopper_kernels_for(params)) {
    const size_t bytes = hopper->backward_workspace(params, launch);
    if (!bias_gradients_of(params)) return arena.bytes() + bytes;
    const size_t bias_bytes = kernels_for(params).bias_gradients_workspace(params, launch);
    return arena.bytes() + std::max(bytes, bias_bytes);
  }
#endif
  return arena.bytes() + kernels_for(params).backward_workspace(params, launch);
}

void backward(const BackwardParams& params, const LaunchArgs& launch, void* workspace,
              bool deterministic) {
  check_lengths(params);
  BackwardParams p = params;
  Arena arena(workspace);
  find_live_keys(p, allocate_live_keys(arena, p), launch);
  void* const rest = static_cast<char*>(workspace) + arena.bytes();
#ifdef TK_SM90
  if (const sm90::Kernels* const hopper = hopper_kernels_for(p)) {
    if (bias_gradients_of(p)) kernels_for(p).bias_gradients(p, launch, rest);
    return hopper->backward(p, launch, rest, deterministic);
  }
#endif
  kernels_for(p).backward(p, launch, rest, deterministic);
}

size_t decode_workspace(const ForwardParams& params) {
  if (params.score.relative_keys) {
    throw std::runtime_error("relative_keys with a cache: the CUDA kernels do not support them");
  }
  return kernels_for(params).decode_workspace(params);
}

void decode(const ForwardParams& params, const KVCache& cache, void* workspace, void* stream) {
  check_distances(params);
  kernels_for(params).decode(params, cache, workspace, stream);
}

std::string describe(const ForwardParams& f, const BackwardParams& b, const LaunchArgs& launch) {
  std::string forward = f.score.relative_keys ? "csrc/cuda/sm80/relative" : "csrc/cuda/sm80";
  std::string backward = forward, width = std::to_string(width_of(f)), more;
#ifdef TK_SM90
  if (runs_hopper()) {
    const char* const reason = sm90::reason_against(b);
    if (!sm90::reason_against(f)) {
      const Widths tile = sm90::widths_of(f);
      forward = "csrc/cuda/sm90";
      width = std::to_string(tile.width) + "/" + std::to_string(tile.v_width);
    }
    const char* const by_sm80 = bias_gradients_of(b);
    if (!reason) backward = "csrc/cuda/sm90";
    if (reason) more = std::string("; not sm90: ") + reason;
    if (!reason && by_sm80) more = std::string("; csrc/cuda/sm80 for ") + by_sm80;
  }
#endif
  if (runs_decode(f, launch)) forward = "csrc/cuda/sm80/decode";
  const bool same = forward == backward;
  return (same ? forward : forward + " forward, " + backward + " backward") +
         described(f.dtype, width) + more;
}

std::string describe_decode(const ForwardParams& p) {
  return "csrc/cuda/sm80/decode" + described(p.dtype, std::to_string(width_of(p)));
}

void fill_block_mask(const Problem& p, int64_t batches, int64_t heads, const LaunchArgs& launch) {
  const int64_t row_blocks = ceil_of(p.M, kBlockMaskSize),
                column_blocks = ceil_of(p.N, kBlockMaskSize);
  const int64_t programs = batches * heads * row_blocks * column_blocks;
  if (programs == 0) return;
  TK_LAUNCH(block_mask_kernel, grid(programs), kWarp, 0, launch.stream, p, static_cast<int>(heads),
            static_cast<int>(row_blocks), static_cast<int>(column_blocks));
}

}  // namespace tk::cuda
