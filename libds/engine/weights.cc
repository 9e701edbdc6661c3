// SPDX-License-Identifier: Apache-2.0
#include "engine/weights.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "checkpoint/tensor_state.h"
#include "ds/log.h"
#include "formats/tensor_io.h"

namespace ds::engine {
namespace fs = std::filesystem;
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

// Files of other frameworks, and of ours under other names. What transformers' Trainer and nanoGPT put beside a model
// is none.
bool is_other_weights(std::string_view name) {
  for (const std::string_view prefix :
       {"training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state", "train.", "val."}) {
    if (name.starts_with(prefix)) return false;
  }
  if (name.ends_with(".index.json")) name.remove_suffix(std::string_view(".index.json").size());
  for (const std::string_view suffix : {".bin", ".pt", ".pth", ".safetensors", ".h5", ".msgpack", ".ckpt", ".gguf"}) {
    if (name.ends_with(suffix)) return true;
  }
  return false;
}

bool is_readable(DType t) { return t == DType::F64 || t == DType::F32 || t == DType::BF16 || t == DType::F16; }

// Elements [begin, begin + count) in fp32.
void read_floats(const TensorSource& source, const TensorInfo& t, i64 begin, i64 count, std::vector<char>& raw,
                 float* out) {
  raw.resize(static_cast<size_t>(count * dtype_bytes(t.dtype)));
  source.read(t.name, begin, count, raw.data());
  convert_elements(DType::F32, out, t.dtype, raw.data(), count);
}

bool equal_values(const TensorSource& source, const TensorInfo& a, const TensorInfo& b) {
  if (a.shape != b.shape || !is_readable(a.dtype) || !is_readable(b.dtype)) return false;
  constexpr i64 kTile = 1 << 16;
  std::vector<float> x(kTile), y(kTile);
  std::vector<char> raw;
  for (i64 first = 0; first < a.numel(); first += kTile) {
    const i64 n = std::min(kTile, a.numel() - first);
    read_floats(source, a, first, n, raw, x.data());
    read_floats(source, b, first, n, raw, y.data());
    if (!std::equal(x.begin(), x.begin() + n, y.begin())) return false;
  }
  return true;
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

std::string published_weights(const std::string& model_path) {
  if (model_path.empty()) return "";
  const fs::path path(model_path);
  const bool is_dir = fs::is_directory(path);
  if (!is_dir && path.filename() != "config.json") return "";
  const fs::path dir = is_dir ? path : path.has_parent_path() ? path.parent_path() : ".";
  for (const std::string_view name : kPublishedWeights) {
    if (fs::exists(dir / name)) return dir.string();
  }
  std::set<std::string> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (is_other_weights(name)) others.insert(name);
  }
  DS_CHECK(
      others.empty(), Errc::Unavailable,
      "model.path {}: there are weights in {}, but only {} are read; convert them, name a file with --weights, or put "
      "config.json alone elsewhere to start from random weights",
      model_path, *others.begin(), fmt::join(kPublishedWeights, ", "));
  return "";
}

namespace {

struct Match {
  std::unique_ptr<TensorSource> source;
  std::vector<const TensorInfo*> tensors;  // by parameter number; null: begins anew
  std::vector<std::string> left_out;       // of other tasks
  std::vector<std::string> anew;
};

Match match_weights(const model::Model& model, const report::RunPlan& plan, const std::string& path, bool new_head) {
  const bool is_encoder = !model.causal;
  std::unique_ptr<TensorSource> source = open_weights(path);
  const auto foreign = [&](std::string_view name) {
    const auto it = std::find_if(source->foreign().begin(), source->foreign().end(),
                                 [&](const ForeignTensor& f) { return f.name == name; });
    return it == source->foreign().end() ? nullptr : &*it;
  };
  // Under its own names, or else under one that is tied to it: writers keep either.
  const auto find_row = [&](std::string_view row) {
    const TensorInfo* t = find_parameter(row, [&](std::string_view name) { return source->find(name); });
    for (const model::Tie& tie : model.ties) {
      if (t == nullptr && tie.name == row) t = source->find(tie.alias);
    }
    return t;
  };
  std::vector<const TensorInfo*> tensors;  // by parameter number
  std::set<std::string_view> used;
  std::string problems, unreadable;
  std::vector<std::string> anew;
  for (const auto& unit : plan.rows) {
    for (const model::ParamRow& row : unit) {
      const TensorInfo* t = find_row(row.name);
      tensors.push_back(t);
      if (t == nullptr) {
        if (const ForeignTensor* f = find_parameter(row.name, foreign)) {
          used.insert(f->name);
          unreadable += fmt::format("\n  {} is of type {}", f->name, f->type);
        } else if (new_head && unit.data() == plan.rows.back().data()) {
          anew.push_back(row.name);
        } else {
          problems += fmt::format("\n  {} is missing", row.name);
        }
        continue;
      }
      used.insert(t->name);
      if (!is_readable(t->dtype)) unreadable += fmt::format("\n  {} is of type {}", t->name, dtype_name(t->dtype));
      if (t->shape != row.shape) {
        problems += fmt::format("\n  {} has shape [{}], the model wants [{}]", t->name, fmt::join(t->shape, ","),
                                fmt::join(row.shape, ","));
      }
    }
  }
  const auto is_tied = [&](std::string_view name) {
    return std::ranges::find(model.ties, name, &model::Tie::alias) != model.ties.end();
  };
  std::vector<std::string> left_out;
  const auto refuse_extra = [&](const std::string& name) {
    if (used.contains(name) || is_known_extra(name) || is_tied(name)) return;
    if (is_encoder && is_other_task(name)) return left_out.push_back(name);
    problems += fmt::format("\n  {} is not a parameter of the model", name);
  };
  for (const TensorInfo& t : source->list()) {
    refuse_extra(t.name);
    if (is_tied(t.name) && !is_readable(t.dtype))
      unreadable += fmt::format("\n  {} is of type {}", t.name, dtype_name(t.dtype));
  }
  for (const ForeignTensor& f : source->foreign()) {
    refuse_extra(f.name);
    if (is_tied(f.name)) unreadable += fmt::format("\n  {} is of type {}", f.name, f.type);
  }
  DS_CHECK(unreadable.empty(), Errc::Unavailable, "{}: only fp64, fp32, bf16 and fp16 are read:{}{}", source->path(),
           unreadable, problems);
  DS_CHECK(problems.empty(), Errc::Mismatch, "{} does not fit the model:{}", source->path(), problems);
  // transformers unties such a model: to drop the tied name would train another one.
  for (const model::Tie& tie : model.ties) {
    const TensorInfo* alias = source->find(tie.alias);
    const TensorInfo* own = find_row(tie.name);
    DS_CHECK(alias == nullptr || alias == own || equal_values(*source, *alias, *own), Errc::Mismatch,
             "{}: {} differs from {}, but tie_word_embeddings makes them one{}", source->path(), tie.alias, tie.name,
             model.causal ? ": set it to false" : "");
  }
  return {std::move(source), std::move(tensors), std::move(left_out), std::move(anew)};
}

}  // namespace

void load_weights(Engine& engine, const std::string& path) {
  const bool new_head = engine.config().new_head;
  const Match found = match_weights(engine.model(), engine.plan(), path, new_head);
  if (!found.left_out.empty() && engine.mesh().rank() == 0)
    log_message(LogLevel::Warning, fmt::format("{}: left out, for masked language modelling does not train them: {}",
                                               found.source->path(), fmt::join(found.left_out, ", ")));
  if (new_head && engine.mesh().rank() == 0)
    log_message(LogLevel::Warning,
                found.anew.empty()
                    ? fmt::format("model.new_head has no effect: {} has the whole head", found.source->path())
                    : fmt::format("{} lacks the head: random values for {}", found.source->path(),
                                  fmt::join(found.anew, ", ")));
  std::vector<char> raw;
  engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
    if (found.tensors[static_cast<size_t>(param)] == nullptr) return engine.init_values(param, begin, count, out);
    const TensorInfo& t = *found.tensors[static_cast<size_t>(param)];
    read_floats(*found.source, t, begin, count, raw, out);
    const float* const bad = std::find_if_not(out, out + count, [](float x) { return std::isfinite(x); });
    DS_CHECK(bad == out + count, Errc::Numeric, "{}: element {} of {} is {} in fp32; no model computes with that",
             found.source->path(), begin + (bad - out), t.name, *bad);
  });
}

void check_weights(const model::Model& model, const report::RunPlan& plan, const std::string& path, bool new_head) {
  match_weights(model, plan, path, new_head);
}

}  // namespace ds::engine
