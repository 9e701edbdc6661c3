// SPDX-License-Identifier: Apache-2.0
#include "comm/secondary_shard.h"

namespace ds {

SecondaryShard::SecondaryShard(Communicator& group, Device& device, MemoryLedger& ledger, Tag tag, i64 elems,
                               DType dtype)
    : group_(group), device_(device), elems_(elems), dtype_(dtype) {
  shard_ = device_buffer(device, ledger, tag, div_exact(elems, group.size()) * dtype_bytes(dtype));
}

char* SecondaryShard::own_part(const TensorView& full) const {
  DS_ASSERT(full.numel() == elems_ && full.dtype == dtype_ && full.contiguous());
  return static_cast<char*>(full.data) + group_.rank() * shard_.bytes();
}

void SecondaryShard::keep(TensorView full) {
  device_.copy(shard_.data(), own_part(full), shard_.bytes());
  kept_ = true;
}

Ticket SecondaryShard::gather(TensorView full, std::string_view tag) {
  DS_ASSERT(kept_);
  device_.copy(own_part(full), shard_.data(), shard_.bytes());
  const AllGatherSegment segment{full.data, shard_.bytes()};
  return group_.all_gather({&segment, 1}, tag);
}

}  // namespace ds
