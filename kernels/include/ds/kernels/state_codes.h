// SPDX-License-Identifier: Apache-2.0
#pragma once
// Optimizer states in less than fp32: BF16, rounded stochastically; or a byte for each element and the largest
// magnitude of each block of 256 (Dettmers et al.: "8-bit Optimizers via Block-wise Quantization"): I8 for signed
// states, U8 for unsigned ones. The meaning of a byte, and the encoding, are written once for all backends, like
// kernels/update_rules.h: V is a vector of fp32 lanes or one float, and each operation is rounded individually.
//
// The map of codes. A magnitude of b bits (7 with a sign, 8 without) is a small floating-point number: the position of
// its highest bit selects the decade; the lower bits select one of equal cells between 0.1 and 1 of that decade, whose
// middle is the value. With 2^e <= k < 2^(e+1) and f = (k + 1/2) / 2^e:
//   0 -> 0     k -> (0.9 f - 0.8) 10^(e+1-b)     2^b - 1 -> 1
// The codes are those of the paper except for two: the last one, of either sign, is the largest magnitude itself, so
// that decoding and encoding again changes nothing; and the code that this frees in the unsigned map is a decade below
// all others.
//
// A number is encoded by the nearest code; very close to the middle of two (a few units in the last place of fp32) it
// may be either, the same on all backends. But an unsigned number above zero never becomes zero, since updates are
// divided by it. A block whose largest magnitude is below 2^-100 becomes zeros, since its values would not all be
// normal numbers. A block with a non-finite number has the scale NaN, which marks the whole block.

#include <array>
#include <bit>

#include "ds/kernels/philox.h"
#include "ds/kernels/tensor.h"

namespace ds {

inline constexpr i64 kStateBlock = 256;
inline constexpr u32 kMasterSite = 0x10000000u;  // UpdateTensor::site

constexpr i64 state_blocks(i64 n) noexcept { return (n + kStateBlock - 1) / kStateBlock; }
constexpr bool is_coded(DType t) noexcept { return t == DType::I8 || t == DType::U8; }

// Rounds to bf16, up with the probability of the remainder's share of a step, so that the mean of many roundings is x.
// random: 16 bits.
DS_HOST_DEVICE constexpr bf16 round_stochastically(float x, u32 random) noexcept {
  const u32 u = std::bit_cast<u32>(x);
  if ((u & 0x7FFFFFFFu) >= 0x7F800000u) return to_bf16(x);
  return {static_cast<u16>((u + random) >> 16)};
}

namespace state_codes {

// The map of one width, by decade.
template <int kBits>
struct Map {
  using Table = std::array<float, 8>;
  static constexpr double unit(int e) noexcept {
    double x = 1;
    for (int i = e + 1; i < kBits; ++i) x /= 10;
    return x;
  }
  static constexpr double value(int k) noexcept {
    int e = 0;
    while ((k >> e) > 1) ++e;
    return (0.9 * (k + 0.5) / (1 << e) - 0.8) * unit(e);
  }
  static constexpr float kLast = static_cast<float>((1 << kBits) - 1);
  // Values from kFromLast on have the last code; with a sign, values below kFromFirst have code 0.
  static constexpr float kFromLast = static_cast<float>((1 + value((1 << kBits) - 2)) / 2);
  static constexpr float kFromFirst = static_cast<float>(value(1) / 2);
  static constexpr Table units() noexcept {
    Table t{};
    for (int e = 0; e < kBits; ++e) t[e] = static_cast<float>(unit(e));
    return t;
  }
  // y is in cell floor(scale y + offset) of its decade. The first decade has one cell.
  static constexpr Table scales() noexcept {
    Table t{};
    for (int e = 1; e < kBits; ++e) t[e] = static_cast<float>((1 << e) / (0.9 * unit(e)));
    return t;
  }
  static constexpr Table offsets() noexcept {
    Table t{1};
    for (int e = 1; e < kBits; ++e) t[e] = static_cast<float>((1 << e) * (0.8 / 0.9));
    return t;
  }
  // The largest code of each decade; the last code of all is handled separately.
  static constexpr Table ends() noexcept {
    Table t{};
    for (int e = 0; e < kBits; ++e) t[e] = static_cast<float>((2 << e) - (e + 1 < kBits ? 1 : 2));
    return t;
  }
  // The middle between each decade and the one before it.
  static constexpr Table begins() noexcept {
    Table t{};
    for (int e = 1; e < kBits; ++e) t[e] = static_cast<float>((value((1 << e) - 1) + value(1 << e)) / 2);
    return t;
  }
};

// Operations on the lanes of a backend, here for a single lane; vectors have a class with the same members.
struct OneLane {
  using Value = float;
  template <auto values>
  struct Table {
    DS_HOST_DEVICE constexpr float operator[](int e) const noexcept {  // the lowest three bits of e
      constexpr std::array<float, 8> table = values();
      return table[e & 7];
    }
  };
  DS_HOST_DEVICE static constexpr float all(float x) noexcept { return x; }
  DS_HOST_DEVICE static constexpr bool less(float a, float b) noexcept { return a < b; }
  DS_HOST_DEVICE static constexpr float select(bool m, float yes, float no) noexcept { return m ? yes : no; }
  DS_HOST_DEVICE static constexpr float min(float a, float b) noexcept { return a < b ? a : b; }
  // The position of the highest bit of x >= 1/2, and x scaled by it: in [1, 2).
  DS_HOST_DEVICE static constexpr int exponent(float x) noexcept {
    return static_cast<int>(std::bit_cast<u32>(x) >> 23) - 127;
  }
  DS_HOST_DEVICE static constexpr float fraction(float x) noexcept {
    return std::bit_cast<float>((std::bit_cast<u32>(x) & 0x007FFFFFu) | 0x3F800000u);
  }
  // The decade of y, from the begins of the decades after the first.
  template <int kBits>
  DS_HOST_DEVICE static constexpr int decade(float y) noexcept {
    constexpr std::array<float, 8> begins = Map<kBits>::begins();
    int e = 0;
    for (size_t i = 1; i < kBits; ++i) e += y >= begins[i] ? 1 : 0;
    return e;
  }
};

// Converts between magnitudes and their codes, which are integral numbers of type V here.
template <int kBits, class L>
struct Codes {
  using M = Map<kBits>;
  using Value = typename L::Value;
  typename L::template Table<&M::units> unit;
  typename L::template Table<&M::scales> scale;
  typename L::template Table<&M::offsets> offset;
  typename L::template Table<&M::ends> end;

