// SPDX-License-Identifier: Apache-2.0
#pragma once
// Zip archives and files of torch.save for tests, good ones and broken ones, as bytes.

#include <zlib.h>

#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace ds::testing {

template <class T>
std::string le(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// An entry as its headers describe it. A test sets the fields that differ from a good archive.
struct ZipPart {
  std::string name, data;
  u16 flags = 0, method = 0;
  std::string extra = {}, comment = {};
  bool descriptor = false;                      // sizes and checksum follow the data, as torch.save writes
  std::string local_name = {};                  // empty: as `name`
  std::optional<std::string> local_extra = {};  // nothing: as `extra`
  std::optional<u32> local_bytes = {};          // nothing: as they are
  std::optional<u32> central_bytes = {};
  std::optional<u32> crc = {};
};

struct ZipEnd {
  u16 disk = 0;
  std::optional<u16> count = {};
  std::optional<u32> directory_offset = {};
  std::string comment = {};
  bool zip64 = false;
  std::optional<u64> count64 = {};
};

inline std::string make_zip(const std::vector<ZipPart>& parts, const ZipEnd& end = {}) {
  std::string out, directory;
  for (const ZipPart& p : parts) {
    const u32 bytes = static_cast<u32>(p.data.size());
    const u32 crc = p.crc.value_or(static_cast<u32>(::crc32(0, reinterpret_cast<const Bytef*>(p.data.data()), bytes)));
    const u16 flags = static_cast<u16>(p.flags | (p.descriptor ? 8 : 0));
    const u32 local = p.local_bytes.value_or(p.descriptor ? 0 : bytes), central = p.central_bytes.value_or(bytes);
    const std::string& local_name = p.local_name.empty() ? p.name : p.local_name;
    const std::string& local_extra = p.local_extra ? *p.local_extra : p.extra;
    const u32 offset = static_cast<u32>(out.size());
    out += "PK\3\4" + le<u16>(20) + le(flags) + le(p.method) + le<u32>(0) + le(p.descriptor ? u32{0} : crc) +
           le(local) + le(local) + le(static_cast<u16>(local_name.size())) + le(static_cast<u16>(local_extra.size())) +
           local_name + local_extra + p.data;
    if (p.descriptor) out += "PK\7\10" + le(crc) + le(bytes) + le(bytes);
    directory += "PK\1\2" + le<u16>(20) + le<u16>(20) + le(flags) + le(p.method) + le<u32>(0) + le(crc) + le(central) +
                 le(central) + le(static_cast<u16>(p.name.size())) + le(static_cast<u16>(p.extra.size())) +
                 le(static_cast<u16>(p.comment.size())) + std::string(8, '\0') + le(offset) + p.name + p.extra +
                 p.comment;
  }
  const u32 at = end.directory_offset.value_or(static_cast<u32>(out.size()));
  const u16 count = end.count.value_or(static_cast<u16>(parts.size()));
  const u64 end64 = out.size() + directory.size();
  out += directory;
  if (end.zip64) {
    const u64 count64 = end.count64.value_or(parts.size());
    out += "PK\6\6" + le<u64>(44) + le<u16>(45) + le<u16>(45) + le<u32>(0) + le<u32>(0) + le(count64) + le(count64) +
           le<u64>(directory.size()) + le<u64>(at);
    out += "PK\6\7" + le<u32>(0) + le(end64) + le<u32>(1);
  }
  return out + "PK\5\6" + le(end.disk) + le(end.disk) + le(count) + le(count) + le(static_cast<u32>(directory.size())) +
         le(at) + le(static_cast<u16>(end.comment.size())) + end.comment;
}

// --- pickles, protocol 2

inline std::string pickle(const std::string& body) { return "\x80\x02" + body + "."; }
inline std::string text(std::string_view s) { return "X" + le(static_cast<u32>(s.size())) + std::string(s); }
inline std::string global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
inline std::string number(i64 x) { return "\x8a\x08" + le(x); }
inline std::string numbers(const std::vector<i64>& list) {
  std::string out = "(";
  for (const i64 x : list) out += number(x);
  return out + "t";
}
inline std::string storage(std::string_view type, std::string_view key, i64 elems) {
  return "(" + text("storage") + global("torch", type) + text(key) + text("cpu") + number(elems) + "tQ";
}
inline std::string tensor(const std::string& in, i64 offset, const std::vector<i64>& shape,
                          const std::vector<i64>& stride) {
  return global("torch._utils", "_rebuild_tensor_v2") + "(" + in + number(offset) + numbers(shape) + numbers(stride) +
         "\x89" + global("collections", "OrderedDict") + ")Rt" + "R";
}
// {name: value, ...}
inline std::string dict(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string out = "}(";
  for (const auto& [name, value] : items) out += text(name) + value;
  return out + "u";
}

// A file of torch.save; storages: key -> bytes.
inline std::string torch_file(const std::string& pickled,
                              const std::vector<std::pair<std::string, std::string>>& storages,
                              const std::vector<ZipPart>& more = {}) {
  std::vector<ZipPart> parts = {{.name = "archive/data.pkl", .data = pickled, .descriptor = true}};
  for (const auto& [key, bytes] : storages)
    parts.push_back({.name = "archive/data/" + key, .data = bytes, .descriptor = true});
  parts.insert(parts.end(), more.begin(), more.end());
  parts.push_back({.name = "archive/version", .data = "3\n", .descriptor = true});
  return make_zip(parts, {.zip64 = true});
}

}  // namespace ds::testing
