// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/step_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>

#include "base/limits.h"
#include "checkpoint/reader.h"
#include "formats/hdf5.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

// Memory of the HDF5 library while it makes a file: in total, for each dataset, and for each dataset of a view; and
// memory of the texts and tables of a manifest for each dataset. Measured.
constexpr i64 kHdf5Bytes = 512 << 10, kDatasetBytes = 8 << 10, kViewBytes = 11 << 10, kManifestBytes = 3500;

// A state of a piece on its way to a file.
struct Dataset {
  State state;
  i64 elem_bytes;
  DatasetRecord* record;
};

// Writes and hashes block by block, for all states in turn: a block is in the processor's cache when it is written, and
// elements that have to be fetched are fetched once for all states of one size.
template <class Elements>
void write_piece(DirectWriter& writer, i64 count, std::span<const Dataset> datasets, Elements&& elements) {
  bool more = true;
  for (i64 block = 0; std::exchange(more, false); ++block) {
    for (const Dataset& d : datasets) {
      const i64 step = kChecksumBlock / d.elem_bytes, first = block * step, n = std::min(step, count - first);
      if (n <= 0) continue;
      const void* const data = elements(d.state, first, n);
      d.record->checksums.push_back(checksum(data, n * d.elem_bytes));
      writer.write(d.record->offset + first * d.elem_bytes, data, n * d.elem_bytes);
      more |= first + n < count;
    }
  }
}

void write_view(const std::string& dir, Manifest& m, const Tick& tick) {
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
      views[view_of[param]].parts.push_back({p.begin, p.count, rank_file_name(narrow<i64>(f)),
                                             dataset_name(m, State::Param, p), p.slice.dim, p.slice.ranges});
    }
  }
  const std::string path = fmt::format("{}/{}", dir, kViewName);
  create_hdf5_views(path, views, links, tick);
  const File file = File::open_write(path);
  file.sync();
  m.view_bytes = file.size();
  m.view_checksum = file_checksum(file);
}

// Makes the run directory, or clears from it what interrupted saves left.
void prepare_run_directory(const std::string& dir) {
  if (fs::exists(dir)) return clear_unfinished(dir);
  std::error_code error;
  fs::create_directories(dir, error);
  DS_CHECK(!error, Errc::Io, "cannot create the directory {}: {}", dir, error.message());
  sync_directory(parent_directory(dir));
}

// The name of a step that is being replaced, on a file system that cannot exchange names.
std::string set_aside(const std::string& temp) { return temp + ".old"; }

// Moves `temp` to `target`. A step that is already there (the same step saved again) changes places with it in one
// operation, so that `latest` never names nothing.
void move_into_place(const std::string& temp, const std::string& target) {
  const bool exists = fs::exists(target);
  int failed = ::renameat2(AT_FDCWD, temp.c_str(), AT_FDCWD, target.c_str(), exists ? RENAME_EXCHANGE : 0u);
  if (failed != 0 && exists && (errno == EINVAL || errno == ENOSYS)) {  // a file system that cannot exchange
    const std::string old = set_aside(temp);
    failed = ::rename(target.c_str(), old.c_str());
    if (failed == 0) {
      failed = ::rename(temp.c_str(), target.c_str());
      const int why = errno;
      if (failed != 0) ::rename(old.c_str(), target.c_str());
      errno = why;
    }
  }
  DS_CHECK(failed == 0, Errc::Io, "cannot rename the finished checkpoint to {}: {}", target, system_reason(errno));
}

std::optional<std::string> read_if_there(const std::string& path) noexcept {
  try {
    return read_text_file(path, 4096);
  } catch (const Error&) {
    return std::nullopt;
  }
}

void put_back(const std::string& path, const std::optional<std::string>& text) noexcept {
  std::error_code ignored;
  try {
    if (text) return replace_text_file(path, *text);
  } catch (const Error&) {  // an error from before may occur again after the rename
    return;
  }
  fs::remove(path, ignored);
}

