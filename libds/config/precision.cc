// SPDX-License-Identifier: Apache-2.0
#include "config/precision.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "config/optimizer_table.h"
#include "config/parallel.h"
#include "ds/kernels/fp8.h"

namespace ds {
namespace {

constexpr std::string_view kFp16 = "fp16.enabled", kBf16 = "bf16.enabled",
                           kFp16Masters = "fp16.fp16_master_weights_and_grads",
                           kBf16Masters = "bf16.bf16_master_weights_and_grads",
                           kBf16States = "bf16.bf16_optimizer_states", kStochastic = "bf16.stochastic_rounding",
                           kSums = "data_types.grad_accum_dtype", kLogits = "data_types.logits_dtype",
                           kWire = "communication_data_type", kStateDtype = "state_dtype", kFp8 = "fp8.enabled",
                           kFp8Gathers = "fp8.gathers";

std::string_view dtype_text(DType t) { return t == DType::F16 ? "fp16" : t == DType::BF16 ? "bf16" : "fp32"; }

// Whoever leaves the precision to "auto" wants one of 16 bits, and gets the same on every machine: bf16, which has no
// loss scale that could go wrong, unless it is off.
void resolve_auto(Config& c, Reader& r) {
  if (c.fp16.enabled || c.bf16.enabled || r.any_broken({kFp16, kBf16})) return;
  const bool bf16 = !r.given(kBf16);
  if (!r.automatic(kBf16) && !r.automatic(kFp16)) return;
  (bf16 ? c.bf16.enabled : c.fp16.enabled) = true;
}

// bf16 for the states of all optimizers that have a choice; the others cannot.
void resolve_states(Config& c, Reader& r) {
  if (!c.bf16.enabled || !c.bf16.bf16_optimizer_states) return;
  const auto resolve = [&](UpdateConfig& u, bool frozen) {
    if (frozen) return;
    if (optimizer_takes(u.type, kStateDtype)) {
      u.state_dtype = StateDtype::BF16;
    } else {
      r.error(kBf16States, fmt::format("the states of {} are not kept in bf16", optimizer_row(u.type).name),
              Errc::Unavailable);
    }
  };
  if (r.given("optimizer.params.state_dtype") && c.optimizer.state_dtype == StateDtype::F32)
    r.error(kBf16States, "contradicts optimizer.params.state_dtype, which is \"fp32\"");
  resolve(c.optimizer, false);
  for (ParamGroupConfig& group : c.optimizer.groups) resolve(group, group.frozen);
}

// The sizes of the linear maps that a rank has of a family's block. Those of a program's model are checked when it is
// made.
void check_fp8_sizes(const Config& c, Reader& r) {
  const ModelConfig& m = c.model;
  const i64 t = c.tensor_parallel.tp_size, heads = m.heads / t, kv_heads = std::max<i64>(m.kv_heads / t, 1);
  if (m.layers == 0 || m.source || !tp_problem(m, t).empty()) return;
  std::vector<std::string> bad;
  const auto size = [&](i64 n, const std::string& what) {
    if (n % kFp8Block == 0) return;
    const i64 below = n / kFp8Block * kFp8Block;
    bad.push_back(fmt::format("{} {} ({}{} would do)", what, n, below > 0 ? fmt::format("{} or ", below) : "",
                              below + kFp8Block));
  };
  size(m.hidden, "the hidden size");
  size(heads * m.head_dim, fmt::format("{} heads of {}, together", heads, m.head_dim));
  if (const LatentConfig& latent = m.latent; latent.on()) {
    const i64 plain = m.head_dim - latent.rope_dim;
    if (latent.query_rank > 0) size(latent.query_rank, "the latent of queries");
    size(latent.rank, "the latent of keys and values");
    size(latent.rank + latent.rope_dim, "that latent with the rotary key");
    size(heads * (plain + latent.value_dim),
         fmt::format("{} heads of {} and values of {}, together", heads, plain, latent.value_dim));
    size(heads * latent.value_dim, fmt::format("{} values of {}, together", heads, latent.value_dim));
  } else if (kv_heads != heads) {
    size(kv_heads * m.head_dim, fmt::format("{} key/value heads of {}, together", kv_heads, m.head_dim));
  }
  size(m.intermediate / t, "the intermediate size");
  if (bad.empty()) return;
  r.error(kFp8,
          fmt::format("scales are for {0} x {0} elements of a matrix, so inputs and outputs of linear maps must be "
                      "multiples of {0}{1}; these are not: {2}",
                      kFp8Block, t > 1 ? fmt::format(" on each of the {} ranks of tensor_parallel", t) : "",
                      fmt::join(bad, ", ")));
}

void check_fp8(const Config& c, Reader& r) {
  if (c.fp8.gathers && !c.fp8.enabled && !r.broken(kFp8))
    r.error(kFp8Gathers, fmt::format("sends the codes of products in FP8: set {} to true", kFp8));
  if (!c.fp8.enabled) return;
  if (!c.bf16.enabled) r.error(kFp8, fmt::format("codes are made of numbers in bf16: set {} to true", kBf16));
  if (c.zero.tile_size > 0)
    r.error(kFp8, "matrices in tiles (zero_optimization.stage3_tile_size) are multiplied in bf16 alone: set it to 0",
            Errc::Unavailable);
  if (c.model.experts.count > 0)
    return r.error(kFp8, "products of experts are not made in FP8: set it to false", Errc::Unavailable);
  check_fp8_sizes(c, r);
  if (!c.fp8.gathers) return;
  if (trains(c.use) && c.zero.stage != 3 && !r.broken("zero_optimization.stage"))
    r.error(kFp8Gathers,
            fmt::format("ZeRO stage {} keeps whole parameters, and gathers none; stage 3 does", c.zero.stage));
  for (const auto& [key, codes] :
       {std::pair{"zero_optimization.zero_quantized_weights", c.zero.quantized_weights},
        {"zero_optimization.zero_quantized_nontrainable_weights", c.zero.quantized_nontrainable_weights}}) {
    if (codes)
      r.error(kFp8Gathers,
              fmt::format("a matrix travels in one code, and {} has another: set one of them to false", key));
  }
}

}  // namespace

void resolve_precision(Config& c, Reader& r) {
  resolve_auto(c, r);
  if (c.fp16.enabled && c.bf16.enabled) r.error(kBf16, "fp16 and bf16 exclude each other");
  if (!r.given(kWire)) c.communication_data_type = wire_type_of(c.work_dtype());
  resolve_states(c, r);
  const struct {
    std::string_view key, of;
    bool wanted, enabled;
  } rows[] = {{kFp16Masters, kFp16, c.fp16.fp16_master_weights_and_grads, c.fp16.enabled},
              {kBf16Masters, kBf16, c.bf16.bf16_master_weights_and_grads, c.bf16.enabled},
              {kBf16States, kBf16, c.bf16.bf16_optimizer_states, c.bf16.enabled},
              {kStochastic, kBf16, c.bf16.stochastic_rounding, c.bf16.enabled}};
  for (const auto& row : rows) {
    if (row.wanted && !row.enabled) r.warning(row.key, fmt::format("has no effect: {} is not true", row.of));
  }
  const bool narrow = c.own_masters() && c.work_dtype() != DType::F32;
  if (c.bf16.stochastic_rounding && c.bf16.enabled && !narrow)
    r.error(kStochastic, fmt::format("is of parameters that have no master in fp32, which {} makes", kBf16Masters));
  if (!c.bf16.enabled || !narrow) c.bf16.stochastic_rounding = false;
  if (!narrow) return;
  const std::string_view key = c.fp16.enabled ? kFp16Masters : kBf16Masters;
  if (r.given(kSums) && c.grad_accum_dtype != c.work_dtype() && !r.broken(kSums))
    r.error(kSums, fmt::format("\"{}\" contradicts {}, which keeps sums in {}", dtype_text(c.grad_accum_dtype), key,
                               dtype_text(c.work_dtype())));
  c.grad_accum_dtype = c.work_dtype();
}

void check_precision(const Config& c, Reader& r) {
  check_fp8(c, r);
  if (c.loss.logits != DType::F32 && c.loss.logits != c.work_dtype() && !r.broken(kLogits))
    r.error(kLogits, fmt::format("\"{}\": logits are in fp32{}", dtype_text(c.loss.logits),
                                 c.work_dtype() == DType::F32 ? ", like the parameters"
                                                              : fmt::format(", or in the type of the parameters, {}",
                                                                            dtype_text(c.work_dtype()))));
  const DType sums = c.grad_accum_dtype;
  if (sums == DType::F32 || r.broken(kSums)) return;
  const bool masters = c.own_masters();
  const std::string_view key = !masters ? kSums : c.fp16.enabled ? kFp16Masters : kBf16Masters;
  if (sums != c.work_dtype())
    return r.error(kSums, fmt::format("\"{}\": sums are in fp32, or in the type of the parameters, {}",
                                      dtype_text(sums), dtype_text(c.work_dtype())));
  if (c.communication_data_type != wire_type_of(sums) && !r.broken(kWire))
    r.error(kWire, fmt::format("sums that are kept in {0} travel in {0}, too", dtype_text(sums)));
  if (c.zero.offload_optimizer.device == OffloadDevice::Server)
    r.error(key, "a server of states has fp32 masters, and takes sums in fp32", Errc::Unavailable);
  if (any_optimizer(c.optimizer, &OptimizerRow::needs_matrices))
    r.error(key, "Muon makes whole matrices of sums in fp32", Errc::Unavailable);
}

}  // namespace ds
