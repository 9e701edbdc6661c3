// SPDX-License-Identifier: Apache-2.0
#pragma once
// What Stream::native points to on CUDA: one rank's stream and what its ops keep between calls.

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::cuda {

class MatmulEngine;  // handle, plans and workspace of the matrix products
class CudnnAttention;

struct ContextOptions {
  bool autotune = false;  // algorithms of matrix products by timing, where none is known
  // The algorithm that an earlier run chose for a product (GPU, library and product, as text), or nothing; and who
  // hears of a choice by timing. May be empty.
  std::function<std::string(const std::string& product)> known = {};
  std::function<void(const std::string& product, const std::string& algorithm)> chosen = {};
  std::vector<std::string> cudnn = {"libcudnn.so.9"};            // files to try, in order
  std::function<void(const std::string&)> note = {}, warn = {};  // may be empty
};

class Context {
 public:
  // For the current device. Failures are found by ok().
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  cudaStream_t stream() const noexcept { return stream_; }
  MatmulEngine& matmul() noexcept;  // made with the first product
  // Null: attention is for our own kernels. Made with the first attention of this context, if the environment's
  // DS_ATTENTION is cudnn; it is own by default.
  CudnnAttention* cudnn_attention() noexcept;
  int num_multiprocessors() const noexcept { return num_multiprocessors_; }
  const ContextOptions& options() const noexcept { return options_; }

  // Device memory of at least `bytes` for the duration of one op, 256-byte aligned; content undefined. Ops of a stream
  // follow each other, so all use the same. It grows on first use (waiting for the stream) and stays. Null: no memory.
  void* scratch(size_t bytes) noexcept;
  // Device memory for `what` (a literal), to be given to cudaFree. Null: no memory.
  void* allocate(size_t bytes, const char* what) noexcept;
  // What ops hold for themselves: this memory, and the workspace of matrix products.
  size_t scratch_bytes() const noexcept;

  // The first failure of a call or a launch, which stays; ops are noexcept and report here. `where`: a literal.
  void check(cudaError_t e, const char* where) noexcept {
    if (e == cudaSuccess || error_ != nullptr) return;
    fail(cudaGetErrorString(e), where);
    code_ = e;
  }
  void fail(const char* error, const char* where) noexcept {
    if (error_ == nullptr) error_ = error, where_ = where;
  }
  const char* error() const noexcept { return error_; }  // null: none
  const char* where() const noexcept { return where_; }
  cudaError_t error_code() const noexcept { return code_; }         // of a failure of the runtime
  size_t missing_bytes() const noexcept { return missing_bytes_; }  // not 0: allocate() found no memory for so many

 private:
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<MatmulEngine> matmul_;
  const ContextOptions options_;
  std::unique_ptr<CudnnAttention> cudnn_attention_;
  bool attention_chosen_ = false;
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
  int num_multiprocessors_ = 0;
  const char* error_ = nullptr;
  cudaError_t code_ = cudaSuccess;
  size_t missing_bytes_ = 0;
  const char* where_ = "";
};

inline Context& context(Stream& s) noexcept { return *static_cast<Context*>(s.native); }

// The ops of table.cc, one file each. Contracts: ds/kernels/ops.h.
const OpTable& ops() noexcept;

}  // namespace ds::cuda
