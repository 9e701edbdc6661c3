// SPDX-License-Identifier: Apache-2.0
// reduce_scatter + all_gather of a gradient bucket, as ZeRO does it, over shm (in place and staged) and mpi, beside
// MPI_Allreduce of the same bytes; all in one run, the four taking turns, the fastest of each reported.
//   mpirun --bind-to core --mca pml ob1 -n 2 comm_bench [largest size in bytes]

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <random>

#include "comm/communicator.h"

namespace {

using namespace ds;

void reduce_and_gather(Communicator& c, float* data, i64 elems) {
  const i64 slice = elems / c.size();
  const ReduceScatterSegment rs{data, data + c.rank() * slice, slice};
  const AllGatherSegment ag{data, slice * 4};
  c.reduce_scatter({&rs, 1}, DType::F32, false, "bench");
  c.all_gather({&ag, 1}, "bench").wait();
}

double seconds(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  const i64 largest = argc > 1 ? std::atoll(argv[1]) : i64{64} << 20;
  auto mpi = make_mpi_communicator({});
  auto job = static_cast<u64>(std::random_device()()) << 32 | std::random_device()();
  mpi->broadcast(&job, sizeof job, 0, "bench").wait();
  auto shm = make_shm_communicator(fmt::format("bench-{:016x}", job), mpi->rank(), mpi->size(), {});
  MemoryLedger ledger;
  const Buffer shared = shm->allocate(ledger, Tag::Buckets, largest), own(ledger, Tag::Buckets, largest);
  float* const in_place = shared.as<float>().data();
  float* const ordinary = own.as<float>().data();

  if (mpi->rank() == 0)
    fmt::print("{:>10} {:>14} {:>14} {:>14} {:>14} {:>16}\n", "bytes", "shm in place us", "shm staged us", "mpi us",
               "Allreduce us", "Allreduce / shm");
  for (i64 bytes = 64 << 10; bytes <= largest; bytes *= 4) {
    const i64 elems = bytes / 4;
    const std::array<std::function<void()>, 4> ways = {
        [&] { reduce_and_gather(*shm, in_place, elems); }, [&] { reduce_and_gather(*shm, ordinary, elems); },
        [&] { reduce_and_gather(*mpi, ordinary, elems); },
        [&] { MPI_Allreduce(MPI_IN_PLACE, ordinary, static_cast<int>(elems), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }};
    std::array<double, 4> best;
    best.fill(1e9);
    for (i64 i = 0; i < std::clamp<i64>((i64{256} << 20) / bytes, 10, 500); ++i) {
      std::fill_n(ordinary, elems, 0.0f);
      for (size_t w = 0; w < ways.size(); ++w) {
        shm->barrier("bench");
        best[w] = std::min(best[w], seconds(ways[w]));
      }
    }
    for (double& b : best) shm->all_reduce(&b, 1, DType::F64, ReduceOp::Max, "bench").wait();
    if (mpi->rank() == 0)
      fmt::print("{:>10} {:>14.1f} {:>14.1f} {:>14.1f} {:>14.1f} {:>16.2f}\n", bytes, best[0] * 1e6, best[1] * 1e6,
                 best[2] * 1e6, best[3] * 1e6, best[3] / best[0]);
  }
}
