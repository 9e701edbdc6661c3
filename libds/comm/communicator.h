// SPDX-License-Identifier: Apache-2.0
#pragma once
// Communicator: the ranks of a world, or of one of its groups, and what they do together. Over host memory: self (one
// rank), threads (ranks as threads of one process, for tests), shm (one node), mpi (any nodes), shm+mpi (both,
// composed); over device memory: self, staged, nccl.
//
// Canonical sums. A sum over ranks is, for every element, the left fold in ascending rank order in fp32,
// ((g_0 + g_1) + g_2) + ..., whatever the implementation, segment, owner or algorithm: all implementations give the
// same bits.
//
// Order. Every rank of the communicator makes the same calls in the same order with the same sizes. Calls return a
// Ticket at once; operations run in call order on the communicator's own progress thread, so they overlap with
// computation. Sends run beside them on a thread of their own, in the order of sends, so that two ranks may send to
// each other before they receive. Buffers belong to the operation until its ticket is done, also while an exception
// unwinds. One thread at a time calls (abort: any).
//
// Failure. A peer that dies, throws, stops or does not come within `timeout` makes every pending and later call, on
// every other rank, throw Errc::Comm (died), Errc::Timeout (absent) or what the peer threw, with Error::rank() and the
// message naming the rank. Never a hang. A rank that destroyed its communicator has left in peace: only who still waits
// for it gets an error. A mismatched call is Errc::Comm and says what each rank called. After an error the communicator
// is of no use: every later call throws the same one. A communicator destroyed by an exception that unwinds its owner
// aborts.
//
// Groups. A group is a communicator of some ranks of another, with its own rank numbers, calls, order and counts. All
// communicators of a world share one fate: a failure that one of them meets, or that one of its ranks dies, ends the
// waits and the later calls in all of them, on all ranks. Errors name ranks of the world (world_rank), in Error::rank()
// and in their words. Groups may be destroyed in any order, but before the world that they come from.
//
// Counting. Every call is counted under its tag: bytes that this rank sends (payload only, what the algorithm's formula
// says), number of calls. With n the bytes of the whole buffer: reduce_scatter, all_gather, all_to_all (P-1)/P n;
// all_reduce 2 (P-1)/P n, rounded down, for 16-bit types too; broadcast (P-1) n at the root, 0 elsewhere; reduce n,
// at the root (P-1)/P n; gather the slice, at the root 0; scatter (P-1) slices at the root, 0 elsewhere; send n, recv
// 0; barrier 0.

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/shared_file.h"
#include "device/device.h"
#include "ds/kernels/ops.h"

namespace ds {

class Trace;  // base/trace.h

enum class ReduceOp : u8 { Sum, Max, Min };

// One contiguous piece of a reduce-scatter. source holds P slices of `slice_elems` elements; the fold over ranks of
// slice r arrives in rank r's target.
struct ReduceScatterSegment {
  const void* source;  // [P * slice_elems] wire dtype
  float* target;       // [slice_elems] fp32; may lie inside source when the wire dtype is fp32 and it is our own slice
  i64 slice_elems;
};

// One contiguous piece of an in-place all-gather: P slices of slice_bytes; slice r is contributed by rank r.
struct AllGatherSegment {
  void* buffer;  // [P * slice_bytes]; our own slice is filled on entry
  i64 slice_bytes;
};

class Ticket {
 public:
  Ticket() = default;  // done
  // Blocks until the operation is done on this rank (buffers may be read and reused). Throws its error. Idempotent.
  void wait();
  bool done() const;

  // What a communicator knows of an operation under way.
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
  // For which they were under way, with the time that peers let wait; 0: not known (CommOptions::time_calls).
  double seconds = 0;
};

struct CommOptions;

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual std::string_view backend()
      const noexcept = 0;  // "self", "threads", "shm", "mpi", "shm+mpi", "staged", "nccl", "openmpi"
  // The number in the world of a rank of this communicator; what errors name.
  virtual int world_rank(int rank) const noexcept = 0;

  // A communicator over host memory of the ranks `members` (of this one, in the order of their ranks in the group; this
  // rank among them). Collective over the members alone, each of which makes the groups that it shares with another in
  // the same order as that one; waits for all members within the timeout. `name` (1 to 32 of [a-zA-Z0-9-]) is
  // for messages and must agree. Groups of one rank cost nothing. Communicators over device memory have none: make one
  // over a group.
  virtual std::unique_ptr<Communicator> group(std::span<const int> members, std::string_view name,
                                              const CommOptions&) = 0;

