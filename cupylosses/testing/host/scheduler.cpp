// Runs blocks, warps and lanes on one processor. A fiber runs until it waits, ends or yields. The scheduler then
// chooses among the fibers that can run: at random, or in ascending order if the seed is 0. Equal seeds repeat a run
// exactly.

#include "scheduler.hpp"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>

#include "races.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <ucontext.h>
#endif

const HostLaunch* launch;
Fiber* current;

extern "C" {
// Tell AddressSanitizer which stack is in use. Weak symbols: null unless the sanitizer is loaded.
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, std::size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*);
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Stacks, and switches between them

constexpr std::size_t kStack = 256 << 10;  // address space; untouched pages take no memory
constexpr std::size_t kGuard = 4096;       // below each stack: an overflow ends the program
// Stacks start at staggered cache lines. Otherwise the few lines that a thread uses map to the same cache sets in all
// threads, and each switch misses the cache.
constexpr std::size_t kStagger = 9 * 64, kStaggered = 32 << 10;

char* stacks;
std::size_t stack_count;

void reserve_stacks(std::size_t count) {
  if (count <= stack_count) return;
  if (stacks) munmap(stacks, stack_count * kStack);
  void* found =
      mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) {
    stacks = nullptr;
    stack_count = 0;
    fail("no memory for the stacks of " + std::to_string(count) + " threads");
  }
  stacks = static_cast<char*>(found);
  stack_count = count;
  for (std::size_t i = 0; i < count; ++i) mprotect(stacks + i * kStack, kGuard, PROT_NONE);
}

[[noreturn]] void fiber_main();

#if defined(__x86_64__)
// Saves the callee-saved registers on the stack and the stack pointer in `*from`, and continues where `to` was saved.
extern "C" void host_switch(void** from, void* to);
asm(R"(
.text
.type host_switch, @function
host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_switch, .-host_switch
)");

