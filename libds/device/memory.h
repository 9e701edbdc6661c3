// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory counted by tag. Every large allocation of a rank is a Buffer taken through a MemoryLedger, so that predictions
// (plan/) and counts can be compared. Memory is allocated at set-up; a training step allocates none.

#include <array>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "base/check.h"
#include "ds/kernels/tensor.h"

namespace ds {

// Uses of memory: the only list, for the engine, metrics.jsonl and ds-memreport.
enum class Tag : u8 {
  Params,       // persistent parameters in the work dtype
  Grads,        // persistent gradients in the work dtype (stages 0 and 1)
  GradAccum,    // fp32 sums of gradients at their owner
  Master,       // fp32 master parameters
  Optimizer,    // optimizer states
  Offload,      // offloaded data while it is in memory to be used
  Buckets,      // gradients in transit (stages 2 and 3)
  Gathered,     // full parameters, gathered for use (stage 3)
  Activations,  // kept for the backward pass
  Logits,       // a chunk of the output layer's logits
  Workspace,    // temporaries
  Comm,         // staging inside communicators
  Data,         // tokens
  Scratch,      // of the kernels' workers
  Host,         // copies of the state in host memory, for checkpoints
  Count,
};

constexpr std::string_view tag_name(Tag t) noexcept {
  constexpr std::array<std::string_view, static_cast<size_t>(Tag::Count)> names = {
      "params",      "grads",  "grad_accum", "master", "optimizer", "offload", "buckets", "gathered",
      "activations", "logits", "workspace",  "comm",   "data",      "scratch", "host"};
  return names[static_cast<size_t>(t)];
}

class MemoryLedger {
 public:
  void add(Tag tag, i64 bytes) noexcept;
  void remove(Tag tag, i64 bytes) noexcept;
  i64 current(Tag tag) const noexcept;
  i64 peak(Tag tag) const noexcept;
  // Number of add() calls so far; a step must not change it.
  i64 num_allocations() const noexcept;
  // Memory held now, largest first: "params 1.25 GiB, optimizer 0.50 GiB".
  std::string describe() const;

 private:
  struct Count {
    i64 current = 0, peak = 0;
  };
  mutable std::mutex mutex_;
  std::array<Count, static_cast<size_t>(Tag::Count)> counts_{};
  i64 num_allocations_ = 0;
};

// Owns zeroed bytes, 64-byte aligned. Move-only; returns its memory and its count.
class Buffer {
 public:
  Buffer() = default;
  // Private memory of this process. Throws Errc::OutOfMemory, which states tag and size.
  Buffer(MemoryLedger& ledger, Tag tag, i64 bytes);
  // Memory allocated elsewhere, such as a communicator's segment; `release` frees it.
  Buffer(MemoryLedger& ledger, Tag tag, void* data, i64 bytes, std::function<void()> release);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  void* data() const noexcept { return data_; }
  i64 bytes() const noexcept { return bytes_; }
  Tag tag() const noexcept { return tag_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }
  template <class T>
  std::span<T> as() const noexcept {
    return {static_cast<T*>(data_), static_cast<size_t>(bytes_) / sizeof(T)};
  }

 private:
  void reset() noexcept;
  MemoryLedger* ledger_ = nullptr;
  Tag tag_ = Tag::Workspace;
  void* data_ = nullptr;
  i64 bytes_ = 0;
  std::function<void()> release_;
};

}  // namespace ds
