// SPDX-License-Identifier: Apache-2.0
// The header is parsed as a stream of events, so that a hostile one costs no more memory than its own names and shapes;
// what is built is only the table.

#include "formats/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/content_kind.h"
#include "base/json.h"

namespace ds {
namespace {

// Every type of the format with its size; those that DType can name are readable, all are checked.
struct TypeRow {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};
constexpr TypeRow kTypes[] = {
    {"F32", 32, DType::F32},
    {"BF16", 16, DType::BF16},
    {"F16", 16, DType::F16},
    {"F64", 64, DType::F64},
    {"I32", 32, DType::I32},
    {"I64", 64, DType::I64},
    {"U16", 16, DType::U16},
    {"U8", 8, DType::U8},
    {"I8", 8, DType::I8},
    {"I16", 16, DType::I16},
    {"U32", 32, DType::U32},
    {"U64", 64, DType::U64},
    {"BOOL", 8, DType::Bool},
    {"F8_E4M3", 8, DType::F8E4M3},
    {"F8_E5M2", 8, DType::F8E5M2},
    {"C64", 64, {}},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"F4", 4, {}},
};

constexpr size_t kMaxName = 4096;
constexpr size_t kMaxDims = 64;

// Receives the events of one header. Depth 1: tensor names; 2: a tensor's fields or metadata; 3: its arrays.
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderHandler(const std::string& path, std::string_view json) : path_(path), json_(json) {}

  struct Entry {
    std::string name;
    const TypeRow* type = nullptr;
    std::optional<std::vector<i64>> shape;
    std::optional<std::array<i64, 2>> range;
  };
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;

  bool start_object(size_t) override {
    if (depth_ == 0 || (depth_ == 1 && !in_array_)) return ++depth_, true;
    refuse("an object where none belongs");
  }
  bool end_object() override {
    if (--depth_ == 1) {
      if (!in_metadata_) finish_entry();
      in_metadata_ = false;
    }
    return true;
  }
  bool key(std::string& text) override {
    if (depth_ == 1) {
      check_name(text);
      in_metadata_ = text == "__metadata__";
      if (in_metadata_) {
        check(!std::exchange(seen_metadata_, true), "__metadata__ appears twice");
      } else {
        entries.push_back({std::move(text), nullptr, {}, {}});
      }
    } else {
      field_ = std::move(text);
      if (in_metadata_) check(!metadata.contains(field_), "metadata '{}' appears twice", field_);
    }
    return true;
  }
  bool start_array(size_t) override {
    check(depth_ == 2 && !in_metadata_ && !in_array_, "an array where none belongs");
    numbers_.clear();
    return in_array_ = true;
  }
  bool end_array() override {
    in_array_ = false;
    Entry& e = entries.back();
    if (field_ == "shape") {
      check(!e.shape, "'shape' appears twice");
      e.shape = numbers_;
    } else if (field_ == "data_offsets") {
      check(!e.range, "'data_offsets' appears twice");
      check(numbers_.size() == 2, "data_offsets must hold two numbers");
      e.range = {numbers_[0], numbers_[1]};
    } else {
      refuse("unknown field '{}'", field_);
    }
    return true;
  }
  bool number_unsigned(u64 value) override {
    check(in_array_, "a number where none belongs");
    check(value <= static_cast<u64>(std::numeric_limits<i64>::max()), "{} is too large", value);
    check(numbers_.size() < kMaxDims, "more than {} dims", kMaxDims);
    numbers_.push_back(static_cast<i64>(value));
    return true;
  }
  bool string(std::string& text) override {
    check(depth_ == 2 && !in_array_, "a string where none belongs");
    if (in_metadata_) {
      metadata.emplace(std::move(field_), std::move(text));
      return true;
    }
    check(field_ == "dtype", "unknown field '{}'", field_);
    Entry& e = entries.back();
    check(e.type == nullptr, "'dtype' appears twice");
    for (const TypeRow& row : kTypes) {
      if (row.name == text) e.type = &row;
    }
    check(e.type != nullptr, "unknown dtype '{}'", text.substr(0, 64));
    return true;
  }
  bool null() override { refuse("null where none belongs"); }
  bool boolean(bool) override { refuse("a boolean where none belongs"); }
  bool binary(nlohmann::json::binary_t&) override { refuse("binary data"); }
  bool number_integer(i64) override { refuse("a negative number"); }
  bool number_float(double, const std::string& text) override { refuse("'{}' is not a whole number", text); }
  bool parse_error(size_t at, const std::string& token, const nlohmann::detail::exception& e) override {
    refuse_json(json_, fmt::format("{}: header", path_), Errc::Corrupt, at, token, e);
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    const std::string where = entries.empty() || in_metadata_ ? "header" : quoted(entries.back().name);
    throw Error(Errc::Corrupt,
                fmt::format("{}: {}: {}", path_, where, fmt::format(format, std::forward<Args>(args)...)));
  }
  template <class... Args>
  void check(bool ok, fmt::format_string<Args...> format, Args&&... args) const {
    if (!ok) refuse<Args...>(format, std::forward<Args>(args)...);
  }
  static std::string quoted(std::string_view name) { return fmt::format("tensor '{}'", name.substr(0, 200)); }

