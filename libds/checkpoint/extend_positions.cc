// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/extend_positions.h"

#include <algorithm>
#include <span>

#include "base/check.h"
#include "base/json.h"
#include "checkpoint/hf_directory.h"
#include "config/family.h"
#include "ds/checkpoint.h"
#include "ds/log.h"

namespace ds {
namespace {

constexpr const char* kOldKey = "n_ctx";  // repeats the length in old files

const FamilySpec& learned_by(const Json& config, const std::string& path) {
  const auto type = config.find("model_type");
  DS_CHECK(type != config.end() && type->is_string(), Errc::Config,
           "{}: --positions needs model_type in config.json to find the position embedding", path);
  std::vector<std::string> learned;
  for (const FamilySpec* f : families()) {
    const bool has_embedding = !f->positions.embedding.empty();
    if (has_embedding) learned.push_back(fmt::format("\"{}\"", f->name));
    if (*type != f->name) continue;
    DS_CHECK(has_embedding, Errc::Config,
             "{}: --positions repeats a position embedding, and a model of type \"{}\" has none: it turns queries and "
             "keys by their positions; for longer sequences set max_position_embeddings and rope_scaling in its "
             "config.json",
             path, f->name);
    return *f;
  }
  throw Error(Errc::Unavailable, fmt::format("{}: --positions supports models of type {}, not of \"{}\"", path,
                                             fmt::join(learned, " and "), type->get<std::string>()));
}

void set_length(Json& config, const LearnedPositions& learned, i64 positions) {
  bool said = false;
  for (const std::string_view key : learned.lengths) {
    if (!config.contains(key)) continue;
    config[std::string(key)] = positions;
    said = true;
  }
  if (!said) config[std::string(learned.lengths.front())] = positions;
  if (config.contains(kOldKey)) config[kOldKey] = positions;
}

// The contents of the extended state, and their origin.
struct View {
  CheckpointMeta meta;
  std::vector<ParamEntry> params;
  std::vector<i64> origin;  // by entry of params: its number in the state
  i64 embedding = 0;        // which of params
  i64 period = 0;           // elements of it that the state has
};

class ExtendedState : public StateSource {
 public:
  ExtendedState(std::unique_ptr<StateSource> state, View view) : state_(std::move(state)), view_(std::move(view)) {}

  const std::string& path() const noexcept override { return state_->path(); }
  const CheckpointMeta& meta() const noexcept override { return view_.meta; }
  const std::vector<ParamEntry>& params() const noexcept override { return view_.params; }
  const std::vector<ForeignTensor>& foreign() const noexcept override { return state_->foreign(); }
  bool has(State s) const noexcept override { return state_->has(s); }
  std::unique_ptr<StateSource> reopen() const override {
    std::unique_ptr<StateSource> state = state_->reopen();
    return state ? std::make_unique<ExtendedState>(std::move(state), view_) : nullptr;
  }
  std::vector<std::string> files() const override { return state_->files(); }
  void check() override { state_->check(); }
  std::vector<std::string> verify(const Tick& tick) override { return state_->verify(tick); }

 private:
  void read_stored(State s, i64 param, i64 first, i64 count, char* out) override {
    const DType dtype = stored_dtype(s, param);
    const i64 origin = view_.origin[param];
    if (param != view_.embedding) return state_->read(s, dtype, origin, first, count, out);
    while (count > 0) {
      const i64 at = first % view_.period, n = std::min(count, view_.period - at);
      state_->read(s, dtype, origin, at, n, out);
      first += n;
      count -= n;
      out += n * dtype_bytes(dtype);
    }
  }
  void read_stored_slice(State s, i64 param, const model::ParamSlice& slice, i64 first, i64 count, char* out) override {
    if (param == view_.embedding) return StateSource::read_stored_slice(s, param, slice, first, count, out);
    state_->read(s, stored_dtype(s, param), view_.origin[param], slice, first, count, out);
  }

