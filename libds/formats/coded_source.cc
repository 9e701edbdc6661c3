// SPDX-License-Identifier: Apache-2.0
#include "formats/coded_source.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>

#include "base/json.h"
#include "config/weight_codes.h"
#include "ds/kernels/fp8.h"
#include "formats/code_rows.h"
#include "formats/compressed_matrix.h"
#include "formats/gptq_matrix.h"

namespace ds {
namespace {

// Zeros become offsets where these are exact: products of a scale of 16 bits and an integer of 9.
bool has_exact_offsets(const CodedMatrix& m) noexcept {
  return m.zeros && (m.scales == DType::F16 || m.scales == DType::BF16);
}

// (middle - zero) * scale. The sum with 0 makes a zero positive, and with it every element that is 0.
float offset_of(const CodedMatrix& m, u8 zero, float scale) noexcept {
  return static_cast<float>(m.middle() - zero) * scale + 0.0f;
}

// One row of a matrix.
struct CodedRow {
  const u8* codes;
  const float* scales;
  const u8* zeros;  // null: none
};

class CodedSource final : public TensorSource {
 public:
  CodedSource(std::unique_ptr<TensorSource> source, std::vector<TensorInfo> list, std::vector<size_t> tensors,
              std::vector<std::unique_ptr<CodedMatrix>> matrices)
      : TensorSource(source->path(), std::move(list), source->foreign(), source->metadata()),
        source_(std::move(source)),
        tensors_(std::move(tensors)),
        matrices_(std::move(matrices)),
        orders_(matrices_.size()) {}

  std::vector<std::string> files() const override { return source_->files(); }
  void close() const override { source_->close(); }
  std::vector<std::string> verify(const Tick& tick) const override { return source_->verify(tick); }

  CodedForm codes_of(std::string_view name) const override {
    const size_t tensor = index_of(name);
    const CodedMatrix* const m = matrices_[tensor].get();
    if (m == nullptr) return source_->codes_of(source_->list()[tensors_[tensor]].name);
    CodedForm form{.kind = CodeKind::Int8, .scales = m->scales};
    if (form.scales == DType::F64) form.scales = DType::F32;
    if (m->codes == CodedMatrix::Codes::E4M3) form.kind = CodeKind::E4M3;
    if (m->codes == CodedMatrix::Codes::Bits4) form.kind = CodeKind::Int4;
    form.offsets = has_exact_offsets(*m);
    if (m->zeros && !form.offsets) {  // codes are differences, -15 to 15
      if (form.kind != CodeKind::Int4) return {};
      form.kind = CodeKind::Int8;
    }
    if (m->cols % m->group != 0 || m->group % 16 != 0 || m->group > std::numeric_limits<i32>::max()) return {};
    form.group = static_cast<i32>(m->group);
    form.integer = m->dynamic_inputs && form.kind == CodeKind::Int8 && !m->zeros && m->group == m->cols;
    return order_of(tensor).empty() ? form : CodedForm{};
  }

  void read_codes(std::string_view name, i64 first_row, i64 count, void* out) const override {
    const size_t tensor = index_of(name);
    const CodedMatrix* const m = matrices_[tensor].get();
    if (m == nullptr) return source_->read_codes(source_->list()[tensors_[tensor]].name, first_row, count, out);
    DS_ASSERT(first_row >= 0 && count >= 0 && first_row <= m->rows - count);
    const CodedForm form = codes_of(name);
    DS_ASSERT(form);
    auto* to = static_cast<u8*>(out);
    for (i64 row = first_row; row < first_row + count; ++row) to = put_row(*m, form, row_of(tensor, row), to);
  }

 private:
  void read_elements(size_t tensor, i64 first, i64 count, void* out) const override {
    const CodedMatrix* const m = matrices_[tensor].get();
    if (m == nullptr) return source_->read(source_->list()[tensors_[tensor]].name, first, count, out);
    const std::vector<i32>& order = order_of(tensor);
    auto* to = static_cast<float*>(out);
    for (i64 done = 0; done < count;) {
      const i64 row = (first + done) / m->cols, col = (first + done) % m->cols,
                n = std::min(count - done, m->cols - col);
      decode(*m, order, row_of(tensor, row), col, col + n, to + done);
      done += n;
    }
  }

