#include "ordering.hpp"

#include <algorithm>
#include <deque>

#include "scheduler.hpp"

namespace {
std::deque<Known> arena;  // all nodes of a launch, freed when it ends

unsigned warps_of_a_block() {
  return static_cast<unsigned>(current->block->warps.size());
}

const Flat& flat(const Known& known) {
  if (known.flat) return *known.flat;
  auto result = std::make_unique<Flat>();
  std::vector<const Known*> open{&known};
  std::unordered_map<const Known*, bool> visited;
  auto take = [&](std::uint32_t block, std::uint32_t epoch) {
    auto& mine = result->epochs[block];
    mine = std::max(mine, epoch);
  };
  auto take_clocks = [&](std::uint32_t warp, const std::uint32_t* clocks) {
    auto& mine = result->clocks[warp];
    mine.resize(kLanes);
    for (unsigned i = 0; i < kLanes; ++i) mine[i] = std::max(mine[i], clocks[i]);
  };
  while (!open.empty()) {
    const Known* node = open.back();
    open.pop_back();
    if (!node || !visited.emplace(node, true).second) continue;
    if (node->flat) {
      for (const auto& [block, epoch] : node->flat->epochs) take(block, epoch);
      for (const auto& [warp, clocks] : node->flat->clocks) take_clocks(warp, clocks.data());
      continue;
    }
    if (node->position) {
      take(node->block, node->epoch);
      take_clocks(node->warp, node->clocks);
    }
    open.push_back(node->first);
    open.push_back(node->second);
  }
  known.flat = std::move(result);
  return *known.flat;
}

bool covers(const Known* known, const Moment& moment, std::uint32_t threads) {
  if (!known) return false;
  const Flat& all = flat(*known);
  const auto epoch = all.epochs.find(moment.thread / threads);
  if (epoch != all.epochs.end() && moment.epoch < epoch->second) return true;
  const std::uint32_t thread = moment.thread % threads;
  const auto clocks = all.clocks.find(moment.thread / threads * warps_of_a_block() + thread / kLanes);
  return clocks != all.clocks.end() && moment.clock <= clocks->second[thread % kLanes];
}
}  // namespace

const Known* join(const Known* a, const Known* b) {
  if (!a || a == b) return b;
  if (!b) return a;
  Known& both = arena.emplace_back();
  both.first = a;
  both.second = b;
  both.position = false;
  return &both;
}

const Known* publish(Fiber& fiber) {
  Known& now = arena.emplace_back();
  now.first = fiber.known;
  now.second = fiber.block->known;
  now.position = true;
  now.block = fiber.block->index;
  now.epoch = fiber.moment.epoch;
  now.warp = fiber.block->index * warps_of_a_block() + fiber.warp;
  std::copy_n(fiber.block->warps[fiber.warp].seen[fiber.lane], kLanes, now.clocks);
  now.clocks[fiber.lane] = fiber.moment.clock;
  ++fiber.moment.clock;
  fiber.moment_id = 0;
  return &now;
}

bool ordered(const Moment& moment, const Fiber& fiber) {
  if (moment.thread == fiber.moment.thread) return true;
  const auto threads = static_cast<std::uint32_t>(fiber.block->fibers.size());
  if (moment.thread / threads == fiber.block->index) {
    if (moment.epoch < fiber.moment.epoch) return true;
    const std::uint32_t thread = moment.thread % threads;
    if (thread / kLanes == fiber.warp &&
        moment.clock <= fiber.block->warps[fiber.warp].seen[fiber.lane][thread % kLanes])
      return true;
  }
  return covers(fiber.known, moment, threads) || covers(fiber.block->known, moment, threads);
}

void forget_everything_known() {
  arena.clear();
}
