// wgmma against a scalar computation, for every width, layout and swizzle.
#include "cases.h"
#include "cuda/platform/sm90_wgmma.h"

using namespace tk::cuda;

namespace {

struct Layout {
  Swizzle swizzle;
  Major major;
  uint32_t leading, stride;
};

// Byte offset of element (mn, k). Atoms of 8 rows of swizzled chunks follow each other along mn
// first. PTX manual, canonical layouts.
int element_offset(const Layout& layout, int mn, int k) {
  const int w = row_chunks(layout.swizzle), leading = static_cast<int>(layout.leading),
            stride = static_cast<int>(layout.stride);
  if (layout.major == Major::kK) {
    const int chunk = k / 8, rest = k % 8 * 2;
    if (w == 1) return mn / 8 * stride + mn % 8 * 16 + chunk * leading + rest;
    return mn / 8 * stride + swizzled(layout.swizzle, mn % 8, chunk) + rest;
  }
  const int chunk = mn / 8, rest = mn % 8 * 2;
  if (w == 1) return chunk * stride + k % 8 * 16 + k / 8 * leading + rest;
  return chunk / w * leading + k / 8 * stride + swizzled(layout.swizzle, k % 8, chunk % w) + rest;
}

Layout layout_of(Swizzle swizzle, Major major, int extent) {
  const auto w = static_cast<uint32_t>(row_chunks(swizzle));
  const auto atom = w * 128, groups = static_cast<uint32_t>(extent / 8);
  if (major == Major::kK) {
    return w == 1 ? Layout{swizzle, major, groups * 128, 128} : Layout{swizzle, major, 16, atom};
  }
  return w == 1 ? Layout{swizzle, major, groups * 128, 128}
                : Layout{swizzle, major, 2 * atom, atom};
}

struct WgmmaParams {
  const unsigned char* a;  // images of shared memory
  const unsigned char* b;
  const uint32_t* a_registers;
  float* c;  // (128 threads, N / 2)
  Layout a_layout, b_layout;
};

constexpr int kMatrixBytes = 32 * 1024;

template <typename Element, int kN, Major kA, Major kB, bool kRegisters>
TK_KERNEL(128, 1)
wgmma_kernel(const __grid_constant__ WgmmaParams p) {
  TK_SHARED_MEMORY(raw);
  unsigned char* shared = align_to(raw, 1024);
  const int t = static_cast<int>(threadIdx.x);
  for (int n = t; n < kMatrixBytes; n += 128) {
    shared[n] = p.a[n];
    shared[kMatrixBytes + n] = p.b[n];
  }
  fence_async();
  __syncthreads();
  float c[kN / 2];
  for (int n = 0; n < kN / 2; ++n) c[n] = p.c[t * kN / 2 + n];
  uint32_t a_registers[4];
  for (int n = 0; n < 4; ++n) a_registers[n] = p.a_registers[t * 4 + n];
  const uint64_t a =
      matrix_descriptor(shared, p.a_layout.leading, p.a_layout.stride, p.a_layout.swizzle);
  const uint64_t b = matrix_descriptor(shared + kMatrixBytes, p.b_layout.leading, p.b_layout.stride,
                                       p.b_layout.swizzle);
  wgmma_hold(c);
  wgmma_fence();
  if constexpr (kRegisters) {
    wgmma<kB>(c, a_registers, b, Element{}, true);
    wgmma<kB>(c, a_registers, b, Element{}, true);
  } else {
    wgmma<kA, kB>(c, a, b, Element{}, true);
    wgmma<kA, kB>(c, a, b, Element{}, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(c);
  for (int n = 0; n < kN / 2; ++n) p.c[t * kN / 2 + n] = c[n];
}

// c += 2 a b, checked with the accumulator's layout in the PTX manual:
//   row = 16 warp + lane / 4 (+ 8 for i & 2), column = i / 4 * 8 + lane % 4 * 2 + (i & 1)
template <typename Element, int kN, Major kA, Major kB, bool kRegisters = false>
void wgmma_with(Swizzle a_swizzle, Swizzle b_swizzle) {
  Numbers numbers;
  std::vector<Element> a(64 * 16), b(16 * kN);
  fill(a, numbers);
  fill(b, numbers);
  const Layout a_layout = layout_of(a_swizzle, kA, 64), b_layout = layout_of(b_swizzle, kB, kN);
  Array<unsigned char> a_bytes(kMatrixBytes, 0xff), b_bytes(kMatrixBytes, 0xff);
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 64; ++i) {
      memcpy(a_bytes.data() + element_offset(a_layout, i, k), a.data() + i * 16 + k, 2);
    }
    for (int j = 0; j < kN; ++j) {
      memcpy(b_bytes.data() + element_offset(b_layout, j, k), b.data() + k * kN + j, 2);
    }
  }
  Array<uint32_t> a_registers(128 * 4);
  for (int t = 0; t < 128; ++t) {
    for (int i = 0; i < 8; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + (i & 2 ? 8 : 0);
      const int k = t % 4 * 2 + (i & 1) + (i & 4 ? 8 : 0);
      a_registers[static_cast<size_t>(t * 4 + i / 2)] |=
          uint32_t{a[static_cast<size_t>(row * 16 + k)].bits} << (i & 1) * 16;
    }
  }
  Array<float> c(64 * kN);
  for (size_t n = 0; n < c.size(); ++n) c[n] = static_cast<float>(n % 7);
  TK_LAUNCH((wgmma_kernel<Element, kN, kA, kB, kRegisters>), dim3(1), 128, 2 * kMatrixBytes + 1024,
            nullptr,
            WgmmaParams{a_bytes.on_device(), b_bytes.on_device(), a_registers.on_device(),
                        c.on_device(), a_layout, b_layout});
  finish();
  for (int t = 0; t < 128; ++t) {
    for (int i = 0; i < kN / 2; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + (i & 2 ? 8 : 0);
      const int column = i / 4 * 8 + t % 4 * 2 + (i & 1);
      const size_t at = static_cast<size_t>(t * kN / 2 + i);
      double sum = static_cast<double>(at % 7);
      for (int k = 0; k < 16; ++k) {
        sum += 2.0 * double(value_of(a[static_cast<size_t>(row * 16 + k)])) *
               value_of(b[static_cast<size_t>(k * kN + column)]);
      }
      expect_near(c[at], sum, 2e-5, "c");
    }
  }
}

template <int kN>
void wgmma_width() {
  wgmma_with<Half, kN, Major::kK, Major::kK>(Swizzle::k128, Swizzle::k128);
  wgmma_with<BFloat16, kN, Major::kK, Major::kK, true>(Swizzle::k128, Swizzle::k128);
  wgmma_with<BFloat16, kN, Major::kK, Major::kMN>(Swizzle::k64, Swizzle::k64);
}

TK_CASE(wgmma_widths) {
  wgmma_width<32>();
  wgmma_width<64>();
  wgmma_width<96>();
  wgmma_width<128>();
  wgmma_width<192>();
  wgmma_width<256>();
}

TK_CASE(wgmma_layouts) {
  for (const Swizzle a : {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128}) {
    for (const Swizzle b : {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128}) {
      wgmma_with<Half, 64, Major::kK, Major::kK>(a, b);
      wgmma_with<Half, 128, Major::kMN, Major::kMN>(a, b);
      wgmma_with<Half, 64, Major::kMN, Major::kK>(a, b);
    }
  }
}

}  // namespace
