// SPDX-License-Identifier: Apache-2.0
#include "formats/compressed_matrix.h"

#include <algorithm>

namespace ds {
namespace {

using Scales = CodesGroup::Scales;

class CompressedFinder {
 public:
  CompressedFinder(const TensorSource& source, const WeightCodes& codes, CodedMatrices& all)
      : source_(source), codes_(codes), all_(all) {}

  void find(const std::string& module, const TensorInfo& stored) const {
    const CodesGroup* const group = group_of(codes_, module);
    DS_CHECK(group != nullptr, Errc::Mismatch,
             "{}: '{}' holds codes, but '{}' is a target of no group of quantization_config.config_groups",
             source_.path(), stored.name, module);
    const MatrixParts parts(source_, stored, all_);
    auto matrix = std::make_unique<RowsMatrix>();
    matrix->name = module + ".weight";
    matrix->codes_name = stored.name;
    matrix->bits = group->bits;
    matrix->words = group->packed;
    matrix->codes = group->floats                       ? CodedMatrix::Codes::E4M3
                    : group->packed && group->bits == 4 ? CodedMatrix::Codes::Bits4
                                                        : CodedMatrix::Codes::Bits8;
    matrix->dynamic_inputs = group->dynamic_inputs;
    set_sizes(module, stored, *group, parts, *matrix);
    set_scales(module, *group, parts, *matrix);
    set_zeros(module, *group, parts, *matrix);
    const std::string order = module + ".weight_g_idx";
    if (const TensorInfo* const given = parts.find(order, {DType::I32})) {
      parts.check_shape(*given, {{matrix->cols}}, "the group of each column");
      matrix->order = order;
    }
    parts.show(std::move(matrix));
  }

 private:
  void set_sizes(const std::string& module, const TensorInfo& stored, const CodesGroup& group, const MatrixParts& parts,
                 RowsMatrix& m) const {
    const DType type = group.packed ? DType::I32 : group.floats ? DType::F8E4M3 : DType::I8;
    if (stored.dtype != type || stored.shape.size() != 2 || stored.shape[0] < 1 || stored.shape[1] < 1)
      parts.refuse(stored, fmt::format("by config_groups.{} it is a matrix of {}", group.name, dtype_name(type)));
    m.rows = stored.shape[0];
    m.cols = stored.shape[1];
    if (!group.packed) return;
    const TensorInfo& shape = parts.need(module + ".weight_shape", {DType::I64});
    parts.check_shape(shape, {{2}}, "the sizes of a matrix");
    std::array<i64, 2> sizes{};
    source_.read(shape.name, 0, 2, sizes.data());
    // A word holds 32 / bits codes, so sizes that fit are near those of the file.
    const bool fits = sizes[0] == m.rows && sizes[1] > 0 && sizes[1] <= m.cols * 32 / group.bits &&
                      div_ceil(sizes[1] * group.bits, i64{32}) == m.cols;
    if (!fits)
      parts.refuse(shape,
                   fmt::format("the sizes {} x {} in it do not fit codes of {} bits", sizes[0], sizes[1], group.bits));
    m.cols = sizes[1];
  }

  void set_scales(const std::string& module, const CodesGroup& group, const MatrixParts& parts, RowsMatrix& m) const {
    const TensorInfo& scales = parts.need(module + std::string(kWeightScale), kScaleTypes);
    m.scales = scales.dtype;
    m.scales_name = scales.name;
    m.group = m.cols;
    switch (group.scales) {
      case Scales::Tensor:
        m.scale_rows = m.rows;
        return parts.check_shape(scales, {{1}, {}, {1, 1}}, "one for the matrix");
      case Scales::Channel: return parts.check_shape(scales, {{m.rows, 1}, {m.rows}}, "one for each row");
      case Scales::Group:
        m.group = group.group;
        return parts.check_shape(scales, {{m.rows, m.groups()}},
                                 fmt::format("one for each {} columns of a row", m.group));
      case Scales::Block:
        m.scale_rows = group.block[0];
        m.group = group.block[1];
        return parts.check_shape(scales, {{div_ceil(m.rows, m.scale_rows), m.groups()}},
                                 fmt::format("one for each block of {} x {}", m.scale_rows, m.group));
    }
  }

  void set_zeros(const std::string& module, const CodesGroup& group, const MatrixParts& parts, RowsMatrix& m) const {
    const std::string name = module + ".weight_zero_point";
    m.zero_words = group.packed && group.scales != Scales::Tensor;
    const DType type = m.zero_words ? DType::I32 : group.floats ? DType::F8E4M3 : DType::I8;
    const TensorInfo* const zeros = group.symmetric ? parts.find(name, {type}) : &parts.need(name, {type});
    if (zeros == nullptr) return;
    if (m.zero_words) {
      parts.check_shape(*zeros, {{div_ceil(m.rows * group.bits, i64{32}), m.groups()}}, "in words along the rows");
    } else if (zeros->shape != source_.at(m.scales_name).shape) {
      parts.refuse(*zeros, fmt::format("it has the shape of '{}'", m.scales_name));
    }
    m.zeros_name = name;
    m.zeros = true;
    if (!group.symmetric || m.zero_words) return;
    // Older writers add zeros that are all 0 to symmetric codes.
    std::vector<u8> values(static_cast<size_t>(zeros->numel()));
    source_.read(name, 0, zeros->numel(), values.data());
    m.zeros = std::ranges::any_of(values, [](u8 x) { return x != 0; });
    if (m.zeros && group.floats) parts.refuse(*zeros, "numbers in fp8_e4m3 have no zeros but 0");
  }

  const TensorSource& source_;
  const WeightCodes& codes_;
  CodedMatrices& all_;
};

}  // namespace

void find_compressed_matrices(const TensorSource& source, const WeightCodes& codes, CodedMatrices& all) {
  const CompressedFinder finder(source, codes, all);
  const auto without = [](const std::string& name, std::string_view end) {
    return name.substr(0, name.size() - end.size());
  };
  for (const TensorInfo& t : source.list()) {
    if (t.name.ends_with(kWeightPacked)) finder.find(without(t.name, kWeightPacked), t);
    if (!t.name.ends_with(kWeightScale)) continue;
    const std::string module = without(t.name, kWeightScale);
    if (source.find(module + std::string(kWeightPacked)) != nullptr) continue;
    const TensorInfo* const weight = source.find(module + ".weight");
    DS_CHECK(weight != nullptr, Errc::Mismatch, "{}: '{}' belongs to a matrix that is missing", source.path(), t.name);
    finder.find(module, *weight);
  }
}

}  // namespace ds
