// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/match_weights.h"

#include <algorithm>
#include <functional>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/state_source.h"
#include "config/family.h"
#include "formats/coded_source.h"
#include "formats/fp8_source.h"

namespace ds {
namespace {

// Other names of the ends of parameters: those of Google's own files.
constexpr std::pair<std::string_view, std::string_view> kOldEnds[] = {{".LayerNorm.weight", ".LayerNorm.gamma"},
                                                                      {".LayerNorm.bias", ".LayerNorm.beta"}};

// Buffers that old files carry along.
bool is_known_extra(std::string_view name) {
  return std::ranges::any_of(families(), [&](const FamilySpec* f) {
    return std::ranges::any_of(f->buffers, [&](std::string_view end) { return name.ends_with(end); });
  });
}

// Parts of names that wrappers of a module put in front of its own, and that no model of the zoo has.
constexpr std::string_view kWrappers[] = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module",
                                          "_forward_module", "language_model"};

// Parts of names of PEFT's adapters and of what they stand beside.
bool is_of_adapter(std::string_view part) {
  constexpr std::string_view kBegins[] = {"lora_", "ia3_", "hada_w", "lokr_w", "oft_", "boft_", "vera_lambda_"};
  constexpr std::string_view kWhole[] = {"base_layer", "modules_to_save", "original_module", "prompt_embeddings"};
  return std::ranges::any_of(kBegins, [&](std::string_view begin) { return part.starts_with(begin); }) ||
         std::ranges::find(kWhole, part) != std::end(kWhole);
}

std::vector<std::string_view> parts_of(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0, end = 0; begin <= name.size(); begin = end + 1) {
    end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
  }
  return parts;
}

// The names under which files may have a parameter.
std::vector<std::string> names_in_files(std::string_view name) {
  std::vector<std::string> names = {std::string(name)};
  for (const auto& [end, old] : kOldEnds) {
    if (name.ends_with(end)) names.push_back(std::string(name.substr(0, name.size() - end.size())).append(old));
  }
  for (size_t i = names.size(); i-- > 0;) {
    for (const FamilySpec* f : families()) {
      if (!names[i].starts_with(f->prefix)) continue;
      names.push_back(names[i].substr(f->prefix.size()));
      break;  // relatives share a prefix
    }
  }
  return names;
}

// The tensor of a parameter, under one of its names.
template <class Find>
auto find_parameter(std::string_view name, Find find) {
  decltype(find(name)) found{};
  for (const std::string& n : names_in_files(name)) {
    if (!found) found = find(n);
  }
  return found;
}

// Takes the wrappers' parts out of all names, and returns those that there were.
std::vector<std::string_view> remove_wrappers(std::vector<std::string>& names) {
  std::vector<std::string_view> removed;
  for (std::string& name : names) {
    std::vector<std::string_view> parts = parts_of(name);
    const size_t before = parts.size();
    std::erase_if(parts, [&](std::string_view part) {
      const auto* const wrapper = std::ranges::find(kWrappers, part);
      if (wrapper == std::end(kWrappers)) return false;
      if (std::ranges::find(removed, *wrapper) == removed.end()) removed.push_back(*wrapper);
      return true;
    });
    if (parts.size() != before) name = fmt::format("{}", fmt::join(parts, "."));
  }
  return removed;
}

// The longest common prefix of all names that ends with a dot.
std::string_view shared_prefix(const std::vector<std::string>& names) {
  if (names.empty()) return {};
  std::string_view shared = names.front();
  for (const std::string& name : names)
    shared = shared.substr(0, std::ranges::mismatch(shared, name).in1 - shared.begin());
  return shared.substr(0, shared.rfind('.') + 1);
}

