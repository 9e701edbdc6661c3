// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/state_source.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/json.h"
#include "checkpoint/deepspeed.h"
#include "checkpoint/hf_directory.h"
#include "checkpoint/reader.h"
#include "checkpoint/tensor_state.h"
#include "config/trainer_output.h"
#include "ds/log.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

constexpr i64 kConvertElems = i64{1} << 20;
// Runs of a slice come in one read as long as that is not more than a tile and the gaps between them are small.
constexpr i64 kTileBytes = i64{8} << 20, kGapBytes = i64{256} << 10;

// A run of ours or one of its steps.
bool is_ours(const std::string& dir) {
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (name == kManifestName || parse_step_name(name)) return true;
  }
  return false;
}

std::unique_ptr<StateSource> open_ours(const std::string& dir, const std::string& tag) {
  DS_CHECK(tag.empty() || parse_step_name(tag), Errc::Config, "{}: the steps of a run are named {}, ..., not '{}'", dir,
           step_name(100), tag);
  DS_CHECK(tag.empty() || fs::exists(dir + "/" + tag), Errc::Io, "{}: there is no {}", dir, tag);
  return std::make_unique<CheckpointReader>(tag.empty() ? find_checkpoint(dir) : dir + "/" + tag);
}

}  // namespace

void StateSource::read(State state, DType dtype, i64 param, const model::ParamSlice& slice, i64 first, i64 count,
                       void* out) {
  const bool has_master = has(State::Master) && params()[param].may_have(State::Master);
  if (state == State::Param && dtype != stored_dtype(state, param) && has_master) {
    state = State::Master;
  } else if (state == State::Master && !has_master) {
    state = State::Param;
  }
  const DType stored = stored_dtype(state, param);
  auto* target = static_cast<char*>(out);
  const auto read_some = [&](i64 begin, i64 n, char* elements) {
    if (slice.whole()) return read_stored(state, param, begin, n, elements);
    read_stored_slice(state, param, slice, begin, n, elements);
  };
  if (stored == dtype) return read_some(first, count, target);
  std::vector<char> buffer;
  for (i64 done = 0; done < count; done += kConvertElems) {
    const i64 n = std::min(kConvertElems, count - done);
    buffer.resize(n * dtype_bytes(stored));
    read_some(first + done, n, buffer.data());
    char* const converted = target + done * dtype_bytes(dtype);
    convert_elements(dtype, converted, stored, buffer.data(), n);
    const i64 lost = count_overflows(dtype, converted, stored, buffer.data(), n);
    if (lost > 0 && overflow_.elems == 0) overflow_.first_param = param;
    overflow_.elems += lost;
  }
}

void StateSource::read_stored_slice(State state, i64 param, const model::ParamSlice& slice, i64 first, i64 count,
                                    char* out) {
  const model::SliceMap map(slice, params()[param].shape);
  const i64 size = dtype_bytes(stored_dtype(state, param));
  std::vector<char> buffer;
  struct Tile {
    i64 local, global, local_end, global_end;
  };
  const auto read_tile = [&](const Tile& t) {
    const i64 wanted = t.local_end - t.local, between = t.global_end - t.global;
    char* const to = out + (t.local - first) * size;
    if (wanted == between) return read_stored(state, param, t.global, between, to);
    buffer.resize(between * size);
    read_stored(state, param, t.global, between, buffer.data());
    map.for_each_run(t.local, wanted, [&](i64 local, i64 global, i64 n) {
      std::memcpy(out + (local - first) * size, buffer.data() + (global - t.global) * size,
                  static_cast<size_t>(n * size));
    });
  };
  std::optional<Tile> tile;
  map.for_each_run(first, count, [&](i64 local, i64 global, i64 n) {
    const bool joins =
        tile && (global - tile->global_end) * size <= kGapBytes && (global + n - tile->global) * size <= kTileBytes;
    if (tile && !joins) read_tile(*tile);
    if (!joins) tile = {local, global, local, global};
    tile->local_end = local + n;
    tile->global_end = global + n;
  });
  if (tile) read_tile(*tile);
}

std::string first_lines(const std::vector<std::string>& lines, std::string_view separator) {
  constexpr size_t kMost = 20;
  if (lines.size() <= kMost) return fmt::format("{}", fmt::join(lines, separator));
  return fmt::format("{}{}and {} more", fmt::join(lines.begin(), lines.begin() + kMost, separator), separator,
                     lines.size() - kMost);
}

const std::vector<ForeignTensor>& StateSource::foreign() const noexcept {
  static const std::vector<ForeignTensor> none;
  return none;
}

void warn_of_overflow(std::initializer_list<const StateSource*> readers, const std::string& output) {
  i64 elems = 0;
  std::string first;
  for (const StateSource* s : readers) {
    if (s == nullptr || s->overflow().elems == 0) continue;
    if (elems == 0) first = s->params()[s->overflow().first_param].name;
    elems += s->overflow().elems;
  }
  if (elems == 0) return;
  log_message(LogLevel::Warning,
              fmt::format("{}: {} weights exceed the range of the type and are now infinite, among them some of '{}'",
                          output, elems, first));
}

void check_readable(const StateSource& state, const std::vector<std::string>& only) {
  for (const ForeignTensor& f : state.foreign()) {
    const bool wanted = only.empty() || std::ranges::any_of(only, [&](const std::string& pattern) {
                          return ::fnmatch(pattern.c_str(), f.name.c_str(), 0) == 0;
                        });
    DS_CHECK(!wanted, Errc::Unavailable, "{}: tensor '{}' has elements of type {}, which cannot be read", state.path(),
             f.name, f.type);
  }
}

bool is_checkpoint(const std::string& path) { return fs::is_directory(path) && (is_ours(path) || is_deepspeed(path)); }

std::unique_ptr<StateSource> open_state(const std::string& path, const std::string& tag) {
  DS_CHECK(fs::exists(path), Errc::Io, "{}: no such file or directory", path);
  const bool is_directory = fs::is_directory(path);
  if (is_directory && is_ours(path)) return open_ours(path, tag);
  if (is_directory && is_deepspeed(path)) return open_deepspeed(path, tag);
  DS_CHECK(tag.empty(), Errc::Config, "{}: not a directory of steps, so '{}' cannot be chosen", path, tag);
  DS_CHECK(!is_directory || !published_weights_in(path).empty(), Errc::Io,
           "{}: no checkpoint and no model in this directory (step-*, {}){}", path, fmt::join(kPublishedWeights, ", "),
           trainer_hint(path));
  DS_CHECK(is_directory || !is_deepspeed_shard(path), Errc::Unavailable,
           "{}: one rank's part of a DeepSpeed checkpoint; name its directory", path);
  if (is_directory) warn_of_several_weights(path);
  return make_tensor_state(open_source(path), is_directory ? read_hf_config(path) : stored_config(path));
}

}  // namespace ds
