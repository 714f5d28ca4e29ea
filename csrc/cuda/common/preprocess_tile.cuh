// Work of the preprocess kernels of the backward pass: lse and delta of each row of a tile, and
// clearing the tile's sums of dq.
#pragma once

#include "cuda/common/mma.cuh"

namespace tk::cuda {

// A tile of queries in a preprocess kernel, one per CTA. kLanes lanes share a row, and kRows rows
// are processed at a time. kWidth bounds the width of o and do.
template <typename Element, int kBlockM_, int kWidth>
struct PreprocessTile {
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kLanes = lanes_per_row(kWidth * sizeof(Element));
  static constexpr int kThreads = preprocess_threads(kBlockM, kWidth * sizeof(Element));
  static constexpr int kRows = kThreads / kLanes, kSteps = kBlockM / kRows;
  static_assert(kBlockM % kRows == 0);

  // Calls visit(row, lse, lse_rest, delta) once for each row of the tile from query i0 on, where
  // delta = rowsum(do o) - dlse. lse is +inf for fully masked rows, so that their weights are 0,
  // and for rows past the last query.
  template <typename Visit>
  TK_DEVICE_METHOD static void for_each_row(const BackwardParams& p, const Sequence& seq, int h,
                                            int i0, const Visit& visit) {
    const auto o = rows_of<const Element>(p.o, seq.at, h, seq.first_q, p.D_v);
    const auto d_o = rows_of<const Element>(p.d_o, seq.at, h, seq.first_q, p.D_v);
    float delta[kSteps];
    if (o.in_chunks && d_o.in_chunks) {
      multiply_chunks(o, d_o, i0, seq.M, delta);
    } else {
      multiply_elements(o, d_o, i0, seq.M, delta);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        delta[step] += __shfl_xor_sync(~0u, delta[step], distance);
      }
    }
    if (lane() != 0) return;
    const int64_t offset = statistics_offset(p, seq, h) + i0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float lse = INFINITY, lse_rest = 0.0f;
      if (i0 + row(step) < seq.M) {
        const float given = static_cast<const float*>(p.lse)[offset + row(step)];
        if (given != -INFINITY) lse = given;
        lse_rest = static_cast<const float*>(p.lse_rest)[offset + row(step)];
        if (p.dlse) delta[step] -= static_cast<const float*>(p.dlse)[offset + row(step)];
      }
      visit(row(step), lse, lse_rest, delta[step]);
    }
  }

  // Sets the kCount sums of the tile to zero.
  template <int kCount>
  TK_DEVICE_METHOD static void clear(float* sums) {
    static_assert(kCount % 4 == 0);
    for (int n = 4 * static_cast<int>(threadIdx.x); n < kCount; n += 4 * kThreads) {
      *reinterpret_cast<float4*>(sums + n) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

 private:
  TK_DEVICE_METHOD static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  TK_DEVICE_METHOD static int row(int step) {
    return step * kRows + static_cast<int>(threadIdx.x) / kLanes;
  }

  // This lane's share of rowsum(do o) for each row, 0 for rows from M on.
  TK_DEVICE_METHOD static void multiply_elements(const Rows<const Element>& o,
                                                 const Rows<const Element>& d_o, int i0, int M,
                                                 float (&sums)[kSteps]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int i = i0 + row(step);
      sums[step] = 0.0f;
#pragma unroll 1
      for (int c = lane(); c < o.width && i < M; c += kLanes) {
        sums[step] += to_float(o.at(i)[c]) * to_float(d_o.at(i)[c]);
      }
    }
  }

  // The same for rows that consist of 16-byte chunks. Lanes that have none load another one: loads
  // without branches are all in flight at once.
  TK_DEVICE_METHOD static void multiply_chunks(const Rows<const Element>& o,
                                               const Rows<const Element>& d_o, int i0, int M,
                                               float (&sums)[kSteps]) {
    constexpr int kChunk = 16 / sizeof(Element);
    constexpr int kChunks = (kWidth + kLanes * kChunk - 1) / (kLanes * kChunk);  // of a lane
    const auto column = [&](int n) { return (n % kChunks * kLanes + lane()) * kChunk; };
    const auto exists = [&](int n) { return column(n) < o.width; };
    uint4 chunks[kSteps * kChunks][2];
#pragma unroll
    for (int n = 0; n < kSteps * kChunks; ++n) {
      const int i = min(i0 + row(n / kChunks), M - 1), c = exists(n) ? column(n) : 0;
      chunks[n][0] = *reinterpret_cast<const uint4*>(o.at(i) + c);
      chunks[n][1] = *reinterpret_cast<const uint4*>(d_o.at(i) + c);
    }
#pragma unroll
    for (int n = 0; n < kSteps * kChunks; ++n) {
      const auto* const x = reinterpret_cast<const Element*>(chunks[n]);
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) sum += to_float(x[e]) * to_float(x[kChunk + e]);
      if (n % kChunks == 0) sums[n / kChunks] = 0.0f;
      if (exists(n) && i0 + row(n / kChunks) < M) sums[n / kChunks] += sum;
    }
  }
};

}  // namespace tk::cuda
