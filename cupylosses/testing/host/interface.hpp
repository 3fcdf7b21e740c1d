// Interface between a kernel compiled for the host (shim.hpp) and the runtime that executes it (runtime.cpp).
//
// `file` and `line` are the place of a call in the kernel's source. Messages report it, and it tells one barrier from
// another.
#pragma once

struct HostIndex {
  unsigned x, y, z;
};

// Rule by which a shuffle selects its source lane. Kernels and runtime are compiled separately and share the values.
enum HostShuffle { kHostShuffleIndex, kHostShuffleUp, kHostShuffleDown, kHostShuffleXor };

// Memory order of an atomic operation.
enum HostOrder { kHostRelaxed, kHostAcquireRelease };

// One launch. Mirrored by `_Launch` in launch.py.
struct HostLaunch {
  const char* kernel;     // name, for messages
  void (*entry)(void**);  // calls the kernel with the arguments that the table points to
  void** arguments;       // one pointer per argument, as cuLaunchKernel takes them
  HostIndex grid, block;
  unsigned cluster;                 // blocks per cluster
  unsigned long long seed;          // determines the order of blocks, warps and lanes; 0: ascending
  unsigned resident;                // blocks that run at once
  unsigned check_races;             // 0 or 1
  unsigned flush_subnormals;        // 0 or 1: what -ftz=true does to float; double is flushed too, see launch.py
  unsigned timeout;                 // seconds
  char* shared;                     // memory of the kernel's __shared__ objects
  unsigned long long shared_bytes;  // its size; each block has a copy of its own
  // Part of the `extern __shared__` array beyond the bytes that the launch requested: an access to it is a fault.
  char *beyond, *beyond_end;
};

extern "C" {
HostIndex host_thread_index() __attribute__((const));
HostIndex host_block_index() __attribute__((const));
HostIndex host_block_size() __attribute__((const));
HostIndex host_grid_size() __attribute__((const));

// Ends the launch if the address is not a multiple of the alignment. A call, not a branch in the kernel, because it
// compiles faster.
void host_check_alignment(const void* address, unsigned alignment);
void host_barrier(const char* file, int line);
// Barrier of the block; returns 1 if the predicate of any thread is nonzero, else 0.
int host_barrier_or(int predicate, const char* file, int line);
// Clusters: rank of this block, cluster barrier, and a store to another block's shared memory.
unsigned host_cluster_rank();
void host_cluster_barrier(const char* file, int line);
void host_store_dsmem(unsigned* place, unsigned rank, unsigned x);
void host_warp_barrier(unsigned mask, const char* file, int line);
unsigned long long host_shuffle(unsigned mask, unsigned long long value, HostShuffle kind, int lane, int width,
                                const char* file, int line);
// Returns the lanes of `mask` whose predicate is nonzero.
unsigned host_vote(unsigned mask, int predicate, const char* file, int line);
unsigned host_active_mask();
void host_fence();
// Lets other blocks run first. For a thread that spins until another block makes progress.
void host_pause();
// Must be called before each atomic operation. The caller then performs it; no other thread runs in between.
void host_atomic(const void* address, unsigned bytes, HostOrder order);

// Runs a kernel to completion. Returns 0, or 1 with a message in host_message().
int host_launch(const HostLaunch* launch);
const char* host_message();
}
