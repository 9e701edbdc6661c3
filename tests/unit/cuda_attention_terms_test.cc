// SPDX-License-Identifier: Apache-2.0
// The masks of the general CUDA attention kernels, with sinks and documents, against their definition; which calls are
// theirs, and that cuDNN serves none of these; no GPU takes part.

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "cuda/attention.h"
#include "cuda/attention_cudnn.h"

namespace ds::cuda::attention {
namespace cuda_attention_terms_test {

struct Sample {
  i64 T, S;
  AttentionParams p;
  std::vector<i32> documents;  // of two samples

  Sample(i64 queries, i64 keys, i64 key0, bool has_documents) : T(queries), S(keys) {
    p.grid.col0 = key0;
    p.grid.row0 = std::max<i64>(0, key0 + S - T);
    if (!has_documents) return;
    p.positions = std::max(p.grid.row0 + T, key0 + S);
    documents.resize(static_cast<size_t>(4 * p.positions));
    for (i64 b = 0; b < 2; ++b) {
      for (i64 begin = 0, n = 0; begin < p.positions; ++n) {
        const i64 end = std::min(p.positions, begin + 1 + (5 * n + 3 * b) % 9);
        for (i64 t = begin; t < end; ++t) {
          documents[static_cast<size_t>(b * p.positions + t)] = static_cast<i32>(begin);
          documents[static_cast<size_t>((2 + b) * p.positions + t)] = static_cast<i32>(end);
        }
        begin = end;
      }
    }
    p.documents = documents.data();
  }
  bool visible(i64 b, i64 i, i64 j) const {
    if (i < 0 || i >= T || j < 0 || j >= S) return false;
    const i64 position = i + S - T, key = p.grid.col0 + j;
    const i32* const at = p.documents == nullptr ? nullptr : p.documents + b * p.positions + p.grid.row0 + i;
    const i64 first = at == nullptr ? 0 : at[0];
    if (at != nullptr && (key < first || key >= at[2 * p.positions])) return false;
    if (p.causal && j > position) return false;
    return p.window <= 0 || j > position - p.window || key - first < p.sinks;
  }
};

// f(mask, sample, b, whether keys may be seen for being sinks).
template <class F>
void for_masks(F f) {
  constexpr int kLengths[][2] = {{1, 1}, {1, 9}, {9, 1}, {17, 17}, {5, 22}, {22, 5}, {30, 30}};
  for (const auto& [T, S] : kLengths) {
    for (i64 key0 : {0, 6}) {
      for (bool documents : {false, true}) {
        Sample s(T, S, key0, documents);
        for (bool causal : {false, true}) {
          for (i64 window : {i64{0}, i64{1}, i64{4}, i64{12}, i64{1} << 40}) {
            for (i64 sinks : {i64{0}, i64{1}, i64{3}, i64{8}, i64{1} << 40}) {
              s.p.causal = causal;
              s.p.window = window;
              s.p.sinks = sinks;
              SCOPED_TRACE(::testing::Message()
                           << "T " << T << " S " << S << " from " << key0 << " causal " << causal << " window "
                           << window << " sinks " << sinks << " documents " << documents);
              const Mask mask = Mask::of(T, S, s.p);
              const Places places = Places::of(2, mask, s.p);
              for (int b = 0; b < 2; ++b) f(SampleMask(mask, places, b), s, b);
            }
          }
        }
      }
    }
  }
}

TEST(CudaAttentionTerms, RowsAndKeysSeeEachOtherAsTheMaskSays) {
  for_masks([](const SampleMask& m, const Sample& s, int b) {
    for (int i = 0; i < m.T; ++i) {
      for (int j = 0; j < m.S; ++j) {
        EXPECT_EQ(m.keys_of_row(i).has(j), s.visible(b, i, j)) << i << " " << j;
        EXPECT_EQ(m.rows_of_key(j).has(i), s.visible(b, i, j)) << i << " " << j;
      }
    }
    for (int j = m.S; j < m.S + 9; ++j) EXPECT_TRUE(m.rows_of_key(j).empty());
    for (int i = m.T; i < m.T + 9; ++i) EXPECT_TRUE(m.keys_of_row(i).all.empty());
  });
}

TEST(CudaAttentionTerms, RangesHoldAllThatIsVisible) {
  for_masks([](const SampleMask& m, const Sample& s, int b) {
    for (int own = 0; own < 32; own += 4) {
      const Range range = {own, own + 4};
      const Seen keys = m.keys_of_rows(range);
      const Range rows = m.rows_of_keys(range);
      EXPECT_TRUE(keys.all.empty() || (keys.all.begin >= 0 && keys.all.end <= m.S));
      EXPECT_TRUE(rows.empty() || (rows.begin >= 0 && rows.end <= m.T));
      for (int other = 0; other < 32; other += 2) {
        bool sees = false, seen = false, all = own < m.T, all_keys = other < m.T;
        for (int x = own; x < own + 4; ++x) {
          for (int y = other; y < other + 2; ++y) {
            sees |= s.visible(b, x, y);
            seen |= s.visible(b, y, x);
            EXPECT_TRUE(keys.has(y) || !s.visible(b, x, y)) << "row " << x << " key " << y;
            all = all && (x >= m.T || s.visible(b, x, y));
            all_keys = all_keys && (y >= m.T || s.visible(b, y, x));
          }
        }
        const Range met = {other, other + 2};
        EXPECT_TRUE(!sees || meets(keys, met)) << own << " sees " << other;
        EXPECT_TRUE(!seen || meets(rows, met)) << own << " is seen by " << other;
        if (own < m.T) {
          EXPECT_TRUE(all || !m.all_visible(range, met)) << own << " sees " << other;
          EXPECT_TRUE(m.has_sinks() || m.all_visible(range, met) == all) << own << " sees " << other;
        }
        if (other < m.T) {
          EXPECT_TRUE(all_keys || !m.all_visible(met, range)) << own << " is seen by " << other;
        }
      }
    }
  });
}

TEST(CudaAttentionTerms, StepsBetweenSinksAndWindowAreLeftOut) {
  AttentionParams p;
  p.window = 64;
  p.sinks = 4;
  const Mask mask = Mask::of(1024, 1024, p);
  const Places places = Places::of(1, mask, p);
  const SampleMask m(mask, places, 0);
  const Seen seen = m.keys_of_rows({896, 1024});
  EXPECT_EQ(seen.all.begin, 0);
  EXPECT_EQ(seen.all.end, 1024);
  EXPECT_EQ(seen.hidden.begin, 4);
  EXPECT_EQ(seen.hidden.end, 833);
  const Layout none = Layout::of(p, false);
  EXPECT_EQ(none.units(seen.all, 64).begin, 0);
  EXPECT_EQ(none.units(seen.all, 64).end, 16);
  EXPECT_EQ(none.units_within(seen.hidden, 64).begin, 1);
  EXPECT_EQ(none.units_within(seen.hidden, 64).end, 13);
  EXPECT_FALSE(meets(seen, {16, 32}));
  EXPECT_TRUE(meets(seen, {0, 16}));
  EXPECT_TRUE(meets(seen, {832, 848}));
  // With a layout: exactly the same steps, in its units.
  p.blocks = {.block = 16, .count = 100, .layouts = 1};
  p.grid.row0 = p.grid.col0 = 48;
  EXPECT_EQ(Layout::of(p, false).units_within(seen.hidden, 64).begin, (48 + 64) / 16);
  EXPECT_EQ(Layout::of(p, false).units_within(seen.hidden, 64).end, (48 + 832) / 16);
  EXPECT_TRUE(none.units_within({}, 64).empty());
  EXPECT_TRUE(none.units_within({4, 127}, 64).empty());
}

TEST(CudaAttentionTerms, WhoAsksForMoreIsNotServedByThePlainKernelsNorByCudnn) {
  const auto heads = [](i64 at) {
    return TensorView::of(reinterpret_cast<void*>(at << 32), DType::BF16, {2, 128, 4, 64});
  };
  const cudnn::AttentionCall plain = {
      .o = heads(1),
      .lse = TensorView::of(reinterpret_cast<void*>(i64{2} << 32), DType::F32, {2, 4, 128}),
      .q = heads(3),
      .k = heads(4),
      .v = heads(5),
      .dq = {},
      .dk = {},
      .dv = {},
      .dout = {},
      .params = {}};
  const auto refused = [](const cudnn::AttentionCall& call) {
    const char* const why = cudnn::refusal(call);
    return std::string_view(why != nullptr ? why : "");
  };
  EXPECT_FALSE(is_general(plain.params));
  EXPECT_EQ(refused(plain), "");
  const float bias = 0;
  const i32 document = 0;
  cudnn::AttentionCall c = plain;
  c.params.softcap = 30;
  EXPECT_TRUE(is_general(c.params));
  EXPECT_EQ(refused(c), "soft cap");
  c = plain;
  c.params.bias = &bias;
  EXPECT_TRUE(is_general(c.params));
  EXPECT_EQ(refused(c), "bias by relative position");
  c = plain;
  c.params.documents = &document;
  EXPECT_TRUE(is_general(c.params));
  EXPECT_EQ(refused(c), "documents");
  c = plain;
  c.params.sinks = 4;
  EXPECT_FALSE(is_general(c.params)) << "without a window they are nothing";
  EXPECT_EQ(refused(c), "");
  c.params.window = 64;
  EXPECT_TRUE(is_general(c.params));
  EXPECT_EQ(refused(c), "window");
  c = plain;
  c.params.blocks.block = 16;
  EXPECT_TRUE(is_general(c.params));
}

}  // namespace cuda_attention_terms_test
}  // namespace ds::cuda::attention
