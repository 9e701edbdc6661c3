// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/tensor_state.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <unordered_map>

#include "config/family.h"
#include "ds/log.h"
#include "formats/fp8_source.h"

namespace ds {
namespace {

constexpr std::string_view kStatePrefix = "optimizer.";

// "optimizer.exp_avg.x" -> ExpAvg, "x".
std::optional<std::pair<State, std::string_view>> parse_state_name(std::string_view name) {
  if (!name.starts_with(kStatePrefix)) return std::nullopt;
  name.remove_prefix(kStatePrefix.size());
  for (const State s : kStates) {
    if (s == State::Param) continue;
    const std::string_view state = state_name(s);
    if (name.starts_with(state) && name.size() > state.size() + 1 && name[state.size()] == '.')
      return std::pair(s, name.substr(state.size() + 1));
  }
  return std::nullopt;
}

// The 16- or 32-bit float that most elements have.
DType work_dtype_of(const std::vector<TensorInfo>& tensors) {
  std::array<i64, 3> elems{};  // F32, BF16, F16
  for (const TensorInfo& t : tensors) {
    if (t.dtype <= DType::F16 && !parse_state_name(t.name)) elems[static_cast<size_t>(t.dtype)] += t.numel();
  }
  return static_cast<DType>(std::max_element(elems.begin(), elems.end()) - elems.begin());
}

class TensorState : public StateSource {
 public:
  TensorState(std::unique_ptr<TensorSource> tensors, std::string model_config_json) : tensors_(std::move(tensors)) {
    DS_CHECK(!tensors_->list().empty() || !tensors_->foreign().empty(), Errc::Mismatch, "{}: contains no tensor",
             path());
    const auto& metadata = tensors_->metadata();
    if (const auto it = metadata.find(std::string(kMetaKey)); it != metadata.end()) {
      meta_ = parse_meta(it->second, path());
    } else {
      meta_.work_dtype = work_dtype_of(tensors_->list());
    }
    meta_.metadata = metadata;
    meta_.metadata->erase(std::string(kMetaKey));
    if (!model_config_json.empty()) meta_.model_config_json = std::move(model_config_json);
    std::unordered_map<std::string_view, size_t> index;
    for (const TensorInfo& t : tensors_->list()) {
      if (parse_state_name(t.name)) continue;
      index.emplace(t.name, params_.size());
      const bool as_usual = t.dtype == meta_.work_dtype;
      params_.push_back({t.name, t.shape, "", as_usual ? std::nullopt : std::optional(t.dtype)});
    }
    if (const auto it = metadata.find(std::string(kOptimizersKey)); it != metadata.end()) {
      parse_optimizers(it->second, path(), params_);
      meta_.metadata->erase(std::string(kOptimizersKey));
    }
    states_.resize(params_.size());
    for (const TensorInfo& t : tensors_->list()) add_state(t, index);
    for (size_t i = 0; i < params_.size(); ++i) check_states(i);
    if (has_optimizer_state() && !metadata.contains(std::string(kMetaKey))) {
      log_message(LogLevel::Warning, fmt::format("{}: holds moments of an optimizer, but not its step (metadata '{}'): "
                                                 "step 0 is assumed",
                                                 path(), kMetaKey));
    }
    for (const auto& [name, owner] : metadata) {
      const auto it = index.find(owner);
      if (it != index.end() && !index.contains(name)) {
        params_.push_back({name, params_[it->second].shape, owner, {}});
        meta_.metadata->erase(name);
      }
    }
  }

  const std::string& path() const noexcept override { return tensors_->path(); }
  const CheckpointMeta& meta() const noexcept override { return meta_; }
  const std::vector<ParamEntry>& params() const noexcept override { return params_; }
  bool has(State s) const noexcept override { return s == State::Param || has_[s]; }
  const std::vector<ForeignTensor>& foreign() const noexcept override { return tensors_->foreign(); }
  std::vector<std::string> files() const override { return tensors_->files(); }
  std::vector<std::string> verify(const Tick& tick) override { return tensors_->verify(tick); }

 private:
  void add_state(const TensorInfo& t, const std::unordered_map<std::string_view, size_t>& index) {
    const auto state = parse_state_name(t.name);
    if (!state) return;
    const auto it = index.find(state->second);
    DS_CHECK(it != index.end(), Errc::Mismatch, "{}: '{}' is the state of a parameter that is missing", path(), t.name);
    DS_CHECK(t.dtype == DType::F32 && t.shape == params_[it->second].shape, Errc::Mismatch,
             "{}: '{}' is not fp32 in the shape of its parameter", path(), t.name);
    states_[it->second][state->first] = t.name;
    has_[state->first] = true;
  }
  void check_states(size_t param) const {
    for (const State s : kStates) {
      const bool expected = s != State::Param && stores(s, narrow<i64>(param));
      DS_CHECK(!states_[param][s].empty() == expected, Errc::Mismatch, "{}: '{}' {} {}, others {}", path(),
               params_[param].name, expected ? "lacks" : "has", state_name(s), expected ? "have it" : "lack it");
    }
  }
  void read_stored(State s, i64 param, i64 first, i64 count, char* out) override {
    const auto i = static_cast<size_t>(param);
    tensors_->read(s == State::Param ? params_[i].name : states_[i][s], first, count, out);
  }

