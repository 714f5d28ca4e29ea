// Parts shared by the scans over chunks: sequences, segments, operands, reading of rows.
//
// A head is a key head of one sequence with the query heads that share it. A scan passes over the
// chunks of a head with a state that stays in the cache. Where heads are too few for the workers, a
// head is cut into segments: their states are summed first, then every segment starts from the sum
// of those before it.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "common/linear_params.h"
#include "cpu/engine/arena.h"
#include "cpu/engine/operand.h"
#include "cpu/engine/pack.h"
#include "cpu/engine/vec.h"
#include "cpu/engine/workers.h"
#include "cpu/linear/decay.h"
#include "cpu/linear/features.h"

namespace tk::cpu::TK_ISA {

static_assert(kChunk == kBlock);

// Rows of one sequence; row numbers count from `first` on in memory.
struct Sequence {
  int64_t number;  // of the state
  int64_t b;       // batch entry in memory
  int64_t first, M, N;
  int64_t key_start, key_end;  // visible keys, counted within the sequence

  bool sees(int64_t row) const { return row - first >= key_start && row - first < key_end; }
};

TK_INLINE Sequence sequence_of(const SequenceParams& p, int64_t n) {
  if (p.cu_seqlens) {
    const int64_t first = p.cu_seqlens[n], length = p.cu_seqlens[n + 1] - first;
    return {n, 0, first, length, length, 0, length};
  }
  const int64_t start = p.key_start ? p.key_start[n] : 0, end = p.key_end ? p.key_end[n] : p.N;
  return {n, n, 0, p.M, p.N, start, end};
}

TK_INLINE int64_t chunks_of(int64_t length) { return (length + kChunk - 1) / kChunk; }

// Number of segments per head. One, unless the workers would be idle for a fifth of the time.
TK_INLINE int64_t choose_segments(const LinearProblem& p, int64_t workers) {
  constexpr int64_t kLeastChunks = 8;  // per segment
  const int64_t heads = p.B * p.H_kv, rounds = (heads + workers - 1) / workers;
  if (workers == 1 || heads == 0 || 5 * heads >= 4 * rounds * workers) return 1;
  const int64_t chunks = chunks_of(std::max(p.M, p.N)) / (p.cu_seqlens ? p.B : 1);
  const int64_t wanted = (4 * workers + heads - 1) / heads;
  return std::max<int64_t>(1, std::min(wanted, chunks / kLeastChunks));
}

// One segment of a head.
struct Segment {
  Sequence sequence;
  int64_t head, number, segments;

  // Chunks first .. second - 1 of `length` rows.
  std::pair<int64_t, int64_t> range(int64_t length) const {
    const int64_t chunks = chunks_of(length);
    return {chunks * number / segments, chunks * (number + 1) / segments};
  }
};

TK_INLINE Segment segment_of(const LinearProblem& p, int64_t item, int64_t segments) {
  const int64_t head = item / segments;
  return {sequence_of(p, head / p.H_kv), head % p.H_kv, item % segments, segments};
}

// Operand of products, whose rows are written in the compute dtype and then packed.
template <typename Engine>
struct Block {
  using Real = typename Engine::Real;
  PanelLayout layout;
  char* panel;
  Real* rows;  // leading dimension `width()`

  int64_t width() const { return layout.width; }
  Real* row(int64_t r) const { return rows + r * layout.width; }
  int64_t size() const { return layout.rows * layout.width; }

  // In some of the forms only, if the other ones are not used.
  void pack(unsigned uses) const {
    PanelLayout part = layout;
    part.uses = uses;
    Engine::pack(part, rows, layout.width, panel);
  }
  void pack() const { pack(layout.uses); }

