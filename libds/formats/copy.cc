// SPDX-License-Identifier: Apache-2.0
// The copy that merging and converting come down to: threads read ahead while this one writes.

#include <array>
#include <condition_variable>
#include <mutex>

#include "base/thread.h"
#include "formats/tensor_io.h"

namespace ds {
namespace {

constexpr i64 kChunkBytes = i64{8} << 20;
constexpr size_t kChunks = 3;

struct Chunk {
  const TensorInfo* tensor = nullptr;
  i64 first = 0, count = 0;
  std::vector<char> data;
};

// A ring of chunks between one thread that fills and one that empties them.
class Ring {
 public:
  // The next chunk to fill; nothing once the other side has gone.
  Chunk* begin_fill() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || filled_ - emptied_ < kChunks; });
    return closed_ ? nullptr : &chunks_[filled_ % kChunks];
  }
  void end_fill() {
    const std::lock_guard lock(mutex_);
    ++filled_;
    changed_.notify_all();
  }
  // The next chunk that is full; nothing when all have come. Throws what the filling side ended with.
  Chunk* begin_empty() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return filled_ > emptied_ || ended_; });
    if (filled_ > emptied_) return &chunks_[emptied_ % kChunks];
    if (error_) std::rethrow_exception(error_);
    return nullptr;
  }
  void end_empty() {
    const std::lock_guard lock(mutex_);
    ++emptied_;
    changed_.notify_all();
  }
  void end(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    error_ = error;
    changed_.notify_all();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  std::array<Chunk, kChunks> chunks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t filled_ = 0, emptied_ = 0;
  bool ended_ = false, closed_ = false;
  std::exception_ptr error_;
};

// Every `stride`-th tensor of the order, from `first` on.
void read_all(const TensorSource& source, const std::vector<size_t>& order, size_t first_tensor, size_t stride,
              Ring& ring) {
  for (size_t k = first_tensor; k < order.size(); k += stride) {
    const TensorInfo& t = source.list()[order[k]];
    const i64 size = dtype_bytes(t.dtype), step = kChunkBytes / size, n = t.numel();
    for (i64 first = 0; first < n; first += step) {
      Chunk* chunk = ring.begin_fill();
      if (chunk == nullptr) return;
      chunk->tensor = &t;
      chunk->first = first;
      chunk->count = std::min(step, n - first);
      chunk->data.resize(chunk->count * size);
      source.read(t.name, first, chunk->count, chunk->data.data());
      ring.end_fill();
    }
  }
}

}  // namespace

void copy_tensors(std::span<const TensorSource* const> sources, TensorSink& sink,
                  const std::function<void(i64 bytes)>& progress) {
  const size_t R = sources.size();
  const std::vector<size_t>& order = sink.order();
  std::vector<Ring> rings(R);
  std::vector<std::jthread> readers;
  struct Closing {
    std::vector<Ring>& rings;
    ~Closing() {
      for (Ring& ring : rings) ring.close();
    }
  };
  const auto read = [&](size_t r) {
    try {
      read_all(*sources[r], order, r, R, rings[r]);
      rings[r].end(nullptr);
    } catch (...) {
      rings[r].end(std::current_exception());
    }
  };
  readers.reserve(R);
  const Closing closing{rings};  // before the readers are joined, also where the system refuses one of them
  for (size_t r = 0; r < R; ++r)
    readers.push_back(start_thread(fmt::format("a thread to read {}", sources[r]->path()), [&, r] { read(r); }));
  i64 bytes = 0;
  for (size_t k = 0; k < order.size(); ++k) {
    for (i64 left = sources[0]->list()[order[k]].numel(); left > 0;) {
      Chunk* chunk = rings[k % R].begin_empty();
      DS_ASSERT(chunk != nullptr);
      sink.write(chunk->tensor->name, chunk->first, chunk->count, chunk->data.data());
      left -= chunk->count;
      bytes += narrow<i64>(chunk->data.size());
      rings[k % R].end_empty();
      if (progress) progress(bytes);
    }
  }
}

}  // namespace ds
