// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files of named tensors. A TensorSource lists tensors and reads ranges of their elements on demand. A TensorSink is
// made with the list of all tensors, gets their elements, and its file appears complete at the end. Neither knows the
// meaning of tensors.
//
// Every format here is a header that gives, for each tensor, the offset in a file of its contiguous, row-major,
// little-endian elements. So formats/ parses headers, and one source and one sink move the bytes of all formats with
// plain reads and writes.

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
#include "ds/kernels/codes.h"

namespace ds {

struct TensorInfo {
  std::string name;
  DType dtype;
  std::vector<i64> shape;

  i64 numel() const noexcept {
    i64 n = 1;
    for (i64 d : shape) {
      if (d == 0) return 0;  // whatever the other dims are: [2^40, 2^40, 0] is a valid shape
    }
    for (i64 d : shape) n *= d;
    return n;
  }
  i64 bytes() const noexcept { return numel() * dtype_bytes(dtype); }
  bool operator==(const TensorInfo&) const = default;
};

// Product of `shape` times `scale`, or nothing if a dim is negative or the product does not fit into an i64.
std::optional<i64> checked_product(const std::vector<i64>& shape, i64 scale = 1) noexcept;

// A tensor whose element type DType does not have (BOOL, F8_E4M3, ...): listed, but not readable.
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
  // Throws Errc::Mismatch for an unknown name, Errc::Unavailable for a foreign tensor.
  const TensorInfo& at(std::string_view name) const;
  // Elements [first_elem, first_elem + count) of the flattened tensor in its own dtype.
  void read(std::string_view name, i64 first_elem, i64 count, void* out) const;
  // All files that are read, including an index.
  virtual std::vector<std::string> files() const { return {path_}; }
  // Closes the file's descriptor until the next read.
  virtual void close() const {}

  // The form in which the codes of a matrix can be read instead of the numbers that they stand for. {}: the tensor is
  // not stored as codes, or in no CodedForm its elements have the bits that read() shows. The matrix is [N,K], K the
  // last dim of the tensor, N the product of the others. Throws as at(), and as read().
  virtual CodedForm codes_of(std::string_view name) const;
  // Rows [first_row, first_row + count) of that matrix, in rows (codes.h): count * codes_of(name).row_bytes(K) bytes.
  virtual void read_codes(std::string_view name, i64 first_row, i64 count, void* out) const;

  // Reads all data that has checksums in this format; returns one line for each file that differs from what was
  // written.
  virtual std::vector<std::string> verify(const Tick&) const { return {}; }

 protected:
  // The number of the tensor in list(). Throws as at().
  size_t index_of(std::string_view name) const;
  TensorSource(std::string path, std::vector<TensorInfo> tensors, std::vector<ForeignTensor> foreign = {},
               std::map<std::string, std::string> metadata = {});
  virtual void read_elements(size_t tensor, i64 first_elem, i64 count, void* out) const = 0;

 private:
  std::string path_;
  std::vector<TensorInfo> tensors_;
  std::vector<ForeignTensor> foreign_;
  std::map<std::string, std::string> metadata_;
  std::unordered_map<std::string_view, size_t> index_;  // views of tensors_[i].name
};

class TensorSink {
 public:
  virtual ~TensorSink() = default;
  // Writes the next `count` elements of the tensor. Tensors are written one after the other in the order of order(),
  // each from front to back.
  virtual void write(std::string_view name, i64 first_elem, i64 count, const void* data) = 0;
  // To be called after all elements: makes the output durable and moves it to its place. Without finish() nothing is
  // left.
  virtual void finish() = 0;

  // The order of the tensors in the output, as indices of the list with which it was made.
  virtual const std::vector<size_t>& order() const noexcept = 0;
};

enum class FileFormat : u8 { Safetensors, Hdf5 };

// By suffix: .safetensors; .h5 or .hdf5.
std::optional<FileFormat> format_of(std::string_view path) noexcept;
std::string_view format_name(FileFormat) noexcept;

// Opens a file of one of four kinds: .safetensors; .h5 or .hdf5; of torch.save (.pt, .pth, .bin, .ckpt, or any other
// name if the content is a zip archive); GGUF (.gguf, or any other name with this signature). Or an index of several
// (*.safetensors.index.json, *.bin.index.json). Or a directory that contains one of kPublishedWeights. Matrices of
// codes with scales are shown decoded (coded_source.h). All headers are validated here; the tensors' bytes are not
// read, but for those that state a shape. Throws Errc::Corrupt (file and reason), Errc::Mismatch (parts of a matrix of
// codes that do not agree), Errc::Io, Errc::Unavailable (an unsupported kind of file or of codes).
std::unique_ptr<TensorSource> open_source(const std::string& path);

// The names of weights in Hugging Face directories, in the order in which transformers looks for them.
inline constexpr std::array<std::string_view, 4> kPublishedWeights = {
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"};
// Those of them that `dir` contains, in that order: the first one is read. Throws Errc::Unavailable if `dir` also
// contains an adapter of PEFT, which transformers would apply to the weights.
std::vector<std::string> published_weights_in(const std::string& dir);
// Warns if `dir` contains several, naming them and the one that is read.
void warn_of_several_weights(const std::string& dir);

// Names must be unique and not empty. `metadata` is written to safetensors' __metadata__ or to attributes of the HDF5
// root. The tick is called while the file is laid out.
std::unique_ptr<TensorSink> create_sink(const std::string& path, FileFormat format, std::vector<TensorInfo> tensors,
                                        const std::map<std::string, std::string>& metadata = {}, const Tick& tick = {});

// Writes safetensors to a descriptor that need not seek, such as a pipe; `name` names it in messages. Written bytes are
// not undone: the output is complete only after finish(). The caller keeps the descriptor.
std::unique_ptr<TensorSink> create_stream_sink(int fd, const std::string& name, std::vector<TensorInfo> tensors,
                                               const std::map<std::string, std::string>& metadata = {});

// Writes safetensors to an existing directory like a sharded model of Hugging Face: files of at most `max_shard_bytes`
// of tensors, filled in the order of the list, with larger tensors in files of their own;
// model-00001-of-0000N.safetensors and their index, or model.safetensors if one file is enough.
std::unique_ptr<TensorSink> create_sharded_sink(const std::string& dir, i64 max_shard_bytes,
                                                std::vector<TensorInfo> tensors,
                                                const std::map<std::string, std::string>& metadata = {});

// Copies every tensor. The sources, one or more, have the same tensors; each is read ahead, tensor by tensor in turns,
// in a thread of its own that needs 24 MiB of memory. The sink was made with their list. `progress`, if set, is called
// with the bytes so far after each piece.
void copy_tensors(std::span<const TensorSource* const> sources, TensorSink& sink,
                  const std::function<void(i64 bytes)>& progress = {});

// y[i] = x[i] converted to F32, BF16 or F16 from one of these or F64; rounded once, to nearest even. y and x must not
// overlap. Throws Errc::Unavailable for other types.
void convert_elements(DType to, void* y, DType from, const void* x, i64 count);
bool can_convert(DType to, DType from) noexcept;
// The number of elements that are finite in `x` but not in `y`, the result of convert_elements: they exceed the range
// of `to`.
i64 count_overflows(DType to, const void* y, DType from, const void* x, i64 count);

}  // namespace ds
