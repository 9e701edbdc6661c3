// SPDX-License-Identifier: Apache-2.0
// The search for arrangements that fit: each is a configuration, read as a run would read it, so that what is found is
// what ds-train accepts.

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
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

using Keys = std::vector<std::string>;

constexpr i64 kLargestMicro = 64;      // that is looked at in every arrangement
constexpr i64 kMostMicro = 1 << 20;    // of the largest
constexpr i64 kMostLayers = 2048;      // that are looked for: deeper models are not built
constexpr i64 kMostChunks = 8;         // of a stage's layers
constexpr size_t kMostCandidates = 4;  // for the largest model

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

// Calls run(0) to run(n - 1), as many at once as there are processors. Throws the last exception of one.
void for_each_at_once(size_t n, const std::function<void(size_t)>& run) {
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  {
    std::vector<std::jthread> workers;
    for (size_t i = 0; i < std::min<size_t>(n, std::max(1u, std::thread::hardware_concurrency())); ++i) {
      workers.emplace_back([&] {
        try {
          for (size_t k = next++; k < n; k = next++) run(k);
        } catch (...) {
          const std::lock_guard lock(mutex);
          failure = std::current_exception();
          next = n;
        }
      });
    }
  }
  if (failure) std::rethrow_exception(failure);
}

ConfigResult read_arranged(const Source& source, const Keys& keys, int ranks) {
  Keys overrides = source.overrides;
  overrides.insert(overrides.end(), keys.begin(), keys.end());
  return parse_config(source.text, source.name, overrides, ranks, ConfigUse::Inspect);
}

struct Schedule {
  PipelineSchedule kind = PipelineSchedule::OneFOneB;
  i64 chunks = 1;
  bool operator==(const Schedule&) const = default;
};

// A mesh, a stage of ZeRO, whether rows between matrices are cut, and the order of passes.
struct Frame {
  i64 tp = 1, pp = 1, sp = 1;
  int stage = 0;
  bool sequence_parallel = false;
  Schedule schedule = {};
};
Frame frame_of(const Arrangement& a) {
  return {a.mesh.tp, a.mesh.pp, a.mesh.sp, a.stage, a.sequence_parallel, {a.schedule, a.virtual_stages}};
}

// How many times a step's batch is cut.
struct Cut {
  i64 batch = 1, micro = 1, accumulation = 1;
};

// A key that says how a run is arranged. `follows`: no setting of its own, but what another one needs.
struct Setting {
  std::string key;
  bool follows = false;
};

// All of them: where `source` says more about one of them than is meant here, that too.
std::vector<Setting> settings_of(const Config& source, const Frame& f, const Cut& cut,
                                 CheckpointGranularity recompute) {
  std::vector<Setting> all = {
      {fmt::format("tensor_parallel.tp_size={}", f.tp)},
      {fmt::format("tensor_parallel.sequence_parallel={}", f.sequence_parallel)},
      {fmt::format("pipeline.stages={}", f.pp)},
      {fmt::format("sequence_parallel_size={}", f.sp)},
      {fmt::format("zero_optimization.stage={}", f.stage)},
      {fmt::format("zero_optimization.overlap_comm={}", f.stage > 0), true},
      {fmt::format("train_batch_size={}", cut.batch)},
      {fmt::format("train_micro_batch_size_per_gpu={}", cut.micro)},
      {fmt::format("gradient_accumulation_steps={}", cut.accumulation)},
      {fmt::format("activation_checkpointing.granularity={}", name_of(recompute))},
      {fmt::format("reduce_order={}", f.stage >= 2 || source.deterministic ? "micro" : "boundary"), true}};
  // Its second name.
  if (source.tensor_parallel.autotp_size > 1) all.push_back({"tensor_parallel.autotp_size=1", true});
  const ActivationCheckpointingConfig& again = source.activation_checkpointing;
  if (recompute != CheckpointGranularity::Layer) {
    if (again.interval != 1) all.push_back({"activation_checkpointing.interval=1", true});
    if (again.partition_activations) all.push_back({"activation_checkpointing.partition_activations=false", true});
    if (again.cpu_checkpointing) all.push_back({"activation_checkpointing.cpu_checkpointing=false", true});
  }
  const bool chunked = source.pipeline.virtual_stages > 1 || source.pipeline.schedule == PipelineSchedule::Interleaved;
  if (f.pp > 1 || chunked) {
    all.push_back({fmt::format("pipeline.schedule={}", schedule_name(f.schedule.kind))});
    all.push_back({fmt::format("pipeline.virtual_stages={}", f.schedule.chunks), true});
  }
  return all;
}

