// SPDX-License-Identifier: Apache-2.0
// Layouts of block-sparse attention: bit for bit those of DeepSpeed's own classes (tests/golden/sparse_layouts), random
// blocks by their rule, and layouts of files.
#include "model/attention_pattern.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "formats/tensor_io.h"
#include "temp_directory.h"
#include "test_data.h"
#include "unit/config_reading.h"

namespace ds::model {
namespace attention_pattern_test {

using testing::TempDirectory;
using testing::write_file;
using Mode = SparseAttentionMode;

// The transposed layout contains the same blocks, and there are no bits beyond the blocks.
void check_transposed(const AttentionLayout& layout) {
  const i64 count = layout.count(), words = layout.words();
  ASSERT_EQ(std::ssize(layout.keys()), layout.layouts() * count * words);
  ASSERT_EQ(layout.queries().size(), layout.keys().size());
  i64 present = 0, before = 0, bits = 0;
  for (i64 l = 0; l < layout.layouts(); ++l) {
    for (i64 i = 0; i < count; ++i) {
      for (i64 j = 0; j < count; ++j) {
        const u64 word = layout.queries()[static_cast<size_t>((l * count + j) * words + i / 64)];
        ASSERT_EQ((word >> (i % 64) & 1) != 0, layout.has(l, i, j)) << l << " " << i << " " << j;
        present += layout.has(l, i, j);
        before += layout.has(l, i, j) && j <= i;
      }
    }
  }
  for (const std::vector<u64>* half : {&layout.keys(), &layout.queries()}) {
    bits = 0;
    for (const u64 word : *half) bits += std::popcount(word);
    EXPECT_EQ(bits, present);
  }
  EXPECT_EQ(layout.present(false), present);
  EXPECT_EQ(layout.present(true), before);
}

std::set<i64> row_of(const AttentionLayout& layout, i64 head, i64 query) {
  std::set<i64> keys;
  for (i64 key = 0; key < layout.count(); ++key) {
    if (layout.has(head, query, key)) keys.insert(key);
  }
  return keys;
}

// Blocks of 16 tokens.
AttentionLayout make(const SparseAttentionConfig& c, i64 heads, i64 blocks, u64 seed = 1) {
  return make_attention_layout(c, heads, blocks * c.block, seed);
}

bool same(const AttentionLayout& a, const AttentionLayout& b) {
  return a.layouts() == b.layouts() && a.count() == b.count() && a.keys() == b.keys() && a.queries() == b.queries();
}

TEST(AttentionLayout, HasItsBitsInBothOrders) {
  constexpr i64 kCount = 70, kWords = 2;
  std::vector<u64> keys(2 * kCount * kWords);
  EXPECT_EQ(AttentionLayout(32, kCount, 2, keys).present(false), 0);
  const std::array<i64, 3> there[] = {{0, 0, 69}, {0, 69, 0}, {1, 64, 63}, {1, 63, 64}, {1, 69, 69}};
  for (const auto& [l, i, j] : there)
    keys[static_cast<size_t>((l * kCount + i) * kWords + j / 64)] |= u64{1} << (j % 64);
  const AttentionLayout layout(32, kCount, 2, keys);
  EXPECT_EQ(layout.block(), 32);
  EXPECT_EQ(layout.words(), kWords);
  EXPECT_EQ(layout.present(false), 5);
  EXPECT_EQ(layout.present(true), 3);
  for (const auto& [l, i, j] : there) EXPECT_TRUE(layout.has(l, i, j)) << l << " " << i << " " << j;
  check_transposed(layout);
}

TEST(AttentionPattern, HasTheBitsOfDeepSpeedsClasses) {
  const std::string path = testing::test_data("sparse_layouts/cases.json");
  const Json cases = parse_json(read_text_file(path, i64{1} << 22), path, {.places = false}).root;
  ASSERT_GE(cases.size(), 250u);
  std::set<std::string> modes;
  for (const Json& c : cases) {
    const i64 heads = c["heads"], count = c["blocks"], block = c["config"]["block"];
    SCOPED_TRACE(fmt::format("{} of {} heads, {} blocks", c["config"].dump(), heads, count));
    modes.insert(c["config"]["mode"]);
    // The last block is not whole.
    const i64 tokens = count * block - 1;
    const Json config = {
        {"train_batch_size", 1}, {"data", {{"seq_length", tokens}}}, {"sparse_attention", c["config"]}};
    const AttentionLayout layout =
        make_attention_layout(testing::good(config.dump()).sparse_attention, heads, tokens, /*seed=*/3);
    ASSERT_EQ(layout.block(), block);
    ASSERT_EQ(layout.count(), count);
    ASSERT_EQ(layout.layouts(), std::ssize(c["layouts"]));
    const size_t digits = static_cast<size_t>(count + 3) / 4;
    for (i64 head = 0; head < layout.layouts(); ++head) {
      const std::string& text = c["layouts"][static_cast<size_t>(head)].get_ref<const std::string&>();
      ASSERT_EQ(text.size(), digits * static_cast<size_t>(count));
      for (i64 query = 0; query < count; ++query) {
        const char* const begin = text.data() + digits * static_cast<size_t>(query);
        u64 row = 0;
        ASSERT_EQ(std::from_chars(begin, begin + digits, row, 16).ptr, begin + digits);
        ASSERT_EQ(layout.keys()[static_cast<size_t>(head * count + query)], row) << "head " << head << " row " << query;
      }
    }
    check_transposed(layout);
  }
  EXPECT_EQ(modes, (std::set<std::string>{"dense", "fixed", "variable", "bigbird", "bslongformer", "local"}));
}

// Beyond the 64 blocks of a word, where fixtures do not reach: the rules, written down once more, block by block.
TEST(AttentionPattern, LongRowsFollowTheSameRules) {
  constexpr i64 kCount = 150;
  for (const bool unidirectional : {false, true}) {
    SparseAttentionConfig c;
    c.unidirectional = unidirectional;
    c.num_local_blocks = 70;
    c.num_global_blocks = 7;
    c.num_sliding_window_blocks = 131;
    c.local_window_blocks = {3, 66, 65};
    c.global_block_indices = {140, 63};
    c.global_block_end_indices = {200, 66};
    const auto is_global = [](i64 i) { return (i >= 140 && i < 150) || (i >= 63 && i < 66); };
    const auto begins = [](i64 i) { return i >= 140 ? 140 : 63; };
    const auto expect = [&](Mode mode, auto&& met) {
      c.mode = mode;
      const AttentionLayout layout = make(c, 2, kCount);
      for (i64 i = 0; i < kCount; ++i) {
        for (i64 j = 0; j < kCount; ++j)
          ASSERT_EQ(layout.has(0, i, j), met(i, j)) << static_cast<int>(mode) << " " << i << " " << j;
      }
      check_transposed(layout);
    };
    const auto sees = [&](i64 i, i64 j) { return !unidirectional || j <= i; };
    expect(Mode::Fixed, [&](i64 i, i64 j) {
      const bool global = (j % 70 >= 63 && j < 140) || j >= 143;
      const i64 begin = j >= 140 ? 143 : j / 70 * 70 + 63;
      return (i / 70 == j / 70 && sees(i, j)) || (global && sees(i, begin));
    });
    expect(Mode::Variable, [&](i64 i, i64 j) {
      const auto window = [](i64 x) { return x < 3 ? 0 : x < 69 ? 1 : x < 134 ? 2 : 3; };
      return (window(i) == window(j) && sees(i, j)) || (is_global(j) && sees(i, begins(j)));
    });
    expect(Mode::BSLongformer,
           [&](i64 i, i64 j) { return (std::abs(i - j) <= 65 || is_global(i) || is_global(j)) && sees(i, j); });
    expect(Mode::Local, [&](i64 i, i64 j) { return std::abs(i - j) <= 65 && sees(i, j); });
    c.num_random_blocks = 0;
    expect(Mode::BigBird, [&](i64 i, i64 j) { return (std::abs(i - j) <= 65 || i < 7 || j < 7) && sees(i, j); });
    expect(Mode::Dense, [](i64, i64) { return true; });
  }
}

// Rows are those without random blocks, and more: at most as many as are drawn, from where they may be drawn; and over
// rows and seeds each of these comes as often as the others.
TEST(AttentionPattern, RandomBlocksFollowTheirRule) {
  constexpr i64 kCount = 100, kHeads = 3, kRandom = 4;
  for (const Mode mode : {Mode::BigBird, Mode::Variable}) {
    for (const bool unidirectional : {false, true}) {
      SCOPED_TRACE(fmt::format("mode {}, {}", static_cast<int>(mode), unidirectional));
      SparseAttentionConfig c;
      c.mode = mode;
      c.unidirectional = unidirectional;
      c.different_layout_per_head = true;
      c.num_sliding_window_blocks = 1;
      c.local_window_blocks = {1};
      const AttentionLayout fixed = make(c, kHeads, kCount);
      c.num_random_blocks = kRandom;
      const AttentionLayout layout = make(c, kHeads, kCount);
      check_transposed(layout);
      i64 added = 0, all = 0;
      std::vector<i64> columns(kCount);
      for (i64 head = 0; head < kHeads; ++head) {
        for (i64 row = mode == Mode::BigBird && !unidirectional ? 1 : 0; row < kCount; ++row) {
          const std::set<i64> with = row_of(layout, head, row), without = row_of(fixed, head, row);
          const i64 below = mode == Mode::BigBird && unidirectional ? row + 1 : kCount;
          ASSERT_TRUE(std::ranges::includes(with, without)) << row;
          ASSERT_LT(*with.rbegin(), std::max(below, *without.rbegin() + 1)) << row;
          ASSERT_LE(std::ssize(with) - std::ssize(without), std::min(kRandom, below)) << row;
          // Two blocks are met anyhow, the row's own and the first, and are rarely drawn.
          ASSERT_GE(std::ssize(with) - std::ssize(without), std::min(kRandom, below) - 2) << row;
          added += std::ssize(with) - std::ssize(without);
          all += std::min(kRandom, below);
          for (const i64 key : with) columns[static_cast<size_t>(key)] += !without.contains(key);
        }
      }
      EXPECT_GT(added, all * 8 / 10);
      if (!unidirectional) {
        EXPECT_LT(std::ranges::max(columns), 3 * kHeads * kRandom);
        EXPECT_GT(*std::ranges::min_element(columns.begin() + 1, columns.end()), 0);
      }
      // The first rows of a BigBird that looks back have as many as there are.
      if (mode == Mode::BigBird && unidirectional) {
        EXPECT_EQ(row_of(layout, 0, 0), (std::set<i64>{0}));
        EXPECT_EQ(row_of(layout, 1, 3), (std::set<i64>{0, 1, 2, 3}));
      }
    }
  }
}

// With as many random blocks as there are all are there: none is drawn twice.
TEST(AttentionPattern, RandomBlocksDoNotRepeat) {
  SparseAttentionConfig c;
  c.mode = Mode::Variable;
  c.local_window_blocks = {1};
  c.num_random_blocks = 90;
  EXPECT_EQ(make(c, 1, 90).present(false), 90 * 90);
  c.num_random_blocks = 89;
  EXPECT_GE(make(c, 1, 90).present(false), 90 * 89);
  c.num_random_blocks = 1000;  // of a shorter sequence than that of the run
  EXPECT_EQ(make(c, 1, 90).present(false), 90 * 90);
}

TEST(AttentionPattern, RandomBlocksDependOnSeedHeadAndRowAlone) {
  SparseAttentionConfig c;
  c.mode = Mode::BigBird;
  c.num_random_blocks = 3;
  c.different_layout_per_head = true;
  const AttentionLayout layout = make(c, 4, 80, 7);
  EXPECT_TRUE(same(layout, make(c, 4, 80, 7)));
  EXPECT_FALSE(same(layout, make(c, 4, 80, 8)));
  EXPECT_FALSE(same(layout, make(c, 4, 80, u64{7} | u64{1} << 32)));
  std::set<std::vector<u64>> heads;
  const size_t size = layout.keys().size() / 4;
  for (size_t head = 0; head < 4; ++head)
    heads.emplace(layout.keys().begin() + static_cast<std::ptrdiff_t>(head * size),
                  layout.keys().begin() + static_cast<std::ptrdiff_t>((head + 1) * size));
  EXPECT_EQ(heads.size(), 4u);
  // A layout for all heads is that of the first head; more heads do not change it.
  const std::vector<u64> first(layout.keys().begin(), layout.keys().begin() + static_cast<std::ptrdiff_t>(size));
  c.different_layout_per_head = false;
  const AttentionLayout one = make(c, 4, 80, 7);
  EXPECT_EQ(one.layouts(), 1);
  EXPECT_EQ(one.keys(), first);
}

TEST(AttentionPattern, CountsBeyondAShortSequenceAreAllOfIt) {
  SparseAttentionConfig c;
  c.num_local_blocks = c.num_global_blocks = 8;
  c.num_sliding_window_blocks = 9;
  for (const Mode mode : {Mode::Fixed, Mode::BigBird, Mode::BSLongformer, Mode::Local, Mode::Variable}) {
    c.mode = mode;
    EXPECT_EQ(make(c, 1, 3).present(false), 9) << static_cast<int>(mode);
    EXPECT_EQ(make_attention_layout(c, 1, 1, 0).present(true), 1);
  }
}

// A layout of two heads over three blocks, in which block 1 of the second head sees only the block after it.
constexpr const char* kUpper = "[[[1, 0, 0], [1, 1, 0], [0, 0, 1]], [[1, 1, 0], [0, 0, 1], [1, 0, 1]]]";

SparseAttentionConfig of_file(const std::string& path) {
  SparseAttentionConfig c;
  c.mode = Mode::Layout;
  c.layout = path;
  return c;
}

TEST(AttentionLayoutFile, JsonIsAnArrayOrHasOne) {
  const TempDirectory dir;
  write_file(dir / "bare.json", kUpper);
  write_file(dir / "named.json", fmt::format("{{\"layout\": {}}} // of two heads", kUpper));
  const AttentionLayout bare = make(of_file(dir / "bare.json"), 2, 3);
  EXPECT_EQ(bare.layouts(), 2);
  EXPECT_EQ(row_of(bare, 0, 1), (std::set<i64>{0, 1}));
  EXPECT_EQ(row_of(bare, 1, 1), (std::set<i64>{2}));
  EXPECT_EQ(bare.present(false), 9);
  check_transposed(bare);
  EXPECT_TRUE(same(bare, make(of_file(dir / "named.json"), 2, 3)));
  // The last block has one token.
  EXPECT_TRUE(same(bare, make_attention_layout(of_file(dir / "bare.json"), 2, 33, 0)));
  write_file(dir / "one.json", "[[[1, 0], [1, 1]]]");
  for (const i64 heads : {1, 5}) EXPECT_EQ(make(of_file(dir / "one.json"), heads, 2).layouts(), 1);
}

template <class T>
std::string hdf5_of(const TempDirectory& dir, DType dtype, std::vector<i64> shape, std::vector<T> values,
                    const char* name = "layout") {
  const std::string path = dir / fmt::format("{}.{}.h5", dtype_name(dtype), name);
  const auto sink = create_sink(path, FileFormat::Hdf5, {{name, dtype, shape}});
  sink->write(name, 0, std::ssize(values), values.data());
  sink->finish();
  return path;
}

TEST(AttentionLayoutFile, Hdf5HasADatasetOfAnyNumbers) {
  const TempDirectory dir;
  write_file(dir / "bare.json", kUpper);
  const AttentionLayout expected = make(of_file(dir / "bare.json"), 2, 3);
  const std::vector<u8> bits = {1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1};
  const auto check = [&]<class T>(DType dtype, T one) {
    std::vector<T> values;
    for (const u8 bit : bits) values.push_back(bit != 0 ? one : T{0});
    const AttentionLayout layout = make(of_file(hdf5_of(dir, dtype, {2, 3, 3}, values)), 2, 3);
    EXPECT_TRUE(same(layout, expected)) << dtype_name(dtype);
  };
  check(DType::U8, u8{1});
  check(DType::I8, u8{1});
  check(DType::Bool, u8{1});
  check(DType::U16, u16{1});
  check(DType::I32, i32{1});
  check(DType::I64, i64{1});
  check(DType::F32, 1.0f);
  check(DType::F64, 1.0);
}

TEST(AttentionLayoutFile, WhatIsNoLayoutIsRefused) {
  const TempDirectory dir;
  const auto refuse = [&](const std::string& text, Errc code, std::string_view message, i64 heads = 2) {
    write_file(dir / "x.json", text);
    EXPECT_ERROR(make(of_file(dir / "x.json"), heads, 2), code, std::string(message));
  };
  refuse("[[[1, 0], [1, 1]", Errc::Config, "x.json:1:");
  refuse("3", Errc::Config, "must be an array [heads or 1, blocks, blocks], or an object with one as \"layout\"");
  refuse(R"({"layouts": []})", Errc::Config, "must be an array");
  refuse(R"({"layout": 1})", Errc::Config, "the layout is [], not [2 or 1, 2, 2]");
  refuse("[]", Errc::Config, "the layout is [0], not [2 or 1, 2, 2]");
  refuse("[[1, 0], [1, 1]]", Errc::Config, "the layout is [2, 2], not");
  refuse("[[[1, 0, 1], [1, 1, 1], [1, 1, 1]]]", Errc::Config, "the layout is [1, 3, 3], not [2 or 1, 2, 2]");
  refuse("[[[1, 0], [1, 1]], [[1, 0], [1, 1]]]", Errc::Config, "the layout is [2, 2, 2], not [1, 2, 2]", 1);
  refuse("[[[1, 0], [1, 1]], [[1, 0], [1, 1]]]", Errc::Config, "the layout is [2, 2, 2], not [3 or 1, 2, 2]", 3);
  refuse("[[[[1], 0], [1, 1]]]", Errc::Config, "the layout is [1, 2, 2, 1], not");
  refuse("[[[1, [0]], [1, 1]]]", Errc::Config, "layout[0][0][1] is neither 0 nor 1");
  refuse("[[[1, 0], [1, 1]], [[1, 0]]]", Errc::Config, "layout[1] does not have 2 rows");
  refuse("[[[1, 0], [1, 1]], 0]", Errc::Config, "layout[1] does not have 2 rows");
  refuse("[[[1, 0], [1, 1, 1]]]", Errc::Config, "layout[0][1] does not have 2 entries");
  refuse("[[[1, 0], [1, 2]]]", Errc::Config, "layout[0][1][1] is neither 0 nor 1");
  refuse("[[[1, 0], [1, true]]]", Errc::Config, "layout[0][1][1] is neither 0 nor 1");
  refuse("[[[1, 0], [1, 0.5]]]", Errc::Config, "layout[0][1][1] is neither 0 nor 1");
  refuse("[[[1, 0], [1, 1]], [[1, 0], [0, 0]]]", Errc::Config, "head 1, block row 1: no key");
  EXPECT_ERROR(make(of_file(dir / "missing.json"), 2, 2), Errc::Config, "sparse_attention.layout: cannot open ");
  EXPECT_ERROR(make(of_file(dir / "missing.h5"), 2, 2), Errc::Config, "missing.h5");

  write_file(dir / "text.h5", "[[[1, 0], [1, 1]]]");
  EXPECT_ERROR(make(of_file(dir / "text.h5"), 2, 2), Errc::Corrupt, "text.h5");
  const std::vector<u8> bits = {1, 0, 1, 1};
  EXPECT_ERROR(make(of_file(hdf5_of(dir, DType::U8, {1, 2, 2}, bits, "mask")), 2, 2), Errc::Config,
               "has no dataset \"layout\"");
  EXPECT_ERROR(make(of_file(hdf5_of(dir, DType::U8, {2, 2}, bits)), 2, 2), Errc::Config,
               "the layout is [2, 2], not [2 or 1, 2, 2]");
  EXPECT_ERROR(make(of_file(hdf5_of(dir, DType::U8, {1, 2, 2}, std::vector<u8>{1, 0, 1, 2})), 2, 2), Errc::Config,
               "layout[0][1][1] is neither 0 nor 1");
  EXPECT_ERROR(make(of_file(hdf5_of(dir, DType::F32, {1, 2, 2}, std::vector<float>{1, 0, 0.5f, 1})), 2, 2),
               Errc::Config, "layout[0][1][0] is neither 0 nor 1");
  EXPECT_ERROR(make(of_file(hdf5_of(dir, DType::U8, {1, 2, 2}, std::vector<u8>{0, 0, 1, 1})), 2, 2), Errc::Config,
               "head 0, block row 0: no key");
}

// A row that has keys, but none that a causal mask leaves.
TEST(AttentionLayoutFile, ARowHasAKeyThatItsModelSees) {
  const TempDirectory dir;
  write_file(dir / "upper.json", kUpper);
  SparseAttentionConfig c = of_file(dir / "upper.json");
  EXPECT_EQ(make(c, 2, 3).layouts(), 2);
  c.unidirectional = true;
  EXPECT_ERROR(make(c, 2, 3), Errc::Config, "upper.json: head 1, block row 1: no key at or before it");
}

// Block by block, and share, against every pair of tokens.
TEST(AttentionPattern, IsWhatPairsOfTokensSee) {
  SparseAttentionConfig config;
  config.mode = SparseAttentionMode::Fixed;
  config.different_layout_per_head = true;
  config.num_different_global_patterns = 2;
  for (const i64 tokens : {1, 16, 100, 130}) {
    for (const bool causal : {false, true}) {
      for (const i64 window : {0, 1, 16, 40}) {
        for (const bool sparse : {false, true}) {
          config.unidirectional = causal;
          const auto layout =
              sparse ? std::make_shared<const AttentionLayout>(make_attention_layout(config, 3, tokens, 1)) : nullptr;
          const AttentionPattern pattern(layout, 16, tokens, causal, window);
          const auto sees = [&](i64 i, i64 j) {
            return (!causal || j <= i) && (window == 0 || j > i - window) &&
                   (!sparse || layout->has(1, i / 16, j / 16));
          };
          i64 pairs = 0;
          std::vector<std::vector<AttentionPattern::Met>> queries(static_cast<size_t>(pattern.count()));
          for (i64 a = 0; a < pattern.count(); ++a) {
            std::vector<AttentionPattern::Met> want;
            for (i64 b = 0; b < pattern.count(); ++b) {
              i64 seen = 0, all = 0;
              for (i64 i = 16 * a; i < std::min(tokens, 16 * a + 16); ++i) {
                for (i64 j = 16 * b; j < std::min(tokens, 16 * b + 16); ++j, ++all) seen += sees(i, j) ? 1 : 0;
              }
              pairs += seen;
              if (seen == 0) continue;
              want.push_back({b, seen == all});
              queries[static_cast<size_t>(b)].push_back({a, seen == all});
            }
            EXPECT_EQ(pattern.keys_of(1, a), want) << tokens << " " << causal << " " << window << " block " << a;
          }
          for (i64 b = 0; b < pattern.count(); ++b) {
            EXPECT_EQ(pattern.queries_of(1, b), queries[static_cast<size_t>(b)]) << tokens << " " << window;
          }
          EXPECT_DOUBLE_EQ(pattern.share(1), static_cast<double>(pairs) / static_cast<double>(tokens * tokens));
        }
      }
    }
  }
}

}  // namespace attention_pattern_test
}  // namespace ds::model
