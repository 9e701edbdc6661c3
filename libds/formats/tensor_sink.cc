// SPDX-License-Identifier: Apache-2.0
// Sinks of tensors: one file, several files with an index, or a stream.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/limits.h"
#include "formats/hdf5.h"
#include "formats/safetensors.h"

namespace ds {
namespace {

// Checked by all sinks: tensors are complete, each written from front to back.
class CheckedSink : public TensorSink {
 public:
  void write(std::string_view name, i64 first_elem, i64 count, const void* data) final {
    const auto it = index_.find(name);
    DS_ASSERT(it != index_.end());
    const size_t i = it->second;
    DS_ASSERT(first_elem == written_[i] && count >= 0 && count <= tensors_[i].numel() - first_elem);
    put(i, first_elem, count, data);
    written_[i] += count;
  }
  void finish() final {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      DS_CHECK(written_[i] == tensors_[i].numel(), Errc::Internal, "{}: only {} of {} elements of '{}' were written",
               name_, written_[i], tensors_[i].numel(), tensors_[i].name);
    }
    complete();
  }
  const std::vector<size_t>& order() const noexcept final { return order_; }

 protected:
  CheckedSink(std::string name, std::vector<TensorInfo> tensors)
      : name_(std::move(name)), tensors_(std::move(tensors)), order_(tensors_.size()), written_(tensors_.size(), 0) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      DS_CHECK(!tensors_[i].name.empty() && index_.emplace(tensors_[i].name, i).second, Errc::Internal,
               "{}: tensor '{}' is named twice or not at all", name_, tensors_[i].name);
    }
    std::iota(order_.begin(), order_.end(), size_t{0});
  }
  virtual void put(size_t tensor, i64 first_elem, i64 count, const void* data) = 0;
  virtual void complete() = 0;

  // Tensors by where they stand in a file.
  void order_by(const std::vector<i64>& offsets) {
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
  }
  i64 bytes_of(size_t tensor, i64 elems) const noexcept { return elems * dtype_bytes(tensors_[tensor].dtype); }

  std::string name_;
  std::vector<TensorInfo> tensors_;
  std::vector<size_t> order_;

 private:
  std::vector<i64> written_;
  std::unordered_map<std::string_view, size_t> index_;  // views of tensors_[i].name
};

class FileSink : public CheckedSink {
 public:
  FileSink(const std::string& path, FileFormat format, std::vector<TensorInfo> tensors,
           const std::map<std::string, std::string>& metadata, const Tick& tick)
      : CheckedSink(path, std::move(tensors)), pending_(path), writer_(pending_.file()) {
    if (format == FileFormat::Safetensors) {
      const std::string header = make_safetensors_header(tensors_, metadata, &offsets_);
      pending_.file().write_at(0, header.data(), narrow<i64>(header.size()));
    } else {
      std::vector<std::string_view> names;
      for (const TensorInfo& t : tensors_) names.push_back(t.name);
      check_hdf5_names(names, path);
      std::vector<Hdf5Dataset> datasets;
      for (const TensorInfo& t : tensors_) datasets.push_back({t});
      offsets_ = create_hdf5(pending_.file(), datasets, metadata, tick);
    }
    order_by(offsets_);
  }

 private:
  void put(size_t tensor, i64 first_elem, i64 count, const void* data) override {
    writer_.write(offsets_[tensor] + bytes_of(tensor, first_elem), data, bytes_of(tensor, count));
  }
  void complete() override {
    writer_.flush();
    pending_.commit();
  }

  std::vector<i64> offsets_;
  PendingFile pending_;
  DirectWriter writer_;
};

class StreamSink : public CheckedSink {
 public:
  StreamSink(int fd, const std::string& name, std::vector<TensorInfo> tensors,
             const std::map<std::string, std::string>& metadata)
      : CheckedSink(name, std::move(tensors)), fd_(fd) {
    std::vector<i64> offsets;
    const std::string header = make_safetensors_header(tensors_, metadata, &offsets);
    order_by(offsets);
    send(header.data(), narrow<i64>(header.size()));
  }

 private:
  void put(size_t tensor, i64 first_elem, i64 count, const void* data) override {
    if (first_elem == 0) {
      while (order_[next_] != tensor && tensors_[order_[next_]].bytes() == 0) ++next_;
      DS_ASSERT(order_[next_] == tensor);  // a stream cannot go back
      ++next_;
    }
    send(data, bytes_of(tensor, count));
  }
  void complete() override {}

