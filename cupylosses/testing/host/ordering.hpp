// What is ordered before what.
//
// Barriers order whole blocks, __syncwarp its lanes, and what crosses blocks goes through fences and atomics. A full
// vector clock per thread would have an entry per thread of the grid; three coarser clocks say the same:
//
//   epoch   barriers that a block has passed: what any of its threads did before a barrier is ordered before what any
//           does behind it
//   clock   of a lane, advanced whenever it publishes something; each lane knows how far it is ordered behind the other
//           lanes of its warp
//   Known   what came from elsewhere through an atomic: snapshots of other threads' positions, as a graph that is
//           shared by all who know it and flattened when somebody asks
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

// When a thread did something.
struct Moment {
  std::uint32_t thread;  // in the grid
  std::uint32_t epoch;
  std::uint32_t clock;
};

struct Flat {
  std::unordered_map<std::uint32_t, std::uint32_t> epochs;               // by block
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> clocks;  // by warp of the grid, then by lane
};

// A thread's position when it published, and what it knew; or what two others know.
struct Known {
  const Known* first;
  const Known* second;
  bool position;
  std::uint32_t block, epoch, warp;
  std::uint32_t clocks[32];
  mutable std::unique_ptr<Flat> flat;
};

struct Fiber;

// Everything that one or the other knows; either may be null.
const Known* join(const Known* a, const Known* b);
// The position of a fiber now. Its later accesses are not part of it.
const Known* publish(Fiber& fiber);
// Whether an access at `moment` is ordered before what the fiber does now.
bool ordered(const Moment& moment, const Fiber& fiber);
void forget_everything_known();
