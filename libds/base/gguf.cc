// SPDX-License-Identifier: Apache-2.0
#include "base/gguf.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/content_kind.h"
#include "base/file.h"
#include "base/utf8.h"

namespace ds {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kGgufMagic = "GGUF";
constexpr i64 kMostGgufBytes = i64{256} << 20;  // of values and table; published files have at most some 20 MiB
constexpr u64 kMostGgufValues = 1 << 16, kMostGgufTensors = 1 << 20;
constexpr u32 kMostGgufDims = 4;
constexpr i64 kMostGgufName = 4096;

// ggml's types and their blocks; some numbers are no longer in use.
constexpr GgufType kGgufTypes[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},      {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},      {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 40},
    {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},   {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},
    {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36},    {41, "Q1_0", 128, 18},
};

// Types of values.
enum : u32 {
  kGgufU8,
  kGgufI8,
  kGgufU16,
  kGgufI16,
  kGgufU32,
  kGgufI32,
  kGgufF32,
  kGgufBool,
  kGgufString,
  kGgufArray,
  kGgufU64,
  kGgufI64,
  kGgufF64
};
constexpr u64 kGgufValueBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // 0: of any length

bool is_gguf_text(std::string_view text) noexcept {
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

// A name that can be shown, as UTF-8.
bool is_gguf_name(std::string_view name) noexcept {
  return !name.empty() && std::ssize(name) <= kMostGgufName && is_gguf_text(name) &&
         std::none_of(name.begin(), name.end(), [](char c) { return static_cast<u8>(c) < 0x20; });
}

template <class T>
T load_gguf(const char* at) noexcept {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// A number of any type but a string's and an array's; u64 above the range of i64 become doubles.
struct GgufNumber {
  bool is_integer = false;
  i64 integer = 0;
  double real = 0;
};
GgufNumber load_gguf_number(u32 type, const char* at) noexcept {
  const auto whole = [](auto x) { return GgufNumber{true, static_cast<i64>(x), static_cast<double>(x)}; };
  switch (type) {
    case kGgufU8: return whole(load_gguf<u8>(at));
    case kGgufI8: return whole(load_gguf<std::int8_t>(at));
    case kGgufU16: return whole(load_gguf<u16>(at));
    case kGgufI16: return whole(load_gguf<std::int16_t>(at));
    case kGgufU32: return whole(load_gguf<u32>(at));
    case kGgufI32: return whole(load_gguf<i32>(at));
    case kGgufI64: return whole(load_gguf<i64>(at));
    case kGgufF32: return {false, 0, load_gguf<float>(at)};
    case kGgufF64: return {false, 0, load_gguf<double>(at)};
    default: break;
  }
  const u64 x = load_gguf<u64>(at);
  if (x > static_cast<u64>(std::numeric_limits<i64>::max())) return {false, 0, static_cast<double>(x)};
  return whole(x);
}
bool is_gguf_number(u32 type) noexcept {
  return type < std::size(kGgufValueBytes) && kGgufValueBytes[type] > 0 && type != kGgufBool;
}

// NAME-00001-of-0000N.gguf with other numbers.
std::string gguf_part_name(std::string_view first, u64 part, u64 parts) {
  constexpr std::string_view kEnd = "-00001-of-00001.gguf";
  return fmt::format("{}-{:05}-of-{:05}.gguf", first.substr(0, first.size() - kEnd.size()), part, parts);
}

}  // namespace

const GgufType* gguf_type(u32 number) noexcept {
  const auto* const found = std::ranges::find(kGgufTypes, number, &GgufType::number);
  return found == std::end(kGgufTypes) ? nullptr : found;
}

i64 GgufTensor::numel() const noexcept {
  i64 n = 1;
  for (const i64 d : shape) n *= d;
  return n;
}

std::string GgufTensor::type_name() const {
  const GgufType* const known = gguf_type(type);
  return known != nullptr ? std::string(known->name) : fmt::format("type {}", type);
}

bool is_gguf(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return false;
  if (path.ends_with(".gguf")) return true;
  const File file = File::open_read(path);
  char head[kGgufMagic.size()] = {};
  if (file.size() < std::ssize(kGgufMagic)) return false;
  file.read_at(0, head, sizeof head);
  return std::string_view(head, sizeof head) == kGgufMagic;
}

// Reads the head of one file from front to back, as far as it goes.
class Gguf::Reader {
 public:
  explicit Reader(const std::string& path) : file_(File::open_read(path)), size_(file_.size()) {}

  void read(std::map<std::string, Value>& values, std::vector<GgufTensor>& tensors, size_t number) {
    read_signature();
    const u64 num_tensors = take<u64>("the number of tensors"), num_values = take<u64>("the number of values");
    // The least that a tensor and a value take in the file.
    constexpr u64 kTensorBytes = 8 + 4 + 4 + 8, kEntryBytes = 8 + 4 + 1;
    check_count("tensors", num_tensors, kTensorBytes, kMostGgufTensors);
    check_count("values", num_values, kEntryBytes, kMostGgufValues);
    for (u64 i = 0; i < num_values; ++i) read_value(values);
    for (u64 i = 0; i < num_tensors; ++i) read_tensor(tensors, number);
    place_tensors(alignment(values), tensors, number);
  }
  std::string bytes() && { return std::move(bytes_); }

 private:
  template <class... Args>
  void check(bool ok, fmt::format_string<Args...> format, Args&&... args) const {
    if (!ok)
      throw Error(Errc::Corrupt, fmt::format("{}: {}", file_.path(), fmt::format(format, std::forward<Args>(args)...)));
  }

  void read_signature() {
    DS_CHECK(size_ >= 8, Errc::Corrupt, "{}: {} bytes are too few for a GGUF file", file_.path(), size_);
    const i64 magic = take_bytes(std::ssize(kGgufMagic), "its signature");
    if (std::string_view(bytes_).substr(static_cast<size_t>(magic), kGgufMagic.size()) != kGgufMagic)
      throw Error(Errc::Corrupt, not_of_kind(file_, "a GGUF file", "not a GGUF file"));
    const u32 version = take<u32>("its version");
    DS_CHECK((version & 0xffff) != 0, Errc::Unavailable,
             "{}: a big-endian GGUF file, which is not supported; convert it: gguf-convert-endian FILE little",
             file_.path());
    DS_CHECK(version == 2 || version == 3, Errc::Unavailable,
             "{}: version {} of GGUF is not supported (2 and 3 are); convert the model again", file_.path(), version);
  }

  void check_count(std::string_view what, u64 count, u64 least_bytes, u64 most) const {
    check(count <= static_cast<u64>(size_) / least_bytes, "states {} {}, which do not fit into its {} bytes", count,
          what, size_);
    check(count <= most, "states {} {} (at most {} are read)", count, what, most);
  }

  // The place of the next `count` bytes in bytes_.
  i64 take_bytes(i64 count, std::string_view what) {
    check(count >= 0 && count <= size_ - at_, "ends within {} (truncated?)", what);
    check(count <= kMostGgufBytes - at_, "its values and its table of tensors take more than {} MiB",
          kMostGgufBytes >> 20);
    if (at_ + count > std::ssize(bytes_)) {
      const i64 had = std::ssize(bytes_),
                now = std::min({size_, kMostGgufBytes, std::max({at_ + count, 2 * had, i64{1} << 16})});
      bytes_.resize(static_cast<size_t>(now));
      file_.read_at(had, bytes_.data() + had, now - had);
    }
    return std::exchange(at_, at_ + count);
  }
  template <class T>
  T take(std::string_view what) {
    const i64 place = take_bytes(sizeof(T), what);
    return load_gguf<T>(bytes_.data() + place);
  }
  std::string_view take_string(std::string_view what) {
    const i64 length = bounded(take<u64>(what));
    const i64 place = take_bytes(length, what);
    return std::string_view(bytes_).substr(static_cast<size_t>(place), static_cast<size_t>(length));
  }
  // Lengths above any file's are refused where they are taken.
  static i64 bounded(u64 length) noexcept {
    return static_cast<i64>(std::min<u64>(length, std::numeric_limits<i64>::max()));
  }

  void read_value(std::map<std::string, Value>& values) {
    const std::string key(take_string("the name of a value"));
    check(is_gguf_name(key), "the name of a value is not 1 to {} bytes of printable UTF-8", kMostGgufName);
    Value value{.type = take<u32>(key)};
    check(value.type < std::size(kGgufValueBytes), "'{}': there is no type {} of values", key, value.type);
    value.element = value.type;
    if (value.type == kGgufArray) {
      value.element = take<u32>(key);
      check(value.element != kGgufArray, "'{}': a list of lists is not supported", key);
      check(value.element < std::size(kGgufValueBytes), "'{}': there is no type {} of values", key, value.element);
      value.count = take<u64>(key);
    }
    value.at = at_;
    if (value.element == kGgufString) {
      check(value.count <= static_cast<u64>(size_) / 8, "'{}': {} strings do not fit into the file's {} bytes", key,
            value.count, size_);
      for (u64 i = 0; i < value.count; ++i) take_string(key);
    } else {
      u64 bytes = 0;
      const bool overflows = __builtin_mul_overflow(value.count, kGgufValueBytes[value.element], &bytes);
      check(!overflows, "'{}': {} values do not fit into the file's {} bytes", key, value.count, size_);
      take_bytes(bounded(bytes), key);
    }
    check(values.emplace(key, value).second, "'{}' appears twice", key);
  }

  void read_tensor(std::vector<GgufTensor>& tensors, size_t number) {
    GgufTensor t{.name = std::string(take_string("the table of tensors")), .file = number};
    check(is_gguf_name(t.name), "the name of a tensor is not 1 to {} bytes of printable UTF-8", kMostGgufName);
    const u32 dims = take<u32>(t.name);
    check(dims <= kMostGgufDims, "tensor '{}': {} dims (at most {} are read)", t.name, dims, kMostGgufDims);
    for (u32 i = 0; i < dims; ++i) {
      const u64 d = take<u64>(t.name);
      check(d <= static_cast<u64>(std::numeric_limits<i64>::max()), "tensor '{}': a dim of {}", t.name, d);
      t.shape.push_back(static_cast<i64>(d));
    }
    std::ranges::reverse(t.shape);
    t.type = take<u32>(t.name);
    const u64 offset = take<u64>(t.name);
    check(offset <= static_cast<u64>(size_), "tensor '{}' begins at data byte {} of a file of {} bytes (truncated?)",
          t.name, offset, size_);
    t.offset = static_cast<i64>(offset);
    tensors.push_back(std::move(t));
  }

  i64 alignment(const std::map<std::string, Value>& values) const {
    constexpr i64 kUsual = 32, kMost = i64{1} << 30;
    const auto it = values.find("general.alignment");
    if (it == values.end()) return kUsual;
    check(it->second.type == kGgufU32, "'general.alignment' is not a number of type u32");
    const i64 n = load_gguf<u32>(bytes_.data() + it->second.at);
    check(n > 0 && n <= kMost && (n & (n - 1)) == 0, "'general.alignment' is {}, not a power of two up to 2^30", n);
    return n;
  }

  // Turns offsets in the data into offsets in the file, and checks them.
  void place_tensors(i64 alignment, std::vector<GgufTensor>& tensors, size_t number) const {
    const i64 data = align_up(at_, alignment);
    struct Range {
      i64 begin, end;
      const GgufTensor* tensor;
    };
    std::vector<Range> ranges;
    for (GgufTensor& t : tensors) {
      if (t.file != number) continue;
      const i64 bytes = bytes_of(t);
      check(t.offset % alignment == 0, "tensor '{}' begins at data byte {}, no multiple of the alignment {}", t.name,
            t.offset, alignment);
      check(data <= size_ - t.offset && bytes <= size_ - t.offset - data,
            "tensor '{}' ends after the file's {} bytes (truncated?)", t.name, size_);
      t.offset += data;
      if (bytes > 0) ranges.push_back({t.offset, t.offset + bytes, &t});
    }
    std::ranges::sort(ranges, {}, &Range::begin);
    for (size_t i = 1; i < ranges.size(); ++i)
      check(ranges[i - 1].end <= ranges[i].begin, "tensors '{}' and '{}' overlap", ranges[i - 1].tensor->name,
            ranges[i].tensor->name);
  }
  // 0 for a type that is not known, whose tensors nobody reads.
  i64 bytes_of(const GgufTensor& t) const {
    i64 elems = 1, bytes = 0;
    bool fits = true;
    for (const i64 d : t.shape) fits = fits && !__builtin_mul_overflow(elems, d, &elems);
    check(fits, "tensor '{}': the product of its shape overflows", t.name);
    const GgufType* const type = gguf_type(t.type);
    if (type == nullptr) return 0;
    const i64 row = t.shape.empty() ? 1 : t.shape.back();
    check(row % type->elems == 0, "tensor '{}': rows of {} elements are not whole blocks of {} of {}", t.name, row,
          type->elems, type->name);
    check(!__builtin_mul_overflow(elems / type->elems, type->bytes, &bytes),
          "tensor '{}': the product of its shape overflows", t.name);
    return bytes;
  }

  File file_;
  i64 size_, at_ = 0;
  std::string bytes_;
};

Gguf::Gguf(const std::string& path) : files_{path} {
  Reader reader(path);
  reader.read(values_, tensors_, 0);
  bytes_ = std::move(reader).bytes();
  open_others();
  check_tensors();
}

// The other files of a model in several.
void Gguf::open_others() {
  constexpr const char* kCount = "split.count";
  const i64 parts = integer(kCount).value_or(1), part = integer("split.no").value_or(0);
  constexpr i64 kMostParts = 99999;  // as the names have five digits
  DS_CHECK(parts >= 0 && parts <= kMostParts, Errc::Corrupt, "{}: '{}' is {}", path(), kCount, parts);
  if (parts <= 1) return;
  const std::string first = path();
  const std::string end = fmt::format("-{:05}-of-{:05}.gguf", part + 1, parts);
  DS_CHECK(part == 0, Errc::Unavailable, "{}: part {} of {} of a model: name the first, *-00001-of-{:05}.gguf", first,
           part + 1, parts, parts);
  DS_CHECK(first.ends_with(end), Errc::Corrupt,
           "{}: the first of {} files of a model, whose name must end with {} for the others to be found", first, parts,
           end);
  for (i64 i = 1; i < parts; ++i) {
    const std::string name = gguf_part_name(first, static_cast<u64>(i + 1), static_cast<u64>(parts));
    DS_CHECK(std::filesystem::exists(name), Errc::Corrupt, "{}: its part {} is missing", first, name);
    Gguf other;
    other.files_ = {name};
    Reader reader(name);
    reader.read(other.values_, tensors_, static_cast<size_t>(i));
    other.bytes_ = std::move(reader).bytes();
    DS_CHECK(other.integer("split.no") == i && other.integer(kCount) == parts, Errc::Corrupt,
             "{}: does not state that it is part {} of {}", name, i + 1, parts);
    files_.push_back(name);
  }
  const std::optional<i64> stated = integer("split.tensors.count");
  DS_CHECK(!stated || *stated == std::ssize(tensors_), Errc::Corrupt, "{}: states {} tensors, and its {} files have {}",
           first, *stated, parts, tensors_.size());
}

void Gguf::check_tensors() {
  for (size_t i = 0; i < tensors_.size(); ++i)
    DS_CHECK(index_.emplace(tensors_[i].name, i).second, Errc::Corrupt, "{}: tensor '{}' appears twice", path(),
             tensors_[i].name);
}

const GgufTensor* Gguf::find(std::string_view name) const noexcept {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

const Gguf::Value* Gguf::find_value(const std::string& key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

void Gguf::refuse(const std::string& key, std::string_view wanted) const {
  throw Error(Errc::Corrupt, fmt::format("{}: '{}' must be {}", path(), key, wanted));
}

std::optional<i64> Gguf::integer(const std::string& key) const {
  const Value* const v = find_value(key);
  if (v == nullptr) return std::nullopt;
  if (!is_gguf_number(v->type)) refuse(key, "a whole number");
  const GgufNumber n = load_gguf_number(v->type, bytes_.data() + v->at);
  if (!n.is_integer) refuse(key, "a whole number below 2^63");
  return n.integer;
}

std::optional<double> Gguf::number(const std::string& key) const {
  const Value* const v = find_value(key);
  if (v == nullptr) return std::nullopt;
  if (!is_gguf_number(v->type)) refuse(key, "a number");
  return load_gguf_number(v->type, bytes_.data() + v->at).real;
}

std::optional<bool> Gguf::flag(const std::string& key) const {
  const Value* const v = find_value(key);
  if (v == nullptr) return std::nullopt;
  const u8 byte = v->type == kGgufBool ? load_gguf<u8>(bytes_.data() + v->at) : 2;
  if (byte > 1) refuse(key, "true or false");
  return byte == 1;
}

// The elements of a list, or a single value, one after the other.
class Gguf::Items {
 public:
  Items(const std::string& bytes, const Value* value) : bytes_(bytes), value_(value), at_(value ? value->at : 0) {}
  u32 type() const noexcept { return value_->element; }
  u64 count() const noexcept { return value_ == nullptr ? 0 : value_->count; }
  std::string_view string() {
    const auto length = static_cast<i64>(load_gguf<u64>(bytes_.data() + at_));
    const i64 place = at_ + 8;
    at_ = place + length;
    return std::string_view(bytes_).substr(static_cast<size_t>(place), static_cast<size_t>(length));
  }
  GgufNumber number() {
    const GgufNumber n = load_gguf_number(type(), bytes_.data() + at_);
    at_ += static_cast<i64>(kGgufValueBytes[type()]);
    return n;
  }

 private:
  const std::string& bytes_;
  const Value* value_;
  i64 at_;
};

Gguf::Items Gguf::list(const std::string& key) const {
  const Value* const v = find_value(key);
  if (v != nullptr && v->type != kGgufArray) refuse(key, "a list");
  return {bytes_, v};
}

std::optional<std::string> Gguf::text(const std::string& key) const {
  const Value* const v = find_value(key);
  if (v == nullptr) return std::nullopt;
  if (v->type != kGgufString) refuse(key, "a string");
  const std::string_view text = Items(bytes_, v).string();
  if (!is_gguf_text(text)) refuse(key, "UTF-8");
  return std::string(text);
}

std::vector<std::string> Gguf::texts(const std::string& key) const {
  Items items = list(key);
  std::vector<std::string> all;
  if (items.count() > 0 && items.type() != kGgufString) refuse(key, "a list of strings");
  for (u64 i = 0; i < items.count(); ++i) {
    const std::string_view text = items.string();
    if (!is_gguf_text(text)) refuse(fmt::format("{}[{}]", key, i), "UTF-8");
    all.emplace_back(text);
  }
  return all;
}

std::vector<i64> Gguf::integers(const std::string& key) const {
  Items items = list(key);
  std::vector<i64> all;
  if (items.count() > 0 && !is_gguf_number(items.type())) refuse(key, "a list of whole numbers");
  for (u64 i = 0; i < items.count(); ++i) {
    const GgufNumber n = items.number();
    if (!n.is_integer) refuse(key, "a list of whole numbers");
    all.push_back(n.integer);
  }
  return all;
}

std::vector<double> Gguf::numbers(const std::string& key) const {
  Items items = list(key);
  std::vector<double> all;
  if (items.count() > 0 && !is_gguf_number(items.type())) refuse(key, "a list of numbers");
  for (u64 i = 0; i < items.count(); ++i) all.push_back(items.number().real);
  return all;
}

std::vector<std::string> Gguf::keys() const {
  std::vector<std::string> all;
  for (const auto& [key, value] : values_) all.push_back(key);
  return all;
}

}  // namespace ds
