// Primitives that the emulated instructions are built from: warp collectives, barriers,
// asynchronous copies, launches and errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace tk::emulator {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffff;

// Source location of an instruction in a kernel.
struct Site {
  const char* file;
  int line;
  // As a default argument: the location of the call.
  static constexpr Site here(const char* file_ = __builtin_FILE(), int line_ = __builtin_LINE()) {
    return {file_, line_};
  }
};

// A range of global memory.
struct Extent {
  const void* begin;
  size_t bytes;
};

struct Settings {
  // Schedule: the order of lanes, warps and blocks, the base address of shared memory and the delay
  // of asynchronous copies. 0: ascending order; 1: descending order; otherwise random.
  uint64_t seed = 0;
  // Report data races of kernels compiled with -fsanitize=thread.
  bool races = false;
  // With races: also report unordered float atomics, whose sums are not bitwise reproducible.
  bool ordered_sums = false;
  // With races: also report global accesses outside of these extents. Empty: no limit.
  std::vector<Extent> global = {};
  // Compute capability that kernels are chosen for: 80 or 90.
  int capability = 80;
  // Replaces the number of CTAs that launches aim at; 0: it stays.
  int aimed_ctas = 0;
  // CPU time without a yield after which a thread is reported as an endless loop.
  int timeout_seconds = 20;
  // False: launches do nothing, so that the host's part of a call can be timed.
  bool runs_kernels = true;
  // Limit of the dynamic shared memory of a launch; sm_90 has 227 KiB.
  size_t max_shared_bytes = 227 * 1024;
};
Settings& settings();

// Thrown by launch(). The message names the kernel, block, thread and source line.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A warp-wide instruction. run() gets the operands of all 32 lanes.
struct Collective {
  const char* name;
  void (*run)(uint32_t lanes, void* const* operands);
  bool same_site;  // true if all lanes must call it from the same source line
};

// Blocks until every lane of `lanes` has called it. The last lane calls run() once for all.
void warp_collective(const Collective& collective, uint32_t lanes, void* operand, Site site);

int this_lane();

// Aborts the launch with an Error.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Dynamic shared memory of the current block.
unsigned char* shared_memory();
// The 18-bit shared-memory address that PTX uses, with the alignment of the pointer.
uint32_t shared_address(const void* shared);
// Fails unless [address, address + bytes) is in shared memory and aligned to `alignment`.
void check_shared(const void* address, size_t bytes, size_t alignment, const char* name, Site site);

// Named barrier `id` of the block, for `threads` threads.
void barrier_wait(int id, unsigned threads, const char* name, Site site);
void barrier_arrive(int id, unsigned threads, const char* name, Site site);

// Yields until other threads have run, in loops that poll memory.
void spin(const char* name, Site site);

void fence();
int load_acquire(const int* global, Site site);
void add_release(int* global, int value, Site site);

// cp.async of 16 bytes, or of zeros if `valid` is false. The data is written at the wait.
void copy_async(void* shared, const void* global, bool valid, Site site);
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
void launch(const Launch& launch);

// Name of the kernel launched last.
const char* latest_launch();

}  // namespace tk::emulator
