// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/match_weights.h"

#include <algorithm>
#include <set>
#include <unordered_map>

namespace ds {
namespace {

// The first part of parameter names, which files of a model without its head leave out.
constexpr std::string_view kPrefixes[] = {"transformer.", "model.", "bert."};

// Other names of the ends of parameters: those of Google's own files.
constexpr std::pair<std::string_view, std::string_view> kOldEnds[] = {{".LayerNorm.weight", ".LayerNorm.gamma"},
                                                                      {".LayerNorm.bias", ".LayerNorm.beta"}};

// Buffers that old files carry along.
bool is_known_extra(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq") || name.ends_with("embeddings.position_ids");
}

// Parameters that published BERTs have for other tasks.
bool is_other_task(std::string_view name) {
  if (name.starts_with("bert.")) name.remove_prefix(5);
  return name.starts_with("pooler.dense.") || name.starts_with("cls.seq_relationship.");
}

// The tensor of a parameter, under one of its names.
template <class Find>
auto find_parameter(std::string_view name, Find find) {
  std::vector<std::string> names = {std::string(name)};
  for (const auto& [end, old] : kOldEnds) {
    if (name.ends_with(end)) names.push_back(std::string(name.substr(0, name.size() - end.size())).append(old));
  }
  for (size_t i = names.size(); i-- > 0;) {
    for (const std::string_view prefix : kPrefixes) {
      if (names[i].starts_with(prefix)) names.push_back(names[i].substr(prefix.size()));
    }
  }
  decltype(find(name)) found{};
  for (const std::string& n : names) {
    if (!found) found = find(n);
  }
  return found;
}

}  // namespace

WeightMatch match_weights(const model::Model& model, const TensorSource& source, bool new_head) {
  std::unordered_map<std::string_view, const ForeignTensor*> foreign_named;
  for (const ForeignTensor& f : source.foreign()) foreign_named.emplace(f.name, &f);
  const auto foreign = [&](std::string_view name) {
    const auto it = foreign_named.find(name);
    return it == foreign_named.end() ? nullptr : it->second;
  };
  // Under its own names, or else under one that is tied to it: writers keep either.
  const auto find_row = [&](std::string_view row) {
    const TensorInfo* t = find_parameter(row, [&](std::string_view name) { return source.find(name); });
    for (const model::Tie& tie : model.ties) {
      if (t == nullptr && tie.name == row) t = source.find(tie.alias);
    }
    return t;
  };
  WeightMatch match;
  std::set<std::string_view> used;
  const auto check_type = [&](const TensorInfo& t) {
    if (!can_convert(DType::F32, t.dtype))
      match.unreadable.push_back(fmt::format("{} is of type {}", t.name, dtype_name(t.dtype)));
  };
  const std::vector<const model::ParamRow*> rows = model.params();
  const size_t head = rows.size() - model.layers.back()->rows().size();
  for (size_t param = 0; param < rows.size(); ++param) {
    const model::ParamRow& row = *rows[param];
    const TensorInfo* t = find_row(row.name);
    match.tensors.push_back(t);
    if (t == nullptr) {
      if (const ForeignTensor* f = find_parameter(row.name, foreign)) {
        used.insert(f->name);
        match.unreadable.push_back(fmt::format("{} is of type {}", f->name, f->type));
      } else if (new_head && param >= head) {
        match.anew.push_back(row.name);
      } else {
        match.unfit.push_back(fmt::format("{} is missing", row.name));
      }
      continue;
    }
    used.insert(t->name);
    check_type(*t);
    if (t->shape != row.whole_shape()) {
      match.unfit.push_back(fmt::format("{} has shape [{}], the model wants [{}]", t->name, fmt::join(t->shape, ","),
                                        fmt::join(row.whole_shape(), ",")));
    }
  }
  const auto is_tied = [&](std::string_view name) {
    return std::ranges::find(model.ties, name, &model::Tie::alias) != model.ties.end();
  };
  const auto note_extra = [&](const std::string& name) {
    if (used.contains(name) || is_known_extra(name) || is_tied(name)) return;
    if (!model.causal && is_other_task(name)) return match.left_out.push_back(name);
    match.extra.push_back(fmt::format("{} is not a parameter of the model", name));
  };
  for (const TensorInfo& t : source.list()) {
    note_extra(t.name);
    if (is_tied(t.name)) check_type(t);
  }
  for (const ForeignTensor& f : source.foreign()) {
    note_extra(f.name);
    if (is_tied(f.name)) match.unreadable.push_back(fmt::format("{} is of type {}", f.name, f.type));
  }
  for (const model::Tie& tie : model.ties) {
    const TensorInfo *alias = source.find(tie.alias), *own = find_row(tie.name);
    if (alias != nullptr && alias != own) match.both_of_tie.push_back({own, alias, &tie});
  }
  return match;
}

}  // namespace ds
