// SPDX-License-Identifier: Apache-2.0
// The search for arrangements that fit: each is a configuration, read as a run would read it, so that what is found is
// what ds-train accepts.

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <thread>

#include "config/parallel.h"
#include "ds/memreport.h"
#include "memreport/hardware.h"
#include "memreport/models.h"
#include "report/planned.h"

namespace ds::memreport {
namespace {

constexpr std::string_view kOverlap = "zero_optimization.overlap_comm=", kOrder = "reduce_order=";
constexpr i64 kLargestMicro = 64;
constexpr i64 kMostLayers = 2048;  // that are looked for: deeper models are not built

std::string_view name_of(CheckpointGranularity g) {
  return g == CheckpointGranularity::None ? "none" : g == CheckpointGranularity::Layer ? "layer" : "selective";
}

std::vector<i64> divisors(i64 n) {
  std::vector<i64> all;
  for (i64 d = 1; d <= n; ++d) {
    if (n % d == 0) all.push_back(d);
  }
  return all;
}

ConfigResult read_arranged(const Source& source, const std::vector<std::string>& keys, int ranks) {
  std::vector<std::string> overrides = source.overrides;
  overrides.insert(overrides.end(), keys.begin(), keys.end());
  return parse_config(source.text, source.name, overrides, ranks, ConfigUse::Inspect);
}

// A mesh, a stage of ZeRO, and whether rows between matrices are cut.
struct Frame {
  i64 tp = 1, pp = 1, sp = 1;
  int stage = 0;
  bool sequence_parallel = false;
};

class Search {
 public:
  Search(const Source& source, const FitOptions& options, const Hardware& hardware)
      : source_(source), options_(options), hardware_(hardware), batch_(source.config.config.batch.train) {}

  FitResult run();

 private:
  std::vector<Frame> frames() const;
  std::vector<std::string> keys_of(const Frame& frame, i64 micro, CheckpointGranularity recompute) const;
  std::optional<Config> read(const std::vector<std::string>& keys) const;
  // With time 0.
  Arrangement arrange(const Config& config, std::vector<std::string> keys, bool all_stages, Models& models) const;
  bool fits(const Arrangement& a) const {
    return a.device_bytes <= options_.memory && (options_.host_memory == 0 || a.host_bytes <= options_.host_memory);
  }
  // What fits of a frame, for every micro-batch that does.
  void try_frame(const Frame& frame);
  StepTime time_of(const Config& config) {
    return predict_time(config, options_.world, options_.device, hardware_, models_);
  }
  void largest_of(FitResult& result);
  // Of what was found, sorted by speed.
  std::optional<Arrangement> nearest_to(const Arrangement& present);