  auto left(int64_t r = 0) const { return Engine::left(layout, panel, r); }
  auto left_t(int64_t r = 0) const { return Engine::left_t(layout, panel, r); }
  auto right() const { return Engine::right(layout, panel); }
  auto right_t(int64_t r = 0) const { return Engine::right_t(layout, panel, r); }
};

// One of the uses is not kRightT.
template <typename Engine>
Block<Engine> make_block(Arena& arena, unsigned uses, int64_t rows, int64_t width) {
  using Real = typename Engine::Real;
  const PanelLayout layout = Engine::layout(uses, rows, width);
  char* const panel = allocate<char>(arena, static_cast<int64_t>(layout.bytes));
  Real* const scratch =
      Engine::kReadsInPlace ? allocate<Real>(arena, rows * layout.width) : nullptr;
  return {layout, panel, Engine::unpack_to(layout, panel, scratch)};
}

template <typename Engine, Accuracy kAccuracy = Accuracy::kReduced>
void multiply(int64_t rows, int64_t columns, std::initializer_list<typename Engine::Product> terms,
              typename Engine::Real* c, int64_t ldc, WriteMode mode = WriteMode::kOverwrite) {
  Engine::template multiply<kAccuracy>(rows, columns, terms.begin(), static_cast<int>(terms.size()),
                                       c, ldc, mode);
}

// State and sum of features of a scan.
template <typename Engine>
struct State {
  using Real = typename Engine::Real;
  Block<Engine> S;  // D x D_v, or its transpose
  Real* z;          // padded D
  int64_t padded_D;

