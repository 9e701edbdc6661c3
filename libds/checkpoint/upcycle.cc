// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/upcycle.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/hf_directory.h"
#include "config/model_config.h"
#include "model/models.h"

namespace ds {
namespace {

constexpr float kSmallRouter = 1e-6f;
constexpr std::string_view kMlp = "mlp.";

// A parameter of the mixture: parts of the dense model's, multiplied, or, if there are none, new values.
struct Made {
  Rearranged from;
  float factor = 1;
  model::ParamRow row;  // for new values
};

ModelConfig dense_model(const StateSource& state, const std::string& named) {
  std::string why;
  const std::optional<ModelConfig> model = known_model(Json::parse(model_config_of(state, named)), why);
  DS_CHECK(model, Errc::Unavailable, "{}: --upcycle needs a config.json of a supported model{}{}", state.path(),
           why.empty() ? "" : ": ", why);
  DS_CHECK(model->experts.count == 0, Errc::Config, "{}: --upcycle: the model has experts already", state.path());
  return *model;
}

// A property that a dense model and a mixture must share, beside those of which both config.json have keys; empty: they
// share all.
std::string difference(const ModelConfig& dense, const ModelConfig& mixture) {
  const auto differs = [&](auto member) { return dense.*member != mixture.*member; };
  if (dense.mlp_bias) return "mlp_bias is true, and experts have no biases";
  if (differs(&ModelConfig::attention_bias)) return "attention_bias differs";
  if (differs(&ModelConfig::output_bias)) return "attention_bias differs for the output projection";
  if (differs(&ModelConfig::qk_norm) || differs(&ModelConfig::whole_qk_norm)) return "norms of queries and keys differ";
  if (differs(&ModelConfig::activation)) return "hidden_act differs";
  if (differs(&ModelConfig::rotary_share)) return "partial_rotary_factor differs";
  if (differs(&ModelConfig::sliding_window) || differs(&ModelConfig::sliding_layers))
    return "windows of attention (sliding_window, layer_types) differ";
  if (dense.latent.on() != mixture.latent.on()) return "one has latent attention";
  return "";
}

// The mixture of the dense model's own family.
ModelConfig mixture_of(const ModelConfig& dense, const Upcycling& to, const std::string& path) {
  std::vector<std::string_view> dense_families;
  const FamilySpec* mixture = nullptr;
  for (const FamilySpec* f : families()) {
    if (!f->mixture.of) continue;
    dense_families.push_back(spec_of(*f->mixture.of).name);
    if (*f->mixture.of == dense.family) mixture = f;
  }
  DS_CHECK(
      mixture != nullptr, Errc::Unavailable,
      "{}: --upcycle: there is no family of mixtures of \"{}\"; there are those of {}. A config.json names another",
      path, type_name(dense), fmt::join(dense_families, ", "));
  DS_CHECK(to.per_token <= to.experts, Errc::Config, "--experts-per-token {}: there are {} experts", to.per_token,
           to.experts);
  ModelConfig m = dense;
  m.family = mixture->family;
  m.experts.count = to.experts;
  m.experts.per_token = to.per_token;
  m.experts.intermediate = dense.intermediate;
  m.experts.router.normalise = true;
  if (mixture->mixture.shared) {
    m.experts.shared = dense.intermediate;
    m.experts.shared_gate = true;
  }
  m.experts.layers.assign(static_cast<size_t>(dense.layers), true);
  std::string why;
  const std::optional<ModelConfig> read = known_model(Json::parse(model_config_json(m)), why);
  DS_CHECK(read, Errc::Unavailable, "{}: --upcycle: as a model of type \"{}\", {}", path, mixture->name, why);
  const std::string other = difference(dense, *read);
  DS_CHECK(other.empty(), Errc::Unavailable, "{}: --upcycle: a model of type \"{}\" cannot be the same: {}", path,
           mixture->name, other);
  return *read;
}

ModelConfig named_mixture(const ModelConfig& dense, const Upcycling& to, const std::string& path) {
  std::vector<Diagnostic> diagnostics;
  const ModelConfig m = read_model_file(to.config, diagnostics);
  for (const Diagnostic& d : diagnostics)
    DS_CHECK(d.severity != Severity::Error, d.code, "--upcycle {}: {}", to.config, to_string(d));
  DS_CHECK(m.experts.count > 0, Errc::Config, "--upcycle {}: the model has no experts", to.config);
  DS_CHECK(std::ranges::find(m.experts.layers, true) != m.experts.layers.end(), Errc::Config,
           "--upcycle {}: no block of the model has experts", to.config);
  DS_CHECK(!m.experts.plain, Errc::Unavailable, "--upcycle {}: experts with biases are not made of dense layers yet",
           to.config);
  ModelConfig without = m;
  without.family = dense.family;
  without.experts = {};
  without.intermediate = dense.intermediate;
  check_same_model(Json::parse(model_config_json(dense)), without, fmt::format("--upcycle {}: {}", to.config, path));
  const std::string other = difference(dense, m);
  DS_CHECK(other.empty(), Errc::Mismatch, "--upcycle {}: not the same model as {}: {}", to.config, path, other);
  DS_CHECK(m.experts.intermediate == dense.intermediate, Errc::Mismatch,
           "--upcycle {}: an expert is {} wide, but the MLP that it begins as is {} wide ({})", to.config,
           m.experts.intermediate, dense.intermediate, path);
  DS_CHECK(m.experts.shared == 0 || m.experts.shared == dense.intermediate, Errc::Mismatch,
           "--upcycle {}: the shared expert is {} wide, but the MLP that it begins as is {} wide ({})", to.config,
           m.experts.shared, dense.intermediate, path);
  return m;
}

// The sum of the weights of a token's choices, if all logits are equal.
float sum_of_weights(const ExpertsConfig& x) {
  const float one = x.router.sigmoid ? 0.5f : 1 / static_cast<float>(x.count);
  return x.router.scale * (x.router.normalise ? 1 : one * static_cast<float>(x.per_token));
}

class UpcycledState final : public StateSource {
 public:
  UpcycledState(std::unique_ptr<StateSource> state, CheckpointMeta meta, std::vector<ParamEntry> params,
                std::vector<Made> made)
      : state_(std::move(state)), meta_(std::move(meta)), params_(std::move(params)), made_(std::move(made)) {}

