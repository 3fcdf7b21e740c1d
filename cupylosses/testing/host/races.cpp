// Race detection. Kernels are compiled with -fsanitize=thread, but at each access they call the functions below instead
// of the sanitizer's library, which has no model of a GPU.
//
// Every accessed word, or byte, has a cell with its last writer and its readers since then. An access is a race if it
// conflicts with one of these and is not ordered after it (ordering.hpp), even if the threads did not run at the same
// time: a missing barrier is found in every order of execution. Accesses to stacks of threads are skipped.

#include "races.hpp"

#include <cstdio>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "scheduler.hpp"

namespace {

constexpr std::uint32_t kAtomic = 0x80000000u, kMany = 0x80000000u;
constexpr unsigned kWord = 4, kPageBits = 12, kPageBytes = 1u << kPageBits;

struct Cell {
  std::uint32_t write;  // moment of the last write, with the flag kAtomic; 0: none
  std::uint32_t read;   // moment of the last read, or kMany and the index of a list of reads; 0: none
  const void* write_code;
  const void* read_code;
};

// Cells of 4 KiB of memory: one per word, or one per byte after an access that does not cover whole words.
struct Page {
  unsigned generation = 0;
  unsigned unit = kWord;
  std::vector<Cell> cells;
};

unsigned generation;
bool checking;
std::vector<Moment> moments;                      // index 0 is unused
std::vector<std::vector<std::uint32_t>> readers;  // reader lists of cells
std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages;
std::unordered_map<std::uintptr_t, const Known*> released;  // order published by atomics, by address

struct Recent {
  std::uintptr_t number = ~std::uintptr_t{0};
  Page* page = nullptr;
};
Recent recent[64];

Page& page_of(std::uintptr_t number) {
  Recent& slot = recent[number % 64];
  if (slot.number != number) {
    auto& owned = pages[number];
    if (!owned) owned = std::make_unique<Page>();
    slot = {number, owned.get()};
  }
  Page& page = *slot.page;
  if (page.generation != generation) {
    page.generation = generation;
    page.unit = kWord;
    page.cells.assign(kPageBytes / kWord, Cell{});
  }
  return page;
}

void go_to_bytes(Page& page) {
  std::vector<Cell> bytes(kPageBytes);
  for (unsigned i = 0; i < kPageBytes; ++i) {
    bytes[i] = page.cells[i / kWord];
    if (bytes[i].read & kMany) {  // one list per byte
      readers.push_back(std::vector<std::uint32_t>(readers[bytes[i].read & ~kMany]));
      bytes[i].read = kMany | static_cast<std::uint32_t>(readers.size() - 1);
    }
  }
  page.cells.swap(bytes);
  page.unit = 1;
}

// Maps __shared__ memory, which has the same address in all blocks, to an address range per block slot.
std::uintptr_t distinct(std::uintptr_t address, unsigned slot) {
  const std::uintptr_t offset = address - reinterpret_cast<std::uintptr_t>(launch->shared);
  if (offset >= launch->shared_bytes) return address;
  return (std::uintptr_t{1} << 60) + (std::uintptr_t{slot} << 24) + offset;
}

std::string what_lies_at(std::uintptr_t address) {
  const std::uintptr_t offset = address - reinterpret_cast<std::uintptr_t>(launch->shared);
  char text[64];
  if (offset < launch->shared_bytes) return "__shared__ memory";
  std::snprintf(text, sizeof text, "memory at 0x%zx", static_cast<std::size_t>(address));
  return text;
}

[[noreturn]] void race(std::uintptr_t address, const Moment& other, bool other_writes, const void* other_code,
                       bool writes, const void* own_code) {
  const auto threads = static_cast<std::uint32_t>(current->block->fibers.size());
  fail("race: " + name(*current) + (writes ? " writes " : " reads ") + what_lies_at(address) + " at " + code(own_code) +
       ", and block " + std::to_string(other.thread / threads) + ", thread " + std::to_string(other.thread % threads) +
       (other_writes ? " wrote" : " read") + " it at " + code(other_code) + " with nothing that orders the two");
}

std::uint32_t moment_of(Fiber& fiber) {
  if (!fiber.moment_id) {
    moments.push_back(fiber.moment);
    fiber.moment_id = static_cast<std::uint32_t>(moments.size() - 1);
  }
  return fiber.moment_id;
}

// Keeps only the last read of each thread.
void prune(std::vector<std::uint32_t>& list) {
  std::unordered_map<std::uint32_t, std::uint32_t> last;
  for (const std::uint32_t id : list) last[moments[id].thread] = id;
  list.clear();
  for (const auto& [thread, id] : last) list.push_back(id);
}

void note_read(Cell& cell, Fiber& fiber, std::uint32_t id, const void* where) {
  cell.read_code = where;
  if (cell.read == 0 || cell.read == id) {
    cell.read = id;
  } else if (!(cell.read & kMany)) {
    if (ordered(moments[cell.read], fiber)) {
      cell.read = id;
      return;
    }
    readers.push_back({cell.read, id});
    cell.read = kMany | static_cast<std::uint32_t>(readers.size() - 1);
  } else {
    auto& list = readers[cell.read & ~kMany];
    if (list.back() == id) return;
    if (list.size() == list.capacity() && list.size() >= 256) {
      prune(list);
      list.reserve(2 * list.size());
    }
    list.push_back(id);
  }
}

void visit(Cell& cell, std::uintptr_t address, bool write, bool atomic, const void* where) {
  Fiber& fiber = *current;
  const std::uint32_t id = moment_of(fiber);
  const std::uint32_t wrote = cell.write & ~kAtomic;
  if (wrote && wrote != id && !(atomic && (cell.write & kAtomic)) && !ordered(moments[wrote], fiber))
    race(address, moments[wrote], true, cell.write_code, write, where);
  if (!write) return note_read(cell, fiber, id, where);
  if (cell.read & kMany) {
    for (const std::uint32_t reader : readers[cell.read & ~kMany])
      if (!ordered(moments[reader], fiber)) race(address, moments[reader], false, cell.read_code, true, where);
  } else if (cell.read && !ordered(moments[cell.read], fiber)) {
    race(address, moments[cell.read], false, cell.read_code, true, where);
  }
  cell.write = id | (atomic ? kAtomic : 0);
  cell.write_code = where;
  cell.read = 0;
}

void access(std::uintptr_t address, std::size_t bytes, bool write, bool atomic, const void* where) {
  std::uintptr_t at = distinct(address, current->block->slot);
  const std::uintptr_t end = at + bytes;
  while (at < end) {
    Page& page = page_of(at >> kPageBits);
    const std::uintptr_t page_end = ((at >> kPageBits) + 1) << kPageBits, stop = page_end < end ? page_end : end;
    if (page.unit == kWord && (at % kWord || stop % kWord)) go_to_bytes(page);
    for (; at < stop; at += page.unit)
      visit(page.cells[(at & (kPageBytes - 1)) / page.unit], address, write, atomic, where);
  }
}

// On the host, the dynamic array has the maximum size. On a GPU, it has only the bytes that the launch requested.
void check_dynamic_shared(std::uintptr_t address, std::size_t bytes, const void* where) {
  const auto first = reinterpret_cast<std::uintptr_t>(launch->beyond);
  const auto end = reinterpret_cast<std::uintptr_t>(launch->beyond_end);
  if (address < end && address + bytes > first)
    fail(name(*current) + " at " + code(where) + " touches dynamic shared memory beyond what the launch asked for");
}

inline void plain(const void* pointer, std::size_t bytes, bool write, const void* where) {
  if (!current) return;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (on_a_stack(address)) return;
  check_dynamic_shared(address, bytes, where);
  maybe_yield();
  if (checking) access(address, bytes, write, false, where);
}

}  // namespace

