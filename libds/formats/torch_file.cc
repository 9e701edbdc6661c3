// SPDX-License-Identifier: Apache-2.0
#include "formats/torch_file.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "base/content_kind.h"

namespace ds {
namespace {

using Kind = PickleValue::Kind;

constexpr i64 kMaxPickleBytes = i64{64} << 20;
constexpr int kMaxDepth = 32;
constexpr size_t kMaxVisits = size_t{1} << 20;
constexpr size_t kMaxName = 4096;
constexpr size_t kMaxNameBytes = size_t{256} << 20;

std::string read_entry(const File& file, const ZipEntry& entry, i64 max_bytes) {
  DS_CHECK(entry.bytes <= max_bytes, Errc::Corrupt, "{}: entry '{}' has {} bytes, at most {} are read", file.path(),
           entry.name, entry.bytes, max_bytes);
  std::string text(static_cast<size_t>(entry.bytes), '\0');
  file.read_at(entry.offset, text.data(), entry.bytes);
  return text;
}

// The kind of file, if it is not a zip archive.
void check_is_zip(const File& file) {
  char head[16] = {};
  const i64 bytes = std::min<i64>(file.size(), sizeof head);
  file.read_at(0, head, bytes);
  const std::string_view start(head, static_cast<size_t>(bytes));
  if (start.starts_with("PK\3\4")) return;
  DS_CHECK(
      !(start.size() > 1 && start[0] == '\x80' && start[1] <= 5), Errc::Unavailable,
      "{}: a plain pickle, as torch.save wrote before 1.6; load it with a newer torch and save it again, or convert "
      "it to safetensors",
      file.path());
  throw Error(Errc::Corrupt, not_of_kind(file, "a file of torch.save", "not a file of torch.save (no zip archive)"));
}

}  // namespace

bool is_torch_name(std::string_view path) noexcept {
  return path.ends_with(".pt") || path.ends_with(".pth") || path.ends_with(".bin") || path.ends_with(".ckpt");
}

bool is_zip(const std::string& path) {
  const File file = File::open_read(path);
  char head[4] = {};
  if (file.size() < 4) return false;
  file.read_at(0, head, 4);
  return std::string_view(head, 4) == "PK\3\4";
}

TorchFile::TorchFile(const std::string& path) : path_(path), file_(File::open_read(path)), file_bytes_(file_->size()) {
  check_is_zip(*file_);
  entries_ = read_zip(*file_);
  const ZipEntry* data = nullptr;
  for (const ZipEntry& e : entries_) {
    if (!e.name.ends_with("/data.pkl") || e.name.find('/') != e.name.size() - 9) continue;
    DS_CHECK(data == nullptr, Errc::Corrupt, "{}: two pickles, '{}' and '{}'", path, data->name, e.name);
    data = &e;
  }
  DS_CHECK(data != nullptr, Errc::Corrupt, "{}: a zip archive, but not of torch.save (there is no data.pkl)", path);
  const std::string prefix = data->name.substr(0, data->name.size() - 8);  // with its slash
  saved_as_ = prefix.substr(0, prefix.size() - 1);
  for (const ZipEntry& e : entries_) {
    DS_CHECK(e.name.starts_with(prefix), Errc::Corrupt, "{}: entry '{}' lies outside '{}'", path, e.name, prefix);
    const std::string_view name = std::string_view(e.name).substr(prefix.size());
    DS_CHECK(!name.starts_with("code/") && name != "constants.pkl", Errc::Unavailable,
             "{}: a TorchScript archive, which is a program; save the state_dict() of the module instead", path);
    if (name == "byteorder") {
      DS_CHECK(read_entry(*file_, e, 64) == "little", Errc::Unavailable,
               "{}: its data is not little-endian (entry '{}'); save it on a little-endian machine", path, e.name);
    }
    if (name.starts_with("data/")) storages_.emplace(name.substr(5), &e);
  }
  check_crc32(*file_, *data);
  pickle_ = std::make_unique<Pickle>(read_entry(*file_, *data, kMaxPickleBytes), fmt::format("{}: data.pkl", path));
  for (const PickleValue& v : pickle_->values()) {
    if (!v.is(Kind::Storage)) continue;
    const auto it = storages_.find(v.text);
    DS_CHECK(it != storages_.end(), Errc::Corrupt, "{}: there is no entry for storage '{}'", path,
             v.text.substr(0, 64));
    i64 bytes;
    const bool fits = !__builtin_mul_overflow(v.integer, torch_storage_bytes(v.state->text), &bytes);
    DS_CHECK(fits && it->second->bytes == bytes, Errc::Corrupt,
             "{}: storage '{}' has {} elements of {}, but its entry {} bytes", path, v.text, v.integer, v.state->text,
             it->second->bytes);
  }
}

const File& TorchFile::file() const {
  if (!file_) {
    file_ = File::open_read(path_);
    DS_CHECK(file_->size() == file_bytes_, Errc::Corrupt, "{}: changed while it was read", path_);
  }
  return *file_;
}

void TorchFile::verify(const Tick& tick) const {
  for (const ZipEntry& e : entries_) check_crc32(file(), e, tick);
}

i64 TorchFile::storage_offset(const PickleTensor& t) const { return storages_.at(t.storage->text)->offset; }

void TorchFile::read(const PickleTensor& t, i64 first, i64 count, void* out) const {
  DS_ASSERT(t.dtype.has_value() && first >= 0 && count >= 0);
  if (count > 0) read_box(t, 0, t.offset, first, count, static_cast<char*>(out));
  storage_at_ = -1;
  storage_ = {};
}

// Elements [first, first + count) of the part of the tensor that starts at element `offset` of the storage and has the
// dims from `dim` on: a piece of a row, whole rows, a piece of a row.
void TorchFile::read_box(const PickleTensor& t, size_t dim, i64 offset, i64 first, i64 count, char* out) const {
  const i64 size = dtype_bytes(*t.dtype);
  i64 row = 1;
  bool contiguous = true;  // from here on in
  for (size_t d = t.shape.size(); d-- > dim;) {
    contiguous &= t.shape[d] == 1 || t.stride[d] == row;
    if (d > dim) row *= t.shape[d];
  }
  if (contiguous) return file().read_at(storage_offset(t) + (offset + first) * size, out, count * size);
  if (const i64 skip = first % row; skip != 0) {
    const i64 n = std::min(count, row - skip);
    read_box(t, dim + 1, offset + first / row * t.stride[dim], skip, n, out);
    first += n, count -= n, out += n * size;
  }
  const i64 rows = count / row;
  if (rows > 0) read_rows(t, dim, offset + first / row * t.stride[dim], rows, out);
  first += rows * row, count -= rows * row, out += rows * row * size;
  if (count > 0) read_box(t, dim + 1, offset + first / row * t.stride[dim], 0, count, out);
}

// Whole rows along `dim`. Runs go along the dim whose elements lie closest in the file, so that a transposed matrix is
// read in stretches and not element by element.
void TorchFile::read_rows(const PickleTensor& t, size_t dim, i64 offset, i64 rows, char* out) const {
  std::vector<i64> extent(t.shape.begin() + static_cast<std::ptrdiff_t>(dim), t.shape.end());
  const std::vector<i64> stride(t.stride.begin() + static_cast<std::ptrdiff_t>(dim), t.stride.end());
  extent[0] = rows;
  std::vector<i64> out_stride(extent.size(), 1);
  for (size_t d = extent.size() - 1; d > 0; --d) out_stride[d - 1] = out_stride[d] * extent[d];
  size_t run = extent.size() - 1;
  for (size_t d = 0; d < extent.size(); ++d) {
    if (extent[d] > 1 && (extent[run] == 1 || stride[d] < stride[run])) run = d;
  }
  const i64 size = dtype_bytes(*t.dtype), base = storage_offset(t);
  const char* const in_memory = storage_in_memory(t);
  const i64 runs = extent[run] == 0 ? 0 : out_stride[0] * rows / extent[run];
  std::vector<i64> index(extent.size(), 0);
  for (i64 k = 0; k < runs; ++k) {
    i64 from = offset, to = 0;
    for (size_t d = 0; d < index.size(); ++d) from += index[d] * stride[d], to += index[d] * out_stride[d];
    read_run(in_memory, base + from * size, stride[run] * size, size, extent[run], out + to * size,
             out_stride[run] * size);
    for (size_t d = index.size(); d-- > 0;) {
      if (d == run) continue;
      if (++index[d] < extent[d]) break;
      index[d] = 0;
    }
  }
}

// Strides over a small storage may touch every element of it many times: not with a system call for each.
const char* TorchFile::storage_in_memory(const PickleTensor& t) const {
  constexpr i64 kMostBytes = i64{32} << 20;
  const ZipEntry& entry = *storages_.at(t.storage->text);
  if (entry.bytes > kMostBytes) return nullptr;
  if (storage_at_ != entry.offset) {
    storage_at_ = -1;
    storage_.resize(entry.bytes);
    file().read_at(entry.offset, storage_.data(), entry.bytes);
    storage_at_ = entry.offset;
  }
  return storage_.data();
}

// `count` elements that lie `stride_bytes` apart in the file, to places `out_stride_bytes` apart.
void TorchFile::read_run(const char* in_memory, i64 file_offset, i64 stride_bytes, i64 elem_bytes, i64 count, char* out,
                         i64 out_stride_bytes) const {
  if (in_memory != nullptr) {
    const char* const from = in_memory + (file_offset - storage_at_);
    for (i64 i = 0; i < count; ++i)
      std::memcpy(out + i * out_stride_bytes, from + i * stride_bytes, static_cast<size_t>(elem_bytes));
    return;
  }
  constexpr i64 kWindow = i64{1} << 20, kFarApart = i64{4} << 10;
  const i64 per_window = stride_bytes > kFarApart ? 1 : stride_bytes == 0 ? count : kWindow / stride_bytes;
  std::vector<char> window;
  for (i64 done = 0; done < count; done += per_window) {
    const i64 n = std::min(per_window, count - done);
    window.resize((n - 1) * stride_bytes + elem_bytes);
    file().read_at(file_offset + done * stride_bytes, window.data(), narrow<i64>(window.size()));
    for (i64 i = 0; i < n; ++i) {
      std::memcpy(out + (done + i) * out_stride_bytes, window.data() + i * stride_bytes,
                  static_cast<size_t>(elem_bytes));
    }
  }
}

namespace {

class Flattener {
 public:
  explicit Flattener(const std::string& path) : path_(path) {}