void* prepare_stack(char* top) {
  // As if fiber_main had called host_switch: its address above six saved registers, the stack aligned as at a call.
  void** sp = reinterpret_cast<void**>(top) - 2;
  *sp = reinterpret_cast<void*>(&fiber_main);
  return sp - 6;
}
#else
void host_switch(void** from, void* to) {
  // Stored on the stack that the switch leaves, where it stays valid until a switch returns to it.
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

void* prepare_stack(char* top) {
  auto* context = reinterpret_cast<ucontext_t*>(top - kStack + kGuard + kStaggered);
  getcontext(context);
  context->uc_stack.ss_sp = context + 1;
  context->uc_stack.ss_size = static_cast<std::size_t>(top - reinterpret_cast<char*>(context + 1));
  context->uc_link = nullptr;
  makecontext(context, fiber_main, 0);
  return context;
}
#endif

void* scheduler_stack_pointer;
const void* scheduler_stack;
std::size_t scheduler_stack_size;

// ---------------------------------------------------------------------------------------------------------------------
// The launch

std::vector<Block> blocks;    // resident blocks
std::vector<unsigned> order;  // blocks of the grid, in the order of their start
unsigned next_block;
Block* in_place;  // block whose __shared__ memory is at launch->shared now
std::minstd_rand dice;
bool failed;
std::string message;
std::chrono::steady_clock::time_point deadline;
Block* last_block;  // block of the last fiber that ran
unsigned last_warp;
unsigned first_slot;            // slot where the search for a block starts in ascending order: after one that paused
unsigned accesses, next_yield;  // counted by maybe_yield

unsigned threads_of_a_block() {
  return launch->block.x * launch->block.y * launch->block.z;
}

unsigned roll(unsigned sides) {
  return static_cast<unsigned>(dice() % sides);
}

// memcpy without AddressSanitizer's interceptor, which would report the red zones between __shared__ objects. A switch
// between blocks copies up to 48 KiB twice; copied byte by byte, this took most of the time of a launch.
void copy_bytes(char* to, const char* from, std::size_t count) {
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
#else
  for (; count >= sizeof(std::uint64_t); count -= sizeof(std::uint64_t)) {
    std::uint64_t word;
    __builtin_memcpy(&word, from, sizeof word);
    __builtin_memcpy(to, &word, sizeof word);
    from += sizeof word, to += sizeof word;
  }
  for (; count; --count) *static_cast<volatile char*>(to++) = *from++;
#endif
}

// Calls `visit(first, count)` for each range of bytes of __shared__ memory that the launch may touch: everything but
// the part of the dynamic array beyond the bytes that the launch requested.
template <class Visit>
void each_part_of_shared(Visit visit) {
  const std::size_t bytes = launch->shared_bytes;
  if (!launch->beyond) return visit(std::size_t{0}, bytes);
  const auto first = static_cast<std::size_t>(launch->beyond - launch->shared);
  const auto end = static_cast<std::size_t>(launch->beyond_end - launch->shared);
  visit(std::size_t{0}, first);
  visit(end, bytes - end);
}

void place_shared(Block& block) {
  if (in_place == &block || launch->shared_bytes == 0) return;
  each_part_of_shared([&](std::size_t first, std::size_t count) {
    if (in_place && in_place->active) copy_bytes(in_place->shared.data() + first, launch->shared + first, count);
    copy_bytes(launch->shared + first, block.shared.data() + first, count);
  });
  in_place = &block;
}

void start(Block& block) {
  const unsigned threads = threads_of_a_block();
  block.index = order[next_block++];
  block.position = {block.index % launch->grid.x, block.index / launch->grid.x % launch->grid.y,
                    block.index / launch->grid.x / launch->grid.y};
  block.active = true;
  block.waiting = block.exited = 0;
  block.epoch = 0;
  block.vote = false;
  block.known = nullptr;
  block.fibers.assign(threads, Fiber{});
  block.warps.resize((threads + kLanes - 1) / kLanes);
  if (in_place == &block) in_place = nullptr;
  // On a GPU, unwritten __shared__ memory is not zero.
  block.shared.resize(launch->shared_bytes);
  each_part_of_shared(
      [&](std::size_t first, std::size_t count) { std::memset(block.shared.data() + first, 0xff, count); });
  forget_shared(block.slot);
  block.ready_warps = 0;
  for (unsigned w = 0; w < block.warps.size(); ++w) {
    const unsigned lanes = std::min(kLanes, threads - w * kLanes);
    Warp& warp = block.warps[w];
    warp.lanes = warp.ready = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    std::memset(warp.seen, 0, sizeof warp.seen);
    block.ready_warps |= 1u << w;
  }
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = block.fibers[t];
    fiber.block = &block;
    fiber.thread = t;
    fiber.lane = t % kLanes;
    fiber.warp = t / kLanes;
    fiber.index = {t % launch->block.x, t / launch->block.x % launch->block.y, t / launch->block.x / launch->block.y};
    fiber.moment = {block.index * threads + t, 0, 1};
    const std::size_t number = block.slot * threads + t;
    fiber.stack_pointer = prepare_stack(stacks + (number + 1) * kStack - number * kStagger % kStaggered);
  }
}

void set_ready(Fiber& fiber) {
  fiber.wait = Wait::kReady;
  fiber.block->warps[fiber.warp].ready |= 1u << fiber.lane;
  fiber.block->ready_warps |= 1u << fiber.warp;
}

void set_waiting(Fiber& fiber, Wait wait, const char* file, int line) {
  fiber.wait = wait;
  fiber.file = file;
  fiber.line = line;
  Warp& warp = fiber.block->warps[fiber.warp];
  warp.ready &= ~(1u << fiber.lane);
  if (!warp.ready) fiber.block->ready_warps &= ~(1u << fiber.warp);
}

// True if the fiber waits at this place. The addresses of the file names are usually equal, so they are compared first.
bool same_place(const Fiber& fiber, const char* file, int line) {
  return fiber.line == line && (fiber.file == file || std::strcmp(fiber.file, file) == 0);
}

