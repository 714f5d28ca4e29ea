// Operands of the matrix engines (fma.h, amx.h); their memory layout is private to the engine.
//
// A product is a sum of terms a b: a is the left operand (rows x depth), b the right one (depth x
// columns). A panel is a packed block of kBlock rows of q, k, v or do, in every form that its uses
// need.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/macros.h"

namespace tk::cpu::TK_ISA {

// kLeft and kRight use the panel's rows as they are; kLeftT and kRightT use its transpose.
enum Use : unsigned { kLeft = 1, kLeftT = 2, kRight = 4, kRightT = 8 };

struct PanelLayout {
  unsigned uses;
  int64_t rows, width;                  // padded to the engine's granularity
  size_t left, left_t, right, right_t;  // byte offset of each form
  size_t bytes;
};

// kAccumulate adds to the destination.
enum class WriteMode : uint8_t { kOverwrite, kAccumulate };

// kStreamed: the left operand is read once and loaded past L1, where it would evict other data.
enum class LoadPolicy : uint8_t { kStreamed, kCached };

// kFull: exact to the last bits of the operands. kReduced: as exact as a right operand that was
// rounded to its parts between two products.
enum class Accuracy : uint8_t { kFull, kReduced };

// One term a b of a sum of products.
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