  // Columns [begin, end) of a row.
  static void decode(const CodedMatrix& m, const std::vector<i32>& order, const CodedRow& row, i64 begin, i64 end,
                     float* out) {
    const auto each = [&](auto&& value) {
      if (!order.empty()) {
        for (i64 k = begin; k < end; ++k) *out++ = value(row.codes[k], order[static_cast<size_t>(k)]);
        return;
      }
      for (i64 k = begin; k < end;) {
        const i64 g = k / m.group, stop = std::min(end, (g + 1) * m.group);
        for (; k < stop; ++k) *out++ = value(row.codes[k], g);
      }
    };
    if (m.codes == CodedMatrix::Codes::E4M3)
      return each([&](u8 code, i64 g) { return from_fp8(code, fp8_format(DType::F8E4M3)) * row.scales[g]; });
    const int middle = m.middle();
    if (row.zeros == nullptr)
      return each([&](u8 code, i64 g) { return static_cast<float>(code - middle) * row.scales[g]; });
    // As offset_of().
    if (has_exact_offsets(m))
      return each([&](u8 code, i64 g) { return static_cast<float>(code - row.zeros[g]) * row.scales[g] + 0.0f; });
    each([&](u8 code, i64 g) { return static_cast<float>(code - row.zeros[g]) * row.scales[g]; });
  }

  u8* put_row(const CodedMatrix& m, const CodedForm& form, const CodedRow& row, u8* out) const {
    const bool differences = m.zeros && !form.offsets;
    const auto middle = static_cast<u8>(form.kind == CodeKind::Int8 ? m.middle() : 0);
    coded_.resize(static_cast<size_t>(m.group));
    for (i64 g = 0; g < m.groups(); ++g) {
      const u8 shift = differences ? row.zeros[g] : middle;
      for (i64 i = 0; i < m.group; ++i)
        coded_[static_cast<size_t>(i)] = static_cast<u8>(row.codes[g * m.group + i] - shift);
      const float scale = row.scales[g], offset = form.offsets ? offset_of(m, row.zeros[g], scale) : 0;
      out = put_group(form, out, scale, offset, coded_.data());
    }
    return out;
  }

  // Rows that are read together: enough for few reads of strided ones, in little memory.
  static i64 rows_at_once(const CodedMatrix& m) noexcept {
    constexpr i64 kCodes = i64{4} << 20;
    return std::max<i64>(kCodes / m.cols / CodedMatrix::kRowsAtOnce, 1) * CodedMatrix::kRowsAtOnce;
  }

  CodedRow row_of(size_t tensor, i64 row) const {
    const CodedMatrix& m = *matrices_[tensor];
    if (tensor != loaded_ || row < first_ || row >= first_ + count_) {
      loaded_.reset();
      const i64 at_once = rows_at_once(m);
      first_ = row / at_once * at_once;
      count_ = std::min(at_once, m.rows - first_);
      m.load(*source_, first_, count_, rows_);
      check_scales(m);
      loaded_ = tensor;
    }
    const i64 n = row - first_, g = n * m.groups();
    return {rows_.codes.data() + n * m.cols, rows_.scales.data() + g, m.zeros ? rows_.zeros.data() + g : nullptr};
  }

  void check_scales(const CodedMatrix& m) const {
    if (m.codes == CodedMatrix::Codes::E4M3) return;
    for (const float scale : rows_.scales)
      DS_CHECK(std::isfinite(scale * 256), Errc::Numeric,
               "{}: a scale of '{}' is {}, and its elements would not be finite", path(), m.name, scale);
  }

