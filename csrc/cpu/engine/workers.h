// Thread pool interface; bindings/cpu_operators.cpp supplies torch's pool.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace tk::cpu {

struct Workers {
  int64_t count;
  // Calls body(context, worker) for worker = 0 .. count - 1, in parallel.
  void (*launch)(int64_t count, void (*body)(void* context, int64_t worker), void* context);
};

// visit(worker, item) for every item, scheduled dynamically: masked blocks differ in cost. Results
// do not depend on the assignment.
template <typename Visit>
TK_INLINE void for_each(const Workers& workers, int64_t items, Visit&& visit) {
  struct Context {
    Visit& visit;
    int64_t items;
    int64_t next;
  } context{visit, items, 0};
  const auto body = [](void* opaque, int64_t worker) {
    Context& c = *static_cast<Context*>(opaque);
    for (;;) {
      const int64_t item = __atomic_fetch_add(&c.next, 1, __ATOMIC_RELAXED);
      if (item >= c.items) return;
      c.visit(worker, item);
    }
  };
  if (workers.count == 1 || items <= 1) {
    body(&context, 0);
  } else {
    workers.launch(workers.count < items ? workers.count : items, body, &context);
  }
}

// The same with a fixed part of the items for each worker, so that what it writes stays in its own
// caches until the next call. For items of equal cost.
template <typename Visit>
TK_INLINE void for_each_own(const Workers& workers, int64_t items, Visit&& visit) {
  struct Context {
    Visit& visit;
    int64_t items, workers;
  } context{visit, items, workers.count < items ? workers.count : items};
  const auto body = [](void* opaque, int64_t worker) {
    const Context& c = *static_cast<Context*>(opaque);
    const int64_t end = c.items * (worker + 1) / c.workers;
    for (int64_t item = c.items * worker / c.workers; item < end; ++item) c.visit(worker, item);
  };
  if (context.workers > 1) {
    workers.launch(context.workers, body, &context);
  } else if (context.workers == 1) {
    body(&context, 0);
  }
}

// True if whole heads divide evenly among the workers; what a worker packs is then in its own
// caches.
TK_INLINE bool can_own_heads(int64_t heads, int64_t workers) {
  return heads >= 8 * workers || (heads >= 4 * workers && heads % workers == 0);
}

}  // namespace tk::cpu
