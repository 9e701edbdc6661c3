// SPDX-License-Identifier: Apache-2.0
// Merging is a copy from a source to a sink: CheckpointSource shows a saved step as whole tensors.

#include <chrono>
#include <cstring>
#include <filesystem>

#include "checkpoint/reader.h"
#include "ds/checkpoint.h"
#include "formats/tensor_io.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

constexpr i64 kChunkBytes = i64{16} << 20;

// One tensor that a merge shows: which state of which parameter.
struct Column {
  State state;
  i64 param;
};

class CheckpointSource : public TensorSource {
 public:
  CheckpointSource(CheckpointReader& reader, std::vector<TensorInfo> tensors, std::vector<Column> columns)
      : TensorSource(reader.path(), std::move(tensors)), reader_(reader), columns_(std::move(columns)) {}

 private:
  void read_elements(size_t tensor, i64 first_elem, i64 count, void* out) const override {
    const Column& c = columns_[tensor];
    reader_.read(c.state, list()[tensor].dtype, c.param, first_elem, count, out);
  }

  CheckpointReader& reader_;
  std::vector<Column> columns_;
};

std::unique_ptr<TensorSource> open_columns(CheckpointReader& reader, DType dtype, bool optimizer) {
  const Manifest& m = reader.manifest();
  std::vector<TensorInfo> tensors;
  std::vector<Column> columns;
  for (State s : kStates) {
    if (s != State::Param && (!optimizer || !m.has(s))) continue;
    for (size_t i = 0; i < m.params.size(); ++i) {
      const ParamEntry& p = m.params[i];
      if (!p.tied_to.empty()) continue;
      tensors.push_back(s == State::Param
                            ? TensorInfo{p.name, dtype, p.shape}
                            : TensorInfo{fmt::format("optimizer.{}.{}", kStateNames[static_cast<size_t>(s)], p.name),
                                         DType::F32, p.shape});
      columns.push_back({s, narrow<i64>(i)});
    }
  }
  return std::make_unique<CheckpointSource>(reader, std::move(tensors), std::move(columns));
}

// Calls body(info, first, count) for chunks that together cover every tensor of the source.
template <class F>
void for_each_chunk(const TensorSource& source, F&& body) {
  for (const TensorInfo& t : source.list()) {
    const i64 step = kChunkBytes / dtype_bytes(t.dtype), n = t.numel();
    for (i64 first = 0; first < n; first += step) body(t, first, std::min(step, n - first));
  }
}

void compare(const TensorSource& expected, const std::string& output) {
  const std::unique_ptr<TensorSource> actual = open_source(output);
  DS_CHECK(actual->list().size() == expected.list().size(), Errc::Corrupt, "{}: {} tensors, {} were written", output,
           actual->list().size(), expected.list().size());
  std::vector<char> a, b;
  for_each_chunk(expected, [&](const TensorInfo& t, i64 first, i64 count) {
    const auto bytes = static_cast<size_t>(count * dtype_bytes(t.dtype));
    DS_CHECK(actual->at(t.name) == t, Errc::Corrupt, "{}: '{}' has another shape or dtype than was written", output,
             t.name);
    a.resize(bytes);
    b.resize(bytes);
    expected.read(t.name, first, count, a.data());
    actual->read(t.name, first, count, b.data());
    DS_CHECK(std::memcmp(a.data(), b.data(), bytes) == 0, Errc::Corrupt,
             "{}: '{}' reads back differently from element {} on", output, t.name, first);
  });
}

FileFormat output_format(const std::string& output, const std::string& format) {
  if (format == "safetensors") return FileFormat::Safetensors;
  if (format == "hdf5") return FileFormat::Hdf5;
  DS_CHECK(format != "hf", Errc::Unavailable, "format 'hf', a directory as transformers writes it, is not there yet");
  DS_CHECK(format.empty(), Errc::Config, "format '{}' is not one of safetensors, hdf5", format);
  const std::optional<FileFormat> by_suffix = format_of(output);
  DS_CHECK(by_suffix.has_value(), Errc::Config,
           "{}: the suffix says no format; use .safetensors, .h5 or .hdf5, or name the format", output);
  return *by_suffix;
}

