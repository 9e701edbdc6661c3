// SPDX-License-Identifier: Apache-2.0
// The directory is at the end: [entries] [central directory] [Zip64 end, its locator] [end]. Nothing is searched for:
// every record is where the following one says, or the file is refused.

#include "formats/zip.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_set>

namespace ds {
namespace {

constexpr u32 kLocal = 0x04034b50, kCentral = 0x02014b50, kDescriptor = 0x08074b50;
constexpr u32 kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr i64 kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocator64Bytes = 20;
constexpr u16 kEncrypted = 1 << 0, kHasDescriptor = 1 << 3, kUtf8 = 1 << 11;
constexpr u16 kZip64Field = 1;
constexpr i64 kMaxDirectory = i64{256} << 20;
constexpr u32 kIn64 = 0xffffffff;  // "see the Zip64 field"

// Fields of a record, one after another.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    T value;
    DS_ASSERT(bytes_.size() >= sizeof value);
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }
  std::string_view text(size_t n) {
    DS_ASSERT(bytes_.size() >= n);
    const std::string_view s = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return s;
  }
  void skip(size_t n) { text(n); }
  size_t left() const noexcept { return bytes_.size(); }

 private:
  std::string_view bytes_;
};

// A central or local header.
struct Header {
  u16 flags = 0, method = 0;
  u32 crc32 = 0;
  u64 compressed = 0, bytes = 0, local = 0;
  std::string name;
};

class ZipReader {
 public:
  explicit ZipReader(const File& file) : file_(file), file_bytes_(file.size()) {}

  std::vector<ZipEntry> entries() {
    find_directory();
    const std::string directory = read(directory_, directory_bytes_);
    Fields in(directory);
    std::vector<Header> headers;
    for (u64 i = 0; i < count_; ++i) headers.push_back(central(in));
    check(in.left() == 0, "{} bytes of the central directory belong to no entry", in.left());
    refuse_duplicates(headers);

    std::vector<ZipEntry> result;
    for (const Header& h : headers) result.push_back({h.name, data_offset(h), static_cast<i64>(h.bytes), h.crc32});
    check_coverage(headers, result);
    return result;
  }

 private:
  template <class... Args>
  void check(bool ok, fmt::format_string<Args...> format, Args&&... args) const {
    if (!ok) [[unlikely]]
      throw Error(Errc::Corrupt, fmt::format("{}: {}", file_.path(), fmt::format(format, std::forward<Args>(args)...)));
  }

  std::string read(i64 offset, i64 bytes) const {
    check(offset >= 0 && bytes >= 0 && bytes <= file_bytes_ && offset <= file_bytes_ - bytes,
          "{} bytes at byte {} of a file of {} (truncated?)", bytes, offset, file_bytes_);
    std::string out(static_cast<size_t>(bytes), '\0');
    file_.read_at(offset, out.data(), bytes);
    return out;
  }

