// SPDX-License-Identifier: Apache-2.0
#pragma once
// The threads of one rank. Work is cut into tiles whose number and bounds depend only on the problem, and every tile
// writes its own results, so results do not depend on the number of threads. OpenMP is not used because its runtime is
// opaque to ThreadSanitizer and spins per process, not per node.

#include <cstddef>
#include <memory>
#include <type_traits>

#include "ds/kernels/dtype.h"

namespace ds {

// A non-owning reference to a callable; valid during the call it is passed to.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>) FunctionRef(F&& f)
  noexcept
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))), call_([](void* o, Args... a) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(o))(static_cast<Args>(a)...);
        }) {}
  R operator()(Args... a) const { return call_(object_, static_cast<Args>(a)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

class ThreadPool {
 public:
  // num_threads >= 1 includes the calling thread, which also works.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept;

  // Calls fn(tile, worker) once for every tile in [0, num_tiles), worker in [0, num_threads); returns when all are
  // done. fn must not throw. One caller at a time; nested calls run on the calling thread.
  void parallel_for(i64 num_tiles, FunctionRef<void(i64 tile, int worker)> fn) noexcept;

  // Scratch memory, 64-byte aligned, with undefined contents. An op reserves its scratch before its parallel_for,
  // equally for every worker, so the pool holds num_threads() times the largest reservation of any op, whichever
  // workers ran. Returns the caller's scratch, which is worker 0's. In a nested call only the caller's own scratch
  // grows, and that is returned.
  void* reserve_scratch(std::size_t bytes) noexcept;
  // A worker's scratch: at least as large as the last reservation for it. Valid until the next one.
  void* scratch(int worker) const noexcept;
  // Bytes held as scratch by all workers.
  i64 scratch_bytes() const noexcept;
  static constexpr std::size_t kScratchUnit = 64;  // reservations are multiples of it

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ds
