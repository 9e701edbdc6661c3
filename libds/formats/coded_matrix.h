// SPDX-License-Identifier: Apache-2.0
#pragma once
// Matrices that a file stores as codes, and how their parts are found and read. An integer code q of a column in group
// g stands for (q - zero[g]) * scale[g], a code of E4M3 for its number times scale[g], in fp32, rounded once.

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tensor_io.h"

namespace ds {

// Codes of some rows, as they are decoded.
struct CodeRows {
  std::vector<u8> codes;      // [rows, cols]: 0 to 15, 0 to 255, or E4M3
  std::vector<float> scales;  // [rows, groups]
  std::vector<u8> zeros;      // [rows, groups], if the matrix has zeros
  std::vector<u8> raw;        // for readers
};

struct CodedMatrix {
  enum class Codes : u8 { Bits4, Bits8, E4M3 };

  virtual ~CodedMatrix() = default;
  // Rows [first, first + count); `first` is a multiple of kRowsAtOnce, and so is the end unless it is that of the
  // matrix.
  virtual void load(const TensorSource& source, i64 first, i64 count, CodeRows& out) const = 0;
  static constexpr i64 kRowsAtOnce = 32;

  i64 groups() const noexcept { return div_ceil(cols, group); }
  int middle() const noexcept { return codes == Codes::Bits4 ? 8 : 128; }  // the zero of a matrix without zeros

  std::string name;  // under which it is shown
  i64 rows = 0, cols = 0;
  i64 group = 0;  // columns; the last group may have fewer
  Codes codes = Codes::Bits4;
  DType scales = DType::F32;    // of the file
  bool zeros = false;           // each group has a zero of its own
  bool dynamic_inputs = false;  // its products code their input, too
  std::string order;            // int32 [cols], the group of each column, or -1 for that of its place; empty: none
};

// The matrices of a file by the number of the tensor in whose place they are shown, and tensors that are not shown.
struct CodedMatrices {
  std::map<size_t, std::unique_ptr<CodedMatrix>> found;
  std::set<size_t> parts;
};

// The tensors of one matrix.
class MatrixParts {
 public:
  // `codes` is the tensor in whose place the matrix is shown.
  MatrixParts(const TensorSource& source, const TensorInfo& codes, CodedMatrices& all)
      : source_(source), codes_(codes), all_(all) {}

  // A part by name. Throws Errc::Mismatch if it is missing, or is not of one of these types; Errc::Unavailable for a
  // type that is not read.
  const TensorInfo& need(const std::string& name, std::initializer_list<DType> types) const;
  const TensorInfo* find(const std::string& name, std::initializer_list<DType> types) const;
  // Throws Errc::Mismatch, with `why`, unless `part` has one of the shapes.
  void check_shape(const TensorInfo& part, std::initializer_list<std::vector<i64>> shapes, std::string_view why) const;
  [[noreturn]] void refuse(const TensorInfo& part, std::string_view why) const;
  // Shows the matrix, whose sizes are set.
  void show(std::unique_ptr<CodedMatrix> matrix) const;

 private:
  const TensorSource& source_;
  const TensorInfo& codes_;
  CodedMatrices& all_;
};
inline constexpr std::initializer_list<DType> kScaleTypes = {DType::F32, DType::BF16, DType::F16, DType::F64};

// A matrix whose rows are contiguous: a byte for each code, two's complement or E4M3, or little-endian words of codes
// of `bits` bits that are shifted to be positive. Scales are [ceil(rows / scale_rows), groups].
struct RowsMatrix final : CodedMatrix {
  void load(const TensorSource& source, i64 first, i64 count, CodeRows& out) const override;

  std::string codes_name, scales_name, zeros_name;
  int bits = 8;
  bool words = false;
  bool zero_words = false;  // zeros are words of codes along the rows; else two's complement, shaped as scales
  i64 scale_rows = 1;       // rows that share a scale

 private:
  void load_zeros(const TensorSource& source, i64 first, i64 count, CodeRows& out) const;
};

// Elements [r, r + rows) x [c, c + cols) of a tensor that is a matrix.
void read_part(const TensorSource& source, const TensorInfo& t, i64 r, i64 rows, i64 c, i64 cols, void* out);
// Floats of any type, to fp32.
void read_scales(const TensorSource& source, const TensorInfo& t, i64 r, i64 rows, i64 c, i64 cols,
                 std::vector<u8>& raw, float* out);

}  // namespace ds