  void find_directory() {
    check(file_bytes_ >= kEndBytes, "{} bytes are too few for a zip archive", file_bytes_);
    const std::string end = read(file_bytes_ - kEndBytes, kEndBytes);
    Fields f(end);
    check(f.get<u32>() == kEnd,
          "does not end as a zip archive does (truncated, or something was appended; comments are not accepted)");
    const u16 disk = f.get<u16>(), directory_disk = f.get<u16>(), count_here = f.get<u16>(), count = f.get<u16>();
    const u32 bytes = f.get<u32>(), offset = f.get<u32>();
    check(f.get<u16>() == 0, "its end record announces a comment");
    DS_CHECK(disk == 0 && directory_disk == 0 && count_here == count, Errc::Unavailable,
             "{}: a part of an archive on several disks; join the parts", file_.path());

    i64 directory_end = file_bytes_ - kEndBytes;
    u64 directory_offset = offset, directory_bytes = bytes;
    count_ = count;
    const i64 locator_at = directory_end - kLocator64Bytes, end64_at = locator_at - kEnd64Bytes;
    const bool is_64 = locator_at >= 0 && Fields(read(locator_at, 4)).get<u32>() == kLocator64;
    if (is_64) {
      const std::string locator = read(locator_at, kLocator64Bytes);
      Fields l(locator);
      l.skip(4);
      const u32 end64_disk = l.get<u32>();
      const u64 end64_offset = l.get<u64>();
      const u32 disks = l.get<u32>();
      DS_CHECK(end64_disk == 0 && disks == 1, Errc::Unavailable,
               "{}: a part of an archive on several disks; join the parts", file_.path());
      check(end64_at >= 0 && end64_offset == static_cast<u64>(end64_at),
            "its Zip64 end record is not before the locator");
      const std::string end64 = read(end64_at, kEnd64Bytes);
      Fields e(end64);
      check(e.get<u32>() == kEnd64 && e.get<u64>() == kEnd64Bytes - 12, "its Zip64 end record is damaged");
      e.skip(4);  // versions
      const u32 disk64 = e.get<u32>(), directory_disk64 = e.get<u32>();
      const u64 count_here64 = e.get<u64>();
      count_ = e.get<u64>();
      directory_bytes = e.get<u64>();
      directory_offset = e.get<u64>();
      check(disk64 == 0 && directory_disk64 == 0 && count_here64 == count_, "its Zip64 end record is damaged");
      const bool agree = (count == 0xffff || count == count_) && (bytes == kIn64 || bytes == directory_bytes) &&
                         (offset == kIn64 || offset == directory_offset);
      check(agree, "its two end records contradict each other");
      directory_end = end64_at;
    } else {
      check(count != 0xffff && bytes != kIn64 && offset != kIn64, "its Zip64 end record is missing");
    }
    check(directory_bytes <= static_cast<u64>(kMaxDirectory), "a central directory of {} bytes, at most {} are read",
          directory_bytes, kMaxDirectory);
    check(directory_offset <= static_cast<u64>(directory_end) &&
              directory_bytes == static_cast<u64>(directory_end) - directory_offset,
          "its central directory ({} bytes at byte {}) does not end where the end record begins (byte {})",
          directory_bytes, directory_offset, directory_end);
    check(count_ <= directory_bytes / kCentralBytes, "{} entries in a central directory of {} bytes", count_,
          directory_bytes);
    directory_ = static_cast<i64>(directory_offset);
    directory_bytes_ = static_cast<i64>(directory_bytes);
  }

  // The numbers of the Zip64 field; none where there is no such field.
  std::vector<u64> zip64_field(std::string_view extra, const std::string& name) const {
    bool seen = false;
    std::vector<u64> numbers;
    for (Fields in(extra); in.left() > 0;) {
      check(in.left() >= 4, "entry '{}': its extra field is cut off", name);
      const u16 id = in.get<u16>(), bytes = in.get<u16>();
      check(in.left() >= bytes, "entry '{}': its extra field is cut off", name);
      Fields field(in.text(bytes));
      if (id != kZip64Field) continue;
      check(!std::exchange(seen, true), "entry '{}': two Zip64 fields", name);
      while (field.left() >= 8) numbers.push_back(field.get<u64>());
      check(field.left() == 0, "entry '{}': its Zip64 field is too short", name);
    }
    return numbers;
  }

  // The numbers stand for those of `values` that are kIn64, in this order, and for nothing else.
  void take_zip64(const std::vector<u64>& numbers, const std::string& name, std::initializer_list<u64*> values) const {
    size_t used = 0;
    for (u64* value : values) {
      if (*value != kIn64) continue;
      check(used < numbers.size(), "entry '{}': its Zip64 field is too short", name);
      *value = numbers[used++];
    }
    check(used == numbers.size(), "entry '{}': its Zip64 field is too long", name);
  }