// The place of the piece, for users of HDF5 tools on a rank file.
std::vector<Hdf5Attribute> attributes_of(const Manifest& m, const PieceRange& p) {
  std::vector<Hdf5Attribute> attributes = {{"begin", {}, {first_element(m, p)}}};
  if (p.slice.whole()) return attributes;
  Hdf5Attribute ranges{"slice_ranges", {narrow<i64>(p.slice.ranges.size()), 2}, {}};
  for (const auto& [from, to] : p.slice.ranges) ranges.values.insert(ranges.values.end(), {from, to});
  attributes.push_back({"slice_dim", {}, {p.slice.dim}});
  attributes.push_back(std::move(ranges));
  attributes.push_back({"slice_begin", {}, {p.begin}});
  return attributes;
}

}  // namespace

std::string unfinished_step(const std::string& dir, const Manifest& m) {
  return fmt::format("{}/.tmp-{}-{}", dir, step_name(m.meta.step), m.id);
}

void clear_unfinished(const std::string& dir) {
  const std::string unfinished = fmt::format(".tmp-{}", kStepPrefix), replaced = fmt::format(".{}.tmp-", kLatestName);
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(unfinished) && !name.starts_with(replaced)) continue;
    std::error_code failed;
    fs::remove_all(it->path(), failed);
    DS_CHECK(!failed, Errc::Io, "cannot remove the unfinished {}: {}", it->path().string(), failed.message());
  }
  DS_CHECK(!error, Errc::Io, "cannot read the directory {}: {}", dir, error.message());
}

void prepare_step(const std::string& dir, const Manifest& m) {
  prepare_run_directory(dir);
  const std::string path = unfinished_step(dir, m);
  std::error_code error;
  fs::create_directory(path, error);
  DS_CHECK(!error, Errc::Io, "cannot create the directory {}: {}", path, error.message());
}

void abandon_step(const std::string& dir, const Manifest& m) noexcept {
  std::error_code ignored;
  fs::remove_all(unfinished_step(dir, m), ignored);
}

FileRecord write_rank_file(const std::string& dir, const Manifest& m, i64 rank, const RankContents& contents) {
  const auto stored = [&](State s, i64 param) {
    return contents.states[s] && m.params[param].may_have(s) &&
           (s == State::Param || is_float(m.stored_dtype(State::Param, param)));
  };
  std::vector<Hdf5Dataset> datasets;
  std::set<std::pair<i64, i64>> seen;
  for (const PieceRange& p : contents.pieces) {
    DS_CHECK(p.param >= 0 && p.param < narrow<i64>(m.params.size()) && p.count >= 0 && p.begin >= 0, Errc::Internal,
             "piece {} + {} of parameter {} of {}", p.begin, p.count, p.param, m.params.size());
    if (p.count == 0) continue;
    const ParamEntry& entry = m.params[p.param];
    DS_CHECK(p.slice.whole() || p.begin < model::SliceMap(p.slice, entry.shape).numel(), Errc::Internal,
             "piece {} + {} of a slice {} of '{}'", p.begin, p.count, slice_text(p.slice, entry.shape), entry.name);
    const i64 first = first_element(m, p);
    DS_CHECK(seen.emplace(p.param, first).second, Errc::Internal, "element {} of '{}' is held twice", first,
             entry.name);
    for (State s : kStates) {
      if (!stored(s, p.param)) continue;
      datasets.push_back({{dataset_name(m, s, p), m.stored_dtype(s, p.param), {p.count}}, attributes_of(m, p)});
    }
  }
  for (const RankLocal& local : contents.rank_local)
    datasets.push_back({{fmt::format("rank_local/{}", local.name), DType::F32, {local.count}}});
  const std::string path = fmt::format("{}/{}", unfinished_step(dir, m), rank_file_name(rank));
  const std::vector<i64> offsets = create_hdf5(
      path, datasets,
      {{"checkpoint", m.id}, {"rank", std::to_string(rank)}, {"world_size", std::to_string(m.meta.world_size)}},
      contents.tick);

  FileRecord record;
  const File file = File::open_write(path);
  std::optional<DirectWriter> writer(file);
  auto offset = offsets.begin();
  std::vector<Dataset> of_piece;
  for (size_t i = 0; i < contents.pieces.size(); ++i) {
    const PieceRange& p = contents.pieces[i];
    if (p.count == 0) continue;
    PieceRecord& r = record.pieces.emplace_back(PieceRecord{p, {}});
    if (p.slice.whole()) r.slice = {};  // of whichever dim
    of_piece.clear();
    for (State s : kStates) {
      if (!stored(s, p.param)) continue;
      r.states[s] = DatasetRecord{*offset++, {}};
      of_piece.push_back({s, dtype_bytes(m.stored_dtype(s, p.param)), &*r.states[s]});
    }
    write_piece(*writer, p.count, of_piece,
                [&](State s, i64 first, i64 n) { return contents.elements(s, i, first, n); });
  }
  for (const RankLocal& local : contents.rank_local) {
    record.rank_local.push_back({local.name, std::max<i64>(*offset++, 0), local.count});  // -1 of none
    for (i64 first = 0; first < local.count; first += kChecksumBlock / 4)
      writer->write(record.rank_local.back().offset + first * 4, local.values + first,
                    std::min(local.count - first, kChecksumBlock / 4) * 4);
  }
  writer->flush();
  writer.reset();  // its memory: reading back takes as much
  file.sync();
  record.bytes = file.size();
  record.structure = structure_checksum(file, m, record.pieces);
  verify_file(file, m, record, contents.tick);
  return record;
}

