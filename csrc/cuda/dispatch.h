// CUDA launch entry points, called by the operators. Plain C++: no CUDA and no torch headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/params.h"
#include "cuda/common/launch_args.h"

namespace tk::cuda {

// Makes `device` current and creates its context. torch's device guard does nothing if the device
// is already current, and a new thread has no context yet.
void use_device(int device);

// True if the sm90 kernels are used for the problems they support: they are built, the current
// device is Hopper, and the environment variable TRANSFORMER_KERNELS_HOPPER is not 0.
bool runs_hopper();

// Bytes of device workspace that a pass needs.
size_t forward_workspace(const ForwardParams& params, const LaunchArgs& launch);
size_t backward_workspace(const BackwardParams& params, const LaunchArgs& launch);

// Enqueues a pass on call.stream of the current device, asynchronously. Varlen outputs must be
// initialized to the result of fully masked rows (o = 0, lse = -inf, gradients 0): rows after the
// last sequence are not written. Throws std::runtime_error for CUDA errors.
void forward(const ForwardParams& params, const LaunchArgs& launch, void* workspace);
// `deterministic`: key blocks add to dq in ascending order, and wait for each other.
void backward(const BackwardParams& params, const LaunchArgs& launch, void* workspace,
              bool deterministic);

// Attention of the queries over a KV cache, which is in device memory with its cache_seqlens and
// block table; N is the capacity of the cache.
size_t decode_workspace(const ForwardParams& params);
void decode(const ForwardParams& params, const KVCache& cache, void* workspace, void* stream);

// Describe the kernels of both passes, and of attention from a cache.
std::string describe(const ForwardParams& forward, const BackwardParams& backward,
                     const LaunchArgs& launch);
std::string describe_decode(const ForwardParams& params);

// Fills the block mask of the problem, which has `batches` batch entries and `heads` heads.
void fill_block_mask(const Problem& problem, int64_t batches, int64_t heads,
                     const LaunchArgs& launch);

}  // namespace tk::cuda
