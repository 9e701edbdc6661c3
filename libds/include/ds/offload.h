// SPDX-License-Identifier: Apache-2.0
#pragma once
// Benchmarks of the offload tiers: files, read and written as training does, and optimizer updates in host memory,
// compared with the bandwidth of that memory. Bandwidths are in GB/s (1e9 bytes). Also servers of states: a server is a
// process that holds masters and optimizer states for the ranks of a run on its machine, runs their updates, and
// outlives them.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds::offload {

// One way to read and write a file: aio.method ("io_uring", "threads"), aio.block_size, and aio.queue_depth; with
// threads, `depth` is aio.intra_op_parallelism.
struct FileWay {
  std::string method = "io_uring";
  i64 block_bytes = i64{1} << 20;
  int depth = 8;
};

struct FileOptions {
  std::string dir{};
  i64 bytes = i64{1} << 30;  // of the file
  i64 tile_bytes = i64{12} << 20;
  std::vector<std::string> methods{"io_uring", "threads"};
  std::vector<i64> block_bytes{i64{256} << 10, i64{1} << 20, i64{4} << 20};
  std::vector<int> depths{1, 4, 8, 32};
  int loops = 3;
};

// Medians over the loops.
struct FileRow {
  FileWay way{};
  bool direct = true;  // bypasses the page cache
  double read_gbps = 0, write_gbps = 0;
  // Bandwidth of reading a tile and writing it back, as an update does.
  double both_gbps() const noexcept {
    return read_gbps > 0 && write_gbps > 0 ? 2 / (1 / read_gbps + 1 / write_gbps) : 0;
  }
};

// Throws Errc::Config for an invalid combination.
DS_API void validate(const FileOptions& options);
// Calls on_row for each way once it is measured, and leaves out those that the kernel refuses. Throws like validate(),
// Errc::Unavailable (no such directory, no space), Errc::Io.
DS_API std::vector<FileRow> measure_files(const FileOptions& options,
                                          const std::function<void(const FileRow&)>& on_row);
// Returns the fastest way to read a tile and write it back. `rows` must not be empty.
DS_API const FileRow& best_of(const std::vector<FileRow>& rows);

struct UpdateOptions {
  std::vector<std::string> optimizers{"AdamW", "AdamW8bit", "SGD", "Lion", "Lamb", "Adagrad"};  // all but Muon
  i64 params = 100'000'000;
  int threads = 0;  // 0: the cores available to this process
  int loops = 5;
};

struct UpdateRow {
  std::string optimizer{};
  double params_per_s = 0;
  double bytes_per_param = 0;  // read and written, including the bf16 parameter
  double gbps = 0;
};

struct UpdateResult {
  std::string kernels{};  // "avx512_bf16"
  int threads = 0;
  double memory_gbps = 0;  // of a += b with these threads: 12 bytes per element
  std::vector<UpdateRow> rows{};
};

// Throws Errc::Config for an unknown optimizer, or one that needs whole matrices.
DS_API void validate(const UpdateOptions& options);
// Measures updates of one large bf16 parameter with an fp32 master; medians over the loops. Throws like validate(), and
// Errc::OutOfMemory.
DS_API UpdateResult measure_updates(const UpdateOptions& options, const std::function<void(const UpdateRow&)>& on_row);

// One named server. Its states are in memory, or in a file on a disk.
struct ServeOptions {
  std::string name{};
  std::string path{};     // directory on the disk; empty: memory (/dev/shm)
  i64 capacity = 0;       // bytes available to states; 0: as many as the file system has
  int threads = 0;        // of updates; 0: the cores available to this process
  FileWay way{};          // how files on a disk are read and written
  bool checksum = false;  // checks that each chunk read equals the chunk written
};

// Serves the runs whose zero_optimization.offload_optimizer has device "server" and this name, until stop(), which is
// polled, returns true. The state of the last complete step survives the end of runs and servers, however they end; the
// next server of this name continues with it. event(text) reports events to people. Throws Errc::Config (invalid name;
// the states are in another place), Errc::Unavailable (a server of this name is running), Errc::Io, Errc::Corrupt.
DS_API void serve(const ServeOptions& options, const std::function<void(const std::string&)>& event,
                  const std::function<bool()>& stop);

struct ServerInfo {
  std::string name{}, path{};  // path: empty for memory
  bool runs = false;           // a process is serving it now
  int pid = 0;                 // 0: none, or it does not answer
  i64 ranks = 0;               // of the attached run
  std::optional<i64> step{};   // empty: it holds no states yet
  i64 bytes = 0;               // of its states
  std::string problem{};       // why its state cannot be read; empty: none
};
// Lists the servers of this user, by name.
DS_API std::vector<ServerInfo> list_servers();

// Ends a server and removes its data. Throws Errc::Unavailable if it does not exist or a run is attached.
DS_API void remove_server(const std::string& name);

// Writes the server's state as a step of the run directory `dir`, as a run of one rank would save it, and returns the
// step directory. An attached run waits meanwhile. Throws Errc::Unavailable (no such server, or it holds no states
// yet), Errc::Io.
DS_API std::string dump_server(const std::string& name, const std::string& dir);

// Reads all of the server's state and returns one line per problem.
DS_API std::vector<std::string> verify_server(const std::string& name);

}  // namespace ds::offload
