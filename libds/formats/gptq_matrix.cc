// SPDX-License-Identifier: Apache-2.0
#include "formats/gptq_matrix.h"

#include <algorithm>
#include <cstring>

namespace ds {
namespace {

// GPTQ and AWQ: words hold codes of neighbouring columns or rows of the matrix, and its rows are strided.
struct GptqMatrix final : CodedMatrix {
  void load(const TensorSource& source, i64 first, i64 count, CodeRows& out) const override {
    const TensorInfo& stored = source.at(qweight);
    out.codes.resize(static_cast<size_t>(count * cols));
    const i64 in_word = 32 / bits;
    if (awq) {
      const std::vector<u32> words = read_words(source, stored, cols, first / in_word, count / in_word);
      unpack_along_rows(words, cols, count, out.codes.data());
    } else {
      const std::vector<u32> words = read_words(source, stored, cols / in_word, first, count);
      unpack_along_columns(words, count, out.codes.data());
    }
    load_scales(source, first, count, out);
    load_zeros(source, first, count, out);
  }

  std::string qweight, qzeros, scales_name;
  int bits = 4;
  bool awq = false;
  bool symmetric = false, zeros_minus_one = false;

 private:
  static std::vector<u32> read_words(const TensorSource& source, const TensorInfo& t, i64 rows_of_words, i64 first,
                                     i64 count) {
    std::vector<u32> words(static_cast<size_t>(rows_of_words * count));
    read_part(source, t, 0, rows_of_words, first, count, words.data());
    return words;
  }

  // words [cols / n, count], each of n columns of a row, to [count, cols].
  void unpack_along_columns(const std::vector<u32>& words, i64 count, u8* out) const {
    const i64 in_word = 32 / bits, rows_of_words = cols / in_word;
    const u32 mask = (1u << bits) - 1;
    constexpr i64 kRows = 32;  // whose ends of lines stay in a cache
    for (i64 begin = 0; begin < count; begin += kRows) {
      const i64 end = std::min(begin + kRows, count);
      for (i64 w = 0; w < rows_of_words; ++w) {
        for (i64 n = begin; n < end; ++n) {
          const u32 word = words[static_cast<size_t>(w * count + n)];
          u8* const to = out + n * cols + w * in_word;
          for (i64 j = 0; j < in_word; ++j) to[j] = static_cast<u8>(word >> (j * bits) & mask);
        }
      }
    }
  }

  // words [width, count / n], each of n rows at one place, to [count, width].
  void unpack_along_rows(const std::vector<u32>& words, i64 width, i64 count, u8* out) const {
    constexpr std::array<i64, 8> kOrder = {0, 4, 1, 5, 2, 6, 3, 7};  // of AWQ's rows in a word
    const i64 in_word = 32 / bits, words_of_row = count / in_word;
    const u32 mask = (1u << bits) - 1;
    for (i64 w = 0; w < words_of_row; ++w) {
      for (i64 k = 0; k < width; ++k) {
        const u32 word = words[static_cast<size_t>(k * words_of_row + w)];
        for (i64 j = 0; j < in_word; ++j) {
          const i64 place = awq ? kOrder[static_cast<size_t>(j)] : j;
          out[(w * in_word + j) * width + k] = static_cast<u8>(word >> (place * bits) & mask);
        }
      }
    }
  }

  void load_scales(const TensorSource& source, i64 first, i64 count, CodeRows& out) const {
    const i64 width = groups();
    std::vector<float> stored(static_cast<size_t>(width * count));
    read_scales(source, source.at(scales_name), 0, width, first, count, out.raw, stored.data());
    out.scales.resize(stored.size());
    for (i64 n = 0; n < count; ++n)
      for (i64 g = 0; g < width; ++g)
        out.scales[static_cast<size_t>(n * width + g)] = stored[static_cast<size_t>(g * count + n)];
  }

