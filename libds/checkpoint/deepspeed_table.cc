// SPDX-License-Identifier: Apache-2.0
// One Builder per tag: first what the model states say (names, shapes, counters), then where the optimizer's state
// stands, by kind of checkpoint, then what the optimizer does not know (frozen parameters, buffers, ties).

#include "checkpoint/deepspeed_table.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>

#include "checkpoint/deepspeed_layout.h"
#include "checkpoint/pickle_json.h"

namespace ds {
namespace {

using Value = PickleValue;
using Kind = PickleValue::Kind;
using Segments = std::vector<DeepspeedSegment>;

constexpr State kMoments[] = {State::ExpAvg, State::ExpAvgSq};

i64 numel(const PickleTensor& t) { return *checked_product(t.shape); }

const Value* find_int_key(const Value& dict, i64 key) noexcept {
  for (size_t i = dict.items.size(); i >= 2; i -= 2) {
    if (dict.items[i - 2]->is(Kind::Int) && dict.items[i - 2]->integer == key) return dict.items[i - 1];
  }
  return nullptr;
}

struct Parameter {
  std::string name;
  std::vector<i64> shape;
  i64 elems = 0;
};

class Builder {
 public:
  explicit Builder(const DeepspeedFiles& files) : files_(files) {}

  DeepspeedTable build() {
    for (const std::string& path : files_.model) model_.push_back(open(path));
    for (const std::string& path : files_.optim) optim_.push_back(open(path));
    read_model_states();
    table_.has[static_cast<size_t>(State::Param)] = true;
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
    read_config();
    list_unread();
    for (const auto& f : table_.files) f->close();
    return std::move(table_);
  }

 private:
  // --- files and values
  size_t open(const std::string& path) {
    table_.files.push_back(std::make_unique<TorchFile>(path));
    TorchFile& f = *table_.files.back();
    if (table_.files.size() > 64) f.close();
    return table_.files.size() - 1;
  }
  const TorchFile& file(size_t f) const { return *table_.files[f]; }

  template <class... Args>
  void check(bool ok, Errc code, size_t f, fmt::format_string<Args...> format, Args&&... args) const {
    if (!ok) [[unlikely]]
      throw Error(code, fmt::format("{}: {}", file(f).path(), fmt::format(format, std::forward<Args>(args)...)),
                  rank_of(f));
  }
  // The data-parallel rank that wrote file f, where it is one of several.
  int rank_of(size_t f) const {
    for (const auto* list : {&model_, &optim_}) {
      const auto it = std::find(list->begin(), list->end(), f);
      if (it != list->end() && list->size() > 1) return static_cast<int>(it - list->begin());
    }
    return -1;
  }

  const Value& need(const Value& dict, std::string_view key, Kind kind, size_t f) const {
    const Value* v = dict.find(key);
    check(v != nullptr && v->is(kind), Errc::Corrupt, f, "'{}' is {}, not a {}: not a checkpoint of DeepSpeed", key,
          v == nullptr ? "missing" : fmt::format("a {}", kind_name(v->kind)), kind_name(kind));
    return *v;
  }
  i64 integer(const Value& dict, std::string_view key, i64 otherwise) const {
    const Value* v = dict.find(key);
    return v != nullptr && v->is(Kind::Int) ? v->integer : otherwise;
  }
  std::vector<i64> shape_of(const Value& v, const std::string& name, size_t f) const {
    std::vector<i64> shape;
    bool ok = v.is(Kind::Tuple) || v.is(Kind::List);
    for (const Value* d : v.items) {
      ok = ok && d->is(Kind::Int);
      shape.push_back(d->integer);
    }
    check(ok && checked_product(shape, 8).has_value(), Errc::Corrupt, f, "the shape of '{}' is none", name);
    return shape;
  }
  const PickleTensor& tensor_of(const Value& v, std::string_view what, size_t f) const {
    check(v.is(Kind::Tensor), Errc::Corrupt, f, "{} is a {}, not a tensor", what, kind_name(v.kind));
    check(v.tensor->dtype.has_value(), Errc::Unavailable, f, "{} is of {}, which is not read", what, v.tensor->type);
    return *v.tensor;
  }
  // A tensor of fp32 state; 16-bit states are widened when they are read.
  const PickleTensor& state_of(const Value& v, std::string_view what, size_t f) const {
    const PickleTensor& t = tensor_of(v, what, f);
    check(*t.dtype == DType::F32 || *t.dtype == DType::BF16 || *t.dtype == DType::F16, Errc::Unavailable, f,
          "{} is of {}, which is not read", what, t.type);
    return t;
  }
  static Segments whole(const PickleTensor& t, size_t f) { return {{0, numel(t), f, &t, 0}}; }

