// SPDX-License-Identifier: Apache-2.0
#pragma once
// GGUF files for tests, also wrong ones: values and tensors are written as they are given.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "ds/kernels/dtype.h"

namespace ds::testing {

class GgufFile {
 public:
  u32 version = 3;
  std::string magic = "GGUF";
  std::optional<u64> num_values = {}, num_tensors = {};  // what the header states, if not the truth

  template <class T>
  static std::string number(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }
  static std::string string(std::string_view text) { return number<u64>(text.size()).append(text); }

  // A value of ggml's type `type`, whose bytes are `raw`.
  GgufFile& value(std::string_view key, u32 type, const std::string& raw) {
    values_ += string(key) + number(type) + raw;
    ++count_;
    return *this;
  }
  GgufFile& text(std::string_view key, std::string_view text) { return value(key, 8, string(text)); }
  GgufFile& u(std::string_view key, u32 x) { return value(key, 4, number(x)); }
  GgufFile& real(std::string_view key, float x) { return value(key, 6, number(x)); }
  GgufFile& flag(std::string_view key, bool x) { return value(key, 7, number<u8>(x ? 1 : 0)); }
  GgufFile& texts(std::string_view key, const std::vector<std::string>& all) {
    std::string raw = number<u32>(8) + number<u64>(all.size());
    for (const std::string& t : all) raw += string(t);
    return value(key, 9, raw);
  }
  GgufFile& integers(std::string_view key, const std::vector<i32>& all) {
    std::string raw = number<u32>(5) + number<u64>(all.size());
    for (const i32 x : all) raw += number(x);
    return value(key, 9, raw);
  }

  // `dims` in the order of the file, the contiguous one first; `data` is appended, at a multiple of 32, and its place
  // stated unless `offset` is.
  GgufFile& tensor(std::string_view name, const std::vector<u64>& dims, u32 type, const std::string& data,
                   std::optional<u64> offset = {}) {
    data_.resize((data_.size() + 31) / 32 * 32);
    tensors_ += string(name) + number(static_cast<u32>(dims.size()));
    for (const u64 d : dims) tensors_ += number(d);
    tensors_ += number(type) + number<u64>(offset.value_or(data_.size()));
    data_ += data;
    ++tensor_count_;
    return *this;
  }
  GgufFile& floats(std::string_view name, const std::vector<u64>& dims, const std::vector<float>& x) {
    return tensor(name, dims, 0, {reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float)});
  }

  std::string bytes() const {
    std::string all = magic + number(version) + number(num_tensors.value_or(tensor_count_)) +
                      number(num_values.value_or(count_)) + values_ + tensors_;
    all.resize((all.size() + 31) / 32 * 32);
    return all + data_;
  }

 private:
  std::string values_, tensors_, data_;
  u64 count_ = 0, tensor_count_ = 0;
};

}  // namespace ds::testing
