// A chunk of tokens of one head of q and k, and of the value heads that share it: operands,
// reading, and the part of the chunk that both passes compute.
//
//   X_ij = G_ij k_i . k_j for j < i      P_ij = scale G_ij q_i . k_j for j <= i
//   r_i  = v_i - e_i S_0^T k_i - sum of X_ij u_j over j < i,   u_i = beta_i r_i
//   o    = scale e q S_0 + P u           S = kept S_0 + (to_end k)^T u
#pragma once

#include "cpu/delta/solve.h"
#include "cpu/delta/weights.h"
#include "cpu/linear/weights.h"

namespace tk::cpu::TK_ISA {

constexpr double kNormEps = 1e-6;  // as NORM_EPS in transformer_kernels/linear/delta/types.py

// Value heads first .. first + count - 1 of one sequence, which share head `head` of q and k.
struct Heads {
  Sequence sequence;
  int64_t head, first, count;
};

// Items of work are these: `parts` per head of q and k.
TK_INLINE Heads heads_of(const DeltaProblem& p, int64_t item, int64_t parts) {
  const int64_t group = p.H_v / p.H_k, part = item % parts, head = item / parts % p.H_k;
  const int64_t begin = group * part / parts, end = group * (part + 1) / parts;
  return {sequence_of(p, item / parts / p.H_k), head, head * group + begin, end - begin};
}

template <typename Engine>
struct ChunkScan {
  using Real = typename Engine::Real;
  Block<Engine> q, k, u;
  Block<Engine> q_start, k_start;  // scale e q, -e k
  Block<Engine> k_end;             // to_end k
  Block<Engine> p;                 // P
  Block<Engine>* states;           // S of each value head
  Gates<Real> gates;
  Weights<Real> products;       // q . k and k . k, which value heads share
  Weights<Real> weights;        // of a value head; its p are the rows of P
  ChannelRows<Real> channels;   // if gates are by channel
  Real *r, *beta;               // kChunk x padded D_v, kChunk
  Real *q_inverse, *k_inverse;  // 1 / lengths of rows under l2norm
  bool* finite;
};

// Uses of operands in a pass, beside those by the functions below.
struct Uses {
  unsigned q = 0, k = 0, u = 0, q_start = 0, k_start = 0, k_end = 0, p = 0;
};

template <typename Engine>
Block<Engine> make_delta_state(const DeltaProblem& p, unsigned uses, Arena& arena) {
  return make_block<Engine>(arena, uses, round_up(p.D, Engine::kWidth), p.D_v);
}

template <typename Engine>
ChunkScan<Engine> make_chunk_scan(const DeltaProblem& p, int64_t heads, Uses more, Arena& arena,
                                  bool* finite) {
  using Real = typename Engine::Real;
  ChunkScan<Engine> s;
  s.q = make_block<Engine>(arena, kLeft | more.q, kChunk, p.D);
  s.k = make_block<Engine>(arena, kLeft | kRightT | more.k, kChunk, p.D);
  s.u = make_block<Engine>(arena, kRight | more.u, kChunk, p.D_v);
  s.q_start = make_block<Engine>(arena, more.q_start, kChunk, p.D);
  s.k_start = make_block<Engine>(arena, kLeft | more.k_start, kChunk, p.D);
  s.k_end = make_block<Engine>(arena, kLeftT | more.k_end, kChunk, p.D);
  s.p = make_block<Engine>(arena, more.p, kChunk, kChunk);
  s.states = allocate<Block<Engine>>(arena, heads);
  for (int64_t n = 0; n < heads; ++n) {
    const Block<Engine> state = make_delta_state<Engine>(p, kRight, arena);
    if (arena.base) s.states[n] = state;
  }
  const int64_t width = s.k.width();
  s.gates = make_gates<Real>(p, width, arena);
  for (Real** x : {&s.products.x, &s.products.p, &s.weights.x}) {
    *x = allocate<Real>(arena, kChunk * kChunk);
  }
  s.weights.p = s.p.rows;
  const int64_t rows = s.gates.by_channel ? kChunk * width : 0;
  s.channels = {s.q.rows, s.k.rows, allocate<Real>(arena, rows), allocate<Real>(arena, rows)};
  s.r = allocate<Real>(arena, kChunk * s.u.width());
  for (Real** x : {&s.beta, &s.q_inverse, &s.k_inverse}) *x = allocate<Real>(arena, kChunk);
  s.finite = finite;
  return s;
}

// Divides rows by their lengths; `inverse` receives the factors.
template <typename Real>
void normalize_rows(int64_t rows, int64_t padded, Real* x, Real* inverse) {
  for (int64_t r = 0; r < rows; ++r, x += padded) {
    Vec<Real> squares{};
    for (int64_t c = 0; c < padded; c += kLanes<Real>) squares += load(x + c) * load(x + c);
    const Real sum = reduce<Real>(squares, [](Vec<Real> a, Vec<Real> b) { return a + b; })[0];
    inverse[r] = Real{1} / static_cast<Real>(__builtin_sqrt(sum + kNormEps));
    for (int64_t c = 0; c < padded; ++c) x[c] *= inverse[r];
  }
}

TK_INLINE int64_t rows_of_chunk(const Sequence& one, int64_t chunk) {
  return std::min(kChunk, one.N - chunk * kChunk);
}

// Reads rows of q and k, and multiplies them if gates are by token.
template <typename Engine>
void read_tokens(const DeltaProblem& p, const ChunkScan<Engine>& s, const Heads& at, int64_t chunk,
                 unsigned q_uses, unsigned k_uses) {
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk, rows = rows_of_chunk(one, chunk);
  const int64_t count = round_up(rows, 32);
  const auto all = [](int64_t) { return true; };
  const auto read = [&](const Strided& x, const Block<Engine>& to, auto* inverse) {
    read_rows<Engine>(slice(p, x, one, at.head, one.N, p.D), row, all, to.width(), to.rows,
                      s.finite);
    if (p.l2norm) normalize_rows(rows, to.width(), to.rows, inverse);
  };
  read(p.q, s.q, s.q_inverse);
  read(p.k, s.k, s.k_inverse);
  const bool by_channel = s.gates.by_channel;
  s.q.pack(q_uses | (by_channel ? 0U : kLeft));
  s.k.pack(k_uses | (by_channel ? 0U : kLeft | kRightT));
  if (by_channel) return;
  multiply_triangle(count, s.q, s.k, s.products.p);
  multiply_triangle(count, s.k, s.k, s.products.x);
}

// Clears `finite` unless an engine can split the numbers into parts.
template <typename Engine>
void check_finite(const typename Engine::Real* x, int64_t count, bool* finite) {
  if constexpr (Engine::kSplits) {
    if (!all_finite(x, count)) __atomic_store_n(finite, false, __ATOMIC_RELAXED);
  }
}

// Reads gates and beta of value head h, weighs its tokens, and decays q and k; does not pack them.
template <typename Engine>
void read_head(const DeltaProblem& p, const ChunkScan<Engine>& s, const Heads& at, int64_t h,
               int64_t chunk) {
  using Real = typename Engine::Real;
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk, rows = rows_of_chunk(one, chunk);
  const int64_t count = round_up(rows, 32);
  const auto* const beta =
      static_cast<const Real*>(p.beta.data) + row_offset(p.beta, one.b, h, row);
  for (int64_t r = 0; r < kChunk; ++r) s.beta[r] = r < rows ? beta[r * p.beta.stride[2]] : Real{0};
  check_finite<Engine>(s.beta, kChunk, s.finite);
  const bool is_number = read_gates(p, one, h, row, rows, s.gates);
  if (Engine::kSplits && !is_number) __atomic_store_n(s.finite, false, __ATOMIC_RELAXED);
  const bool by_channel = s.gates.by_channel;
  if (by_channel) weigh_channels(s.gates, s.channels, count, s.weights);
  mask_weights(s.gates, count, by_channel ? s.weights : s.products, Real{1},
               static_cast<Real>(p.scale), s.weights);
  scale_by(s.gates, s.gates.from_start, static_cast<Real>(p.scale), s.q.rows, s.q_start.rows);
  scale_by(s.gates, s.gates.from_start, Real{-1}, s.k.rows, s.k_start.rows);
  scale_by(s.gates, s.gates.to_end, Real{1}, s.k.rows, s.k_end.rows);
}

// r and u of value head h, whose tokens are weighed; S is the state before the chunk, packed.
template <typename Engine>
void solve_chunk(const DeltaProblem& p, const ChunkScan<Engine>& s, const Heads& at, int64_t h,
                 int64_t chunk, const Block<Engine>& S) {
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk;
  const int64_t count = round_up(rows_of_chunk(one, chunk), 32), width = s.u.width();
  const auto all = [](int64_t) { return true; };
  read_rows<Engine>(slice(p, p.v, one, h, one.N, p.D_v), row, all, width, s.r, s.finite);
  s.k_start.pack(kLeft);
  multiply<Engine, Accuracy::kFull>(count, width, {{s.k_start.left(), S.right(), s.k.width()}}, s.r,
                                    width, WriteMode::kAccumulate);
  clear(s.u.rows, s.u.size());
  solve<false>(count, width, s.weights.x, s.beta, width, s.r, s.u.rows);
}

// S = kept S + k_end^T u; u is packed.
template <typename Engine>
void advance_state(const ChunkScan<Engine>& s, const Block<Engine>& S) {
  decay_state(s.gates, S.width(), S.rows);
  s.k_end.pack(kLeftT);
  multiply<Engine, Accuracy::kFull>(S.layout.rows, S.width(),
                                    {{s.k_end.left_t(), s.u.right(), kChunk}}, S.rows, S.width(),
                                    WriteMode::kAccumulate);
}

// State `index` of (B, H_v), or zeros.
template <typename Engine>
void read_delta_state(const DeltaProblem& p, const void* from, int64_t index,
                      const Block<Engine>& S, bool* finite) {
  using Real = typename Engine::Real;
  clear(S.rows, S.size());
  if (!from) return;
  const Real* const data = static_cast<const Real*>(from) + index * p.D * p.D_v;
  for (int64_t d = 0; d < p.D; ++d) std::copy_n(data + d * p.D_v, p.D_v, S.row(d));
  check_finite<Engine>(S.rows, S.size(), finite);
}

template <typename Engine>
void write_delta_state(const DeltaProblem& p, const Block<Engine>& S, int64_t index, void* to) {
  using Real = typename Engine::Real;
  Real* const data = static_cast<Real*>(to) + index * p.D * p.D_v;
  for (int64_t d = 0; d < p.D; ++d) std::copy_n(S.row(d), p.D_v, data + d * p.D_v);
}

}  // namespace tk::cpu::TK_ISA
