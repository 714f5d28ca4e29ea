// Backward pass of the gated delta rule. A first scan stores the state before each chunk and r, in
// the memory of a worker; a second one runs from the last chunk, with dS, the gradient of the state
// after the chunk:
//
//   du = P^T do + k_end dS         y_j = du_j - sum of X_ij z_i over i > j,   z_j = beta_j y_j
//   dv = z     dbeta_j = r_j . y_j     dX = -z u^T     dP = do u^T
//   dq = scale e (do S_0^T) + (scale dP G) k
//   dk = (dX G) k - e (z S_0^T) + (scale dP G)^T q + (dX G)^T k + to_end (u dS^T)
//   dS_0 = kept dS + (scale e q)^T do - (e k)^T z
//
// The first two terms of dk are those of k as a row, the others those of k as a column. The
// gradient of c_i, a running sum of log-decays, is q_i dq_i + k_i (dk_row_i - dk_column_i); the
// last one of the chunk also has that of the state, dS S.
#pragma once

#include "cpu/delta/chunk.h"
#include "cpu/linear/decay_gradient.h"

namespace tk::cpu::TK_ISA {

template <typename Engine>
struct DeltaBackwardScan {
  using Real = typename Engine::Real;
  ChunkScan<Engine> chunk;
  Block<Engine> d_o, z;
  Block<Engine> dp, dx;     // scale dP G, dX G
  Block<Engine> S;          // before the chunk
  Block<Engine>* d_states;  // of each value head
  Real* saved;              // (heads, longest sequence's chunks): a state and r
  int64_t chunks;           // of the longest sequence
  Real *y, *dq, *dk;        // kChunk x padded D_v; kChunk x padded D, of all value heads
  RowGradients<Real> own;   // of one value head
  Real *product, *sub;      // kChunk x padded D, kSub x padded D
  double* dc;               // gates: gradient of the running sums
};

TK_INLINE int64_t longest(const SequenceParams& p) {
  int64_t length = p.cu_seqlens ? 0 : p.N;
  for (int64_t n = 0; p.cu_seqlens && n < p.B; ++n) {
    length = std::max<int64_t>(length, p.cu_seqlens[n + 1] - p.cu_seqlens[n]);
  }
  return length;
}

template <typename Engine>
DeltaBackwardScan<Engine> make_delta_backward(const DeltaProblem& p, int64_t chunks, Arena& arena,
                                              bool* finite) {
  using Real = typename Engine::Real;
  const int64_t heads = p.H_v / p.H_k;
  const Uses uses{.q = kRight,
                  .k = kRight,
                  .u = kLeft | kRightT,
                  .q_start = kLeftT,
                  .k_start = kLeftT,
                  .k_end = kLeft,
                  .p = kLeftT};
  DeltaBackwardScan<Engine> s;
  s.chunk = make_chunk_scan<Engine>(p, heads, uses, arena, finite);
  s.d_o = make_block<Engine>(arena, kLeft | kRight, kChunk, p.D_v);
  s.z = make_block<Engine>(arena, kLeft | kRight, kChunk, p.D_v);
  for (Block<Engine>* x : {&s.dp, &s.dx}) {
    *x = make_block<Engine>(arena, kLeft | kLeftT, kChunk, kChunk);
  }
  s.S = make_delta_state<Engine>(p, kRight | kRightT, arena);
  s.d_states = allocate<Block<Engine>>(arena, heads);
  for (int64_t n = 0; n < heads; ++n) {
    const Block<Engine> state = make_delta_state<Engine>(p, kRight | kRightT, arena);
    if (arena.base) s.d_states[n] = state;
  }
  const int64_t width = s.chunk.k.width(), values = kChunk * s.z.width();
  s.chunks = chunks;
  s.saved = allocate<Real>(arena, heads * chunks * (s.S.size() + values));
  s.y = allocate<Real>(arena, values);
  for (Real** x : {&s.dq, &s.dk, &s.own.q, &s.own.k_row, &s.own.k_column, &s.product}) {
    *x = allocate<Real>(arena, kChunk * width);
  }
  s.sub = allocate<Real>(arena, kSub * width);
  s.dc = allocate<double>(arena, s.chunk.gates.by_channel ? width : 1);
  return s;
}

// The saved state before chunk `chunk` of the n-th value head; r follows.
template <typename Engine>
typename Engine::Real* saved_chunk(const DeltaBackwardScan<Engine>& s, int64_t n, int64_t chunk) {
  const int64_t size = s.S.size() + kChunk * s.z.width();
  return s.saved + (n * s.chunks + chunk) * size;
}

template <typename Engine>
void save_chunks(const DeltaBackwardParams& p, const DeltaBackwardScan<Engine>& s,
                 const Heads& at) {
  const ChunkScan<Engine>& c = s.chunk;
  for (int64_t n = 0; n < at.count; ++n) {
    read_delta_state(p, p.initial, at.sequence.number * p.H_v + at.first + n, c.states[n],
                     c.finite);
  }
  for (int64_t chunk = 0; chunk < chunks_of(at.sequence.N); ++chunk) {
    read_tokens(p, c, at, chunk, 0, 0);
    for (int64_t n = 0; n < at.count; ++n) {
      const Block<Engine>& S = c.states[n];
      auto* const to = saved_chunk(s, n, chunk);
      std::copy_n(S.rows, S.size(), to);
      S.pack();
      read_head(p, c, at, at.first + n, chunk);
      solve_chunk(p, c, at, at.first + n, chunk, S);
      std::copy_n(c.r, kChunk * c.u.width(), to + S.size());
      c.u.pack(kRight);
      advance_state(c, S);
    }
  }
}

// Sum over columns of the products of row d of a and b.
template <typename Real>
Real row_of_products(const Real* a, const Real* b, int64_t d, int64_t columns) {
  return row_product(a + d * columns, b + d * columns, columns);
}

// Gradient of the last running sum by the state after the chunk, `end`.
template <typename Engine>
void start_decay_gradient(const DeltaProblem& p, const Gates<typename Engine::Real>& g,
                          const Block<Engine>& dS, const typename Engine::Real* end, double* sum) {
  if (!g.by_channel) *sum = 0;
  for (int64_t d = 0; d < p.D; ++d) {
    const double change = row_of_products(dS.rows, end, d, dS.width());
    g.by_channel ? void(sum[d] = change) : void(*sum += change);
  }
}

// Writes dlog_decay of a chunk of value head h. sum: see start_decay_gradient().
template <typename Engine>
void write_decay_gradient(const DeltaBackwardParams& p, const DeltaBackwardScan<Engine>& s,
                          const Sequence& one, int64_t h, int64_t row, int64_t rows, double* sum) {
  using Real = typename Engine::Real;
  const ChunkScan<Engine>& c = s.chunk;
  const int64_t width = c.k.width();
  const auto* const steps = static_cast<const Real*>(p.log_decay.data);
  for (int64_t r = rows; r-- > 0;) {
    const int64_t first = r * width;
    const Real *const q = c.q.rows + first, *const k = c.k.rows + first;
    const Real *const dq = s.own.q + first, *const k_row = s.own.k_row + first,
                      *const k_column = s.own.k_column + first;
    if (c.gates.by_channel) {
      for (int64_t d = 0; d < p.D; ++d) sum[d] += q[d] * dq[d] + k[d] * (k_row[d] - k_column[d]);
    } else {
      Vec<Real> total{};
      for (int64_t d = 0; d < width; d += kLanes<Real>) {
        total += load(q + d) * load(dq + d) + load(k + d) * (load(k_row + d) - load(k_column + d));
      }
      *sum += reduce<Real>(total, [](Vec<Real> a, Vec<Real> b) { return a + b; })[0];
    }
    Real* const to = static_cast<Real*>(p.dlog_decay) +
                     ((one.b * p.H_v + h) * stored_rows(p) + row + r) * p.gates;
    const Real* const from = steps + row_offset(p.log_decay, one.b, h, row + r);
    for (int64_t d = 0; d < p.gates; ++d) {
      to[d] = from[d * p.log_decay.stride[3]] < kSmallestLogDecay<Real> ? Real{0}
                                                                        : static_cast<Real>(sum[d]);
    }
  }
}

// z, dv and dbeta of value head h, from u, dS and d_o.
template <typename Engine>
void solve_gradient(const DeltaBackwardParams& p, const DeltaBackwardScan<Engine>& s,
                    const Sequence& one, int64_t h, int64_t row, int64_t rows,
                    const Block<Engine>& dS) {
  using Real = typename Engine::Real;
  const ChunkScan<Engine>& c = s.chunk;
  const int64_t count = round_up(rows, 32), width = s.z.width();
  multiply<Engine>(count, width, {{c.k_end.left(), dS.right(), c.k.width()}}, s.y, width);
  add_by_transposed_weights(count, c.p, s.d_o, s.y);
  clear(s.z.rows, s.z.size());
  solve<true>(count, width, c.weights.x, c.beta, width, s.y, s.z.rows);
  Real* const dbeta = static_cast<Real*>(p.dbeta) + (one.b * p.H_v + h) * stored_rows(p) + row;
  for (int64_t r = 0; r < rows; ++r) {
    dbeta[r] = row_of_products(c.r, s.y, r, width);
    write_row(s.z.row(r), p.D_v, Real{1}, p.dtype, p.dv.data, row_offset(p.dv, one.b, h, row + r),
              p.dv.stride[3]);
  }
  s.z.pack();
}

// c += weights x, of the triangle.
template <typename Engine>
void add_by_weights(int64_t count, const Block<Engine>& weights, const Block<Engine>& x,
                    typename Engine::Real* c) {
  for (int64_t r = 0; r < count; r += kHalf) {
    multiply<Engine>(kHalf, x.width(), {{weights.left(r), x.right(), r + kHalf}}, c + r * x.width(),
                     x.width(), WriteMode::kAccumulate);
  }
}

// s.own: gradients of q and k by the states, of one value head.
template <typename Engine>
void begin_row_gradients(const DeltaProblem& p, const DeltaBackwardScan<Engine>& s, int64_t count,
                         const Block<Engine>& dS) {
  using Real = typename Engine::Real;
  const ChunkScan<Engine>& c = s.chunk;
  const Gates<Real>& g = c.gates;
  const int64_t width = c.k.width(), depth = s.z.width();
  const auto from_state = [&](auto left, auto right, const Real* table, Real factor, Real* to) {
    multiply<Engine>(count, width, {{left, right, depth}}, s.product, width);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t d = 0; d < width; d += kLanes<Real>) {
        const int64_t n = r * width + d;
        store(to + n, load(s.product + n) * g.factor(table, r, d) * factor);
      }
    }
  };
  from_state(s.d_o.left(), s.S.right_t(), g.from_start, static_cast<Real>(p.scale), s.own.q);
  from_state(s.z.left(), s.S.right_t(), g.from_start, Real{-1}, s.own.k_row);
  from_state(c.u.left(), dS.right_t(), g.to_end, Real{1}, s.own.k_column);
}