  int64_t size() const { return S.size() + padded_D; }
  void clear() const {
    TK_ISA::clear(S.rows, S.size());
    TK_ISA::clear(z, padded_D);
  }
  // From and to memory of size() elements.
  void load(const Real* from) const {
    std::copy_n(from, S.size(), S.rows);
    std::copy_n(from + S.size(), padded_D, z);
  }
  void save(Real* to) const {
    std::copy_n(S.rows, S.size(), to);
    std::copy_n(z, padded_D, to + S.size());
  }
  void scale(Real factor) const {
    for (int64_t n = 0; n < S.size(); ++n) S.rows[n] *= factor;
    for (int64_t n = 0; n < padded_D; ++n) z[n] *= factor;
  }
};

template <typename Engine>
State<Engine> make_state(Arena& arena, const LinearProblem& p, unsigned uses, bool transposed) {
  const int64_t D = round_up(p.D, Engine::kWidth), D_v = round_up(p.D_v, Engine::kWidth);
  const Block<Engine> S =
      make_block<Engine>(arena, uses, transposed ? D_v : D, transposed ? p.D : p.D_v);
  return {S, allocate<typename Engine::Real>(arena, D), D};
}

// Element (d, c) of a state of a scan is at d * row + c * column.
struct StateStrides {
  int64_t row, column;
};

template <typename Engine>
StateStrides strides_of(const State<Engine>& state, bool transposed) {
  return transposed ? StateStrides{1, state.S.width()} : StateStrides{state.S.width(), 1};
}

// State `index` of (B, H_kv), or zeros.
template <typename Engine>
void read_state(const LinearProblem& p, const StateMemory& from, int64_t index, bool transposed,
                const State<Engine>& to) {
  using Real = typename Engine::Real;
  to.clear();
  if (!from) return;
  const StateStrides at = strides_of(to, transposed);
  const Real* const S = static_cast<const Real*>(from.S) + index * p.D * p.D_v;
  const Real* const z = static_cast<const Real*>(from.z) + index * p.D;
  for (int64_t d = 0; d < p.D; ++d) {
    for (int64_t c = 0; c < p.D_v; ++c) to.S.rows[d * at.row + c * at.column] = S[d * p.D_v + c];
    to.z[d] = z[d];
  }
}

template <typename Engine>
void write_state(const LinearProblem& p, const State<Engine>& from, bool transposed, int64_t index,
                 const StateMemory& to) {
  using Real = typename Engine::Real;
  const StateStrides at = strides_of(from, transposed);
  Real* const S = static_cast<Real*>(to.S) + index * p.D * p.D_v;
  Real* const z = static_cast<Real*>(to.z) + index * p.D;
  for (int64_t d = 0; d < p.D; ++d) {
    for (int64_t c = 0; c < p.D_v; ++c) S[d * p.D_v + c] = from.S.rows[d * at.row + c * at.column];
    z[d] = from.z[d];
  }
}

// Rows row0 .. row0 + kChunk - 1, converted, padded with zeros in both dimensions. Clears `finite`
// if the engine would have to split an infinity or NaN into parts (see kernels.cpp).
template <typename Engine, typename Keep>
void read_rows(const Slice& from, int64_t row0, Keep&& keep, int64_t padded,
               typename Engine::Real* rows, bool* finite) {
  unpack_rows(from, row0, kChunk, padded, keep, rows);
  if constexpr (Engine::kSplits) {
    if (!all_finite(rows, kChunk * padded)) __atomic_store_n(finite, false, __ATOMIC_RELAXED);
  }
}

// The same of phi.
template <typename Engine, typename Keep>
void read_features(FeatureMap map, const Slice& from, int64_t row0, Keep&& keep, int64_t padded,
                   typename Engine::Real* rows, bool* finite) {
  read_rows<Engine>(from, row0, keep, padded, rows, finite);
  for (int64_t r = 0; r < kChunk && row0 + r < from.length; ++r) {
    if (keep(row0 + r)) map_row(map, from.width, padded, rows + r * padded);
  }
}

// Rows of head h of a sequence.
TK_INLINE Slice slice(const SequenceParams& p, const Strided& x, const Sequence& at, int64_t h,
                      int64_t length, int64_t width) {
  return {p.dtype, x, at.b, h, at.first + length, width};
}

// Reads the decay of chunk `chunk`; call it only with a decay.
template <typename Real>
void read_decay(const LinearProblem& p, const Segment& at, int64_t chunk, ChunkDecay<Real>& decay) {
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk, stride = p.log_decay.stride[2];
  const Real* const from =
      static_cast<const Real*>(p.log_decay.data) + row_offset(p.log_decay, one.b, at.head, row);
  decay.read(from, stride, std::min(kChunk, one.N - chunk * kChunk),
             [&](int64_t i) { return one.sees(row + i); });
}

// Reads chunk `chunk` of keys, values and decays; the blocks are not packed.
template <typename Engine>
void read_keys(const LinearProblem& p, const Segment& at, int64_t chunk, const Block<Engine>& k,
               const Block<Engine>& v, ChunkDecay<typename Engine::Real>& decay, bool* finite) {
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk;
  const auto sees = [&](int64_t r) { return one.sees(r); };
  read_features<Engine>(p.feature_map, slice(p, p.k, one, at.head, one.N, p.D), row, sees,
                        k.width(), k.rows, finite);
  read_rows<Engine>(slice(p, p.v, one, at.head, one.N, p.D_v), row, sees, v.width(), v.rows,
                    finite);
  if (p.log_decay.data) read_decay(p, at, chunk, decay);
}

// Multiplies rows by factors.
template <typename Real>
void scale_rows(const Real* factors, int64_t padded, Real* rows) {
  for (int64_t r = 0; r < kChunk; ++r, rows += padded) {
    for (int64_t c = 0; c < padded; ++c) rows[c] *= factors[r];
  }
}

// sum += rows times factors (null = 1). The rows are summed first, because `sum` may be far larger.
template <typename Real>
void add_rows(const Real* rows, const Real* factors, int64_t padded, Real* sum) {
  for (int64_t c = 0; c < padded; c += kLanes<Real>) {
    Vec<Real> chunk{};
    for (int64_t r = 0; r < kChunk; ++r) {
      const Vec<Real> row = load(rows + r * padded + c);
      chunk += factors ? row * factors[r] : row;
    }
    store(sum + c, load(sum + c) + chunk);
  }
}

// Rows of a batch entry in memory.
TK_INLINE int64_t stored_rows(const SequenceParams& p) { return p.cu_seqlens ? p.rows : p.M; }

// Zeroes the rows after the last packed sequence.
TK_INLINE void clear_padding(const SequenceParams& p, const Strided& x, int64_t heads,
                             int64_t width) {
  if (!p.cu_seqlens) return;
  constexpr double kZero[kChunk] = {};
  for (int64_t r = p.cu_seqlens[p.B]; r < p.rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < width; c += kChunk) {
        write_row(kZero, std::min(kChunk, width - c), 1.0, p.dtype, x.data,
                  row_offset(x, 0, h, r) + c * x.stride[3], x.stride[3]);
      }
    }
  }
}

}  // namespace tk::cpu::TK_ISA