  Header central(Fields& in) const {
    check(in.left() >= kCentralBytes, "its central directory is cut off");
    check(in.get<u32>() == kCentral, "its central directory is damaged");
    Header h;
    in.skip(4);  // versions
    h.flags = in.get<u16>();
    h.method = in.get<u16>();
    in.skip(4);  // date
    h.crc32 = in.get<u32>();
    h.compressed = in.get<u32>();
    h.bytes = in.get<u32>();
    const u16 name = in.get<u16>(), extra = in.get<u16>(), comment = in.get<u16>(), disk = in.get<u16>();
    in.skip(6);  // attributes
    h.local = in.get<u32>();
    check(in.left() >= size_t{name} + extra + comment, "its central directory is cut off");
    h.name = in.text(name);
    check_name(h.name);
    take_zip64(zip64_field(in.text(extra), h.name), h.name, {&h.bytes, &h.compressed, &h.local});
    check(comment == 0, "entry '{}' has a comment", h.name);
    DS_CHECK(disk == 0, Errc::Unavailable, "{}: entry '{}' is on another disk", file_.path(), h.name);
    DS_CHECK((h.flags & kEncrypted) == 0, Errc::Unavailable, "{}: entry '{}' is encrypted", file_.path(), h.name);
    DS_CHECK((h.flags & ~(kHasDescriptor | kUtf8)) == 0, Errc::Unavailable, "{}: entry '{}' has the flags {:#x}",
             file_.path(), h.name, h.flags);
    DS_CHECK(h.method == 0, Errc::Unavailable,
             "{}: entry '{}' is compressed (method {}), as in a TorchScript archive, which is a program (save the "
             "state_dict() of the module instead), or in one that was packed again (store its entries)",
             file_.path(), h.name, h.method);
    check(h.compressed == h.bytes, "entry '{}': stored, but {} bytes stand for {}", h.name, h.compressed, h.bytes);
    check(h.bytes <= static_cast<u64>(directory_) && h.local <= static_cast<u64>(directory_),
          "entry '{}': {} bytes, its header at byte {}, in a file of {}", h.name, h.bytes, h.local, file_bytes_);
    return h;
  }

  void check_name(const std::string& name) const {
    const auto shown = [&] { return name.substr(0, 200); };
    check(!name.empty(), "an entry without a name");
    check(std::none_of(name.begin(), name.end(), [](char c) { return static_cast<u8>(c) < 0x20 || c == 0x7f; }),
          "the name of an entry contains control characters");
    check(name.front() != '/' && name.find('\\') == std::string::npos && name.find(':') == std::string::npos,
          "entry '{}': not a plain relative name", shown());
    for (size_t begin = 0; begin <= name.size();) {
      const size_t end = std::min(name.find('/', begin), name.size());
      check(name.compare(begin, end - begin, "..") != 0, "entry '{}': leads out of the archive", shown());
      begin = end + 1;
    }
  }

  void refuse_duplicates(const std::vector<Header>& headers) const {
    std::unordered_set<std::string_view> seen;
    for (const Header& h : headers) check(seen.insert(h.name).second, "entry '{}' appears twice", h.name);
  }

  // The start of the data, after a local header that agrees with the directory.
  i64 data_offset(const Header& h) const {
    const i64 at = static_cast<i64>(h.local);
    const std::string fixed = read(at, kLocalBytes);
    Fields f(fixed);
    check(f.get<u32>() == kLocal, "entry '{}': no local header at byte {}", h.name, at);
    f.skip(2);  // version
    const u16 flags = f.get<u16>(), method = f.get<u16>();
    f.skip(4);  // date
    const u32 crc = f.get<u32>();
    u64 compressed = f.get<u32>(), bytes = f.get<u32>();
    const u16 name = f.get<u16>(), extra = f.get<u16>();
    const std::string rest = read(at + kLocalBytes, i64{name} + extra);
    check(std::string_view(rest).substr(0, name) == h.name, "entry '{}': its local header has another name", h.name);
    const bool later = (h.flags & kHasDescriptor) != 0;
    const std::vector<u64> numbers = zip64_field(std::string_view(rest).substr(name), h.name);
    // torch's writer leaves the sizes to the descriptor, and still says here what the central directory's field says:
    // both sizes, where they take 64 bits, and its own place, where that does.
    using Numbers = std::vector<u64>;
    const bool as_torch = later && bytes == 0 && compressed == 0 &&
                          (numbers == Numbers{h.bytes, h.compressed} || numbers == Numbers{h.local} ||
                           numbers == Numbers{h.bytes, h.compressed, h.local});
    if (!as_torch) take_zip64(numbers, h.name, {&bytes, &compressed});
    const auto agrees = [&](u64 local, u64 central) { return local == central || (later && local == 0); };
    check(flags == h.flags && method == h.method && agrees(crc, h.crc32) && agrees(bytes, h.bytes) &&
              agrees(compressed, h.compressed),
          "entry '{}': its local header contradicts the central directory", h.name);
    return at + kLocalBytes + name + extra;
  }

