// SPDX-License-Identifier: Apache-2.0
// Replacement without cuDNN, in builds without its headers.

#include "cuda/attention_cudnn.h"

namespace ds::cuda {
namespace cudnn {

const char* library_error() noexcept { return "this build has no cuDNN"; }
LibraryChoice choose_library(std::span<const std::string>) { return {.file = "", .error = library_error()}; }
Candidates find_candidates(const AttentionShape&, std::string_view) { return {.error = library_error(), .list = {}}; }

}  // namespace cudnn

struct CudnnAttention::Impl {
  const std::string name, error = cudnn::library_error();
};

CudnnAttention::CudnnAttention(Context&) : impl_(std::make_unique<Impl>()) {}
CudnnAttention::~CudnnAttention() = default;
const std::string& CudnnAttention::name() const noexcept { return impl_->name; }
const std::string& CudnnAttention::error() const noexcept { return impl_->error; }
std::string CudnnAttention::prepare(std::span<const AttentionShape>) { return impl_->error; }
bool CudnnAttention::run(const cudnn::AttentionCall&) noexcept { return false; }

}  // namespace ds::cuda
