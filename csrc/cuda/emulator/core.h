// What the emulated instructions are made of: threads that wait for each other, and errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace tk::emulator {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffff;

// Where a kernel calls an instruction.
struct Site {
  const char* file;
  int line;
  // As the default of a parameter: where that function is called.
  static constexpr Site here(const char* file_ = __builtin_FILE(), int line_ = __builtin_LINE()) {
    return {file_, line_};
  }
};

struct Extent {
  const void* begin;
  size_t bytes;
};

struct Options {
  // The order of lanes, warps and blocks, the place of shared memory and the delay of asynchronous
  // copies follow it. 0: ascending; 1: descending; else random.
  uint64_t seed = 0;
  // Also report accesses that nothing orders, of kernels compiled with -fsanitize=thread.
  bool races = false;
  // With them sums of floats by atomics whose order is left open, so that their last bits are too.
  bool ordered_sums = false;
  // With them accesses of global memory outside of these; none: anywhere.
  std::vector<Extent> global = {};
  // The chip that kernels are chosen for: 80 or 90.
  int capability = 80;
  // Processor time after which a thread that never lets another run is taken to hang.
  int patience_seconds = 20;
  // Dynamic shared memory that a launch may ask for; sm_90 has 227 KiB.
  size_t most_shared_bytes = 227 * 1024;
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

// Ends the launch with an Error.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The dynamic shared memory of this block.
unsigned char* shared_memory();
// As an address of PTX: of 18 bits, and aligned as the memory is.
uint32_t shared_address(const void* shared);
// Fails unless all bytes are in it and the address is a multiple of `alignment`.
void check_shared(const void* address, size_t bytes, size_t alignment, const char* name, Site site);

// A barrier of the block, for `threads` threads.
void barrier_wait(int id, unsigned threads, const char* name, Site site);
void barrier_arrive(int id, unsigned threads, const char* name, Site site);

// Lets other threads run first: for loops that wait for memory to change.
void spin(const char* name, Site site);

void fence();
int load_acquire(const int* global, Site site);
void add_release(int* global, int value, Site site);

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
  size_t argument_bytes;
};
// Throws Error.
void launch(const Launch& what);

// The kernel of the latest launch.
const char* latest_launch();

}  // namespace tk::emulator