Keys keys_of(const std::vector<Setting>& settings) {
  Keys keys;
  for (const Setting& s : settings) keys.push_back(s.key);
  return keys;
}

// The source on one rank that is all there is.
ConfigResult read_unarranged(const Source& source) {
  const std::vector<Setting> settings =
      settings_of(source.config.config, {}, {}, source.config.config.activation_checkpointing.granularity);
  Keys keys;
  for (const Setting& s : settings) {
    if (!s.key.starts_with("train_") && !s.key.starts_with("gradient_")) keys.push_back(s.key);
  }
  keys.insert(keys.end(), {"train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=auto"});
  return read_arranged(source, keys, 1);
}

i64 batch_of(const Source& source) {
  const Config& c = source.config.config;
  if (source.config.ok() || source.ranks % std::max<i64>(1, c.ranks_per_replica()) == 0) return c.batch.train;
  const i64 batch = read_unarranged(source).config.batch.train;
  DS_CHECK(
      batch > 1, Errc::Config,
      "train_batch_size: nothing says how many samples a step has where the arrangement itself cannot be: give it");
  return batch;
}

class Search {
 public:
  Search(const Source& source, const FitOptions& options, const Hardware& hardware)
      : source_(source), options_(options), hardware_(hardware), batch_(batch_of(source)) {}

  FitResult run();

 private:
  std::vector<Frame> frames() const;
  Keys keys(const Frame& f, i64 micro, CheckpointGranularity recompute) const {
    return keys_of(settings_of(source_.config.config, f, cut(f, micro), recompute));
  }
  Cut cut(const Frame& f, i64 micro) const {
    const i64 dp = options_.world.ranks / (f.tp * f.pp * f.sp);
    return {batch_, micro, micro > 0 ? batch_ / dp / micro : 0};
  }
  std::optional<Config> read(const Keys& keys) const {
    ConfigResult r = read_arranged(source_, keys, options_.world.ranks);
    if (!r.ok()) return std::nullopt;
    return std::move(r.config);
  }
  // With neither memory nor time.
  Arrangement arrangement_of(const Config& config, Keys keys) const;
  // With the memory of all stages and nodes.
  Arrangement whole(const Config& config, Keys keys, Models& models) const;
  // Of the stages that need most, nearly always; more than `enough` where it is that much.
  i64 device_bytes(const Config& config, Models& models, i64 enough) const;
  bool fits(const Arrangement& a) const {
    return a.device_bytes <= options_.memory && (options_.host_memory == 0 || a.host_bytes <= options_.host_memory);
  }
  StepTime time_of(const Config& config) {
    return predict_time(config, options_.world, options_.device, hardware_, models_);
  }
  // What fits of a frame with this micro-batch, of what computes at least so much again the one that does least. With
  // the time that it would take if its stages were never idle.
  std::optional<Arrangement> try_one(const Frame& frame, i64 micro, CheckpointGranularity least);
  // What fits of a frame, for every micro-batch that does.
  void try_frame(const Frame& frame);
  // It with its own and with other schedules, and their times.
  std::vector<Arrangement> scheduled(const Arrangement& a);
  void list_fastest(FitResult& result);
  // Of what was found, sorted by speed.
  std::optional<Arrangement> nearest_to_present();
  i64 largest_micro(const Arrangement& best);
  // Of as many layers as fit into `config`; of 0 if none does.
  LargestModel largest_model(const Config& config, Keys keys) const;
  LargestModel largest_of_all();

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
  const PipelineConfig& present = source_.config.config.pipeline;
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
            if (rows && tp == 1) continue;
            // Of the schedules that keep stages busy 1F1B needs least: the others are looked at where it fits.
            all.push_back({tp, pp, sp, stage, rows});
            const Schedule own{present.schedule, present.virtual_stages};
            if (pp > 1 && own != Schedule()) all.push_back({tp, pp, sp, stage, rows, own});
          }
        }
      }
    }
  }
  return all;
}

Arrangement Search::arrangement_of(const Config& config, Keys keys) const {
  return {.keys = std::move(keys),
          .mesh = report::mesh_shape(config, options_.world.ranks),
          .stage = narrow<int>(config.zero.stage),
          .micro = config.batch.micro,
          .accumulation = config.batch.accumulation,
          .schedule = config.pipeline.schedule,
          .virtual_stages = config.pipeline.virtual_stages,
          .sequence_parallel = config.tensor_parallel.sequence_parallel,
          .recompute = config.activation_checkpointing.granularity,
          .time = {}};
}

