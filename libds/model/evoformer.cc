// SPDX-License-Identifier: Apache-2.0
// The public interface to the Evoformer attention ops: a device, and the checks that ops leave to their callers.

#include "ds/evoformer.h"

#include <fmt/format.h>

#include <span>

#include "base/check.h"
#include "device/device.h"

namespace ds {

struct EvoformerAttention::State {
  std::unique_ptr<Device> device;
};

namespace {

std::string text_of(std::span<const i64> shape) { return fmt::format("[{}]", fmt::join(shape, ",")); }

// Checks a view's shape and dtype, and that its last dim has no gaps.
void check_view(const char* name, const TensorView& x, std::initializer_list<i64> shape,
                std::initializer_list<DType> dtypes) {
  DS_CHECK(x, Errc::Config, "evoformer attention: {} is missing", name);
  const std::span<const i64> want(shape.begin(), shape.size()), got(x.shape.data(), static_cast<size_t>(x.rank));
  DS_CHECK(std::equal(want.begin(), want.end(), got.begin(), got.end()), Errc::Config,
           "evoformer attention: {} is {}, not {}", name, text_of(got), text_of(want));
  DS_CHECK(std::find(dtypes.begin(), dtypes.end(), x.dtype) != dtypes.end(), Errc::Config,
           "evoformer attention: {} cannot be of type {}", name, dtype_name(x.dtype));
  DS_CHECK(x.dim(x.rank - 1) == 1 || x.stride[x.rank - 1] == 1, Errc::Config,
           "evoformer attention: the last dim of {} has gaps", name);
}
void check_optional(const char* name, const TensorView& x, std::initializer_list<i64> shape,
                    std::initializer_list<DType> dtypes) {
  if (x) check_view(name, x, shape, dtypes);
}

struct NamedView {
  const char* name;
  const TensorView& view;
};
// Checks the q-like tensors of a call (the first of which defines the shape) and its biases.
void check_call(const Device& device, std::initializer_list<NamedView> tensors, const TensorView& lse,
                const TensorView& bias1, const TensorView& bias2, const EvoformerParams& p) {
  const TensorView& q = tensors.begin()->view;
  DS_CHECK(q && q.rank == 4, Errc::Config, "evoformer attention: q is not [B*N,T,H,D]");
  const i64 M = q.dim(0), T = q.dim(1), H = q.dim(2), D = q.dim(3);
  DS_CHECK(M > 0 && T > 0 && H > 0 && D > 0, Errc::Config, "evoformer attention: q is empty");
  DS_CHECK(p.num_seq > 0 && M % p.num_seq == 0, Errc::Config,
           "evoformer attention: {} sequences are not a multiple of num_seq, {}", M, p.num_seq);
  DS_CHECK(q.dtype == DType::F32 || q.dtype == DType::BF16 || q.dtype == DType::F16, Errc::Config,
           "evoformer attention: q cannot be of type {}", dtype_name(q.dtype));
  DS_CHECK(device.is_host() || D <= 256, Errc::Unavailable,
           "evoformer attention: head dim {} exceeds 256, the maximum on a GPU", D);
  for (const auto& [name, view] : tensors) check_view(name, view, {M, T, H, D}, {q.dtype});
  check_view("lse", lse, {M, H, T}, {DType::F32});
  check_optional("bias1", bias1, {M, T}, {q.dtype, DType::F32});
  check_optional("bias2", bias2, {M / p.num_seq, H, T, T}, {q.dtype, DType::F32});
}

}  // namespace

EvoformerAttention::EvoformerAttention(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
EvoformerAttention::~EvoformerAttention() = default;
EvoformerAttention::EvoformerAttention(EvoformerAttention&&) noexcept = default;
EvoformerAttention& EvoformerAttention::operator=(EvoformerAttention&&) noexcept = default;

EvoformerAttention EvoformerAttention::on_cpu(int num_threads) {
  DS_CHECK(num_threads >= 1, Errc::Config, "evoformer attention: {} threads", num_threads);
  const OpTable* const ops = cpu_ops();
  DS_CHECK(ops != nullptr, Errc::Unavailable, "this CPU supports none of the instruction sets that libds needs");
  auto state = std::make_unique<State>();
  state->device = make_cpu_device(*ops, num_threads);
  return EvoformerAttention(std::move(state));
}

EvoformerAttention EvoformerAttention::on_cuda(int index) {
  std::string why;
  const int count = num_cuda_devices(why);
  DS_CHECK(count > 0, Errc::Unavailable, "{}", why);
  DS_CHECK(index >= 0 && index < count, Errc::Unavailable, "there is no GPU {}: this node has {}", index, count);
  auto state = std::make_unique<State>();
  state->device = make_cuda_device(index);
  return EvoformerAttention(std::move(state));
}

void EvoformerAttention::forward(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v,
                                 TensorView bias1, TensorView bias2, const EvoformerParams& params) {
  Device& device = *state_->device;
  check_call(device, {{"q", q}, {"k", k}, {"v", v}, {"o", o}}, lse, bias1, bias2, params);
  device.ops().evoformer_attention_fwd(o, lse, q, k, v, bias1, bias2, params, device.stream());
}

void EvoformerAttention::backward(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2,
                                  TensorView dout, TensorView q, TensorView k, TensorView v, TensorView o,
                                  TensorView lse, TensorView bias1, TensorView bias2, const EvoformerParams& params) {
  Device& device = *state_->device;
  check_call(device, {{"q", q}, {"k", k}, {"v", v}, {"o", o}, {"dout", dout}, {"dq", dq}, {"dk", dk}, {"dv", dv}}, lse,
             bias1, bias2, params);
  check_optional("dbias1", dbias1, {q.dim(0), q.dim(1)}, {DType::F32});
  check_optional("dbias2", dbias2, {q.dim(0) / params.num_seq, q.dim(2), q.dim(1), q.dim(1)}, {DType::F32});
  device.ops().evoformer_attention_bwd(dq, dk, dv, dbias1, dbias2, dout, q, k, v, o, lse, bias1, bias2, params,
                                       device.stream());
}

void EvoformerAttention::synchronize() { state_->device->synchronize(); }
i64 EvoformerAttention::scratch_bytes() const noexcept { return state_->device->scratch_bytes(); }

}  // namespace ds