  const std::string& path() const noexcept override { return state_->path(); }
  const CheckpointMeta& meta() const noexcept override { return meta_; }
  const std::vector<ParamEntry>& params() const noexcept override { return params_; }
  const std::vector<ForeignTensor>& foreign() const noexcept override { return state_->foreign(); }
  bool has(State s) const noexcept override { return s == State::Param; }
  std::unique_ptr<StateSource> reopen() const override {
    std::unique_ptr<StateSource> state = state_->reopen();
    return state ? std::make_unique<UpcycledState>(std::move(state), meta_, params_, made_) : nullptr;
  }
  std::vector<std::string> files() const override { return state_->files(); }
  void check() override { state_->check(); }
  std::vector<std::string> verify(const Tick& tick) override { return state_->verify(tick); }

 private:
  void read_stored(State, i64 param, i64 first, i64 count, char* out) override {
    const Made& m = made_[static_cast<size_t>(param)];
    const DType dtype = stored_dtype(State::Param, param);
    const bool as_it_is = !m.from.parts.empty() && m.factor == 1;
    if (!as_it_is) values_.resize(static_cast<size_t>(count));
    if (m.from.parts.empty()) {
      model::init_values(m.row, param, 0, first, count, values_.data());
    } else {
      m.from.for_each_range(first, count, [&](size_t tensor, i64 begin, i64 n, i64 done) {
        char* const to = as_it_is ? out + done * dtype_bytes(dtype) : reinterpret_cast<char*>(values_.data() + done);
        state_->read(State::Param, as_it_is ? dtype : DType::F32, static_cast<i64>(tensor), begin, n, to);
      });
    }
    if (as_it_is) return;
    for (float& x : values_) x *= m.factor;
    convert_elements(dtype, out, DType::F32, values_.data(), count);
  }

  std::unique_ptr<StateSource> state_;
  CheckpointMeta meta_;
  std::vector<ParamEntry> params_;
  std::vector<Made> made_;
  std::vector<float> values_;
};

// Makes the list of the mixture's parameters, in the order of the dense model's.
class Maker {
 public:
  Maker(const StateSource& state, const ModelConfig& mixture)
      : state_(state),
        config_(mixture),
        model_(model::make_model(mixture, 1)),
        prefix_(spec_of(mixture.family).prefix) {
    for (const model::ParamRow* row : model_.params()) rows_.emplace(bare(row->name), row);
    for (size_t i = 0; i < state.params().size(); ++i) numbers_.emplace(bare(state.params()[i].name), i);
    const float part = config_.experts.shared > 0 ? 0.5f : 1;
    expert_factor_ = part / sum_of_weights(config_.experts);
    shared_factor_ = config_.experts.shared > 0 && !config_.experts.shared_gate ? part : 1;  // the gate begins at 1/2
  }

