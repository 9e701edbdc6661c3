// SPDX-License-Identifier: Apache-2.0
// Slices against a list of all their elements.

#include "model/slice.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "temp_directory.h"

namespace ds::model {
namespace slice_test {

using Shape = std::vector<i64>;

i64 numel_of(const Shape& shape) {
  i64 n = 1;
  for (const i64 d : shape) n *= d;
  return n;
}

// The global numbers of the slice's elements, one by one.
std::vector<i64> elements_of(const ParamSlice& slice, const Shape& shape) {
  std::vector<i64> elements;
  for (i64 g = 0; g < numel_of(shape); ++g) {
    i64 inner = 1;
    for (size_t d = static_cast<size_t>(slice.dim) + 1; d < shape.size(); ++d) inner *= shape[d];
    const i64 index = shape.empty() ? 0 : g / inner % shape[slice.dim];
    bool in = slice.whole();
    for (const auto& [from, to] : slice.ranges) in |= from <= index && index < to;
    if (in) elements.push_back(g);
  }
  return elements;
}

void expect_map(const ParamSlice& slice, const Shape& shape) {
  SCOPED_TRACE(fmt::format("[{}] {}", fmt::join(shape, ","), slice_text(slice, shape)));
  ASSERT_EQ(slice_problem(slice, shape), "");
  const std::vector<i64> want = elements_of(slice, shape);
  const SliceMap map(slice, shape);
  const auto n = static_cast<i64>(want.size());
  ASSERT_EQ(map.numel(), n);
  EXPECT_EQ(numel_of(local_shape(slice, shape)), n);
  for (i64 i = 0; i < n; ++i) ASSERT_EQ(map.global_of(i), want[i]);
  const i64 whole = numel_of(shape);
  for (i64 g = 0; g <= whole; ++g) ASSERT_EQ(map.num_before(g), std::ranges::lower_bound(want, g) - want.begin()) << g;
  for (i64 begin = 0; begin <= n; ++begin) {
    for (i64 count = 0; begin + count <= n; ++count) {
      i64 at = begin, end = -1;
      map.for_each_run(begin, count, [&](i64 local, i64 global, i64 length) {
        ASSERT_EQ(local, at);
        ASSERT_GT(length, 0);
        ASSERT_GT(global, end) << "two runs that are one";
        for (i64 i = 0; i < length; ++i) ASSERT_EQ(global + i, want[local + i]);
        at += length;
        end = global + length;
      });
      ASSERT_EQ(at, begin + count);
    }
  }
}

TEST(Slice, NumbersElementsAsAListOfThemDoes) {
  expect_map({}, {});
  expect_map({}, {7});
  expect_map({}, {3, 4});
  expect_map({0, {{2, 5}}}, {7});
  expect_map({0, {{1, 3}}}, {4, 5});
  expect_map({1, {{0, 2}}}, {3, 6});
  expect_map({1, {{2, 4}, {8, 10}, {14, 16}}}, {3, 18});  // GPT-2's c_attn: query, key and value of one rank
  expect_map({1, {{0, 1}, {3, 4}}}, {3, 4, 2});           // the end of a row and the begin of the next are one run
  expect_map({1, {{0, 2}, {2, 5}}}, {3, 5});              // ranges that touch, and are all
  expect_map({2, {{1, 2}}}, {2, 3, 4});
  expect_map({0, {{0, 3}}}, {3, 0});
}

TEST(Slice, RandomShapesAndRanges) {
  std::mt19937 rng(3);
  const auto below = [&](i64 n) { return static_cast<i64>(rng() % static_cast<u64>(n)); };
  for (int round = 0; round < 300; ++round) {
    Shape shape(static_cast<size_t>(1 + below(4)));
    for (i64& d : shape) d = 1 + below(shape.size() > 2 ? 4 : 9);
    ParamSlice slice{static_cast<int>(below(static_cast<i64>(shape.size()))), {}};
    const i64 size = shape[slice.dim];
    for (i64 at = below(size + 1); at < size; at += below(3)) {
      const i64 end = at + 1 + below(size - at);
      slice.ranges.emplace_back(at, end);
      at = end;
    }
    expect_map(slice, shape);
  }
}

TEST(Slice, HugeParameters) {
  const i64 D = i64{1} << 30;
  const Shape shape = {D, 1 << 20, 4};  // 2^52 elements
  const SliceMap rows({0, {{D - 2, D}}}, shape);
  EXPECT_EQ(rows.global_of(0), (D - 2) << 22);
  int runs = 0;
  rows.for_each_run(0, rows.numel(), [&](i64 local, i64 global, i64 count) {
    ++runs;
    EXPECT_EQ(local, 0);
    EXPECT_EQ(global, (D - 2) << 22);
    EXPECT_EQ(count, i64{2} << 22);
  });
  const SliceMap all({1, {{0, 5}, {5, 1 << 20}}}, shape);
  all.for_each_run(1, all.numel() - 1, [&](i64, i64 global, i64 count) {
    ++runs;
    EXPECT_EQ(global, 1);
    EXPECT_EQ(count, (D << 22) - 1);
  });
  EXPECT_EQ(runs, 2);
  const SliceMap columns({2, {{1, 2}}}, shape);
  EXPECT_EQ(columns.num_before((D << 22) - 2), columns.numel());
  EXPECT_EQ(columns.num_before((D << 22) - 3), columns.numel() - 1);
}

TEST(Slice, WhatIsNone) {
  const i64 most = std::numeric_limits<i64>::max();
  const auto refused = [](const ParamSlice& slice, const Shape& shape, const char* why) {
    EXPECT_NE(slice_problem(slice, shape).find(why), std::string::npos) << slice_problem(slice, shape);
    EXPECT_ERROR(SliceMap(slice, shape), Errc::Internal, why);
  };
  refused({0, {{0, 1}}}, {}, "dim 0 of 0");
  refused({2, {{0, 1}}}, {4, 4}, "dim 2 of 2");
  refused({-1, {{0, 1}}}, {4, 4}, "dim -1 of 2");
  refused({1, {{0, 5}}}, {9, 4}, "range 0:5 of dim 1 of 4 indices");
  refused({1, {{-1, 2}}}, {9, 4}, "range -1:2");
  refused({1, {{2, 2}}}, {9, 4}, "range 2:2");
  refused({1, {{3, 2}}}, {9, 4}, "range 3:2");
  refused({0, {{0, 3}, {2, 4}}}, {9, 4}, "range 2:4 of dim 0 of 9 indices, after 3");
  refused({0, {{4, 6}, {0, 2}}}, {9, 4}, "range 0:2");
  refused({0, {{1, most}}}, {9, 4}, fmt::format("range 1:{}", most).c_str());
}

TEST(Slice, AsText) {
  const Shape shape = {4, 96};
  EXPECT_EQ(slice_text({}, shape), "");
  EXPECT_EQ(slice_text({0, {{0, 2}}}, shape), "[0:2,:]");
  EXPECT_EQ(slice_text({1, {{0, 16}, {32, 48}, {64, 80}}}, shape), "[:,0:16+32:48+64:80]");
}

}  // namespace slice_test
}  // namespace ds::model
