// SPDX-License-Identifier: Apache-2.0
// The search for arrangements that fit: each is a configuration, read as a run would read it, so that what is found is
// what ds-train accepts.

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

#include "base/thread.h"
#include "config/parallel.h"
#include "ds/memreport.h"
#include "memreport/arrangement.h"
#include "memreport/hardware.h"
#include "memreport/models.h"
#include "mesh/from_config.h"
#include "plan/planned.h"

namespace ds::memreport {
namespace {

constexpr i64 kLargestMicro = 64;      // that is looked at in every arrangement
constexpr i64 kMostMicro = 1 << 20;    // of the largest
constexpr i64 kMostLayers = 2048;      // that are looked for: deeper models are not built
constexpr i64 kMostChunks = 8;         // of a stage's layers
constexpr size_t kMostCandidates = 4;  // for the largest model

std::vector<i64> divisors(i64 n, i64 most) {
  std::vector<i64> all;
  for (i64 d = 1; d <= std::min(n, most); ++d) {
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
    const auto work = [&] {
      try {
        for (size_t k = next++; k < n; k = next++) run(k);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
        next = n;
      }
    };
    const size_t at_once = std::clamp<size_t>(n, 1, std::max(1u, std::thread::hardware_concurrency()));
    try {
      for (size_t i = 1; i < at_once; ++i) workers.push_back(start_thread("a thread of the search", work));
    } catch (...) {
      next = n;
      throw;
    }
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

class Search {
 public:
  Search(const Source& source, const FitOptions& options, const Hardware& hardware)
      : source_(source), options_(options), hardware_(hardware), batch_(batch_of(source)) {
    std::error_code unknown;  // of another machine's disk, which may have any room
    const std::filesystem::space_info space = std::filesystem::space(options.disk, unknown);
    if (!options.disk.empty() && !unknown)
      disk_free_ = static_cast<i64>(std::min<std::uintmax_t>(space.available, std::numeric_limits<i64>::max()));
  }

  FitResult run();

 private:
  std::vector<Frame> frames() const;
  Keys keys(const Frame& f, i64 micro, CheckpointGranularity recompute) const {
    return keys_of(settings_of(source_.config.config, f, cut(f, micro), recompute, options_.disk));
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
  // Whether what is offloaded is searched: the source offloads nothing itself.
  bool searches_offload() const noexcept {
    const ZeroConfig& z = source_.config.config.zero;
    return !options_.disk.empty() && (options_.device == DeviceKind::Cpu || hardware_.state().machine.knows_host()) &&
           z.offload_optimizer.device == OffloadDevice::None && z.offload_param.device == OffloadDevice::None &&
           source_.config.config.activation_checkpointing.nvme_path.empty();
  }
  // With the memory of all stages and nodes.
  Arrangement whole(const Config& config, Keys keys, Models& models) const;
  // The need of the fullest stage, nearly always; more than `enough` if it needs that much, if the disk has no room
  // for what they have in files, and where there is no such plan on this device.
  i64 device_bytes(Config config, Models& models, i64 enough) const;
  bool fits(const Arrangement& a) const {
    return a.device_bytes <= options_.memory && (options_.host_memory == 0 || a.host_bytes <= options_.host_memory);
  }
  StepTime time_of(const Config& config) {
    return predict_time(config, options_.world, options_.device, hardware_, models_);
  }
  // run(0) to run(n - 1), told as "what: so many of n".
  void for_each(std::string_view what, size_t n, const std::function<void(size_t)>& run) const;
  void tell(std::string_view what) const {
    if (options_.on_progress) options_.on_progress(what);
  }
  struct Tried {
    Keys keys;
    std::optional<Config> config;  // none: not legal
    bool fits = false;
  };
  Tried look(const Frame& frame, i64 micro, CheckpointGranularity recompute);
  // An arrangement that fits, with the least time that it can take.
  struct Found {
    Arrangement as;
    double most_tokens_per_s = 0;  // with any schedule
  };
  Found found_as(const Tried& tried);
  // The arrangement of a frame with this micro-batch that fits and recomputes least, at least so much.
  std::optional<Found> try_one(const Frame& frame, i64 micro, CheckpointGranularity least);
  // Adds the arrangements of a frame that fit, for every micro-batch.
  void try_frame(const Frame& frame);
  // The same with other schedules.
  std::vector<Found> rescheduled(const Arrangement& a);
  void list_fastest(FitResult& result);
  std::optional<Arrangement> nearest_to_present();
  i64 largest_micro(const Arrangement& best);
  // The model of as many layers as fit into `config`; of 0 if none does.
  LargestModel largest_model(const Config& config, Keys keys) const;
  LargestModel largest_of_all();

  const Source& source_;
  const FitOptions& options_;
  const Hardware& hardware_;
  const i64 batch_;
  i64 disk_free_ = std::numeric_limits<i64>::max();
  Models models_;
  std::mutex mutex_;
  bool present_fits_ = false;
  std::vector<Found> found_, near_;  // near_: to the source, which computes more again than it must
  std::atomic<i64> tried_ = 0;
};

void Search::for_each(std::string_view what, size_t n, const std::function<void(size_t)>& run) const {
  std::mutex mutex;
  size_t done = 0;
  for_each_at_once(n, [&](size_t i) {
    run(i);
    const std::lock_guard lock(mutex);
    tell(fmt::format("{}: {} of {}", what, ++done, n));
  });
}

// The V of these stages that keeps fewest activations.
Schedule least_v(i64 stages) {
  return {PipelineSchedule::ZeroBubbleV, 2,
          static_cast<double>(least_kept_passes(stages)) / static_cast<double>(2 * stages)};
}

// Each frame with the experts of the model over so many ranks as can have them.
std::vector<Frame> with_experts(std::vector<Frame> frames, const ModelConfig& model, i64 ranks) {
  if (model.experts.count == 0) return frames;
  std::vector<Frame> all;
  for (Frame f : frames) {
    const i64 dp = ranks / (f.tp * f.pp * f.sp);
    for (f.ep = 1; f.ep <= dp; ++f.ep) {
      if (ep_problem(model, f.tp, dp, f.ep).empty()) all.push_back(f);
    }
  }
  return all;
}

std::vector<Frame> Search::frames() const {
  const i64 ranks = options_.world.ranks, per_node = ranks / options_.world.nodes;
  const ModelConfig& model = source_.config.config.model;
  const PipelineConfig& present = source_.config.config.pipeline;
  std::vector<Frame> all;
  for (const i64 tp : divisors(per_node, per_node)) {
    if (!tp_problem(model, tp).empty()) continue;
    for (const i64 sp : divisors(per_node / tp, per_node)) {
      if (sp > 1 && (model.heads / tp) % sp != 0) continue;
      for (const i64 pp : divisors(ranks / tp / sp, ranks)) {
        if (!stages_problem(model, pp).empty()) break;
        const i64 dp = ranks / (tp * sp * pp);
        if (batch_ % dp != 0) continue;
        for (int stage = 0; stage <= 3; ++stage) {
          if (stage > 0 && dp * sp == 1 && !searches_offload())
            break;  // nothing to cut over, and nothing to compare with
          for (const bool rows : {false, true}) {
            if (rows && tp == 1) continue;
            // Schedules that need least memory, of one chunk per stage and of a V: others are tried where they fit.
            all.push_back({tp, pp, sp, stage, rows});
            if (pp > 1 && 2 * pp <= num_layers(model)) all.push_back({tp, pp, sp, stage, rows, least_v(pp)});
            const Schedule own{present.schedule, present.virtual_stages, present.memory_limit};
            if (own != Schedule() && own != least_v(pp) && (pp > 1 || own.kind == PipelineSchedule::BreadthFirst))
              all.push_back({tp, pp, sp, stage, rows, own});
          }
        }
        for (const bool rows : {false, true}) {
          if (!searches_offload() || (rows && tp == 1)) continue;
          for (const int stage : {1, 2, 3}) all.push_back({tp, pp, sp, stage, rows, {}, Offloaded::StatesToFiles});
          all.push_back({tp, pp, sp, 3, rows, {}, Offloaded::AllToFiles});
          if (options_.device == DeviceKind::Cuda) {
            for (const int stage : {1, 2, 3}) all.push_back({tp, pp, sp, stage, rows, {}, Offloaded::StatesToHost});
            all.push_back({tp, pp, sp, 3, rows, {}, Offloaded::AllToHost});
          }
          if (pp > 1) continue;
          // Parameters are read once for all micro-batches then, whose activations are all kept.
          const Schedule layer_by_layer{PipelineSchedule::BreadthFirst, num_layers(model)};
          all.push_back({tp, pp, sp, 3, rows, layer_by_layer, Offloaded::AllToFiles});
        }
      }
    }
  }
  return with_experts(std::move(all), model, ranks);
}

Offloaded offloaded_of(const ZeroConfig& z) noexcept {
  const bool params = z.offload_param.device != OffloadDevice::None;
  switch (z.offload_optimizer.device) {
    case OffloadDevice::Nvme: return params ? Offloaded::AllToFiles : Offloaded::StatesToFiles;
    case OffloadDevice::Cpu: return params ? Offloaded::AllToHost : Offloaded::StatesToHost;
    default: return Offloaded::AsItIs;
  }
}

Arrangement Search::arrangement_of(const Config& config, Keys keys) const {
  return {.keys = std::move(keys),
          .mesh = mesh_shape(config, options_.world.ranks),
          .stage = narrow<int>(config.zero.stage),
          .micro = config.batch.micro,
          .accumulation = config.batch.accumulation,
          .schedule = config.pipeline.schedule,
          .virtual_stages = config.pipeline.virtual_stages,
          .memory_limit = config.pipeline.memory_limit,
          .sequence_parallel = config.tensor_parallel.sequence_parallel,
          .recompute = config.activation_checkpointing.granularity,
          .offloaded = searches_offload() ? offloaded_of(config.zero) : Offloaded::AsItIs,
          .ep = config.expert_parallel.size,
          .time = {}};
}

Arrangement Search::whole(const Config& config, Keys keys, Models& models) const {
  struct Bytes {
    i64 device, host;
  };
  const Bytes bytes = of_any_length(
      config,
      [&](const Config& c) {
        const Prediction p = predict(c, options_.world, options_.device, models);
        return Bytes{p.worst_group().device_bytes, p.fullest.host_bytes};
      },
      [](const Bytes& a, const Bytes& b, double times) {
        const i64 n = static_cast<i64>(times);
        return Bytes{b.device + (b.device - a.device) * n, b.host + (b.host - a.host) * n};
      });
  Arrangement a = arrangement_of(config, std::move(keys));
  a.device_bytes = bytes.device;
  a.host_bytes = bytes.host;
  return a;
}

i64 Search::device_bytes(Config config, Models& models, i64 enough) const {
  config = plan::of_whole_sequences(std::move(config));  // which nearly all is of, and all lengths would take long
  const MeshShape mesh = mesh_shape(config, options_.world.ranks);
  const std::vector<i64> cuts = models.cuts(config, mesh);
  // So many micro-batches have all that a schedule has under way at once, unless it has all of them; what more of them
  // need is their tokens and losses.
  const PipelineSchedule schedule = pipeline::schedule_of(config).kind;
  const bool has_all = schedule == PipelineSchedule::GPipe || schedule == PipelineSchedule::BreadthFirst ||
                       config.zero.tile_size > 0;  // whose number in a step is limited
  const i64 more =
      has_all ? 0 : config.batch.accumulation - 4 * config.pipeline.stages * config.pipeline.virtual_stages;
  i64 most = 0, tokens = 0;
  if (more > 0) {
    config.batch.accumulation -= more;
    tokens = more * (2 * config.batch.micro * (config.data.seq_length / mesh.sp) * 4 + zero::num_shards(mesh) * 8);
  }
  // The ends have the vocabulary, and the first stages the most micro-batches under way.
  for (const int stage : std::set{0, std::min(1, mesh.pp - 1), mesh.pp - 1}) {
    std::optional<plan::RunPlan> planned;
    try {
      planned = models.plan(config, mesh, {.pp = stage}, options_.device, cuts);
    } catch (const Error& e) {
      if (e.code() != Errc::Unavailable) throw;
      return std::numeric_limits<i64>::max();
    }
    const plan::RunPlan& plan = *planned;
    const plan::TagBytes own = models.own_memory(config, options_.world, plan);
    most = std::max(most, std::accumulate(own.begin(), own.end(), plan.total_memory() + tokens));
    if (const i64 per_node = options_.world.ranks / options_.world.nodes;
        enough < std::numeric_limits<i64>::max() && searches_offload() &&
        per_node * std::accumulate(plan.memory.files.begin(), plan.memory.files.end(), i64{0}) > disk_free_)
      return std::numeric_limits<i64>::max();
    if (most > enough) break;
  }
  return most;
}

Search::Tried Search::look(const Frame& f, i64 micro, CheckpointGranularity recompute) {
  ++tried_;
  Tried t{.keys = keys(f, micro, recompute), .config = {}};
  t.config = read(t.keys);
  t.fits = t.config && device_bytes(*t.config, models_, options_.memory) <= options_.memory;
  return t;
}

Search::Found Search::found_as(const Tried& t) {
  Found found{.as = arrangement_of(*t.config, t.keys)};
  const LeastTime least = least_time(*t.config, options_.world, options_.device, hardware_, models_);
  found.as.time = least.own;
  found.most_tokens_per_s = least.any_cut.tokens_per_s;
  return found;
}

std::optional<Search::Found> Search::try_one(const Frame& f, i64 micro, CheckpointGranularity least) {
  using enum CheckpointGranularity;
  // If it does not fit with all layers computed again, nothing else does; but passes that are split keep more then.
  const Tried all_again = look(f, micro, Layer);
  if (all_again.config && !all_again.fits && !pipeline::splits_backward(f.schedule.kind)) return std::nullopt;
  for (const CheckpointGranularity recompute : {None, Selective}) {
    if (least == Layer || (least == Selective && recompute == None)) continue;
    if (const Tried t = look(f, micro, recompute); t.fits) return found_as(t);
  }
  if (!all_again.fits) return std::nullopt;
  return found_as(all_again);
}

void Search::try_frame(const Frame& f) {
  const i64 dp = options_.world.ranks / (f.tp * f.pp * f.sp);
  const CheckpointGranularity own = source_.config.config.activation_checkpointing.granularity;
  for (const i64 micro : divisors(batch_ / dp, kLargestMicro)) {
    const PipelineConfig pipeline{.stages = f.pp,
                                  .schedule = f.schedule.kind,
                                  .virtual_stages = f.schedule.chunks,
                                  .memory_limit = f.schedule.memory_limit,
                                  .post_validate = source_.config.config.pipeline.post_validate};
    if (!schedule_problem(pipeline, cut(f, micro).accumulation).empty()) continue;
    if (f.schedule.kind == PipelineSchedule::BreadthFirst && cut(f, micro).accumulation == 1) continue;  // all the same
    std::optional<Found> a = try_one(f, micro, CheckpointGranularity::None);
    if (!a && read(keys(f, micro, CheckpointGranularity::Layer))) return;  // larger ones need more
    if (!a) continue;
    // An arrangement that recomputes more than it must may be near to a source that does.
    std::optional<Found> near;
    if (!present_fits_ && a->as.recompute != own && a->as.recompute != CheckpointGranularity::Layer) {
      if (const Tried t = look(f, micro, own); t.fits) near = found_as(t);
    }
    const std::lock_guard lock(mutex_);
    if (near) near_.push_back(std::move(*near));
    found_.push_back(std::move(*a));
  }
}

std::vector<Search::Found> Search::rescheduled(const Arrangement& a) {
  const PipelineConfig& present = source_.config.config.pipeline;
  std::vector<Frame> frames;
  const auto add = [&](Schedule s) {
    const PipelineConfig pipeline{.stages = a.mesh.pp,
                                  .schedule = s.kind,
                                  .virtual_stages = s.chunks,
                                  .memory_limit = s.memory_limit,
                                  .post_validate = present.post_validate};
    if (s == Schedule{present.schedule, present.virtual_stages, present.memory_limit} ||  // which has its own frame
        !schedule_problem(pipeline, a.accumulation).empty() ||
        a.mesh.pp * s.chunks > num_layers(source_.config.config.model))
      return;
    frames.push_back(frame_of(a));
    frames.back().schedule = s;
  };
  if (a.schedule == PipelineSchedule::ZeroBubbleV) {
    // V-Half, and all the memory of 1F1B; of two stages a V takes no less.
    const double stages = static_cast<double>(a.mesh.pp);
    for (const double limit : {(stages + 2) / (2 * stages), 1.0}) {
      if (a.mesh.pp > 2) add({PipelineSchedule::ZeroBubbleV, 2, limit});
    }
  } else {
    add({PipelineSchedule::ZeroBubbleH1, 1});
    add({PipelineSchedule::ZeroBubbleH2, 1});
    for (i64 chunks = 2; chunks <= kMostChunks; ++chunks) add({PipelineSchedule::Interleaved, chunks});
  }
  std::vector<std::optional<Found>> found(frames.size());
  tell(fmt::format("schedules of {} stages", a.mesh.pp));
  for_each_at_once(frames.size(), [&](size_t i) { found[i] = try_one(frames[i], a.micro, a.recompute); });
  std::vector<Found> fitting;
  for (auto& f : found) {
    if (f) fitting.push_back(std::move(*f));
  }
  return fitting;
}

// Best first, by what each can reach at most: another schedule of an arrangement by the least time with any cut of the
// layers, an arrangement by that of its own stages, and what has been simulated by its time. What comes first after
// that is the fastest of all. The order in which workers found it does not show.
void Search::list_fastest(FitResult& result) {
  enum class State : u8 { Timed, Bounded, OtherSchedules };
  struct Item {
    double tokens_per_s = 0;
    State state = State::Bounded;
    Arrangement found;
  };
  std::vector<Item> items;
  const auto below = [](const Item& a, const Item& b) {
    if (a.tokens_per_s != b.tokens_per_s) return a.tokens_per_s < b.tokens_per_s;
    return a.state != b.state ? a.state < b.state : a.found.keys > b.found.keys;
  };
  const auto push = [&](Item item) {
    items.push_back(std::move(item));
    std::ranges::push_heap(items, below);
  };
  for (const Found& f : found_) {
    // For one stage the bound is the time itself.
    push({f.as.time.tokens_per_s, f.as.mesh.pp == 1 ? State::Timed : State::Bounded, f.as});
    if (f.as.mesh.pp > 1 &&
        (f.as.schedule == PipelineSchedule::OneFOneB || frame_of(f.as).schedule == least_v(f.as.mesh.pp)))
      push({f.most_tokens_per_s, State::OtherSchedules, f.as});
  }
  result.num_fitting = std::ssize(found_);
  while (!items.empty() && result.fitting.size() < options_.most) {
    std::ranges::pop_heap(items, below);
    Item top = std::move(items.back());
    items.pop_back();
    Arrangement& a = top.found;
    if (top.state == State::OtherSchedules) {
      for (Found& f : rescheduled(a)) {
        ++result.num_fitting;
        push({f.as.time.tokens_per_s, State::Bounded, std::move(f.as)});
      }
    } else if (top.state == State::Bounded) {
      a.time = time_of(*read(a.keys));
      push({a.time.tokens_per_s, State::Timed, std::move(a)});
    } else {
      Arrangement all = whole(*read(a.keys), a.keys, models_);
      all.time = std::move(a.time);
      if (fits(all)) {
        result.fitting.push_back(std::move(all));
      } else {
        --result.num_fitting;
      }
    }
  }
}

std::optional<Arrangement> Search::nearest_to_present() {
  const Config& present = source_.config.config;
  const Frame frame{present.tensor_parallel.tp_size,
                    present.pipeline.stages,
                    present.sequence_parallel.size,
                    narrow<int>(present.zero.stage),
                    present.tensor_parallel.sequence_parallel,
                    {present.pipeline.schedule, present.pipeline.virtual_stages, present.pipeline.memory_limit},
                    Offloaded::AsItIs,
                    present.expert_parallel.size};
  std::set<std::string> same = {fmt::format("pipeline.schedule={}", schedule_name(present.pipeline.schedule)),
                                fmt::format("pipeline.virtual_stages={}", present.pipeline.virtual_stages)};
  for (const Setting& s :
       settings_of(present, frame, {}, present.activation_checkpointing.granularity, options_.disk)) {
    if (!s.is_cut) same.insert(s.key);
  }
  // The sizes of a batch that are not given follow from the others.
  const bool says_batch = says(source_, kTrain), says_micro = says(source_, kMicro),
             says_accumulation = says(source_, kAccumulation);
  const auto kept_cut = [&](i64 dp) -> Cut {
    const i64 each = batch_ / dp, accumulation = says_accumulation ? std::max<i64>(1, present.batch.accumulation) : 1;
    const i64 micro = says_micro ? std::max<i64>(1, present.batch.micro) : each / accumulation;
    return {batch_, micro, says_accumulation || micro == 0 ? accumulation : each / micro};
  };
  struct Change {
    Keys keys;
    i64 settings = 0;  // but for those that follow
    double most_tokens_per_s = 0;
  };
  std::vector<Change> order;
  for (const std::vector<Found>* some : {&found_, &near_}) {
    for (const Found& f : *some) {
      const Arrangement& a = f.as;
      Change change{.keys = {}, .most_tokens_per_s = a.time.tokens_per_s};
      const Cut kept = kept_cut(a.mesh.data_size());
      const bool keeps_batch = says_batch || kept.micro * kept.accumulation * a.mesh.data_size() == batch_;
      const Cut cut{batch_, a.micro, a.accumulation};
      for (const Setting& s : settings_of(present, frame_of(a), cut, a.recompute, options_.disk)) {
        const bool is_kept = s.key.starts_with(kTrain)   ? keeps_batch
                             : s.key.starts_with(kMicro) ? a.micro == kept.micro
                                                         : a.accumulation == kept.accumulation;
        if (s.is_cut ? is_kept : same.contains(s.key)) continue;
        change.keys.push_back(s.key);
        change.settings += s.follows ? 0 : 1;
      }
      order.push_back(std::move(change));
    }
  }
  std::ranges::sort(order, [](const Change& a, const Change& b) {
    if (a.settings != b.settings) return a.settings < b.settings;
    return a.most_tokens_per_s != b.most_tokens_per_s ? a.most_tokens_per_s > b.most_tokens_per_s : a.keys < b.keys;
  });
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
    keys.push_back(fmt::format("train_batch_size={}", micro * best.accumulation * best.mesh.data_size()));
    const std::optional<Config> config = read(keys);
    return config && device_bytes(*config, models_, options_.memory) <= options_.memory &&
           fits(whole(*config, keys, models_));
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

// Whether each layer is a chunk of its own, however many there are.
bool is_layer_by_layer(const Config& c) {
  return c.pipeline.stages == 1 && c.pipeline.virtual_stages == num_layers(c.model);
}

Config with_layers(Config c, i64 layers) {
  const bool layer_by_layer = is_layer_by_layer(c);
  c.model.layers = layers;
  if (layer_by_layer) c.pipeline.virtual_stages = num_layers(c.model);
  if (c.model.sliding_window > 0) c.model.sliding_layers.resize(static_cast<size_t>(layers), c.model.sliding_layers[0]);
  ExpertsConfig& experts = c.model.experts;
  if (experts.count > 0) experts.layers.resize(static_cast<size_t>(layers), true);
  if (!experts.counts.empty()) experts.counts.resize(static_cast<size_t>(layers), experts.count);
  if (!experts.loads.empty()) experts.loads.resize(static_cast<size_t>(layers));
  return c;
}

LargestModel Search::largest_model(const Config& config, Keys keys) const {
  const i64 step = is_layer_by_layer(config) ? 1 : config.pipeline.stages * config.pipeline.virtual_stages;
  const auto may_fit = [&](i64 layers) {
    Models models;
    return device_bytes(with_layers(config, layers), models, options_.memory) <= options_.memory;
  };
  const auto all_fits = [&](i64 layers) {
    Models models;
    return fits(whole(with_layers(config, layers), {}, models));
  };
  // Between what fits and what does not, in steps of so many.
  const auto bisect = [](i64 low, i64 high, i64 by, auto&& fitting) {
    while (high - low > by) {
      const i64 middle = low + std::max<i64>(1, (high - low) / 2 / by) * by;
      (fitting(middle) ? low : high) = middle;
    }
    return std::pair(low, high);
  };
  if (step > kMostLayers || !may_fit(step)) return {};
  auto [low, high] = bisect(step, kMostLayers + 1, step, may_fit);
  std::tie(low, high) = bisect(low, high, 1, may_fit);           // stages need not have equally many
  const i64 none = std::max<i64>(0, step - 1 - num_layers({}));  // fewer than one for each part, with both ends
  if (!all_fits(low)) low = bisect(none, low, 1, all_fits).first;
  if (low == none) return {};
  const Config largest = with_layers(config, low);
  constexpr std::string_view kChunks = "pipeline.virtual_stages=";
  for (std::string& key : keys) {
    if (key.starts_with(kChunks)) key = fmt::format("{}{}", kChunks, largest.pipeline.virtual_stages);
  }
  return {low, model::make_model(largest.model, largest.data.seq_length).num_params(), std::move(keys)};
}

// Each layer takes the same memory, except for buckets that few layers do not fill: two depths tell how many there
// may be, nearly, and two that are deeper better. The best of these guesses are looked at closely.
LargestModel Search::largest_of_all() {
  struct Candidate {
    Config config;
    Keys keys;
    double layers = 0;
  };
  std::vector<Candidate> candidates;
  for (const Frame& f : frames()) {
    const bool cut = options_.world.ranks > f.tp * f.pp;
    const bool other = f.schedule != Schedule() && f.schedule.kind != PipelineSchedule::BreadthFirst &&
                       !(f.pp > 1 && f.schedule == least_v(f.pp));
    if (other || (cut && f.stage < 2)) continue;  // lower stages need more
    Keys settings = keys(f, 1, CheckpointGranularity::Layer);
    std::optional<Config> config = read(settings);
    if (config) candidates.push_back({std::move(*config), std::move(settings)});
  }
  const auto guess = [&](Candidate& c, i64 few, i64 more) {
    const auto bytes = [&](i64 layers) {
      Models models;
      return static_cast<double>(device_bytes(with_layers(c.config, layers), models, std::numeric_limits<i64>::max()));
    };
    const double at_few = bytes(few), of_layer = (bytes(more) - at_few) / static_cast<double>(more - few);
    // A deeper model may gather less at a time.
    c.layers = of_layer > 0 ? static_cast<double>(few) + (static_cast<double>(options_.memory) - at_few) / of_layer
               : at_few <= static_cast<double>(options_.memory) ? static_cast<double>(kMostLayers)
                                                                : 0.0;
    c.layers = std::clamp(c.layers, 0.0, static_cast<double>(kMostLayers));
  };
  const auto keep_best = [&](size_t most) {
    std::ranges::stable_sort(candidates, std::greater(), &Candidate::layers);
    if (candidates.size() > most) candidates.resize(most);
  };
  for_each("the largest model of all", candidates.size(), [&](size_t i) {
    const i64 pp = candidates[i].config.pipeline.stages;
    guess(candidates[i], 2 * pp, 4 * pp);
  });
  keep_best(4 * kMostCandidates);
  for_each("the largest model of all, closer", candidates.size(), [&](size_t i) {
    Candidate& c = candidates[i];
    const i64 pp = c.config.pipeline.stages, layers = static_cast<i64>(c.layers) / pp * pp;
    if (layers > 4 * pp) guess(c, layers / 2, layers);
  });
  keep_best(kMostCandidates);
  std::vector<LargestModel> largest(candidates.size());
  for_each("the largest model of all, exactly", candidates.size(),
           [&](size_t i) { largest[i] = largest_model(candidates[i].config, std::move(candidates[i].keys)); });
  if (largest.empty()) return {};
  return *std::ranges::max_element(largest, {}, &LargestModel::layers);
}

FitResult Search::run() {
  FitResult result;
  if (const Config& present = source_.config.config; source_.config.ok()) {
    try {
      result.present = whole(present, {}, models_);
      present_fits_ = result.present_fits = fits(*result.present);
      result.present->time = time_of(present);
    } catch (const Error& e) {
      if (e.code() != Errc::Unavailable) throw;
      result.why_not.emplace_back(e.what());
    }
  }
  for (const Diagnostic& d : source_.config.diagnostics) {
    if (d.severity == Severity::Error) result.why_not.push_back(fmt::format("{}: {}", d.key, d.message));
  }
  const std::vector<Frame> all = frames();
  for_each("arrangements", all.size(), [&](size_t i) { try_frame(all[i]); });
  tell("the fastest of them");
  list_fastest(result);
  tell("the nearest to the present one");
  if (!result.present_fits) result.nearest = nearest_to_present();
  if (!result.fitting.empty()) {
    tell("the largest model so arranged");
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