  DS_HOST_DEVICE constexpr Value decode(Value k) const noexcept {
    const Value x = k + L::all(0.5f);
    Value y = (L::all(0.9f) * L::fraction(x) - L::all(0.8f)) * unit[L::exponent(x)];
    y = L::select(L::less(k, L::all(M::kLast)), y, L::all(1));
    return L::select(L::less(k, L::all(0.5f)), L::all(0), y);
  }
  // For y >= 0, at most 1 (or slightly more); the caller truncates the result to an integer.
  DS_HOST_DEVICE Value encode(Value y) const noexcept {
    const auto e = L::template decade<kBits>(y);
    Value k = L::min(scale[e] * y + offset[e], end[e]);
    k = L::select(L::less(y, L::all(M::kFromLast)), k, L::all(M::kLast));
    if constexpr (kBits == 7) return L::select(L::less(y, L::all(M::kFromFirst)), L::all(0), k);
    return L::select(L::less(L::all(0), y), k, L::all(0));
  }
};

// The unit of a block's numbers, from the bits of the largest magnitude; inverse 0: its codes are zeros.
struct Scale {
  float value, inverse;
};
DS_HOST_DEVICE inline Scale scale_of(u32 max_abs_bits) noexcept {
  const float largest = std::bit_cast<float>(max_abs_bits);
  if (max_abs_bits >= 0x7F800000u) return {std::bit_cast<float>(0x7FC00000u), 0};
  if (largest < 0x1p-100f) return {0, 0};
  return {largest, 1 / largest};
}

// One element.
DS_HOST_DEVICE constexpr float decode(DType t, u8 code, float scale) noexcept {
  if (t == DType::U8) return Codes<8, OneLane>{}.decode(static_cast<float>(code)) * scale;
  const int k = static_cast<std::int8_t>(code);
  const float y = Codes<7, OneLane>{}.decode(static_cast<float>(k < 0 ? -k : k)) * scale;
  return k < 0 ? -y : y;
}
DS_HOST_DEVICE inline u8 encode(DType t, float x, Scale scale) noexcept {
  if (scale.inverse == 0) return 0;
  const float y = std::bit_cast<float>(std::bit_cast<u32>(x) & 0x7FFFFFFFu) * scale.inverse;
  if (t == DType::U8) return static_cast<u8>(Codes<8, OneLane>{}.encode(y));
  const int k = static_cast<int>(Codes<7, OneLane>{}.encode(y));
  return static_cast<u8>(x < 0 ? -k : k);
}
// A negative number in an unsigned state cannot be encoded; it is treated like a non-finite one.
DS_HOST_DEVICE inline u32 magnitude_bits(DType t, float x) noexcept {
  return t == DType::U8 && x < 0 ? 0x7FC00000u : std::bit_cast<u32>(x) & 0x7FFFFFFFu;
}

}  // namespace state_codes

// Decodes elements [first, first + n) of a state in host memory, of any of its types, to fp32.
inline void decode_state(float* out, const TensorView& state, i64 first, i64 n) noexcept {
  for (i64 i = 0; i < n; ++i) {
    const i64 at = first + i;
    switch (state.dtype) {
      case DType::BF16: out[i] = to_float(state.as<bf16>()[at]); break;
      case DType::I8:
      case DType::U8:
        out[i] = state_codes::decode(state.dtype, state.as<u8>()[at], state.scale[at / kStateBlock]);
        break;
      default: out[i] = state.as<float>()[at];
    }
  }
}

// The inverse; rounds to the nearest bf16. `first` must be a multiple of 256, and so must n, unless first + n is the
// end of the state. Encoding the results of decode_state restores the state.
inline void encode_state(const TensorView& state, const float* values, i64 first, i64 n) noexcept {
  if (!is_coded(state.dtype)) {
    for (i64 i = 0; i < n; ++i) {
      if (state.dtype == DType::BF16) {
        state.as<bf16>()[first + i] = to_bf16(values[i]);
      } else {
        state.as<float>()[first + i] = values[i];
      }
    }
    return;
  }
  for (i64 begin = 0; begin < n; begin += kStateBlock) {
    const i64 end = begin + kStateBlock < n ? begin + kStateBlock : n;
    u32 largest = 0;
    for (i64 i = begin; i < end; ++i) {
      const u32 bits = state_codes::magnitude_bits(state.dtype, values[i]);
      largest = bits > largest ? bits : largest;
    }
    const state_codes::Scale scale = state_codes::scale_of(largest);
    state.scale[(first + begin) / kStateBlock] = scale.value;
    for (i64 i = begin; i < end; ++i) state.as<u8>()[first + i] = state_codes::encode(state.dtype, values[i], scale);
  }
}

}  // namespace ds
