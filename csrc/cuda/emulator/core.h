// What the emulated instructions are made of: threads that wait for each other, and errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace tk::emulator {

constexpr int kWarp = 32;

// Where a kernel calls an instruction.
struct Site {
  const char* file;
  int line;
};

// As the default of a last parameter it is the caller's.
#define TK_HERE \
  ::tk::emulator::Site { __builtin_FILE(), __builtin_LINE() }

// How a launch is run. The order of lanes and warps and the place of shared memory follow the seed.
struct Options {
  uint64_t seed = 0;
};
Options& options();

// Thrown by a launch: which thread did what where.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What lanes of a warp do together. `operands` are those of the 32 lanes.
struct Collective {
  const char* name;
  void (*run)(uint32_t lanes, void* const* operands);
  bool same_site;  // whether all lanes must call it in the same place
};

// Returns when every lane of `lanes` has called it and run() has been called once.
void together(const Collective& what, uint32_t lanes, void* operand, Site site);

int this_lane();

// Ends the launch with an Error. Does not return.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The dynamic shared memory of this block.
unsigned char* shared_memory();
// Fails unless all bytes are in it and the address is a multiple of `alignment`.
void check_shared(const void* address, size_t bytes, size_t alignment, const char* name, Site site);

// Waits at barrier `id` for `threads` threads.
void barrier(int id, unsigned threads, const char* name, Site site);

// Lets other threads run: for loops that wait for memory to change.
void spin(const char* name, Site site);

// An asynchronous copy of 16 bytes by this thread; zeros if not there. Arrives at the wait.
void copy_later(void* shared, const void* global, bool there, Site site);
void commit_copies();
void wait_copies(int pending);

struct Launch {
  const char* name;
  unsigned grid[3];
  unsigned threads;
  size_t shared_bytes;
  void (*thread)(const void* arguments);
  const void* arguments;
};
// Runs every block, one after the other. Throws Error.
void launch(const Launch& what);

}  // namespace tk::emulator