  void check_name(std::string_view name) const {
    DS_CHECK(!name.empty() && name.size() <= kMaxName, Errc::Corrupt,
             "{}: a tensor name of {} bytes (1 to {} are accepted)", path_, name.size(), kMaxName);
    DS_CHECK(std::none_of(name.begin(), name.end(), [](char c) { return static_cast<u8>(c) < 0x20; }), Errc::Corrupt,
             "{}: a tensor name contains control characters", path_);
  }
  // The reference multiplies from the left: [2^40, 2^40, 0] overflows, [0, 2^40, 2^40] does not.
  static bool fits_in_order(const std::vector<i64>& shape) noexcept {
    u64 n = 1;
    return std::all_of(shape.begin(), shape.end(),
                       [&](i64 d) { return !__builtin_mul_overflow(n, static_cast<u64>(d), &n); });
  }
  void finish_entry() const {
    const Entry& e = entries.back();
    check(e.type != nullptr, "no 'dtype'");
    check(e.shape.has_value(), "no 'shape'");
    check(e.range.has_value(), "no 'data_offsets'");
    const auto [begin, end] = *e.range;
    check(begin <= end, "data_offsets run backwards ({} to {})", begin, end);
    const std::optional<i64> bits = checked_product(*e.shape, e.type->bits);
    check(bits.has_value() && fits_in_order(*e.shape), "the product of its shape overflows");
    check(*bits % 8 == 0, "its {} elements of {} do not fill whole bytes", *bits / e.type->bits, e.type->name);
    check(end - begin == *bits / 8, "{} bytes at data_offsets, {} by dtype and shape", end - begin, *bits / 8);
  }

  const std::string& path_;
  const std::string_view json_;
  int depth_ = 0;
  bool in_array_ = false, in_metadata_ = false, seen_metadata_ = false;
  std::string field_;
  std::vector<i64> numbers_;
};

void refuse_duplicates(const std::vector<HeaderHandler::Entry>& entries, const std::string& path) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const auto& e : entries) names.push_back(e.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  DS_CHECK(twice == names.end(), Errc::Corrupt, "{}: tensor '{}' appears twice", path, *twice);
}

// The data is covered exactly once: in order of offset, each tensor begins where the one before ended.
void check_coverage(const std::vector<HeaderHandler::Entry>& entries, i64 data_bytes, const std::string& path) {
  std::vector<const HeaderHandler::Entry*> order;
  order.reserve(entries.size());
  for (const auto& e : entries) order.push_back(&e);
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return *a->range < *b->range; });
  i64 expected = 0;
  for (const auto* e : order) {
    const auto [begin, end] = *e->range;
    DS_CHECK(begin == expected, Errc::Corrupt, "{}: tensor '{}' begins at data byte {}, where {} is expected ({})",
             path, e->name.substr(0, 200), begin, expected, begin < expected ? "overlap" : "gap");
    DS_CHECK(end <= data_bytes, Errc::Corrupt, "{}: tensor '{}' ends at data byte {}, the file has {} (truncated?)",
             path, e->name.substr(0, 200), end, data_bytes);
    expected = end;
  }
  DS_CHECK(expected == data_bytes, Errc::Corrupt, "{}: {} bytes after the last tensor", path, data_bytes - expected);
}

}  // namespace

TensorTable parse_safetensors(std::string_view json, i64 data_bytes, const std::string& path) {
  // Leading blanks are fine; a byte order mark or another kind of document is not.
  const size_t first = json.find_first_not_of(" \t\r\n");
  DS_CHECK(first != std::string_view::npos && json[first] == '{', Errc::Corrupt, "{}: header is not a JSON object",
           path);
  HeaderHandler handler(path, json);
  nlohmann::json::sax_parse(json.begin(), json.end(), &handler);
  refuse_duplicates(handler.entries, path);
  check_coverage(handler.entries, data_bytes, path);

  TensorTable table;
  table.metadata = std::move(handler.metadata);
  const i64 data = 8 + narrow<i64>(json.size());
  for (auto& e : handler.entries) {
    if (e.type->dtype) {
      table.tensors.push_back({std::move(e.name), *e.type->dtype, std::move(*e.shape)});
      table.offsets.push_back(data + (*e.range)[0]);
    } else {
      table.foreign.push_back({std::move(e.name), std::string(e.type->name)});
    }
  }
  return table;
}

