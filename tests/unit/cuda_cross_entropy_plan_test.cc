// SPDX-License-Identifier: Apache-2.0
#include "cuda/cross_entropy_plan.h"

#include <gtest/gtest.h>

namespace ds::cuda {
namespace cuda_cross_entropy_plan_test {

constexpr size_t kA100 = 163 << 10, kH100 = 227 << 10;  // of a block
constexpr int kProcessors = 132;

// Rows of V logits at the distance that linear_cross_entropy gives many of them.
SoftmaxPlan plan_of(i64 V, size_t most, i64 rows = 4096, size_t each = sizeof(float)) {
  return SoftmaxPlan::of(rows, (V + 7) / 8 * 8, V, each, true, true, most, kProcessors);
}

TEST(SoftmaxPlan, ARowIsKeptIfItFitsTheSharedMemoryOfABlock) {
  EXPECT_TRUE(plan_of(50257, kH100).kept);
  EXPECT_FALSE(plan_of(50257, kA100).kept);
  EXPECT_TRUE(plan_of(32000, kA100).kept);
  EXPECT_FALSE(plan_of(151936, kH100).kept);
  for (const size_t most : {kA100, kH100}) {
    const i64 largest = static_cast<i64>((most - sizeof(SoftmaxSums)) / sizeof(float));
    EXPECT_TRUE(plan_of(largest, most).kept);
    EXPECT_EQ(plan_of(largest, most).shared_bytes, most);
    EXPECT_FALSE(plan_of(largest + 1, most).kept);
  }
  EXPECT_FALSE(plan_of(8, 0).kept);
  // In 16 bits a row is half as long.
  EXPECT_TRUE(plan_of(50257, kA100, 4096, 2).kept);
  EXPECT_TRUE(plan_of(116160, kH100, 4096, 2).kept);
  EXPECT_FALSE(plan_of(116168, kH100, 4096, 2).kept);
  EXPECT_EQ(plan_of(50257, kH100, 4096, 2).blocks, 2 * kProcessors);
}

TEST(SoftmaxPlan, ARowIsNotKeptIfItIsReadOnceOrCannotBeCopied) {
  constexpr i64 V = 50257, kStride = 50264;
  const auto kept = [&](i64 rows, i64 stride, bool again, bool aligned) {
    return SoftmaxPlan::of(rows, stride, V, sizeof(float), again, aligned, kH100, kProcessors).kept;
  };
  EXPECT_TRUE(kept(20, kStride, true, true));
  EXPECT_TRUE(kept(1, kStride, true, true));
  EXPECT_FALSE(kept(20, kStride, false, true));
  EXPECT_FALSE(kept(20, V, true, false));
  EXPECT_FALSE(kept(1, V, true, true));  // its last 16 bytes may end beyond the workspace
  const SoftmaxPlan plan = SoftmaxPlan::of(20, kStride, V, sizeof(float), false, true, kH100, kProcessors);
  EXPECT_EQ(plan.blocks, 20);
  EXPECT_EQ(plan.shared_bytes, sizeof(SoftmaxSums));
}

TEST(SoftmaxPlan, AllBlocksRunAtTheSameTime) {
  EXPECT_EQ(plan_of(50257, kH100).blocks, kProcessors);
  EXPECT_EQ(plan_of(50257, kH100, 20).blocks, 20);
  EXPECT_EQ(plan_of(1000, kH100).blocks, kKeptBlocks * kProcessors);
  EXPECT_EQ(plan_of(50257, kH100, 0).blocks, 0);
  for (const size_t most : {kA100, kH100}) {
    for (i64 V = 1; plan_of(V, most).kept; V += 97) {
      const SoftmaxPlan plan = plan_of(V, most);
      ASSERT_GE(plan.shared_bytes, sizeof(SoftmaxSums) + static_cast<size_t>(V) * sizeof(float));
      ASSERT_LE(plan.shared_bytes, most);
      // A multiprocessor has 1 KiB more than its largest block, and each block takes 1 KiB beside its own memory.
      const size_t blocks = static_cast<size_t>(plan.blocks) / kProcessors;
      ASSERT_LE(blocks * (plan.shared_bytes + 1024), most + 1024);
    }
  }
}

}  // namespace cuda_cross_entropy_plan_test
}  // namespace ds::cuda
