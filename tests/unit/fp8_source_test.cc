// SPDX-License-Identifier: Apache-2.0
// Published weights in FP8: every code and every block, of matrices of any size, in any range; shapes that do not
// agree.

#include "formats/fp8_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "ds/kernels/fp8.h"
#include "temp_directory.h"

namespace ds {
namespace fp8_source_test {

using testing::TempDirectory;

struct Matrix {
  i64 rows, cols;
  std::vector<u8> codes;
  std::vector<float> scales;

  Matrix(i64 r, i64 c) : rows(r), cols(c) {
    for (i64 i = 0; i < rows * cols; ++i) codes.push_back(static_cast<u8>(i * 37 % 255));  // no NaN but of one sign
    for (i64 i = 0; i < scale_rows() * scale_cols(); ++i) scales.push_back(0.01f * static_cast<float>(i + 1));
  }
  i64 scale_rows() const { return div_ceil(rows, i64{128}); }
  i64 scale_cols() const { return div_ceil(cols, i64{128}); }
  // By the definition of the format, in fp64.
  float value(i64 row, i64 col) const {
    const int code = codes[static_cast<size_t>(row * cols + col)], exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    const auto number = static_cast<float>(code >= 128 ? -magnitude : magnitude);
    return number * scales[static_cast<size_t>(row / 128 * scale_cols() + col / 128)];
  }
};

struct Named {
  TensorInfo info;
  const void* data;
};
void write(const std::string& path, const std::vector<Named>& tensors) {
  std::vector<TensorInfo> list;
  for (const Named& t : tensors) list.push_back(t.info);
  const auto sink = create_sink(path, FileFormat::Safetensors, list);
  for (const Named& t : tensors) sink->write(t.info.name, 0, t.info.numel(), t.data);
  sink->finish();
}

TEST(Fp8Source, ReadsWhatTheCodesStandFor) {
  const TempDirectory dir;
  for (const auto& [rows, cols] : {std::pair<i64, i64>{1, 1}, {128, 128}, {129, 127}, {300, 260}, {7, 513}}) {
    const Matrix m(rows, cols);
    const float bias[3] = {1, 2, 3};
    write(dir / "x.safetensors",
          {{{"a.weight_scale_inv", DType::F32, {m.scale_rows(), m.scale_cols()}}, m.scales.data()},
           {{"a.weight", DType::F8E4M3, {rows, cols}}, m.codes.data()},
           {{"a.bias", DType::F32, {3}}, bias}});
    const auto source = open_source(dir / "x.safetensors");
    ASSERT_EQ(source->list().size(), 2u);
    EXPECT_EQ(source->at("a.weight"), (TensorInfo{"a.weight", DType::F32, {rows, cols}}));
    std::vector<float> got(static_cast<size_t>(rows * cols), -1);
    const auto check = [&](i64 first, i64 count) {
      source->read("a.weight", first, count, got.data());
      for (i64 i = 0; i < count; ++i) {
        const float want = m.value((first + i) / cols, (first + i) % cols), x = got[static_cast<size_t>(i)];
        ASSERT_TRUE(x == want || (std::isnan(x) && std::isnan(want))) << rows << " " << cols << " " << first + i;
      }
    };
    check(0, rows * cols);
    check(rows * cols - 1, 1);
    check(rows * cols / 3, rows * cols / 2);
    float same[3] = {};
    source->read("a.bias", 0, 3, same);
    EXPECT_EQ(std::memcmp(same, bias, sizeof bias), 0);
  }
}

// Where no block ends within a row's end, codes can be read; they stand for the same bits.
TEST(Fp8Source, HasCodes) {
  const TempDirectory dir;
  for (const auto& [rows, cols] : {std::pair<i64, i64>{300, 256}, {1, 128}, {40000, 128}, {300, 260}}) {
    const Matrix m(rows, cols);
    write(dir / "x.safetensors",
          {{{"a.weight_scale_inv", DType::F32, {m.scale_rows(), m.scale_cols()}}, m.scales.data()},
           {{"a.weight", DType::F8E4M3, {rows, cols}}, m.codes.data()}});
    const auto source = open_source(dir / "x.safetensors");
    const CodedForm form = source->codes_of("a.weight");
    if (cols % 128 != 0) {
      EXPECT_FALSE(form);
      continue;
    }
    EXPECT_EQ(form, (CodedForm{.kind = CodeKind::E4M3, .scales = DType::F32, .group = 128}));
    const i64 first = rows / 3, count = rows - first;
    std::vector<u8> codes(static_cast<size_t>(count * form.row_bytes(cols)));
    source->read_codes("a.weight", first, count, codes.data());
    for (i64 i = 0; i<count * cols; i += rows> 1000 ? 101 : 1) {
      const i64 n = i / cols, k = i % cols;
      const float x = form.element(codes.data(), {}, count, cols, n, k), want = m.value(first + n, k);
      ASSERT_TRUE(x == want || (std::isnan(x) && std::isnan(want))) << rows << " " << n << " " << k;
    }
  }
}

TEST(Fp8Source, NamesWhatDoesNotAgree) {
  const TempDirectory dir;
  const Matrix m(300, 260);
  const auto open = [&](TensorInfo weight, std::vector<i64> scales) {
    const std::vector<float> zeros(static_cast<size_t>(300 * 260), 0.0f);
    std::vector<Named> tensors = {{std::move(weight), zeros.data()}};
    if (!scales.empty()) tensors.push_back({{"a.weight_scale_inv", DType::F32, std::move(scales)}, zeros.data()});
    write(dir / "x.safetensors", tensors);
    return open_source(dir / "x.safetensors");
  };
  const TensorInfo weight{"a.weight", DType::F8E4M3, {300, 260}};
  EXPECT_ERROR(open(weight, {2, 3}), Errc::Mismatch, "'a.weight_scale_inv' is fp32 [2,3]");
  EXPECT_ERROR(open(weight, {1, 1}), Errc::Mismatch, "for blocks of 128 x 128 codes");
  EXPECT_ERROR(open({"a.weight", DType::F32, {300, 260}}, {3, 3}), Errc::Mismatch, "'a.weight' is fp32 [300,260]");
  EXPECT_ERROR(open({"a.weight", DType::F8E5M2, {300, 260}}, {3, 3}), Errc::Mismatch, "'a.weight' is fp8_e5m2");
  EXPECT_ERROR(open({"b.weight", DType::F32, {2}}, {3, 3}), Errc::Mismatch, "scales of a matrix that is not there");
  // Codes without scales stay codes, which nothing takes for weights, unless other matrices have scales.
  EXPECT_EQ(open(weight, {})->at("a.weight").dtype, DType::F8E4M3);
}

TEST(Fp8Source, NamesScalesThatAreMissingOrOfATypeThatIsNotRead) {
  const TempDirectory dir;
  const Matrix m(300, 260);
  const auto file = [&](const std::string& name, std::vector<Named> tensors) {
    write(dir / name, tensors);
    return dir / name;
  };
  const Named a{{"a.weight", DType::F8E4M3, {300, 260}}, m.codes.data()},
      b{{"b.weight", DType::F8E4M3, {300, 260}}, m.codes.data()},
      scales{{"a.weight_scale_inv", DType::F32, {3, 3}}, m.scales.data()};
  EXPECT_ERROR(
      open_source(file("one.safetensors", {a, b, scales})), Errc::Mismatch,
      "one.safetensors: 'b.weight' is fp8_e4m3, and its scales, 'b.weight_scale_inv', are missing: add them to "
      "the file, or convert the weights to bf16");
  // Scales of one byte are written as another type of one byte, under whose name the header then has theirs.
  const Named bytes{{"a.weight_scale_inv", DType::F8E5M2, {3, 3}}, m.codes.data()};
  const std::string path = file("bytes.safetensors", {a, bytes});
  std::string text = testing::read_file(path);
  const size_t at = text.find("F8_E5M2");
  ASSERT_NE(at, text.npos);
  testing::write_file(path, text.replace(at, 7, "F8_E8M0"));
  EXPECT_ERROR(open_source(path), Errc::Unavailable,
               "'a.weight_scale_inv', the scales of 'a.weight', are of type F8_E8M0, which is not read: store them in "
               "fp32, or convert the weights to bf16");
}

}  // namespace fp8_source_test
}  // namespace ds
