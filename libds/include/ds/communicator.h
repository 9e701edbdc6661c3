// SPDX-License-Identifier: Apache-2.0
#pragma once
// Communicator: the collective operations of the ranks of a world or of one of its groups. Over host memory: self (one
// rank), threads (ranks as threads of one process, for tests), shm (one node), mpi (any nodes), shm+mpi (both,
// composed); over device memory: self, staged, nccl.
//
// Canonical sums. A sum over ranks is, for every element, the left fold in ascending rank order in fp32,
// ((g_0 + g_1) + g_2) + ..., in every implementation and for any segment, owner or algorithm, so all implementations
// give the same bits.
//
// Order. Every rank of a communicator makes the same calls in the same order with the same sizes. Calls return a Ticket
// at once; operations run in call order on the communicator's own progress thread, so they overlap with computation.
// Sends run concurrently on a thread of their own, in the order of sends, so two ranks may send to each other before
// they receive. Buffers belong to the operation until its ticket is done, also while an exception unwinds. Only one
// thread at a time may make calls (except abort).
//
// Failure. If a peer dies, throws, stops or does not arrive within `timeout`, every pending and later call on every
// other rank throws Errc::Comm (died), Errc::Timeout (absent) or what the peer threw; Error::rank() and the message
// name the rank. Nothing hangs. A rank that has destroyed its communicator without an error has left: only ranks that
// still wait for it get an error. A mismatched call is Errc::Comm, whose message states what each rank called. After an
// error the communicator is unusable: every later call throws the same error. A communicator destroyed by an exception
// that unwinds its owner aborts.
//
// Groups. A group is a communicator of some ranks of another, with its own rank numbers, calls, order and counts. All
// communicators of a world share one fate: a failure in one of them, or the death of a rank, ends waits and later calls
// in all of them, on all ranks. Errors name world ranks (world_rank), both in Error::rank() and in their text. Groups
// may be destroyed in any order, but before the world that they come from.
//
// Counting. Every call is counted under its tag: the number of calls, and the bytes that this rank sends (payload only,
// by the algorithm's formula). With n the bytes of the whole buffer: reduce_scatter, all_gather, all_to_all (P-1)/P n;
// all_reduce 2 (P-1)/P n, rounded down, also for 16-bit types; all_to_allv the slices for other ranks; broadcast (P-1)
// n at the root, 0 elsewhere; reduce n, at the root (P-1)/P n; gather the slice, at the root 0; scatter (P-1) slices at
// the root, 0 elsewhere; send n, recv 0; barrier 0.

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

class Buffer;  // device/memory.h
class MemoryLedger;
enum class Tag : u8;
class Device;  // device/device.h
class Trace;   // base/trace.h
struct OpTable;

enum class ReduceOp : u8 { Sum, Max, Min };

// One contiguous piece of a reduce-scatter. source holds P slices of `slice_elems` elements; rank r's target receives
// the fold over ranks of slice r.
struct ReduceScatterSegment {
  const void* source;  // [P * slice_elems] wire dtype
  float* target;       // [slice_elems] fp32; may lie inside source when the wire dtype is fp32 and it is our own slice
  i64 slice_elems;
};

// One contiguous piece of an in-place all-gather: P slices of slice_bytes, of which rank r contributes slice r.
struct AllGatherSegment {
  void* buffer;  // [P * slice_bytes]; our own slice is filled on entry
  i64 slice_bytes;
};

// The part of a buffer of all_to_allv that goes to one rank, or comes from it.
struct AllToAllSlice {
  i64 offset = 0, bytes = 0;
};

class DS_API Ticket {
 public:
  Ticket() = default;  // done
  // Blocks until the operation is done on this rank, so that buffers may be read and reused. Throws its error.
  // Idempotent.
  void wait();
  bool done() const;

  // A communicator's record of a running operation.
  struct State {
    virtual ~State() = default;
    virtual void wait() = 0;
    virtual bool done() const = 0;
  };
  explicit Ticket(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

struct CommCount {
  i64 calls = 0;
  i64 bytes = 0;  // sent by this rank
  // Time in flight, including the time spent waiting for peers; 0: unknown (CommOptions::time_calls).
  double seconds = 0;
};

// From one rank of a communicator to another.
struct MessageLink {
  int from, to;
  bool operator==(const MessageLink&) const = default;
};

struct CommOptions {
  double timeout_s = 300;        // a peer absent for longer is an error
  bool progress_thread = true;   // false: operations except sends run inside the call (overlap_comm off)
  bool time_calls = false;       // only communicators over host memory: others do not know when operations end
  Trace* trace = nullptr;        // likewise; records their operations
  const OpTable* ops = nullptr;  // for folds; null: cpu_ops()
  Device* device = nullptr;      // for communicators over device memory
  // nccl: messages along these go from device to device after use_links(), all others through host memory. The same
  // list on all ranks.
  std::vector<MessageLink> links = {};
};

class DS_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  // "self", "threads", "shm", "mpi", "shm+mpi", "staged", "nccl", "openmpi".
  virtual std::string_view backend() const noexcept = 0;
  // The world rank of a rank of this communicator; errors name world ranks.
  virtual int world_rank(int rank) const noexcept = 0;

  // Creates a communicator over host memory for the ranks `members` of this one, in the order of their ranks in the
  // group; they must include this rank. Collective over the members only; any two ranks must create the groups that
  // they share in the same order. Waits for all members within the timeout. `name` (1 to 32 of [a-zA-Z0-9-]) is for
  // messages and must agree. Groups of one rank cost nothing. Communicators over device memory have no groups: create
  // the device communicator over a group instead.
  virtual std::unique_ptr<Communicator> group(std::span<const int> members, std::string_view name,
                                              const CommOptions&) = 0;

  // Memory that peers can reach directly (a shared segment), so that collectives avoid a copy. Collective: all ranks
  // request the same sizes in the same order. Zeroed, 64-byte aligned. All calls accept ordinary memory, too, but are
  // slower.
  virtual Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) = 0;

