// SPDX-License-Identifier: Apache-2.0
// The optimizer's state in whole tensors: with names in the universal format, without them at stage 0.

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "checkpoint/deepspeed_builder.h"
#include "ds/log.h"

namespace ds {

void DeepspeedBuilder::place_universal() {
  table_.has = state_set({State::Param, State::Master, State::ExpAvg, State::ExpAvgSq});
  std::map<std::string, std::pair<size_t, const PickleTensor*>> tensors;  // by path: a batch is that of many experts
  for (size_t i = 0; i < table_.params.size(); ++i) {
    const auto& [name, elems, first] = wholes_[i];
    check(name.find('/') == std::string::npos && !name.starts_with('.'), Errc::Corrupt, model_[0],
          "parameter '{}' names no directory", name);
    for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq}) {
      const std::string_view stem = s == State::Master ? "fp32" : state_name(s);
      const std::string path = fmt::format("{}/zero/{}/{}.pt", files_.dir, name, stem);
      if (!std::filesystem::exists(path)) {
        DS_CHECK(s != State::Master, Errc::Corrupt, "{}: is missing", path);
        has(s) = false;
        continue;
      }
      auto& [f, t] = tensors[path];
      if (t == nullptr) {
        f = open(path);
        const Value* v = &file(f).root();
        if (v->is(Kind::Dict)) v = &need(*v, "param", Kind::Tensor, f);
        t = &state_of(*v, "its value", f);
        check(numel(*t) == elems, Errc::Mismatch, f, "{} elements, the model states say {}", numel(*t), elems);
      }
      segments(s, i) = {{0, *checked_product(table_.params[i].shape), f, t, first}};
    }
  }
  const std::string common = files_.dir + "/zero/optimizer_state.pt";
  set_stage(is_stage_3() ? 3 : 1);
  if (!std::filesystem::exists(common)) return;
  const size_t f = open(common);
  const Value& optimizer = file(f).root();
  check(optimizer.is(Kind::Dict), Errc::Corrupt, f, "holds a {}, not a dict", kind_name(optimizer.kind));
  read_scaler(optimizer);
  if (const auto stage = stage_of(optimizer)) set_stage(*stage);
  const Value* base = optimizer.find("base_optimizer_state");
  if (base == nullptr) base = optimizer.find("optimizer_state_dict");
  std::optional<i64> step = adam_step(optimizer, base, f);
  const std::string own = wholes_.empty() ? "" : fmt::format("{}/zero/{}/step.pt", files_.dir, wholes_[0].name);
  if (!step && !own.empty() && std::filesystem::exists(own)) {
    const size_t s = open(own);
    step = scalar(&file(s).root(), s);
  }
  if (step) table_.meta.optimizer_step = *step;
}

void DeepspeedBuilder::list_unread() {
  if (!files_.universal) return;
  std::set<std::string_view> read;
  for (const auto& f : table_.files) read.insert(f->path());
  for (const auto& entry : std::filesystem::recursive_directory_iterator(files_.dir + "/zero")) {
    const std::string path = entry.path().string();
    if (path.ends_with(".pt") && !read.contains(path)) table_.unread.push_back(path);
  }
}

void DeepspeedBuilder::place_whole() {
  set_stage(0);
  const size_t f = model_[0];
  find_shared_storage();
  const std::set<std::string_view> buffers = buffer_names();
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < module_->items.size(); i += 2) {
    const Value& v = *module_->items[i + 1];
    const std::string& name = module_->items[i]->text;
    if (!v.is(Kind::Tensor) || buffers.contains(name) || aliases_.contains(name) || is_second_router(name)) continue;
    candidates.push_back({{name}, v.tensor->shape});
  }
  attribute(candidates, f);
  const i64 ep = narrow<i64>(files_.expert_optim.size());
  for (i64 q = 0; q < ep; ++q) attribute(with_experts_of(candidates, q, ep), open_expert_optim(q));
  const auto has_states = [&](const std::vector<std::string>& names) {
    return std::ranges::all_of(names, [&](const std::string& n) { return whole_states_.contains(n); });
  };
  if (ep > 0 && !std::ranges::all_of(expert_names_, has_states)) {
    whole_states_.clear();  // all or none
    for (const State s : kStates) has(s) = s == State::Param;
    log_message(
        LogLevel::Warning,
        fmt::format("{}: optimizer states cannot be told apart, since parameters of the same shape are stored with and "
                    "without experts, the file of a rank of experts is missing, or layers are on different numbers of "
                    "ranks; weights alone are read",
                    files_.dir));
  }
}

// Nothing in these files names their rank but the folder of the archive, which torch.save calls like the file.
size_t DeepspeedBuilder::open_expert_optim(i64 q) {
  const size_t f = open(files_.expert_optim[q]);
  const std::string& name = file(f).saved_as();
  check(!name.starts_with("expp_rank_") || name.starts_with(fmt::format("expp_rank_{}_", q)), Errc::Mismatch, f,
        "was saved as {}: the file of another rank", name);
  return f;
}

