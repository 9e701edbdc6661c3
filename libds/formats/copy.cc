// SPDX-License-Identifier: Apache-2.0
// The copy that merging and converting come down to: a thread reads ahead while this one writes.

#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "formats/tensor_io.h"

namespace ds {
namespace {

constexpr i64 kPieceBytes = i64{16} << 20;
constexpr size_t kPieces = 4;

struct Piece {
  const TensorInfo* tensor = nullptr;
  i64 first = 0, count = 0;
  std::vector<char> data;
};

// A ring of pieces between one thread that fills and one that empties them.
class Ring {
 public:
  // The next piece to fill; nothing once the other side has gone.
  Piece* begin_fill() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || filled_ - emptied_ < kPieces; });
    return closed_ ? nullptr : &pieces_[filled_ % kPieces];
  }
  void end_fill() {
    const std::lock_guard lock(mutex_);
    ++filled_;
    changed_.notify_all();
  }
  // The next piece that is full; nothing when all have come. Throws what the filling side ended with.
  Piece* begin_empty() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return filled_ > emptied_ || ended_; });
    if (filled_ > emptied_) return &pieces_[emptied_ % kPieces];
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
  std::array<Piece, kPieces> pieces_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t filled_ = 0, emptied_ = 0;
  bool ended_ = false, closed_ = false;
  std::exception_ptr error_;
};

void read_all(const TensorSource& source, const std::vector<size_t>& order, Ring& ring) {
  for (const size_t i : order) {
    const TensorInfo& t = source.list()[i];
    const i64 size = dtype_bytes(t.dtype), step = kPieceBytes / size, n = t.numel();
    for (i64 first = 0; first < n; first += step) {
      Piece* piece = ring.begin_fill();
      if (piece == nullptr) return;
      piece->tensor = &t;
      piece->first = first;
      piece->count = std::min(step, n - first);
      piece->data.resize(static_cast<size_t>(piece->count * size));
      source.read(t.name, first, piece->count, piece->data.data());
      ring.end_fill();
    }
  }
}

}  // namespace

void copy_tensors(const TensorSource& source, TensorSink& sink, const std::function<void(i64 bytes)>& progress) {
  Ring ring;
  std::jthread reader([&] {
    try {
      read_all(source, sink.order(), ring);
      ring.end(nullptr);
    } catch (...) {
      ring.end(std::current_exception());
    }
  });
  struct Closing {
    Ring& ring;
    ~Closing() { ring.close(); }
  } closing{ring};  // before the reader is joined
  i64 bytes = 0;
  while (Piece* piece = ring.begin_empty()) {
    sink.write(piece->tensor->name, piece->first, piece->count, piece->data.data());
    bytes += narrow<i64>(piece->data.size());
    ring.end_empty();
    if (progress) progress(bytes);
  }
}

}  // namespace ds
