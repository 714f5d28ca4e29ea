#include "emulator/fault.h"

#include <dlfcn.h>
#include <pthread.h>
#include <ucontext.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "emulator/machine.h"

#ifdef __linux__
#include <elf.h>
#endif

namespace tk::emulator {

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
constexpr int kCount = sizeof kSignals / sizeof *kSignals;

struct sigaction before[kCount];
pthread_t launching;
uint64_t switches_at_tick;
int idle_ticks;

const void* program_counter(void* context) {
  [[maybe_unused]] auto* machine_state = static_cast<ucontext_t*>(context);
#if defined(__linux__) && defined(__x86_64__)
  return reinterpret_cast<const void*>(machine_state->uc_mcontext.gregs[REG_RIP]);
#elif defined(__linux__) && defined(__aarch64__)
  return reinterpret_cast<const void*>(machine_state->uc_mcontext.pc);
#else
  return nullptr;
#endif
}

std::string describe_fault(const void* address) {
  const Block& block = *current->block;
  char text[160];
  if (block.stacks.overflowed(address) >= 0) {
    snprintf(text, sizeof text, "stack overflow: more than %zu bytes of local variables",
             kStackBytes);
  } else if (block.shared.in_guarded_range(address)) {
    const auto* at = static_cast<const unsigned char*>(address);
    snprintf(text, sizeof text, "access to byte %td of shared memory, which has %zu bytes",
             at - block.shared.base(), block.shared.size());
  } else {
    snprintf(text, sizeof text, "access to unmapped address 0x%zx",
             reinterpret_cast<size_t>(address));
  }
  return text;
}

void on_timer() {
  if (machine.switches() != switches_at_tick) {
    switches_at_tick = machine.switches();
    idle_ticks = 0;
  } else if (++idle_ticks >= settings().timeout_seconds) {
    machine.abort_launch("has not yielded for " + std::to_string(settings().timeout_seconds) +
                         " s");
  }
}

void on_signal(int signal, siginfo_t* info, void* context) {
  const bool here = pthread_equal(pthread_self(), launching);
  if (signal == SIGVTALRM) {
    if (current && !here) pthread_kill(launching, signal);
    if (current && here) on_timer();
    return;
  }
  if (!here || !current) {  // restore the previous handler; the signal recurs on return
    for (int n = 0; n < kCount; ++n) {
      if (kSignals[n] == signal) sigaction(signal, &before[n], nullptr);
    }
    return;
  }
  const void* code = static_cast<const char*>(program_counter(context)) + 1;
  machine.abort_launch(code, signal == SIGFPE ? "division by zero" : describe_fault(info->si_addr));
}

#ifdef __linux__
// True for a non-PIE executable, whose addresses are absolute.
bool is_fixed(const void* base) {
  Elf64_Ehdr header;
  memcpy(&header, base, sizeof header);
  return header.e_type == ET_EXEC;
}
#else
bool is_fixed(const void*) { return false; }
#endif

}  // namespace

FaultHandler::FaultHandler() {
  // A separate stack for handlers, because the fault may be a stack overflow.
  constexpr size_t kHandlerStack = 256 * 1024;
  static const std::unique_ptr<char[]> stack(new char[kHandlerStack]);
  launching = pthread_self();
  switches_at_tick = machine.switches(), idle_ticks = 0;
  stack_t alternative{};
  alternative.ss_sp = stack.get();
  alternative.ss_size = kHandlerStack;
  sigaltstack(&alternative, &stack_before_);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags =
      SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER;  // the handler does not return
  for (int n = 0; n < kCount; ++n) sigaction(kSignals[n], &action, &before[n]);
  constexpr itimerval kEverySecond{{1, 0}, {1, 0}};
  setitimer(ITIMER_VIRTUAL, &kEverySecond, &timer_before_);
}

FaultHandler::~FaultHandler() {
  setitimer(ITIMER_VIRTUAL, &timer_before_, nullptr);
  for (int n = 0; n < kCount; ++n) {
    // With the default action, a pending timer signal would kill the process.
    if (kSignals[n] == SIGVTALRM && before[n].sa_handler == SIG_DFL) continue;
    sigaction(kSignals[n], &before[n], nullptr);
  }
  sigaltstack(&stack_before_, nullptr);
}

std::string describe_code(const void* code) {
  Dl_info module;
  if (!code || !dladdr(code, &module)) return "?";
  const char* at = static_cast<const char*>(code) - 1;
  const size_t offset = is_fixed(module.dli_fbase)
                            ? reinterpret_cast<size_t>(at)
                            : static_cast<size_t>(at - static_cast<char*>(module.dli_fbase));
  char command[4300], line[300] = "";
  snprintf(command, sizeof command, "addr2line -s -e '%s' 0x%zx 2>/dev/null", module.dli_fname,
           offset);
  if (FILE* pipe = popen(command, "r")) {
    if (!fgets(line, sizeof line, pipe)) line[0] = 0;
    pclose(pipe);
  }
  line[strcspn(line, " \n")] = 0;
  if (line[0] && line[0] != '?') return line;
  const char* slash = strrchr(module.dli_fname, '/');
  snprintf(line, sizeof line, "%.200s+0x%zx", slash ? slash + 1 : module.dli_fname, offset);
  return line;
}

}  // namespace tk::emulator
