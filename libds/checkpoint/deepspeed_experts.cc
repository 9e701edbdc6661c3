// SPDX-License-Identifier: Apache-2.0
// Experts of DeepSpeed's MoE layers. Each has a file of weights, with names over all ranks:
// "<layer>.deepspeed_moe.experts.deepspeed_experts.<number>.<parameter>". Optimizers know those of their own rank of
// ep, numbered from 0.

#include <algorithm>
#include <charconv>

#include "checkpoint/deepspeed_builder.h"
#include "checkpoint/pickle_json.h"

namespace ds {
namespace {

constexpr std::string_view kExperts = ".deepspeed_experts.";

// "h.0.mlp.deepspeed_moe.experts.deepspeed_experts.", 3, ".up.weight"
struct ExpertName {
  std::string_view before, after;
  i64 number = -1;  // no expert
};
ExpertName parse_expert(std::string_view name) {
  const size_t at = name.find(kExperts);
  if (at == name.npos) return {};
  ExpertName e{name.substr(0, at + kExperts.size()), name.substr(at + kExperts.size())};
  const auto [end, error] = std::from_chars(e.after.data(), e.after.data() + e.after.size(), e.number);
  if (error != std::errc() || e.number < 0) return {};
  e.after.remove_prefix(static_cast<size_t>(end - e.after.data()));
  return e;
}

}  // namespace

void DeepspeedBuilder::open_experts() {
  for (const DeepspeedExpert& expert : files_.experts) {
    const size_t f = open(expert.path);
    const Value& root = file(f).root();
    check(root.is(Kind::Dict) && has_string_keys(root), Errc::Corrupt, f, "holds something other than a dict of names");
    std::vector<std::string>& names = expert_names_.emplace_back();
    for (size_t i = 0; i < root.items.size(); i += 2) {
      const std::string& name = root.items[i]->text;
      const ExpertName e = parse_expert(name);
      check(e.number == expert.expert, Errc::Corrupt, f, "'{}' is not a parameter of expert {}", name, expert.expert);
      check(root.items[i + 1]->is(Kind::Tensor), Errc::Corrupt, f, "'{}' is not a tensor", name);
      const PickleTensor& t = *root.items[i + 1]->tensor;
      if (expert_weights_.empty()) expert_type_ = t.type;
      check(t.type == expert_type_, Errc::Mismatch, f, "'{}' is {}, and other experts are {}: the file of another save",
            name, t.type, expert_type_);
      check(expert_weights_.emplace(name, Weight{root.items[i + 1], f}).second, Errc::Corrupt, f,
            "parameter '{}' appears twice", name);
      names.push_back(name);
      i64& count = experts_of_[std::string(e.before)];
      count = std::max(count, e.number + 1);
    }
  }
}

i64 DeepspeedBuilder::expert_ranks(const std::vector<Parameter>& params, size_t f) const {
  std::map<std::string_view, i64> here;  // experts of rank 0, by layer
  for (const Parameter& p : params) {
    const ExpertName e = parse_expert(p.name);
    if (e.number < 0) continue;
    i64& count = here[e.before];
    count = std::max(count, e.number + 1);
  }
  if (here.empty() || files_.experts.empty()) return 1;
  i64 ep = 0;
  for (const auto& [layer, count] : here) {
    const auto all = experts_of_.find(layer);
    check(all != experts_of_.end(), Errc::Corrupt, f, "the files of the experts '{}*' are missing", layer);
    check(all->second % count == 0 && (ep == 0 || ep == all->second / count), Errc::Corrupt, f,
          "a rank has {} of {} experts '{}*', which fits no number of ranks", count, all->second, layer);
    ep = all->second / count;
  }
  const bool alone = std::ranges::all_of(params, [](const Parameter& p) { return parse_expert(p.name).number >= 0; });
  check(ep == 1 || alone, Errc::Unavailable, f, "a group of the optimizer has experts and other parameters");
  return ep;
}

std::string DeepspeedBuilder::global_name(const std::string& name, i64 q, i64 ep) const {
  const ExpertName e = parse_expert(name);
  if (ep == 1 || e.number < 0) return name;
  const i64 each = experts_of_.find(e.before)->second / ep;
  return fmt::format("{}{}{}", e.before, q * each + e.number, e.after);
}

// Ranks of different experts are neighbours, or those of the same ones (use_data_before_expert_parallelism).
std::vector<i64> DeepspeedBuilder::copies_of(i64 q, i64 ep, i64 num_ranks) const {
  const Value* config = file(model_[0]).root().find("ds_config");
  const Value* first =
      config != nullptr && config->is(Kind::Dict) ? config->find("use_data_before_expert_parallelism") : nullptr;
  const bool data_first = first != nullptr && first->is(Kind::Bool) && first->integer != 0;
  std::vector<i64> ranks;
  for (i64 i = 0; i < num_ranks / ep; ++i) ranks.push_back(data_first ? q * (num_ranks / ep) + i : i * ep + q);
  return ranks;
}

DeepspeedBuilder::Weight DeepspeedBuilder::weight_of(std::string_view name) const {
  if (const Value* v = look_up(module_index_, name); v != nullptr) return {v, model_[0]};
  const auto expert = expert_weights_.find(name);
  return expert == expert_weights_.end() ? Weight{} : expert->second;
}

std::vector<DeepspeedBuilder::Candidate> DeepspeedBuilder::with_experts_of(std::vector<Candidate> candidates, i64 q,
                                                                           i64 ep) const {
  for (const std::vector<std::string>& names : expert_names_) {
    for (const std::string& name : names) {
      const ExpertName e = parse_expert(name);
      const i64 each = experts_of_.find(e.before)->second / ep;
      if (e.number / std::max<i64>(each, 1) == q) candidates.push_back({name, weight_of(name).value->tensor.get()});
    }
  }
  return candidates;
}

}  // namespace ds
