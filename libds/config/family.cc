// SPDX-License-Identifier: Apache-2.0
#include "config/family.h"

namespace ds {

extern const FamilySpec kGpt2Family, kLlamaFamily, kQwen2Family, kQwen3Family, kMixtralFamily, kOlmoeFamily,
    kQwen2MoeFamily, kQwen3MoeFamily, kGlm4MoeFamily, kDeepseekV2Family, kDeepseekV3Family, kBertFamily;

std::span<const FamilySpec* const> families() noexcept {
  static constexpr const FamilySpec* kAll[] = {
      &kGpt2Family,     &kLlamaFamily,    &kQwen2Family,   &kQwen3Family,      &kMixtralFamily,    &kOlmoeFamily,
      &kQwen2MoeFamily, &kQwen3MoeFamily, &kGlm4MoeFamily, &kDeepseekV2Family, &kDeepseekV3Family, &kBertFamily};
  return kAll;
}

std::string_view family_name(Family family) noexcept { return spec_of(family).name; }
bool ModelConfig::rotary() const noexcept { return spec_of(family).rotary; }
bool ModelConfig::causal() const noexcept { return spec_of(family).causal; }

}  // namespace ds
