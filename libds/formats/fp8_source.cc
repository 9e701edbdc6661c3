// SPDX-License-Identifier: Apache-2.0
#include "formats/fp8_source.h"

#include <algorithm>
#include <optional>

#include "ds/kernels/fp8.h"

namespace ds {
namespace {

// A matrix of codes, and the number of its scales among the tensors of the file.
struct CodedMatrix {
  size_t scales;
  i64 cols, scale_cols;
};

std::vector<i64> shape_of_scales(const std::vector<i64>& matrix) {
  return {div_ceil(matrix[0], kFp8Block), div_ceil(matrix[1], kFp8Block)};
}

class DecodedSource final : public TensorSource {
 public:
  DecodedSource(std::unique_ptr<TensorSource> source, std::vector<TensorInfo> list, std::vector<size_t> tensors,
                std::vector<std::optional<CodedMatrix>> coded)
      : TensorSource(source->path(), std::move(list), source->foreign(), source->metadata()),
        source_(std::move(source)),
        tensors_(std::move(tensors)),
        coded_(std::move(coded)) {}

  std::vector<std::string> files() const override { return source_->files(); }
  void close() const override { source_->close(); }
  std::vector<std::string> verify(const Tick& tick) const override { return source_->verify(tick); }

 private:
  const TensorInfo& stored(size_t tensor) const { return source_->list()[tensor]; }
  void read_elements(size_t tensor, i64 first, i64 count, void* out) const override {
    const std::string& name = stored(tensors_[tensor]).name;
    if (!coded_[tensor]) return source_->read(name, first, count, out);
    constexpr i64 kAtOnce = 1 << 16;
    for (i64 done = 0; done < count; done += kAtOnce)
      decode(name, *coded_[tensor], first + done, std::min(kAtOnce, count - done), static_cast<float*>(out) + done);
  }

  void decode(const std::string& name, const CodedMatrix& m, i64 first, i64 count, float* out) const {
    codes_.resize(static_cast<size_t>(count));
    source_->read(name, first, count, codes_.data());
    // The rows of scales that these elements need.
    const i64 begin = first / m.cols / kFp8Block, end = (first + count - 1) / m.cols / kFp8Block + 1,
              elems = (end - begin) * m.scale_cols;
    const TensorInfo& scales = stored(m.scales);
    raw_.resize(static_cast<size_t>(elems * dtype_bytes(scales.dtype)));
    scales_.resize(static_cast<size_t>(elems));
    source_->read(scales.name, begin * m.scale_cols, elems, raw_.data());
    convert_elements(DType::F32, scales_.data(), scales.dtype, raw_.data(), elems);
    constexpr Fp8Format kFormat = fp8_format(DType::F8E4M3);
    for (i64 i = 0; i < count; ++i) {
      const i64 row = (first + i) / m.cols, col = (first + i) % m.cols,
                scale = (row / kFp8Block - begin) * m.scale_cols + col / kFp8Block;
      out[i] = from_fp8(codes_[static_cast<size_t>(i)], kFormat) * scales_[static_cast<size_t>(scale)];
    }
  }

  std::unique_ptr<TensorSource> source_;
  std::vector<size_t> tensors_;  // by tensor of the list: its number in the file
  std::vector<std::optional<CodedMatrix>> coded_;
  // The part that is read.
  mutable std::vector<u8> codes_;
  mutable std::vector<char> raw_;
  mutable std::vector<float> scales_;
};

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
  std::vector<TensorInfo> list;
  std::vector<size_t> tensors;
  std::vector<std::optional<CodedMatrix>> coded;
  size_t used = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const TensorInfo& t = all[i];
    if (is_scales(t)) continue;
    list.push_back(t);
    tensors.push_back(i);
    std::optional<CodedMatrix>& matrix = coded.emplace_back();
    const TensorInfo* const scales = source->find(t.name + std::string(kScaleInv));
    if (scales == nullptr) {
      check_scales(*source, t);
      continue;
    }
    ++used;
    DS_CHECK(t.dtype == DType::F8E4M3 && t.shape.size() == 2 && scales->shape == shape_of_scales(t.shape) &&
                 can_convert(DType::F32, scales->dtype),
             Errc::Mismatch,
             "{}: '{}' is {} [{}] and '{}' is {} [{}]: scales are floats for blocks of {} x {} codes of a matrix of "
             "fp8_e4m3",
             source->path(), t.name, dtype_name(t.dtype), fmt::join(t.shape, ","), scales->name,
             dtype_name(scales->dtype), fmt::join(scales->shape, ","), kFp8Block, kFp8Block);
    list.back().dtype = DType::F32;
    matrix = CodedMatrix{static_cast<size_t>(scales - all.data()), t.shape[1], scales->shape[1]};
  }
  for (const TensorInfo& t : all) {
    if (used == all.size() - list.size()) break;
    DS_CHECK(!is_scales(t) || source->find(t.name.substr(0, t.name.size() - kScaleInv.size())) != nullptr,
             Errc::Mismatch, "{}: '{}' are scales of a matrix that is not there", source->path(), t.name);
  }
  return std::make_unique<DecodedSource>(std::move(source), std::move(list), std::move(tensors), std::move(coded));
}

}  // namespace ds
