// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_io.h"

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/content_kind.h"
#include "base/gguf.h"
#include "config/trainer_output.h"
#include "ds/log.h"
#include "formats/coded_source.h"
#include "formats/fp8_source.h"
#include "formats/gguf_source.h"
#include "formats/hdf5.h"
#include "formats/safetensors.h"
#include "formats/torch_file.h"

namespace ds {

std::optional<i64> checked_product(const std::vector<i64>& shape, i64 scale) noexcept {
  i64 n = scale;
  bool empty = false, fits = true;
  for (i64 d : shape) {
    if (d < 0) return std::nullopt;
    empty |= d == 0;
    fits = fits && !__builtin_mul_overflow(n, d, &n);
  }
  if (empty) return 0;  // [2^40, 2^40, 0] has no elements, and no overflow
  return fits ? std::optional(n) : std::nullopt;
}

TensorSource::TensorSource(std::string path, std::vector<TensorInfo> tensors, std::vector<ForeignTensor> foreign,
                           std::map<std::string, std::string> metadata)
    : path_(std::move(path)),
      tensors_(std::move(tensors)),
      foreign_(std::move(foreign)),
      metadata_(std::move(metadata)) {
  for (size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
  DS_ASSERT(index_.size() == tensors_.size());
}

const TensorInfo* TensorSource::find(std::string_view name) const noexcept {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

size_t TensorSource::index_of(std::string_view name) const {
  const auto it = index_.find(name);
  if (it != index_.end()) return it->second;
  for (const ForeignTensor& f : foreign_) {
    DS_CHECK(f.name != name, Errc::Unavailable, "{}: tensor '{}' has elements of type {}, which cannot be read", path_,
             name, f.type);
  }
  throw Error(Errc::Mismatch, fmt::format("{}: there is no tensor '{}'", path_, name));
}

const TensorInfo& TensorSource::at(std::string_view name) const { return tensors_[index_of(name)]; }

void TensorSource::read(std::string_view name, i64 first_elem, i64 count, void* out) const {
  const size_t i = index_of(name);
  DS_ASSERT(first_elem >= 0 && count >= 0 && first_elem <= tensors_[i].numel() - count);
  if (count > 0) read_elements(i, first_elem, count, out);
}

CodedForm TensorSource::codes_of(std::string_view name) const {
  at(name);
  return {};
}

void TensorSource::read_codes(std::string_view name, i64, i64, void*) const {
  throw Error(Errc::Mismatch, fmt::format("{}: '{}' is not stored as codes", path_, at(name).name));
}

std::optional<FileFormat> format_of(std::string_view path) noexcept {
  if (path.ends_with(".safetensors")) return FileFormat::Safetensors;
  if (path.ends_with(".h5") || path.ends_with(".hdf5")) return FileFormat::Hdf5;
  return std::nullopt;
}

std::string_view format_name(FileFormat f) noexcept { return f == FileFormat::Safetensors ? "safetensors" : "hdf5"; }

namespace {

// Tensors that stand contiguous in one file.
class FileSource : public TensorSource {
 public:
  FileSource(File file, TensorTable table)
      : TensorSource(file.path(), std::move(table.tensors), std::move(table.foreign), std::move(table.metadata)),
        file_(std::move(file)),
        file_bytes_(file_->size()),
        offsets_(std::move(table.offsets)),
        inlined_(std::move(table.inlined)) {}

  void close() const override { file_.reset(); }

 private:
  const File& file() const {
    if (!file_) {
      file_ = File::open_read(path());
      DS_CHECK(file_->size() == file_bytes_, Errc::Corrupt, "{}: changed while it was read", path());
    }
    return *file_;
  }
  void read_elements(size_t tensor, i64 first_elem, i64 count, void* out) const override {
    const i64 size = dtype_bytes(list()[tensor].dtype);
    const i64 offset = offsets_[tensor];
    if (offset >= 0) {
      file().read_at(offset + first_elem * size, out, count * size);
    } else {
      std::memcpy(out, inlined_.data() + (-1 - offset) + first_elem * size, static_cast<size_t>(count * size));
    }
  }

  mutable std::optional<File> file_;
  i64 file_bytes_;
  std::vector<i64> offsets_;
  std::string inlined_;
};

std::unique_ptr<TensorSource> open_single(const std::string& path) {
  if (is_gguf(path)) return open_gguf(path);
  const std::optional<FileFormat> format = format_of(path);
  if (!format) {
    if (is_torch_name(path) || is_zip(path)) return open_torch(path);
    const std::string kind = kind_of_content(File::open_read(path));
    throw Error(Errc::Unavailable,
                fmt::format("{}: {}not a supported kind of file (.safetensors, .h5, .hdf5, .pt, .pth, .bin, "
                            ".ckpt, .gguf, or a .safetensors.index.json or .bin.index.json)",
                            path, kind.empty() ? "" : fmt::format("is {}; by its name ", kind)));
  }
  File file = File::open_read(path);
  TensorTable table = *format == FileFormat::Safetensors ? read_safetensors(file) : read_hdf5(file);
  return std::make_unique<FileSource>(std::move(file), std::move(table));
}

// Tensors of several files.
class ShardedSource : public TensorSource {
 public:
  ShardedSource(std::string path, std::vector<std::unique_ptr<TensorSource>> shards, std::vector<size_t> shard_of,
                TensorTable table)
      : TensorSource(std::move(path), std::move(table.tensors), std::move(table.foreign), std::move(table.metadata)),
        shards_(std::move(shards)),
        shard_of_(std::move(shard_of)) {}

  std::vector<std::string> files() const override {
    std::vector<std::string> all = {path()};
    for (const auto& shard : shards_) all.push_back(shard->path());
    return all;
  }
  std::vector<std::string> verify(const Tick& tick) const override {
    std::vector<std::string> bad;
    for (const auto& shard : shards_) {
      const std::vector<std::string> own = shard->verify(tick);
      bad.insert(bad.end(), own.begin(), own.end());
      shard->close();
    }
    return bad;
  }
  void close() const override {
    if (open_ < shards_.size()) shards_[open_]->close();
  }
  CodedForm codes_of(std::string_view name) const override { return shard_with(index_of(name)).codes_of(name); }
  void read_codes(std::string_view name, i64 first_row, i64 count, void* out) const override {
    shard_with(index_of(name)).read_codes(name, first_row, count, out);
  }

 private:
  const TensorSource& shard_with(size_t tensor) const {
    const size_t shard = shard_of_[tensor];
    if (shard != open_) close();  // tensors come shard by shard, and a model may have thousands
    open_ = shard;
    return *shards_[shard];
  }
  void read_elements(size_t tensor, i64 first_elem, i64 count, void* out) const override {
    shard_with(tensor).read(list()[tensor].name, first_elem, count, out);
  }

  mutable size_t open_ = static_cast<size_t>(-1);  // which shard, if any
  std::vector<std::unique_ptr<TensorSource>> shards_;
  std::vector<size_t> shard_of_;  // by tensor
};

// Each tensor is taken from the shard that the index names. What the shards hold beside is not listed; a warning says
// so.
std::unique_ptr<TensorSource> open_sharded(const std::string& index_path) {
  const std::map<std::string, std::string> file_of = read_weight_index(index_path);
  std::map<std::string, std::vector<std::string_view>> wanted;
  for (const auto& [name, file] : file_of) wanted[file].push_back(name);

  std::vector<std::unique_ptr<TensorSource>> shards;
  std::vector<size_t> shard_of;
  TensorTable all;
  i64 num_beside = 0;
  std::string beside;  // the first one
  for (const auto& [name, tensors] : wanted) {
    const std::string path = parent_directory(index_path) + "/" + name;
    DS_CHECK(std::filesystem::exists(path), Errc::Corrupt, "{}: shard {} is missing", index_path, name);
    std::unique_ptr<TensorSource> shard = open_single(path);
    size_t found = 0;
    const auto indexed = [&](const std::string& tensor) {
      const auto it = file_of.find(tensor);
      const bool here = it != file_of.end() && it->second == name;
      found += here ? 1 : 0;
      if (it == file_of.end() && num_beside++ == 0) beside = fmt::format("'{}' of {}", tensor, name);
      return here;
    };
    for (const TensorInfo& t : shard->list()) {
      if (!indexed(t.name)) continue;
      all.tensors.push_back(t);
      shard_of.push_back(shards.size());
    }
    for (const ForeignTensor& f : shard->foreign()) {
      if (indexed(f.name)) all.foreign.push_back(f);
    }
    DS_CHECK(found == tensors.size(), Errc::Corrupt, "{}: shard {} lacks {} of the {} tensors that the index names",
             index_path, name, tensors.size() - found, tensors.size());
    all.metadata.insert(shard->metadata().begin(), shard->metadata().end());
    shard->close();
    shards.push_back(std::move(shard));
  }
  if (num_beside > 0) {
    log_message(LogLevel::Warning, fmt::format("{}: does not name {} of the tensors in its shards, which are left out; "
                                               "the first is {}",
                                               index_path, num_beside, beside));
  }
  return std::make_unique<ShardedSource>(index_path, std::move(shards), std::move(shard_of), std::move(all));
}

}  // namespace

std::vector<std::string> published_weights_in(const std::string& dir) {
  std::error_code ignored;
  const auto is_file = [&](std::string_view name) {
    const std::filesystem::file_status status = std::filesystem::status(fmt::format("{}/{}", dir, name), ignored);
    return std::filesystem::exists(status) && !std::filesystem::is_directory(status);
  };
  for (const char* name : {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"})
    DS_CHECK(
        !is_file(name), Errc::Unavailable,
        "{}/{}: belongs to an adapter of PEFT, which is not supported: merge it into the weights (merge_and_unload), "
        "or move its files elsewhere to use the weights without it",
        dir, name);
  std::vector<std::string> found;
  for (const std::string_view name : kPublishedWeights) {
    if (is_file(name)) found.emplace_back(name);
  }
  return found;
}

void warn_of_several_weights(const std::string& dir) {
  const std::vector<std::string> files = published_weights_in(dir);
  if (files.size() > 1)
    log_message(LogLevel::Warning, fmt::format("{} contains {}: {} is read, as transformers does", dir,
                                               fmt::join(files, " and "), files.front()));
}

std::unique_ptr<TensorSource> open_source(const std::string& path) {
  struct stat st;
  if (::stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) {
    const std::vector<std::string> files = published_weights_in(path);
    DS_CHECK(!files.empty(), Errc::Io, "{}: no {} in this directory{}", path, fmt::join(kPublishedWeights, " and no "),
             trainer_hint(path));
    return open_source(fmt::format("{}/{}", path, files.front()));
  }
  const bool is_index = path.ends_with(".safetensors.index.json") || path.ends_with(".bin.index.json");
  return decode_weight_codes(decode_fp8(is_index ? open_sharded(path) : open_single(path)));
}

namespace {

template <class To, class From>
void convert_as(void* y, const void* x, i64 count) {
  auto* to = static_cast<To*>(y);
  const auto* from = static_cast<const From*>(x);
  for (i64 i = 0; i < count; ++i) to[i] = from_float<To>(to_float(from[i]));
}

template <class To>
void convert_to(void* y, DType from, const void* x, i64 count) {
  switch (from) {
    case DType::F32: return convert_as<To, float>(y, x, count);
    case DType::BF16: return convert_as<To, bf16>(y, x, count);
    case DType::F16: return convert_as<To, f16>(y, x, count);
    default: throw Error(Errc::Unavailable, fmt::format("no conversion from {}", dtype_name(from)));
  }
}

// To fp32 rounded to odd: what is rounded again, to a shorter type, is rounded as if once (Boldo, Melquiond: "Emulation
// of FMA and correctly rounded sums: proved algorithms using rounding to odd").
float round_to_odd(double x) noexcept {
  const float near = static_cast<float>(x);
  const u32 bits = std::bit_cast<u32>(near);
  const bool exact = static_cast<double>(near) == x || x != x;
  if (exact || (bits & 1u) != 0) return near;
  const bool grew = std::abs(static_cast<double>(near)) > std::abs(x);
  return std::bit_cast<float>(grew ? bits - 1 : bits + 1);
}

void convert_doubles(DType to, void* y, const double* x, i64 count) {
  const auto each = [&]<class To>(To* out) {
    for (i64 i = 0; i < count; ++i) {
      if constexpr (std::is_same_v<To, float>) {
        out[i] = static_cast<float>(x[i]);
      } else {
        out[i] = from_float<To>(round_to_odd(x[i]));
      }
    }
  };
  switch (to) {
    case DType::F32: return each(static_cast<float*>(y));
    case DType::BF16: return each(static_cast<bf16*>(y));
    case DType::F16: return each(static_cast<f16*>(y));
    default: throw Error(Errc::Unavailable, fmt::format("no conversion from fp64 to {}", dtype_name(to)));
  }
}

}  // namespace

void convert_elements(DType to, void* y, DType from, const void* x, i64 count) {
  if (to == from) {
    std::memcpy(y, x, static_cast<size_t>(count * dtype_bytes(to)));
    return;
  }
  if (from == DType::F64) return convert_doubles(to, y, static_cast<const double*>(x), count);
  switch (to) {
    case DType::F32: return convert_to<float>(y, from, x, count);
    case DType::BF16: return convert_to<bf16>(y, from, x, count);
    case DType::F16: return convert_to<f16>(y, from, x, count);
    default: throw Error(Errc::Unavailable, fmt::format("no conversion to {}", dtype_name(to)));
  }
}

bool can_convert(DType to, DType from) noexcept {
  return to == from || (to <= DType::F16 && (from <= DType::F16 || from == DType::F64));
}

namespace {

// Infinities and NaNs among `count` elements, by their exponent.
template <class Bits>
i64 count_nonfinite(const void* data, i64 count, Bits exponent) noexcept {
  const auto* x = static_cast<const Bits*>(data);
  i64 n = 0;
  for (i64 i = 0; i < count; ++i) n += (x[i] & exponent) == exponent ? 1 : 0;
  return n;
}

i64 count_nonfinite(DType t, const void* data, i64 count) noexcept {
  switch (t) {
    case DType::F64: return count_nonfinite(data, count, u64{0x7ff0'0000'0000'0000});
    case DType::F32: return count_nonfinite(data, count, u32{0x7f80'0000});
    case DType::BF16: return count_nonfinite(data, count, u16{0x7f80});
    case DType::F16: return count_nonfinite(data, count, u16{0x7c00});
    default: return 0;
  }
}

}  // namespace

i64 count_overflows(DType to, const void* y, DType from, const void* x, i64 count) {
  const i64 after = count_nonfinite(to, y, count);
  return after == 0 ? 0 : after - count_nonfinite(from, x, count);
}

}  // namespace ds
