// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files of torch.save (.pt, .pth, .bin, .ckpt): a stored zip archive <prefix>/ with a pickle, data.pkl, and the bytes
// of each storage in data/<key>, little-endian. Only reading is supported, and no code of them is ever run
// (formats/pickle.h).

#include <unordered_map>

#include "formats/pickle.h"
#include "formats/tensor_io.h"
#include "formats/zip.h"

namespace ds {

// Whether the name is that of such a file (.pt, .pth, .bin, .ckpt), and whether the content is (a zip archive).
bool is_torch_name(std::string_view path) noexcept;
bool is_zip(const std::string& path);

// One such file, of which the archive's directory and the pickle have been read. Reading after close() opens it again,
// so a checkpoint of a thousand files does not need a thousand descriptors.
class TorchFile {
 public:
  // Checks that every storage of the pickle exists and has its declared size. Throws Errc::Unavailable (TorchScript,
  // files from before torch 1.6, big-endian data, and the cases of read_zip and Pickle), Errc::Corrupt, Errc::Io.
  explicit TorchFile(const std::string& path);

  const std::string& path() const noexcept { return path_; }
  // The archive's folder: the name, without its suffix, that torch.save gave the file, or "archive".
  const std::string& saved_as() const noexcept { return saved_as_; }
  i64 bytes() const noexcept { return file_bytes_; }
  const PickleValue& root() const noexcept { return pickle_->root(); }

  // Elements [first, first + count) of the tensor in row-major order, whatever its strides, in its own dtype.
  void read(const PickleTensor& tensor, i64 first, i64 count, void* out) const;
  // Throws Errc::Corrupt naming the first entry that differs from its checksum.
  void verify(const Tick& tick = {}) const;

  bool is_open() const noexcept { return file_.has_value(); }
  void close() noexcept { file_.reset(); }

 private:
  void read_box(const PickleTensor&, size_t dim, i64 offset, i64 first, i64 count, char* out) const;
  void read_rows(const PickleTensor&, size_t dim, i64 offset, i64 rows, char* out) const;
  // Reads the whole entry and keeps it until read() returns.
  const char* storage_in_memory(const PickleTensor&) const;
  void read_run(const char* in_memory, i64 file_offset, i64 stride_bytes, i64 elem_bytes, i64 count, char* out,
                i64 out_stride_bytes) const;
  i64 storage_offset(const PickleTensor&) const;

  const File& file() const;

  std::string path_, saved_as_;
  mutable std::optional<File> file_;
  mutable std::string storage_;  // its bytes, and their position in the file
  mutable i64 storage_at_ = -1;
  i64 file_bytes_ = 0;
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string_view, const ZipEntry*> storages_;  // by key
  std::unique_ptr<Pickle> pickle_;
};

// Bounds the total size of the tensors of a file, because a view may repeat its storage any number of times. Tied
// weights and broadcast buffers do so a little; a file that expands to more than 16 times its bytes plus 1 GiB was made
// to fill a disk.
class UnfoldingBudget {
 public:
  explicit UnfoldingBudget(const TorchFile& file);
  // Throws Errc::Unavailable if this tensor exceeds the budget.
  void take(const PickleTensor& tensor, std::string_view name);

 private:
  std::string path_;
  i64 file_bytes_, left_;
};

// The tensors of a state dict. If exactly one of the keys "state_dict", "model_state_dict", "model" and "module" of the
// outermost dict contains a dict, that is the state dict; else the outermost dict is. Tensors in nested dicts are named
// by their keys, joined by '.'; values that are neither tensors nor dicts are ignored. Throws Errc::Corrupt for invalid
// names (duplicate, empty, control characters), Errc::Unavailable for two of those keys and for a file without any
// tensor in a dict.
std::vector<std::pair<std::string, const PickleTensor*>> state_dict_tensors(const PickleValue& root,
                                                                            const std::string& path);

// Throws like TorchFile, state_dict_tensors and UnfoldingBudget.
std::unique_ptr<TensorSource> open_torch(const std::string& path);

}  // namespace ds