Arrangement Search::whole(const Config& config, Keys keys, Models& models) const {
  const Prediction p = predict(config, options_.world, options_.device, models);
  Arrangement a = arrangement_of(config, std::move(keys));
  a.device_bytes = p.worst_group().device_bytes;
  a.host_bytes = p.fullest.host_bytes;
  return a;
}

i64 Search::device_bytes(const Config& config, Models& models, i64 enough) const {
  const MeshShape mesh = report::mesh_shape(config, options_.world.ranks);
  const std::vector<i64> cuts = models.cuts(config, mesh);
  i64 most = 0;
  // The ends have the vocabulary, and the first stages the most micro-batches under way.
  for (const int stage : std::set{0, std::min(1, mesh.pp - 1), mesh.pp - 1}) {
    const report::RunPlan plan = models.plan(config, mesh, {.pp = stage}, options_.device, cuts);
    const report::TagBytes own = models.own_memory(config, options_.world, plan);
    most = std::max(most, std::accumulate(own.begin(), own.end(), plan.total_memory()));
    if (most > enough) break;
  }
  return most;
}

std::optional<Arrangement> Search::try_one(const Frame& f, i64 micro, CheckpointGranularity least) {
  using enum CheckpointGranularity;
  struct Tried {
    Keys keys;
    std::optional<Config> config;
    bool fits = false;
  };
  const auto look = [&](CheckpointGranularity recompute) {
    ++tried_;
    Tried t{.keys = keys(f, micro, recompute), .config = {}};
    t.config = read(t.keys);
    t.fits = t.config && device_bytes(*t.config, models_, options_.memory) <= options_.memory;
    return t;
  };
  // Where it does not fit with all layers computed again, nothing else does; but passes that are split keep more then.
  Tried all_again = look(Layer);
  if (all_again.config && !all_again.fits && f.schedule.kind != PipelineSchedule::ZeroBubbleH1) return std::nullopt;
  Tried best;
  if (least == None) best = look(None);
  if (!best.fits && least != Layer) best = look(Selective);
  if (!best.fits) best = std::move(all_again);
  if (!best.fits) return std::nullopt;
  Arrangement a = arrangement_of(*best.config, std::move(best.keys));
  a.time = least_time(*best.config, options_.world, options_.device, hardware_, models_);
  return a;
}

void Search::try_frame(const Frame& f) {
  const i64 dp = options_.world.ranks / (f.tp * f.pp * f.sp);
  for (const i64 micro : divisors(batch_ / dp)) {
    if (micro > kLargestMicro) return;
    const Cut c = cut(f, micro);
    if (!schedule_problem({.stages = f.pp, .schedule = f.schedule.kind, .virtual_stages = f.schedule.chunks},
                          c.accumulation)
             .empty())
      continue;
    std::optional<Arrangement> a = try_one(f, micro, CheckpointGranularity::None);
    if (!a) return;  // larger ones need more
    const std::lock_guard lock(mutex_);
    found_.push_back(std::move(*a));
  }
}

bool faster(const Arrangement& a, const Arrangement& b) {
  return a.time.tokens_per_s != b.time.tokens_per_s ? a.time.tokens_per_s > b.time.tokens_per_s : a.keys < b.keys;
}

std::vector<Arrangement> Search::scheduled(const Arrangement& a) {
  const PipelineConfig& present = source_.config.config.pipeline;
  std::vector<Frame> frames = {frame_of(a)};
  const auto add = [&](Schedule s) {
    const PipelineConfig pipeline{.stages = a.mesh.pp, .schedule = s.kind, .virtual_stages = s.chunks};
    if (s == Schedule{present.schedule, present.virtual_stages} ||  // which has its own frame
        !schedule_problem(pipeline, a.accumulation).empty() ||
        a.mesh.pp * s.chunks > source_.config.config.model.layers + 2)
      return;
    frames.push_back(frames.front());
    frames.back().schedule = s;
  };
  if (a.mesh.pp > 1 && frames.front().schedule == Schedule()) {
    add({PipelineSchedule::ZeroBubbleH1, 1});
    for (i64 chunks = 2; chunks <= kMostChunks; ++chunks) add({PipelineSchedule::Interleaved, chunks});
  }
  std::vector<std::optional<Arrangement>> found(frames.size());
  found[0] = a;
  for_each_at_once(frames.size(), [&](size_t i) {
    if (i > 0) found[i] = try_one(frames[i], a.micro, a.recompute);
    if (found[i]) found[i]->time = time_of(*read(found[i]->keys));
  });
  std::vector<Arrangement> all;
  for (auto& f : found) {
    if (f) all.push_back(std::move(*f));
  }
  return all;
}

