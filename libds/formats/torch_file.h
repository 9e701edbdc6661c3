// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files of torch.save (.pt, .pth, .bin, .ckpt): a stored zip archive <prefix>/ with a pickle, data.pkl, and the bytes
// of each storage in data/<key>, little-endian. Read only, and nothing of them is ever run (formats/pickle.h).

#include <unordered_map>

#include "formats/pickle.h"
#include "formats/tensor_io.h"
#include "formats/zip.h"

namespace ds {

// Whether the name says so (.pt, .pth, .bin, .ckpt), and whether the content does (a zip archive).
bool is_torch_name(std::string_view path) noexcept;
bool is_zip(const std::string& path);

// One such file: the archive's directory and the pickle have been read, the storages have not. It is opened again when
// it is read after close(), so that a checkpoint of a thousand files needs no thousand descriptors.
class TorchFile {
 public:
  // Every tensor of the pickle has its bytes: the storages that are referred to are there, as large as they are said to
  // be. Throws Errc::Unavailable (TorchScript, files from before torch 1.6, big-endian data, and what read_zip and
  // Pickle name), Errc::Corrupt, Errc::Io.
  explicit TorchFile(const std::string& path);

  const std::string& path() const noexcept { return path_; }
  i64 bytes() const noexcept { return file_bytes_; }
  const PickleValue& root() const noexcept { return pickle_->root(); }

  // Elements [first, first + count) of the tensor in row-major order, whatever its strides, in its own dtype.
  void read(const PickleTensor& tensor, i64 first, i64 count, void* out) const;
  // Throws Errc::Corrupt naming the first entry that is not as its checksum says.
  void verify(const Tick& tick = {}) const;

  bool is_open() const noexcept { return file_.has_value(); }
  void close() noexcept { file_.reset(); }

 private:
  void read_box(const PickleTensor&, size_t dim, i64 offset, i64 first, i64 count, char* out) const;
  void read_rows(const PickleTensor&, size_t dim, i64 offset, i64 rows, char* out) const;
  // Read whole, and kept until read() returns.
  const char* storage_in_memory(const PickleTensor&) const;
  void read_run(const char* in_memory, i64 file_offset, i64 stride_bytes, i64 elem_bytes, i64 count, char* out,
                i64 out_stride_bytes) const;
  i64 storage_offset(const PickleTensor&) const;

  const File& file() const;

  std::string path_;
  mutable std::optional<File> file_;
  mutable std::string storage_;  // its bytes, and where they stand in the file
  mutable i64 storage_at_ = -1;
  i64 file_bytes_ = 0;
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string_view, const ZipEntry*> storages_;  // by key
  std::unique_ptr<Pickle> pickle_;
};

// What the tensors of a file may have together: a view may repeat its storage any number of times. Tied weights and
// broadcast buffers do, a little; a file that unfolds to more than 16 times its bytes and 1 GiB was made to fill a
// disk.
class UnfoldingBudget {
 public:
  explicit UnfoldingBudget(const TorchFile& file);
  // Throws Errc::Unavailable where this tensor is too much.
  void take(const PickleTensor& tensor, std::string_view name);

 private:
  std::string path_;
  i64 file_bytes_, left_;
};

// The tensors of a state dict, by this rule: where exactly one of the keys "state_dict", "model_state_dict", "model"
// and "module" of the outermost dict holds a dict, that one is the state dict; else the outermost dict is. Tensors in
// dicts inside it are named by their keys, joined by '.'; values that are neither tensors nor dicts are passed over.
// Throws Errc::Corrupt for names that no tensor has (twice the same, empty, control characters), Errc::Unavailable for
// two of those keys and for a file without any tensor in a dict.
std::vector<std::pair<std::string, const PickleTensor*>> state_dict_tensors(const PickleValue& root,
                                                                            const std::string& path);

// Throws as TorchFile, state_dict_tensors and UnfoldingBudget.
std::unique_ptr<TensorSource> open_torch(const std::string& path);

}  // namespace ds
