// SPDX-License-Identifier: Apache-2.0
// Integers are eight bytes; texts and lists begin with their length:
//   [name dtype [dim] offset] | [name type] | [name value] | inlined

#include "formats/hdf5_answer.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "formats/hdf5_parse.h"

namespace ds::hdf5 {
namespace {

constexpr i64 kMaxDims = 32;  // HDF5's own limit
constexpr i64 kNumDTypes = static_cast<i64>(DType::F8E5M2) + 1;

class Writer {
 public:
  void put(i64 x) { bytes_.append(reinterpret_cast<const char*>(&x), sizeof x); }
  void put(std::string_view text) {
    put_size(text);
    bytes_ += text;
  }
  template <class List>
  void put_size(const List& list) {
    put(static_cast<i64>(list.size()));
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  Reader(std::string_view bytes, const std::string& path) : left_(bytes), path_(path) {}

  i64 integer() {
    i64 x = 0;
    std::memcpy(&x, take(sizeof x).data(), sizeof x);
    return x;
  }
  std::string_view text(i64 most) {
    const i64 n = integer();
    check(n >= 0 && n <= most, "a text of {} bytes", n);
    return take(static_cast<size_t>(n));
  }
  // The length of a list whose members take at least eight bytes, so that a large length alone allocates nothing.
  i64 length(i64 most) {
    const i64 n = integer();
    check(n >= 0 && n <= most && n <= static_cast<i64>(left_.size() / 8), "a list of {}", n);
    return n;
  }
  std::string name() {
    const std::string_view s = text(kMaxName);
    check(!s.empty() && s.find('\0') == std::string_view::npos && is_utf8(s), "a name that is empty or not text");
    return std::string(s);
  }
  void end() const { check(left_.empty(), "{} bytes too many", left_.size()); }

  template <class... Args>
  void check(bool good, fmt::format_string<Args...> what, Args&&... args) const {
    if (good) [[likely]]
      return;
    throw Error(Errc::Corrupt, fmt::format("{}: the contents of this file are inconsistent: {}", path_,
                                           fmt::format(what, std::forward<Args>(args)...)));
  }

 private:
  std::string_view take(size_t n) {
    check(n <= left_.size(), "it ends early");
    const std::string_view taken = left_.substr(0, n);
    left_.remove_prefix(n);
    return taken;
  }

  std::string_view left_;
  const std::string& path_;
};

TensorInfo read_tensor(Reader& in) {
  TensorInfo info{in.name(), DType::F32, {}};
  const i64 dtype = in.integer();
  in.check(dtype >= 0 && dtype < kNumDTypes, "{}: dtype {}", info.name, dtype);
  info.dtype = static_cast<DType>(dtype);
  for (i64 dims = in.length(kMaxDims); dims > 0; --dims) info.shape.push_back(in.integer());
  in.check(checked_product(info.shape, dtype_bytes(info.dtype)).has_value(), "{}: shape [{}]", info.name,
           fmt::join(info.shape, ", "));
  return info;
}

// That no two tensors share elements, and none has elements elsewhere than in the file or in what was copied out of it.
void check_places(const Reader& in, const TensorTable& table, i64 file_bytes) {
  struct Range {
    i64 begin, end;
    size_t tensor;
  };
  std::vector<Range> in_file, in_header;
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    const i64 bytes = table.tensors[i].bytes(), offset = table.offsets[i];
    if (bytes == 0) continue;
    const i64 begin = offset >= 0 ? offset : -1 - offset;
    const i64 all = offset >= 0 ? file_bytes : static_cast<i64>(table.inlined.size());
    in.check(begin <= all && bytes <= all - begin, "{} needs {} bytes at {} of {}", table.tensors[i].name, bytes, begin,
             all);
    (offset >= 0 ? in_file : in_header).push_back({begin, begin + bytes, i});
  }
  for (auto* ranges : {&in_file, &in_header}) {
    std::sort(ranges->begin(), ranges->end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < ranges->size(); ++i) {
      const Range &a = (*ranges)[i - 1], &b = (*ranges)[i];
      in.check(a.end <= b.begin, "{} and {} share bytes", table.tensors[a.tensor].name, table.tensors[b.tensor].name);
    }
  }
}

}  // namespace

bool is_utf8(std::string_view text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

std::string encode(const TensorTable& table) {
  Writer out;
  out.put_size(table.tensors);
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    const TensorInfo& t = table.tensors[i];
    out.put(t.name);
    out.put(static_cast<i64>(t.dtype));
    out.put_size(t.shape);
    for (const i64 dim : t.shape) out.put(dim);
    out.put(table.offsets[i]);
  }
  out.put_size(table.foreign);
  for (const ForeignTensor& f : table.foreign) {
    out.put(f.name);
    out.put(f.type);
  }
  out.put_size(table.metadata);
  for (const auto& [name, value] : table.metadata) {
    out.put(name);
    out.put(value);
  }
  out.put(table.inlined);
  return out.take();
}

TensorTable decode(std::string_view answer, i64 file_bytes, const std::string& path) {
  Reader in(answer, path);
  TensorTable table;
  std::set<std::string, std::less<>> names;
  const auto once = [&](const std::string& name) { in.check(names.insert(name).second, "{} appears twice", name); };
  for (i64 n = in.length(kMaxDatasets); n > 0; --n) {
    table.tensors.push_back(read_tensor(in));
    table.offsets.push_back(in.integer());
    once(table.tensors.back().name);
  }
  for (i64 n = in.length(kMaxDatasets); n > 0; --n) {
    ForeignTensor f{in.name(), in.name()};
    once(f.name);
    table.foreign.push_back(std::move(f));
  }
  i64 metadata_bytes = 0;
  for (i64 n = in.length(kMaxMetadataBytes); n > 0; --n) {
    std::string name = in.name();
    std::string value(in.text(kMaxMetadataBytes));
    metadata_bytes += static_cast<i64>(name.size() + value.size());
    in.check(metadata_bytes <= kMaxMetadataBytes, "{} bytes of metadata", metadata_bytes);
    in.check(is_utf8(value), "metadata {} is not UTF-8", name);
    in.check(table.metadata.emplace(std::move(name), std::move(value)).second, "metadata that appears twice");
  }
  table.inlined = in.text(file_bytes);
  in.end();
  check_places(in, table, file_bytes);
  return table;
}

}  // namespace ds::hdf5
