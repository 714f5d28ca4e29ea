// The shared memory of the block that runs.
#pragma once

#include <cstddef>

namespace tk::emulator {

constexpr int kSharedAlignment = 128;
constexpr unsigned char kPoison = 0xff;  // all bytes so: a NaN in every format

// Fresh memory, all poison, `shift` times kSharedAlignment bytes before a page that cannot be read.
void begin_shared(size_t bytes, int shift);
// Fails where something was written beside it.
void check_shared_edges();

}  // namespace tk::emulator