void begin_races() {
  ++generation;
  checking = launch->check_races;
  moments.assign(1, Moment{});
  readers.clear();
  released.clear();
  if (pages.size() > 8192) {
    pages.clear();
    for (Recent& slot : recent) slot = {};
  }
}

void end_races() {
  checking = false;
}

void forget_shared(unsigned slot) {
  const std::uintptr_t first = (std::uintptr_t{1} << 60) + (std::uintptr_t{slot} << 24);
  for (std::uintptr_t at = first; at < first + launch->shared_bytes; at += kPageBytes) {
    const auto found = pages.find(at >> kPageBits);
    if (found != pages.end()) found->second->generation = 0;
  }
}

extern "C" {

// Fence: later atomics publish the accesses before it, and the thread may rely on what its earlier atomics have read.
void host_fence() {
  Fiber& fiber = *current;
  fiber.known = join(fiber.known, fiber.pending);
  fiber.pending = nullptr;
  fiber.released = publish(fiber);
}

void host_atomic(const void* pointer, unsigned bytes, HostOrder order) {
  if (launch->seed) yield();
  Fiber& fiber = *current;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const Known*& there = released[distinct(address, fiber.block->slot)];
  if (order == kHostAcquireRelease) {
    fiber.known = join(fiber.known, there);
    there = publish(fiber);
  } else {
    fiber.pending = join(fiber.pending, there);
    there = join(there, fiber.released);
  }
  if (checking) access(address, bytes, true, true, __builtin_return_address(0));
}

#define ACCESS(bytes)                                    \
  void __tsan_read##bytes(void* p) {                     \
    plain(p, bytes, false, __builtin_return_address(0)); \
  }                                                      \
  void __tsan_write##bytes(void* p) {                    \
    plain(p, bytes, true, __builtin_return_address(0));  \
  }                                                      \
  void __tsan_unaligned_read##bytes(void* p) {           \
    plain(p, bytes, false, __builtin_return_address(0)); \
  }                                                      \
  void __tsan_unaligned_write##bytes(void* p) {          \
    plain(p, bytes, true, __builtin_return_address(0));  \
  }                                                      \
  void __tsan_volatile_read##bytes(void* p) {            \
    plain(p, bytes, false, __builtin_return_address(0)); \
  }                                                      \
  void __tsan_volatile_write##bytes(void* p) {           \
    plain(p, bytes, true, __builtin_return_address(0));  \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, std::size_t n) {
  plain(p, n, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, std::size_t n) {
  plain(p, n, true, __builtin_return_address(0));
}
void __tsan_init() {
}
void __tsan_func_entry(void*) {
}
void __tsan_func_exit() {
}
void* __tsan_memcpy(void* to, const void* from, std::size_t n) {
  plain(from, n, false, __builtin_return_address(0));
  plain(to, n, true, __builtin_return_address(0));
  return std::memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, std::size_t n) {
  plain(to, n, true, __builtin_return_address(0));
  return std::memset(to, value, n);
}
}