// Best first: what was found stands by the speed of stages that are never idle, which no schedule exceeds, until it is
// the first and its own speed, and that of other schedules, is looked at. What then comes first is the fastest of all.
void Search::list_fastest(FitResult& result) {
  struct Item {
    Arrangement found;
    bool timed = false;
    double tokens_per_s() const { return found.time.tokens_per_s; }
  };
  std::vector<Item> items;
  const auto below = [](const Item& a, const Item& b) {
    if (a.tokens_per_s() != b.tokens_per_s()) return a.tokens_per_s() < b.tokens_per_s();
    return a.timed != b.timed ? a.timed : a.found.keys > b.found.keys;
  };
  for (const Arrangement& a : found_) items.push_back({a});
  std::ranges::make_heap(items, below);
  result.num_fitting = std::ssize(found_);
  while (!items.empty() && result.fitting.size() < options_.most) {
    std::ranges::pop_heap(items, below);
    Item top = std::move(items.back());
    items.pop_back();
    if (!top.timed) {
      --result.num_fitting;
      for (Arrangement& a : scheduled(top.found)) {
        ++result.num_fitting;
        items.push_back({std::move(a), true});
        std::ranges::push_heap(items, below);
      }
      continue;
    }
    Arrangement all = whole(*read(top.found.keys), top.found.keys, models_);
    all.time = std::move(top.found.time);
    if (fits(all)) {
      result.fitting.push_back(std::move(all));
    } else {
      --result.num_fitting;
    }
  }
}

std::optional<Arrangement> Search::nearest_to_present() {
  const Config& present = source_.config.config;
  const Frame frame{present.tensor_parallel.tp_size,
                    present.pipeline.stages,
                    present.sequence_parallel_size,
                    narrow<int>(present.zero.stage),
                    present.tensor_parallel.sequence_parallel,
                    {present.pipeline.schedule, present.pipeline.virtual_stages}};
  const Keys own = keys_of(settings_of(present, frame, {batch_, present.batch.micro, present.batch.accumulation},
                                       present.activation_checkpointing.granularity));
  const std::set<std::string> same(own.begin(), own.end());
  struct Change {
    Keys keys;
    i64 settings = 0;  // but for those that follow
    double most_tokens_per_s = 0;
  };
  std::vector<Change> order;
  for (const Arrangement& a : found_) {
    Change change{.keys = {}, .most_tokens_per_s = a.time.tokens_per_s};
    for (const Setting& s : settings_of(present, frame_of(a), {batch_, a.micro, a.accumulation}, a.recompute)) {
      if (same.contains(s.key)) continue;
      change.keys.push_back(s.key);
      change.settings += s.follows ? 0 : 1;
    }
    order.push_back(std::move(change));
  }
  std::ranges::stable_sort(order, {}, &Change::settings);
  std::optional<Arrangement> nearest;
  i64 fewest = 0;
  for (Change& change : order) {
    if (nearest && (change.settings > fewest || change.most_tokens_per_s <= nearest->time.tokens_per_s)) break;
    const std::optional<Config> config = read(change.keys);
    if (!config) continue;
    Arrangement a = whole(*config, std::move(change.keys), models_);
    if (!fits(a)) continue;
    a.time = time_of(*config);
    if (!nearest || a.time.tokens_per_s > nearest->time.tokens_per_s) nearest = std::move(a);
    fewest = change.settings;
  }
  return nearest;
}

i64 Search::largest_micro(const Arrangement& best) {
  const auto fitting = [&](i64 micro) {
    Keys keys = best.keys;
    keys.push_back(fmt::format("train_micro_batch_size_per_gpu={}", micro));
    keys.push_back(fmt::format("train_batch_size={}", micro * best.accumulation * best.mesh.dp));
    const std::optional<Config> config = read(keys);
    return config && fits(whole(*config, keys, models_));
  };
  i64 low = best.micro, high = 2 * low;
  for (; high <= kMostMicro && fitting(high); high *= 2) low = high;
  high = std::min(high, kMostMicro);
  while (high - low > 1) {
    const i64 middle = low + (high - low) / 2;
    (fitting(middle) ? low : high) = middle;
  }
  return low;
}

Config with_layers(Config c, i64 layers) {
  c.model.layers = layers;
  if (c.model.sliding_window > 0) c.model.sliding_layers.resize(static_cast<size_t>(layers), c.model.sliding_layers[0]);
  return c;
}

