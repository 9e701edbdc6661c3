// SPDX-License-Identifier: Apache-2.0
// The method of the OSU micro-benchmarks in a few lines of our own: iterations to warm up, then each one timed and
// followed by a barrier, the mean over ranks; ping-pong for latency, a window of 64 for bandwidth. Applied to MPI's own
// operations and to those of libds over the same MPI, in one run; osu-check puts ds-commbench beside it.
//   ds-launch -n 2 osu_method [iterations] [bytes...]

#include <fmt/format.h>
#include <mpi.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/check.h"
#include "comm/make_communicator.h"

namespace {

using namespace ds;

constexpr int kWindow = 64;
constexpr int kSkip =
    2;  // times the iterations, before they count: the system moves new processes between cores for a while

// In huge pages if the system has them, like those of ds-commbench: copies between processes depend on it.
class Buffers {
 public:
  explicit Buffers(int bytes) : in_(take(bytes)), out_(take(bytes)) {}
  char* in() const { return in_.get(); }
  char* out() const { return out_.get(); }

 private:
  struct Free {
    void operator()(char* p) const noexcept { std::free(p); }
  };
  static std::unique_ptr<char, Free> take(int bytes) {
    constexpr int kHugePage = 2 << 20;
    const auto size = static_cast<size_t>(align_up(std::max(bytes, 4 << 20), kHugePage));
    std::unique_ptr<char, Free> p(static_cast<char*>(std::aligned_alloc(kHugePage, size)));
    madvise(p.get(), size, MADV_HUGEPAGE);
    std::memset(p.get(), 1, size);
    return p;
  }
  std::unique_ptr<char, Free> in_, out_;
};

double mean_of_ranks(double seconds, int ranks) {
  double sum = 0;
  MPI_Allreduce(&seconds, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  return sum / ranks;
}

// Microseconds of one call; osu_allreduce and its kin. The barrier is of the library that calls: a rank that spins in
// another one's would take the processor from threads that still work.
double collective(int iterations, int ranks, const std::function<void()>& call, const std::function<void()>& barrier) {
  const int skip = kSkip * iterations;
  double total = 0;
  for (int i = 0; i < skip + iterations; ++i) {
    const double start = MPI_Wtime();
    call();
    if (i >= skip) total += MPI_Wtime() - start;
    barrier();
  }
  return mean_of_ranks(total / iterations, ranks) * 1e6;
}

// osu_latency: rank 0 and rank 1, there and back.
double ping_pong(int iterations, int rank, const std::function<void()>& send, const std::function<void()>& receive) {
  const int skip = kSkip * iterations;
  double start = 0;
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < skip + iterations && rank < 2; ++i) {
    if (i == skip) start = MPI_Wtime();
    if (rank == 0) send();
    receive();
    if (rank == 1) send();
  }
  double us = (MPI_Wtime() - start) / iterations / 2 * 1e6;
  MPI_Bcast(&us, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  return us;
}

// osu_bw: rank 0 sends windows, rank 1 answers each; microseconds of one message.
double windows(int iterations, int rank, const std::function<void()>& window, const std::function<void()>& answer) {
  const int skip = kSkip * iterations;
  double start = 0;
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < skip + iterations && rank < 2; ++i) {
    if (i == skip) start = MPI_Wtime();
    window();
    answer();
  }
  double us = (MPI_Wtime() - start) / iterations / kWindow * 1e6;
  MPI_Bcast(&us, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  return us;
}

}  // namespace

int main(int argc, char** argv) {
  const int iterations = argc > 1 ? std::atoi(argv[1]) : 200;
  std::vector<int> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {1024, 65536, 1 << 20};
  // As in ds-commbench: --blocking for collectives, and not for messages.
  const auto comm = make_mpi_communicator({.progress_thread = false}), messages = make_mpi_communicator({});
  const int rank = comm->rank(), P = comm->size(), peer = 1 - rank;
  if (rank == 0) fmt::print("{:<12} {:>10} {:>12} {:>12}\n", "operation", "bytes", "MPI us", "libds us");
  for (const int bytes : sizes) {
    const Buffers b(bytes);
    const int slice = bytes / P;
    const auto of_mpi = [&](const std::function<void()>& call) {
      return collective(iterations, P, call, [] { MPI_Barrier(MPI_COMM_WORLD); });
    };
    const auto of_libds = [&](const std::function<void()>& call) {
      return collective(iterations, P, call, [&] { comm->barrier("osu"); });
    };
    const auto print = [&](const char* name, double mpi, double libds) {
      if (rank == 0) fmt::print("{:<12} {:>10} {:>12.2f} {:>12.2f}\n", name, bytes, mpi, libds);
    };
    print("all_reduce",
          of_mpi([&] { MPI_Allreduce(MPI_IN_PLACE, b.out(), bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }),
          of_libds([&] { comm->all_reduce(b.out(), bytes / 4, DType::F32, ReduceOp::Sum, "osu").wait(); }));
    print("all_gather",
          of_mpi([&] { MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, b.out(), slice, MPI_CHAR, MPI_COMM_WORLD); }),
          of_libds([&] {
            const AllGatherSegment segment{b.out(), slice};
            comm->all_gather({&segment, 1}, "osu").wait();
          }));
    print("broadcast", of_mpi([&] { MPI_Bcast(b.out(), bytes, MPI_CHAR, 0, MPI_COMM_WORLD); }),
          of_libds([&] { comm->broadcast(b.out(), bytes, 0, "osu").wait(); }));
    print("all_to_all",
          of_mpi([&] { MPI_Alltoall(b.in(), slice, MPI_CHAR, b.out(), slice, MPI_CHAR, MPI_COMM_WORLD); }),
          of_libds([&] { comm->all_to_all(b.in(), b.out(), slice, "osu").wait(); }));
    print("latency",
          ping_pong(
              iterations, rank, [&] { MPI_Send(b.in(), bytes, MPI_CHAR, peer, 1, MPI_COMM_WORLD); },
              [&] { MPI_Recv(b.out(), bytes, MPI_CHAR, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }),
          ping_pong(
              iterations, rank, [&] { messages->send(b.in(), bytes, peer, "osu").wait(); },
              [&] { messages->recv(b.out(), bytes, peer, "osu").wait(); }));
    print("bandwidth",
          windows(
              iterations, rank,
              [&] {
                std::vector<MPI_Request> requests(kWindow);
                for (MPI_Request& r : requests)
                  rank == 0 ? MPI_Isend(b.in(), bytes, MPI_CHAR, peer, 2, MPI_COMM_WORLD, &r)
                            : MPI_Irecv(b.out(), bytes, MPI_CHAR, peer, 2, MPI_COMM_WORLD, &r);
                MPI_Waitall(kWindow, requests.data(), MPI_STATUSES_IGNORE);
              },
              [&] {
                rank == 0 ? MPI_Recv(b.out(), 4, MPI_CHAR, peer, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE)
                          : MPI_Send(b.in(), 4, MPI_CHAR, peer, 3, MPI_COMM_WORLD);
              }),
          windows(
              iterations, rank,
              [&] {
                std::vector<Ticket> tickets;
                for (int i = 0; i < kWindow; ++i)
                  tickets.push_back(rank == 0 ? messages->send(b.in(), bytes, peer, "osu")
                                              : messages->recv(b.out(), bytes, peer, "osu"));
                for (Ticket& t : tickets) t.wait();
              },
              [&] {
                (rank == 0 ? messages->recv(b.out(), 4, peer, "osu") : messages->send(b.in(), 4, peer, "osu")).wait();
              }));
  }
}
