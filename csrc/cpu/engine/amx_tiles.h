// Tile registers of AMX, numbered 0 to 7. Within an AmxSession:
//
//   load_tile<n>(from, stride)            16 rows of 64 bytes, `stride` bytes apart
//   load_tile_streamed<n>(from, stride)   the same by a non-temporal load: L1 keeps other data
//   store_tile<n>(to, stride)
//   clear_tile<n>()
//   multiply_tile<c, a, b>()              c += a b: float32, by pairs of bfloat16
#pragma once

#include "cpu/engine/pairs.h"

#if defined(TK_EMULATE_BFLOAT16)

#include "cpu/engine/amx_tiles_emulated.h"

#else

namespace tk::cpu::TK_ISA {

// A constant: for a local variable GCC 12 eliminates all stores past the first 8 bytes, which is
// all that the intrinsic declares as its input.
struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
};
constexpr AmxConfig kAllTiles;

// Configures all eight tiles as 16 x 64 bytes for its lifetime.
class AmxSession {
 public:
  AmxSession() { _tile_loadconfig(&kAllTiles); }
  ~AmxSession() { _tile_release(); }
  AmxSession(const AmxSession&) = delete;
  AmxSession& operator=(const AmxSession&) = delete;
};

// Tile numbers must be literals in the compiler's intrinsics, hence inline assembly.
template <int kNumber>
TK_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kNumber) : "memory");
}
template <int kNumber>
TK_INLINE void load_tile_streamed(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kNumber) : "memory");
}
template <int kNumber>
TK_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kNumber) : "memory");
}
template <int kNumber>
TK_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kNumber));
}
template <int kC, int kA, int kB>
TK_INLINE void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

}  // namespace tk::cpu::TK_ISA

#endif