  // Bytes of the data descriptor at `at`, before `limit`; nothing where there is none that says what `h` says.
  std::optional<i64> descriptor_bytes(const Header& h, i64 at, i64 limit) const {
    for (const bool is_64 : {false, true}) {
      const i64 bytes = is_64 ? 24 : 16;
      if (at + bytes != limit) continue;
      const std::string record = read(at, bytes);
      Fields f(record);
      const bool same = f.get<u32>() == kDescriptor && f.get<u32>() == h.crc32;
      const u64 compressed = is_64 ? f.get<u64>() : f.get<u32>(), size = is_64 ? f.get<u64>() : f.get<u32>();
      if (same && compressed == h.compressed && size == h.bytes) return bytes;
    }
    return std::nullopt;
  }

  void check_coverage(const std::vector<Header>& headers, const std::vector<ZipEntry>& entries) const {
    std::vector<size_t> order(headers.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return headers[a].local < headers[b].local; });
    i64 expected = 0;
    for (size_t k = 0; k < order.size(); ++k) {
      const Header& h = headers[order[k]];
      const ZipEntry& e = entries[order[k]];
      const i64 begin = static_cast<i64>(h.local);
      const i64 next = k + 1 < order.size() ? static_cast<i64>(headers[order[k + 1]].local) : directory_;
      check(begin == expected, "entry '{}' begins at byte {}, where {} is expected ({})", h.name, begin, expected,
            begin < expected ? "overlap" : "bytes that belong to nothing");
      expected = e.offset + e.bytes;
      check(expected <= next, "entry '{}' ends at byte {}, after byte {} where the next record begins (overlap)",
            h.name, expected, next);
      if ((h.flags & kHasDescriptor) == 0) continue;
      const std::optional<i64> descriptor = descriptor_bytes(h, expected, next);
      check(descriptor.has_value(), "entry '{}': its data descriptor contradicts the central directory", h.name);
      expected += *descriptor;
    }
    check(expected == directory_, "{} bytes before the central directory belong to no entry", directory_ - expected);
  }

  const File& file_;
  const i64 file_bytes_;
  i64 directory_ = 0, directory_bytes_ = 0;
  u64 count_ = 0;
};

}  // namespace

std::vector<ZipEntry> read_zip(const File& file) { return ZipReader(file).entries(); }

void check_crc32(const File& file, const ZipEntry& entry, const Tick& tick) {
  constexpr i64 kChunk = i64{1} << 20;
  std::vector<Bytef> chunk(static_cast<size_t>(std::min(kChunk, entry.bytes)));
  uLong crc = ::crc32(0, nullptr, 0);
  for (i64 done = 0; done < entry.bytes; done += kChunk) {
    if (tick) tick();
    const i64 n = std::min(kChunk, entry.bytes - done);
    file.read_at(entry.offset + done, chunk.data(), n);
    crc = ::crc32(crc, chunk.data(), static_cast<uInt>(n));
  }
  DS_CHECK(crc == entry.crc32, Errc::Corrupt,
           "{}: entry '{}' is damaged: its CRC-32 differs from the directory's (torch can be told not to write one; "
           "save it with)",
           file.path(), entry.name);
}

}  // namespace ds
