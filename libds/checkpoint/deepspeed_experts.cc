// SPDX-License-Identifier: Apache-2.0
// Experts of DeepSpeed's MoE layers. Each has a file of weights, with names over all ranks:
// "<layer>.deepspeed_moe.experts.deepspeed_experts.<number>.<parameter>". Optimizers know those of their own rank of
// ep, numbered from 0.
//
// Experts of models that AutoEP has converted. A rank of ep has its experts' matrices as batches "<block>experts.w1",
// w2 and w3, that is gate, down and up projections. Up to stage 2 each expert also has a file of weights with names
// over all ranks ("<block>experts.w1.5"); at stage 3 and in the universal format the masters are the only weights.
// Here each matrix of an expert is a parameter, under the name that it has in published files of the model, and so are
// routers and shared experts, which AutoEP has renamed.

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

constexpr std::string_view kAutoepExperts = "experts", kAutoepRouter = "router.",
                           kAutoepSharedGate = "shared_experts_gate.", kAutoepShared = "shared_experts.";
constexpr i64 kMostAutoepExperts = i64{1} << 16;

struct AutoepMatrix {
  std::string_view batch, published;
};
constexpr AutoepMatrix kAutoepMatrices[] = {{"w1", "gate_proj"}, {"w2", "down_proj"}, {"w3", "up_proj"}};

// Whether experts are divided evenly and in order; files of old versions do not say so.
bool are_divided_in_order(const PickleValue* placement, i64 each) {
  if (placement == nullptr) return true;
  const PickleValue* ranks = placement->find("ranks");
  if (ranks == nullptr) return false;
  for (const PickleValue* entry : ranks->items) {
    const PickleValue *rank = entry->find("rank"), *experts = entry->find("experts");
    if (rank == nullptr || experts == nullptr || std::ssize(experts->items) != each) return false;
    for (i64 i = 0; i < each; ++i) {
      if (experts->items[static_cast<size_t>(i)]->integer != rank->integer * each + i) return false;
    }
  }
  return true;
}

const PickleValue* autoep_layers_of(const PickleValue& root) {
  for (const char* key : {"ds_autoep_layers", "autoep_layers"}) {
    const PickleValue* layers = root.find(key);
    if (layers != nullptr && !layers->is(PickleValue::Kind::None)) return layers;
  }
  return nullptr;
}

}  // namespace

void DeepspeedBuilder::open_experts() {
  for (const DeepspeedExpert& expert : files_.experts) {
    const size_t f = open(expert.path);
    const Value& root = file(f).root();
    check(root.is(Kind::Dict) && has_string_keys(root), Errc::Corrupt, f, "holds something other than a dict of names");
    std::vector<std::string>& names = expert_names_.emplace_back();
    const auto autoep = std::ranges::find(autoep_, expert.layer, &AutoepLayer::number);
    const std::string number = fmt::format(".{}", expert.expert);
    const auto global = [&](const std::string& name) -> std::string {  // empty: not this expert's
      if (autoep == autoep_.end()) return parse_expert(name).number == expert.expert ? name : "";
      if (!name.ends_with(number)) return "";  // "model.layers.3.mlp.experts.w1.5"
      return autoep_name(*autoep, std::string_view(name).substr(0, name.size() - number.size()), expert.expert);
    };
    for (size_t i = 0; i < root.items.size(); i += 2) {
      const std::string name = global(root.items[i]->text);
      check(!name.empty(), Errc::Corrupt, f, "'{}' is not a parameter of expert {}", root.items[i]->text,
            expert.expert);
      check(root.items[i + 1]->is(Kind::Tensor), Errc::Corrupt, f, "'{}' is not a tensor", name);
      const PickleTensor& t = *root.items[i + 1]->tensor;
      if (expert_weights_.empty()) expert_type_ = t.type;
      check(t.type == expert_type_, Errc::Mismatch, f, "'{}' is {}, and other experts are {}: the file of another save",
            name, t.type, expert_type_);
      check(expert_weights_.emplace(name, Weight{root.items[i + 1], f}).second, Errc::Corrupt, f,
            "parameter '{}' appears twice", name);
      names.push_back(name);
      if (autoep != autoep_.end()) continue;
      i64& count = experts_of_[std::string(parse_expert(name).before)];
      count = std::max(count, expert.expert + 1);
    }
  }
  if (!files_.universal && !is_stage_3()) check_autoep_files();
}

