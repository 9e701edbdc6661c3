// SPDX-License-Identifier: Apache-2.0
#include "formats/fp8_source.h"

#include <algorithm>

#include "ds/kernels/fp8.h"
#include "formats/coded_source.h"

namespace ds {
namespace {

std::vector<i64> shape_of_scales(const std::vector<i64>& matrix) {
  return {div_ceil(matrix[0], kFp8Block), div_ceil(matrix[1], kFp8Block)};
}

// Codes need scales: a file that has those of other matrices lacks these, or has them in a type that is not read.
void check_scales(const TensorSource& source, const TensorInfo& codes) {
  if (codes.dtype != DType::F8E4M3 || codes.shape.size() != 2) return;
  const std::string scales = codes.name + std::string(kScaleInv);
  const auto it = std::ranges::find(source.foreign(), scales, &ForeignTensor::name);
  DS_CHECK(
      it == source.foreign().end(), Errc::Unavailable,
      "{}: '{}', the scales of '{}', are of type {}, which is not read: store them in fp32, or convert the weights "
      "to bf16",
      source.path(), scales, codes.name, it->type);
  throw Error(Errc::Mismatch, fmt::format("{}: '{}' is {}{}", source.path(), codes.name, dtype_name(codes.dtype),
                                          missing_scales(codes.name, codes.dtype)));
}

}  // namespace

std::string missing_scales(std::string_view name, DType dtype) {
  if (dtype != DType::F8E4M3) return "";
  return fmt::format(", and its scales, '{}{}', are missing: add them to the file, or convert the weights to bf16",
                     name, kScaleInv);
}

std::unique_ptr<TensorSource> decode_fp8(std::unique_ptr<TensorSource> source) {
  const std::vector<TensorInfo>& all = source->list();
  const auto is_scales = [](const auto& t) { return t.name.ends_with(kScaleInv); };
  if (std::ranges::none_of(all, is_scales) && std::ranges::none_of(source->foreign(), is_scales)) return source;
  CodedMatrices matrices;
  for (size_t i = 0; i < all.size(); ++i) {
    const TensorInfo& t = all[i];
    if (is_scales(t)) {
      DS_CHECK(source->find(t.name.substr(0, t.name.size() - kScaleInv.size())) != nullptr, Errc::Mismatch,
               "{}: '{}' are scales of a matrix that is not there", source->path(), t.name);
      matrices.parts.insert(i);
      continue;
    }
    const TensorInfo* const scales = source->find(t.name + std::string(kScaleInv));
    if (scales == nullptr) {
      check_scales(*source, t);
      continue;
    }
    DS_CHECK(t.dtype == DType::F8E4M3 && t.shape.size() == 2 && scales->shape == shape_of_scales(t.shape) &&
                 can_convert(DType::F32, scales->dtype),
             Errc::Mismatch,
             "{}: '{}' is {} [{}] and '{}' is {} [{}]: scales are floats for blocks of {} x {} codes of a matrix of "
             "fp8_e4m3",
             source->path(), t.name, dtype_name(t.dtype), fmt::join(t.shape, ","), scales->name,
             dtype_name(scales->dtype), fmt::join(scales->shape, ","), kFp8Block, kFp8Block);
    auto matrix = std::make_unique<RowsMatrix>();
    matrix->name = matrix->codes_name = t.name;
    matrix->rows = t.shape[0];
    matrix->cols = t.shape[1];
    matrix->codes = CodedMatrix::Codes::E4M3;
    matrix->scales = scales->dtype;
    matrix->scales_name = scales->name;
    matrix->group = matrix->scale_rows = kFp8Block;
    matrices.found.emplace(i, std::move(matrix));
  }
  return show_matrices(std::move(source), std::move(matrices));
}

}  // namespace ds