  // Memory that peers can reach directly (a shared segment); collectives on it copy nothing twice. Collective: all
  // ranks ask for the same sizes in the same order. Zeroed, 64-byte aligned. Ordinary memory works in every call too,
  // only slower.
  virtual Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) = 0;

  // target = fold over ranks of our slice; accumulate: the fold continues from target instead of starting at rank 0's
  // value. All segments are one operation (one ticket, one synchronisation): a bucket.
  virtual Ticket reduce_scatter(std::span<const ReduceScatterSegment> segments, DType wire, bool accumulate,
                                std::string_view tag) = 0;
  virtual Ticket all_gather(std::span<const AllGatherSegment> segments, std::string_view tag) = 0;
  // In place; data [n] F32 (canonical fold), BF16 or F16, whose canonical fold is rounded once, at its end, F64, folded
  // in rank order in fp64, I32 or I64, whose sums wrap. Max and Min are exact on each, and NaN wins both.
  virtual Ticket all_reduce(void* data, i64 n, DType dtype, ReduceOp op, std::string_view tag) = 0;
  // The same, for the root alone: `data` of other ranks stays as it is.
  virtual Ticket reduce(void* data, i64 n, DType dtype, ReduceOp op, int root, std::string_view tag) = 0;
  virtual Ticket broadcast(void* data, i64 bytes, int root, std::string_view tag) = 0;
  // Slice q of source goes to rank q; slice q of target comes from rank q.
  virtual Ticket all_to_all(const void* source, void* target, i64 slice_bytes, std::string_view tag) = 0;
  // The root's target [P * slice_bytes] gets slice q from rank q; elsewhere it is not looked at.
  virtual Ticket gather(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) = 0;
  // Slice q of the root's source [P * slice_bytes] goes to rank q; elsewhere it is not looked at.
  virtual Ticket scatter(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) = 0;
  // Point to point, matched in order per (sender, receiver). send may return before the receiver came.
  virtual Ticket send(const void* data, i64 bytes, int to, std::string_view tag) = 0;
  virtual Ticket recv(void* data, i64 bytes, int from, std::string_view tag) = 0;
  virtual void barrier(std::string_view tag) = 0;

  // Returns when no operation of this rank over host memory is under way, whatever became of those that were; their
  // buffers may be freed then. For who has lost tickets to an exception.
  virtual void drain() noexcept {}

  // Throws the failure that this rank has learnt of, if any: for work that was enqueued and not waited for by the host.
  virtual void throw_if_failed() const = 0;

  // Tells all peers that this rank gives up and why; they throw the same code, naming the rank at fault: this one, or
  // the one that the error names. So a job ends with one status, whoever ends first. Called by who catches an error.
  virtual void abort(const Error& why) noexcept = 0;

  // Bytes and calls by "tag" since the start (or the last reset), e.g. "dp.reduce_scatter".
  virtual std::map<std::string, CommCount> counts() const = 0;
  virtual void reset_counts() = 0;

  // What this rank's part of the communicator takes for itself, beside allocate(), while no operation is pending.
  virtual i64 staging_bytes() const noexcept = 0;

  // For a communicator that is built on this one and waits elsewhere; no collectives, any thread.
  // As throw_if_failed, after a look at what peers have reported and whether they live.
  virtual void look_for_failures() { throw_if_failed(); }
  virtual bool has_left(int /*rank*/) const { return false; }  // has destroyed its communicator
  // A number that each rank shows to the others; 0: none yet, or this communicator cannot.
  virtual void show(u64 /*number*/) noexcept {}
  virtual u64 shown(int /*rank*/) const noexcept { return 0; }
};

struct CommOptions {
  double timeout_s = 300;        // a peer absent for longer is an error
  bool progress_thread = true;   // false: operations but send run inside the call (overlap_comm off)
  bool time_calls = false;       // of communicators over host memory: the others do not know when theirs end
  Trace* trace = nullptr;        // likewise; gets their operations
  const OpTable* ops = nullptr;  // for folds; null: cpu_ops()
  Device* device = nullptr;      // of the three communicators over device memory
};

std::unique_ptr<Communicator> make_self_communicator(const CommOptions&);

// `size` communicators that share one process; give one to each thread. Each may be destroyed by its own thread.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size, const CommOptions&);
// Runs body(communicator) on `size` threads. An exception in a body aborts its peers; the first error (that of the rank
// that failed first, not of those that were told) is rethrown here.
void run_threads(int size, const CommOptions&, const std::function<void(Communicator&)>& body);