// Switches to the scheduler, and returns when it chooses this fiber again.
void leave() {
  Fiber* self = current;
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(&self->fake_stack, scheduler_stack, scheduler_stack_size);
  host_switch(&self->stack_pointer, scheduler_stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
}

void resume(Fiber& fiber) {
  place_shared(*fiber.block);
  current = &fiber;
  void* fake_stack = nullptr;
  if (__sanitizer_start_switch_fiber) {
    const std::size_t number = fiber.block->slot * fiber.block->fibers.size() + fiber.thread;
    __sanitizer_start_switch_fiber(&fake_stack, stacks + number * kStack + kGuard, kStack - kGuard);
  }
  host_switch(&scheduler_stack_pointer, fiber.stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  current = nullptr;
}

const char* name(Wait wait) {
  switch (wait) {
    case Wait::kReady:
      return "running";
    case Wait::kBarrier:
      return "__syncthreads()";
    case Wait::kClusterBarrier:
      return "the cluster's barrier";
    case Wait::kWarpBarrier:
      return "__syncwarp()";
    case Wait::kShuffle:
      return "a shuffle";
    case Wait::kVote:
      return "a vote";
    case Wait::kExited:
      return "ended";
  }
  return "";
}

std::string hexadecimal(unsigned x) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", x);
  return text;
}

// Describes where each thread of a block is, one line per range of threads.
std::string whereabouts(const Block& block) {
  auto describe = [](const Fiber& fiber) -> std::string {
    if (fiber.wait == Wait::kExited) return "ended";
    if (fiber.wait == Wait::kReady) return "still running";
    std::string text = std::string("wait in ") + name(fiber.wait) + " at " + place(fiber.file, fiber.line);
    return fiber.wait == Wait::kBarrier || fiber.wait == Wait::kClusterBarrier
               ? text
               : text + " for lanes " + hexadecimal(fiber.mask);
  };
  std::string text;
  for (unsigned first = 0; first < block.fibers.size();) {
    const std::string where = describe(block.fibers[first]);
    unsigned last = first;
    while (last + 1 < block.fibers.size() && describe(block.fibers[last + 1]) == where) ++last;
    const std::string one = std::to_string(first);
    text +=
        "\n  " + (first == last ? "thread " + one : "threads " + one + " to " + std::to_string(last)) + ": " + where;
    first = last + 1;
  }
  return text;
}

[[noreturn]] void fail_in(const Block& block, const std::string& what) {
  fail("block " + std::to_string(block.index) + ": " + what + ":" + whereabouts(block));
}

[[noreturn]] void fiber_main() {
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
  launch->entry(launch->arguments);
  Fiber& fiber = *current;
  Block& block = *fiber.block;
  set_waiting(fiber, Wait::kExited, nullptr, 0);
  ++block.exited;
  if (block.waiting) fail_in(block, "a barrier is reached by some threads only, others have ended");
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_stack_size);
  void* unused;
  host_switch(&unused, scheduler_stack_pointer);
  __builtin_unreachable();
}

Fiber* pick_in(Block& block, unsigned warp) {
  const unsigned ready = block.warps[warp].ready;
  unsigned lane = static_cast<unsigned>(__builtin_ctz(ready));
  if (launch->seed) {
    const unsigned shift = roll(kLanes);
    const unsigned turned = ready >> shift | (shift ? ready << (kLanes - shift) : 0);
    lane = (static_cast<unsigned>(__builtin_ctz(turned)) + shift) % kLanes;
  }
  return &block.fibers[warp * kLanes + lane];
}

// Returns the fiber that runs next, or null if all have ended.
Fiber* pick() {
  if (launch->seed && last_block && last_block->active && last_block->warps[last_warp].ready && roll(8))
    return pick_in(*last_block, last_warp);
  const unsigned count = static_cast<unsigned>(blocks.size());
  const unsigned first = launch->seed ? roll(count) : first_slot;
  bool any = false;
  for (unsigned i = 0; i < count; ++i) {
    Block& block = blocks[(first + i) % count];
    if (!block.active) continue;
    any = true;
    unsigned ready = block.ready_warps;
    if (!ready) continue;
    if (launch->seed)
      for (unsigned skip = roll(static_cast<unsigned>(__builtin_popcount(ready))); skip; --skip) ready &= ready - 1;
    last_block = &block;
    last_warp = static_cast<unsigned>(__builtin_ctz(ready));
    return pick_in(block, last_warp);
  }
  if (any)
    for (Block& block : blocks)
      if (block.active) fail_in(block, "deadlock: no thread can go on");
  return nullptr;
}

// Returns the first block of the same cluster.
Block* cluster_of(const Block& block) {
  return &blocks[block.slot - block.slot % launch->cluster];
}

// Starts the next cluster in the slots of a cluster that has ended; does nothing while a block of it still runs.
void start_cluster(Block* first) {
  for (Block* block = first; block < first + launch->cluster; ++block)
    if (block->active) return;
  if (next_block == order.size()) return;
  for (Block* block = first; block < first + launch->cluster; ++block) start(*block);
}

