// Framework-independent tensor views, from which the bindings build a Problem.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace tk {

// A four-dimensional tensor. Does not own its data, sizes or strides.
struct View {
  void* data;
  DType dtype;
  const int64_t* size;
  const int64_t* stride;
};

// Dimensions of size 1 get stride 0, so that they broadcast. Without elements all strides are 0:
// torch accepts any stride there, also one whose multiples overflow.
inline Strided strided(const View& x) {
  Strided s{x.data, {}};
  const bool empty = x.size[0] == 0 || x.size[1] == 0 || x.size[2] == 0 || x.size[3] == 0;
  for (int64_t d = 0; d < 4; ++d) s.stride[d] = empty || x.size[d] == 1 ? 0 : x.stride[d];
  return s;
}

// Fills in sizes, strides and dtype. Returns false if the shapes or dtypes do not match.
inline bool set_tensors(Problem& p, const View& q, const View& k, const View& v) {
  p.dtype = q.dtype;
  p.q = strided(q), p.k = strided(k), p.v = strided(v);
  p.B = q.size[0], p.H_q = q.size[1], p.M = q.size[2], p.D = q.size[3];
  p.H_kv = k.size[1], p.N = k.size[2], p.D_v = v.size[3];
  p.lse_stride = p.M;
  return k.size[0] == p.B && v.size[0] == p.B && v.size[1] == p.H_kv && v.size[2] == p.N &&
         k.size[3] == p.D && p.H_kv > 0 && p.H_q > 0 && p.H_q % p.H_kv == 0 && k.dtype == q.dtype &&
         v.dtype == q.dtype;
}

}  // namespace tk