// Adds to s.own the gradients of the weights.
template <typename Engine>
void add_weight_gradients(const DeltaProblem& p, const DeltaBackwardScan<Engine>& s,
                          int64_t count) {
  using Real = typename Engine::Real;
  const ChunkScan<Engine>& c = s.chunk;
  const Weights<Real> gradients{s.dx.rows, s.dp.rows};
  multiply_triangle(count, s.d_o, c.u, gradients.p);
  multiply_triangle(count, s.z, c.u, gradients.x);
  mask_weights(c.gates, count, gradients, Real{-1}, static_cast<Real>(p.scale), gradients);
  if (c.gates.by_channel) {
    add_channel_gradients(c.gates, c.channels, count, gradients, s.own, s.sub, s.product);
    return;
  }
  s.dp.pack();
  s.dx.pack();
  add_by_weights(count, s.dp, c.k, s.own.q);
  add_by_weights(count, s.dx, c.k, s.own.k_row);
  add_by_transposed_weights(count, s.dp, c.q, s.own.k_column);
  add_by_transposed_weights(count, s.dx, c.k, s.own.k_column);
}

// dS of the chunk before.
template <typename Engine>
void advance_gradient(const DeltaBackwardScan<Engine>& s, const Block<Engine>& dS) {
  const ChunkScan<Engine>& c = s.chunk;
  c.q_start.pack();
  c.k_start.pack(kLeftT);
  decay_state(c.gates, dS.width(), dS.rows);
  multiply<Engine, Accuracy::kFull>(
      dS.layout.rows, dS.width(),
      {{c.q_start.left_t(), s.d_o.right(), kChunk}, {c.k_start.left_t(), s.z.right(), kChunk}},
      dS.rows, dS.width(), WriteMode::kAccumulate);
}