TensorTable read_safetensors(const File& file) {
  const i64 bytes = file.size();
  const auto check = [&]<class... Args>(bool ok, fmt::format_string<Args...> why, Args&&... args) {
    if (!ok)
      throw Error(Errc::Corrupt,
                  not_of_kind(file, "a safetensors file", fmt::format(why, std::forward<Args>(args)...)));
  };
  check(bytes >= 8, "{} bytes are too few for a safetensors file", bytes);
  u64 header = 0;
  file.read_at(0, &header, 8);
  check(header <= static_cast<u64>(kMaxSafetensorsHeader), "header length {} is above {}: not a safetensors file?",
        header, kMaxSafetensorsHeader);
  const i64 length = static_cast<i64>(header);
  check(length <= bytes - 8, "header length {} in a file of {} bytes (truncated?)", length, bytes);
  std::string json(static_cast<size_t>(length), '\0');
  file.read_at(8, json.data(), length);
  DS_CHECK(json.find('\0') == std::string::npos, Errc::Corrupt, "{}: its header has a NUL byte; padding is blanks",
           file.path());
  return parse_safetensors(json, bytes - 8 - length, file.path());
}

std::string make_safetensors_header(const std::vector<TensorInfo>& tensors,
                                    const std::map<std::string, std::string>& metadata, std::vector<i64>* offsets) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  // Larger element types first, so that every tensor is aligned to its type.
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return dtype_bytes(tensors[a].dtype) > dtype_bytes(tensors[b].dtype); });
  offsets->assign(tensors.size(), 0);
  i64 end = 0;
  std::string json = header.dump();
  json.pop_back();  // entries are appended as text: looking up keys in an ordered object is linear
  for (size_t i : order) {
    const TensorInfo& t = tensors[i];
    const auto row = std::find_if(std::begin(kTypes), std::end(kTypes), [&](auto& r) { return r.dtype == t.dtype; });
    (*offsets)[i] = end;
    json += fmt::format(
        "{}{}:{}", json.size() > 1 ? "," : "", nlohmann::json(t.name).dump(),
        nlohmann::ordered_json{{"dtype", row->name}, {"shape", t.shape}, {"data_offsets", {end, end + t.bytes()}}}
            .dump());
    end += t.bytes();
  }
  json += '}';
  const i64 length = align_up(narrow<i64>(json.size()), 8);
  DS_CHECK(length <= kMaxSafetensorsHeader, Errc::Unavailable,
           "a safetensors header of {} bytes for {} tensors exceeds the limit of readers; write HDF5 instead", length,
           tensors.size());
  json.resize(static_cast<size_t>(length), ' ');
  for (i64& o : *offsets) o += 8 + length;
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + json;
}

std::map<std::string, std::string> read_weight_index(const std::string& path) {
  const std::string_view kind = path.ends_with(".bin.index.json") ? "bin" : "safetensors";
  const std::string text = read_text_file(path, kMaxSafetensorsHeader);
  std::map<std::string, std::string> files;
  const nlohmann::json index =
      parse_sorted_json(text, path, {.error = Errc::Corrupt, .max_depth = 5, .comments = false});
  try {
    const nlohmann::json& map = index.at("weight_map");
    DS_CHECK(map.is_object(), Errc::Corrupt, "{}: weight_map is not an object", path);
    for (const auto& [name, file] : map.items()) files[name] = file.get<std::string>();
  } catch (const nlohmann::json::exception& e) {
    throw Error(Errc::Corrupt, fmt::format("{}: not a {} index: {}", path, kind, json_reason(e)));
  }
  for (const auto& [name, file] : files) {
    const bool plain = file.find_first_of("/\\:") == std::string::npos && !file.starts_with('.') &&
                       file.find('\0') == std::string::npos && file.ends_with(fmt::format(".{}", kind));
    DS_CHECK(plain, Errc::Corrupt, "{}: weight '{}' names '{}': only a plain *.{} file next to the index is read", path,
             name.substr(0, 200), file.substr(0, 200), kind);
  }
  return files;
}

}  // namespace ds
