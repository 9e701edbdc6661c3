// SPDX-License-Identifier: Apache-2.0
#include "run/gpu_kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/json.h"
#include "checkpoint/together.h"
#include "ds/log.h"
#include "plan/scratch.h"

namespace ds::run {

bool wants_cudnn(const Config& config) noexcept {
  return config.cuda.attention != CudaAttention::Own && !config.cuda.invariant_forward &&
         config.work_dtype() != DType::F32;
}

GpuKernels kernels_of(const Config& config, int compute_capability) noexcept {
  return gpu_kernels(compute_capability, wants_cudnn(config));
}

void require_cudnn(const Config& config, const model::Model& model, const plan::RunPlan& plan,
                   const GpuKernels& kernels) {
  if (plan.device == DeviceKind::Cpu || config.cuda.attention != CudaAttention::Cudnn || !wants_cudnn(config)) return;
  const char* const refusal = plan::meter_run(config, model, plan, kernels).refusal;
  DS_CHECK(refusal == nullptr, Errc::Unavailable,
           "cuda.attention \"cudnn\": cuDNN does not compute all attention of this run: {}", refusal);
}

void require_fp8(const Config& config, int compute_capability, std::string_view gpu) {
  DS_CHECK(
      !config.fp8.enabled || compute_capability == kFp8Capability, Errc::Unavailable,
      "fp8.enabled: {} has compute capability {}, and only GPUs of capability {} (Hopper) multiply with a scale for "
      "each block; bf16 alone runs on all",
      gpu, compute_capability, kFp8Capability);
}

void choose_attention(const Config& config, const model::Model& model, const plan::RunPlan& plan, Device& device,
                      Communicator& world, bool speaks) {
  if (device.is_host() || !wants_cudnn(config)) return;
  const bool asked = config.cuda.attention == CudaAttention::Cudnn;
  // The calls that cuDNN would compute, whether it is there or not.
  GpuKernels kernels = device.gpu_kernels();
  kernels.cudnn = true;
  const GpuMeter calls = plan::meter_run(config, model, plan, kernels);
  // A plan takes a tenth of a second or more. "auto" finds all of them now, since it could not take other kernels
  // later. Else those beyond a few, of runs with many lengths of steps, are found when they are needed.
  constexpr size_t kPrepared = 8;
  const auto prepared =
      std::span(calls.cudnn).first(asked ? std::min(calls.cudnn.size(), kPrepared) : calls.cudnn.size());
  const Json mine = {{"library", device.attention_library()},
                     {"problem", device.prepare_attention(prepared)},
                     {"refusal", calls.refusal != nullptr ? calls.refusal : ""},
                     {"calls", calls.cudnn.size()}};
  std::vector<Json> ranks;
  for (const std::string& text : gather_text(world, mine.dump())) ranks.push_back(Json::parse(text));

  const auto text_of = [&](size_t rank, const char* key) { return ranks[rank].at(key).get<std::string>(); };
  bool any_calls = false;
  std::string reason;
  for (size_t r = 0; r < ranks.size(); ++r) {
    any_calls |= ranks[r].at("calls") != 0;
    const std::string problem = text_of(r, "problem"), library = text_of(r, "library");
    if (!reason.empty()) continue;
    if (!problem.empty())
      reason = fmt::format("rank {}: {}", r, problem);
    else if (library != text_of(0, "library"))
      reason = fmt::format("rank {}: {}, and {} on rank 0", r, library, text_of(0, "library"));
  }
  if (asked) {
    DS_CHECK(reason.empty(), Errc::Unavailable, "cuda.attention \"cudnn\": {}", reason);
    for (size_t r = 0; r < ranks.size(); ++r)
      DS_CHECK(text_of(r, "refusal").empty(), Errc::Unavailable,
               "cuda.attention \"cudnn\": rank {}: cuDNN does not compute all attention of this run: {}", r,
               text_of(r, "refusal"));
  }
  if (reason.empty() && any_calls) return;
  device.use_own_attention();
  if (any_calls && speaks)
    log_message(LogLevel::Warning,
                fmt::format("cuda.attention \"auto\" takes the kernels of libds, which are slower: {}", reason));
}

std::string attention_of(const Device& device) {
  const std::string library = device.attention_library();
  return library.empty() ? "libds" : library;
}

std::string computed_by(const Device& device) {
  const std::string library = device.attention_library();
  return library.empty() ? std::string(device.name()) : fmt::format("{}, attention by {}", device.name(), library);
}

}  // namespace ds::run