// Gradients of chunk `chunk` for the n-th value head; adds those of q and k to s.dq and s.dk.
template <typename Engine>
void backward_head(const DeltaBackwardParams& p, const DeltaBackwardScan<Engine>& s,
                   const Heads& at, int64_t n, int64_t chunk) {
  using Real = typename Engine::Real;
  const ChunkScan<Engine>& c = s.chunk;
  const Sequence& one = at.sequence;
  const Block<Engine>& dS = s.d_states[n];
  const int64_t h = at.first + n, row = one.first + chunk * kChunk;
  const int64_t rows = rows_of_chunk(one, chunk), count = round_up(rows, 32);
  const int64_t values = s.z.width(), width = c.k.width();
  const Real* const saved = saved_chunk(s, n, chunk);
  const bool is_last = chunk + 1 == chunks_of(one.N);
  const Real* const end = is_last ? c.states[n].rows : saved_chunk(s, n, chunk + 1);
  std::copy_n(saved, s.S.size(), s.S.rows);
  std::copy_n(saved + s.S.size(), kChunk * values, c.r);
  s.S.pack(kRightT);
  dS.pack();
  read_head(p, c, at, h, chunk);
  for (int64_t r = 0; r < kChunk; ++r) {
    for (int64_t v = 0; v < values; ++v) c.u.row(r)[v] = c.r[r * values + v] * c.beta[r];
  }
  c.u.pack(kLeft | kRightT);
  c.k_end.pack(kLeft);
  read_rows<Engine>(
      slice(p, p.d_o, one, h, one.N, p.D_v), row, [](int64_t) { return true; }, values, s.d_o.rows,
      c.finite);
  s.d_o.pack();
  c.p.pack();
  start_decay_gradient(p, c.gates, dS, end, s.dc);
  solve_gradient(p, s, one, h, row, rows, dS);
  begin_row_gradients(p, s, count, dS);
  add_weight_gradients(p, s, count);
  write_decay_gradient(p, s, one, h, row, rows, s.dc);
  for (int64_t i = 0; i < count * width; ++i) {
    s.dq[i] += s.own.q[i];
    s.dk[i] += s.own.k_row[i] + s.own.k_column[i];
  }
  advance_gradient(s, dS);
}