  void make() {
    for (size_t i = 0; i < state_.params().size(); ++i) {
      const ParamEntry& p = state_.params()[i];
      const std::string_view name = bare(p.name), block = block_of(name);
      if (block.empty() || rows_.contains(name)) {
        add(p, {.from = {p.name, p.shape, {{i, 0}}}, .row = {}});
      } else if (made_blocks_.emplace(block).second) {
        make_block(block, p);
      }
    }
    for (const auto& [name, row] : rows_) {
      if (!names_.contains(name) && std::ranges::find(model_.ties, name, &model::Tie::alias) == model_.ties.end())
        missing_.emplace_back(name);
    }
    DS_CHECK(missing_.empty(), Errc::Mismatch, "{} lacks weights that --upcycle needs:\n  {}", state_.path(),
             first_lines(missing_));
  }

  std::vector<ParamEntry> params;
  std::vector<Made> made;

 private:
  std::string_view bare(std::string_view name) const {
    return name.starts_with(prefix_) ? name.substr(prefix_.size()) : name;
  }
  // "layers.3." of "layers.3.mlp.up_proj.weight"; empty for what is not of an MLP.
  static std::string_view block_of(std::string_view name) {
    const size_t at = name.find(std::string(".") + std::string(kMlp));
    return at == name.npos ? std::string_view{} : name.substr(0, at + 1);
  }

  void add(ParamEntry entry, Made m) {
    names_.emplace(bare(entry.name));
    params.push_back(std::move(entry));
    made.push_back(std::move(m));
  }

  // All parameters that the mixture has in the MLP of this block.
  void make_block(std::string_view block, const ParamEntry& like) {
    const std::string_view prefix = like.name.starts_with(prefix_) ? prefix_ : std::string_view{};
    for (const model::ParamRow* row : model_.params()) {
      const std::string_view name = bare(row->name);
      if (block_of(name) != block) continue;
      ParamEntry entry{fmt::format("{}{}", prefix, name), row->whole_shape(), "", like.dtype};
      if (row->balances >= 0) entry.dtype = DType::F32;
      Made m = make_row(*row, block, name.substr(block.size() + kMlp.size()));
      add(std::move(entry), std::move(m));
    }
  }

  // The beginning of `part` of a block's MLP.
  Made make_row(const model::ParamRow& row, std::string_view block, std::string_view part) {
    Made m{.from = {row.name, row.whole_shape(), {}}, .row = row};
    m.row.init = model::Init::Zeros;
    const auto from = [&](std::string_view matrix) { take(m, block, matrix); };
    if (part == "experts.gate_up_proj") {
      for (i64 e = 0; e < config_.experts.count; ++e) from("gate_proj"), from("up_proj");
    } else if (part == "experts.down_proj") {
      m.factor = expert_factor_;
      for (i64 e = 0; e < config_.experts.count; ++e) from("down_proj");
    } else if (part == "gate.weight") {
      m.row.init = model::Init::Normal;
      m.row.std = config_.experts.router.normalise ? config_.initializer_range : kSmallRouter;
    } else if (part.starts_with(fmt::format("{}.", spec_of(config_.family).experts.shared))) {
      const std::string_view matrix = part.substr(part.find('.') + 1);
      if (matrix == "down_proj.weight") m.factor = shared_factor_;
      from(matrix.substr(0, matrix.find('.')));
    }
    return m;  // else the gate of a shared expert, or balancing biases: zeros
  }

  void take(Made& m, std::string_view block, std::string_view matrix) {
    const auto found = numbers_.find(fmt::format("{}{}{}.weight", block, kMlp, matrix));
    if (found == numbers_.end()) return missing_.push_back(fmt::format("{}{}{}.weight", block, kMlp, matrix));
    m.from.parts.push_back({found->second, 0});
  }

  const StateSource& state_;
  const ModelConfig& config_;
  model::Model model_;
  std::string_view prefix_;
  float expert_factor_ = 1, shared_factor_ = 1;
  std::map<std::string_view, const model::ParamRow*> rows_;  // of the mixture, by bare name
  std::map<std::string, size_t, std::less<>> numbers_;       // of the dense model's parameters, by bare name
  std::set<std::string, std::less<>> names_, made_blocks_;
  std::vector<std::string> missing_;
};

}  // namespace

std::unique_ptr<StateSource> upcycle(std::unique_ptr<StateSource> state, const Upcycling& to,
                                     const std::string& named) {
  const ModelConfig dense = dense_model(*state, named);
  const ModelConfig mixture =
      to.config.empty() ? mixture_of(dense, to, state->path()) : named_mixture(dense, to, state->path());
  Maker maker(*state, mixture);
  maker.make();
  CheckpointMeta meta;
  meta.work_dtype = state->meta().work_dtype;
  meta.model_config_json = publish_model(Json::parse(model_config_of(*state, named)), mixture).dump();
  meta.metadata = state->meta().metadata;
  return std::make_unique<UpcycledState>(std::move(state), std::move(meta), std::move(maker.params),
                                         std::move(maker.made));
}

}  // namespace ds