  std::vector<std::pair<std::string, const PickleTensor*>> tensors;

  void walk(const PickleValue& dict, const std::string& prefix, int depth) {
    DS_CHECK(depth < kMaxDepth, Errc::Corrupt, "{}: dicts nested deeper than {} in '{}'", path_, kMaxDepth,
             prefix.substr(0, 200));
    for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
      DS_CHECK(++visits_ <= kMaxVisits, Errc::Corrupt, "{}: more than {} values in nested dicts", path_, kMaxVisits);
      const PickleValue &key = *dict.items[i], &value = *dict.items[i + 1];
      if (!value.is(Kind::Tensor) && !value.is(Kind::Dict)) continue;
      const std::string name = join(prefix, key_text(key, prefix));
      if (value.is(Kind::Dict)) {
        walk(value, name, depth + 1);
      } else {
        check_name(name);
        tensors.emplace_back(name, value.tensor.get());
      }
    }
  }

 private:
  // Bounds the cost of names: a value may be shared, and every path to it has a name.
  std::string join(const std::string& prefix, const std::string& key) {
    const size_t bytes = prefix.size() + 1 + key.size();
    name_bytes_ += bytes;
    DS_CHECK(bytes <= kMaxName && name_bytes_ <= kMaxNameBytes, Errc::Corrupt,
             "{}: tensor names of more than {} bytes, or {} together", path_, kMaxName, kMaxNameBytes);
    return prefix.empty() ? key : prefix + "." + key;
  }
  std::string key_text(const PickleValue& key, const std::string& prefix) const {
    if (key.is(Kind::Int)) return std::to_string(key.integer);
    DS_CHECK(key.is(Kind::String), Errc::Corrupt, "{}: a tensor in '{}' whose key is a {}", path_,
             prefix.substr(0, 200), kind_name(key.kind));
    return key.text.substr(0, kMaxName + 1);  // join() refuses a longer one
  }
  void check_name(const std::string& name) {
    DS_CHECK(!name.empty(), Errc::Corrupt, "{}: a tensor without a name", path_);
    DS_CHECK(std::none_of(name.begin(), name.end(), [](char c) { return static_cast<u8>(c) < 0x20; }), Errc::Corrupt,
             "{}: a tensor name contains control characters", path_);
    DS_CHECK(names_.insert(name).second, Errc::Corrupt, "{}: tensor '{}' appears twice", path_, name);
  }