void run() {
  next_block = first_slot = 0;
  in_place = last_block = nullptr;
  accesses = 0;
  next_yield = 1;
  for (Block& block : blocks) {
    if (next_block == order.size()) break;
    start(block);
  }
  while (Fiber* fiber = pick()) {
    resume(*fiber);
    if (failed) return;
    Block& block = *fiber->block;
    if (block.exited == block.fibers.size()) {
      block.active = false;
      start_cluster(cluster_of(block));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Warp synchronization

// Waits until every lane of `mask` is in the same call. Returns true in the lane that arrives last, while all others
// still wait; that lane must call `release`. The others then return false.
bool meet(Wait wait, unsigned mask, const char* file, int line) {
  Fiber& self = *current;
  Block& block = *self.block;
  Warp& warp = block.warps[self.warp];
  set_waiting(self, wait, file, line);
  self.mask = mask;
  if (!(mask >> self.lane & 1)) fail_in(block, name(self) + " is not among the lanes that it names in " + name(wait));
  if (mask & ~warp.lanes) fail_in(block, name(self) + " names lanes that do not exist in " + name(wait));
  // Most lanes leave here: only the last one to arrive checks all others.
  if (warp.ready & mask) {
    leave();
    return false;
  }
  unsigned missing = 0;
  for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(lanes));
    const Fiber& other = block.fibers[self.warp * kLanes + lane];
    if (other.wait == Wait::kReady || other.wait == Wait::kBarrier || other.wait == Wait::kClusterBarrier) {
      missing |= 1u << lane;
    } else if (other.wait == Wait::kExited) {
      fail_in(block, name(self) + " names lanes that have ended in " + std::string(name(wait)));
    } else if (other.wait != wait || other.mask != mask || !same_place(other, file, line)) {
      fail_in(block, name(self) + " and " + name(other) + " meet in different calls");
    }
  }
  if (!missing) return true;
  leave();
  return false;
}

void release(unsigned mask) {
  Fiber& self = *current;
  for (unsigned lanes = mask; lanes; lanes &= lanes - 1)
    set_ready(self.block->fibers[self.warp * kLanes + static_cast<unsigned>(__builtin_ctz(lanes))]);
}

int source_lane(const Fiber& fiber) {
  const int lane = static_cast<int>(fiber.lane), width = fiber.width, segment = lane & ~(width - 1);
  switch (fiber.shuffle) {
    case kHostShuffleIndex:
      return segment | (fiber.operand & (width - 1));
    case kHostShuffleUp:
      return lane - fiber.operand < segment ? lane : lane - fiber.operand;
    case kHostShuffleDown:
      return lane + fiber.operand >= segment + width ? lane : lane + fiber.operand;
    // May read an earlier segment, as on a GPU.
    case kHostShuffleXor:
      return (lane ^ fiber.operand) >= segment + width ? lane : lane ^ fiber.operand;
  }
  return lane;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Used by the other parts of the runtime

void fail(const std::string& what) {
  if (!failed) message = std::string(launch->kernel) + ": " + what;
  failed = true;
  if (current) {
    void* unused;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_stack_size);
    host_switch(&unused, scheduler_stack_pointer);
  }
  throw failed;
}

std::string name(const Fiber& fiber) {
  return "block " + std::to_string(fiber.block->index) + ", thread " + std::to_string(fiber.thread);
}

std::string place(const char* file, int line) {
  return (file ? std::string(file) : "?") + ":" + std::to_string(line);
}

std::string code(const void* address) {
  Dl_info info;
  if (!dladdr(address, &info)) return "?";
  char text[64];
  // Minus one, because a return address may belong to the next line.
  std::snprintf(text, sizeof text, "{code:%zx}",
                static_cast<std::size_t>(static_cast<const char*>(address) - static_cast<char*>(info.dli_fbase)) - 1);
  return text;
}

void yield() {
  leave();
}

void maybe_yield() {
  if ((++accesses & 0xffff) == 0 && std::chrono::steady_clock::now() > deadline)
    fail(name(*current) + " still runs after " + std::to_string(launch->timeout) + " s");
  if (launch->seed && --next_yield == 0) {
    next_yield = 1 + roll(64);
    leave();
  }
}

bool on_a_stack(std::uintptr_t address) {
  return address - reinterpret_cast<std::uintptr_t>(stacks) < stack_count * kStack;
}

// ---------------------------------------------------------------------------------------------------------------------
// Called by kernels and by Python

extern "C" {

HostIndex host_thread_index() {
  return current->index;
}
HostIndex host_block_index() {
  return current->block->position;
}
HostIndex host_block_size() {
  return launch->block;
}
HostIndex host_grid_size() {
  return launch->grid;
}
void host_check_alignment(const void* address, unsigned alignment) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignment == 0) return;
  fail(name(*current) + ": an address that is not aligned at " + code(__builtin_return_address(0)));
}
unsigned host_active_mask() {
  return 1u << current->lane;
}  // CUDA guarantees no other lane

