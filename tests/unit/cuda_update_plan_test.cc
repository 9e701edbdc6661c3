// SPDX-License-Identifier: Apache-2.0
#include "cuda/update_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace ds::cuda {
namespace cuda_update_plan_test {

// Addresses are made up: plans do not access the memory.
UpdateTensor tensor(i64 n, size_t address, DType param = DType::BF16, size_t param_address = 0) {
  const auto view = [n](size_t at, DType t) { return TensorView::of(reinterpret_cast<void*>(at), t, {n}); };
  return {view(param_address, param),
          view(address, DType::F32),
          {view(0x20000, DType::F32), view(0x30000, DType::F32)},
          view(0x40000, DType::F32),
          0.5f};
}

TEST(UpdatePlan, EveryChunkOfEveryTensorBelongsToOneBlock) {
  std::vector<UpdateTensor> tensors;
  for (i64 i = 0; i < 200; ++i) {
    const i64 n = i % 5 == 2 ? 0 : i % 7 == 0 ? i * kUpdateChunk + (i % 2) : i + 1;
    tensors.push_back(tensor(n, 0x100000 + 0x100 * static_cast<size_t>(i)));
  }
  std::span<const UpdateTensor> rest = tensors;
  size_t next = 0;  // the tensor whose turn it is
  int launches = 0;
  while (!rest.empty()) {
    const UpdateBatch batch = next_update_batch(rest);
    ++launches;
    u32 chunk = 0;
    for (int s = 0; s < batch.num_slots; ++s) {
      while (tensors[next].master.numel() == 0) ++next;
      const UpdateSlot& slot = batch.slots[s];
      ASSERT_EQ(slot.master, tensors[next].master.data);
      ASSERT_EQ(slot.n, tensors[next].master.numel());
      ASSERT_EQ(batch.first_chunk[s], chunk);
      for (i64 at = 0; at < slot.n; at += kUpdateChunk) ASSERT_EQ(batch.slot_of(chunk++), s);
      ++next;
    }
    ASSERT_EQ(batch.num_chunks(), chunk);
  }
  while (next < tensors.size() && tensors[next].master.numel() == 0) ++next;
  EXPECT_EQ(next, tensors.size());
  EXPECT_EQ(launches, 3);  // 160 tensors that have elements
}

TEST(UpdatePlan, NothingToDoIsNoBlock) {
  const UpdateTensor empty = tensor(0, 0x1000);
  std::span<const UpdateTensor> rest(&empty, 1);
  EXPECT_EQ(next_update_batch(rest).num_chunks(), 0u);
  EXPECT_TRUE(rest.empty());
}

// Tensors whose states are not fp32 go into launches of their own; together all are taken, in order.
TEST(UpdatePlan, KindsOfStatesAreApart) {
  std::vector<UpdateTensor> tensors;
  for (i64 i = 0; i < 200; ++i) {
    UpdateTensor& t = tensors.emplace_back(tensor(i + 1, 0x100000 + 0x1000 * static_cast<size_t>(i)));
    if (i % 4 == 1) t.states[0].dtype = DType::I8, t.states[1].dtype = DType::U8;
    if (i % 4 == 2) t.states[0].dtype = t.states[1].dtype = DType::BF16;
  }
  for (const bool decoded : {false, true}) {
    size_t next = 0;
    i64 taken = 0;
    for (std::span<const UpdateTensor> rest = tensors; !rest.empty();) {
      const UpdateBatch batch = next_update_batch(rest, decoded);
      for (int s = 0; s < batch.num_slots; ++s, ++next, ++taken) {
        while ((tensors[next].states[0].dtype != DType::F32) != decoded) ++next;
        ASSERT_EQ(batch.slots[s].master, tensors[next].master.data);
        ASSERT_EQ(batch.slots[s].state_dtypes[1], tensors[next].states[1].dtype);
      }
    }
    EXPECT_EQ(taken, 100);
  }
}

TEST(UpdatePlan, FourElementsAtATimeNeedAlignedAddresses) {
  const auto wide = [](const UpdateTensor& t) {
    std::span<const UpdateTensor> rest(&t, 1);
    return next_update_batch(rest).slots[0].wide;
  };
  EXPECT_TRUE(wide(tensor(8, 0x1000)));
  EXPECT_FALSE(wide(tensor(8, 0x1004)));
  EXPECT_TRUE(wide(tensor(8, 0x1000, DType::BF16, 0x2008)));
  EXPECT_FALSE(wide(tensor(8, 0x1000, DType::BF16, 0x2004)));
  EXPECT_FALSE(wide(tensor(8, 0x1000, DType::F32, 0x2008)));
}

TEST(UpdatePlan, AParamThatIsTheMasterIsWrittenOnce) {
  const UpdateTensor t = tensor(8, 0x1000, DType::F32, 0x1000);
  std::span<const UpdateTensor> rest(&t, 1);
  EXPECT_EQ(next_update_batch(rest).slots[0].param, nullptr);
}

}  // namespace cuda_update_plan_test
}  // namespace ds::cuda
