// Signal handlers that turn invalid addresses, divisions by zero and endless loops in kernels into
// launch errors.
#pragma once

#include <sys/time.h>

#include <csignal>
#include <string>

namespace tk::emulator {

// Installs the handlers for its lifetime. Signals outside of kernels go to the previous handlers.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;

 private:
  stack_t stack_before_;
  itimerval timer_before_;
};

// Source file and line of a code address, or module and offset without debug information or
// addr2line.
std::string describe_code(const void* code);

}  // namespace tk::emulator
