// What the operators call. Plain C++: no CUDA and no torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kv_cache.h"
#include "common/params.h"
#include "cuda/common/call.h"

namespace tk::cuda {

// Makes the device the current one, with a context: torch's guard does nothing where the device is
// the thread's current one, and a thread that is new to CUDA has no context yet.
void use_device(int device);

// Whether the kernels of sm90 run what they take: they are built, the current device is Hopper, and
// TRANSFORMER_KERNELS_HOPPER, in the environment, is not 0.
bool runs_hopper();

// Bytes of memory of the device that a pass needs beside its inputs and outputs.
size_t forward_workspace(const ForwardParams& params, const Call& call);
size_t backward_workspace(const BackwardParams& params, const Call& call);

// On the current device. Nothing waits for it. Outputs of packed sequences come in as what rows
// without keys give, so that those behind the last sequence may be left alone. Throws
// std::runtime_error where CUDA reports one.
void forward(const ForwardParams& params, const Call& call, void* workspace);
// `deterministic`: dq is summed in the order of key blocks, which wait for each other.
void backward(const BackwardParams& params, const Call& call, void* workspace, bool deterministic);

// Queries of all sequences of a cache, which is in memory of the device with its cache_seqlens and
// table; N is what it has room for. Diagonals and ALiBi count from each sequence's own N - M.
size_t decode_workspace(const ForwardParams& params);
void decode(const ForwardParams& params, const KVCache& cache, void* workspace, void* stream);

// Fills the problem's block mask, of so many batch entries and heads.
void fill_block_mask(const Problem& problem, int64_t batches, int64_t heads, const Call& call);

}  // namespace tk::cuda