  std::unique_ptr<StateSource> state_;
  View view_;
};

// The number of the embedding among the parameters, which is a matrix with elements of its own.
i64 find_embedding(const StateSource& state, const FamilySpec& family) {
  const LearnedPositions& learned = family.positions;
  const std::string_view bare = learned.embedding.substr(family.prefix.size());
  const std::vector<ParamEntry>& params = state.params();
  auto it = std::ranges::find(params, learned.embedding, &ParamEntry::name);
  if (it == params.end()) it = std::ranges::find(params, bare, &ParamEntry::name);
  DS_CHECK(it != params.end(), Errc::Mismatch, "{}: {} is missing, the position embedding of a model of type \"{}\"",
           state.path(), learned.embedding, family.name);
  DS_CHECK(it->shape.size() == 2 && it->shape[0] > 0 && it->shape[1] > 0 && it->tied_to.empty(), Errc::Mismatch,
           "{}: {} is not a matrix of a row for each position", state.path(), it->name);
  return it - params.begin();
}

// The manifest's configuration of the run, where it describes the model itself.
std::string extend_run_config(const std::string& text, const LearnedPositions& learned, i64 positions) {
  Json config = Json::parse(text);
  const auto model = config.is_object() ? config.find("model") : config.end();
  if (model == config.end() || !model->is_object() || model->contains("path")) return text;
  set_length(*model, learned, positions);
  return config.dump();
}

}  // namespace

std::unique_ptr<StateSource> extend_positions(std::unique_ptr<StateSource> state, i64 positions,
                                              const std::string& named) {
  Json config = Json::parse(model_config_of(*state, named));
  const FamilySpec& family = learned_by(config, state->path());
  const LearnedPositions& learned = family.positions;
  const i64 embedding = find_embedding(*state, family);
  const ParamEntry& p = state->params()[embedding];
  const i64 before = p.shape[0];
  for (const std::string_view key : learned.lengths) {
    DS_CHECK(!config.contains(key) || config[key] == before, Errc::Mismatch,
             "{}: {} has {} rows, but {} of config.json is {}", state->path(), p.name, before, key, config[key].dump());
  }
  const auto kind = config.find("position_embedding_type");
  DS_CHECK(kind == config.end() || *kind == "absolute", Errc::Unavailable,
           "{}: --positions does not support positions of type {}", state->path(), kind->dump());
  DS_CHECK(positions >= before, Errc::Config,
           "{}: --positions {} is fewer than the {} that the model has: an embedding is repeated, never cut",
           state->path(), positions, before);
  DS_CHECK(positions <= kMostPositions, Errc::Config, "--positions {}: a model has at most {}", positions,
           kMostPositions);

  set_length(config, learned, positions);
  View view{.meta = state->meta(), .params = {}, .origin = {}, .period = before * p.shape[1]};
  view.meta.model_config_json = config.dump();
  view.meta.history.clear();  // no server has the states of this model
  if (!view.meta.config_json.empty())
    view.meta.config_json = extend_run_config(view.meta.config_json, learned, positions);
  std::vector<std::string> left_out;
  for (size_t i = 0; i < state->params().size(); ++i) {
    const ParamEntry& entry = state->params()[i];
    const std::string& owner = entry.tied_to.empty() ? entry.name : entry.tied_to;
    if (positions > before && owner.ends_with(learned.derived)) {
      left_out.push_back(entry.name);
      continue;
    }
    if (narrow<i64>(i) == embedding) view.embedding = std::ssize(view.params);
    view.params.push_back(entry);
    view.origin.push_back(narrow<i64>(i));
    if (owner == p.name) view.params.back().shape[0] = positions;
  }
  if (!left_out.empty())
    log_message(LogLevel::Warning, fmt::format("{}: left out, because they are computed from the old length:\n  {}",
                                               state->path(), first_lines(left_out)));
  return std::make_unique<ExtendedState>(std::move(state), std::move(view));
}

}  // namespace ds