void host_barrier(const char* file, int line) {
  Fiber& self = *current;
  Block& block = *self.block;
  set_waiting(self, Wait::kBarrier, file, line);
  ++block.waiting;
  if (block.exited) fail_in(block, "a barrier is reached by some threads only, others have ended");
  if (block.waiting < block.fibers.size()) return leave();
  for (const Fiber& fiber : block.fibers)
    if (!same_place(fiber, file, line)) fail_in(block, "threads meet in different barriers");
  block.waiting = 0;
  ++block.epoch;
  block.voted = block.vote;
  block.vote = false;
  const Known* known = block.known;
  for (Fiber& fiber : block.fibers) known = join(known, fiber.known);
  block.known = known;
  for (Fiber& fiber : block.fibers) {
    fiber.known = nullptr;
    fiber.moment.epoch = block.epoch;
    fiber.moment_id = 0;
    set_ready(fiber);
  }
  if (launch->seed) leave();
}

int host_barrier_or(int predicate, const char* file, int line) {
  current->block->vote |= predicate != 0;
  host_barrier(file, line);
  return current->block->voted;
}

void host_pause() {
  first_slot = (current->block->slot + 1) % static_cast<unsigned>(blocks.size());
  yield();
}

unsigned host_cluster_rank() {
  return current->block->slot % launch->cluster;
}

void host_cluster_barrier(const char* file, int line) {
  Fiber& self = *current;
  Block *first = cluster_of(*self.block), *end = first + launch->cluster;
  set_waiting(self, Wait::kClusterBarrier, file, line);
  ++self.block->waiting;
  for (Block* block = first; block < end; ++block) {
    if (block->exited) fail_in(*block, "a barrier is reached by some threads only, others have ended");
    if (block->waiting < block->fibers.size()) return leave();
  }
  const Known* known = nullptr;
  for (Block* block = first; block < end; ++block) {
    known = join(known, block->known);
    for (const Fiber& fiber : block->fibers) {
      if (fiber.wait != Wait::kClusterBarrier || !same_place(fiber, file, line))
        fail_in(*block, "threads meet in different barriers");
      known = join(known, fiber.known);
    }
  }
  for (Block* block = first; block < end; ++block) {
    block->waiting = 0;
    ++block->epoch;
    for (Fiber& fiber : block->fibers) {
      fiber.known = nullptr;
      fiber.moment.epoch = block->epoch;
      fiber.moment_id = 0;
      set_ready(fiber);
    }
    // Arrival releases and waiting acquires: each block is ordered after what the others did before the barrier.
    known = join(known, publish(block->fibers.front()));
  }
  for (Block* block = first; block < end; ++block) block->known = known;
  if (launch->seed) leave();
}

void host_store_dsmem(unsigned* place, unsigned rank, unsigned x) {
  const std::size_t offset = static_cast<std::size_t>(reinterpret_cast<char*>(place) - launch->shared);
  if (offset + sizeof x > launch->shared_bytes) fail(name(*current) + " writes to no shared memory of its cluster");
  Block* block = rank < launch->cluster ? cluster_of(*current->block) + rank : nullptr;
  if (!block || !block->active)
    fail(name(*current) + " writes to block " + std::to_string(rank) + " of its cluster, which does not run");
  char* there = (block == in_place ? launch->shared : block->shared.data()) + offset;
  copy_bytes(there, reinterpret_cast<const char*>(&x), sizeof x);
}

