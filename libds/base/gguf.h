// SPDX-License-Identifier: Apache-2.0
#pragma once
// GGUF, the files of llama.cpp: named values (sizes of the model, its tokenizer) and a table of tensors, of which one
// file or several hold the elements. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/check.h"

namespace ds {

// A type of tensors: elements come in blocks.
struct GgufType {
  u32 number;
  std::string_view name;
  i64 elems, bytes;  // of a block
};
// Null for a number that is not known.
const GgufType* gguf_type(u32 number) noexcept;

struct GgufTensor {
  std::string name;
  u32 type = 0;
  std::vector<i64> shape = {};  // the last dim is contiguous, as everywhere in libds; the file has the reverse order
  size_t file = 0;              // its number in Gguf::files()
  i64 offset = 0;               // of the first element, from the start of that file

  i64 numel() const noexcept;
  std::string type_name() const;  // "Q4_K", or "type 99" if it is not known
};

// Whether `path` is a file with this signature, or a file with this suffix.
bool is_gguf(const std::string& path);

// The values and the table of a model; the elements are not read. Memory is a small multiple of these parts of the
// files.
class Gguf {
 public:
  // Opens version 2 or 3, little-endian, and validates it: counts, lengths and offsets that the file's size allows;
  // unique names; tensors that are aligned, lie in the file and do not overlap. If a model has several files, `path` is
  // the first, NAME-00001-of-0000N.gguf, and all must lie beside it. Throws Errc::Corrupt (the file, the name and the
  // contradiction), Errc::Unavailable (another version, big-endian, not the first of several), Errc::Io.
  explicit Gguf(const std::string& path);

  const std::string& path() const noexcept { return files_.front(); }
  const std::vector<std::string>& files() const noexcept { return files_; }
  const std::vector<GgufTensor>& tensors() const noexcept { return tensors_; }
  const GgufTensor* find(std::string_view name) const noexcept;

  // Values of the first file; nothing, or an empty list, if there is none of this name. Throws Errc::Corrupt, naming
  // the key, for another type and for text that is not UTF-8.
  std::optional<i64> integer(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;  // of an integer too
  std::optional<bool> flag(const std::string& key) const;
  std::optional<std::string> text(const std::string& key) const;
  std::vector<std::string> texts(const std::string& key) const;
  std::vector<i64> integers(const std::string& key) const;
  std::vector<double> numbers(const std::string& key) const;
  bool has(const std::string& key) const { return values_.contains(key); }
  std::vector<std::string> keys() const;

 private:
  Gguf() = default;
  struct Value {
    u32 type = 0, element = 0;  // element: of a list
    u64 count = 1;
    i64 at = 0;  // in bytes_
  };
  class Reader;
  class Items;
  const Value* find_value(const std::string& key) const;
  Items list(const std::string& key) const;
  [[noreturn]] void refuse(const std::string& key, std::string_view wanted) const;
  void open_others();
  void check_tensors();

  std::vector<std::string> files_;
  std::string bytes_;  // of the first file, up to its table of tensors
  std::map<std::string, Value> values_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, size_t> index_;
};

}  // namespace ds
