// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/deepspeed.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/file.h"
#include "checkpoint/deepspeed_table.h"
#include "checkpoint/hf_directory.h"
#include "ds/log.h"

namespace ds {
namespace {

constexpr i64 kConvertElems = i64{1} << 18;

class DeepspeedReader final : public StateSource {
 public:
  DeepspeedReader(std::string path, DeepspeedTable table) : path_(std::move(path)), table_(std::move(table)) {}

  const std::string& path() const noexcept override { return path_; }
  const CheckpointMeta& meta() const noexcept override { return table_.meta; }
  const std::vector<ParamEntry>& params() const noexcept override { return table_.params; }
  bool has(State s) const noexcept override { return table_.has[s]; }

  std::vector<std::string> verify(const Tick& tick) override {
    std::vector<std::string> bad;
    for (size_t i = 0; i < table_.files.size(); ++i) note_damage(bad, [&] { open(i).verify(tick); });
    for (const std::string& path : table_.unread) note_damage(bad, [&] { TorchFile(path).verify(tick); });
    return bad;
  }

 protected:
  void read_stored(State state, i64 param, i64 first, i64 count, char* out) override {
    const DType dtype = stored_dtype(state, param);
    const i64 size = dtype_bytes(dtype);
    const auto& list = table_.segments[state][param];
    if (list.empty()) {
      std::memset(out, 0, static_cast<size_t>(count * size));
      return;
    }
    auto s = std::upper_bound(list.begin(), list.end(), first,
                              [](i64 x, const DeepspeedSegment& segment) { return x < segment.begin + segment.count; });
    for (const i64 last = first + count; first < last; ++s) {
      DS_ASSERT(s != list.end() && s->begin <= first);
      const i64 end = std::min(last, s->begin + s->count);
      read_segment(*s, dtype, first - s->begin, end - first, out);
      out += (end - first) * size;
      first = end;
    }
  }

 private:
  TorchFile& open(size_t i) {
    TorchFile& file = *table_.files[i];
    if (!file.is_open() && ++num_open_ > max_open_) {
      for (const auto& f : table_.files) f->close();
      num_open_ = 1;
    }
    return file;
  }

  void read_segment(const DeepspeedSegment& s, DType dtype, i64 first, i64 count, char* out) {
    const TorchFile& file = open(s.file);
    const DType stored = *s.tensor->dtype;
    if (stored == dtype) return file.read(*s.tensor, s.offset + first, count, out);
    for (i64 done = 0; done < count; done += kConvertElems) {
      const i64 n = std::min(kConvertElems, count - done);
      buffer_.resize(n * dtype_bytes(stored));
      file.read(*s.tensor, s.offset + first + done, n, buffer_.data());
      convert_elements(dtype, out + done * dtype_bytes(dtype), stored, buffer_.data(), n);
    }
  }

  std::string path_;
  DeepspeedTable table_;
  i64 num_open_ = 0, max_open_ = open_files_share();
  std::vector<char> buffer_;
};

}  // namespace

bool is_deepspeed(const std::string& dir) {
  std::error_code ignored;
  return is_deepspeed_tag(dir) || std::filesystem::exists(dir + "/zero_to_fp32.py", ignored) ||
         !list_deepspeed_tags(dir).empty();
}

std::unique_ptr<StateSource> open_deepspeed(const std::string& dir, const std::string& tag) {
  const std::string path = find_deepspeed_tag(dir, tag);
  const DeepspeedFiles files = list_deepspeed_files(path);
  DeepspeedTable table = read_deepspeed_table(files);
  if (!files.experts.empty())
    log_message(LogLevel::Warning,
                fmt::format("{}: a checkpoint with experts; the optimizer's states in it are not read", path));
  table.meta.model_config_json = find_hf_config(parent_directory(path));  // as trainers leave it
  return std::make_unique<DeepspeedReader>(path, std::move(table));
}

}  // namespace ds
