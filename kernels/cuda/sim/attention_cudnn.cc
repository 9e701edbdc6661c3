// SPDX-License-Identifier: Apache-2.0
// Replacement without cuDNN: on the simulator, and in builds without its headers.

#include "cuda/attention_cudnn.h"

namespace ds::cuda {
namespace cudnn {

const char* library_error() noexcept { return "this build has no cuDNN"; }
LibraryChoice choose_library(std::span<const std::string>) { return {.file = "", .error = library_error()}; }
Candidates find_candidates(const AttentionShape&, std::string_view) { return {.error = library_error(), .list = {}}; }

}  // namespace cudnn

struct CudnnAttention::Impl {};

CudnnAttention::CudnnAttention(Context& context) {
  if (context.options().warn)
    context.options().warn(std::string(cudnn::library_error()) + ": attention runs on the kernels of libds instead");
}
CudnnAttention::~CudnnAttention() = default;
bool CudnnAttention::run(const cudnn::AttentionCall&) noexcept { return false; }

}  // namespace ds::cuda
