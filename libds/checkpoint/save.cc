// SPDX-License-Identifier: Apache-2.0
// Order of a save, and why a crash at any point is harmless: everything is written and synced under a temporary name
// that no reader looks at; one rename makes the step exist; one rename makes it the latest; only then older steps go.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <system_error>

#include "checkpoint/reader.h"
#include "checkpoint/together.h"
#include "ds/log.h"
#include "formats/hdf5.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

const void* state_data(const StatePiece& p, State s) noexcept {
  switch (s) {
    case State::Param: return p.param_data;
    case State::Master: return p.master;
    case State::ExpAvg: return p.exp_avg;
    case State::ExpAvgSq: return p.exp_avg_sq;
  }
  return nullptr;
}

// Writes and hashes block by block: each block is in the processor's cache when it is written.
DatasetRecord write_dataset(DirectWriter& writer, i64 offset, const void* data, i64 bytes) {
  DatasetRecord d{offset, {}};
  const auto* p = static_cast<const char*>(data);
  for (i64 block = 0; block * kChecksumBlock < bytes; ++block) {
    const i64 at = block * kChecksumBlock, n = block_bytes(bytes, block);
    d.checksums.push_back(checksum(p + at, n));
    writer.write(offset + at, p + at, n);
  }
  return d;
}

// This rank's file: structure by HDF5, bulk past it, synced and read back.
FileRecord write_rank_file(const std::string& path, const Manifest& m, std::span<const StatePiece> pieces, int rank) {
  std::vector<Hdf5Dataset> datasets;
  std::set<std::pair<i64, i64>> seen;
  for (const StatePiece& p : pieces) {
    DS_CHECK(p.param >= 0 && p.param < narrow<i64>(m.params.size()) && p.count >= 0 && p.begin >= 0, Errc::Internal,
             "piece {} + {} of parameter {} of {}", p.begin, p.count, p.param, m.params.size());
    const std::string& name = m.params[static_cast<size_t>(p.param)].name;
    if (p.count == 0) continue;
    DS_CHECK(seen.emplace(p.param, p.begin).second, Errc::Internal, "element {} of '{}' is held twice", p.begin, name);
    for (State s : kStates) {
      if (state_data(p, s) == nullptr) continue;
      datasets.push_back(
          {{dataset_name(m, s, p.param, p.begin), m.stored_dtype(s, p.param), {p.count}}, {{"begin", p.begin}}});
    }
  }
  const std::vector<i64> offsets = create_hdf5(
      path, datasets,
      {{"checkpoint", m.id}, {"rank", std::to_string(rank)}, {"world_size", std::to_string(m.meta.world_size)}});

  FileRecord record;
  const File file = File::open_write(path);
  DirectWriter writer(file);
  auto offset = offsets.begin();
  for (const StatePiece& p : pieces) {
    if (p.count == 0) continue;
    PieceRecord& r = record.pieces.emplace_back(PieceRecord{p.param, p.begin, p.count, {}});
    for (State s : kStates) {
      const void* data = state_data(p, s);
      if (data == nullptr) continue;
      const i64 bytes = p.count * dtype_bytes(m.stored_dtype(s, p.param));
      r.states[static_cast<size_t>(s)] = write_dataset(writer, *offset++, data, bytes);
    }
  }
  writer.flush();
  file.sync();
  record.bytes = file.size();
  record.structure = structure_checksum(file, m, record.pieces);
  verify_file(file, m, record);
  return record;
}

void write_view(const std::string& dir, Manifest& m) {
  std::vector<Hdf5View> views;
  std::map<std::string, std::string> links;
  std::vector<size_t> view_of(m.params.size());
  for (size_t i = 0; i < m.params.size(); ++i) {
    const ParamEntry& p = m.params[i];
    view_of[i] = views.size();
    if (p.tied_to.empty()) {
      // A scalar cannot be a view: it is shown as one element.
      const std::vector<i64> shape = p.shape.empty() ? std::vector<i64>{1} : p.shape;
      views.push_back({{p.name, m.stored_dtype(State::Param, narrow<i64>(i)), shape}, {}});
    } else {
      links[p.name] = p.tied_to;
    }
  }
  for (size_t f = 0; f < m.files.size(); ++f) {
    for (const PieceRecord& p : m.files[f].pieces) {
      const auto param = static_cast<size_t>(p.param);
      views[view_of[param]].pieces.push_back(
          {p.begin, p.count, rank_file_name(narrow<i64>(f)), dataset_name(m, State::Param, p.param, p.begin)});
    }
  }
  const std::string path = fmt::format("{}/{}", dir, kViewName);
  create_hdf5_views(path, views, links);
  const File file = File::open_write(path);
  file.sync();
  m.view_bytes = file.size();
  m.view_checksum = file_checksum(file);
}

