// SPDX-License-Identifier: Apache-2.0
// The optimizer's state as ZeRO cuts it: flat tensors in a file per rank.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "checkpoint/deepspeed_builder.h"

namespace ds {

const PickleValue& DeepspeedBuilder::optimizer_of(size_t f) const {
  const Value& root = file(f).root();
  check(root.is(Kind::Dict), Errc::Corrupt, f, "holds a {}: not a checkpoint of DeepSpeed", kind_name(root.kind));
  return need(root, "optimizer_state_dict", Kind::Dict, f);
}

NumberIndex index_numbers(const PickleValue& dict) {
  NumberIndex index;
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    if (dict.items[i]->is(PickleValue::Kind::Int)) index[dict.items[i]->integer] = dict.items[i + 1];
  }
  return index;
}

// The optimizer's own states of the flat tensors. DeepSpeed writes a list ("elastic"), or what torch's state_dict()
// gives: states by number, the numbers in the order of the parameter groups; null where one has none.
std::vector<const PickleValue*> DeepspeedBuilder::flat_states(const Value* base) {
  if (base == nullptr) return {};
  if (base->is(Kind::List)) return {base->items.begin(), base->items.end()};
  const Value *states = base->find("state"), *groups = base->find("param_groups");
  if (states == nullptr || !states->is(Kind::Dict) || groups == nullptr) return {};
  const NumberIndex by_number = index_numbers(*states);
  std::vector<const Value*> list;
  for (const Value* group : groups->items) {
    const Value* ids = group->find("params");
    if (ids == nullptr) return list;
    for (const Value* id : ids->items) {
      const auto it = by_number.find(id->integer);
      list.push_back(it == by_number.end() ? nullptr : it->second);
    }
  }
  return list;
}

