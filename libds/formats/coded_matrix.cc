// SPDX-License-Identifier: Apache-2.0
#include "formats/coded_matrix.h"

#include <algorithm>
#include <cstdint>

namespace ds {
namespace {

std::string describe_part(const TensorInfo& t) {
  return fmt::format("'{}' is {} [{}]", t.name, dtype_name(t.dtype), fmt::join(t.shape, ","));
}

}  // namespace

const TensorInfo* MatrixParts::find(const std::string& name, std::initializer_list<DType> types) const {
  const TensorInfo* const part = source_.find(name);
  if (part == nullptr) {
    const auto it = std::ranges::find(source_.foreign(), name, &ForeignTensor::name);
    DS_CHECK(it == source_.foreign().end(), Errc::Unavailable,
             "{}: '{}', a part of '{}', is of type {}, which is not read", source_.path(), name, codes_.name, it->type);
    return nullptr;
  }
  if (std::ranges::find(types, part->dtype) == types.end()) {
    std::vector<std::string_view> names;
    for (const DType t : types) names.push_back(dtype_name(t));
    refuse(*part, fmt::format("its type is {}", fmt::join(names, " or ")));
  }
  all_.parts.insert(static_cast<size_t>(part - source_.list().data()));
  return part;
}

const TensorInfo& MatrixParts::need(const std::string& name, std::initializer_list<DType> types) const {
  const TensorInfo* const part = find(name, types);
  DS_CHECK(part != nullptr, Errc::Mismatch, "{}: '{}' is missing, a part of '{}'", source_.path(), name, codes_.name);
  return *part;
}

void MatrixParts::check_shape(const TensorInfo& part, std::initializer_list<std::vector<i64>> shapes,
                              std::string_view why) const {
  if (std::ranges::find(shapes, part.shape) == shapes.end())
    refuse(part, fmt::format("its shape is [{}], {}", fmt::join(*shapes.begin(), ","), why));
}

void MatrixParts::refuse(const TensorInfo& part, std::string_view why) const {
  if (&part == &codes_)
    throw Error(Errc::Mismatch, fmt::format("{}: {}: {}", source_.path(), describe_part(part), why));
  throw Error(Errc::Mismatch,
              fmt::format("{}: {}, and {}: {}", source_.path(), describe_part(part), describe_part(codes_), why));
}

void MatrixParts::show(std::unique_ptr<CodedMatrix> matrix) const {
  const auto place = static_cast<size_t>(&codes_ - source_.list().data());
  const TensorInfo* const other = source_.find(matrix->name);
  DS_CHECK(other == nullptr || other == &codes_, Errc::Mismatch, "{}: there are both '{}' and '{}'", source_.path(),
           matrix->name, codes_.name);
  all_.parts.insert(place);
  all_.found.emplace(place, std::move(matrix));
}

void read_part(const TensorSource& source, const TensorInfo& t, i64 r, i64 rows, i64 c, i64 cols, void* out) {
  const i64 width = t.shape.size() > 1 ? t.shape[1] : 1, size = dtype_bytes(t.dtype);
  if (cols == width) return source.read(t.name, r * width, rows * width, out);
  for (i64 i = 0; i < rows; ++i)
    source.read(t.name, (r + i) * width + c, cols, static_cast<char*>(out) + i * cols * size);
}

void read_scales(const TensorSource& source, const TensorInfo& t, i64 r, i64 rows, i64 c, i64 cols,
                 std::vector<u8>& raw, float* out) {
  raw.resize(static_cast<size_t>(rows * cols * dtype_bytes(t.dtype)));
  read_part(source, t, r, rows, c, cols, raw.data());
  convert_elements(DType::F32, out, t.dtype, raw.data(), rows * cols);
}

void RowsMatrix::load(const TensorSource& source, i64 first, i64 count, CodeRows& out) const {
  const i64 of_scales = groups();
  out.codes.resize(static_cast<size_t>(count * cols));
  if (!words) {
    source.read(codes_name, first * cols, count * cols, out.codes.data());
    if (codes != Codes::E4M3)
      for (u8& code : out.codes) code ^= 0x80;
  } else {
    const i64 row_words = div_ceil(cols * bits, i64{32}), row_bytes = row_words * 4;
    out.raw.resize(static_cast<size_t>(count * row_bytes));
    source.read(codes_name, first * row_words, count * row_words, out.raw.data());
    for (i64 n = 0; n < count; ++n) {
      const u8* const from = out.raw.data() + n * row_bytes;
      u8* const to = out.codes.data() + n * cols;
      if (bits == 8) {
        std::copy_n(from, cols, to);
      } else {
        for (i64 k = 0; k < cols; ++k) to[k] = from[k / 2] >> (k % 2 * 4) & 15;
      }
    }
  }
  const i64 begin = first / scale_rows, end = (first + count - 1) / scale_rows + 1;
  std::vector<float> stored(static_cast<size_t>((end - begin) * of_scales));
  out.raw.resize(stored.size() * static_cast<size_t>(dtype_bytes(source.at(scales_name).dtype)));
  source.read(scales_name, begin * of_scales, (end - begin) * of_scales, out.raw.data());
  convert_elements(DType::F32, stored.data(), source.at(scales_name).dtype, out.raw.data(), std::ssize(stored));
  out.scales.resize(static_cast<size_t>(count * of_scales));
  for (i64 n = 0; n < count; ++n)
    std::copy_n(stored.data() + ((first + n) / scale_rows - begin) * of_scales, of_scales,
                out.scales.data() + n * of_scales);
  if (zeros) load_zeros(source, first, count, out);
}

void RowsMatrix::load_zeros(const TensorSource& source, i64 first, i64 count, CodeRows& out) const {
  const i64 width = groups();
  out.zeros.resize(static_cast<size_t>(count * width));
  if (!zero_words) {
    const i64 begin = first / scale_rows, end = (first + count - 1) / scale_rows + 1;
    out.raw.resize(static_cast<size_t>((end - begin) * width));
    source.read(zeros_name, begin * width, (end - begin) * width, out.raw.data());
    for (i64 n = 0; n < count; ++n) {
      for (i64 g = 0; g < width; ++g) {
        const u8 stored = out.raw[static_cast<size_t>(((first + n) / scale_rows - begin) * width + g)];
        const auto zero = static_cast<u8>(stored + middle());
        DS_CHECK(codes != Codes::Bits4 || zero < 16, Errc::Corrupt, "{}: '{}' has a zero of {} for codes of 4 bits",
                 source.path(), zeros_name, static_cast<int>(static_cast<std::int8_t>(stored)));
        out.zeros[static_cast<size_t>(n * width + g)] = zero;
      }
    }
    return;
  }
  const i64 in_word = 32 / bits, begin = first / in_word, rows_of_words = div_ceil(first + count, in_word) - begin;
  out.raw.resize(static_cast<size_t>(rows_of_words * width * 4));
  source.read(zeros_name, begin * width, rows_of_words * width, out.raw.data());
  for (i64 n = 0; n < count; ++n) {
    const i64 shift = n % in_word * bits;
    for (i64 g = 0; g < width; ++g) {
      const u8 byte = out.raw[static_cast<size_t>((n / in_word * width + g) * 4 + shift / 8)];
      out.zeros[static_cast<size_t>(n * width + g)] = bits == 8 ? byte : static_cast<u8>(byte >> shift % 8 & 15);
    }
  }
}

}  // namespace ds
