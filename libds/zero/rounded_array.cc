// SPDX-License-Identifier: Apache-2.0
#include "zero/rounded_array.h"

namespace ds::zero {

void* RoundedArray::open(i64 begin, i64 bytes, LeaseTo access) {
  Window* window = nullptr;  // the smallest with room
  for (Window& w : windows_) {
    if (w.leased || w.memory.bytes() < bytes) continue;
    if (window == nullptr || w.memory.bytes() < window->memory.bytes()) window = &w;
  }
  if (window == nullptr) {
    window = &windows_.emplace_back();
    window->memory = device_buffer(device_, ledger_, Tag::Workspace, bytes);
  }
  if (access != LeaseTo::Fill && bytes > 0) {
    const TierLease lease = kept_->lease(begin / 2, bytes / 2, LeaseTo::Read);
    device_.ops().cast(exact(window->memory.data(), bytes), rounded(lease, bytes), device_.stream());
  }
  window->leased = true;
  return window->memory.data();
}

void RoundedArray::close(void* data, i64 begin, i64 bytes, LeaseTo access) noexcept {
  for (Window& w : windows_) {
    if (w.leased && w.memory.data() == data) w.leased = false;
  }
  if (access == LeaseTo::Read || bytes == 0) return;
  try {
    const TierLease lease = kept_->lease(begin / 2, bytes / 2, LeaseTo::Fill);
    device_.ops().cast(rounded(lease, bytes), exact(data, bytes), device_.stream());
  } catch (const Error&) {  // of a file, which throws again at its next use
  }
}

}  // namespace ds::zero
