// SPDX-License-Identifier: Apache-2.0
#pragma once
// The words of the tables of config.json's keys.

#include <limits>

#include "config/family.h"

namespace ds {

template <>
inline constexpr std::array kEnumNames<RopeType> = {EnumName{"default", u8(RopeType::Default)},
                                                    EnumName{"linear", u8(RopeType::Linear)},
                                                    EnumName{"dynamic", u8(RopeType::Dynamic)},
                                                    EnumName{"llama3", u8(RopeType::Llama3)},
                                                    EnumName{"yarn", u8(RopeType::Yarn)},
                                                    EnumName{"longrope", u8(RopeType::LongRope)},
                                                    EnumName{"proportional"},
                                                    EnumName{"mrope"}};

template <>
inline constexpr std::array kEnumNames<BalanceOver> = {
    EnumName{"micro_batch", u8(BalanceOver::MicroBatch)}, EnumName{"sequence", u8(BalanceOver::Sequence)},
    EnumName{"layers", u8(BalanceOver::Layers)}, EnumName{"global_batch", u8(BalanceOver::GlobalBatch)}};
template <>
inline constexpr std::array kEnumNames<RouterDtype> = {EnumName{"fp32", u8(RouterDtype::Fp32)},
                                                       EnumName{"work", u8(RouterDtype::Work)}};
template <>
inline constexpr std::array kEnumNames<DropPolicy> = {EnumName{"position", u8(DropPolicy::Position)},
                                                      EnumName{"probs", u8(DropPolicy::Probs)},
                                                      EnumName{"random", u8(DropPolicy::Random)}};
template <>
inline constexpr std::array kEnumNames<NoisyGate> = {EnumName{"None", u8(NoisyGate::None)},
                                                     EnumName{"Jitter", u8(NoisyGate::Jitter)},
                                                     EnumName{"RSample", u8(NoisyGate::RSample)}};

namespace family {

inline constexpr EnumName kPlainActivations[] = {{"gelu_new", u8(Activation::GeluTanh)},
                                                 {"gelu_pytorch_tanh", u8(Activation::GeluTanh)},
                                                 {"gelu", u8(Activation::GeluErf)},
                                                 {"silu", u8(Activation::Silu)},
                                                 {"swish", u8(Activation::Silu)},
                                                 {"relu"},
                                                 {"gelu_fast"},
                                                 {"gelu_python"},
                                                 {"quick_gelu"},
                                                 {"tanh"}};
inline constexpr EnumName kGatedActivations[] = {{"silu", u8(Activation::Silu)},
                                                 {"swish", u8(Activation::Silu)},
                                                 {"gelu"},
                                                 {"gelu_new"},
                                                 {"gelu_pytorch_tanh"},
                                                 {"relu"}};

template <const auto& names>
Slot activation_slot(void* root) {
  return EnumSlot{reinterpret_cast<u8*>(&static_cast<HfConfig*>(root)->m.activation), names};
}

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr Range kSize = {1, 1 << 24};
inline constexpr Range kDropout = {0, 1, false, /*open_high=*/true};
inline constexpr Range kAboveZero = {0, kInfinity, /*open_low=*/true};
inline constexpr bool kNull = true;

constexpr Key effect(std::string_view path, Slot (*slot)(void*), Range range = {}, bool takes_null = false) {
  return {.path = path, .slot = slot, .range = range, .takes_null = takes_null};
}
constexpr Key fixed(std::string_view path, std::string_view values, std::string_view note = {}) {
  return {.path = path, .kind = KeyKind::NotYet, .values = values, .note = note};
}
constexpr Key alias(std::string_view path, std::string_view target) {
  return {.path = path, .kind = KeyKind::Alias, .name = target};
}
constexpr Key refused(std::string_view path, std::string_view note) {
  return {.path = path, .kind = KeyKind::Refused, .note = note};
}
constexpr Key silent(std::string_view path) { return {.path = path, .kind = KeyKind::Silent}; }

using H = HfConfig;
using M = ModelConfig;
using R = RopeScaling;

inline bool is_null(const Json& object, const char* key) { return object.contains(key) && object[key].is_null(); }

}  // namespace family
}  // namespace ds
