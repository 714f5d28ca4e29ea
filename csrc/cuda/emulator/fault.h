// Bad addresses and endless loops in kernels become errors of the launch instead of killing the
// process.
#pragma once

#include <sys/time.h>

#include <csignal>
#include <string>

namespace tk::emulator {

// While it lives. What happens outside of kernels is left to whoever handled it before.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;

 private:
  stack_t stack_before_;
  itimerval timer_before_;
};

// The line of the source, if there is debug information and addr2line to read it.
std::string describe_code(const void* code);

}  // namespace tk::emulator