  Segments& segments(State s, size_t param) {
    auto& list = table_.segments[static_cast<size_t>(s)];
    if (list.size() <= param) list.resize(param + 1);
    return list[param];
  }

  // --- model states
  void read_model_states() {
    const size_t f = model_[0];
    const Value& root = file(f).root();
    check(root.is(Kind::Dict), Errc::Corrupt, f, "holds a {}: not a checkpoint of DeepSpeed", kind_name(root.kind));
    const Value* module = root.find("module");
    check(module != nullptr, Errc::Corrupt, f, "'module' is missing: not a checkpoint of DeepSpeed");
    check(!module->is(Kind::None), Errc::Unavailable, f,
          "its module is elsewhere: a pipeline-parallel run, which is not read");
    module_ = &need(root, "module", Kind::Dict, f);
    check(has_string_keys(*module_), Errc::Corrupt, f, "'module' has keys that are no names");
    for (const char* key : {"ds_autoep_layers", "autoep_layers"}) {
      const Value* experts = root.find(key);
      check(experts == nullptr || experts->is(Kind::None), Errc::Unavailable, f,
            "experts (AutoEP), which are not read");
    }
    check(integer(root, "mp_world_size", 1) == 1, Errc::Unavailable, f,
          "a part of a tensor-parallel run of {} ranks, which is not read", integer(root, "mp_world_size", 1));

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
        check(alias.is(Kind::String) && target.is(Kind::String), Errc::Corrupt, f, "'shared_params' are no names");
        ties_.emplace_back(alias.text, target.text);
      }
    }
    for (size_t r = 1; r < model_.size(); ++r) check_same_model(model_[r]);
    for (const auto& group : groups_) {
      for (const Parameter& p : group) add_param(p.name, p.shape, f);
    }
  }

  std::vector<std::vector<Parameter>> read_groups(const Value& shapes, size_t f) const {
    check(shapes.is(Kind::List), Errc::Corrupt, f, "'param_shapes' is a {}, not a list", kind_name(shapes.kind));
    std::vector<std::vector<Parameter>> groups;
    for (const Value* group : shapes.items) {
      check(group->is(Kind::Dict) && has_string_keys(*group), Errc::Corrupt, f,
            "'param_shapes' holds something else than dicts of names");
      auto& list = groups.emplace_back();
      for (size_t i = 0; i < group->items.size(); i += 2) {
        const std::string& name = group->items[i]->text;
        Parameter p{name, shape_of(*group->items[i + 1], name, f), 0};
        p.elems = *checked_product(p.shape);
        list.push_back(std::move(p));
      }
    }
    return groups;
  }