  const Source& source_;
  const FitOptions& options_;
  const Hardware& hardware_;
  const i64 batch_;
  Models models_;
  std::mutex mutex_;
  std::vector<Arrangement> found_;
  std::atomic<i64> tried_ = 0;
};

std::vector<Frame> Search::frames() const {
  const i64 ranks = options_.world.ranks, per_node = ranks / options_.world.nodes;
  const ModelConfig& model = source_.config.config.model;
  std::vector<Frame> all;
  for (const i64 tp : divisors(per_node)) {
    if (!tp_problem(model, tp).empty()) continue;
    for (const i64 sp : divisors(per_node / tp)) {
      if (sp > 1 && (model.heads / tp) % sp != 0) continue;
      for (const i64 pp : divisors(ranks / tp / sp)) {
        if (!stages_problem(model, pp).empty()) break;
        const i64 dp = ranks / (tp * sp * pp);
        if (batch_ % dp != 0) continue;
        for (int stage = 0; stage <= 3; ++stage) {
          if (stage > 0 && dp * sp == 1) break;  // nothing to cut over
          for (const bool rows : {false, true}) {
            if (!rows || tp > 1) all.push_back({tp, pp, sp, stage, rows});
          }
        }
      }
    }
  }
  return all;
}

std::vector<std::string> Search::keys_of(const Frame& f, i64 micro, CheckpointGranularity recompute) const {
  const i64 dp = options_.world.ranks / (f.tp * f.pp * f.sp);
  const Config& source = source_.config.config;
  std::vector<std::string> keys = {
      fmt::format("tensor_parallel.tp_size={}", f.tp),
      fmt::format("tensor_parallel.sequence_parallel={}", f.sequence_parallel),
      fmt::format("pipeline.stages={}", f.pp),
      fmt::format("sequence_parallel_size={}", f.sp),
      fmt::format("zero_optimization.stage={}", f.stage),
      fmt::format("{}{}", kOverlap, f.stage > 0),
      fmt::format("train_batch_size={}", batch_),
      fmt::format("train_micro_batch_size_per_gpu={}", micro),
      fmt::format("gradient_accumulation_steps={}", batch_ / dp / micro),
      fmt::format("activation_checkpointing.granularity={}", name_of(recompute)),
      fmt::format("{}{}", kOrder, f.stage >= 2 || source.deterministic ? "micro" : "boundary")};
  // What is said of layers that are computed again excludes others, and chunks of stages what they do not divide.
  const ActivationCheckpointingConfig& again = source.activation_checkpointing;
  if (recompute != CheckpointGranularity::Layer) {
    if (again.interval != 1) keys.push_back("activation_checkpointing.interval=1");
    if (again.partition_activations) keys.push_back("activation_checkpointing.partition_activations=false");
    if (again.cpu_checkpointing) keys.push_back("activation_checkpointing.cpu_checkpointing=false");
  }
  const i64 accumulation = batch_ / dp / micro;
  if (source.pipeline.virtual_stages > 1 &&
      (f.pp == 1 || accumulation % f.pp != 0 || f.pp * source.pipeline.virtual_stages > source.model.layers + 2)) {
    keys.push_back("pipeline.virtual_stages=1");
    keys.push_back("pipeline.schedule=1f1b");
  }
  return keys;
}

std::optional<Config> Search::read(const std::vector<std::string>& keys) const {
  ConfigResult r = read_arranged(source_, keys, options_.world.ranks);
  if (!r.ok()) return std::nullopt;
  return std::move(r.config);
}

Arrangement Search::arrange(const Config& config, std::vector<std::string> keys, bool all_stages,
                            Models& models) const {
  Arrangement a;
  a.keys = std::move(keys);
  a.mesh = report::mesh_shape(config, options_.world.ranks);
  a.stage = narrow<int>(config.zero.stage);
  a.micro = config.batch.micro;
  a.accumulation = config.batch.accumulation;
  a.sequence_parallel = config.tensor_parallel.sequence_parallel;
  a.recompute = config.activation_checkpointing.granularity;
  if (all_stages) {
    const Prediction p = predict(config, options_.world, options_.device, models);
    a.device_bytes = p.worst_group().device_bytes;
    a.host_bytes = p.fullest.host_bytes;
    return a;
  }
  // The ends have the vocabulary, and the first stages the most micro-batches under way.
  const std::vector<i64> cuts = models.cuts(config, a.mesh);
  for (const int stage : std::set{0, std::min(1, a.mesh.pp - 1), a.mesh.pp - 1}) {
    const report::RunPlan plan = models.plan(config, a.mesh, {.pp = stage}, options_.device, cuts);
    const report::TagBytes own = models.own_memory(config, options_.world, plan);
    a.device_bytes = std::max(a.device_bytes, std::accumulate(own.begin(), own.end(), plan.total_memory()));
  }
  return a;
}

void Search::try_frame(const Frame& f) {
  using enum CheckpointGranularity;
  const i64 dp = options_.world.ranks / (f.tp * f.pp * f.sp);
  for (const i64 micro : divisors(batch_ / dp)) {
    if (micro > kLargestMicro) return;
    bool fitted = false;
    for (const CheckpointGranularity recompute : {None, Selective, Layer}) {
      const std::vector<std::string> keys = keys_of(f, micro, recompute);
      const std::optional<Config> config = read(keys);
      ++tried_;
      if (!config) continue;
      Arrangement a = arrange(*config, keys, false, models_);
      if (!fits(a)) continue;
      fitted = true;
      a.time = time_of(*config);
      const std::lock_guard lock(mutex_);
      found_.push_back(std::move(a));
      break;  // computing more again only takes longer
    }
    if (!fitted) return;  // larger ones need more
  }
}

std::optional<Arrangement> Search::nearest_to(const Arrangement& present) {
  const Frame frame{present.mesh.tp, present.mesh.pp, present.mesh.sp, present.stage, present.sequence_parallel};
  const std::vector<std::string> settings = keys_of(frame, present.micro, present.recompute);
  const auto changes = [&](const Arrangement& a) {
    std::vector<std::string> keys;
    for (const std::string& key : a.keys) {
      const bool follows = key.starts_with(kOverlap) || key.starts_with(kOrder);  // from the stage of ZeRO
      if (follows ? a.stage != present.stage : std::ranges::find(settings, key) == settings.end()) keys.push_back(key);
    }
    return keys;
  };
  std::vector<std::vector<std::string>> order;
  for (const Arrangement& a : found_) order.push_back(changes(a));
  std::ranges::stable_sort(order, {}, &std::vector<std::string>::size);
  for (std::vector<std::string>& keys : order) {
    const std::optional<Config> config = read(keys);
    if (!config) continue;
    Arrangement whole = arrange(*config, std::move(keys), true, models_);
    if (!fits(whole)) continue;
    whole.time = time_of(*config);
    return whole;
  }
  return std::nullopt;
}

void Search::largest_of(FitResult& result) {
  const Arrangement& best = result.fitting.front();
  const auto fitting = [&](const std::vector<std::string>& more) {
    std::vector<std::string> keys = best.keys;
    keys.insert(keys.end(), more.begin(), more.end());
    std::optional<Config> config = read(keys);
    return config && fits(arrange(*config, keys, true, models_)) ? std::move(config) : std::nullopt;
  };
  const i64 of_rank = best.micro * best.accumulation;
  for (const i64 micro : divisors(of_rank)) {
    if (fitting({fmt::format("train_micro_batch_size_per_gpu={}", micro),
                 fmt::format("gradient_accumulation_steps={}", of_rank / micro)}))
      result.largest_micro = std::max(result.largest_micro, micro);
  }
  // More layers of the same width.
  std::optional<Config> config = read(best.keys);
  const i64 step = std::max<i64>(1, best.mesh.pp);
  const auto with = [&](i64 layers) {
    Config c = *config;
    c.model.layers = layers;
    if (c.model.sliding_window > 0)
      c.model.sliding_layers.resize(static_cast<size_t>(layers), c.model.sliding_layers[0]);
    return c;
  };
  i64 low = config->model.layers, high = low + step;
  const auto layers_fit = [&](i64 layers) {
    Models models;
    return fits(arrange(with(layers), {}, true, models));
  };
  while (low < kMostLayers && layers_fit(high)) {
    low = high;
    high = std::min(2 * high, std::max(kMostLayers, high));
  }
  while (high - low > step) {
    const i64 middle = low + (high - low) / 2 / step * step;
    (layers_fit(middle) ? low : high) = middle;
  }
  result.largest_layers = low;
  const Config largest = with(low);
  result.largest_params = model::make_model(largest.model, largest.data.seq_length).num_params();
}

FitResult Search::run() {
  FitResult result;
  const Config& present = source_.config.config;
  result.present = arrange(present, {}, true, models_);
  result.present_fits = fits(result.present);
  result.present.time = time_of(present);

  const std::vector<Frame> all = frames();
  std::atomic<size_t> next = 0;
  std::exception_ptr failure;
  {
    std::vector<std::jthread> workers;
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
      workers.emplace_back([&] {
        try {
          for (size_t k = next++; k < all.size(); k = next++) try_frame(all[k]);
        } catch (...) {
          const std::lock_guard lock(mutex_);
          failure = std::current_exception();
          next = all.size();
        }
      });
    }
  }
  if (failure) std::rethrow_exception(failure);
  // The order of workers must not show.
  std::ranges::sort(found_, [](const Arrangement& a, const Arrangement& b) {
    return a.time.tokens_per_s != b.time.tokens_per_s ? a.time.tokens_per_s > b.time.tokens_per_s : a.keys < b.keys;
  });
  result.num_tried = tried_;
  if (!result.present_fits) result.nearest = nearest_to(result.present);
  for (Arrangement& a : found_) {
    if (result.fitting.size() < options_.most) {  // with all stages and nodes looked at
      Arrangement whole = arrange(*read(a.keys), a.keys, true, models_);
      whole.time = std::move(a.time);
      if (!fits(whole)) continue;
      result.fitting.push_back(std::move(whole));
    }
    ++result.num_fitting;
  }
  if (!result.fitting.empty()) largest_of(result);
  return result;
}

}  // namespace

std::string written_config(const Source& source, const Arrangement& a) {
  const ConfigResult r = read_arranged(source, a.keys, a.mesh.world());
  DS_CHECK(r.ok(), Errc::Internal, "{}", r.message());
  return resolved_json(r.config) + "\n";
}

FitResult fit(const Source& source, const FitOptions& options, const Hardware& hardware) {
  DS_CHECK(options.memory > 0, Errc::Config, "a rank without memory fits nothing");
  return Search(source, options, hardware).run();
}

}  // namespace ds::memreport
