// What a micro-kernel's operands look like is its engine's business (fma.h, amx.h). The loops know
// only this: tiles are sums of products a b; a is a left operand (rows x depth), b a right one
// (depth x columns); a panel holds kBlock rows of q, k, v or do in the forms that its uses ask for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/macros.h"

namespace tk::cpu::TK_ISA {

// kLeft and kRight take the panel as it is, the others transposed.
enum Use : unsigned { kLeft = 1, kLeftT = 2, kRight = 4, kRightT = 8 };

struct PanelLayout {
  unsigned uses;
  int64_t rows, width;                  // padded to what the engine multiplies
  size_t left, left_t, right, right_t;  // where each form begins, in bytes
  size_t bytes;
};

enum class Into : uint8_t { kFresh, kSum };

// Whether a left operand is wanted again while it is in the first-level cache. If not, it need not
// drive out others there.
enum class Reads : uint8_t { kOnce, kAgain };

// How exact a product is: to the operands' last bits, or as exact as a right operand that was
// rounded to its parts between two products.
enum class Exact : uint8_t { kFully, kMostly };

// One product a b of a sum of products.
template <typename Left, typename Right>
struct Term {
  Left a;
  Right b;
  int64_t depth;
};

TK_INLINE int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

}  // namespace tk::cpu::TK_ISA