  // The model states of another rank of stage 3.
  void check_same_model(size_t f) const {
    const Value& root = file(f).root();
    const Value* shapes = root.find("param_shapes");
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
               return x.size() == y.size() &&
                      std::equal(x.begin(), x.end(), y.begin(), [](const Parameter& p, const Parameter& q) {
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
  void check_version(const Value& dict, size_t f) const {
    const Value* v = dict.find("ds_version");
    const bool same = v == nullptr || version_ == nullptr || v->text == version_->text;
    check(same, Errc::Mismatch, f, "written by DeepSpeed {}, the model states by {}: the shard of another save",
          v == nullptr ? "" : v->text, version_ == nullptr ? "" : version_->text);
  }

  size_t add_param(const std::string& name, const std::vector<i64>& shape, size_t f) {
    check(!name.empty() && name.size() <= 4096 &&
              std::none_of(name.begin(), name.end(), [](char c) { return static_cast<u8>(c) < 0x20; }),
          Errc::Corrupt, f, "a parameter of an impossible name");
    check(number_.emplace(name, table_.params.size()).second, Errc::Corrupt, f, "parameter '{}' appears twice", name);
    table_.params.push_back({name, shape, "", {}});
    return table_.params.size() - 1;
  }

  // --- the optimizer's state of ZeRO 1 to 3
  const Value& optimizer_of(size_t f) const {
    const Value& root = file(f).root();
    check(root.is(Kind::Dict), Errc::Corrupt, f, "holds a {}: not a checkpoint of DeepSpeed", kind_name(root.kind));
    return need(root, "optimizer_state_dict", Kind::Dict, f);
  }

  // What one rank holds, by flat tensor; null: the optimizer keeps no such state.
  struct RankState {
    size_t file;
    std::vector<const PickleTensor*> master;
    std::array<std::vector<const PickleTensor*>, 2> moments;
  };

  // The optimizer's own state of flat tensor `i`; null where there is none. DeepSpeed writes a list ("elastic"), or
  // what torch's state_dict() gives: states by number, the numbers in the order of the parameter groups.
  static const Value* flat_state(const Value* base, size_t i) {
    if (base == nullptr) return nullptr;
    if (base->is(Kind::List)) return i < base->items.size() ? base->items[i] : nullptr;
    const Value *states = base->find("state"), *groups = base->find("param_groups");
    if (states == nullptr || !states->is(Kind::Dict) || groups == nullptr) return nullptr;
    for (const Value* group : groups->items) {
      const Value* ids = group->find("params");
      if (ids == nullptr) return nullptr;
      if (i < ids->items.size()) return find_int_key(*states, ids->items[i]->integer);
      i -= ids->items.size();
    }
    return nullptr;
  }

  std::optional<i64> scalar(const Value* v, size_t f) const {
    if (v == nullptr) return std::nullopt;
    if (v->is(Kind::Int)) return v->integer;
    double x = v->real;
    if (v->is(Kind::Tensor) && v->tensor->dtype && numel(*v->tensor) == 1) {
      const DType dtype = *v->tensor->dtype;
      char raw[8] = {};
      file(f).read(*v->tensor, 0, 1, raw);
      i64 n;
      float single;
      if (dtype == DType::I64) return std::memcpy(&n, raw, 8), n;
      if (dtype == DType::F64) {
        std::memcpy(&x, raw, 8);
      } else if (dtype == DType::F32) {
        std::memcpy(&single, raw, 4);
        x = single;
      } else {
        return std::nullopt;
      }
    } else if (!v->is(Kind::Float)) {
      return std::nullopt;
    }
    if (!(x >= 0 && x < 9e15)) return std::nullopt;
    return static_cast<i64>(x);
  }

  // Adam's count of steps: with the state of the first flat tensor, or beside the states.
  std::optional<i64> adam_step(const Value& optimizer, const Value* base, size_t f) const {
    if (const Value* state = flat_state(base, 0); state != nullptr) {
      if (const auto step = scalar(state->find("step"), f)) return step;
    }
    if (const auto step = scalar(optimizer.find("base_optimizer_state_step"), f)) return step;
    const Value* groups = base == nullptr ? nullptr : base->find("param_groups");
    if (groups == nullptr || groups->items.empty()) return std::nullopt;
    return scalar(groups->items[0]->find("step"), f);
  }

  RankState read_rank(size_t f, const Value& optimizer, const Value* base, bool chunked) const {
    RankState rank{f, {}, {}};
    const std::string_view key = chunked ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
    const Value& flats = need(optimizer, key, Kind::List, f);
    for (size_t i = 0; i < flats.items.size(); ++i) {
      const PickleTensor& master = state_of(*flats.items[i], fmt::format("{}[{}]", key, i), f);
      rank.master.push_back(&master);
      const Value* state = flat_state(base, i);
      for (size_t m = 0; m < 2; ++m) {
        const std::string_view name = kStateNames[static_cast<size_t>(kMoments[m])];
        const Value* v = state == nullptr ? nullptr : state->find(name);
        rank.moments[m].push_back(v == nullptr ? nullptr : &state_of(*v, fmt::format("{} of group {}", name, i), f));
        check(v == nullptr || numel(*rank.moments[m].back()) >= numel(master), Errc::Corrupt, f,
              "{} of group {} is shorter than its master", name, i);
      }
    }
    return rank;
  }

  void place_partitions() {
    const i64 num_ranks = narrow<i64>(optim_.size());
    const bool chunked = model_states_of_stage_3();
    std::vector<RankState> ranks;
    std::optional<i64> step;
    for (i64 r = 0; r < num_ranks; ++r) {
      const size_t f = optim_[static_cast<size_t>(r)];
      const Value& optimizer = optimizer_of(f);
      check_rank(optimizer, f, num_ranks, chunked);
      const Value* base = optimizer.find(chunked ? "optimizer_state_dict" : "base_optimizer_state");
      ranks.push_back(read_rank(f, optimizer, base, chunked));
      check(ranks[static_cast<size_t>(r)].master.size() == ranks[0].master.size(), Errc::Mismatch, f,
            "{} groups, rank 0 has {}: the shard of another save", ranks.back().master.size(), ranks[0].master.size());
      const std::optional<i64> own = adam_step(optimizer, base, f);
      if (r == 0) step = own;
      check(own == step, Errc::Mismatch, f,
            "its optimizer is at step {}, that of rank 0 at {}: the shard of another save", own.value_or(0),
            step.value_or(0));
    }
    const Value& optimizer = optimizer_of(optim_[0]);
    if (step) table_.meta.optimizer_step = *step;
    table_.meta.world_size = num_ranks;
    read_scaler(optimizer);
    set_stage(stage_of(optimizer).value_or(chunked ? 3 : 1));
    table_.has[static_cast<size_t>(State::Master)] = true;
    for (size_t m = 0; m < 2; ++m) {
      table_.has[static_cast<size_t>(kMoments[m])] = std::all_of(ranks.begin(), ranks.end(), [&](const RankState& r) {
        return std::none_of(r.moments[m].begin(), r.moments[m].end(), [](auto* t) { return t == nullptr; });
      });
    }
    if (chunked) {
      place_chunks(ranks);
    } else {
      place_groups(ranks);
    }
  }

  bool model_states_of_stage_3() const {
    return std::filesystem::path(files_.model[0]).filename().string().starts_with("zero_pp_rank_");
  }
  static std::optional<i64> stage_of(const Value& optimizer) {
    const Value* v = optimizer.find("zero_stage");
    if (v != nullptr && v->is(Kind::Record) && v->items.size() == 1) v = v->items[0];
    return v != nullptr && v->is(Kind::Int) && v->integer >= 0 && v->integer <= 3 ? std::optional(v->integer)
                                                                                  : std::nullopt;
  }
  void set_stage(i64 stage) {
    table_.meta.zero_stage = static_cast<int>(stage);
    table_.meta.layout_id = fmt::format("deepspeed-zero{}-{}", stage, table_.meta.world_size);
  }

  void check_rank(const Value& optimizer, size_t f, i64 num_ranks, bool chunked) const {
    check_version(file(f).root(), f);
    check(optimizer.find("ds_zero_partition_groups") == nullptr, Errc::Unavailable, f,
          "experts (AutoEP), which are not read");
    check((optimizer.find("fp32_flat_groups") != nullptr) == chunked, Errc::Mismatch, f,
          "of another ZeRO stage than the model states");
    i64 count = num_ranks;
    if (const Value* v = optimizer.find("partition_count"); v != nullptr) {
      if (v->is(Kind::Int)) count = v->integer;
      for (const Value* item : v->items) count = item == v->items[0] ? item->integer : std::max(count, item->integer);
    }
    check(count <= num_ranks, Errc::Corrupt, f, "one of {} shards, but the optimizer states of rank {} are missing",
          count, num_ranks);
    check(count == num_ranks, Errc::Mismatch, f, "one of {} shards, {} are there: a shard of another save", count,
          num_ranks);
    check(!chunked || narrow<i64>(model_.size()) == num_ranks, Errc::Corrupt, f,
          "one of {} ranks, but the model states of rank {} are missing", num_ranks,
          std::min<i64>(narrow<i64>(model_.size()), num_ranks));
  }

  // Loss scalers: an object of ZeRO's optimizers, plain entries of those of stage 0.
  void read_scaler(const Value& optimizer) {
    const Value* v = optimizer.find("loss_scaler");
    const Value* fields = v != nullptr && v->is(Kind::Record) ? v->state : &optimizer;
    if (fields == nullptr) return;
    LossScalerState& s = table_.meta.loss_scaler;
    const Value* scale = fields->find("cur_scale");
    if (scale != nullptr && scale->is(Kind::Float)) s.scale = scale->real;
    if (scale != nullptr && scale->is(Kind::Int)) s.scale = static_cast<double>(scale->integer);
    s.iteration = integer(*fields, "cur_iter", s.iteration);
    s.last_overflow = integer(*fields, "last_overflow_iter", s.last_overflow);
    s.hysteresis = integer(*fields, "cur_hysteresis", s.hysteresis);
  }

  void add_pieces(size_t param, const std::vector<FlatPiece>& pieces, const std::vector<RankState>& ranks) {
    for (const FlatPiece& p : pieces) {
      const RankState& r = ranks[static_cast<size_t>(p.rank)];
      const auto flat = static_cast<size_t>(p.flat);
      segments(State::Master, param).push_back({p.begin, p.count, r.file, r.master[flat], p.offset});
      for (size_t m = 0; m < 2; ++m) {
        if (!table_.has[static_cast<size_t>(kMoments[m])]) continue;
        segments(kMoments[m], param).push_back({p.begin, p.count, r.file, r.moments[m][flat], p.offset});
      }
    }
  }

  // Stages 1 and 2.
  void place_groups(const std::vector<RankState>& ranks) {
    const size_t f = optim_[0];
    check(ranks[0].master.size() == groups_.size(), Errc::Mismatch, f, "{} groups, the model states name {}",
          ranks[0].master.size(), groups_.size());
    const Value* paddings = optimizer_of(f).find("param_alignment_paddings");
    size_t param = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      std::vector<i64> partitions;
      i64 available = 0;
      for (const RankState& r : ranks) available += partitions.emplace_back(numel(*r.master[g]));
      const Value* padding = paddings != nullptr && g < paddings->items.size() ? paddings->items[g] : nullptr;
      check(padding == nullptr || padding->items.size() == groups_[g].size(), Errc::Corrupt, f,
            "'param_alignment_paddings' does not fit the parameters of group {}", g);
      i64 offset = 0;
      bool padded = false;
      std::vector<i64> offsets;
      for (size_t i = 0; i < groups_[g].size(); ++i) {
        offsets.push_back(offset);
        const i64 gap = padding == nullptr ? 0 : padding->items[i]->integer;
        check(gap >= 0 && gap <= 4096, Errc::Corrupt, f, "a padding of {} elements", gap);
        padded |= gap > 0;
        check(!__builtin_add_overflow(offset, groups_[g][i].elems + gap, &offset), Errc::Corrupt, f,
              "the parameters of group {} are too large", g);
      }
      // As zero_to_fp32: what is left over is the alignment of the partitions.
      const i64 alignment = 2 * narrow<i64>(ranks.size());
      check(offset <= available && available - offset < alignment, Errc::Corrupt, f,
            "the parameters of group {} have {} elements, its partitions {} in {} shards", g, offset, available,
            ranks.size());
      for (size_t i = 0; i < groups_[g].size(); ++i, ++param) {
        const std::vector<FlatPiece> pieces =
            partitioned_pieces(offsets[i], groups_[g][i].elems, narrow<i64>(g), partitions);
        if (!padded) check_mapping(groups_[g][i].name, pieces, g);
        add_pieces(param, pieces, ranks);
      }
    }
  }

  // Every rank also noted where its part of each parameter lies ("param_slice_mappings"): so a shard in the place of
  // another one shows.
  void check_mapping(const std::string& name, const std::vector<FlatPiece>& pieces, size_t g) const {
    for (size_t r = 0; r < optim_.size(); ++r) {
      const size_t f = optim_[r];
      const Value* mappings = optimizer_of(f).find("param_slice_mappings");
      if (mappings == nullptr || g >= mappings->items.size()) continue;
      const Value* own = mappings->items[g]->find(name);
      const auto piece =
          std::find_if(pieces.begin(), pieces.end(), [&](const FlatPiece& p) { return p.rank == static_cast<i64>(r); });
      const Value* at = own != nullptr && own->is(Kind::Record) ? own->state : nullptr;
      const bool same = piece == pieces.end() ? own == nullptr
                                              : at != nullptr && integer(*at, "start", -1) == piece->offset &&
                                                    integer(*at, "numel", -1) == piece->count;
      check(same, Errc::Mismatch, f,
            "by its own account it holds another part of '{}' than rank {} does: the shard of "
            "another rank or save",
            name, r);
    }
  }

  // Stage 3.
  void place_chunks(const std::vector<RankState>& ranks) {
    std::vector<i64> flats;
    i64 available = 0;
    for (const PickleTensor* t : ranks[0].master) available += flats.emplace_back(numel(*t));
    for (const RankState& r : ranks) {
      for (size_t i = 0; i < flats.size(); ++i) {
        check(numel(*r.master[i]) == flats[i], Errc::Mismatch, r.file,
              "flat group {} has {} elements, that of rank 0 {}: the shard of another save", i, numel(*r.master[i]),
              flats[i]);
      }
    }
    const i64 num_ranks = narrow<i64>(ranks.size());
    i64 total = 0;
    for (const auto& group : groups_) {
      for (const Parameter& p : group) {
        check(!__builtin_add_overflow(total, div_ceil(p.elems, num_ranks), &total), Errc::Corrupt, optim_[0],
              "the parameters are too large");
      }
    }
    check(total == available, Errc::Corrupt, optim_[0], "{} elements of parameters, {} in the flat groups", total,
          available);
    size_t param = 0;
    i64 offset = 0;
    for (const auto& group : groups_) {
      for (const Parameter& p : group) {
        add_pieces(param++, chunked_pieces(offset, p.elems, num_ranks, flats), ranks);
        offset += div_ceil(p.elems, num_ranks);
      }
    }
  }

  // --- the universal format: whole tensors, {"param": tensor} or the tensor itself
  void place_universal() {
    table_.has.fill(true);
    for (size_t i = 0; i < table_.params.size(); ++i) {
      const std::string& name = table_.params[i].name;
      check(name.find('/') == std::string::npos && !name.starts_with('.'), Errc::Corrupt, model_[0],
            "parameter '{}' names no directory", name);
      for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq}) {
        const std::string_view stem = s == State::Master ? "fp32" : kStateNames[static_cast<size_t>(s)];
        const std::string path = fmt::format("{}/zero/{}/{}.pt", files_.dir, name, stem);
        if (!std::filesystem::exists(path)) {
          DS_CHECK(s != State::Master, Errc::Corrupt, "{}: is missing", path);
          table_.has[static_cast<size_t>(s)] = false;
          continue;
        }
        const size_t f = open(path);
        const Value* v = &file(f).root();
        if (v->is(Kind::Dict)) v = &need(*v, "param", Kind::Tensor, f);
        const PickleTensor& t = state_of(*v, "its value", f);
        check(numel(t) == *checked_product(table_.params[i].shape), Errc::Mismatch, f,
              "{} elements, the model states say {}", numel(t), *checked_product(table_.params[i].shape));
        segments(s, i) = whole(t, f);
      }
    }
    const std::string common = files_.dir + "/zero/optimizer_state.pt";
    set_stage(model_states_of_stage_3() ? 3 : 1);
    if (!std::filesystem::exists(common)) return;
    const size_t f = open(common);
    const Value& optimizer = file(f).root();
    check(optimizer.is(Kind::Dict), Errc::Corrupt, f, "holds a {}, not a dict", kind_name(optimizer.kind));
    read_scaler(optimizer);
    if (const auto stage = stage_of(optimizer)) set_stage(*stage);
    const Value* base = optimizer.find("base_optimizer_state");
    if (base == nullptr) base = optimizer.find("optimizer_state_dict");
    std::optional<i64> step = adam_step(optimizer, base, f);
    const std::string own =
        table_.params.empty() ? "" : fmt::format("{}/zero/{}/step.pt", files_.dir, table_.params[0].name);
    if (!step && !own.empty() && std::filesystem::exists(own)) {
      const size_t s = open(own);
      step = scalar(&file(s).root(), s);
    }
    if (step) table_.meta.optimizer_step = *step;
  }

