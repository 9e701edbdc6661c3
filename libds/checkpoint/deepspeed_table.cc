// SPDX-License-Identifier: Apache-2.0
// The part of the builder that every checkpoint needs.

#include <algorithm>
#include <filesystem>

#include "checkpoint/deepspeed_builder.h"
#include "checkpoint/pickle_json.h"

namespace ds {

DeepspeedTable DeepspeedBuilder::build() {
  for (const std::string& path : files_.model) model_.push_back(open(path));
  for (const std::string& path : files_.optim) optim_.push_back(open(path));
  read_autoep();
  open_experts();
  read_model_states();
  has(State::Param) = true;
  if (files_.universal) {
    place_universal();
  } else if (!optim_.empty()) {
    place_partitions();
  } else {
    DS_CHECK(groups_.empty(), Errc::Corrupt, "{}: the optimizer states are missing", files_.dir);
    place_whole();
  }
  place_weights();
  add_untrained();
  add_ties();
  rename_autoep();
  read_config();
  list_unread();
  for (const auto& f : table_.files) f->close();
  return std::move(table_);
}

size_t DeepspeedBuilder::open(const std::string& path) {
  table_.files.push_back(std::make_unique<TorchFile>(path));
  TorchFile& f = *table_.files.back();
  if (table_.files.size() > 64) f.close();
  return table_.files.size() - 1;
}

// The data-parallel rank that wrote file f, where it is one of several.
int DeepspeedBuilder::rank_of(size_t f) const {
  for (const auto* list : {&model_, &optim_}) {
    const auto it = std::find(list->begin(), list->end(), f);
    if (it != list->end() && list->size() > 1) return static_cast<int>(it - list->begin());
  }
  return -1;
}

DeepspeedBuilder::Index DeepspeedBuilder::index_of(const Value* dict) {
  Index index;
  if (dict == nullptr || !dict->is(Kind::Dict)) return index;
  for (size_t i = 0; i < dict->items.size(); i += 2) {
    if (dict->items[i]->is(Kind::String)) index[dict->items[i]->text] = dict->items[i + 1];
  }
  return index;
}

DeepspeedBuilder::Segments& DeepspeedBuilder::segments(State s, size_t param) {
  auto& list = table_.segments[s];
  if (list.size() <= param) list.resize(param + 1);
  return list[param];
}

const PickleValue& DeepspeedBuilder::need(const Value& dict, std::string_view key, Kind kind, size_t f) const {
  const Value* v = dict.find(key);
  check(v != nullptr && v->is(kind), Errc::Corrupt, f, "'{}' is {}, not a {}: not a checkpoint of DeepSpeed", key,
        v == nullptr ? "missing" : fmt::format("a {}", kind_name(v->kind)), kind_name(kind));
  return *v;
}

std::vector<i64> DeepspeedBuilder::shape_of(const Value& v, const std::string& name, size_t f) const {
  std::vector<i64> shape;
  bool ok = v.is(Kind::Tuple) || v.is(Kind::List);
  for (const Value* d : v.items) {
    ok = ok && d->is(Kind::Int);
    shape.push_back(d->integer);
  }
  check(ok && checked_product(shape, 8).has_value(), Errc::Corrupt, f, "the shape of '{}' is invalid", name);
  return shape;
}

const PickleTensor& DeepspeedBuilder::tensor_of(const Value& v, std::string_view what, size_t f) const {
  check(v.is(Kind::Tensor), Errc::Corrupt, f, "{} is a {}, not a tensor", what, kind_name(v.kind));
  check(v.tensor->dtype.has_value(), Errc::Unavailable, f, "{} is of type {}, which is not supported", what,
        v.tensor->type);
  while (budgets_.size() <= f) budgets_.emplace_back(file(budgets_.size()));
  budgets_[f].take(*v.tensor, what);
  return *v.tensor;
}

// A tensor of fp32 state; 16-bit states are widened when they are read.
const PickleTensor& DeepspeedBuilder::state_of(const Value& v, std::string_view what, size_t f) const {
  const PickleTensor& t = tensor_of(v, what, f);
  check(*t.dtype == DType::F32 || *t.dtype == DType::BF16 || *t.dtype == DType::F16, Errc::Unavailable, f,
        "{} is of type {}, which is not supported", what, t.type);
  check(numel(t) <= t.storage->integer, Errc::Corrupt, f, "{} has more elements than its storage", what);
  return t;
}

void DeepspeedBuilder::read_model_states() {
  const size_t f = model_[0];
  const Value& root = file(f).root();
  check(root.is(Kind::Dict), Errc::Corrupt, f, "holds a {}: not a checkpoint of DeepSpeed", kind_name(root.kind));
  const Value* module = root.find("module");
  check(module != nullptr, Errc::Corrupt, f, "'module' is missing: not a checkpoint of DeepSpeed");
  check(!module->is(Kind::None), Errc::Unavailable, f,
        "its module is elsewhere: a pipeline-parallel run, which is not supported");
  module_ = &need(root, "module", Kind::Dict, f);
  check(has_string_keys(*module_), Errc::Corrupt, f, "'module' has keys that are not names");
  module_index_ = index_of(module_);
  for (const size_t m : model_) fragments_.push_back(index_of(file(m).root().find("frozen_param_fragments")));
  check(integer(root, "mp_world_size", 1) == 1, Errc::Unavailable, f,
        "a part of a tensor-parallel run of {} ranks, which is not supported", integer(root, "mp_world_size", 1));

  table_.meta.step = integer(root, "global_steps", 0);
  table_.meta.skipped_steps = integer(root, "skipped_steps", 0);
  table_.meta.consumed_samples = integer(root, "global_samples", 0);
  table_.meta.optimizer_step = std::max<i64>(table_.meta.step - table_.meta.skipped_steps, 0);
  table_.meta.world_size = std::max<i64>(integer(root, "dp_world_size", 1), 1);
  for (const i64 value : {table_.meta.step, table_.meta.skipped_steps, table_.meta.consumed_samples}) {
    check(value >= 0, Errc::Corrupt, f, "a negative counter of steps or samples");
  }
  version_ = root.find("ds_version");
  if (const Value* shapes = root.find("param_shapes"); shapes != nullptr && !shapes->is(Kind::None)) {
    groups_ = read_groups(*shapes, f);
  }
  if (const Value* shared = root.find("shared_params"); shared != nullptr && shared->is(Kind::Dict)) {
    for (size_t i = 0; i < shared->items.size(); i += 2) {
      const Value &alias = *shared->items[i], &target = *shared->items[i + 1];
      check(alias.is(Kind::String) && target.is(Kind::String), Errc::Corrupt, f, "'shared_params' are not names");
      tie(alias.text, target.text);
    }
  }
  for (size_t r = 1; r < model_.size(); ++r) check_same_model(model_[r]);
  for (Group& group : groups_) {
    group.ep = expert_ranks(group.params, f);
    for (i64 q = 0; q < group.ep; ++q) {
      for (const Parameter& p : group.params) add_trained(p, q, group.ep);
    }
  }
}

void DeepspeedBuilder::add_trained(const Parameter& p, i64 q, i64 ep) {
  const i64 each = p.elems / p.parts();
  i64 part = q * p.parts();
  for (const std::string& name : global_names(p, q, ep)) {
    add_param(name, {p.shape.begin() + (p.batch ? 1 : 0), p.shape.end()}, model_[0]);
    wholes_.push_back(p.batch ? Whole{p.name, ep * p.elems, part++ * each} : Whole{name, p.elems, 0});
  }
}

std::vector<DeepspeedBuilder::Group> DeepspeedBuilder::read_groups(const Value& shapes, size_t f) const {
  check(shapes.is(Kind::List), Errc::Corrupt, f, "'param_shapes' is a {}, not a list", kind_name(shapes.kind));
  std::vector<Group> groups;
  for (const Value* group : shapes.items) {
    check(group->is(Kind::Dict) && has_string_keys(*group), Errc::Corrupt, f,
          "'param_shapes' contains something other than dicts of names");
    auto& list = groups.emplace_back().params;
    for (size_t i = 0; i < group->items.size(); i += 2) {
      const std::string& name = group->items[i]->text;
      Parameter p{name, shape_of(*group->items[i + 1], name, f), 0};
      p.elems = *checked_product(p.shape);
      if (const AutoepLayer* layer = autoep_of(name); layer != nullptr) {
        p.batch = true;
        const i64 each = layer->experts / layer->ep;
        check(p.shape.size() == 3 && p.shape[0] == each && checked_product({layer->ep, p.elems}).has_value(),
              Errc::Corrupt, f, "'{}' is of shape [{}], and a rank has {} of {} experts", name, fmt::join(p.shape, ","),
              each, layer->experts);
      }
      list.push_back(std::move(p));
    }
  }
  return groups;
}

// The model states of another rank of stage 3.
void DeepspeedBuilder::check_same_model(size_t f) const {
  const Value& root = file(f).root();
  const Value* shapes = root.find("param_shapes");
  const auto same = [](const auto& a, const auto& b) {
    return std::ranges::equal(a, b, [](const Group& x, const Group& y) {
      return std::ranges::equal(x.params, y.params, [](const Parameter& p, const Parameter& q) {
        return p.name == q.name && p.shape == q.shape;
      });
    });
  };
  check(shapes != nullptr && same(read_groups(*shapes, f), groups_), Errc::Mismatch, f,
        "its parameters are not those of rank 0: the shard of another save");
  check(integer(root, "global_steps", 0) == table_.meta.step, Errc::Mismatch, f,
        "its step is {}, that of rank 0 is {}: the shard of another save", integer(root, "global_steps", 0),
        table_.meta.step);
  check_version(root, f);
}

void DeepspeedBuilder::check_version(const Value& dict, size_t f) const {
  const Value* v = dict.find("ds_version");
  const bool same = v == nullptr || version_ == nullptr || v->text == version_->text;
  check(same, Errc::Mismatch, f, "written by DeepSpeed {}, the model states by {}: the shard of another save",
        v == nullptr ? "" : v->text, version_ == nullptr ? "" : version_->text);
}

size_t DeepspeedBuilder::add_param(const std::string& name, const std::vector<i64>& shape, size_t f) {
  check(!name.empty() && name.size() <= 4096 &&
            std::none_of(name.begin(), name.end(), [](char c) { return static_cast<u8>(c) < 0x20; }),
        Errc::Corrupt, f, "a parameter of an impossible name");
  check(number_.emplace(name, table_.params.size()).second, Errc::Corrupt, f, "parameter '{}' appears twice", name);
  table_.params.push_back({name, shape, "", {}});
  return table_.params.size() - 1;
}

bool DeepspeedBuilder::is_stage_3() const {
  return std::filesystem::path(files_.model[0]).filename().string().starts_with("zero_pp_rank_");
}

std::set<std::string_view> DeepspeedBuilder::buffer_names() const {
  std::set<std::string_view> names;
  if (const Value* v = file(model_[0]).root().find("buffer_names"); v != nullptr) {
    for (const Value* item : v->items) names.insert(item->text);
  }
  return names;
}

void DeepspeedBuilder::set_dtype(size_t param, DType dtype) {
  if (param == 0) table_.meta.work_dtype = dtype;
  if (dtype != table_.meta.work_dtype) table_.params[param].dtype = dtype;
}

void DeepspeedBuilder::place_weights() {
  const size_t f = model_[0];
  const bool stage_3 = is_stage_3();
  for (size_t i = 0; i < table_.params.size(); ++i) {
    const ParamEntry& p = table_.params[i];
    const Weight weight = weight_of(p.name);
    if (weight.value == nullptr && i < wholes_.size() && wholes_[i].name != p.name && (stage_3 || files_.universal)) {
      set_dtype(i, dtype_of_module());  // an expert of AutoEP without a file of weights
      segments(State::Param, i) = segments(State::Master, i);
      continue;
    }
    check(weight.value != nullptr, Errc::Corrupt, f, "'{}' is in 'param_shapes', but not in 'module'", p.name);
    const PickleTensor& t = state_of(*weight.value, fmt::format("'{}'", p.name), weight.file);
    set_dtype(i, *t.dtype);
    check(stage_3 || t.shape == p.shape, Errc::Mismatch, f, "'{}' is of shape [{}] in 'module', [{}] in 'param_shapes'",
          p.name, fmt::join(t.shape, ","), fmt::join(p.shape, ","));
    segments(State::Param, i) = stage_3 || *t.dtype == DType::F32 ? segments(State::Master, i) : whole(t, weight.file);
  }
}

DType DeepspeedBuilder::dtype_of_module() const {
  for (const ParamEntry& p : table_.params) {
    const Value* v = look_up(module_index_, p.name);
    if (v != nullptr && v->is(Kind::Tensor) && v->tensor->dtype) return *v->tensor->dtype;
  }
  return DType::F32;
}

// A frozen parameter of stage 3, of which every rank holds a chunk.
DeepspeedBuilder::Segments DeepspeedBuilder::frozen_chunks(const std::string& name, i64 elems) const {
  const i64 num_ranks = narrow<i64>(model_.size()), chunk = div_ceil(elems, num_ranks);
  Segments result;
  for (const FlatPiece& p : chunked_pieces(0, elems, num_ranks, std::span(&chunk, 1))) {
    const size_t f = model_[p.rank];
    const Value* v = look_up(fragments_[p.rank], name);
    check(v != nullptr, Errc::Corrupt, f, "its part of '{}' is missing", name);
    const PickleTensor& t = tensor_of(*v, fmt::format("'{}'", name), f);
    check(numel(t) == chunk, Errc::Corrupt, f, "its part of '{}' has {} elements, {} are expected", name, numel(t),
          chunk);
    result.push_back({p.begin, p.count, f, &t, p.offset});
  }
  return result;
}

void DeepspeedBuilder::add_untrained() {
  const size_t f = model_[0];
  const bool stage_3 = is_stage_3();
  const Index frozen = index_of(file(f).root().find("frozen_param_shapes"));
  const std::set<std::string_view> buffers = buffer_names();
  for (size_t i = 0; i < module_->items.size(); i += 2) {
    const std::string& name = module_->items[i]->text;
    const Value& v = *module_->items[i + 1];
    if (!v.is(Kind::Tensor) || number_.contains(name) || aliases_.contains(name) || is_second_router(name)) continue;
    const PickleTensor& t = tensor_of(v, fmt::format("'{}'", name), f);
    const Value* shape = stage_3 && !buffers.contains(name) ? look_up(frozen, name) : nullptr;
    if (shape != nullptr) {
      const std::vector<i64> full = shape_of(*shape, name, f);
      add_as_it_is(name, full, *t.dtype, frozen_chunks(name, *checked_product(full)));
      continue;
    }
    check(!stage_3 || buffers.contains(name) || numel(t) > 0, Errc::Corrupt, f,
          "'{}' is named in 'module', but its elements are missing", name);
    add_as_it_is(name, t.shape, *t.dtype, whole(t, f));
  }
  for (const std::vector<std::string>& names : expert_names_) {
    for (const std::string& name : names) {
      if (number_.contains(name)) continue;
      const Weight weight = weight_of(name);
      const PickleTensor& t = tensor_of(*weight.value, fmt::format("'{}'", name), weight.file);
      add_as_it_is(name, t.shape, *t.dtype, whole(t, weight.file));
    }
  }
}

void DeepspeedBuilder::add_as_it_is(const std::string& name, const std::vector<i64>& shape, DType dtype, Segments at) {
  const size_t param = add_param(name, shape, model_[0]);
  set_dtype(param, dtype);
  segments(State::Param, param) = at;
  const auto own = whole_states_.find(name);
  for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq}) {
    auto& list = segments(s, param);
    if (own == whole_states_.end()) {
      if (s == State::Master) list = at;
    } else if (const PickleTensor* t = own->second.tensors[static_cast<size_t>(s) - 1]; t != nullptr) {
      check(t->shape == own->second.shape, Errc::Mismatch, own->second.file,
            "'{}' is of shape [{}], and its {} of shape [{}]", name, fmt::join(own->second.shape, ","), state_name(s),
            fmt::join(t->shape, ","));
      list = {{0, *checked_product(shape), own->second.file, t, own->second.first}};
    }
  }
}

