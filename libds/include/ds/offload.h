// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiers of offload measured: files as training reads and writes them, and updates of optimizers in host memory, beside
// what that memory can carry. Bandwidths are in GB/s, 1e9 bytes. And servers of states: a process that has masters and
// states of optimizers for the ranks of a run on its machine, runs their updates, and outlives them.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds::offload {

// One way to read and write a file: aio.method ("io_uring", "threads"), aio.block_size, and aio.queue_depth or, of
// threads, aio.intra_op_parallelism.
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
  bool direct = true;  // past the page cache
  double read_gbps = 0, write_gbps = 0;
  // Of a tile that is read and written, as an update does.
  double both_gbps() const noexcept {
    return read_gbps > 0 && write_gbps > 0 ? 2 / (1 / read_gbps + 1 / write_gbps) : 0;
  }
};

// Throws Errc::Config: a way that cannot be.
DS_API void validate(const FileOptions& options);
// Calls on_row(row) for each way as it is measured. A way that the kernel refuses is left out. Throws what validate()
// throws, Errc::Unavailable (no such directory, no space), Errc::Io.
DS_API std::vector<FileRow> measure_files(const FileOptions& options,
                                          const std::function<void(const FileRow&)>& on_row);
// The fastest for a tile that is read and written. Requires: rows.
DS_API const FileRow& best_of(const std::vector<FileRow>& rows);

struct UpdateOptions {
  std::vector<std::string> optimizers{"AdamW", "AdamW8bit", "SGD", "Lion", "Lamb", "Adagrad"};  // without Muon
  i64 params = 100'000'000;
  int threads = 0;  // 0: the cores of this process
  int loops = 5;
};

struct UpdateRow {
  std::string optimizer{};
  double params_per_s = 0;
  double bytes_per_param = 0;  // read and written, with the bf16 parameter
  double gbps = 0;
};

struct UpdateResult {
  std::string kernels{};  // "avx512_bf16"
  int threads = 0;
  double memory_gbps = 0;  // of a += b with these threads: 12 bytes an element
  std::vector<UpdateRow> rows{};
};

// Throws Errc::Config: an optimizer that is none, or that looks at whole matrices.
DS_API void validate(const UpdateOptions& options);
// Of one large parameter in bf16, with an fp32 master. Medians over the loops. Throws what validate() throws,
// Errc::OutOfMemory.
DS_API UpdateResult measure_updates(const UpdateOptions& options, const std::function<void(const UpdateRow&)>& on_row);

// Of one server, which has a name; its states are in memory, or in a file on a disk.
struct ServeOptions {
  std::string name{};
  std::string path{};     // directory of the disk; empty: memory (/dev/shm)
  i64 capacity = 0;       // bytes that states may take; 0: what is there
  int threads = 0;        // of updates; 0: the cores of this process
  FileWay way{};          // of a disk
  bool checksum = false;  // chunks of states are held to what was written
};

// Serves runs whose zero_optimization.offload_optimizer has device "server" and this name, until stop() says so, which
// is asked now and then. The state of the last whole step outlives runs and servers, whatever kills them: the next
// server of the name goes on with it. event(text): what happens, for people. Throws Errc::Config (no such name;
// the states are elsewhere), Errc::Unavailable (there is a server of that name), Errc::Io, Errc::Corrupt.
DS_API void serve(const ServeOptions& options, const std::function<void(const std::string&)>& event,
                  const std::function<bool()>& stop);

struct ServerInfo {
  std::string name{}, path{};  // path: empty for memory
  bool runs = false;           // else nobody serves it now
  int pid = 0;                 // 0: none, or it does not answer
  i64 ranks = 0;               // of the run that is attached
  std::optional<i64> step{};   // nothing: it has no states yet
  i64 bytes = 0;               // of its states
  std::string problem{};       // that keeps its state from being read
};
// The servers of this user, by name.
DS_API std::vector<ServerInfo> list_servers();

// Ends a server and removes all that it has. Throws Errc::Unavailable: there is none, or a run is attached.
DS_API void remove_server(const std::string& name);

// Writes its state as a step of a run directory `dir`, as a run of one rank would have saved it; a run that is attached
// waits meanwhile. The step directory. Throws Errc::Unavailable (there is none, or it has no states yet), Errc::Io.
DS_API std::string dump_server(const std::string& name, const std::string& dir);

// Reads all of its state; a line for each thing that is wrong with it.
DS_API std::vector<std::string> verify_server(const std::string& name);

}  // namespace ds::offload