  // The group of each column; empty: that of its place.
  const std::vector<i32>& order_of(size_t tensor) const {
    std::optional<std::vector<i32>>& order = orders_[tensor];
    if (order) return *order;
    const CodedMatrix& m = *matrices_[tensor];
    std::vector<i32> read;
    if (!m.order.empty()) {
      read.resize(static_cast<size_t>(m.cols));
      source_->read(m.order, 0, m.cols, read.data());
      if (std::ranges::all_of(read, [](i32 g) { return g == -1; })) read.clear();
    }
    for (const i32 g : read)
      DS_CHECK(g >= 0 && g < m.groups(), Errc::Corrupt, "{}: '{}' has a column of group {}, and there are {}", path(),
               m.order, g, m.groups());
    bool by_place = true;
    for (size_t k = 0; k < read.size(); ++k) by_place = by_place && read[k] == static_cast<i64>(k) / m.group;
    if (by_place) read.clear();
    return order.emplace(std::move(read));
  }

  std::unique_ptr<TensorSource> source_;
  std::vector<size_t> tensors_;                         // by tensor of the list: its number in the file
  std::vector<std::unique_ptr<CodedMatrix>> matrices_;  // null: the tensor is shown as it is
  mutable std::vector<std::optional<std::vector<i32>>> orders_;
  // Rows [first_, first_ + count_) of the matrix that was read last.
  mutable std::optional<size_t> loaded_;
  mutable i64 first_ = 0, count_ = 0;
  mutable CodeRows rows_;
  mutable std::vector<u8> coded_;
};

// The config.json beside a file; null if there is none, or it is no object, which its own reader reports.
Json config_beside(const std::string& path) {
  constexpr i64 kLargestConfig = i64{16} << 20;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return nullptr;
  try {
    Json config = parse_json(read_text_file(path, kLargestConfig), path, {.places = false}).root;
    return config.is_object() ? config : nullptr;
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

std::unique_ptr<TensorSource> show_matrices(std::unique_ptr<TensorSource> source, CodedMatrices matrices) {
  std::vector<TensorInfo> list;
  std::vector<size_t> tensors;
  std::vector<std::unique_ptr<CodedMatrix>> shown;
  for (size_t i = 0; i < source->list().size(); ++i) {
    const auto matrix = matrices.found.find(i);
    if (matrix == matrices.found.end()) {
      if (matrices.parts.contains(i)) continue;
      list.push_back(source->list()[i]);
      shown.push_back(nullptr);
    } else {
      const CodedMatrix& m = *matrix->second;
      list.push_back({m.name, DType::F32, {m.rows, m.cols}});
      shown.push_back(std::move(matrix->second));
    }
    tensors.push_back(i);
  }
  return std::make_unique<CodedSource>(std::move(source), std::move(list), std::move(tensors), std::move(shown));
}

std::unique_ptr<TensorSource> decode_weight_codes(std::unique_ptr<TensorSource> source) {
  const auto is_part = [](const auto& t) {
    return t.name.ends_with(kPackedWeight) || t.name.ends_with(kWeightPacked) || t.name.ends_with(kWeightScale);
  };
  if (std::ranges::none_of(source->list(), is_part)) return source;
  const std::string path = parent_directory(source->path()) + "/config.json";
  const Json config = config_beside(path);
  if (!config.is_object()) return source;
  std::vector<std::string> refused;
  const WeightCodes codes = read_weight_codes(config, refused);
  if (codes.method == CodesMethod::None || codes.method == CodesMethod::Fp8) return source;
  DS_CHECK(refused.empty(), Errc::Unavailable, "{}: quantization_config: {} is not supported", path, refused.front());
  CodedMatrices matrices;
  if (codes.method == CodesMethod::CompressedTensors) {
    find_compressed_matrices(*source, codes, matrices);
  } else {
    find_gptq_matrices(*source, codes, matrices);
  }
  return show_matrices(std::move(source), std::move(matrices));
}

std::string missing_section(std::string_view name) {
  constexpr std::string_view kEnds[] = {kPackedWeight, ".qzeros", ".scales", ".g_idx", kWeightPacked, kWeightScale};
  if (std::ranges::none_of(kEnds, [&](std::string_view end) { return name.ends_with(end); })) return "";
  return ": it is a part of a matrix of codes, which are read if the config.json beside the file has a "
         "quantization_config for them";
}

}  // namespace ds