void DeepspeedBuilder::add_ties() {
  for (const auto& [alias, target] : ties_) {
    const auto it = number_.find(target);
    if (it == number_.end() || number_.contains(alias) || is_second_router(alias))
      continue;  // as in zero_to_fp32: the owner is missing
    const ParamEntry owner = table_.params[it->second];
    const size_t param = add_param(alias, owner.shape, model_[0]);
    table_.params[param].tied_to = target;
    table_.params[param].dtype = owner.dtype;
  }
  for (auto& list : table_.segments.values) list.resize(table_.params.size());
  check(!table_.params.empty(), Errc::Corrupt, model_[0], "there is no parameter");
  const DType work = table_.meta.work_dtype;
  check(work == DType::F32 || work == DType::BF16 || work == DType::F16, Errc::Unavailable, model_[0],
        "weights of {}, which are not supported", dtype_name(work));
}

void DeepspeedBuilder::read_config() {
  const Value* config = file(model_[0]).root().find("ds_config");
  if (config == nullptr || !config->is(Kind::Dict)) return;
  const Value* zero = config->find("zero_optimization");
  check(zero == nullptr || integer(*zero, "mics_shard_size", -1) <= 0, Errc::Unavailable, model_[0],
        "shards of MiCS (mics_shard_size), which are not supported");
  if (const std::optional<Json> json = pickle_json(*config)) table_.meta.config_json = json->dump();
}

DeepspeedTable read_deepspeed_table(const DeepspeedFiles& files) { return DeepspeedBuilder(files).build(); }

}  // namespace ds