  // target = fold over ranks of our slice. accumulate: the fold continues from target instead of starting with rank 0's
  // value. All segments form one operation with one ticket and one synchronisation: a bucket.
  virtual Ticket reduce_scatter(std::span<const ReduceScatterSegment> segments, DType wire, bool accumulate,
                                std::string_view tag) = 0;
  virtual Ticket all_gather(std::span<const AllGatherSegment> segments, std::string_view tag) = 0;
  // In place. data [n] is F32 (canonical fold); BF16 or F16 (canonical fold in fp32, rounded once at the end); F64
  // (folded in rank order in fp64); I32 or I64 (sums wrap). Max and Min are exact for each; NaN wins both.
  virtual Ticket all_reduce(void* data, i64 n, DType dtype, ReduceOp op, std::string_view tag) = 0;
  // The same for the root only: `data` of other ranks does not change.
  virtual Ticket reduce(void* data, i64 n, DType dtype, ReduceOp op, int root, std::string_view tag) = 0;
  virtual Ticket broadcast(void* data, i64 bytes, int root, std::string_view tag) = 0;
  // Slice q of source goes to rank q; slice q of target comes from rank q.
  virtual Ticket all_to_all(const void* source, void* target, i64 slice_bytes, std::string_view tag) = 0;
  // The same with slices of different sizes. slices_out[q] of source goes to rank q, also if that is this rank;
  // slices_in[q] of target comes from rank q. Both lists have size() entries and are copied; slices may be empty, and
  // need neither an order nor to fill the buffers. Those of target do not overlap each other or the source. If a rank
  // sends another number of bytes than its receiver expects, the call is Errc::Comm on all ranks, and its message names
  // both ranks and both sizes. Over device memory, the host waits for its peers to compare sizes.
  virtual Ticket all_to_allv(const void* source, std::span<const AllToAllSlice> slices_out, void* target,
                             std::span<const AllToAllSlice> slices_in, std::string_view tag) = 0;
  // The root's target [P * slice_bytes] gets slice q from rank q; other ranks' target is ignored.
  virtual Ticket gather(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) = 0;
  // Slice q of the root's source [P * slice_bytes] goes to rank q; other ranks' source is ignored.
  virtual Ticket scatter(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) = 0;
  // Point to point, matched in order per (sender, receiver). send may return before the receiver arrives.
  virtual Ticket send(const void* data, i64 bytes, int to, std::string_view tag) = 0;
  virtual Ticket recv(void* data, i64 bytes, int from, std::string_view tag) = 0;
  virtual void barrier(std::string_view tag) = 0;

  // Later messages along CommOptions::links go from device to device. All ranks call this after the same messages, when
  // the first step has loaded its kernels and allocated their memory: for both, CUDA may wait for all queues, and so
  // for a receive that was posted ahead and needs what comes after it.
  virtual void use_links() {}

  // Returns when no operation of this rank over host memory is running, whether it succeeded or not; its buffers may
  // then be freed. Call this after an exception has destroyed tickets.
  virtual void drain() noexcept {}

  // Throws the failure that this rank knows of, if any, for work that was enqueued and not waited for by the host.
  virtual void throw_if_failed() const = 0;

  // Reports to all peers that this rank gives up and why; they throw the same code and name the rank at fault: the one
  // that the error names, or this one. A job so ends with one status, whichever rank ends first. Call this when
  // catching an error.
  virtual void abort(const Error& why) noexcept = 0;

  // Bytes and calls by tag since the start (or the last reset), e.g. "dp.reduce_scatter".
  virtual std::map<std::string, CommCount> counts() const = 0;
  virtual void reset_counts() = 0;

  // Memory that this rank's part of the communicator holds for itself, without allocate(), while no operation is
  // pending.
  virtual i64 staging_bytes() const noexcept = 0;

  // The following functions are for a communicator that is built on this one and waits elsewhere. They are not
  // collective and thread-safe.
  // Like throw_if_failed(), after checking the peers' reports and health.
  virtual void look_for_failures() { throw_if_failed(); }
  virtual bool has_left(int /*rank*/) const { return false; }  // has destroyed its communicator
  // Shows a number to the other ranks; shown() is 0 before that, or if this communicator does not support it.
  virtual void show(u64 /*number*/) noexcept {}
  virtual u64 shown(int /*rank*/) const noexcept { return 0; }
};

}  // namespace ds
