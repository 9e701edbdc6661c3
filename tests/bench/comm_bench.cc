// SPDX-License-Identifier: Apache-2.0
// Collectives over shared memory beside Open MPI's own on the same bytes: every operation and size in turns in one run,
// the median of each, and the ratio. Shared: buffers of Communicator::allocate, as training uses them; ordinary: any
// memory. Calls of `shm` run in the caller's thread (no progress thread), as Open MPI's do. The last column is the
// share of the machine's copy bandwidth that shm reaches in shared buffers: bytes that its algorithm reads and writes
// per second, beside those of memcpy by all ranks at once.
//   mpirun --bind-to core --mca pml ob1 -n 2 comm_bench [largest size in bytes [operation...]]

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "comm/make_communicator.h"
#include "device/device.h"

namespace {

using namespace ds;
using Clock = std::chrono::steady_clock;

// Slices as in ds-commbench: a rank sends n bytes in all, in proportion to 1 + (from + to) % 3.
struct Uneven {
  Uneven(int rank, int ranks, i64 n) {
    for (int q = 0; q < ranks; ++q) {
      add(out, counts_out, places_out, share(rank, q, ranks, n));
      add(in, counts_in, places_in, share(q, rank, ranks, n));
    }
  }
  static i64 share(int from, int to, int ranks, i64 n) {
    i64 sum = 0;
    for (int q = 0; q < ranks; ++q) sum += 1 + (from + q) % 3;
    return n * (1 + (from + to) % 3) / sum;
  }
  static void add(std::vector<AllToAllSlice>& slices, std::vector<int>& counts, std::vector<int>& places, i64 bytes) {
    const i64 begin = slices.empty() ? 0 : slices.back().offset + slices.back().bytes;
    slices.push_back({begin, bytes});
    counts.push_back(static_cast<int>(bytes));
    places.push_back(static_cast<int>(begin));
  }
  std::vector<AllToAllSlice> out, in;
  std::vector<int> counts_out, places_out, counts_in, places_in;
};

// n bytes in all; `data` has that many, and `more` half as many again, for uneven slices.
struct Way {
  Communicator* shm;
  float *data, *more;
  i64 n;
  Uneven uneven;
};

struct Operation {
  const char* name;
  void (*ours)(const Way&);
  void (*theirs)(const Way&);
  double (*touched)(int ranks);  // bytes that a rank reads and writes for a byte of n, in shared buffers
};

int count(i64 bytes) { return static_cast<int>(bytes / 4); }

const Operation kOperations[] = {
    {"all_reduce", [](const Way& w) { w.shm->all_reduce(w.data, w.n / 4, DType::F32, ReduceOp::Sum, "bench").wait(); },
     [](const Way& w) { MPI_Allreduce(MPI_IN_PLACE, w.data, count(w.n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); },
     [](int p) { return 1 + 1.0 / p + 2.0 * (p - 1) / p; }},
    {"reduce_scatter",
     [](const Way& w) {
       const i64 slice = w.n / 4 / w.shm->size();
       const ReduceScatterSegment s{w.data, w.data + w.shm->rank() * slice, slice};
       w.shm->reduce_scatter({&s, 1}, DType::F32, false, "bench").wait();
     },
     [](const Way& w) {
       MPI_Reduce_scatter_block(w.data, w.more, count(w.n / w.shm->size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
     },
     [](int p) { return 1 + 1.0 / p; }},
    {"all_gather",
     [](const Way& w) {
       const AllGatherSegment s{w.data, w.n / w.shm->size()};
       w.shm->all_gather({&s, 1}, "bench").wait();
     },
     [](const Way& w) {
       MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, w.data, count(w.n / w.shm->size()), MPI_FLOAT, MPI_COMM_WORLD);
     },
     [](int p) { return 2.0 * (p - 1) / p; }},
    {"broadcast", [](const Way& w) { w.shm->broadcast(w.data, w.n, 0, "bench").wait(); },
     [](const Way& w) { MPI_Bcast(w.data, count(w.n), MPI_FLOAT, 0, MPI_COMM_WORLD); },
     [](int p) { return 2.0 * (p - 1) / p; }},
    {"all_to_all", [](const Way& w) { w.shm->all_to_all(w.data, w.more, w.n / w.shm->size(), "bench").wait(); },
     [](const Way& w) {
       const int slice = count(w.n / w.shm->size());
       MPI_Alltoall(w.data, slice, MPI_FLOAT, w.more, slice, MPI_FLOAT, MPI_COMM_WORLD);
     },
     [](int) { return 2.0; }},
    {"all_to_allv", [](const Way& w) { w.shm->all_to_allv(w.data, w.uneven.out, w.more, w.uneven.in, "bench").wait(); },
     [](const Way& w) {
       const Uneven& u = w.uneven;
       MPI_Alltoallv(w.data, u.counts_out.data(), u.places_out.data(), MPI_BYTE, w.more, u.counts_in.data(),
                     u.places_in.data(), MPI_BYTE, MPI_COMM_WORLD);
     },
     [](int) { return 2.0; }},
};

double seconds(const std::function<void()>& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double>& v) {
  std::ranges::nth_element(v, v.begin() + std::ssize(v) / 2);
  return v[v.size() / 2];
}

// Bytes read and written per second by a rank, all copying at once.
double copy_bandwidth(Communicator& c, float* to, const float* from, i64 bytes) {
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) {
    c.barrier("bench");
    times.push_back(seconds([&] { std::memcpy(to, from, static_cast<size_t>(bytes)); }));
  }
  return 2 * static_cast<double>(bytes) / median(times);
}

}  // namespace

int main(int argc, char** argv) {
  const i64 largest = argc > 1 ? std::atoll(argv[1]) : i64{256} << 20;
  auto mpi = make_mpi_communicator({});
  auto job = static_cast<u64>(std::random_device()()) << 32 | std::random_device()();
  mpi->broadcast(&job, sizeof job, 0, "bench").wait();
  const int P = mpi->size();
  auto shm = make_shm_communicator(fmt::format("bench-{:016x}", job), mpi->rank(), P, {.progress_thread = false});
  MemoryLedger ledger;
  const Buffer shared = shm->allocate(ledger, Tag::Buckets, largest),
               other = shm->allocate(ledger, Tag::Buckets, largest * 3 / 2), own(ledger, Tag::Buckets, largest),
               second(ledger, Tag::Buckets, largest * 3 / 2);
  for (const Buffer* b : {&shared, &other, &own, &second}) std::ranges::fill(b->as<float>(), 1.0f);
  const bool speaks = mpi->rank() == 0;
  const double bandwidth = copy_bandwidth(*shm, own.as<float>().data(), second.as<float>().data(), largest);
  if (speaks) {
    fmt::print("{} ranks; memcpy by all at once: {:.1f} GB/s read and written by each\n", P, bandwidth * 1e-9);
    fmt::print("{:>14} {:>10} {:>13} {:>13} {:>13} {:>14} {:>14} {:>9}\n", "operation", "bytes", "shared us",
               "ordinary us", "Open MPI us", "MPI / shared", "MPI / ordinary", "of copy");
  }
  for (const Operation& op : kOperations) {
    if (argc > 2 && std::find_if(argv + 2, argv + argc,
                                 [&](const char* a) { return op.name == std::string_view(a); }) == argv + argc)
      continue;
    for (i64 bytes = 8; bytes <= largest; bytes *= bytes < (1 << 20) ? 8 : 4) {
      const i64 n = bytes / (4 * P) * 4 * P;
      if (n == 0) continue;
      const Uneven uneven(shm->rank(), P, n);
      const Way in_place{shm.get(), shared.as<float>().data(), other.as<float>().data(), n, uneven};
      const Way ordinary{shm.get(), own.as<float>().data(), second.as<float>().data(), n, uneven};
      const std::array<std::function<void()>, 3> ways = {[&] { op.ours(in_place); }, [&] { op.ours(ordinary); },
                                                         [&] { op.theirs(ordinary); }};
      const int inner = n <= 4096 ? 100 : n <= (64 << 10) ? 20 : 1;
      std::array<std::vector<double>, 3> times;
      for (i64 i = 0; i < std::clamp<i64>((i64{1} << 30) / n, 7, 101); ++i) {
        for (size_t w = 0; w < ways.size(); ++w) {
          ways[w]();  // nobody finds the caches warmed by the one before, or all do
          shm->barrier("bench");
          times[w].push_back(seconds([&] {
                               for (int k = 0; k < inner; ++k) ways[w]();
                             }) /
                             inner);
        }
      }
      std::array<double, 3> t;
      for (size_t w = 0; w < t.size(); ++w) t[w] = median(times[w]);
      shm->all_reduce(t.data(), std::ssize(t), DType::F64, ReduceOp::Max, "bench").wait();
      const double touched = op.touched(P) * static_cast<double>(n) / t[0];
      if (speaks)
        fmt::print("{:>14} {:>10} {:>13.2f} {:>13.2f} {:>13.2f} {:>14.2f} {:>14.2f} {:>8.0f}%\n", op.name, n,
                   t[0] * 1e6, t[1] * 1e6, t[2] * 1e6, t[2] / t[0], t[2] / t[1], 100 * touched / bandwidth);
    }
  }
}