void DeepspeedBuilder::attribute(const std::vector<Candidate>& candidates, size_t f) {
  const Value* optimizer = file(f).root().find("optimizer");
  if (optimizer == nullptr || !optimizer->is(Kind::Dict)) return;
  read_scaler(*optimizer);
  const Value* inner = optimizer->find("optimizer_state_dict");
  if (inner == nullptr) inner = optimizer;
  if (const auto step = adam_step(*optimizer, inner, f)) table_.meta.optimizer_step = *step;
  const Value* masters = optimizer->find("fp32_groups");
  std::map<std::string, WholeState> found = attribute(candidates, *inner, masters, f);
  if (!autoep_.empty()) {
    const std::map<std::string, WholeState> other = attribute(with_routers_last(candidates), *inner, masters, f);
    if (found.empty()) {
      found = other;
    } else if (!other.empty() && other != found) {
      found.clear();
    }
  }
  if (found.empty()) return;
  for (const State s : kMoments) has(s) = true;
  has(State::Master) = masters != nullptr;
  whole_states_.merge(found);
}

// Gives each state of the optimizer to the one candidate that it can belong to. For each group the first and the last
// assignment that keeps the order and fits the shapes are the same, or nothing is attributed.
std::map<std::string, DeepspeedBuilder::WholeState> DeepspeedBuilder::attribute(
    const std::vector<Candidate>& candidates, const Value& inner, const Value* masters, size_t f) const {
  const Value *states = inner.find("state"), *groups = inner.find("param_groups");
  if (states == nullptr || !states->is(Kind::Dict) || groups == nullptr) return {};
  const NumberIndex by_number = index_numbers(*states);
  std::map<size_t, std::array<const PickleTensor*, 3>> found;  // by candidate: master, moments
  for (size_t g = 0; g < groups->items.size(); ++g) {
    const Value* ids = groups->items[g]->find("params");
    if (ids == nullptr) return {};
    const Value* own = masters != nullptr && g < masters->items.size() ? masters->items[g] : nullptr;
    if (masters != nullptr && (own == nullptr || own->items.size() != ids->items.size())) return {};
    std::vector<std::array<const PickleTensor*, 3>> wanted;
    for (size_t i = 0; i < ids->items.size(); ++i) {
      const auto stepped = by_number.find(ids->items[i]->integer);
      if (stepped == by_number.end()) continue;
      const Value* const state = stepped->second;
      std::array<const PickleTensor*, 3> tensors{};
      const Value* values[] = {own == nullptr ? nullptr : own->items[i], state->find("exp_avg"),
                               state->find("exp_avg_sq")};
      for (size_t k = 0; k < 3; ++k) {
        if (values[k] != nullptr && values[k]->is(Kind::Tensor)) tensors[k] = &state_of(*values[k], "a state", f);
      }
      if (tensors[1] == nullptr || tensors[2] == nullptr || (masters != nullptr && tensors[0] == nullptr)) return {};
      wanted.push_back(tensors);
    }
    const auto assign = [&](bool backwards) {
      std::vector<size_t> places;
      for (size_t k = 0; k < candidates.size() && places.size() < wanted.size(); ++k) {
        const size_t c = backwards ? candidates.size() - 1 - k : k;
        const auto& next = wanted[backwards ? wanted.size() - 1 - places.size() : places.size()];
        if (candidates[c].shape == next[1]->shape) places.push_back(c);
      }
      if (backwards) std::reverse(places.begin(), places.end());
      return places;
    };
    const std::vector<size_t> places = assign(false);
    if (places.size() != wanted.size() || places != assign(true)) return {};
    for (size_t i = 0; i < places.size(); ++i) {
      if (!found.emplace(places[i], wanted[i]).second) return {};
    }
  }
  std::map<std::string, WholeState> result;
  for (const auto& [c, tensors] : found) {
    const auto& [names, shape] = candidates[c];
    const i64 each = *checked_product(shape) / std::ssize(names);
    for (size_t i = 0; i < names.size(); ++i) result.try_emplace(names[i], tensors, f, shape, narrow<i64>(i) * each);
  }
  return result;
}

// Names of the module that are views of the same elements are tied.
void DeepspeedBuilder::find_shared_storage() {
  std::map<std::tuple<std::string_view, i64, std::vector<i64>, std::vector<i64>>, std::string> first;
  for (size_t i = 0; i < module_->items.size(); i += 2) {
    const Value& v = *module_->items[i + 1];
    if (!v.is(Kind::Tensor) || numel(*v.tensor) == 0) continue;
    const auto key =
        std::make_tuple(std::string_view(v.tensor->storage->text), v.tensor->offset, v.tensor->shape, v.tensor->stride);
    const auto [it, is_new] = first.emplace(key, module_->items[i]->text);
    if (!is_new) tie(module_->items[i]->text, it->second);
  }
}

}  // namespace ds