LargestModel Search::largest_model(const Config& config, Keys keys) const {
  const i64 step = config.pipeline.stages * config.pipeline.virtual_stages;
  const auto layers_fit = [&](i64 layers) {
    Models models;
    const Config deep = with_layers(config, layers);
    return device_bytes(deep, models, options_.memory) <= options_.memory && fits(whole(deep, {}, models));
  };
  i64 low = step, high = kMostLayers / step * step + step;
  if (low > kMostLayers || !layers_fit(low)) return {};
  while (high - low > step) {
    const i64 middle = low + (high - low) / 2 / step * step;
    (layers_fit(middle) ? low : high) = middle;
  }
  const Config largest = with_layers(config, low);
  return {low, model::make_model(largest.model, largest.data.seq_length).num_params(), std::move(keys)};
}

// What a layer takes is the same for each: two depths tell how many there may be, nearly, and the best of these guesses
// are looked at closely.
LargestModel Search::largest_of_all() {
  struct Candidate {
    Config config;
    Keys keys;
    double layers = 0;
  };
  std::vector<Candidate> candidates;
  std::set<std::tuple<i64, i64, i64>> meshes;
  std::vector<Frame> all = frames();
  std::ranges::reverse(all);  // the highest stage of ZeRO and cut rows first: they take least
  for (const Frame& f : all) {
    if (f.schedule != Schedule() || meshes.contains({f.tp, f.pp, f.sp})) continue;
    Keys settings = keys(f, 1, CheckpointGranularity::Layer);
    std::optional<Config> config = read(settings);
    if (!config) continue;
    meshes.insert({f.tp, f.pp, f.sp});
    candidates.push_back({std::move(*config), std::move(settings)});
  }
  for_each_at_once(candidates.size(), [&](size_t i) {
    Candidate& c = candidates[i];
    const i64 pp = c.config.pipeline.stages, few = 2 * pp, more = 4 * pp;
    const auto bytes = [&](i64 layers) {
      Models models;
      Config deep = with_layers(c.config, layers);
      deep.batch.accumulation = std::min(deep.batch.accumulation, more);  // of which no more are under way at once
      return static_cast<double>(device_bytes(deep, models, std::numeric_limits<i64>::max()));
    };
    const double at_few = bytes(few), of_layer = (bytes(more) - at_few) / static_cast<double>(more - few);
    c.layers = static_cast<double>(few) + (static_cast<double>(options_.memory) - at_few) / of_layer;
  });
  std::ranges::stable_sort(candidates, std::greater(), &Candidate::layers);
  LargestModel largest;
  for (size_t i = 0; i < std::min(candidates.size(), kMostCandidates); ++i) {
    Candidate& c = candidates[i];
    if (c.layers < static_cast<double>(largest.layers)) break;
    LargestModel m = largest_model(c.config, std::move(c.keys));
    if (m.layers > largest.layers) largest = std::move(m);
  }
  return largest;
}

FitResult Search::run() {
  FitResult result;
  if (const Config& present = source_.config.config; source_.config.ok()) {
    result.present = whole(present, {}, models_);
    result.present_fits = fits(*result.present);
    result.present->time = time_of(present);
  }
  for (const Diagnostic& d : source_.config.diagnostics) {
    if (d.severity == Severity::Error) result.why_not.push_back(fmt::format("{}: {}", d.key, d.message));
  }
  const std::vector<Frame> all = frames();
  for_each_at_once(all.size(), [&](size_t i) { try_frame(all[i]); });
  std::ranges::sort(found_, faster);  // the order of workers must not show
  list_fastest(result);
  if (!result.present_fits) result.nearest = nearest_to_present();
  if (!result.fitting.empty()) {
    const Arrangement& best = result.fitting.front();
    result.largest_micro = largest_micro(best);
    result.largest = largest_model(*read(best.keys), best.keys);
  }
  result.largest_of_all = largest_of_all();
  if (result.largest.layers > result.largest_of_all.layers) result.largest_of_all = result.largest;
  result.num_tried = tried_;
  return result;
}

}  // namespace

bool can_be_rearranged(const Source& source) {
  const ConfigResult r = read_unarranged(source);
  return r.ok() && r.config.model.layers > 0;
}

Config arranged(const Source& source, const Arrangement& a) {
  ConfigResult r = read_arranged(source, a.keys, a.mesh.world());
  DS_CHECK(r.ok(), Errc::Internal, "{}", r.message());
  return std::move(r.config);
}

FitResult fit(const Source& source, const FitOptions& options, const Hardware& hardware) {
  DS_CHECK(options.memory > 0, Errc::Config, "a rank without memory fits nothing");
  return Search(source, options, hardware).run();
}

}  // namespace ds::memreport
