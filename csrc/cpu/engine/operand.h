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

constexpr int64_t kRunRows = 16;  // unit of contiguous runs of rows; shorter pages are copied

// Rows to pack, `stride` elements apart: contiguous, or in runs of kRunRows rows.
template <typename Element>
struct PanelRows {
  static constexpr int64_t kMaxRuns = 4;
  const Element* data;
  int64_t stride;
  bool in_runs = false;
  int64_t offset[kMaxRuns] = {};  // of each run, in elements
  int64_t next[kMaxRuns] = {};    // from each run to that of the panel likely to be packed next

  TK_INLINE_METHOD const Element* row(int64_t r) const {
    if (!in_runs) return data + r * stride;
    return data + offset[r / kRunRows] + r % kRunRows * stride;
  }
  // From row r, and the others of its run; 0 if unknown.
  TK_INLINE_METHOD int64_t ahead(int64_t r) const { return in_runs ? next[r / kRunRows] : 0; }
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
