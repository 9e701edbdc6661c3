// SPDX-License-Identifier: Apache-2.0
#include "cuda/context.h"

#include "cuda/attention_cudnn.h"
#include "cuda/matmul.h"

namespace ds::cuda {

Context::Context(ContextOptions options) : options_(std::move(options)) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&most_shared_bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

Context::~Context() {
  cudnn_attention_.reset();
  matmul_.reset();
  if (scratch_ != nullptr) cudaFree(scratch_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

MatmulEngine& Context::matmul() noexcept {
  if (matmul_ == nullptr) matmul_ = std::make_unique<MatmulEngine>(*this);
  return *matmul_;
}

size_t Context::scratch_bytes() const noexcept {
  return scratch_bytes_ + (matmul_ != nullptr ? matmul_->workspace_bytes() : 0);
}

CudnnAttention* Context::cudnn_attention() noexcept {
  if (own_attention_ || !options_.cudnn_attention) return nullptr;
  if (cudnn_attention_ == nullptr) cudnn_attention_ = std::make_unique<CudnnAttention>(*this);
  return cudnn_attention_.get();
}

void* Context::scratch(size_t bytes) noexcept {
  if (bytes > scratch_bytes_) {
    check(cudaStreamSynchronize(stream_), "waiting for the stream");
    if (scratch_ != nullptr) cudaFree(scratch_);
    scratch_ = allocate(bytes, "an op's temporaries");
    scratch_bytes_ = scratch_ != nullptr ? bytes : 0;
  }
  return scratch_;
}

void* Context::allocate(size_t bytes, const char* what) noexcept {
  void* p = nullptr;
  const cudaError_t e = cudaMalloc(&p, bytes);
  if (e == cudaSuccess) return p;
  if (e == cudaErrorMemoryAllocation && error_ == nullptr) missing_bytes_ = bytes;
  check(e, what);
  return nullptr;
}

}  // namespace ds::cuda
