#include "emulator/fiber.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define TK_UCONTEXT
#endif

#ifdef __ELF__
#define TK_HIDDEN ".hidden tk_emulator_switch\n"
#else
#define TK_HIDDEN ".private_extern tk_emulator_switch\n"
#endif
#define TK_FUNCTION \
  ".text\n.p2align 4\n.globl tk_emulator_switch\n" TK_HIDDEN "tk_emulator_switch:\n"

#if defined(__x86_64__) && !defined(TK_UCONTEXT)

// An indirect jump instead of `ret`, which the return-address predictor would mispredict.
__asm__(TK_FUNCTION R"(
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
)");

namespace {
constexpr int kReturnWord = 6;      // the resume address follows six registers
constexpr size_t kFrameBytes = 64;  // stack alignment as after a call: 8 below a multiple of 16
}  // namespace

#elif defined(__aarch64__) && !defined(TK_UCONTEXT)

__asm__(TK_FUNCTION R"(
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  br x30
)");

namespace {
constexpr int kReturnWord = 11;
constexpr size_t kFrameBytes = 160;
}  // namespace

#else

#include <ucontext.h>

// Portable fallback; each switch costs a system call. The "stack pointer" is a ucontext_t that is
// stored on the stack it describes.
void tk_emulator_switch(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

#endif

namespace tk::emulator {

namespace {

// Stack tops are staggered by 128 bytes, so that 32 lanes do not compete for the same L1 sets.
constexpr size_t kColours = 32;
constexpr size_t kColourBytes = 128;

// As large as a stack, because large arrays could skip a single guard page. A multiple of every
// page size.
constexpr size_t kGuardBytes = kStackBytes;
constexpr size_t kStride = kGuardBytes + kStackBytes;

}  // namespace

Stacks::~Stacks() {
  if (begin_) munmap(begin_, static_cast<size_t>(count_) * kStride);
}

void Stacks::reserve(int count) {
  if (count <= count_) return;
  if (begin_) munmap(begin_, count_ * kStride);
  begin_ = nullptr, count_ = 0;
  void* memory = mmap(nullptr, count * kStride, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<char*>(memory), count_ = count;
  for (int i = 0; i < count; ++i) mprotect(begin_ + i * kStride, kGuardBytes, PROT_NONE);
}

void* Stacks::prepare(int index, void (*entry)()) {
  char* const top = begin_ + static_cast<size_t>(index + 1) * kStride -
                    static_cast<size_t>(index) % kColours * kColourBytes;
#ifdef TK_UCONTEXT
  auto* const context = reinterpret_cast<ucontext_t*>(top - kColours * kColourBytes);
  getcontext(context);
  context->uc_stack.ss_sp = top - kStackBytes + kColours * kColourBytes;
  context->uc_stack.ss_size = kStackBytes - 2 * kColours * kColourBytes;
  makecontext(context, entry, 0);
  return context;
#else
  void** const frame = reinterpret_cast<void**>(top - kFrameBytes);
  memset(frame, 0, kFrameBytes);
  frame[kReturnWord] = reinterpret_cast<void*>(entry);
  return frame;
#endif
}

bool Stacks::contains(const void* address) const {
  const char* at = static_cast<const char*>(address);
  return at >= begin_ && at < begin_ + count_ * kStride;
}

int Stacks::overflowed(const void* address) const {
  if (!contains(address)) return -1;
  const size_t offset = static_cast<const char*>(address) - begin_;
  return offset % kStride < kGuardBytes ? static_cast<int>(offset / kStride) : -1;
}

}  // namespace tk::emulator
