// SPDX-License-Identifier: Apache-2.0
#include "model/coded_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "config/offload.h"
#include "config/parallel.h"
#include "model/slice.h"

namespace ds::model {
namespace {

// Whether a rank's part of a matrix consists of whole groups of the matrix in files.
bool cuts_no_group(const ParamRow& row, i64 group) {
  if (row.in_out) return false;
  if (row.slice.whole()) return true;
  const i64 K = row.whole_shape().back();
  bool whole = true;
  SliceMap(row.slice, row.whole_shape()).for_each_run(0, row.numel(), [&](i64, i64 global, i64 count) {
    whole &= global % K % group == 0 && (global + count) % K % group == 0;
  });
  return whole;
}

// Before the choice of products.
CodedForm stored_form_of(const ParamRow& row, const WeightsConfig& weights) {
  const i64 K = row.coded_k();
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

// How a run reads a row. Look-ups alone read the table of tokens, unless it is tied.
enum class Reader : u8 { None, Product, Head, LookUp };

CodedForm form_of(const ParamRow& row, const WeightsConfig& weights) {
  CodedForm form = stored_form_of(row, weights);
  if (form) form.integer = weights.integers.value_or(form.integer);
  return form;
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

std::string text_of(const CodedForm& form, i64 K) {
  const std::string_view kind = form.kind == CodeKind::Int4 ? "int4" : form.kind == CodeKind::Int8 ? "int8" : "fp8";
  return fmt::format("{}, {}{}{}", kind, form.group == K ? "whole rows" : fmt::format("groups of {}", form.group),
                     form.offsets ? " with offsets" : "", form.integer ? ", sums of integers" : "");
}

}  // namespace

void store_as_codes(Model& model, const Config& config) {
  const WeightsConfig& weights = config.weights;
  if (!weights.any()) return;
  const bool in_parts = config.zero.stage == 3 && !streams_params(config);
  DS_CHECK(!in_parts || !weights.asks_for_codes(), Errc::Unavailable,
           "--weights {}: at stage 3 of ZeRO ranks keep parts of matrices, which products of codes need whole; use "
           "zero_optimization.stage 0, and tensor_parallel.tp_size to cut matrices",
           weights.name());
  DS_CHECK(config.zero.stage < 3 || config.zero.tile_size == 0, Errc::Unavailable,
           "--weights {}: zero_optimization.stage3_tile_size cuts matrices into tiles, which are not stored as codes; "
           "--weights work decodes them",
           weights.name());
  const bool integers = weights.sums_integers();
  DS_CHECK(!integers || (!in_parts && model.shard.tp == 1), Errc::Unavailable,
           "--weights {}{}: products of integers need whole rows, of which {} have parts; {}", weights.name(),
           weights.integers ? " --activations int8" : "", in_parts ? "ranks of ZeRO stage 3" : "tensor-parallel ranks",
           weights.integers ? "--activations work decodes the codes" : "--weights work decodes the matrices");
  if (in_parts) return;  // where values are decoded
  std::vector<std::string> unfit;
  const auto form_for = [&](const ParamRow& row, Reader reader) -> CodedForm {
    if (!(row.packs || row.in_out || reader == Reader::LookUp) || row.fp8) {
      const bool is_batch = row.shape.size() == 3 && !row.vectors;  // of experts, whose products are by groups of rows
      if ((reader != Reader::None || is_batch) && weights.asks_for_codes())
        unfit.push_back(fmt::format("{}: products of this kind read no codes", row.name));
      return {};
    }
    CodedForm form = form_of(row, weights);
    if (reader == Reader::LookUp) form.integer = false;
    // The head decides between tokens: it keeps 8 bits, as in GGUF files of 4. So does the table of tokens.
    if (weights.form == WeightsConfig::Form::Int4 && (reader == Reader::Head || reader == Reader::LookUp))
      form.kind = CodeKind::Int8;
    if (form.integer && form.kind == CodeKind::E4M3) {
      unfit.push_back(fmt::format("{}: its codes are FP8 numbers, which --activations int8 cannot multiply", row.name));
      return {};
    }
    constexpr i64 kMostInSum = 131072;  // OpTable::matmul
    if (form.integer && form.group > kMostInSum) {
      unfit.push_back(fmt::format("{}: {} of its codes share a scale; sums of integers have at most {}", row.name,
                                  form.group, kMostInSum));
      return {};
    }
    if (form && config.zero.stage == 3 && row.numel() / row.coded_k() * form.row_bytes(row.coded_k()) % 4 != 0) {
      unfit.push_back(fmt::format(
          "{}: --stream reads codes in words of 4 bytes, and this matrix has an odd number of them", row.name));
      return {};
    }
    if (form && (form.group % 16 != 0 || row.coded_k() % form.group != 0)) {
      unfit.push_back(fmt::format(
          "{}: its {} of {} elements{} are no multiple of {}", row.name, row.in_out ? "columns" : "rows", row.coded_k(),
          row.slice.whole() ? "" : " on each tensor-parallel rank", row.coded_k() % form.group != 0 ? form.group : 16));
      return {};
    }
    return form;
  };
  for (ParamRow& row : model.shared) {
    row.codes = form_for(row, Reader::Head);
    if (!row.codes) continue;
    row.storage = Storage::Codes;
    row.trained = false;
  }
  for (const auto& layer : model.layers) {
    const std::vector<size_t> multiplied = layer->products(Products::Forward);
    const bool embeds = layer->type() == kEmbeddingType && !model.tied();
    for (size_t r = 0; r < layer->rows().size(); ++r) {
      Reader reader = Reader::None;
      if (std::ranges::find(multiplied, r) != multiplied.end()) reader = Reader::Product;
      if (layer == model.layers.back() && layer->rows()[r].packs) reader = Reader::Head;
      if (embeds && r == 0) reader = Reader::LookUp;
      const CodedForm form = form_for(layer->rows()[r], reader);
      if (form) layer->store(r, Storage::Codes, form);
    }
  }
  DS_CHECK(unfit.empty(), Errc::Config, "weights {}: {} matri{} cannot be stored so, the first is {}", weights.name(),
           unfit.size(), unfit.size() == 1 ? "x" : "ces", unfit.front());
}

std::map<std::string, i64> forms_of_matrices(const Model& model, DType work) {
  std::map<std::string, i64> forms;
  for (const ParamRow* row : model.params()) {
    if (row->packs || row->codes)
      forms[row->codes ? text_of(row->codes, row->coded_k()) : std::string(dtype_name(work))] += 1;
  }
  return forms;
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