  const std::string& path_;
  size_t visits_ = 0, name_bytes_ = 0;
  std::unordered_set<std::string> names_;
};

class TorchSource : public TensorSource {
 public:
  TorchSource(std::unique_ptr<TorchFile> file, std::vector<TensorInfo> tensors, std::vector<ForeignTensor> foreign,
              std::vector<const PickleTensor*> views)
      : TensorSource(file->path(), std::move(tensors), std::move(foreign)),
        file_(std::move(file)),
        views_(std::move(views)) {}

  std::vector<std::string> verify(const Tick& tick) const override {
    try {
      file_->verify(tick);
    } catch (const Error& e) {
      if (e.code() != Errc::Corrupt) throw;
      return {e.what()};
    }
    return {};
  }
  void close() const override { file_->close(); }

 private:
  void read_elements(size_t tensor, i64 first_elem, i64 count, void* out) const override {
    file_->read(*views_[tensor], first_elem, count, out);
  }

  std::unique_ptr<TorchFile> file_;
  std::vector<const PickleTensor*> views_;
};

}  // namespace

std::vector<std::pair<std::string, const PickleTensor*>> state_dict_tensors(const PickleValue& root,
                                                                            const std::string& path) {
  DS_CHECK(root.is(Kind::Dict), Errc::Unavailable, "{}: holds a {}, not a dict of tensors", path, kind_name(root.kind));
  const PickleValue* dict = nullptr;
  std::string_view chosen;
  for (const std::string_view key : {"state_dict", "model_state_dict", "model", "module"}) {
    const PickleValue* value = root.find(key);
    if (value == nullptr || !value->is(Kind::Dict)) continue;
    DS_CHECK(dict == nullptr, Errc::Unavailable, "{}: both '{}' and '{}' could be the state dict", path, chosen, key);
    dict = value;
    chosen = key;
  }
  Flattener flattener(path);
  flattener.walk(dict == nullptr ? root : *dict, "", 0);
  DS_CHECK(!flattener.tensors.empty(), Errc::Unavailable, "{}: there is no tensor in {}", path,
           dict == nullptr ? "its dict" : fmt::format("'{}'", chosen));
  return std::move(flattener.tensors);
}

