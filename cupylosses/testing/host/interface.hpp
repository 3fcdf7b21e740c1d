// What a kernel compiled for the host (shim.hpp) asks of the runtime that executes it (runtime.cpp).
//
// `file` and `line` are where the kernel's source made the call: they are what messages name, and what tells one
// rendezvous from another.
#pragma once

struct HostIndex {
  unsigned x, y, z;
};

// Which other lane a shuffle reads; the numbers travel between separately compiled objects.
enum HostShuffle { kHostShuffleIndex, kHostShuffleUp, kHostShuffleDown, kHostShuffleXor };

// What an atomic operation orders besides itself.
enum HostOrder { kHostRelaxed, kHostAcquireRelease };

// One launch; mirrored by `_Launch` in launcher.py.
struct HostLaunch {
  const char* kernel;     // its name, for messages
  void (*entry)(void**);  // calls the kernel with the arguments that the table points to
  void** arguments;       // one pointer per argument, as cuLaunchKernel takes them
  HostIndex grid, block;
  unsigned cluster;                 // neighbouring blocks that reach each other's shared memory
  unsigned long long seed;          // of the order in which blocks, warps and lanes run; 0 is in order
  unsigned resident;                // blocks that run at once
  unsigned check_races;             // 0 or 1
  unsigned flush_subnormals;        // 0 or 1: what -ftz=true does to float; double is flushed too, see execution.py
  unsigned timeout;                 // seconds
  char* shared;                     // the memory that holds what the kernel declared __shared__ ...
  unsigned long long shared_bytes;  // ... of which each block has its own copy
  // Within it, `extern __shared__` memory beyond what this launch asked for: touching it is a fault. Empty if equal.
  char *beyond, *beyond_end;
};

extern "C" {
HostIndex host_thread_index() __attribute__((const));
HostIndex host_block_index() __attribute__((const));
HostIndex host_block_size() __attribute__((const));
HostIndex host_grid_size() __attribute__((const));

// Ends the launch if the address is not a multiple of the alignment. A call, not a branch in the kernel: it compiles in
// less time.
void host_check_alignment(const void* address, unsigned alignment);
void host_barrier(const char* file, int line);
// The same, and whether the predicate of any thread holds.
int host_barrier_or(int predicate, const char* file, int line);
// Blocks of a cluster: the place of this one, all of their threads meeting, and a write to another one's shared memory.
unsigned host_cluster_rank();
void host_cluster_barrier(const char* file, int line);
void host_store_dsmem(unsigned* place, unsigned rank, unsigned x);
void host_warp_barrier(unsigned mask, const char* file, int line);
unsigned long long host_shuffle(unsigned mask, unsigned long long value, HostShuffle kind, int lane, int width,
                                const char* file, int line);
// The lanes of `mask` whose predicate holds.
unsigned host_vote(unsigned mask, int predicate, const char* file, int line);
unsigned host_active_mask();
void host_fence();
// Called before each atomic operation, which the caller then performs: nothing else runs until it has.
void host_atomic(const void* address, unsigned bytes, HostOrder order);

// Runs a kernel to its end. Returns 0, or 1 and leaves a message.
int host_launch(const HostLaunch* launch);
const char* host_message();
}