i64 DeepspeedBuilder::expert_ranks(const std::vector<Parameter>& params, size_t f) const {
  if (const i64 ep = autoep_ranks(params, f); ep > 0) return ep;
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

std::vector<std::string> DeepspeedBuilder::global_names(const Parameter& p, i64 q, i64 ep) const {
  std::vector<std::string> names;
  for (i64 i = 0; p.batch && i < p.parts(); ++i)
    names.push_back(autoep_name(*autoep_of(p.name), p.name, q * p.parts() + i));
  if (p.batch) return names;
  const ExpertName e = parse_expert(p.name);
  if (ep == 1 || e.number < 0) return {p.name};
  const i64 each = experts_of_.find(e.before)->second / ep;
  return {fmt::format("{}{}{}", e.before, q * each + e.number, e.after)};
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
      if (e.number < 0) continue;  // AutoEP's
      const i64 each = experts_of_.find(e.before)->second / ep;
      if (e.number / std::max<i64>(each, 1) == q)
        candidates.push_back({{name}, weight_of(name).value->tensor->shape, true});
    }
  }
  add_autoep_candidates(candidates, q, ep);
  return candidates;
}

void DeepspeedBuilder::read_autoep() {
  const size_t f = model_[0];
  const Value& root = file(f).root();
  const Value* layers = autoep_layers_of(root);
  if (layers == nullptr) return;
  check(layers->is(Kind::List), Errc::Corrupt, f, "'ds_autoep_layers' is a {}, not a list", kind_name(layers->kind));
  const Index module = index_of(root.find("module"));
  for (const Value* entry : layers->items) {
    const auto number = [&](std::string_view key) { return need(*entry, key, Kind::Int, f).integer; };
    std::string block = need(*entry, "expert_key_prefix", Kind::String, f).text;
    check(block.ends_with(kAutoepExperts), Errc::Corrupt, f, "'{}' is not the name of experts", block);
    block.resize(block.size() - kAutoepExperts.size());
    const i64 experts = number("num_experts"), ep = number("ep_size");
    check(0 < ep && ep <= experts && experts <= kMostAutoepExperts, Errc::Corrupt, f, "{} experts on {} ranks", experts,
          ep);
    check(experts % ep == 0 && are_divided_in_order(entry->find("expert_placement"), experts / ep), Errc::Unavailable,
          f, "the experts '{}experts.*' are not divided over ranks evenly and in order, which is not supported", block);
    const i64 before = autoep_.empty() ? ep : autoep_[0].ep;
    check(before == ep, Errc::Corrupt, f, "layers have their experts on {} and on {} ranks", before, ep);
    const bool gate = module.contains(fmt::format("{}{}weight", block, kAutoepSharedGate));
    autoep_.push_back({std::move(block), number("moe_layer_id"), experts, ep, gate});
  }
}

void DeepspeedBuilder::check_autoep_files() const {
  for (const AutoepLayer& layer : autoep_) {
    const i64 files = std::ranges::count(files_.experts, layer.number, &DeepspeedExpert::layer);
    DS_CHECK(files >= layer.experts, Errc::Corrupt, "{}: expert {} of layer {} is missing", files_.dir, files,
             layer.number);
    DS_CHECK(files == layer.experts, Errc::Mismatch, "{}: layer {} has {} experts, and there are files of {}",
             files_.dir, layer.number, layer.experts, files);
  }
}

const DeepspeedBuilder::AutoepLayer* DeepspeedBuilder::autoep_of(std::string_view batch) const {
  for (const AutoepLayer& layer : autoep_) {
    if (!autoep_name(layer, batch, 0).empty()) return &layer;
  }
  return nullptr;
}

std::string DeepspeedBuilder::autoep_name(const AutoepLayer& layer, std::string_view matrix, i64 expert) {
  if (!matrix.starts_with(layer.block)) return {};
  for (const auto& [batch, published] : kAutoepMatrices) {
    if (matrix == fmt::format("{}{}.{}", layer.block, kAutoepExperts, batch))
      return fmt::format("{}{}.{}.{}.weight", layer.block, kAutoepExperts, expert, published);
  }
  return {};
}

// 0: none of the parameters are such experts.
i64 DeepspeedBuilder::autoep_ranks(const std::vector<Parameter>& params, size_t f) const {
  const auto batches = std::ranges::count(params, true, &Parameter::batch);
  if (batches == 0) return 0;
  const i64 ep = autoep_[0].ep;
  check(ep == 1 || batches == std::ssize(params), Errc::Unavailable, f,
        "a group of the optimizer has experts and other parameters");
  return ep;
}