void host_warp_barrier(unsigned mask, const char* file, int line) {
  if (!meet(Wait::kWarpBarrier, mask, file, line)) return;
  Block& block = *current->block;
  Warp& warp = block.warps[current->warp];
  Fiber* fibers = &block.fibers[current->warp * kLanes];
  std::uint32_t together[kLanes] = {};
  const Known* known = nullptr;
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    for (unsigned j = 0; j < kLanes; ++j) together[j] = std::max(together[j], warp.seen[i][j]);
    known = join(known, fibers[i].known);
  }
  for (unsigned i = 0; i < kLanes; ++i)
    if (mask >> i & 1) together[i] = fibers[i].moment.clock;
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    std::copy_n(together, kLanes, warp.seen[i]);
    fibers[i].known = known;
    ++fibers[i].moment.clock;
    fibers[i].moment_id = 0;
  }
  release(mask);
  if (launch->seed) leave();
}

// A shuffle orders no memory accesses, as in CUDA.
unsigned long long host_shuffle(unsigned mask, unsigned long long value, HostShuffle kind, int operand, int width,
                                const char* file, int line) {
  Fiber& self = *current;
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail(name(self) + ": the width of a shuffle is a power of two up to 32, got " + std::to_string(width));
  self.value = value;
  self.shuffle = kind;
  self.operand = operand;
  self.width = width;
  if (!meet(Wait::kShuffle, mask, file, line)) return self.result;
  Fiber* fibers = &self.block->fibers[self.warp * kLanes];
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const int source = source_lane(fibers[i]);
    if (!(mask >> source & 1))
      fail(name(fibers[i]) + " reads lane " + std::to_string(source) + " at " + place(file, line) +
           ", which is not in the mask " + hexadecimal(mask));
    fibers[i].result = fibers[source].value;
  }
  release(mask);
  if (launch->seed) leave();
  return self.result;
}

unsigned host_vote(unsigned mask, int predicate, const char* file, int line) {
  Fiber& self = *current;
  self.value = predicate != 0;
  if (!meet(Wait::kVote, mask, file, line)) return static_cast<unsigned>(self.result);
  Fiber* fibers = &self.block->fibers[self.warp * kLanes];
  unsigned holds = 0;
  for (unsigned i = 0; i < kLanes; ++i)
    if (mask >> i & 1) holds |= static_cast<unsigned>(fibers[i].value) << i;
  for (unsigned i = 0; i < kLanes; ++i)
    if (mask >> i & 1) fibers[i].result = holds;
  release(mask);
  if (launch->seed) leave();
  return static_cast<unsigned>(self.result);
}

int host_launch(const HostLaunch* wanted) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> guard(one_at_a_time);
  launch = wanted;
  failed = false;
  message.clear();
  dice.seed(static_cast<unsigned>(wanted->seed % 0x7ffffffeu + 1));
  deadline = std::chrono::steady_clock::now() + std::chrono::seconds(wanted->timeout);
  const unsigned count = wanted->grid.x * wanted->grid.y * wanted->grid.z;
  const unsigned cluster = wanted->cluster, clusters = count / cluster;
  std::vector<unsigned> shuffled(clusters);
  std::iota(shuffled.begin(), shuffled.end(), 0u);
  if (wanted->seed)
    for (unsigned i = clusters; i > 1; --i) std::swap(shuffled[i - 1], shuffled[roll(i)]);
  order.clear();
  for (const unsigned first : shuffled)
    for (unsigned i = 0; i < cluster; ++i) order.push_back(first * cluster + i);
#if defined(__x86_64__)
  const unsigned mode = _mm_getcsr();
  if (wanted->flush_subnormals) _mm_setcsr(mode | 0x8040u);  // FTZ and DAZ: results and operands
#endif
  try {
    if (count % cluster)
      fail("a grid of " + std::to_string(count) + " blocks is not made of clusters of " + std::to_string(cluster));
    blocks.resize(std::max(1u, std::min(wanted->resident / cluster, clusters)) * cluster);
    reserve_stacks(std::size_t{blocks.size()} * threads_of_a_block());
    for (unsigned i = 0; i < blocks.size(); ++i) {
      blocks[i].slot = i;
      blocks[i].active = false;
    }
    begin_races();
    run();
  } catch (bool) {
  }
  end_races();
  forget_everything_known();
#if defined(__x86_64__)
  _mm_setcsr(mode);
#endif
  current = nullptr;
  return failed;
}

const char* host_message() {
  return message.c_str();
}
}
