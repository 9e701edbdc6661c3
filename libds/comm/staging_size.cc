// SPDX-License-Identifier: Apache-2.0
#include "comm/staging_size.h"

#include <algorithm>

#include "comm/arena.h"
#include "comm/base_communicator.h"

namespace ds {

namespace {
constexpr i64 kMpiStagingBytes = i64{8} << 20;
}  // namespace

bool folds(const Operation& op) noexcept {
  return (op.dtype == DType::F32 || is_16_bit(op.dtype)) && op.reduce == ReduceOp::Sum;
}

i64 folded_slice_bytes(const Operation& op, int size) noexcept {
  const i64 total = op.slice_bytes(), elem = dtype_bytes(op.dtype);
  return size > 1 && folds(op) && total > kReductionBlock ? total / (size * elem) * elem : 0;
}

i64 mpi_fold_round(int size) noexcept { return std::max<i64>(kMpiStagingBytes / size / 64 * 64, 64); }

void LargestCalls::add(const Operation& op, int size) {
  i64 folded = 0, combined = 0;
  switch (op.kind) {
    case OpKind::ReduceScatter: folded = op.slice_bytes(); break;
    case OpKind::AllReduce:
      folded = folded_slice_bytes(op, size);
      combined = std::min(kReductionBlock, op.slice_bytes() - folded * size);
      if (folds(op) && is_16_bit(op.dtype))
        rounded_elems = std::max(rounded_elems, std::min(kRoundedBlock, std::max(folded, combined) / 2));
      break;
    case OpKind::Send: sent_to.insert(op.peer); break;
    default: break;
  }
  folded_bytes = std::max(folded_bytes, folded);
  combined_bytes = std::max(combined_bytes, combined);
}

void LargestCalls::add(const LargestCalls& other) {
  folded_bytes = std::max(folded_bytes, other.folded_bytes);
  combined_bytes = std::max(combined_bytes, other.combined_bytes);
  rounded_elems = std::max(rounded_elems, other.rounded_elems);
  sent_to.insert(other.sent_to.begin(), other.sent_to.end());
}

std::optional<i64> staging_size(std::string_view backend, int size, const LargestCalls& calls) {
  if (size == 1) return 0;
  const i64 own = size * calls.combined_bytes + calls.rounded_elems * 4;
  if (backend == "shm" || backend == "threads")
    return own + 2 * Arena::kStagingHalf + std::ssize(calls.sent_to) * static_cast<i64>(sizeof(Channel));
  if (backend == "mpi") return own + size * std::min(calls.folded_bytes, mpi_fold_round(size));
  return {};
}

}  // namespace ds