  void send(const void* data, i64 bytes) const {
    const auto* p = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t n = ::write(fd_, p, static_cast<size_t>(bytes));
      if (n < 0 && errno == EAGAIN) {
        pollfd ready{fd_, POLLOUT, 0};
        ::poll(&ready, 1, -1);
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      DS_CHECK(n >= 0, Errc::Io, "cannot write to {}: {}", name_, system_reason(errno));
      p += n;
      bytes -= n;
    }
  }

  int fd_;
  size_t next_ = 0;  // in order_
};

class ShardedSink : public CheckedSink {
 public:
  ShardedSink(std::string dir, i64 max_shard_bytes, std::vector<TensorInfo> tensors,
              std::map<std::string, std::string> metadata)
      : CheckedSink(std::move(dir), std::move(tensors)), metadata_(std::move(metadata)), shard_of_(tensors_.size()) {
    i64 bytes = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const i64 n = tensors_[i].bytes();
      if (shards_.empty() || (bytes > 0 && bytes > max_shard_bytes - n)) {
        shards_.emplace_back();
        bytes = 0;
      }
      bytes += n;
      shard_of_[i] = shards_.size() - 1;
      shards_.back().push_back(i);
    }
    if (shards_.empty()) shards_.emplace_back();  // a model without tensors is still a file
    // A shard's own order is that of its offsets: larger element types first.
    order_.clear();
    for (const std::vector<size_t>& shard : shards_) {
      std::vector<i64> offsets;
      make_safetensors_header(infos(shard), metadata_, &offsets);
      std::vector<size_t> in_shard(shard.size());
      std::iota(in_shard.begin(), in_shard.end(), size_t{0});
      std::stable_sort(in_shard.begin(), in_shard.end(), [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
      for (size_t k : in_shard) order_.push_back(shard[k]);
    }
  }

 private:
  std::vector<TensorInfo> infos(const std::vector<size_t>& shard) const {
    std::vector<TensorInfo> list;
    for (size_t i : shard) list.push_back(tensors_[i]);
    return list;
  }
  std::string file_name(size_t shard) const {
    if (shards_.size() == 1) return "model.safetensors";
    return fmt::format("model-{:05d}-of-{:05d}.safetensors", shard + 1, shards_.size());
  }
  // Shards are filled one after the other, so that one at a time is open.
  void open(size_t shard) {
    while (next_ <= shard) {
      if (file_) file_->finish();
      file_ = create_sink(fmt::format("{}/{}", name_, file_name(next_)), FileFormat::Safetensors, infos(shards_[next_]),
                          metadata_);
      ++next_;
    }
  }
  void put(size_t tensor, i64 first_elem, i64 count, const void* data) override {
    open(shard_of_[tensor]);
    file_->write(tensors_[tensor].name, first_elem, count, data);
  }
  void complete() override {
    open(shards_.size() - 1);
    file_->finish();
    if (shards_.size() == 1) return;
    nlohmann::ordered_json index = {{"metadata", {{"total_size", i64{0}}}}, {"weight_map", nlohmann::json::object()}};
    nlohmann::json map = nlohmann::json::object();  // sorted by name, as transformers writes it
    i64 total = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      total += tensors_[i].bytes();
      map[tensors_[i].name] = file_name(shard_of_[i]);
    }
    index["metadata"]["total_size"] = total;
    index["weight_map"] = std::move(map);
    replace_text_file(name_ + "/model.safetensors.index.json", index.dump(2) + "\n");
  }

  std::map<std::string, std::string> metadata_;
  std::vector<size_t> shard_of_;  // by tensor
  std::vector<std::vector<size_t>> shards_;
  std::unique_ptr<TensorSink> file_;
  size_t next_ = 0;  // shards opened so far
};

}  // namespace

std::unique_ptr<TensorSink> create_sink(const std::string& path, FileFormat format, std::vector<TensorInfo> tensors,
                                        const std::map<std::string, std::string>& metadata, const Tick& tick) {
  return std::make_unique<FileSink>(path, format, std::move(tensors), metadata, tick);
}

std::unique_ptr<TensorSink> create_stream_sink(int fd, const std::string& name, std::vector<TensorInfo> tensors,
                                               const std::map<std::string, std::string>& metadata) {
  return std::make_unique<StreamSink>(fd, name, std::move(tensors), metadata);
}

std::unique_ptr<TensorSink> create_sharded_sink(const std::string& dir, i64 max_shard_bytes,
                                                std::vector<TensorInfo> tensors,
                                                const std::map<std::string, std::string>& metadata) {
  return std::make_unique<ShardedSink>(dir, max_shard_bytes, std::move(tensors), metadata);
}

}  // namespace ds