  std::unique_ptr<TensorSource> tensors_;
  CheckpointMeta meta_;
  std::vector<ParamEntry> params_;
  std::vector<PerState<std::string>> states_;  // names of tensors, by parameter
  StateSet has_;
};

class StateTensors : public TensorSource {
 public:
  struct Column {
    State state;
    i64 param;
  };
  StateTensors(StateSource& state, std::vector<TensorInfo> tensors, std::vector<Column> columns)
      : TensorSource(state.path(), std::move(tensors)), state_(state), columns_(std::move(columns)) {}
  void own(std::unique_ptr<StateSource> state) noexcept { owned_ = std::move(state); }
  std::vector<std::string> verify(const Tick& tick) const override { return state_.verify(tick); }

 private:
  void read_elements(size_t tensor, i64 first_elem, i64 count, void* out) const override {
    const Column& c = columns_[tensor];
    state_.read(c.state, list()[tensor].dtype, c.param, first_elem, count, out);
  }

  StateSource& state_;
  std::vector<Column> columns_;
  std::unique_ptr<StateSource> owned_;  // state_, or nothing
};

// Which parameters the patterns choose.
std::vector<bool> choose(const StateSource& state, const std::vector<std::string>& patterns) {
  const auto& params = state.params();
  std::vector<bool> chosen(params.size(), patterns.empty());
  std::unordered_map<std::string_view, size_t> index;
  for (size_t i = 0; i < params.size(); ++i) index.emplace(params[i].name, i);
  for (const std::string& pattern : patterns) {
    bool any = false;
    for (size_t i = 0; i < params.size(); ++i) {
      if (::fnmatch(pattern.c_str(), params[i].name.c_str(), 0) != 0) continue;
      // A tied name stands for what it is tied to.
      chosen[params[i].tied_to.empty() ? i : index.at(params[i].tied_to)] = any = true;
    }
    DS_CHECK(any, Errc::Mismatch, "{}: no parameter matches '{}'", state.path(), pattern);
  }
  return chosen;
}

}  // namespace

std::string state_tensor_name(State state, std::string_view param) {
  return fmt::format("{}{}.{}", kStatePrefix, state_name(state), param);
}

std::unique_ptr<StateSource> make_tensor_state(std::unique_ptr<TensorSource> tensors, std::string model_config_json) {
  return std::make_unique<TensorState>(std::move(tensors), std::move(model_config_json));
}

namespace {

std::unique_ptr<StateTensors> view_of(StateSource& state, const StateView& view) {
  // Plain SGD keeps none.
  const bool keeps_none = state.meta().optimizer != kUsualOptimizer ||
                          std::ranges::any_of(state.params(), [](const ParamEntry& p) { return !p.optimizer.empty(); });
  DS_CHECK(!view.optimizer || state.has_optimizer_state() || keeps_none, Errc::Mismatch, "{}: holds no optimizer state",
           state.path());
  check_readable(state, view.only);
  const std::vector<bool> chosen = choose(state, view.only);
  std::vector<TensorInfo> tensors;
  std::vector<StateTensors::Column> columns;
  for (const State s : kStates) {
    if (s != State::Param && !(view.optimizer && state.has(s))) continue;
    for (size_t i = 0; i < chosen.size(); ++i) {
      const ParamEntry& p = state.params()[i];
      if (!chosen[i] || !p.tied_to.empty()) continue;
      const DType stored = state.stored_dtype(State::Param, narrow<i64>(i));
      if (s == State::Param) {
        const bool converts = is_float(stored) && !p.name.ends_with(kBalancingBias);
        const DType shown = converts ? view.dtype.value_or(stored) : stored;
        DS_CHECK(can_convert(shown, stored), Errc::Unavailable, "{}: '{}' is {}, and cannot be shown as {}{}",
                 state.path(), p.name, dtype_name(stored), dtype_name(shown), missing_scales(p.name, stored));
        tensors.push_back({p.name, shown, p.shape});
      } else if (state.stores(s, narrow<i64>(i))) {
        tensors.push_back({state_tensor_name(s, p.name), DType::F32, p.shape});
      } else {
        continue;
      }
      columns.push_back({s, narrow<i64>(i)});
    }
  }
  return std::make_unique<StateTensors>(state, std::move(tensors), std::move(columns));
}

}  // namespace

std::unique_ptr<TensorSource> make_state_tensors(StateSource& state, const StateView& view) {
  return view_of(state, view);
}

std::unique_ptr<TensorSource> open_weights(const std::string& path) {
  std::unique_ptr<StateSource> state;
  if (is_checkpoint(path)) {
    state = open_state(path);
    state->check();
  } else {
    std::unique_ptr<TensorSource> tensors = open_source(path);
    const auto is_state = [](const TensorInfo& t) { return parse_state_name(t.name).has_value(); };
    if (std::ranges::none_of(tensors->list(), is_state)) return tensors;
    state = make_tensor_state(std::move(tensors), "");
  }
  std::unique_ptr<StateTensors> tensors = view_of(*state, {.dtype = DType::F32});
  tensors->own(std::move(state));
  return tensors;
}

}  // namespace ds
