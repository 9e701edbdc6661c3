// SPDX-License-Identifier: Apache-2.0
// Values are those of ggml's own dequantisation in fp32, bit for bit: a product of a code and its scale is exact, and a
// sum rounded.

#include "formats/gguf_blocks.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "formats/code_rows.h"

namespace ds {
namespace {

float half_of_block(const u8* at) noexcept {
  f16 x;
  std::memcpy(&x, at, sizeof x);
  return to_float(x);
}

u32 word_of_block(const u8* at) noexcept {
  u32 x = 0;
  std::memcpy(&x, at, sizeof x);
  return x;
}

int signed_of_block(const u8* at) noexcept { return static_cast<std::int8_t>(*at); }

void put_code(GgufBlock& to, int i, int code) noexcept {
  to.codes[static_cast<size_t>(i)] = static_cast<std::int8_t>(code);
}

// d | 32 codes of 8 bits
void unpack_q8_0(const u8* b, GgufBlock& to) {
  to.scales[0] = half_of_block(b);
  for (int i = 0; i < 32; ++i) put_code(to, i, signed_of_block(b + 2 + i));
}

// Codes of 4 bits: 16 bytes, the first half of the elements in their low nibbles.
int nibble(const u8* codes, int i) noexcept { return i < 16 ? codes[i] & 15 : codes[i - 16] >> 4; }

// d | codes
void unpack_q4_0(const u8* b, GgufBlock& to) {
  to.scales[0] = half_of_block(b);
  for (int i = 0; i < 32; ++i) put_code(to, i, nibble(b + 2, i) - 8);
}

// d | m | codes
void unpack_q4_1(const u8* b, GgufBlock& to) {
  to.scales[0] = half_of_block(b);
  to.offsets[0] = half_of_block(b + 2);
  for (int i = 0; i < 32; ++i) put_code(to, i, nibble(b + 4, i));
}

// The fifth bits are those of a word.
int five_bits(u32 high, const u8* codes, int i) noexcept {
  return nibble(codes, i) | static_cast<int>((high >> i & 1) << 4);
}

// d | high bits | codes
void unpack_q5_0(const u8* b, GgufBlock& to) {
  to.scales[0] = half_of_block(b);
  const u32 high = word_of_block(b + 2);
  for (int i = 0; i < 32; ++i) put_code(to, i, five_bits(high, b + 6, i) - 16);
}

// d | m | high bits | codes
void unpack_q5_1(const u8* b, GgufBlock& to) {
  to.scales[0] = half_of_block(b);
  to.offsets[0] = half_of_block(b + 2);
  const u32 high = word_of_block(b + 4);
  for (int i = 0; i < 32; ++i) put_code(to, i, five_bits(high, b + 8, i));
}

// d | dmin | a scale and a minimum of 6 bits for each eighth of a block of 256; 12 bytes. A minimum is subtracted.
void unpack_six_bits(const u8* b, GgufBlock& to) noexcept {
  const float d = half_of_block(b), dmin = half_of_block(b + 2);
  const u8* const s = b + 4;
  const auto set = [&](size_t i, int scale, int minimum) {
    to.scales[i] = d * static_cast<float>(scale);
    to.offsets[i] = -(dmin * static_cast<float>(minimum));
  };
  for (size_t i = 0; i < 4; ++i) {
    set(i, s[i] & 63, s[i + 4] & 63);
    set(i + 4, (s[i + 8] & 15) | (s[i] >> 2 & 48), s[i + 8] >> 4 | (s[i + 4] >> 2 & 48));
  }
}

// The 4-bit codes of a block of 256: each 32 bytes hold two eighths, one in their low nibbles.
int nibble_of_256(const u8* codes, int eighth, int i) noexcept {
  return codes[eighth / 2 * 32 + i] >> (eighth % 2 * 4) & 15;
}

// d | dmin | scales and minima | codes
void unpack_q4_k(const u8* b, GgufBlock& to) {
  unpack_six_bits(b, to);
  for (int e = 0; e < 8; ++e)
    for (int i = 0; i < 32; ++i) put_code(to, e * 32 + i, nibble_of_256(b + 16, e, i));
}

// d | dmin | scales and minima | fifth bits, 8 of each byte one for each eighth | codes
void unpack_q5_k(const u8* b, GgufBlock& to) {
  unpack_six_bits(b, to);
  for (int e = 0; e < 8; ++e)
    for (int i = 0; i < 32; ++i) put_code(to, e * 32 + i, nibble_of_256(b + 48, e, i) | (b[16 + i] >> e & 1) << 4);
}

// low 4 bits | high 2 bits | scales of 16 elements | d. In each half of the block, 64 bytes of low bits hold four
// eighths, two in their low nibbles, and 32 bytes of high bits hold the same four, two bits each.
void unpack_q6_k(const u8* b, GgufBlock& to) {
  const float d = half_of_block(b + 208);
  for (int g = 0; g < 16; ++g) to.scales[static_cast<size_t>(g)] = d * static_cast<float>(signed_of_block(b + 192 + g));
  for (int e = 0; e < 8; ++e) {
    const int half = e / 4, in_half = e % 4;
    const u8 *low = b + half * 64 + in_half % 2 * 32, *high = b + 128 + half * 32;
    for (int i = 0; i < 32; ++i)
      put_code(to, e * 32 + i, ((low[i] >> (in_half / 2 * 4) & 15) | (high[i] >> (in_half * 2) & 3) << 4) - 32);
  }
}

struct ReadingRow {
  std::string_view type;
  GgufReading reading;
};
constexpr ReadingRow kReadings[] = {
    {"F32", {DType::F32}},
    {"F16", {DType::F16}},
    {"BF16", {DType::BF16}},
    {"Q8_0", {.unpack = unpack_q8_0, .group = 32}},
    {"Q4_0", {.unpack = unpack_q4_0, .group = 32, .four_bits = true}},
    {"Q4_1", {.unpack = unpack_q4_1, .group = 32, .four_bits = true, .offsets = true}},
    {"Q5_0", {.unpack = unpack_q5_0, .group = 32}},
    {"Q5_1", {.unpack = unpack_q5_1, .group = 32, .offsets = true}},
    {"Q4_K", {.unpack = unpack_q4_k, .group = 32, .four_bits = true, .offsets = true, .scales = DType::F32}},
    {"Q5_K", {.unpack = unpack_q5_k, .group = 32, .offsets = true, .scales = DType::F32}},
    {"Q6_K", {.unpack = unpack_q6_k, .group = 16, .scales = DType::F32}},
};

}  // namespace

std::optional<GgufReading> gguf_reading(const GgufType& type) noexcept {
  for (const ReadingRow& row : kReadings)
    if (row.type == type.name) return row.reading;
  return std::nullopt;
}

void decode_block(const GgufReading& reading, i64 elems, const GgufBlock& block, float* out) noexcept {
  for (i64 i = 0; i < elems; ++i) {
    const auto g = static_cast<size_t>(i / reading.group);
    const float x = static_cast<float>(block.codes[static_cast<size_t>(i)]) * block.scales[g];
    out[i] = reading.offsets ? x + block.offsets[g] : x;
  }
}

CodedForm form_of(const GgufReading& reading, bool four_bits) noexcept {
  return {.kind = four_bits ? CodeKind::Int4 : CodeKind::Int8,
          .scales = reading.scales,
          .offsets = reading.offsets,
          .group = static_cast<i32>(reading.group)};
}

namespace {

// The offset of codes that are 8 less, if it is an fp32 number. Elements that are 0 are then +0, and so they are with
// the offset of the block unless that and a product are -0.
std::optional<float> offset_from_eight(float scale, float offset) noexcept {
  const double exact = 8.0 * static_cast<double>(scale) + static_cast<double>(offset);
  const auto rounded = static_cast<float>(exact) + 0.0f;
  const bool same_zeros = offset != 0 || !std::signbit(scale);
  return std::isfinite(rounded) && static_cast<double>(rounded) == exact && same_zeros ? std::optional(rounded)
                                                                                       : std::nullopt;
}

}  // namespace

bool fits_four_bits(const GgufReading& reading, i64 elems, const GgufBlock& block) noexcept {
  for (i64 g = 0; reading.offsets && g < elems / reading.group; ++g)
    if (!offset_from_eight(block.scales[static_cast<size_t>(g)], block.offsets[static_cast<size_t>(g)])) return false;
  return true;
}

u8* put_block(const GgufReading& reading, i64 elems, const GgufBlock& block, const CodedForm& form, u8* out) noexcept {
  const bool is_int4 = form.kind == CodeKind::Int4;
  std::array<u8, kMostBlockElems> codes;
  const int shift = is_int4 && !reading.offsets ? 8 : 0;
  for (i64 i = 0; i < elems; ++i)
    codes[static_cast<size_t>(i)] = static_cast<u8>(block.codes[static_cast<size_t>(i)] + shift);
  for (i64 g = 0; g < elems / reading.group; ++g) {
    const float scale = block.scales[static_cast<size_t>(g)], stored = block.offsets[static_cast<size_t>(g)];
    const float offset = is_int4 && reading.offsets ? offset_from_eight(scale, stored).value_or(stored) : stored;
    out = put_group(form, out, scale, offset, codes.data() + g * reading.group);
  }
  return out;
}

}  // namespace ds
