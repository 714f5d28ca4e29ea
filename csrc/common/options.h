// The options of a call as views, and the only checks of them against the problem. Two readers fill
// the views: bindings/operator_call.cpp from torch tensors, bindings/fast_path/readers.cpp from
// Python objects.
//
// transformer_kernels/problem reports errors of the caller; the checks here ensure memory safety
// only. Tensor values are not read: they may be on a GPU, and not yet computed.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/fields.h"
#include "common/params.h"
#include "common/tensor_view.h"

namespace tk {

struct Options {
#define TK_NUMBER(type, kind, name, layouts) type name{};
#define TK_TENSOR(name, elements, memory, shape, layouts) View name;
  TK_FIELDS(TK_NUMBER, TK_TENSOR)
#undef TK_NUMBER
#undef TK_TENSOR
};

// k and v may be a cache.
struct Inputs {
  View q, k, v;
};

// Tensors of a backward pass besides inputs and options; dlse, block_mask and those of the options
// may be none.
struct BackwardTensors {
  View d_o, dlse, o, row_stats, block_mask, dq, dk, dv;
#define TK_OPTION(name) View d##name{};
  TK_DIFFERENTIABLE(TK_OPTION)
#undef TK_OPTION
};

// The reason why a call is refused; empty if it is not.
using Reason = std::string;

// Checks the options and fills in the problem and the layout. With bottom_right the diagonals and
// the ALiBi offset of a dense call are shifted; varlen and cached calls shift them per sequence.
Reason set_problem(Problem& p, LayoutParams& layout, const Inputs& inputs, const Options& options);

// Shape of the block mask: (B or 1, H_q or 1, row blocks, column blocks), where an extent is 1 if
// the mask does not depend on it. Nothing if the mask has only diagonals and key ranges. Same as
// `ResolvedMask.block_mask_shape`.
std::optional<std::array<int64_t, 4>> block_mask_shape(const Problem& p, const Options& options);

// Checks and fills in the tensors of a pass; the problem must be set. row_stats, (2, B, H_q, M),
// are lse and its rounding error; a forward pass may want lse alone, or none. block_mask may be
// none.
Reason set_outputs(ForwardParams& p, const Options& options, const View& o, const View& row_stats,
                   const View& block_mask);
Reason set_tensors(BackwardParams& p, const Options& options, const BackwardTensors& x);

}  // namespace tk
