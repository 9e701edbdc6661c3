// SPDX-License-Identifier: Apache-2.0
#pragma once
// The target of Stream::native on CUDA: one rank's stream and the state that its ops keep between calls.

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
  bool cudnn_attention = false;  // cuDNN computes the attention that it supports, if it can be used
  bool autotune = false;         // choose algorithms of matrix products by timing, unless one is known
  // Is told GPU and library, as text in which a tab follows each, before the first product. May be empty.
  std::function<void(const std::string& machine)> machine = {};
  // Returns the algorithm that an earlier run chose for a product (GPU, library and product, as text), or an empty
  // text; the other is told of choices by timing. May be empty.
  std::function<std::string(const std::string& product)> known = {};
  std::function<void(const std::string& product, const std::string& algorithm)> chosen = {};
  std::vector<std::string> cudnn = {"libcudnn.so.9"};            // files to try, in order
  std::function<void(const std::string&)> note = {}, warn = {};  // may be empty
};

class Context {
 public:
  // For the current device. ok() reports failures.
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  cudaStream_t stream() const noexcept { return stream_; }
  MatmulEngine& matmul() noexcept;  // created with the first product
  // Null: our own kernels compute attention. With ContextOptions::cudnn_attention it is created by the first call.
  CudnnAttention* cudnn_attention() noexcept;
  // Our own kernels compute all later attention.
  void use_own_attention() noexcept { own_attention_ = true; }
  int num_multiprocessors() const noexcept { return num_multiprocessors_; }
  size_t most_shared_bytes() const noexcept { return static_cast<size_t>(most_shared_bytes_); }  // of a block
  const ContextOptions& options() const noexcept { return options_; }

  // Device memory of at least `bytes` for the duration of one op, 256-byte aligned, with undefined contents. Ops of a
  // stream run one after the other, so all use the same memory. It grows on first use (waiting for the stream) and
  // stays allocated. Null: out of memory.
  void* scratch(size_t bytes) noexcept;
  // Device memory for `what` (a literal), to be freed by cudaFree. Null: out of memory.
  void* allocate(size_t bytes, const char* what) noexcept;
  // Memory that ops hold: this scratch, and the workspace of matrix products.
  size_t scratch_bytes() const noexcept;

  // Records the first failure of a call or a launch; ops are noexcept and report here. `where`: a literal.
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
  size_t missing_bytes() const noexcept { return missing_bytes_; }  // not 0: the size of a failed allocate()

 private:
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<MatmulEngine> matmul_;
  const ContextOptions options_;
  std::unique_ptr<CudnnAttention> cudnn_attention_;
  bool own_attention_ = false;
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
  int num_multiprocessors_ = 0, most_shared_bytes_ = 0;
  const char* error_ = nullptr;
  cudaError_t code_ = cudaSuccess;
  size_t missing_bytes_ = 0;
  const char* where_ = "";
};

inline Context& context(Stream& s) noexcept { return *static_cast<Context*>(s.native); }

// The ops of table.cc, one file each. Contracts: ds/kernels/ops.h.
const OpTable& ops() noexcept;

}  // namespace ds::cuda