// A saved step, or what a save that was cut off left of one.
bool is_step(const fs::path& dir) {
  return parse_step_name(dir.filename().string()) || (fs::exists(dir / kManifestName) && fs::exists(dir / kViewName));
}

bool is_run(const fs::path& dir) {
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.path().filename() == "latest" || parse_step_name(entry.path().filename().string())) return true;
  }
  return false;
}

// Where the output goes, through links: to a new file or in place of a regular one, never of a part of a run.
std::string output_target(const std::string& output) {
  const bool is_stream = output == "-" || output == "/dev/stdout" || output == "/dev/stderr" ||
                         output.starts_with("/dev/fd/") || output.starts_with("/proc/");
  DS_CHECK(!is_stream, Errc::Unavailable, "{}: a model on a stream is not there yet; name a file", output);
  const std::string target = follow_links(output), parent = parent_directory(target);
  std::error_code error;
  const fs::file_status status = fs::status(target, error);
  DS_CHECK(!fs::is_directory(status), Errc::Config, "{}: is a directory; the output is one file", output);
  DS_CHECK(!fs::exists(status) || fs::is_regular_file(status), Errc::Config,
           "{}: is a device, a pipe or a socket; the output is a regular file", output);
  DS_CHECK(fs::is_directory(parent, error), Errc::Config, "{}: there is no directory {}", output, parent);
  const fs::path folder = fs::canonical(parent), name = fs::path(target).filename();
  for (fs::path dir = folder; dir != dir.root_path(); dir = dir.parent_path()) {
    DS_CHECK(!is_step(dir), Errc::Config, "{}: lies inside a checkpoint step, which must stay as it was saved", output);
  }
  for (const std::string_view part : {"latest", "metrics.jsonl", "lock"}) {
    DS_CHECK(name != part || !is_run(folder), Errc::Config, "{}: is the run's own file; choose another name", output);
  }
  return target;
}

}  // namespace

MergeResult merge_checkpoint(const std::string& step_dir, const std::string& output, const MergeOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const FileFormat format = output_format(output, options.format);
  const std::string target = output_target(output);
  CheckpointReader reader(step_dir);
  const Manifest& m = reader.manifest();
  const DType dtype = options.dtype.value_or(m.meta.work_dtype);
  DS_CHECK(dtype == DType::F32 || dtype == DType::BF16 || dtype == DType::F16, Errc::Config,
           "weights can be written as fp32, bf16 or fp16, not as {}", dtype_name(dtype));
  DS_CHECK(!options.optimizer || m.has(State::ExpAvg), Errc::Mismatch, "{}: holds no optimizer state", step_dir);
  if (options.verify) {
    const std::vector<std::string> bad = reader.verify();
    DS_CHECK(bad.empty(), Errc::Corrupt, "{}", fmt::join(bad, "\n"));
  }
  for (i64 r = 0; r < m.meta.world_size; ++r) reader.check_structure(r);

  const std::unique_ptr<TensorSource> source = open_columns(reader, dtype, options.optimizer);
  MergeResult result;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  for (const ParamEntry& p : m.params) {
    if (p.tied_to.empty()) {
      result.num_parameters += *checked_product(p.shape);
    } else {
      metadata[p.name] = p.tied_to;
      result.tied.push_back(p.name);
    }
  }
  const std::unique_ptr<TensorSink> sink = create_sink(target, format, source->list(), metadata);
  std::vector<char> chunk;
  for_each_chunk(*source, [&](const TensorInfo& t, i64 first, i64 count) {
    chunk.resize(static_cast<size_t>(count * dtype_bytes(t.dtype)));
    source->read(t.name, first, count, chunk.data());
    sink->write(t.name, first, count, chunk.data());
  });
  sink->finish();
  if (options.verify) compare(*source, output);

  result.step_dir = step_dir;
  result.output = output;
  result.format = format_name(format);
  result.step = m.meta.step;
  result.dtype = dtype;
  result.num_tensors = narrow<i64>(source->list().size());
  result.bytes = narrow<i64>(fs::file_size(output));
  result.verified = options.verify;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace ds
