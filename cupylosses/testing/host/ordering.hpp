// Happens-before order between memory accesses.
//
// Barriers order whole blocks, __syncwarp orders lanes, fences and atomics order across blocks. A full vector clock per
// thread would have an entry per thread of the grid. Three coarser clocks hold the same information:
//
//   epoch   number of barriers that a block has passed: accesses before a barrier are ordered before those after it
//   clock   per lane, advanced when the lane publishes something; each lane stores the clock up to which it is ordered
//           after each other lane of its warp
//   Known   order that atomics established across blocks: snapshots of other threads' positions, in a graph that all
//           threads share and that is flattened on demand
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

// A point in the execution of a thread.
struct Moment {
  std::uint32_t thread;  // index in the grid
  std::uint32_t epoch;
  std::uint32_t clock;
};

struct Flat {
  std::unordered_map<std::uint32_t, std::uint32_t> epochs;               // by block
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> clocks;  // by warp of the grid, then by lane
};

// Either the position of a thread when it published, with the order that it knew then, or the union of two others.
struct Known {
  const Known* first;
  const Known* second;
  bool position;
  std::uint32_t block, epoch, warp;
  std::uint32_t clocks[32];
  mutable std::unique_ptr<Flat> flat;
};

struct Fiber;

// Returns the union of both; either may be null.
const Known* join(const Known* a, const Known* b);
// Returns the current position of a fiber, which excludes its later accesses.
const Known* publish(Fiber& fiber);
// True if an access at `moment` is ordered before the next access of the fiber.
bool ordered(const Moment& moment, const Fiber& fiber);
void forget_everything_known();