// The part of the common prefix of all names after which most parameters are found; the shortest one, so usually empty.
std::string_view foreign_prefix(const model::Model& model, const std::vector<std::string>& names) {
  const std::unordered_set<std::string_view> there(names.begin(), names.end());
  const std::vector<const model::ParamRow*> rows = model.params();
  const std::string_view shared = shared_prefix(names);
  constexpr int kMostParts = 8;
  std::string_view best;
  i64 most = -1;
  size_t length = 0;
  for (int parts = 0; parts <= kMostParts; ++parts) {
    const std::string_view prefix = shared.substr(0, length);
    i64 found = 0;
    for (const model::ParamRow* row : rows) {
      const std::vector<std::string> own = names_in_files(row->name);
      found += std::ranges::any_of(
          own, [&](const std::string& name) { return there.contains(std::string(prefix).append(name)); });
    }
    if (found > most) {
      most = found;
      best = prefix;
    }
    if (length == shared.size()) break;
    length = shared.find('.', length) + 1;
  }
  return best;
}

}  // namespace

bool is_added_bias(const model::Model& model, std::string_view name, const std::vector<i64>& shape,
                   const std::function<void(float* out)>& read) {
  constexpr std::string_view kBias = ".bias";
  if (!name.ends_with(kBias) || shape.size() != 1) return false;
  const std::string weight = std::string(name.substr(0, name.size() - kBias.size())) + ".weight";
  // Files of a bare model lack the first part of its names.
  const auto find = [&](std::string_view own) -> const model::ParamRow* {
    for (const model::ParamRow* row : model.params())
      if (row->name == own || row->name.ends_with(fmt::format(".{}", own))) return row;
    return nullptr;
  };
  const model::ParamRow* const matrix = find(weight);
  const bool is_added = matrix != nullptr && matrix->whole_shape().size() == 2 &&
                        matrix->whole_shape()[0] == shape[0] && find(name) == nullptr;
  if (!is_added) return false;
  std::vector<float> values(static_cast<size_t>(shape[0]));
  read(values.data());
  return std::ranges::all_of(values, [](float x) { return x == 0; });
}

bool is_other_task(const model::Model& model, std::string_view name) {
  return std::ranges::any_of(model.other_tasks, [&](std::string_view begin) { return name.starts_with(begin); });
}

std::string left_out_text(const model::Model& model, const std::string& path, const std::vector<std::string>& names) {
  return fmt::format("{}: left out, for {}: {}", path,
                     model.causal ? "they predict tokens further ahead (num_nextn_predict_layers)"
                                  : "masked language modelling does not train them",
                     first_lines(names, ", "));
}

ModelNames names_of_model(const model::Model& model, const std::vector<std::string_view>& names) {
  ModelNames result{{names.begin(), names.end()}, {}};
  std::vector<std::string> own = result.names;
  std::vector<std::string> removed;
  for (const std::string_view wrapper : remove_wrappers(own)) removed.push_back(fmt::format("'{}.'", wrapper));
  if (const std::string prefix(foreign_prefix(model, own)); !prefix.empty()) {
    for (std::string& name : own) name.erase(0, prefix.size());
    removed.push_back(fmt::format("'{}'", prefix));
  }
  // Two tensors of one name would be a choice that nobody made.
  if (removed.empty() || std::unordered_set<std::string_view>(own.begin(), own.end()).size() < own.size())
    return result;
  return {std::move(own), fmt::format("{}", fmt::join(removed, " and "))};
}

std::string removed_text(const std::string& path, const std::string& removed) {
  return fmt::format("{}: tensor names are read without {}, which a wrapper of the model has added", path, removed);
}

std::string WeightMatch::misfits(bool with_extra) const {
  std::vector<std::string> lines = unfit;
  if (with_extra) lines.insert(lines.end(), extra.begin(), extra.end());
  const bool missing = std::ranges::find(tensors, nullptr) != tensors.end();
  return first_lines(lines, "\n  ") +
         (missing && !examples.empty() ? fmt::format("\n  names of the file: {}", fmt::join(examples, ", ")) : "");
}