  void load_zeros(const TensorSource& source, i64 first, i64 count, CodeRows& out) const {
    const i64 in_word = 32 / bits;
    std::vector<u32> words = read_words(source, source.at(qzeros), groups(), first / in_word, count / in_word);
    const u32 ones = bits == 4 ? 0x11111111u : 0x01010101u;
    if (symmetric) {
      const u32 middles = ones * static_cast<u32>(middle());
      u32 all = 0;  // of the whole matrix
      source.read(qzeros, 0, 1, &all);
      const auto is_one_way = [&](u32 word) { return word == all && (word == middles || word == middles - ones); };
      DS_CHECK(std::ranges::all_of(words, is_one_way), Errc::Corrupt,
               "{}: '{}' has other zeros than {}, stored as {} or {}, which symmetric codes of {} bits have: set "
               "quantization_config.sym to false if they are not",
               source.path(), qzeros, middle(), middle(), middle() - 1, bits);
      return;
    }
    if (zeros_minus_one)
      for (u32& word : words) word += ones;
    out.zeros.resize(static_cast<size_t>(count * groups()));
    unpack_along_rows(words, groups(), count, out.zeros.data());
  }
};

void find_matrix(const TensorSource& source, const TensorInfo& stored, const WeightCodes& codes, CodedMatrices& all) {
  const MatrixParts parts(source, stored, all);
  const std::string module = stored.name.substr(0, stored.name.size() - kPackedWeight.size());
  const bool awq = codes.method == CodesMethod::Awq;
  const i64 in_word = 32 / codes.bits;
  if (stored.dtype != DType::I32 || stored.shape.size() != 2 || stored.shape[0] < 1 || stored.shape[1] < 1)
    parts.refuse(stored, "it is a matrix of int32");
  auto matrix = std::make_unique<GptqMatrix>();
  matrix->name = module + ".weight";
  matrix->cols = stored.shape[0] * (awq ? 1 : in_word);
  matrix->rows = stored.shape[1] * (awq ? in_word : 1);
  if (matrix->rows % in_word != 0)
    parts.refuse(stored,
                 fmt::format("its rows are a multiple of {}, since zeros of {} bits share words", in_word, codes.bits));
  matrix->group = codes.group == -1 ? matrix->cols : codes.group;
  matrix->bits = codes.bits;
  matrix->codes = codes.bits == 4 ? CodedMatrix::Codes::Bits4 : CodedMatrix::Codes::Bits8;
  matrix->awq = awq;
  matrix->symmetric = codes.symmetric;
  matrix->zeros = !codes.symmetric;
  matrix->zeros_minus_one = codes.zeros_minus_one;
  const i64 groups = matrix->groups();
  const std::string why = fmt::format("by group_size {} and bits {}", codes.group, codes.bits);
  const TensorInfo& scales = parts.need(module + ".scales", kScaleTypes);
  parts.check_shape(scales, {{groups, matrix->rows}}, why);
  const TensorInfo& zeros = parts.need(module + ".qzeros", {DType::I32});
  parts.check_shape(zeros, {{groups, matrix->rows / in_word}}, why);
  const std::string order = module + ".g_idx";
  const TensorInfo* const given = codes.act_order ? &parts.need(order, {DType::I32}) : parts.find(order, {DType::I32});
  if (given != nullptr) {
    parts.check_shape(*given, {{matrix->cols}}, "the group of each column");
    matrix->order = order;
  }
  matrix->scales = scales.dtype;
  matrix->scales_name = scales.name;
  matrix->qweight = stored.name;
  matrix->qzeros = zeros.name;
  parts.show(std::move(matrix));
}

}  // namespace

void find_gptq_matrices(const TensorSource& source, const WeightCodes& codes, CodedMatrices& all) {
  for (const TensorInfo& t : source.list())
    if (t.name.ends_with(kPackedWeight)) find_matrix(source, t, codes, all);
  for (size_t i = 0; i < source.list().size(); ++i) {
    const std::string& name = source.list()[i].name;
    DS_CHECK(!name.ends_with(".qzeros") || all.parts.contains(i), Errc::Mismatch,
             "{}: '{}' belongs to a '{}' that is missing", source.path(), name,
             name.substr(0, name.rfind('.')) + std::string(kPackedWeight));
  }
}

}  // namespace ds
