// Which rows a block of threads works on, one piece after the other.
#pragma once

#include "cuda/common/rows.cuh"

namespace tk::cuda::sm90 {

// All blocks of rows of all heads of all sequences, in the order in which they are begun. A section
// is so many heads that their keys and values stay in the second-level cache while its rows pass;
// within it the last rows come first, which under a causal mask have the most to do.
struct WorkOrder {
  int heads;    // of all sequences
  int blocks;   // of rows, of the longest sequence
  int section;  // heads

  TK_DEVICE_METHOD int count() const { return heads * blocks; }
};

struct Work {
  int b, h, i0;
};

// visit(work), for what falls to this block of threads and has rows. All threads see the same.
template <typename Params, typename Visit>
TK_DEVICE void for_each_work(const Arguments<Params>& a, const WorkOrder& order, int block_m,
                             const Visit& visit) {
  const int H_q = static_cast<int>(a.params.H_q), of_section = order.section * order.blocks;
  for (int n = static_cast<int>(blockIdx.x); n < order.count(); n += static_cast<int>(gridDim.x)) {
    const int first = n / of_section * order.section, within = n % of_section;
    const int heads = min(order.section, order.heads - first);
    const int head = first + within % heads, i0 = (order.blocks - 1 - within / heads) * block_m;
    const Work work{head / H_q, head % H_q, i0};
    if (i0 < sequence_of(a, work.b).M) visit(work);
  }
}

}  // namespace tk::cuda::sm90
