// Tile registers of AMX in memory, for tests on a CPU that has AVX-512 but no AMX.
//
// Products round as those of tdpbf16ps in Intel's manual: the first elements of all pairs are
// summed from zero by fused multiply-adds, and so are the second elements; c is increased by the
// sum of both sums. Every operation rounds to nearest even and treats denormal numbers as zero.
// Only the payloads of NaN may differ.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/macros.h"

namespace tk::cpu::TK_ISA {

struct alignas(64) EmulatedTile {
  char rows[16][64];
};

struct EmulatedTiles {
  bool configured = false;
  EmulatedTile tiles[8] = {};
};
inline thread_local EmulatedTiles emulated_tiles;

// Without a configuration AMX raises SIGILL, and so does the trap.
template <int kNumber>
TK_INLINE EmulatedTile& emulated_tile() {
  if (!emulated_tiles.configured) __builtin_trap();
  return emulated_tiles.tiles[kNumber];
}

class AmxSession {
 public:
  AmxSession() { emulated_tiles = {.configured = true}; }
  ~AmxSession() { emulated_tiles.configured = false; }
  AmxSession(const AmxSession&) = delete;
  AmxSession& operator=(const AmxSession&) = delete;
};

template <int kNumber>
TK_INLINE void load_tile(const void* from, int64_t stride) {
  EmulatedTile& tile = emulated_tile<kNumber>();
  for (int m = 0; m < 16; ++m) {
    std::memcpy(tile.rows[m], static_cast<const char*>(from) + m * stride, 64);
  }
}
template <int kNumber>
TK_INLINE void load_tile_streamed(const void* from, int64_t stride) {
  load_tile<kNumber>(from, stride);
}
template <int kNumber>
TK_INLINE void store_tile(void* to, int64_t stride) {
  const EmulatedTile& tile = emulated_tile<kNumber>();
  for (int m = 0; m < 16; ++m) {
    std::memcpy(static_cast<char*>(to) + m * stride, tile.rows[m], 64);
  }
}
template <int kNumber>
TK_INLINE void clear_tile() {
  emulated_tile<kNumber>() = {};
}

// Rounds as tdpbf16ps and vdpbf16ps do for its lifetime.
class EmulatedRounding {
 public:
  EmulatedRounding() {
    _mm_setcsr(_MM_MASK_MASK | _MM_ROUND_NEAREST | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  }
  ~EmulatedRounding() { _mm_setcsr(before); }
  EmulatedRounding(const EmulatedRounding&) = delete;
  EmulatedRounding& operator=(const EmulatedRounding&) = delete;

 private:
  unsigned before = _mm_getcsr();
};

TK_INLINE __m512 first_elements(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}
TK_INLINE __m512 second_elements(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_maskz_mov_epi16(0xaaaaaaaa, pairs));
}

// Not inlined: compilers move arithmetic past a change of MXCSR.
__attribute__((noinline)) inline void add_product(EmulatedTile& c, const EmulatedTile& a,
                                                  const EmulatedTile& b) {
  for (int m = 0; m < 16; ++m) {
    __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
    for (int k = 0; k < 16; ++k) {
      int32_t pair;
      std::memcpy(&pair, a.rows[m] + 4 * k, 4);
      const __m512i left = _mm512_set1_epi32(pair), right = _mm512_load_si512(b.rows[k]);
      first = _mm512_fmadd_ps(first_elements(left), first_elements(right), first);
      second = _mm512_fmadd_ps(second_elements(left), second_elements(right), second);
    }
    const __m512 sum = _mm512_add_ps(first, second);
    _mm512_store_ps(c.rows[m], _mm512_add_ps(_mm512_load_ps(c.rows[m]), sum));
  }
}

template <int kC, int kA, int kB>
TK_INLINE void multiply_tile() {
  const EmulatedRounding rounding;
  add_product(emulated_tile<kC>(), emulated_tile<kA>(), emulated_tile<kB>());
}

}  // namespace tk::cpu::TK_ISA
