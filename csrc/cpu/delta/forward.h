// Forward pass of the gated delta rule.
#pragma once

#include "cpu/delta/chunk.h"

namespace tk::cpu::TK_ISA {

template <typename Engine>
struct DeltaForwardScan {
  ChunkScan<Engine> chunk;
  typename Engine::Real* o;  // kChunk x padded D_v
};

template <typename Engine>
DeltaForwardScan<Engine> make_delta_forward(const DeltaProblem& p, Arena& arena, bool* finite) {
  DeltaForwardScan<Engine> s;
  const Uses uses{.q_start = kLeft, .p = kLeft};
  s.chunk = make_chunk_scan<Engine>(p, p.H_v / p.H_k, uses, arena, finite);
  s.o = allocate<typename Engine::Real>(arena, kChunk * s.chunk.u.width());
  return s;
}

// o of value head h, whose chunk is solved; u is packed.
template <typename Engine>
void write_delta_output(const DeltaForwardParams& p, const DeltaForwardScan<Engine>& s,
                        const Heads& at, int64_t h, int64_t chunk, const Block<Engine>& S) {
  const ChunkScan<Engine>& c = s.chunk;
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk, rows = rows_of_chunk(one, chunk);
  const int64_t count = round_up(rows, 32), width = c.u.width();
  c.q_start.pack();
  c.p.pack();
  multiply_by_weights(count, c.p, c.u, c.q_start, S, s.o);
  for (int64_t r = 0; r < rows; ++r) {
    write_row(s.o + r * width, p.D_v, typename Engine::Real{1}, p.dtype, p.o.data,
              row_offset(p.o, one.b, h, row + r), p.o.stride[3]);
  }
}

template <typename Engine>
void delta_forward_heads(const DeltaForwardParams& p, const DeltaForwardScan<Engine>& s,
                         const Heads& at) {
  const ChunkScan<Engine>& c = s.chunk;
  const auto index = [&](int64_t n) { return at.sequence.number * p.H_v + at.first + n; };
  for (int64_t n = 0; n < at.count; ++n) {
    read_delta_state(p, p.initial, index(n), c.states[n], c.finite);
  }
  for (int64_t chunk = 0; chunk < chunks_of(at.sequence.N); ++chunk) {
    read_tokens(p, c, at, chunk, 0, 0);
    for (int64_t n = 0; n < at.count; ++n) {
      const Block<Engine>& S = c.states[n];
      S.pack();
      read_head(p, c, at, at.first + n, chunk);
      solve_chunk(p, c, at, at.first + n, chunk, S);
      c.u.pack(kRight);
      write_delta_output(p, s, at, at.first + n, chunk, S);
      advance_state(c, S);
    }
  }
  for (int64_t n = 0; n < at.count; ++n) write_delta_state(p, c.states[n], index(n), p.end);
}

template <typename Engine>
struct DeltaForwardWorkspace {
  DeltaForwardScan<Engine>* scans;  // of each worker
  bool* finite;
};

template <typename Engine>
DeltaForwardWorkspace<Engine> lay_out_delta_forward(const DeltaForwardParams& p, int64_t workers,
                                                    Arena& arena) {
  DeltaForwardWorkspace<Engine> w{allocate<DeltaForwardScan<Engine>>(arena, workers),
                                  allocate<bool>(arena, 1)};
  for (int64_t n = 0; n < workers; ++n) {
    const DeltaForwardScan<Engine> scan = make_delta_forward<Engine>(p, arena, w.finite);
    if (arena.base) w.scans[n] = scan;
  }
  return w;
}

// Returns false if the input contains values that the engine cannot represent; the output is then
// invalid.
template <typename Engine>
bool delta_forward(const DeltaForwardParams& p, const Workers& workers, Arena arena) {
  const auto w = lay_out_delta_forward<Engine>(p, workers.count, arena);
  *w.finite = true;
  // Value heads are apart only if the others would leave workers idle: they share products.
  const int64_t heads = p.B * p.H_k, group = p.H_v / p.H_k;
  const int64_t parts = heads < 2 * workers.count && workers.count > 1 ? group : 1;
  for_each(workers, heads * parts, [&](int64_t worker, int64_t item) {
    [[maybe_unused]] const typename Engine::Session session;
    delta_forward_heads(p, w.scans[worker], heads_of(p, item, parts));
  });
  clear_padding(p, p.o, p.H_v, p.D_v);
  return *w.finite;
}

}  // namespace tk::cpu::TK_ISA