UnfoldingBudget::UnfoldingBudget(const TorchFile& file)
    : path_(file.path()), file_bytes_(file.bytes()), left_(i64{1} << 30) {
  i64 unfolded;
  if (__builtin_mul_overflow(file_bytes_, i64{16}, &unfolded) || __builtin_add_overflow(left_, unfolded, &left_))
    left_ = std::numeric_limits<i64>::max();
}

void UnfoldingBudget::take(const PickleTensor& tensor, std::string_view name) {
  const std::optional<i64> bytes = tensor.dtype ? checked_product(tensor.shape, dtype_bytes(*tensor.dtype)) : 0;
  DS_CHECK(bytes && *bytes <= left_, Errc::Unavailable,
           "{}: with tensor '{}' of shape [{}] it unfolds to more than 16 times its {} bytes; save tensors that repeat "
           "their elements as copies, or leave them out",
           path_, name, fmt::join(tensor.shape, ", "), file_bytes_);
  left_ -= *bytes;
}

std::unique_ptr<TensorSource> open_torch(const std::string& path) {
  auto file = std::make_unique<TorchFile>(path);
  UnfoldingBudget budget(*file);
  std::vector<TensorInfo> tensors;
  std::vector<ForeignTensor> foreign;
  std::vector<const PickleTensor*> views;
  for (auto& [name, view] : state_dict_tensors(file->root(), path)) {
    if (view->dtype) {
      budget.take(*view, name);
      tensors.push_back({std::move(name), *view->dtype, view->shape});
      views.push_back(view);
    } else {
      foreign.push_back({std::move(name), view->type});
    }
  }
  return std::make_unique<TorchSource>(std::move(file), std::move(tensors), std::move(foreign), std::move(views));
}

}  // namespace ds
