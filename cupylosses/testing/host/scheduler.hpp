// State of a launch: blocks, their threads (fibers), and the call in which each thread waits.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "interface.hpp"
#include "ordering.hpp"

constexpr unsigned kLanes = 32;

enum class Wait { kReady, kBarrier, kClusterBarrier, kWarpBarrier, kShuffle, kVote, kExited };

struct Block;

// One thread of the GPU: a fiber with a stack of its own, switched cooperatively.
struct Fiber {
  void* stack_pointer;
  void* fake_stack;  // of AddressSanitizer
  Block* block;
  unsigned thread, lane, warp;  // thread of the block, lane of the warp, warp of the block
  HostIndex index;

  Wait wait;
  const char* file;  // place of the call in which it waits, or last waited
  int line;
  unsigned mask;  // lanes that must arrive
  HostShuffle shuffle;
  int operand, width;
  unsigned long long value, result;

  Moment moment;            // of its accesses since its last synchronization
  std::uint32_t moment_id;  // index of that moment in the log, 0 if it is not there yet
  const Known* known;       // order from atomics and fences since the last barrier
  const Known* released;    // published by later atomics, since its last fence
  const Known* pending;     // read by its atomics, valid from its next fence on
};

struct Warp {
  unsigned ready;                      // lanes that can run
  unsigned lanes;                      // lanes that exist
  std::uint32_t seen[kLanes][kLanes];  // seen[i][j]: lane i is ordered after lane j up to this clock
};

// A resident block. Its slot is reused after the block has ended. The slots of a cluster are adjacent, and are reused
// after all blocks of the cluster have ended.
struct Block {
  unsigned slot, index;
  HostIndex position;
  bool active = false;
  unsigned ready_warps, waiting, exited;
  std::uint32_t epoch;  // barriers passed
  bool vote, voted;     // OR of the threads' predicates: at the next barrier, and at the last one
  const Known* known;   // order that any of its threads knew at the last barrier
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<char> shared;  // its __shared__ memory while another block runs
};

extern const HostLaunch* launch;
extern Fiber* current;  // null outside of kernels

// Ends the launch with a message: switches to the scheduler if called from a kernel, throws otherwise.
[[noreturn]] void fail(const std::string& message);
// "block 3, thread 17"
std::string name(const Fiber& fiber);
std::string place(const char* file, int line);
// Formats an address in machine code as a placeholder, which symbols.py replaces by the source line.
std::string code(const void* address);
// Yields, and returns when the scheduler chooses this fiber again.
void yield();
// Yields at random intervals if the order is random. Called at each memory access; also enforces the timeout.
void maybe_yield();
bool on_a_stack(std::uintptr_t address);
