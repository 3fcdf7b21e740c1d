// The state of a launch: blocks, their threads as fibers, and what each waits for.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "interface.hpp"
#include "ordering.hpp"

constexpr unsigned kLanes = 32;

enum class Wait { kReady, kBarrier, kClusterBarrier, kWarpBarrier, kShuffle, kVote, kExited };

struct Block;

// One thread of the GPU: a stack of its own, switched cooperatively.
struct Fiber {
  void* stack_pointer;
  void* fake_stack;  // AddressSanitizer's
  Block* block;
  unsigned thread, lane, warp;  // in the block, in the warp, the warp in the block
  HostIndex index;

  Wait wait;
  const char* file;  // of the call it waits in, or waited in last
  int line;
  unsigned mask;  // of the lanes that meet
  HostShuffle shuffle;
  int operand, width;
  unsigned long long value, result;

  Moment moment;            // the time of its accesses since it last met others
  std::uint32_t moment_id;  // that moment in the log, or 0 when it is not there yet
  const Known* known;       // what it learned through atomics and fences since the last barrier
  const Known* released;    // what its last fence publishes with later atomics
  const Known* pending;     // what its atomics have read and its next fence will let it rely on
};

struct Warp {
  unsigned ready;                      // lanes that can run
  unsigned lanes;                      // lanes that exist
  std::uint32_t seen[kLanes][kLanes];  // seen[i][j]: the last moment of lane j that lane i is ordered behind
};

// A block that is resident. Slots are used again when a block has ended, and those of a cluster, which are neighbours,
// when all of them have.
struct Block {
  unsigned slot, index;
  HostIndex position;
  bool active = false;
  unsigned ready_warps, waiting, exited;
  std::uint32_t epoch;  // barriers passed
  bool vote, voted;     // by any thread that has come to the next one, and to the last
  const Known* known;   // what its threads learned before the last barrier
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<char> shared;  // its __shared__ memory while another block has the processor
};

extern const HostLaunch* launch;
extern Fiber* current;  // null outside of kernels

// Ends the launch with a message. Does not return when called from a kernel.
[[noreturn]] void fail(const std::string& message);
// "block 3, thread 17"
std::string name(const Fiber& fiber);
std::string place(const char* file, int line);
// A place in machine code, in a form that Python replaces by the line (symbols.py).
std::string code(const void* address);
// Lets others run first; returns when the scheduler comes back to this fiber.
void yield();
// Lets others run now and then, when the order is random.
void maybe_yield();
bool on_a_stack(std::uintptr_t address);
