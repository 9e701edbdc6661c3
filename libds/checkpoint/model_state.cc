// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/model_state.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/json.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/hf_directory.h"
#include "checkpoint/match_weights.h"
#include "config/model_config.h"
#include "ds/log.h"
#include "model/models.h"

namespace ds {
namespace {

// A state with other parameters, which consist of parts of its own.
class RearrangedState : public StateSource {
 public:
  RearrangedState(std::unique_ptr<StateSource> state, std::vector<Rearranged> tensors)
      : state_(std::move(state)), rearranged_(std::move(tensors)) {
    const std::vector<ParamEntry>& own = state_->params();
    std::unordered_map<std::string_view, std::string_view> renamed;  // parameters that are whole ones here too
    for (const Rearranged& t : rearranged_) {
      const ParamEntry& first = own[t.parts.front().tensor];
      for (const Rearranged::Part& part : t.parts) check_alike(first, own[part.tensor]);
      ParamEntry& p = params_.emplace_back(first);
      p.name = t.name;
      p.shape = t.shape;
      if (t.shape == first.shape) renamed.emplace(first.name, t.name);
    }
    for (ParamEntry& p : params_) {
      if (p.tied_to.empty()) continue;
      const auto owner = renamed.find(p.tied_to);
      DS_CHECK(owner != renamed.end(), Errc::Mismatch, "{}: '{}' is tied to '{}', which is an expert's", path(), p.name,
               p.tied_to);
      p.tied_to = owner->second;
    }
  }

  const std::string& path() const noexcept override { return state_->path(); }
  const CheckpointMeta& meta() const noexcept override { return state_->meta(); }
  const std::vector<ParamEntry>& params() const noexcept override { return params_; }
  const std::vector<ForeignTensor>& foreign() const noexcept override { return state_->foreign(); }
  bool has(State s) const noexcept override { return state_->has(s); }
  std::unique_ptr<StateSource> reopen() const override {
    std::unique_ptr<StateSource> state = state_->reopen();
    return state ? std::make_unique<RearrangedState>(std::move(state), rearranged_) : nullptr;
  }
  std::vector<std::string> files() const override { return state_->files(); }
  void check() override { state_->check(); }
  std::vector<std::string> verify(const Tick& tick) override { return state_->verify(tick); }

 private:
  void check_alike(const ParamEntry& first, const ParamEntry& part) const {
    const bool alike = part.dtype == first.dtype && part.tied_to == first.tied_to &&
                       part.optimizer_states == first.optimizer_states && part.optimizer == first.optimizer &&
                       part.frozen == first.frozen;
    DS_CHECK(alike, Errc::Mismatch, "{}: '{}' is trained otherwise than '{}', and both are parts of one parameter",
             path(), part.name, first.name);
  }
  void read_stored(State s, i64 param, i64 first, i64 count, char* out) override {
    const DType dtype = stored_dtype(s, param);
    rearranged_[static_cast<size_t>(param)].for_each_range(
        first, count, [&](size_t tensor, i64 begin, i64 n, i64 done) {
          state_->read(s, dtype, static_cast<i64>(tensor), begin, n, out + done * dtype_bytes(dtype));
        });
  }
  void read_stored_slice(State s, i64 param, const model::ParamSlice& slice, i64 first, i64 count, char* out) override {
    const Rearranged::Part& part = rearranged_[static_cast<size_t>(param)].parts.front();
    if (params_[param].shape != state_->params()[part.tensor].shape)
      return StateSource::read_stored_slice(s, param, slice, first, count, out);
    state_->read(s, stored_dtype(s, param), static_cast<i64>(part.tensor), slice, first, count, out);
  }

  std::unique_ptr<StateSource> state_;
  std::vector<Rearranged> rearranged_;
  std::vector<ParamEntry> params_;
};

std::optional<ModelConfig> model_of(const StateSource& state, const std::string& named) {
  const std::string config = find_model_config(state, named);
  std::string why;
  return config.empty() ? std::nullopt : known_model(Json::parse(config), why);
}

// The parameters as tensors, under `names`.
std::vector<TensorInfo> tensors_of(const StateSource& state, const std::vector<std::string>& names) {
  std::vector<TensorInfo> tensors;
  for (size_t i = 0; i < names.size(); ++i)
    tensors.push_back({names[i], state.stored_dtype(State::Param, narrow<i64>(i)), state.params()[i].shape});
  return tensors;
}

// A model whose config.json is ours has none. BERT's parts for other tasks stay, for its config.json has no word of
// them.
void drop_later_predictors(const model::Model& model, const std::string& path, std::vector<Rearranged>& tensors) {
  std::vector<std::string> dropped;
  std::erase_if(tensors, [&](const Rearranged& t) {
    const bool drops = model.causal && is_other_task(model, t.name);
    if (drops) dropped.push_back(t.name);
    return drops;
  });
  if (!dropped.empty()) log_message(LogLevel::Warning, left_out_text(model, path, dropped));
}

void drop_added_biases(const model::Model& model, StateSource& state, std::vector<Rearranged>& tensors) {
  std::erase_if(tensors, [&](const Rearranged& t) {
    const i64 param = narrow<i64>(t.parts.front().tensor);
    const auto read = [&](float* out) { state.read(State::Param, DType::F32, param, 0, t.shape[0], out); };
    return t.parts.size() == 1 && can_convert(DType::F32, state.stored_dtype(State::Param, param)) &&
           is_added_bias(model, t.name, t.shape, read);
  });
}

std::unique_ptr<StateSource> rearrange(std::unique_ptr<StateSource> state, std::vector<Rearranged> tensors) {
  if (std::ranges::equal(tensors, state->params(), {}, &Rearranged::name, &ParamEntry::name)) return state;
  std::unordered_set<std::string_view> names;
  for (const Rearranged& t : tensors)
    DS_CHECK(names.insert(t.name).second, Errc::Mismatch,
             "{}: contains '{}' twice, once among all experts of its block", state->path(), t.name);
  return std::make_unique<RearrangedState>(std::move(state), std::move(tensors));
}

}  // namespace

std::unique_ptr<StateSource> under_model_names(std::unique_ptr<StateSource> state, const std::string& named) {
  const std::optional<ModelConfig> known = model_of(*state, named);
  if (!known) return state;
  const model::Model model = model::make_model(*known, 1);
  std::vector<std::string_view> names;
  for (const ParamEntry& p : state->params()) names.push_back(p.name);
  const ModelNames of_model = names_of_model(model, names);
  std::vector<Rearranged> joined =
      join_experts(model, tensors_of(*state, of_model.names), state->foreign(), state->path());
  if (!of_model.removed.empty()) log_message(LogLevel::Warning, removed_text(state->path(), of_model.removed));
  drop_later_predictors(model, state->path(), joined);
  drop_added_biases(model, *state, joined);
  return rearrange(std::move(state), std::move(joined));
}

std::unique_ptr<StateSource> under_published_names(std::unique_ptr<StateSource> state, const std::string& named) {
  const std::optional<ModelConfig> known = model_of(*state, named);
  if (!known || known->source || spec_of(known->family).experts.block.empty()) return state;
  std::vector<std::string> names;
  for (const ParamEntry& p : state->params()) names.push_back(p.name);
  std::vector<Rearranged> parts = part_experts(spec_of(known->family).experts, tensors_of(*state, names));
  return rearrange(std::move(state), std::move(parts));
}

}  // namespace ds