// Processes of one node that share `job` (a random name made by the launcher; [a-zA-Z0-9-]). Waits for all within the
// timeout. Segments are 0600 and of a new name, reserved with posix_fallocate (a full /dev/shm is an error that says
// needed and free bytes, not a SIGBUS) and unlinked as soon as all ranks have attached.
std::unique_ptr<Communicator> make_shm_communicator(std::string_view job, int rank, int size, const CommOptions&);
// What such a communicator, or a group of so many ranks, takes of /dev/shm if each of its ranks allocates these sizes
// from it; several add up, but a group of one rank takes nothing. Channels come on top: the first send from one rank to
// another takes one.
i64 shm_needed_bytes(int size, std::span<const i64> allocations);
i64 shm_channel_bytes() noexcept;
// What this node's /dev/shm has free now. 0: it cannot be written.
i64 shm_free_bytes_here();
// What /dev/shm had free when rank 0 came here: the same number on every rank. 0: it cannot be written. Collective over
// the processes of the job, before any of them takes shared memory; waits for rank 0 within the timeout. `told` is rank
// 0's to keep until it has met all others.
i64 shm_free_bytes(std::string_view job, int rank, int size, double timeout_s, SharedFile& told);

// All processes of MPI_COMM_WORLD. Initialises MPI (THREAD_MULTIPLE) if nobody has, and then finalises it at the end.
std::unique_ptr<Communicator> make_mpi_communicator(const CommOptions&);
std::string mpi_library_version();  // "Open MPI v4.1.4, ..."

// All processes of MPI_COMM_WORLD, in nodes of `local_size` ranks with consecutive numbers, this one the
// `local_rank`-th of its node: shm inside a node, MPI between nodes, so that what a node gets from or gives to another
// crosses the network once and not once for each of its ranks. Sums are canonical: node k goes on with the fold of node
// k - 1. Groups are of the same kind, or shm or MPI alone, whatever their ranks allow. `job` as for shm; nodes may
// share a /dev/shm. shared_bytes: what this node will take of its /dev/shm, where that is known. Where the ranks are
// not laid out so, or a node has too little: Errc::Config or Errc::OutOfMemory, or, if `or_mpi`, MPI alone, as for
// nodes of one rank. An absent rank of another node is an error after up to 1.4 times the timeout: those beside it
// speak first.
std::unique_ptr<Communicator> make_composed_communicator(std::string_view job, int local_rank, int local_size,
                                                         i64 shared_bytes, const CommOptions&, bool or_mpi = false);
// Open MPI's own collectives, for measurements beside ours: blocking, sums in any order, no comparison of calls, no
// timeout; no groups. Throws Errc::Config for what Open MPI does not have (16-bit reductions, accumulation).
std::unique_ptr<Communicator> make_open_mpi_peer(const CommOptions&);
// The composed communicator of threads, for tests. As run_threads.
void run_composed_threads(int nodes, int local_size, const CommOptions&,
                          const std::function<void(Communicator&)>& body);

// Over device memory (CommOptions::device, which outlives them). Calls take their inputs as of now in the Compute
// queue; Ticket::wait() orders what comes next on Compute behind the operation and does not stop the host;
// throw_if_failed() says what has gone wrong. Buffers of allocate() are the device's. `world`: the same ranks over host
// memory.
//
// One rank: folds on the device. With a world, which has one rank too, it shares the world's fate.
std::unique_ptr<Communicator> make_device_self_communicator(const CommOptions&);
std::unique_ptr<Communicator> make_device_self_communicator(Communicator& world, const CommOptions&);
// Every call goes through host memory and `world`, and stops the host (a recv when its ticket is waited for): for
// several ranks on one GPU, in tests.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& world, const CommOptions&);
// NCCL, loaded at run time; one GPU per rank. Sums are canonical here too: slices are exchanged and folded on the
// device. There is no faster mode that leaves the order to NCCL: its ring sends no byte less, and its bits would depend
// on sizes, topology and version. All-reductions other than of I64 and sums of F32, BF16 and F16, reduce, send, recv
// and barrier go through host memory and `world` and stop the host; a recv when its ticket is waited for. A mismatched
// call may only be noticed as a Timeout. Throws Errc::Unavailable where NCCL cannot be loaded. Collective.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& world, const CommOptions&);

}  // namespace ds
