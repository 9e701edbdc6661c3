// SPDX-License-Identifier: Apache-2.0
// Where cuDNN is not: on the simulator, and in builds without its headers.

#include "cuda/attention_cudnn.h"

namespace ds::cuda {
namespace cudnn {

const char* library_error() noexcept { return "this build has no cuDNN"; }
Candidates find_candidates(const AttentionShape&, std::string_view) { return {.error = library_error(), .list = {}}; }

}  // namespace cudnn

struct CudnnAttention::Impl {};

CudnnAttention::CudnnAttention(Context& context) { context.fail(cudnn::library_error(), "DS_ATTENTION=cudnn"); }
CudnnAttention::~CudnnAttention() = default;
bool CudnnAttention::serves(const cudnn::AttentionCall&) noexcept { return false; }
void CudnnAttention::run(const cudnn::AttentionCall&) noexcept {}

}  // namespace ds::cuda
