// SPDX-License-Identifier: Apache-2.0
#include "model/coded_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace ds::testing {
namespace coded_rows_test {

std::vector<float> numbers(i64 n, float size) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::normal_distribution<float> normal(0, size);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(random);
  return x;
}

TEST(CodedRows, AreWithinHalfAScaleOfTheirNumbers) {
  for (const CodeKind kind : {CodeKind::Int8, CodeKind::Int4}) {
    for (const DType scales : {DType::F32, DType::BF16, DType::F16}) {
      for (const bool offsets : {false, true}) {
        for (const i32 group : {16, 32, 64, 192}) {
          for (const float size : {0.02f, 30.0f}) {
            const CodedForm form{.kind = kind, .scales = scales, .offsets = offsets, .group = group};
            const std::vector<float> x = numbers(192, size);
            std::vector<u8> codes(static_cast<size_t>(form.row_bytes(192)), 0xAA);
            model::encode_row(form, x, codes.data());
            for (i64 k = 0; k < 192; ++k) {
              const float scale =
                  std::fabs(CodedForm::scale_at(scales, codes.data() + form.place({}, 1, 192, 0, k).scale));
              // The largest number may be one scale beyond the last code, and scales are rounded.
              const float most = scale * (kind == CodeKind::Int4 && !offsets ? 1.02f : 0.51f) + 1e-2f * scale;
              const float y = form.element(codes.data(), {}, 1, 192, 0, k);
              EXPECT_NEAR(y, x[static_cast<size_t>(k)], most + 127 * scale / 256) << k;
            }
          }
        }
      }
    }
  }
}

TEST(CodedRows, KeepZerosAndCodedNumbers) {
  const CodedForm form{.kind = CodeKind::Int8, .scales = DType::F32, .group = 32};
  std::vector<float> x(64);
  for (int k = 32; k < 64; ++k) x[static_cast<size_t>(k)] = 0.5f * static_cast<float>(k == 40 ? 127 : k - 48);
  std::vector<u8> codes(static_cast<size_t>(form.row_bytes(64)));
  model::encode_row(form, x, codes.data());
  for (i64 k = 0; k < 64; ++k) EXPECT_EQ(form.element(codes.data(), {}, 1, 64, 0, k), x[static_cast<size_t>(k)]);
  const CodedForm four{.kind = CodeKind::Int4, .group = 16};
  for (int k = 0; k < 64; ++k) x[static_cast<size_t>(k)] = 0.25f * static_cast<float>(k % 16 - 8);
  codes.assign(static_cast<size_t>(four.row_bytes(64)), 0);
  model::encode_row(four, x, codes.data());
  for (i64 k = 0; k < 64; ++k) EXPECT_EQ(four.element(codes.data(), {}, 1, 64, 0, k), x[static_cast<size_t>(k)]);
}

// Every code has one place, in rows and in panels; panels have the bytes of their rows.
TEST(CodedForm, PlacesAreAPermutation) {
  for (const CodeKind kind : {CodeKind::Int8, CodeKind::Int4}) {
    for (const bool offsets : {false, true}) {
      const CodedForm form{.kind = kind, .offsets = offsets, .group = 16};
      for (const Panels panels :
           {Panels{}, {.rows = 4, .depth = 1}, {.rows = 32, .depth = 2}, {.rows = 8, .depth = 4}}) {
        const i64 N = 37, K = 48, bytes = N * form.row_bytes(K);
        std::vector<int> used(static_cast<size_t>(bytes));
        const auto use = [&](i64 at, i64 n, int by) {
          ASSERT_LE(at + n, bytes);
          for (i64 b = at; b < at + n; ++b) used[static_cast<size_t>(b)] += by;
        };
        for (i64 n = 0; n < N; ++n) {
          for (i64 k = 0; k < K; ++k) {
            const CodedForm::Place at = form.place(panels, N, K, n, k);
            use(at.code, 1, kind == CodeKind::Int4 ? 1 : 2);
            if (k % 16 == 0) use(at.scale, 2, 2);
            if (k % 16 == 0 && offsets) use(at.offset, 4, 2);
          }
        }
        for (const int n : used) EXPECT_EQ(n, 2);
      }
    }
  }
}

}  // namespace coded_rows_test
}  // namespace ds::testing