// Writes the gradient of a row of q or k from that of the row divided by its length.
template <typename Real>
void write_row_gradient(const DeltaProblem& p, int64_t padded, const Real* x, Real inverse,
                        Real* gradient, const Strided& to, int64_t offset) {
  Real factor{1};
  if (p.l2norm) {
    const Real along = row_product(x, gradient, padded);
    for (int64_t d = 0; d < padded; ++d) gradient[d] -= x[d] * along;
    factor = inverse;
  }
  write_row(gradient, p.D, factor, p.dtype, to.data, offset, to.stride[3]);
}

template <typename Engine>
void delta_backward_heads(const DeltaBackwardParams& p, const DeltaBackwardScan<Engine>& s,
                          const Heads& at) {
  const ChunkScan<Engine>& c = s.chunk;
  const Sequence& one = at.sequence;
  const int64_t width = c.k.width();
  const auto index = [&](int64_t n) { return one.number * p.H_v + at.first + n; };
  save_chunks(p, s, at);
  for (int64_t n = 0; n < at.count; ++n) {
    read_delta_state(p, p.d_end, index(n), s.d_states[n], c.finite);
  }
  for (int64_t chunk = chunks_of(one.N); chunk-- > 0;) {
    read_tokens(p, c, at, chunk, kRight, kRight);
    clear(s.dq, kChunk * width);
    clear(s.dk, kChunk * width);
    for (int64_t n = 0; n < at.count; ++n) backward_head(p, s, at, n, chunk);
    for (int64_t r = 0; r < rows_of_chunk(one, chunk); ++r) {
      const int64_t row = one.first + chunk * kChunk + r;
      write_row_gradient(p, width, c.q.row(r), c.q_inverse[r], s.dq + r * width, p.dq,
                         row_offset(p.dq, one.b, at.head, row));
      write_row_gradient(p, width, c.k.row(r), c.k_inverse[r], s.dk + r * width, p.dk,
                         row_offset(p.dk, one.b, at.head, row));
    }
  }
  for (int64_t n = 0; p.d_initial && n < at.count; ++n) {
    write_delta_state(p, s.d_states[n], index(n), p.d_initial);
  }
}

template <typename Engine>
struct DeltaBackwardWorkspace {
  DeltaBackwardScan<Engine>* scans;  // of each worker
  bool* finite;
};

template <typename Engine>
DeltaBackwardWorkspace<Engine> lay_out_delta_backward(const DeltaBackwardParams& p, int64_t workers,
                                                      Arena& arena) {
  DeltaBackwardWorkspace<Engine> w{allocate<DeltaBackwardScan<Engine>>(arena, workers),
                                   allocate<bool>(arena, 1)};
  const int64_t chunks = chunks_of(longest(p));
  for (int64_t n = 0; n < workers; ++n) {
    const auto scan = make_delta_backward<Engine>(p, chunks, arena, w.finite);
    if (arena.base) w.scans[n] = scan;
  }
  return w;
}

// Returns false if the input contains values that the engine cannot represent; the output is then
// invalid.
template <typename Engine>
bool delta_backward(const DeltaBackwardParams& p, const Workers& workers, Arena arena) {
  using Real = typename Engine::Real;
  const auto w = lay_out_delta_backward<Engine>(p, workers.count, arena);
  *w.finite = true;
  if (p.cu_seqlens) {
    clear(static_cast<Real*>(p.dlog_decay), p.H_v * p.rows * p.gates);
    clear(static_cast<Real*>(p.dbeta), p.H_v * p.rows);
  }
  for_each(workers, p.B * p.H_k, [&](int64_t worker, int64_t item) {
    [[maybe_unused]] const typename Engine::Session session;
    delta_backward_heads(p, w.scans[worker], heads_of(p, item, 1));
  });
  clear_padding(p, p.dq, p.H_k, p.D);
  clear_padding(p, p.dk, p.H_k, p.D);
  clear_padding(p, p.dv, p.H_v, p.D_v);
  return *w.finite;
}

}  // namespace tk::cpu::TK_ISA