// Makes the run directory, or clears from it what interrupted saves left.
void prepare_run_directory(const std::string& dir) {
  std::error_code error;
  if (!fs::exists(dir)) {
    fs::create_directories(dir, error);
    DS_CHECK(!error, Errc::Io, "cannot create the directory {}: {}", dir, error.message());
    sync_directory(parent_directory(dir));
  }
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(".tmp-step-") && !name.starts_with(".latest.tmp-")) continue;
    std::error_code failed;
    fs::remove_all(it->path(), failed);
    DS_CHECK(!failed, Errc::Io, "cannot remove the unfinished {}: {}", it->path().string(), failed.message());
  }
  DS_CHECK(!error, Errc::Io, "cannot read the directory {}: {}", dir, error.message());
}

// The directory under a temporary name; gone at the end whatever happens, unless it was moved away.
class TempDirectory {
 public:
  TempDirectory(std::string path, bool ours) : path_(std::move(path)), ours_(ours) {}
  ~TempDirectory() {
    std::error_code ignored;
    if (ours_) fs::remove_all(path_, ignored);
  }
  void create() const {
    std::error_code error;
    fs::create_directory(path_, error);
    DS_CHECK(!error, Errc::Io, "cannot create the directory {}: {}", path_, error.message());
  }
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
  bool ours_;
};

// Moves `temp` to `target`. A step that is already there (the same step saved again) changes places with it in one
// operation, so that `latest` never names nothing.
void move_into_place(const std::string& temp, const std::string& target) {
  const bool exists = fs::exists(target);
  int failed = ::renameat2(AT_FDCWD, temp.c_str(), AT_FDCWD, target.c_str(), exists ? RENAME_EXCHANGE : 0u);
  if (failed != 0 && exists && (errno == EINVAL || errno == ENOSYS)) {  // a file system that cannot exchange
    const std::string old = temp + ".old";
    failed = ::rename(target.c_str(), old.c_str());
    if (failed == 0) failed = ::rename(temp.c_str(), target.c_str());
    std::error_code ignored;
    if (failed == 0) fs::remove_all(old, ignored);
  }
  DS_CHECK(failed == 0, Errc::Io, "cannot rename the finished checkpoint to {}: {}", target,
           std::generic_category().message(errno));
}

// Rank 0's part after all rank files are there.
void commit(const std::string& dir, const std::string& temp, Manifest& m) {
  validate_manifest(m, "the checkpoint to save", Errc::Internal);
  write_view(temp, m);
  const std::string manifest = fmt::format("{}/{}", temp, kManifestName);
  replace_text_file(manifest, format_manifest(m));
  CheckpointReader written(temp);
  DS_CHECK(written.manifest().meta == m.meta, Errc::Corrupt, "{}: reads back differently", manifest);

  const std::string target = fmt::format("{}/{}", dir, step_name(m.meta.step));
  move_into_place(temp, target);
  sync_directory(dir);
  replace_text_file(dir + "/latest", step_name(m.meta.step) + "\n");
}

}  // namespace

std::string save_checkpoint(const std::string& dir, CheckpointMeta meta, const std::vector<ParamEntry>& params,
                            std::span<const StatePiece> pieces, Communicator& comm) {
  const bool lead = comm.rank() == 0;
  Manifest m;
  m.id = random_hex64();
  comm.broadcast(m.id.data(), narrow<i64>(m.id.size()), 0, "checkpoint").wait();
  m.meta = std::move(meta);
  m.meta.world_size = comm.size();
  m.params = params;
  const TempDirectory temp(fmt::format("{}/.tmp-{}", dir, step_name(m.meta.step)), lead);
  together(comm, [&] {
    if (!lead) return;
    prepare_run_directory(dir);
    temp.create();
  });

  FileRecord mine;
  together(comm, [&] {
    const std::string path = fmt::format("{}/{}", temp.path(), rank_file_name(comm.rank()));
    mine = write_rank_file(path, m, pieces, comm.rank());
  });
  const std::vector<std::string> records = gather_text(comm, format_file_record(mine));
  together(comm, [&] {
    if (!lead) return;
    for (const std::string& text : records) m.files.push_back(parse_file_record(text));
    commit(dir, temp.path(), m);
  });
  return fmt::format("{}/{}", dir, step_name(m.meta.step));
}

void remove_old_steps(const std::string& dir, i64 newest, i64 keep) {
  std::vector<i64> steps;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::optional<i64> step = parse_step_name(it->path().filename().string());
    if (step && *step < newest) steps.push_back(*step);
  }
  if (error) log_message(LogLevel::Warning, fmt::format("cannot list old checkpoints in {}: {}", dir, error.message()));
  std::sort(steps.rbegin(), steps.rend());
  for (size_t i = static_cast<size_t>(keep - 1); i < steps.size(); ++i) {
    // Renamed first: a step is there whole or not at all.
    const std::string path = fmt::format("{}/{}", dir, step_name(steps[i]));
    const std::string doomed = fmt::format("{}/.tmp-{}", dir, step_name(steps[i]));
    fs::remove_all(doomed, error);
    if (!error) fs::rename(path, doomed, error);
    if (!error) fs::remove_all(doomed, error);
    if (error) {
      log_message(LogLevel::Warning, fmt::format("cannot remove the old checkpoint {}: {}", path, error.message()));
    }
  }
}

}  // namespace ds