std::optional<i64> DeepspeedBuilder::scalar(const Value* v, size_t f) const {
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
std::optional<i64> DeepspeedBuilder::adam_step(const Value& optimizer, const Value* base, size_t f) const {
  if (const auto states = flat_states(base); !states.empty() && states[0] != nullptr) {
    if (const auto step = scalar(states[0]->find("step"), f)) return step;
  }
  if (const auto step = scalar(optimizer.find("base_optimizer_state_step"), f)) return step;
  const Value* groups = base == nullptr ? nullptr : base->find("param_groups");
  if (groups == nullptr || groups->items.empty()) return std::nullopt;
  return scalar(groups->items[0]->find("step"), f);
}

std::optional<i64> DeepspeedBuilder::stage_of(const Value& optimizer) {
  const Value* v = optimizer.find("zero_stage");
  if (v != nullptr && v->is(Kind::Record) && v->items.size() == 1) v = v->items[0];
  return v != nullptr && v->is(Kind::Int) && v->integer >= 0 && v->integer <= 3 ? std::optional(v->integer)
                                                                                : std::nullopt;
}

void DeepspeedBuilder::set_stage(i64 stage) {
  table_.meta.zero_stage = static_cast<int>(stage);
  table_.meta.layout_id = fmt::format("deepspeed-zero{}-{}", stage, table_.meta.world_size);
}

// Loss scalers: an object of ZeRO's optimizers, plain entries of those of stage 0.
void DeepspeedBuilder::read_scaler(const Value& optimizer) {
  const Value* v = optimizer.find("loss_scaler");
  const Value* fields = v != nullptr && v->is(Kind::Record) ? v->state : &optimizer;
  if (fields == nullptr) return;
  LossScalerState& s = table_.meta.loss_scaler;
  const Value* scale = fields->find("cur_scale");
  if (scale != nullptr && scale->is(Kind::Float)) s.scale = scale->real;
  if (scale != nullptr && scale->is(Kind::Int)) s.scale = static_cast<double>(scale->integer);
  DS_CHECK(std::isfinite(s.scale) && s.scale > 0, Errc::Corrupt, "{}: a loss scale of {}", files_.dir, s.scale);
  s.iteration = integer(*fields, "cur_iter", s.iteration);
  s.last_overflow = integer(*fields, "last_overflow_iter", s.last_overflow);
  s.hysteresis = integer(*fields, "cur_hysteresis", s.hysteresis);
}

void DeepspeedBuilder::place_partitions() {
  const i64 num_ranks = narrow<i64>(optim_.size());
  const bool chunked = is_stage_3();
  std::vector<RankState> ranks;
  std::optional<i64> step;
  for (i64 r = 0; r < num_ranks; ++r) {
    const size_t f = optim_[r];
    const Value& optimizer = optimizer_of(f);
    check_rank(optimizer, f, num_ranks, chunked);
    const Value* base = optimizer.find(chunked ? "optimizer_state_dict" : "base_optimizer_state");
    ranks.push_back(read_rank(f, optimizer, base, chunked));
    check(ranks[r].master.size() == ranks[0].master.size(), Errc::Mismatch, f,
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
  has(State::Master) = true;
  for (size_t m = 0; m < 2; ++m) {
    has(kMoments[m]) = std::all_of(ranks.begin(), ranks.end(), [&](const RankState& r) {
      return std::none_of(r.moments[m].begin(), r.moments[m].end(), [](auto* t) { return t == nullptr; });
    });
  }
  // Lion's exp_avg alone is not Adam's state.
  has(State::ExpAvg) = has(State::ExpAvgSq) = has(State::ExpAvg) && has(State::ExpAvgSq);
  if (chunked) {
    place_chunks(ranks);
  } else {
    place_groups(ranks);
  }
}

void DeepspeedBuilder::check_rank(const Value& optimizer, size_t f, i64 num_ranks, bool chunked) const {
  check_version(file(f).root(), f);
  check(optimizer.find("ds_zero_partition_groups") == nullptr || !autoep_.empty(), Errc::Mismatch, f,
        "of a model with experts (AutoEP), which the model states do not have: the shard of another save");
  check((optimizer.find("fp32_flat_groups") != nullptr) == chunked, Errc::Mismatch, f,
        "of another ZeRO stage than the model states");
  i64 count = num_ranks;
  if (const Value* v = optimizer.find("partition_count"); v != nullptr) {
    if (v->is(Kind::Int)) count = v->integer;
    for (const Value* item : v->items) count = item == v->items[0] ? item->integer : std::max(count, item->integer);
  }
  check(count <= num_ranks, Errc::Corrupt, f, "one of {} shards, but the optimizer states of rank {} are missing",
        count, num_ranks);
  check(count == num_ranks, Errc::Mismatch, f, "one of {} shards, but there are {}: a shard of another save", count,
        num_ranks);
  check(!chunked || narrow<i64>(model_.size()) == num_ranks, Errc::Corrupt, f,
        "one of {} ranks, but the model states of rank {} are missing", num_ranks,
        std::min<i64>(narrow<i64>(model_.size()), num_ranks));
}

DeepspeedBuilder::RankState DeepspeedBuilder::read_rank(size_t f, const Value& optimizer, const Value* base,
                                                        bool chunked) const {
  RankState rank{f, {}, {}};
  const std::string_view key = chunked ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
  const Value& flats = need(optimizer, key, Kind::List, f);
  const std::vector<const Value*> states = flat_states(base);
  for (size_t i = 0; i < flats.items.size(); ++i) {
    const PickleTensor& master = state_of(*flats.items[i], fmt::format("{}[{}]", key, i), f);
    rank.master.push_back(&master);
    const Value* state = i < states.size() ? states[i] : nullptr;
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

void DeepspeedBuilder::add_pieces(size_t param, const std::vector<FlatPiece>& pieces,
                                  const std::vector<RankState>& ranks) {
  for (const FlatPiece& p : pieces) {
    const RankState& r = ranks[p.rank];
    const auto flat = static_cast<size_t>(p.flat);
    segments(State::Master, param).push_back({p.begin, p.count, r.file, r.master[flat], p.offset});
    for (size_t m = 0; m < 2; ++m) {
      if (!has(kMoments[m])) continue;
      segments(kMoments[m], param).push_back({p.begin, p.count, r.file, r.moments[m][flat], p.offset});
    }
  }
}

void DeepspeedBuilder::add_parts(size_t& param, const Parameter& p, const std::vector<FlatPiece>& pieces,
                                 const std::vector<RankState>& ranks) {
  const i64 each = p.elems / p.parts();
  for (i64 part = 0; part < p.parts(); ++part) add_pieces(param++, pieces_within(pieces, part * each, each), ranks);
}

// Groups are known by their parameters, which each rank has noted; those without notes are in their order.
std::vector<size_t> DeepspeedBuilder::places_of_groups(size_t f) const {
  const Value* mappings = optimizer_of(f).find("param_slice_mappings");
  const size_t n = groups_.size(), none = n;
  std::vector<size_t> places(n, none);
  std::vector<bool> taken(n, false);
  for (size_t i = 0; mappings != nullptr && i < std::min(n, mappings->items.size()); ++i) {
    const Index names = index_of(mappings->items[i]);
    const auto has = [&](const Group& group) {
      return !names.empty() && std::ranges::all_of(names, [&](const auto& entry) {
        return std::ranges::find(group.params, entry.first, &Parameter::name) != group.params.end();
      });
    };
    const size_t g = static_cast<size_t>(std::ranges::find_if(groups_, has) - groups_.begin());
    if (g < n && places[g] == none) places[g] = i, taken[i] = true;
  }
  for (size_t g = 0; g < n; ++g) {
    if (places[g] != none) continue;
    places[g] = static_cast<size_t>(std::ranges::find(taken, false) - taken.begin());
    taken[places[g]] = true;
  }
  return places;
}

const PickleValue* DeepspeedBuilder::of_group(i64 r, std::string_view key, size_t g) const {
  const Value* list = optimizer_of(optim_[r]).find(key);
  const size_t place = group_places_[r][g];
  return list != nullptr && place < list->items.size() ? list->items[place] : nullptr;
}

// Stages 1 and 2.
void DeepspeedBuilder::place_groups(const std::vector<RankState>& as_saved) {
  const size_t f = optim_[0];
  check(as_saved[0].master.size() == groups_.size(), Errc::Mismatch, f, "{} groups, the model states name {}",
        as_saved[0].master.size(), groups_.size());
  std::vector<RankState> ranks = as_saved;
  for (size_t r = 0; r < ranks.size(); ++r) {
    group_places_.push_back(places_of_groups(optim_[r]));
    for (size_t g = 0; g < groups_.size(); ++g) {
      const size_t place = group_places_[r][g];
      ranks[r].master[g] = as_saved[r].master[place];
      for (size_t m = 0; m < 2; ++m) ranks[r].moments[m][g] = as_saved[r].moments[m][place];
    }
  }
  size_t param = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    check(narrow<i64>(ranks.size()) % groups_[g].ep == 0, Errc::Mismatch, f,
          "the experts of group {} are on {} ranks, and there are {}", g, groups_[g].ep, ranks.size());
    for (i64 q = 0; q < groups_[g].ep; ++q)
      place_group(g, ranks, copies_of(q, groups_[g].ep, narrow<i64>(ranks.size())), param);
  }
}

void DeepspeedBuilder::place_group(size_t g, const std::vector<RankState>& ranks, const std::vector<i64>& numbers,
                                   size_t& param) {
  const std::vector<Parameter>& params = groups_[g].params;
  const size_t f = optim_[numbers[0]];
  std::vector<i64> partitions;
  i64 available = 0;
  for (const i64 r : numbers) available += partitions.emplace_back(numel(*ranks[r].master[g]));
  const Value* padding = of_group(numbers[0], "param_alignment_paddings", g);
  check(padding == nullptr || padding->items.size() == params.size(), Errc::Corrupt, f,
        "'param_alignment_paddings' does not fit the parameters of group {}", g);
  i64 offset = 0;
  bool padded = false;
  std::vector<i64> offsets;
  for (size_t i = 0; i < params.size(); ++i) {
    offsets.push_back(offset);
    const i64 gap = padding == nullptr ? 0 : padding->items[i]->integer;
    check(gap >= 0 && gap <= 4096, Errc::Corrupt, f, "a padding of {} elements", gap);
    padded |= gap > 0;
    check(!__builtin_add_overflow(offset, params[i].elems + gap, &offset), Errc::Corrupt, f,
          "the parameters of group {} are too large", g);
  }
  // As zero_to_fp32: what is left over is the alignment of the partitions.
  const i64 alignment = 2 * narrow<i64>(numbers.size());
  check(offset <= available && available - offset < alignment, Errc::Corrupt, f,
        "the parameters of group {} have {} elements, its partitions {} in {} shards", g, offset, available,
        numbers.size());
  if (!padded) check_mappings(g, numbers, partitions);
  for (size_t i = 0; i < params.size(); ++i) {
    std::vector<FlatPiece> pieces = partitioned_pieces(offsets[i], params[i].elems, narrow<i64>(g), partitions);
    for (FlatPiece& p : pieces) p.rank = numbers[p.rank];
    add_parts(param, params[i], pieces, ranks);
  }
}

// The parameters of group g in the order of these ranks' own notes. With round_robin_gradients that is the order before
// they were dealt out, and not the one in which they stand, which is that of 'param_shapes'.
std::vector<size_t> DeepspeedBuilder::noted_order(size_t g, const std::vector<i64>& ranks) const {
  const std::vector<Parameter>& params = groups_[g].params;
  std::unordered_map<std::string_view, std::pair<i64, i64>> place;  // rank, start
  for (const i64 r : ranks) {
    const Value* mapping = of_group(r, "param_slice_mappings", g);
    if (mapping == nullptr) continue;
    for (const auto& [name, v] : index_of(mapping)) {
      if (v->is(Kind::Record) && v->state != nullptr) place.try_emplace(name, r, integer(*v->state, "start", 0));
    }
  }
  std::vector<size_t> order(params.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto is_placed = [&](const Parameter& p) { return place.contains(p.name); };
  if (std::ranges::all_of(params, is_placed))
    std::ranges::stable_sort(order, {}, [&](size_t i) { return place.at(params[i].name); });
  return order;
}

// Every rank also noted which part of each parameter it holds ("param_slice_mappings"), so swapped shards are detected.
void DeepspeedBuilder::check_mappings(size_t g, const std::vector<i64>& ranks,
                                      const std::vector<i64>& partitions) const {
  const std::vector<Parameter>& params = groups_[g].params;
  std::vector<std::vector<FlatPiece>> pieces(params.size());
  i64 offset = 0;
  for (const size_t i : noted_order(g, ranks)) {
    pieces[i] = partitioned_pieces(offset, params[i].elems, narrow<i64>(g), partitions);
    offset += params[i].elems;
  }
  std::vector<std::map<std::string_view, const FlatPiece*>> expected(ranks.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    for (const FlatPiece& p : pieces[i]) expected[p.rank][params[i].name] = &p;
  }
  for (size_t n = 0; n < ranks.size(); ++n) {
    const size_t f = optim_[ranks[n]];
    const Value* mapping = of_group(ranks[n], "param_slice_mappings", g);
    if (mapping == nullptr) continue;
    const Index own = index_of(mapping);
    const auto is_here = [&](const auto& entry) {
      const Value* v = look_up(own, entry.first);
      return v != nullptr && v->is(Kind::Record) && v->state != nullptr &&
             integer(*v->state, "start", -1) == entry.second->offset &&
             integer(*v->state, "numel", -1) == entry.second->count;
    };
    check(own.size() == expected[n].size() && std::ranges::all_of(expected[n], is_here), Errc::Mismatch, f,
          "by its own account it holds other parts of group {} than rank {} does: the shard of another rank or save", g,
          ranks[n]);
  }
}

// Stage 3.
void DeepspeedBuilder::place_chunks(const std::vector<RankState>& ranks) {
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
  for (size_t g = 0; g < groups_.size(); ++g) {
    check(num_ranks % groups_[g].ep == 0, Errc::Mismatch, optim_[0],
          "the experts of group {} are on {} ranks, and there are {}", g, groups_[g].ep, num_ranks);
    for (const Parameter& p : groups_[g].params) {
      check(!__builtin_add_overflow(total, div_ceil(p.elems, num_ranks / groups_[g].ep), &total), Errc::Corrupt,
            optim_[0], "the parameters are too large");
    }
  }
  check(total == available, Errc::Corrupt, optim_[0], "{} elements of parameters, {} in the flat groups", total,
        available);
  size_t param = 0;
  i64 offset = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const i64 begin = offset;
    for (i64 q = 0; q < groups_[g].ep; ++q) {
      const std::vector<i64> numbers = copies_of(q, groups_[g].ep, num_ranks);
      for (const i64 r : numbers) check_autoep_rank(r, q, g, numbers);
      offset = begin;
      for (const Parameter& p : groups_[g].params) {
        std::vector<FlatPiece> pieces = chunked_pieces(offset, p.elems, std::ssize(numbers), flats);
        for (FlatPiece& piece : pieces) piece.rank = numbers[piece.rank];
        add_parts(param, p, pieces, ranks);
        offset += div_ceil(p.elems, std::ssize(numbers));
      }
    }
  }
}

}  // namespace ds
