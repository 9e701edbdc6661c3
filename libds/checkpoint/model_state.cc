// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/model_state.h"

#include <unordered_map>

#include "base/json.h"
#include "checkpoint/hf_directory.h"
#include "checkpoint/match_weights.h"
#include "config/model_config.h"
#include "ds/log.h"
#include "model/models.h"

namespace ds {
namespace {

class RenamedState : public StateSource {
 public:
  RenamedState(std::unique_ptr<StateSource> state, std::vector<ParamEntry> params)
      : state_(std::move(state)), params_(std::move(params)) {}

  const std::string& path() const noexcept override { return state_->path(); }
  const CheckpointMeta& meta() const noexcept override { return state_->meta(); }
  const std::vector<ParamEntry>& params() const noexcept override { return params_; }
  const std::vector<ForeignTensor>& foreign() const noexcept override { return state_->foreign(); }
  bool has(State s) const noexcept override { return state_->has(s); }
  std::unique_ptr<StateSource> reopen() const override {
    std::unique_ptr<StateSource> state = state_->reopen();
    return state ? std::make_unique<RenamedState>(std::move(state), params_) : nullptr;
  }
  std::vector<std::string> files() const override { return state_->files(); }
  void check() override { state_->check(); }
  std::vector<std::string> verify(const Tick& tick) override { return state_->verify(tick); }

 private:
  void read_stored(State s, i64 param, i64 first, i64 count, char* out) override {
    state_->read(s, stored_dtype(s, param), param, first, count, out);
  }
  void read_stored_slice(State s, i64 param, const model::ParamSlice& slice, i64 first, i64 count, char* out) override {
    state_->read(s, stored_dtype(s, param), param, slice, first, count, out);
  }

  std::unique_ptr<StateSource> state_;
  std::vector<ParamEntry> params_;
};

}  // namespace

std::unique_ptr<StateSource> under_model_names(std::unique_ptr<StateSource> state, const std::string& named) {
  const std::string config = find_model_config(*state, named);
  std::string why;
  const std::optional<ModelConfig> known = config.empty() ? std::nullopt : known_model(Json::parse(config), why);
  if (!known) return state;
  std::vector<ParamEntry> params = state->params();
  std::vector<std::string_view> names;
  for (const ParamEntry& p : state->params()) names.push_back(p.name);
  const ModelNames of_model = names_of_model(model::make_model(*known, 1), names);
  if (of_model.removed.empty()) return state;
  std::unordered_map<std::string_view, std::string_view> renamed;
  for (size_t i = 0; i < names.size(); ++i) renamed.emplace(names[i], of_model.names[i]);
  for (ParamEntry& p : params) {
    p.name = renamed.at(p.name);
    if (!p.tied_to.empty()) p.tied_to = renamed.at(p.tied_to);
  }
  log_message(LogLevel::Warning, removed_text(state->path(), of_model.removed));
  return std::make_unique<RenamedState>(std::move(state), std::move(params));
}

}  // namespace ds
