// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes communicators (ds/communicator.h) over host memory: of one rank, of threads, of the processes of a node, of
// MPI; and over device memory.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/communicator.h"

namespace ds {

class SharedFile;  // comm/shared_file.h

std::unique_ptr<Communicator> make_self_communicator(const CommOptions&);

// `size` communicators that share one process, one for each thread. Each may be destroyed by its own thread.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size, const CommOptions&);
// Runs body(communicator) on `size` threads. An exception in a body aborts its peers; rethrows the error of the rank
// that failed first.
void run_threads(int size, const CommOptions&, const std::function<void(Communicator&)>& body);

// Processes of one node that share `job` (a random name made by the launcher; [a-zA-Z0-9-]). Waits for all within the
// timeout. Segments have mode 0600 and new names; they are reserved with posix_fallocate (a full /dev/shm is an error
// that states needed and free bytes, not a SIGBUS) and unlinked as soon as all ranks have attached.
std::unique_ptr<Communicator> make_shm_communicator(std::string_view job, int rank, int size, const CommOptions&);
// Need in /dev/shm of such a communicator, or of a group of that many ranks, if each rank allocates these sizes from
// it. Needs add up; a group of one rank needs nothing. Channels are extra: the first send from one rank to another
// allocates one.
i64 shm_needed_bytes(int size, std::span<const i64> allocations);
i64 shm_channel_bytes() noexcept;
// Free bytes in this node's /dev/shm; 0: it cannot be written.
i64 shm_free_bytes_here();
// Free bytes in /dev/shm when rank 0 called this: the same number on every rank; 0: it cannot be written. Collective
// over the processes of the job, before any of them takes shared memory; waits for rank 0 within the timeout. Rank 0
// must keep `told` until all ranks have returned.
i64 shm_free_bytes(std::string_view job, int rank, int size, double timeout_s, SharedFile& told);

// All processes of MPI_COMM_WORLD. Initialises MPI (THREAD_MULTIPLE) if necessary, and then finalises it at the end.
std::unique_ptr<Communicator> make_mpi_communicator(const CommOptions&);
std::string mpi_library_version();  // "Open MPI v4.1.4, ..."

// All processes of MPI_COMM_WORLD, in nodes of `local_size` ranks with consecutive numbers, of which this is the
// `local_rank`-th of its node. Uses shm inside a node and MPI between nodes, so data between two nodes crosses the
// network once instead of once per rank. Sums are canonical: node k continues the fold of node k - 1. Groups are
// composed too, or shm or MPI only, as their ranks allow. `job` as for shm; nodes may share a /dev/shm. shared_bytes:
// the need of this node in its /dev/shm, if known. If the ranks are not laid out like this, or a node has too little
// shared memory, throws Errc::Config or Errc::OutOfMemory; with `or_mpi` returns an MPI communicator instead, as it
// does for nodes of one rank. An absent rank of another node is an error after up to 1.4 times the timeout, because the
// ranks on its own node report first.
std::unique_ptr<Communicator> make_composed_communicator(std::string_view job, int local_rank, int local_size,
                                                         i64 shared_bytes, const CommOptions&, bool or_mpi = false);
// Open MPI's own collectives, for comparison in measurements: blocking, sums in any order, no checks of calls, no
// timeout, no groups. Throws Errc::Config for what Open MPI lacks (16-bit reductions, accumulation).
std::unique_ptr<Communicator> make_open_mpi_peer(const CommOptions&);
// The composed communicator over threads, for tests; see run_threads().
void run_composed_threads(int nodes, int local_size, const CommOptions&,
                          const std::function<void(Communicator&)>& body);

// Communicators over device memory (CommOptions::device, which outlives them). Calls take their inputs as of now in the
// Compute queue. Ticket::wait() makes later work on Compute wait for the operation and does not block the host;
// throw_if_failed() reports errors. Buffers of allocate() are in device memory. `world`: the same ranks over host
// memory.
//
// One rank: folds on the device. With a world, which also has one rank, it shares the world's fate.
std::unique_ptr<Communicator> make_device_self_communicator(const CommOptions&);
std::unique_ptr<Communicator> make_device_self_communicator(Communicator& world, const CommOptions&);
// Every call goes through host memory and `world` and blocks the host (a recv does so when its ticket is waited for).
// For several ranks on one GPU, in tests.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& world, const CommOptions&);
// NCCL, loaded at run time; one GPU per rank. Sums are canonical: slices are exchanged and folded on the device. There
// is no mode that leaves the order to NCCL: its ring sends no fewer bytes, and its bits would depend on sizes, topology
// and version. Messages along CommOptions::links go from device to device after use_links(); a send is then done when
// its receiver has the data. All-reductions other than of I64 and sums of F32, BF16 and F16, as well as reduce,
// barrier, the sizes of an all_to_allv, and send and recv elsewhere, go through host memory and `world` and block the
// host (a recv does so when its ticket is waited for). A mismatched call may only be noticed as a Timeout. Throws
// Errc::Unavailable if NCCL cannot be loaded. Collective.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& world, const CommOptions&);

// From each rank to the one that is `step` further around the ring: 1 or -1.
std::vector<MessageLink> ring_links(int ranks, int step);

}  // namespace ds
