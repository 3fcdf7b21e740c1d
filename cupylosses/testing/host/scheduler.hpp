// State of a launch: blocks, their threads as fibers, and what each of them waits for.
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
  unsigned thread, lane, warp;  // index in the block, in the warp, of the warp
  HostIndex index;

  Wait wait;
  const char* file;  // of the call in which it waits, or waited last
  int line;
  unsigned mask;  // lanes that must meet
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
  std::uint32_t seen[kLanes][kLanes];  // seen[i][j]: the last moment of lane j that lane i is ordered behind
};

// A resident block. A slot is reused when its block has ended; the slots of a cluster, which are neighbours, when all
// of its blocks have.
struct Block {
  unsigned slot, index;
  HostIndex position;
  bool active = false;
  unsigned ready_warps, waiting, exited;
  std::uint32_t epoch;  // barriers passed
  bool vote, voted;     // of any thread at the next barrier, and at the last one
  const Known* known;   // order that its threads knew before the last barrier
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<char> shared;  // its __shared__ memory while another block runs
};

extern const HostLaunch* launch;
extern Fiber* current;  // null outside of kernels

// Ends the launch with a message. Does not return when called from a kernel.
[[noreturn]] void fail(const std::string& message);
// "block 3, thread 17"
std::string name(const Fiber& fiber);
std::string place(const char* file, int line);
// An address in machine code, in a form that Python replaces by the line (symbols.py).
std::string code(const void* address);
// Yields; returns when the scheduler chooses this fiber again.
void yield();
// Yields now and then, if the order is random.
void maybe_yield();
bool on_a_stack(std::uintptr_t address);