WeightMatch match_weights(const model::Model& model, const TensorSource& source, bool new_head) {
  std::vector<std::string_view> names;
  for (const TensorInfo& t : source.list()) names.push_back(t.name);
  for (const ForeignTensor& f : source.foreign()) names.push_back(f.name);
  for (const std::string_view name : names) {
    DS_CHECK(std::ranges::none_of(parts_of(name), is_of_adapter), Errc::Unavailable,
             "{}: '{}' belongs to an adapter of PEFT, which is not applied to the weights: merge it (merge_and_unload) "
             "and save the model that results",
             source.path(), name);
  }
  const ModelNames of_model = names_of_model(model, names);
  const auto name_of = [&](size_t tensor) -> const std::string& { return of_model.names[tensor]; };
  std::unordered_map<std::string_view, const TensorInfo*> named;
  std::unordered_map<std::string_view, const ForeignTensor*> foreign_named;
  for (size_t i = 0; i < source.list().size(); ++i) named.emplace(name_of(i), &source.list()[i]);
  for (size_t i = 0; i < source.foreign().size(); ++i)
    foreign_named.emplace(name_of(source.list().size() + i), &source.foreign()[i]);
  const auto look = [](const auto& table, std::string_view name) {
    const auto it = table.find(name);
    return it == table.end() ? nullptr : it->second;
  };
  const auto tensor = [&](std::string_view name) { return look(named, name); };
  const auto foreign = [&](std::string_view name) { return look(foreign_named, name); };
  // Under its own names, or else under one that is tied to it: writers keep either.
  const auto find_row = [&](std::string_view row) {
    const TensorInfo* t = find_parameter(row, tensor);
    for (const model::Tie& tie : model.ties) {
      if (t == nullptr && tie.name == row) t = tensor(tie.alias);
    }
    return t;
  };
  WeightMatch match;
  match.removed = of_model.removed;
  std::set<std::string_view> used;
  const auto check_type = [&](const TensorInfo& t) {
    if (!can_convert(DType::F32, t.dtype))
      match.unreadable.push_back(
          fmt::format("{} is of type {}{}", t.name, dtype_name(t.dtype), missing_scales(t.name, t.dtype)));
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
      match.unfit.push_back(fmt::format("{} has shape [{}], the model needs [{}]", t->name, fmt::join(t->shape, ","),
                                        fmt::join(row.whole_shape(), ",")));
    }
  }
  const auto is_tied = [&](std::string_view name) {
    return std::ranges::find(model.ties, name, &model::Tie::alias) != model.ties.end();
  };
  std::vector<std::string> spare;
  const auto note_extra = [&](const std::string& name, const std::string& own) {
    if (used.contains(name)) return;
    spare.push_back(name);
    if (is_known_extra(own) || is_tied(own)) return;
    if (is_other_task(model, own)) return match.left_out.push_back(name);
    match.extra.push_back(fmt::format("{} is not a parameter of the model{}", name, missing_section(name)));
  };
  for (size_t i = 0; i < source.list().size(); ++i) {
    const TensorInfo& t = source.list()[i];
    const auto is_added = [&] {
      return can_convert(DType::F32, t.dtype) && is_added_bias(model, name_of(i), t.shape, [&](float* out) {
               std::vector<char> raw(static_cast<size_t>(t.bytes()));
               source.read(t.name, 0, t.numel(), raw.data());
               convert_elements(DType::F32, out, t.dtype, raw.data(), t.numel());
             });
    };
    // transformers writes those of no shared expert without elements.
    if (t.numel() > 0 && (used.contains(t.name) || !is_added())) note_extra(t.name, name_of(i));
    if (is_tied(name_of(i))) check_type(t);
  }
  for (size_t i = 0; i < source.foreign().size(); ++i) {
    const ForeignTensor& f = source.foreign()[i];
    const std::string& own = name_of(source.list().size() + i);
    note_extra(f.name, own);
    if (is_tied(own)) match.unreadable.push_back(fmt::format("{} is of type {}", f.name, f.type));
  }
  for (size_t i = 0; i < names.size() && spare.size() < 2; ++i)
    if (std::ranges::find(spare, names[i]) == spare.end()) spare.emplace_back(names[i]);
  spare.resize(std::min<size_t>(spare.size(), 2));
  match.examples = std::move(spare);
  for (const model::Tie& tie : model.ties) {
    const TensorInfo *alias = tensor(tie.alias), *own = find_row(tie.name);
    if (alias != nullptr && alias != own) match.both_of_tie.push_back({own, alias, &tie});
  }
  return match;
}

}  // namespace ds
