// SPDX-License-Identifier: Apache-2.0
#include "model/coded_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "model/slice.h"

namespace ds::model {
namespace {

// Whether a rank's part of a matrix consists of whole groups of the whole matrix.
bool cuts_no_group(const ParamRow& row, i64 group) {
  if (row.slice.whole()) return true;
  const i64 K = row.whole_shape().back();
  bool whole = true;
  SliceMap(row.slice, row.whole_shape()).for_each_run(0, row.numel(), [&](i64, i64 global, i64 count) {
    whole &= global % K % group == 0 && (global + count) % K % group == 0;
  });
  return whole;
}

CodedForm form_of(const ParamRow& row, const WeightsConfig& weights) {
  const i64 K = row.shape.back();
  using Form = WeightsConfig::Form;
  switch (weights.form) {
    case Form::Work: return {};
    case Form::Stored: {
      const auto found = weights.stored.find(row.name);
      if (found == weights.stored.end() || !cuts_no_group(row, found->second.group)) return {};
      return found->second;
    }
    case Form::Int8: return {.kind = CodeKind::Int8, .group = narrow<i32>(weights.group)};
    case Form::Int4: return {.kind = CodeKind::Int4, .group = narrow<i32>(weights.group)};
    case Form::W8A8: return {.kind = CodeKind::Int8, .scales = DType::F32, .integer = true, .group = narrow<i32>(K)};
  }
  return {};
}

float rounded_scale(DType dtype, float scale) noexcept {
  if (dtype == DType::BF16) return to_float(to_bf16(scale));
  return dtype == DType::F16 ? to_float(to_f16(scale)) : scale;
}

void put_scale(DType dtype, float scale, u8* out) noexcept {
  if (dtype == DType::F32) return void(std::memcpy(out, &scale, sizeof scale));
  const u16 bits = dtype == DType::BF16 ? to_bf16(scale).bits : to_f16(scale).bits;
  std::memcpy(out, &bits, sizeof bits);
}

}  // namespace

void store_as_codes(Model& model, const Config& config) {
  const WeightsConfig& weights = config.weights;
  if (!weights.any()) return;
  DS_CHECK(config.zero.stage < 3 || !weights.asks_for_codes(), Errc::Unavailable,
           "--weights {}: at stage 3 of ZeRO ranks keep parts of matrices, which products of codes need whole; use "
           "zero_optimization.stage 0, and tensor_parallel.tp_size to cut matrices",
           weights.name());
  const bool integers = weights.form == WeightsConfig::Form::W8A8 ||
                        std::ranges::any_of(weights.stored, [](const auto& one) { return one.second.integer; });
  DS_CHECK(!integers || (config.zero.stage < 3 && model.shard.tp == 1), Errc::Unavailable,
           "--weights {}: products of integers need whole rows, of which {} have parts; --weights work decodes the "
           "matrices",
           weights.name(), config.zero.stage == 3 ? "ranks of ZeRO stage 3" : "tensor-parallel ranks");
  if (config.zero.stage == 3) return;  // where values are decoded
  std::vector<std::string> unfit;
  const auto form_for = [&](const ParamRow& row, bool is_multiplied) -> CodedForm {
    if (!row.packs || row.fp8) {
      if (is_multiplied && weights.asks_for_codes())
        unfit.push_back(fmt::format("{}: products of this kind read no codes", row.name));
      return {};
    }
    CodedForm form = form_of(row, weights);
    // The head decides between tokens: it keeps 8 bits, as in GGUF files of 4.
    if (weights.form == WeightsConfig::Form::Int4 && row.shape.size() == 2 && row.whole_shape()[0] == model.vocab)
      form.kind = CodeKind::Int8;
    if (form && (form.group % 16 != 0 || row.shape.back() % form.group != 0)) {
      unfit.push_back(fmt::format("{}: its rows of {} elements{} are no multiple of {}", row.name, row.shape.back(),
                                  row.slice.whole() ? "" : " on each tensor-parallel rank",
                                  form.integer ? 16 : form.group));
      return {};
    }
    return form;
  };
  for (ParamRow& row : model.shared) {
    row.codes = form_for(row, true);
    if (!row.codes) continue;
    row.storage = Storage::Codes;
    row.trained = false;
  }
  for (const auto& layer : model.layers) {
    const std::vector<size_t> multiplied = layer->products(Products::Forward);
    for (size_t r = 0; r < layer->rows().size(); ++r) {
      const CodedForm form = form_for(layer->rows()[r], std::ranges::find(multiplied, r) != multiplied.end());
      if (form) layer->store(r, Storage::Codes, form);
    }
  }
  DS_CHECK(unfit.empty(), Errc::Config, "weights {}: {} matri{} cannot be stored so, the first is {}", weights.name(),
           unfit.size(), unfit.size() == 1 ? "x" : "ces", unfit.front());
}

void encode_row(const CodedForm& form, std::span<const float> x, u8* out) noexcept {
  const i64 K = std::ssize(x);
  const bool is_int4 = form.kind == CodeKind::Int4;
  for (i64 first = 0; first < K; first += form.group) {
    const std::span<const float> group = x.subspan(static_cast<size_t>(first), static_cast<size_t>(form.group));
    const float largest =
        *std::ranges::max_element(group, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
    float scale = std::fabs(largest) / 127, offset = 0;
    if (is_int4) scale = largest / -8;
    if (form.offsets) {
      const float low = std::min(0.0f, *std::ranges::min_element(group)),
                  high = std::max(0.0f, *std::ranges::max_element(group));
      scale = (high - low) / (is_int4 ? 15 : 255);
      offset = low + scale * (is_int4 ? 8 : 128);
    }
    scale = rounded_scale(form.scales, scale);
    const CodedForm::Place at = form.place({}, 1, K, 0, first);
    put_scale(form.scales, scale, out + at.scale);
    if (form.offsets) std::memcpy(out + at.offset, &offset, sizeof offset);
    u8* const codes = out + at.code;
    std::memset(codes, 0, static_cast<size_t>(form.code_bytes()));
    const float least = is_int4 ? -8 : form.offsets ? -128 : -127, most = is_int4 ? 7 : 127;
    for (i64 i = 0; i < form.group; ++i) {
      const float code = scale == 0 ? 0 : std::clamp(std::nearbyint((group[i] - offset) / scale), least, most);
      if (is_int4) {
        codes[i / 2] |= static_cast<u8>((static_cast<int>(code) + 8) << (i % 2 * 4));
      } else {
        codes[i] = static_cast<u8>(static_cast<std::int8_t>(code));
      }
    }
  }
}

}  // namespace ds::model