// Reading back takes a block, and the pages that it is read through; writing the pages alone.
i64 rank_file_memory(i64 bytes, i64 datasets, i64 largest) noexcept {
  const i64 pages = std::min(bytes, PageBuffer::kBytes), block = std::min(largest, kChecksumBlock);
  return kHdf5Bytes + datasets * kDatasetBytes + pages + block;
}

i64 commit_memory(i64 params, i64 datasets) noexcept {
  return kHdf5Bytes + params * kViewBytes + datasets * kManifestBytes;
}

std::string commit_step(const std::string& dir, Manifest& m, const Tick& tick) {
  const std::string temp = unfinished_step(dir, m);
  validate_manifest(m, "the checkpoint to save", Errc::Internal);
  write_view(temp, m, tick);
  const std::string manifest = fmt::format("{}/{}", temp, kManifestName);
  replace_text_file(manifest, format_manifest(m));
  CheckpointReader written(temp);
  DS_CHECK(written.manifest().meta == m.meta, Errc::Corrupt, "{}: was not read back as it was written", manifest);

  const std::string target = fmt::format("{}/{}", dir, step_name(m.meta.step));
  const std::string latest = fmt::format("{}/{}", dir, kLatestName), name = step_name(m.meta.step) + "\n";
  const std::optional<std::string> before = read_if_there(latest);
  move_into_place(temp, target);
  try {
    sync_directory(dir);
    replace_text_file(latest, name);
  } catch (...) {  // a save that failed leaves nothing: the step goes back to where it is removed
    if (before != name && read_if_there(latest) == name) put_back(latest, before);
    if (before != name && read_if_there(latest) == name) throw;  // a disk that takes nothing back: the step is whole
    if (fs::exists(temp)) {
      ::renameat2(AT_FDCWD, temp.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE);
    } else {
      ::rename(target.c_str(), temp.c_str());
      ::rename(set_aside(temp).c_str(), target.c_str());
    }
    throw;
  }
  abandon_step(dir, m);  // what changed places with it
  std::error_code ignored;
  fs::remove_all(set_aside(temp), ignored);
  return target;
}

}  // namespace ds
