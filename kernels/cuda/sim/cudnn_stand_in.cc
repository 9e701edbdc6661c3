// SPDX-License-Identifier: Apache-2.0
// A stand-in for cuDNN on the simulator: it takes the calls that cuDNN would and the same temporary memory, and our own
// kernels compute them. DS_SIM_CUDNN is its version ("9.19.0"); without it there is no cuDNN. With
// DS_SIM_CUDNN_PLANS=0 it has no plans.

#include <cstdlib>
#include <string_view>

#include "cuda/attention_cudnn.h"
#include "cuda/context.h"
#include "cuda/ops.h"

namespace ds::cuda {
namespace cudnn {

const char* library_error() noexcept { return "this is the simulator"; }
LibraryChoice choose_library(std::span<const std::string>) { return {.file = "", .error = library_error()}; }
Candidates find_candidates(const AttentionShape&, std::string_view) { return {.error = library_error(), .list = {}}; }

}  // namespace cudnn

struct CudnnAttention::Impl {
  Context& context;
  std::string name, error;
  bool has_plans = true;
};

CudnnAttention::CudnnAttention(Context& context) : impl_(new Impl{.context = context, .name = {}, .error = {}}) {
  const char* const version = std::getenv("DS_SIM_CUDNN");
  const char* const plans = std::getenv("DS_SIM_CUDNN_PLANS");
  impl_->has_plans = plans == nullptr || std::string_view(plans) != "0";
  if (version != nullptr && *version != '\0')
    impl_->name = std::string("cuDNN ") + version;
  else
    impl_->error = "the simulator has no cuDNN";
}
CudnnAttention::~CudnnAttention() = default;
const std::string& CudnnAttention::name() const noexcept { return impl_->name; }
const std::string& CudnnAttention::error() const noexcept { return impl_->error; }
std::string CudnnAttention::prepare(std::span<const AttentionShape> shapes) {
  if (impl_->name.empty()) return impl_->error;
  return impl_->has_plans || shapes.empty() ? "" : "no deterministic plan for this attention";
}

bool CudnnAttention::run(const cudnn::AttentionCall& c) noexcept {
  if (impl_->name.empty() || cudnn::refusal(c) != nullptr) return false;
  constexpr int kHopper = 9;
  static_cast<void>(impl_->context.scratch(static_cast<size_t>(cudnn::scratch_bytes(cudnn::shape_of(c), kHopper))));
  Stream stream{.native = &impl_->context};
  if (c.backward)
    own_attention_bwd(c.dq, c.dk, c.dv, c.dout, c.q, c.k, c.v, c.o, c.lse, c.params, stream);
  else
    own_attention_fwd(c.o, c.lse, c.q, c.k, c.v, c.params, stream);
  return true;
}

}  // namespace ds::cuda
