// SPDX-License-Identifier: Apache-2.0
// The optimizer's state in whole tensors: with names in the universal format, without them at stage 0.

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <tuple>

#include "checkpoint/deepspeed_builder.h"
#include "ds/log.h"

namespace ds {
namespace {

constexpr std::string_view kExpertRanks = "ep_size_";  // DeepSpeed's name for a group of experts on so many ranks

}  // namespace

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
  const i64 ep = narrow<i64>(files_.expert_optim.size());
  std::string problem = ep > 0 ? "" : attribute(candidates, f);  // those of experts have the states of all parameters
  for (i64 q = 0; q < ep; ++q) {
    const std::string why = attribute(with_experts_of(candidates, q, ep), open_expert_optim(q));
    if (problem.empty()) problem = why;
  }
  const auto without = [&](const std::string& name) { return !whole_states_.contains(name); };
  for (const std::vector<std::string>& names : expert_names_) {
    const auto missing = std::ranges::find_if(names, without);
    if (missing == names.end()) continue;
    whole_states_.clear();  // all or none
    for (const State s : kStates) has(s) = s == State::Param;
    log_message(LogLevel::Warning,
                fmt::format("{}: weights are read without optimizer states: {}", files_.dir,
                            problem.empty() ? fmt::format("there are none of '{}'", *missing) : problem));
    return;
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

std::string DeepspeedBuilder::attribute(const std::vector<Candidate>& candidates, size_t f) {
  const Value* optimizer = file(f).root().find("optimizer");
  if (optimizer == nullptr || !optimizer->is(Kind::Dict)) return "";
  read_scaler(*optimizer);
  const Value* inner = optimizer->find("optimizer_state_dict");
  if (inner == nullptr) inner = optimizer;
  if (const auto step = adam_step(*optimizer, inner, f)) table_.meta.optimizer_step = *step;
  const Value* masters = optimizer->find("fp32_groups");
  const std::vector<WholeGroup> groups = read_whole_groups(*inner, masters, f);
  Attribution found = attribute(candidates, groups, f);
  if (!autoep_.empty()) {
    Attribution other = attribute(with_routers_last(candidates), groups, f);
    if (found.states.empty()) {
      found = std::move(other);
    } else if (!other.states.empty() && other.states != found.states) {
      return fmt::format("{}: the states of routers and of other parameters may be in either order", file(f).path());
    }
  }
  if (found.states.empty()) return found.problem;
  for (const State s : kMoments) has(s) = true;
  has(State::Master) = masters != nullptr;
  whole_states_.merge(found.states);
  return "";
}

DeepspeedBuilder::WholeGroup DeepspeedBuilder::describe_group(const Value& group, size_t number, size_t f) const {
  WholeGroup result;
  const Value* name = group.find("name");
  const bool is_named = name != nullptr && name->is(Kind::String) && name->text.size() <= 64;
  result.label = fmt::format("{}: group {} of the optimizer{}", file(f).path(), number,
                             is_named ? fmt::format(" ('{}')", name->text) : "");
  const Value* moe = group.find("moe");
  if (moe == nullptr) return result;
  check(moe->is(Kind::Bool), Errc::Corrupt, f, "'moe' of group {} of the optimizer is a {}, not a {}", number,
        kind_name(moe->kind), kind_name(Kind::Bool));
  result.moe = moe->integer != 0;
  if (!result.moe || !is_named || !name->text.starts_with(kExpertRanks)) return result;
  const std::string_view digits = std::string_view(name->text).substr(kExpertRanks.size());
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), result.ep);
  check(error == std::errc() && end == digits.data() + digits.size() && result.ep > 0, Errc::Corrupt, f,
        "group {} of the optimizer is of '{}', which is no number of ranks", number, name->text);
  return result;
}