void DeepspeedBuilder::add_autoep_candidates(std::vector<Candidate>& candidates, i64 q, i64 ep) const {
  for (const AutoepLayer& layer : autoep_) {
    const i64 each = layer.experts / ep;
    for (const auto& [batch, published] : kAutoepMatrices) {
      Candidate c;
      c.expert = true;
      for (i64 e = q * each; e < (q + 1) * each; ++e)
        c.names.push_back(autoep_name(layer, fmt::format("{}{}.{}", layer.block, kAutoepExperts, batch), e));
      const Weight weight = c.names.empty() ? Weight{} : weight_of(c.names[0]);
      if (weight.value == nullptr) continue;
      c.shape = weight.value->tensor->shape;
      c.shape.insert(c.shape.begin(), each);
      candidates.push_back(std::move(c));
    }
  }
}

std::vector<DeepspeedBuilder::Candidate> DeepspeedBuilder::with_routers_last(std::vector<Candidate> candidates) const {
  std::ranges::stable_partition(candidates, [&](const Candidate& c) {
    return std::ranges::none_of(autoep_, [&](const AutoepLayer& layer) {
      return c.names[0].starts_with(layer.block + std::string(kAutoepRouter));
    });
  });
  return candidates;
}

void DeepspeedBuilder::check_autoep_rank(i64 r, i64 q, size_t group, const std::vector<i64>& copies) const {
  if (groups_[group].ep == 1) return;
  const Value* layers = autoep_layers_of(file(model_[r]).root());
  for (const Value* layer : layers == nullptr ? std::vector<const Value*>{} : layers->items)
    check(integer(*layer, "ep_rank", q) == q, Errc::Mismatch, model_[r],
          "it has the experts of rank {} of ep, where those of rank {} belong: the shard of another rank",
          integer(*layer, "ep_rank", q), q);
  const Value* groups = optimizer_of(optim_[r]).find("ds_zero_partition_groups");
  const Value* own = groups != nullptr && group < groups->items.size() ? groups->items[group] : nullptr;
  const Value* ranks = own == nullptr ? nullptr : own->find("partition_ranks");
  const auto same = [](const Value* a, i64 b) { return a->is(Kind::Int) && a->integer == b; };
  check(ranks != nullptr && std::ranges::equal(ranks->items, copies, same), Errc::Mismatch, optim_[r],
        "by its own account it shares the experts of group {} with other ranks than {}: the shard of another rank or "
        "save",
        group, fmt::join(copies, ", "));
}

// Transformers looks for the router's logits there.
bool DeepspeedBuilder::is_second_router(std::string_view name) const {
  for (const AutoepLayer& layer : autoep_) {
    if (!name.starts_with(layer.block)) continue;
    const std::string_view rest = name.substr(layer.block.size());
    const size_t dot = rest.find('.');
    if (dot == rest.npos || rest.starts_with(kAutoepRouter) || rest.starts_with(kAutoepShared)) continue;
    if (module_index_.contains(fmt::format("{}{}{}", layer.block, kAutoepRouter, rest.substr(dot + 1)))) return true;
  }
  return false;
}

void DeepspeedBuilder::rename_autoep() {
  const auto rename = [&](std::string& name) {
    for (const AutoepLayer& layer : autoep_) {
      if (!name.starts_with(layer.block)) continue;
      std::string_view rest = std::string_view(name).substr(layer.block.size());
      const auto eat = [&](std::string_view prefix) {
        const bool has = rest.starts_with(prefix);
        if (has) rest.remove_prefix(prefix.size());
        return has;
      };
      if (eat(kAutoepRouter)) {
        eat("gate.");
        name = fmt::format("{}gate.{}", layer.block, rest);
      } else if (layer.shared_gate && eat(kAutoepSharedGate)) {
        name = fmt::format("{}shared_expert_gate.{}", layer.block, rest);
      } else if (layer.shared_gate && eat(kAutoepShared)) {
        name = fmt::format("{}shared_expert.{}", layer.block, rest);
      }
      return;
    }
  };
  for (ParamEntry& p : table_.params) {
    rename(p.name);
    rename(p.tied_to);
  }
}

}  // namespace ds