  void list_unread() {
    if (!files_.universal) return;
    std::set<std::string_view> read;
    for (const auto& f : table_.files) read.insert(f->path());
    for (const auto& entry : std::filesystem::recursive_directory_iterator(files_.dir + "/zero")) {
      const std::string path = entry.path().string();
      if (path.ends_with(".pt") && !read.contains(path)) table_.unread.push_back(path);
    }
  }

  // --- stage 0: one optimizer for whole parameters, without names
  struct Candidate {
    std::string name;
    const PickleTensor* tensor;
  };

  void place_whole() {
    set_stage(0);
    const size_t f = model_[0];
    find_shared_storage();
    const std::set<std::string_view> buffers = buffer_names();
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < module_->items.size(); i += 2) {
      const Value& v = *module_->items[i + 1];
      const std::string& name = module_->items[i]->text;
      if (!v.is(Kind::Tensor) || buffers.contains(name) || is_alias(name)) continue;
      candidates.push_back({name, v.tensor.get()});
    }
    const Value* optimizer = file(f).root().find("optimizer");
    if (optimizer == nullptr || !optimizer->is(Kind::Dict)) return;
    read_scaler(*optimizer);
    const Value* inner = optimizer->find("optimizer_state_dict");
    if (inner == nullptr) inner = optimizer;
    if (const auto step = adam_step(*optimizer, inner, f)) table_.meta.optimizer_step = *step;
    attribute(candidates, *inner, optimizer->find("fp32_groups"), f);
  }

  // Gives each state of the optimizer to the one candidate that it can belong to. For each group the first and the last
  // assignment that keeps the order and fits the shapes are the same, or nothing is attributed.
  void attribute(const std::vector<Candidate>& candidates, const Value& inner, const Value* masters, size_t f) {
    const Value *states = inner.find("state"), *groups = inner.find("param_groups");
    if (states == nullptr || !states->is(Kind::Dict) || groups == nullptr) return;
    std::map<size_t, std::array<const PickleTensor*, 3>> found;  // by candidate: master, moments
    for (size_t g = 0; g < groups->items.size(); ++g) {
      const Value* ids = groups->items[g]->find("params");
      if (ids == nullptr) return;
      const Value* own = masters != nullptr && g < masters->items.size() ? masters->items[g] : nullptr;
      if (masters != nullptr && (own == nullptr || own->items.size() != ids->items.size())) return;
      std::vector<std::array<const PickleTensor*, 3>> wanted;
      for (size_t i = 0; i < ids->items.size(); ++i) {
        const Value* state = find_int_key(*states, ids->items[i]->integer);
        if (state == nullptr) continue;  // never stepped
        std::array<const PickleTensor*, 3> tensors{};
        const Value* values[] = {own == nullptr ? nullptr : own->items[i], state->find("exp_avg"),
                                 state->find("exp_avg_sq")};
        for (size_t k = 0; k < 3; ++k) {
          if (values[k] != nullptr && values[k]->is(Kind::Tensor)) tensors[k] = &state_of(*values[k], "a state", f);
        }
        if (tensors[1] == nullptr || tensors[2] == nullptr || (masters != nullptr && tensors[0] == nullptr)) return;
        wanted.push_back(tensors);
      }
      const auto assign = [&](bool backwards) {
        std::vector<size_t> places;
        for (size_t k = 0; k < candidates.size() && places.size() < wanted.size(); ++k) {
          const size_t c = backwards ? candidates.size() - 1 - k : k;
          const auto& next = wanted[backwards ? wanted.size() - 1 - places.size() : places.size()];
          if (candidates[c].tensor->shape == next[1]->shape) places.push_back(c);
        }
        if (backwards) std::reverse(places.begin(), places.end());
        return places;
      };
      const std::vector<size_t> places = assign(false);
      if (places.size() != wanted.size() || places != assign(true)) return;
      for (size_t i = 0; i < places.size(); ++i) {
        if (!found.emplace(places[i], wanted[i]).second) return;
      }
    }
    if (found.empty()) return;
    for (const State s : kMoments) table_.has[static_cast<size_t>(s)] = true;
    table_.has[static_cast<size_t>(State::Master)] = masters != nullptr;
    for (const auto& [c, tensors] : found) whole_states_[candidates[c].name] = tensors;
  }

  // Names of the module that are views of the same elements are tied.
  void find_shared_storage() {
    std::map<std::tuple<std::string_view, i64, std::vector<i64>, std::vector<i64>>, std::string> first;
    for (size_t i = 0; i < module_->items.size(); i += 2) {
      const Value& v = *module_->items[i + 1];
      if (!v.is(Kind::Tensor) || numel(*v.tensor) == 0) continue;
      const auto key = std::make_tuple(std::string_view(v.tensor->storage->text), v.tensor->offset, v.tensor->shape,
                                       v.tensor->stride);
      const auto [it, is_new] = first.emplace(key, module_->items[i]->text);
      if (!is_new) ties_.emplace_back(module_->items[i]->text, it->second);
    }
  }

  // --- weights, and what the optimizer does not know
  std::set<std::string_view> buffer_names() const {
    std::set<std::string_view> names;
    if (const Value* v = file(model_[0]).root().find("buffer_names"); v != nullptr) {
      for (const Value* item : v->items) names.insert(item->text);
    }
    return names;
  }
  bool is_alias(std::string_view name) const {
    return std::any_of(ties_.begin(), ties_.end(), [&](const auto& t) { return t.first == name; });
  }

  void set_dtype(size_t param, DType dtype) {
    if (param == 0) table_.meta.work_dtype = dtype;
    if (dtype != table_.meta.work_dtype) table_.params[param].dtype = dtype;
  }

  void place_weights() {
    const size_t f = model_[0];
    const bool stage_3 = model_states_of_stage_3();
    for (size_t i = 0; i < table_.params.size(); ++i) {
      const ParamEntry& p = table_.params[i];
      const PickleTensor& t = state_of(need(*module_, p.name, Kind::Tensor, f), fmt::format("'{}'", p.name), f);
      set_dtype(i, *t.dtype);
      check(stage_3 || t.shape == p.shape, Errc::Mismatch, f,
            "'{}' is of shape [{}] in 'module', [{}] in 'param_shapes'", p.name, fmt::join(t.shape, ","),
            fmt::join(p.shape, ","));
      segments(State::Param, i) = stage_3 || *t.dtype == DType::F32 ? segments(State::Master, i) : whole(t, f);
    }
  }

  // A frozen parameter of stage 3, of which every rank holds a chunk.
  Segments frozen_chunks(const std::string& name, i64 elems) const {
    const i64 num_ranks = narrow<i64>(model_.size()), chunk = div_ceil(elems, num_ranks);
    Segments result;
    for (const FlatPiece& p : chunked_pieces(0, elems, num_ranks, std::span(&chunk, 1))) {
      const size_t f = model_[static_cast<size_t>(p.rank)];
      const Value& fragments = need(file(f).root(), "frozen_param_fragments", Kind::Dict, f);
      const PickleTensor& t = tensor_of(need(fragments, name, Kind::Tensor, f), fmt::format("'{}'", name), f);
      check(numel(t) == chunk, Errc::Corrupt, f, "its part of '{}' has {} elements, {} are expected", name, numel(t),
            chunk);
      result.push_back({p.begin, p.count, f, &t, p.offset});
    }
    return result;
  }

  void add_untrained() {
    const size_t f = model_[0];
    const bool stage_3 = model_states_of_stage_3();
    const Value* frozen = file(f).root().find("frozen_param_shapes");
    const std::set<std::string_view> buffers = buffer_names();
    for (size_t i = 0; i < module_->items.size(); i += 2) {
      const std::string& name = module_->items[i]->text;
      const Value& v = *module_->items[i + 1];
      if (!v.is(Kind::Tensor) || number_.contains(name) || is_alias(name)) continue;
      const PickleTensor& t = tensor_of(v, fmt::format("'{}'", name), f);
      const Value* shape = stage_3 && !buffers.contains(name) && frozen != nullptr ? frozen->find(name) : nullptr;
      if (shape != nullptr) {
        const std::vector<i64> full = shape_of(*shape, name, f);
        add_as_it_is(name, full, *t.dtype, frozen_chunks(name, *checked_product(full)));
        continue;
      }
      check(!stage_3 || buffers.contains(name) || numel(t) > 0, Errc::Corrupt, f,
            "'{}' is named in 'module', but its elements are nowhere", name);
      add_as_it_is(name, t.shape, *t.dtype, whole(t, f));
    }
  }

  void add_as_it_is(const std::string& name, const std::vector<i64>& shape, DType dtype, Segments at) {
    const size_t param = add_param(name, shape, model_[0]);
    set_dtype(param, dtype);
    segments(State::Param, param) = at;
    const auto own = whole_states_.find(name);
    for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq}) {
      auto& list = segments(s, param);
      if (own == whole_states_.end()) {
        if (s == State::Master) list = at;
      } else if (const PickleTensor* t = own->second[static_cast<size_t>(s) - 1]; t != nullptr) {
        list = whole(*t, model_[0]);
      }
    }
  }

  void add_ties() {
    for (const auto& [alias, target] : ties_) {
      const auto it = number_.find(target);
      if (it == number_.end() || number_.contains(alias)) continue;  // as zero_to_fp32: what is shared is not there
      const ParamEntry owner = table_.params[it->second];
      const size_t param = add_param(alias, owner.shape, model_[0]);
      table_.params[param].tied_to = target;
      table_.params[param].dtype = owner.dtype;
    }
    for (auto& list : table_.segments) list.resize(table_.params.size());
    check(!table_.params.empty(), Errc::Corrupt, model_[0], "there is no parameter");
    const DType work = table_.meta.work_dtype;
    check(work == DType::F32 || work == DType::BF16 || work == DType::F16, Errc::Unavailable, model_[0],
          "weights of {}, which are not read", dtype_name(work));
  }

  void read_config() {
    const Value* config = file(model_[0]).root().find("ds_config");
    if (config == nullptr || !config->is(Kind::Dict)) return;
    const Value* zero = config->find("zero_optimization");
    check(zero == nullptr || integer(*zero, "mics_shard_size", -1) <= 0, Errc::Unavailable, model_[0],
          "shards of MiCS (mics_shard_size), which are not read");
    if (const std::optional<Json> json = pickle_json(*config)) table_.meta.config_json = json->dump();
  }

  const DeepspeedFiles& files_;
  DeepspeedTable table_;
  std::vector<size_t> model_, optim_;  // numbers of files, by rank
  const Value* module_ = nullptr;
  const Value* version_ = nullptr;
  std::vector<std::vector<Parameter>> groups_;                              // param_shapes
  std::vector<std::pair<std::string, std::string>> ties_;                   // name, of what
  std::map<std::string, size_t> number_;                                    // of each parameter
  std::map<std::string, std::array<const PickleTensor*, 3>> whole_states_;  // stage 0: master and moments
};

}  // namespace

DeepspeedTable read_deepspeed_table(const DeepspeedFiles& files) { return Builder(files).build(); }

}  // namespace ds