std::vector<DeepspeedBuilder::WholeGroup> DeepspeedBuilder::read_whole_groups(const Value& inner, const Value* masters,
                                                                              size_t f) const {
  const Value *states = inner.find("state"), *groups = inner.find("param_groups");
  if (states == nullptr || !states->is(Kind::Dict) || groups == nullptr) return {};
  const NumberIndex by_number = index_numbers(*states);
  std::set<i64> seen;  // ends the reading of groups that are the same list many times
  std::vector<WholeGroup> result;
  for (size_t g = 0; g < groups->items.size(); ++g) {
    const Value* ids = groups->items[g]->find("params");
    if (ids != nullptr && ids->items.empty()) continue;
    WholeGroup& group = result.emplace_back(describe_group(*groups->items[g], g, f));
    const Value* own = masters != nullptr && g < masters->items.size() ? masters->items[g] : nullptr;
    if (ids == nullptr || (masters != nullptr && (own == nullptr || own->items.size() != ids->items.size()))) {
      group.problem = "lists no parameters, or not a master for each";
      return result;
    }
    for (size_t i = 0; i < ids->items.size() && group.problem.empty(); ++i) {
      const i64 id = ids->items[i]->integer;
      if (!seen.insert(id).second) {
        group.problem = fmt::format("has parameter {} a second time", id);
      } else if (const auto state = by_number.find(id); state != by_number.end()) {
        add_whole_state(group, own == nullptr ? nullptr : own->items[i], *state->second, f);
      }
    }
    if (!group.problem.empty()) return result;
  }
  return result;
}

void DeepspeedBuilder::add_whole_state(WholeGroup& group, const Value* master, const Value& state, size_t f) const {
  const Value* values[] = {master, state.find("exp_avg"), state.find("exp_avg_sq")};
  auto& tensors = group.states.emplace_back();
  for (size_t k = 0; k < 3; ++k) {
    if (values[k] != nullptr && values[k]->is(Kind::Tensor)) tensors[k] = &state_of(*values[k], "a state", f);
  }
  if (tensors[1] == nullptr || tensors[2] == nullptr || (master != nullptr && tensors[0] == nullptr))
    group.problem = "has no two moments of Adam for each parameter";
}

// Gives each state of the optimizer to the one candidate that it can belong to. For each group the first and the last
// assignment that keeps the order and fits the shapes are the same, or nothing is attributed. Experts are in groups of
// their own if any group says so (`split_params_into_different_moe_groups_for_optimizer`).
DeepspeedBuilder::Attribution DeepspeedBuilder::attribute(const std::vector<Candidate>& candidates,
                                                          const std::vector<WholeGroup>& groups, size_t f) const {
  const bool are_told = std::ranges::any_of(groups, &WholeGroup::moe);
  const i64 ep = narrow<i64>(files_.expert_optim.size());
  std::map<size_t, std::array<const PickleTensor*, 3>> found;  // by candidate
  for (const WholeGroup& group : groups) {
    const auto problem = [&](const std::string& why) {
      return Attribution{{}, fmt::format("{} {}", group.label, why)};
    };
    if (!group.problem.empty()) return problem(group.problem);
    if (group.ep > ep)
      return problem(
          fmt::format("has experts of ep_size {}, and there are files 'expp_rank_*' of {} ranks", group.ep, ep));
    if (group.ep != 0 && group.ep < ep)
      return problem(fmt::format(
          "has experts of ep_size {}, and others have ep_size {}: nothing states which layers do", group.ep, ep));
    const auto& wanted = group.states;
    const auto assign = [&](bool backwards) {
      std::vector<size_t> places;
      for (size_t k = 0; k < candidates.size() && places.size() < wanted.size(); ++k) {
        const size_t c = backwards ? candidates.size() - 1 - k : k;
        const auto& next = wanted[backwards ? wanted.size() - 1 - places.size() : places.size()];
        if ((!are_told || candidates[c].expert == group.moe) && candidates[c].shape == next[1]->shape)
          places.push_back(c);
      }
      return places;
    };
    const std::vector<size_t> places = assign(false);
    std::vector<size_t> last = assign(true);
    std::ranges::reverse(last);
    if (places.size() != wanted.size())
      return problem(fmt::format("has a state of shape [{}] that fits no {} after those before it",
                                 fmt::join(wanted[places.size()][1]->shape, ","), group.moe ? "expert" : "parameter"));
    for (size_t i = 0; i < places.size(); ++i) {
      const std::string &name = candidates[places[i]].names[0], &other = candidates[last[i]].names[0];
      if (places[i] != last[i])
        return problem(fmt::format("has a state of shape [{}] that may be that of '{}' or of '{}'",
                                   fmt::join(wanted[i][1]->shape, ","), name, other));
      if (!found.emplace(places[i], wanted[i]).second) return problem(fmt::format("has a second state of '{}'", name));
    }
  }
  Attribution result;
  for (const auto& [c, tensors] : found) {
    const Candidate& candidate = candidates[c];
    const i64 each = *checked_product(candidate.shape) / std::ssize(candidate.names);
    for (size_t i = 0; i < candidate.names.size(); ++i)
      result.states.try_emplace(candidate.names[i], tensors, f, candidate.shape, narrow<i64>(i) * each);
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
