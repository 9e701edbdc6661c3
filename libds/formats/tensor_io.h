// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files of named tensors. A TensorSource lists tensors and reads ranges of their elements on demand; a TensorSink is
// told all tensors first, takes their elements and appears whole at the end. Neither knows what the tensors mean.
//
// Every format here comes down to the same thing: a header that yields, for each tensor, an offset in a file where its
// elements stand contiguous, row-major and little-endian. So formats/ parses headers, and one source and one sink move
// the bytes of all of them with plain reads and writes.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/file.h"

namespace ds {

struct TensorInfo {
  std::string name;
  DType dtype;
  std::vector<i64> shape;

  i64 numel() const noexcept {
    i64 n = 1;
    for (i64 d : shape) {
      if (d == 0) return 0;  // whatever the others are: [2^40, 2^40, 0] is a shape
    }
    for (i64 d : shape) n *= d;
    return n;
  }
  i64 bytes() const noexcept { return numel() * dtype_bytes(dtype); }
  bool operator==(const TensorInfo&) const = default;
};

// Product of `shape` times `scale`, or nothing where a dim is negative or an i64 does not hold it.
std::optional<i64> checked_product(const std::vector<i64>& shape, i64 scale = 1) noexcept;

// A tensor whose element type DType cannot name (BOOL, F8_E4M3, ...): known to be there, not readable.
struct ForeignTensor {
  std::string name, type;
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  const std::string& path() const noexcept { return path_; }
  const std::vector<TensorInfo>& list() const noexcept { return tensors_; }
  const std::vector<ForeignTensor>& foreign() const noexcept { return foreign_; }
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }

  const TensorInfo* find(std::string_view name) const noexcept;
  // Throws Errc::Mismatch for a name that is not there, Errc::Unavailable for a foreign tensor.
  const TensorInfo& at(std::string_view name) const;
  // Elements [first_elem, first_elem + count) of the flattened tensor in its own dtype.
  void read(std::string_view name, i64 first_elem, i64 count, void* out) const;
  // Every file that is read, an index too.
  virtual std::vector<std::string> files() const { return {path_}; }
  // Gives the file's descriptor back until the next read.
  virtual void close() const {}

  // Reads all that the format keeps checksums of; one line for each file that is not as it was written.
  virtual std::vector<std::string> verify(const Tick&) const { return {}; }

 protected:
  TensorSource(std::string path, std::vector<TensorInfo> tensors, std::vector<ForeignTensor> foreign = {},
               std::map<std::string, std::string> metadata = {});
  virtual void read_elements(size_t tensor, i64 first_elem, i64 count, void* out) const = 0;

 private:
  size_t index_of(std::string_view name) const;

  std::string path_;
  std::vector<TensorInfo> tensors_;
  std::vector<ForeignTensor> foreign_;
  std::map<std::string, std::string> metadata_;
  std::unordered_map<std::string_view, size_t> index_;  // views of tensors_[i].name
};

class TensorSink {
 public:
  virtual ~TensorSink() = default;
  // The next `count` elements of the tensor. Tensors are written one after the other in the order of order(), each
  // front to back.
  virtual void write(std::string_view name, i64 first_elem, i64 count, const void* data) = 0;
  // All elements have come: makes the output durable and moves it to its place. Without finish() nothing is left.
  virtual void finish() = 0;

  // The order in which the tensors stand in the output, as indices of the list that it was made with.
  virtual const std::vector<size_t>& order() const noexcept = 0;
};

enum class FileFormat : u8 { Safetensors, Hdf5 };

// By suffix: .safetensors; .h5 or .hdf5.
std::optional<FileFormat> format_of(std::string_view path) noexcept;
std::string_view format_name(FileFormat) noexcept;

// A file of one of three kinds: .safetensors; .h5 or .hdf5; of torch.save (.pt, .pth, .bin, .ckpt, or any other name
// where the content is a zip archive). Or an index of several (*.safetensors.index.json, *.bin.index.json). Or a
// directory that holds one of kPublishedWeights. All headers are validated here; the tensors' bytes are not touched.
// Throws Errc::Corrupt (what, where), Errc::Io, Errc::Unavailable (a kind of file that is not read).
std::unique_ptr<TensorSource> open_source(const std::string& path);

// The names under which Hugging Face directories hold weights, in the order in which transformers looks for them.
inline constexpr std::array<std::string_view, 4> kPublishedWeights = {
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"};
// Those of them that `dir` holds, in that order: the first is the one that is read.
// Throws Errc::Unavailable where an adapter of PEFT lies beside them: transformers adds it to the weights.
std::vector<std::string> published_weights_in(const std::string& dir);
// A warning where `dir` holds several: names them and the one that is read.
void warn_of_several_weights(const std::string& dir);

// Names are unique and not empty. `metadata` goes to safetensors' __metadata__ or to attributes of the HDF5 root. The
// tick comes while the file is laid out.
std::unique_ptr<TensorSink> create_sink(const std::string& path, FileFormat format, std::vector<TensorInfo> tensors,
                                        const std::map<std::string, std::string>& metadata = {}, const Tick& tick = {});

// Safetensors into a descriptor that need not seek, a pipe say; `name` stands for it in messages. What was written
// stays written: only finish() makes it whole. The descriptor stays the caller's.
std::unique_ptr<TensorSink> create_stream_sink(int fd, const std::string& name, std::vector<TensorInfo> tensors,
                                               const std::map<std::string, std::string>& metadata = {});

// Safetensors into a directory that exists, as Hugging Face shards a model: files of at most `max_shard_bytes` of
// tensors, filled in the order of the list, a larger tensor alone; model-00001-of-0000N.safetensors and their index, or
// model.safetensors alone where one file holds all.
std::unique_ptr<TensorSink> create_sharded_sink(const std::string& dir, i64 max_shard_bytes,
                                                std::vector<TensorInfo> tensors,
                                                const std::map<std::string, std::string>& metadata = {});

// Copies every tensor. The sources, one or more, show the same tensors; each is read ahead, tensor by tensor in turns,
// in a thread of its own and needs 24 MiB of memory. The sink was made with their list. `progress`, if there is one,
// gets the bytes so far after each piece.
void copy_tensors(std::span<const TensorSource* const> sources, TensorSink& sink,
                  const std::function<void(i64 bytes)>& progress = {});

// y[i] = x[i] in another type of F32, BF16, F16, from one of these or F64; rounded once, to nearest even. y and x do
// not overlap. Throws Errc::Unavailable for other types.
void convert_elements(DType to, void* y, DType from, const void* x, i64 count);
bool can_convert(DType to, DType from) noexcept;
// How many elements that are finite in `x` are not in `y`, which convert_elements made of them: beyond the range of
// `to`.
i64 count_overflows(DType to, const void* y, DType from, const void* x, i64 count);

}  // namespace ds
