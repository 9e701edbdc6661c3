// SPDX-License-Identifier: Apache-2.0
#include "monitor/event_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <optional>

#include "base/appended_file.h"
#include "launch/process.h"

namespace ds::monitor {
namespace {

constexpr std::string_view kPrefix = "events.out.tfevents.";

constexpr std::array<u32, 256> kCrcTable = [] {
  std::array<u32, 256> table{};
  for (u32 i = 0; i < 256; ++i) {
    u32 crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
    table[i] = crc;
  }
  return table;
}();

// A CRC of what has CRCs in it would be weak: TFRecords turn and shift theirs.
u32 masked(u32 crc) noexcept { return std::rotr(crc, 15) + 0xa282ead8u; }

template <class T>
std::string little_endian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof value; ++i) bytes += static_cast<char>(value >> 8 * i & 0xff);
  return bytes;
}

std::string varint(u64 value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7f) | 0x80);
  return bytes + static_cast<char>(value);
}

// A field of a protobuf message: its number and how it is written, then the value.
enum class Wire : u8 { Varint = 0, Fixed64 = 1, Bytes = 2, Fixed32 = 5 };
std::string field_key(int field, Wire wire) { return varint(static_cast<u64>(field) << 3 | static_cast<u64>(wire)); }
std::string bytes_field(int field, std::string_view bytes) {
  return field_key(field, Wire::Bytes) + varint(bytes.size()) + std::string(bytes);
}

std::string tf_record(std::string_view data) {
  const std::string length = little_endian(static_cast<u64>(data.size()));
  return length + little_endian(masked(crc32c(length))) + std::string(data) + little_endian(masked(crc32c(data)));
}

std::string wall_time_field(double wall_time) {
  return field_key(1, Wire::Fixed64) + little_endian(std::bit_cast<u64>(wall_time));
}

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

class EventFile final : public Monitor {
 public:
  EventFile(const std::string& directory, bool has_loss_scale)
      : has_loss_scale_(has_loss_scale), file_(new_file(directory)) {
    file_.append(version_record(unix_time()));
  }

  void step(const StepRecord& record) override {
    const double time = unix_time();
    std::string records;
    for (const Scalar& s : scalars_of(record, has_loss_scale_)) records += scalar_record(time, s);
    file_.append(records);
  }
  void validation(i64 step, double loss) override {
    file_.append(scalar_record(unix_time(), validation_scalar(step, loss)));
  }

 private:
  // Another name for each file of each process; one that is taken, say by a container with the same numbers, is passed
  // over.
  static AppendedFile new_file(const std::string& directory) {
    static std::atomic<int> files = 0;
    for (;;) {
      std::optional<AppendedFile> file =
          AppendedFile::create(fmt::format("{}/{}{:010}.{}.{}.{}", directory, kPrefix, static_cast<i64>(unix_time()),
                                           launch::host_name(), getpid(), files++));
      if (file) return std::move(*file);
    }
  }

  const bool has_loss_scale_;
  AppendedFile file_;
};

}  // namespace

u32 crc32c(std::string_view bytes) noexcept {
  u32 crc = ~0u;
  for (const char c : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<u8>(c)) & 0xff];
  return ~crc;
}

std::string version_record(double wall_time) {
  return tf_record(wall_time_field(wall_time) + bytes_field(3, "brain.Event:2"));
}

std::string scalar_record(double wall_time, const Scalar& s) {
  const std::string value = bytes_field(1, s.tag) + field_key(2, Wire::Fixed32) +
                            little_endian(std::bit_cast<u32>(static_cast<float>(s.value)));
  std::string event = wall_time_field(wall_time);
  if (s.at != 0)
    event += field_key(2, Wire::Varint) + varint(static_cast<u64>(s.at));  // zero is not written in protobuf
  return tf_record(event + bytes_field(5, bytes_field(1, value)));
}

bool is_event_file(std::string_view name) noexcept { return name.starts_with(kPrefix); }

std::unique_ptr<Monitor> make_event_file(const std::string& directory, bool has_loss_scale) {
  return std::make_unique<EventFile>(directory, has_loss_scale);
}

}  // namespace ds::monitor
