// SPDX-License-Identifier: Apache-2.0
// Values are those of ggml's own dequantisation in fp32, bit for bit: each product and each sum is rounded.

#include "formats/gguf_blocks.h"

#include <array>
#include <cstdint>
#include <cstring>

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

// d | 32 codes of 8 bits
void decode_q8_0(const u8* b, float* out) {
  const float d = half_of_block(b);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(signed_of_block(b + 2 + i));
}

// Codes of 4 bits: 16 bytes, the first half of the elements in their low nibbles.
int nibble(const u8* codes, int i) noexcept { return i < 16 ? codes[i] & 15 : codes[i - 16] >> 4; }

// d | codes
void decode_q4_0(const u8* b, float* out) {
  const float d = half_of_block(b);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(nibble(b + 2, i) - 8);
}

// d | m | codes
void decode_q4_1(const u8* b, float* out) {
  const float d = half_of_block(b), m = half_of_block(b + 2);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(nibble(b + 4, i)) + m;
}

// The fifth bits are those of a word.
int five_bits(u32 high, const u8* codes, int i) noexcept {
  return nibble(codes, i) | static_cast<int>((high >> i & 1) << 4);
}

// d | high bits | codes
void decode_q5_0(const u8* b, float* out) {
  const float d = half_of_block(b);
  const u32 high = word_of_block(b + 2);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(five_bits(high, b + 6, i) - 16);
}

// d | m | high bits | codes
void decode_q5_1(const u8* b, float* out) {
  const float d = half_of_block(b), m = half_of_block(b + 2);
  const u32 high = word_of_block(b + 4);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(five_bits(high, b + 8, i)) + m;
}

// A scale and a minimum of 6 bits for each eighth of a block of 256; 12 bytes.
struct SixBits {
  std::array<float, 8> scale, minimum;
};
SixBits six_bits(const u8* s) noexcept {
  SixBits x;
  for (size_t i = 0; i < 4; ++i) {
    x.scale[i] = static_cast<float>(s[i] & 63);
    x.minimum[i] = static_cast<float>(s[i + 4] & 63);
    x.scale[i + 4] = static_cast<float>((s[i + 8] & 15) | (s[i] >> 2 & 48));
    x.minimum[i + 4] = static_cast<float>(s[i + 8] >> 4 | (s[i + 4] >> 2 & 48));
  }
  return x;
}

// The 4-bit codes of a block of 256: each 32 bytes hold two eighths, one in their low nibbles.
int nibble_of_256(const u8* codes, int eighth, int i) noexcept {
  return codes[eighth / 2 * 32 + i] >> (eighth % 2 * 4) & 15;
}

// d | dmin | scales and minima | codes
void decode_q4_k(const u8* b, float* out) {
  const float d = half_of_block(b), dmin = half_of_block(b + 2);
  const SixBits six = six_bits(b + 4);
  for (int e = 0; e < 8; ++e) {
    const float scale = d * six.scale[static_cast<size_t>(e)], minimum = dmin * six.minimum[static_cast<size_t>(e)];
    for (int i = 0; i < 32; ++i) out[e * 32 + i] = scale * static_cast<float>(nibble_of_256(b + 16, e, i)) - minimum;
  }
}

// d | dmin | scales and minima | fifth bits, 8 of each byte one for each eighth | codes
void decode_q5_k(const u8* b, float* out) {
  const float d = half_of_block(b), dmin = half_of_block(b + 2);
  const SixBits six = six_bits(b + 4);
  for (int e = 0; e < 8; ++e) {
    const float scale = d * six.scale[static_cast<size_t>(e)], minimum = dmin * six.minimum[static_cast<size_t>(e)];
    for (int i = 0; i < 32; ++i) {
      const int code = nibble_of_256(b + 48, e, i) | (b[16 + i] >> e & 1) << 4;
      out[e * 32 + i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

// low 4 bits | high 2 bits | scales of 16 elements | d. In each half of the block, 64 bytes of low bits hold four
// eighths, two in their low nibbles, and 32 bytes of high bits hold the same four, two bits each.
void decode_q6_k(const u8* b, float* out) {
  const float d = half_of_block(b + 208);
  for (int e = 0; e < 8; ++e) {
    const int half = e / 4, in_half = e % 4;
    const u8 *low = b + half * 64 + in_half % 2 * 32, *high = b + 128 + half * 32;
    for (int i = 0; i < 32; ++i) {
      const int code = (low[i] >> (in_half / 2 * 4) & 15) | (high[i] >> (in_half * 2) & 3) << 4;
      const float scale = d * static_cast<float>(signed_of_block(b + 192 + e * 2 + i / 16));
      out[e * 32 + i] = scale * static_cast<float>(code - 32);
    }
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
    {"Q8_0", {DType::F32, decode_q8_0}},
    {"Q4_0", {DType::F32, decode_q4_0}},
    {"Q4_1", {DType::F32, decode_q4_1}},
    {"Q5_0", {DType::F32, decode_q5_0}},
    {"Q5_1", {DType::F32, decode_q5_1}},
    {"Q4_K", {DType::F32, decode_q4_k}},
    {"Q5_K", {DType::F32, decode_q5_k}},
    {"Q6_K", {DType::F32, decode_q6_k}},
};

}  // namespace

std::optional<GgufReading> gguf_reading(const GgufType& type) noexcept {
  for (const ReadingRow& row : kReadings)
    if (row.type == type.name) return row.reading;
  return std::nullopt;
}

}  // namespace ds
