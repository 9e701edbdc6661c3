// SPDX-License-Identifier: Apache-2.0
// The text is JSON with one row per line (parameters, files, pieces). Its last member is the checksum of all text
// before it and has a fixed length, so that damage is found before anything is parsed.

#include "checkpoint/manifest.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <tuple>
#include <unordered_map>

#include "base/json.h"
#include "formats/hdf5.h"
#include "formats/tensor_io.h"
#include "mesh/mesh_json.h"

namespace ds {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;
// For manifests in which a piece has a slice: readers of version 1 would misplace its elements.
constexpr int kVersionOfSlices = 2;
// For states that only some parameters have, or that earlier versions do not know.
constexpr int kVersionOfStates = 3;
// For parameters without a master beside others that have one.
constexpr int kVersionOfFrozen = 4;
constexpr size_t kMaxSliceRanges = 1024;  // an attribute of HDF5 holds them
constexpr int kMaxDepth = 64;
constexpr std::string_view kFormat = "libds-checkpoint";
constexpr std::string_view kSealBegin = ",\n\"checksum\": \"", kSealEnd = "\"\n}\n";
constexpr size_t kSealBytes = kSealBegin.size() + 16 + kSealEnd.size();

std::string hex(u64 x) { return fmt::format("{:016x}", x); }
u64 parse_hex(const std::string& text) {
  DS_CHECK(text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string::npos, Errc::Corrupt,
           "'{}' is not a checksum", text.substr(0, 32));
  return std::stoull(text, nullptr, 16);
}

// A whole number that fits; the library would silently convert fractions and wrap what is too large.
i64 whole(const Json& j) {
  DS_CHECK(j.is_number_integer() && (!j.is_number_unsigned() || std::in_range<i64>(j.get<u64>())), Errc::Corrupt,
           "{} is not a whole number that fits", j.dump().substr(0, 64));
  return j.get<i64>();
}

// A counter: no run comes near the bound, and the sum of two cannot overflow.
i64 counter(const Json& j) {
  const i64 n = whole(j);
  DS_CHECK(n >= 0 && n <= i64{1} << 53, Errc::Corrupt, "{} is not a count", n);
  return n;
}

// `read` of the member of that name, which the message then names.
i64 named(i64 (*read)(const Json&), const Json& object, const char* key) {
  try {
    return read(object.at(key));
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", key, e.what()));
  }
}

i64 whole_at(const Json& object, const char* key) { return named(whole, object, key); }
i64 counter_at(const Json& object, const char* key) { return named(counter, object, key); }

Json piece_to_json(const PieceRecord& p) {
  Json j = {{"parameter", p.param}};
  if (!p.slice.whole()) j["slice"] = {{"dim", p.slice.dim}, {"ranges", p.slice.ranges}};
  j["begin"] = p.begin;
  j["count"] = p.count;
  for (State s : kStates) {
    const auto& d = p.states[s];
    if (!d) continue;
    Json sums = Json::array();
    for (u64 sum : d->checksums) sums.push_back(hex(sum));
    j[std::string(state_name(s))] = {{"offset", d->offset}, {"xxh3", std::move(sums)}};
  }
  return j;
}

// Their values are read at once.
std::vector<RankLocalRecord> rank_local_from_json(const Json& rows) {
  std::vector<RankLocalRecord> records;
  for (const Json& row : rows)
    records.push_back({row.at("name").get<std::string>(), counter_at(row, "offset"), counter_at(row, "count")});
  return records;
}
Json rank_local_to_json(const std::vector<RankLocalRecord>& records) {
  Json rows = Json::array();
  for (const RankLocalRecord& o : records) rows.push_back({{"name", o.name}, {"offset", o.offset}, {"count", o.count}});
  return rows;
}

model::ParamSlice slice_from_json(const Json& j) {
  model::ParamSlice slice{narrow<int>(whole_at(j, "dim")), {}};
  for (const Json& range : j.at("ranges")) {
    DS_CHECK(range.is_array() && range.size() == 2, Errc::Corrupt, "{} is not a range", range.dump().substr(0, 64));
    slice.ranges.emplace_back(whole(range[0]), whole(range[1]));
  }
  DS_CHECK(!slice.whole(), Errc::Corrupt, "a slice without ranges");
  return slice;
}

PieceRecord piece_from_json(const Json& j) {
  PieceRecord p{{whole_at(j, "parameter"), whole_at(j, "begin"), whole_at(j, "count"), {}}, {}};
  if (j.contains("slice")) p.slice = slice_from_json(j.at("slice"));
  for (State s : kStates) {
    const auto it = j.find(state_name(s));
    if (it == j.end()) continue;
    DatasetRecord d{whole(it->at("offset")), {}};
    for (const Json& sum : it->at("xxh3")) d.checksums.push_back(parse_hex(sum.get<std::string>()));
    p.states[s] = std::move(d);
  }
  return p;
}

Json names_of(const StateSet& states) {
  Json names = Json::array();
  for (const State s : kOptimizerStates) {
    if (states[s]) names.push_back(state_name(s));
  }
  return names;
}
StateSet states_from(const Json& names) {
  StateSet states;
  DS_CHECK(names.is_array(), Errc::Corrupt, "states that are not a list");
  for (const Json& name : names) {
    const auto* const found = std::ranges::find(kOptimizerStates, name.get<std::string>(), state_name);
    DS_CHECK(found != kOptimizerStates.end(), Errc::Unavailable, "there is no state '{}' here",
             name.dump().substr(0, 64));
    states[*found] = true;
  }
  return states;
}

void optimizer_to_json(const ParamEntry& p, Json& row) {
  if (p.optimizer_states) row["states"] = names_of(*p.optimizer_states);
  if (!p.optimizer.empty()) row["optimizer"] = p.optimizer;
  if (p.frozen) row["frozen"] = true;
}

std::string optimizer_from(const Json& name) {
  constexpr size_t kMost = 64;
  const std::string text = name.get<std::string>();
  DS_CHECK(!text.empty() && text.size() <= kMost, Errc::Corrupt, "an optimizer's name of {} bytes", text.size());
  return text;
}

void optimizer_from_json(const Json& row, ParamEntry& p) {
  if (row.contains("states")) p.optimizer_states = states_from(row.at("states"));
  if (row.contains("optimizer")) p.optimizer = optimizer_from(row.at("optimizer"));
  if (row.contains("frozen")) p.frozen = row.at("frozen").get<bool>();
}

Json embed(const std::string& document, const char* what) {
  if (document.empty()) return nullptr;
  try {
    return Json::parse(document);
  } catch (const nlohmann::json::exception& e) {
    throw Error(Errc::Internal, fmt::format("the {} to save is not JSON: {}", what, json_reason(e)));
  }
}
std::string extract(const Json& document) { return document.is_null() ? "" : document.dump(); }

DType work_dtype_from(const std::string& name) {
  for (DType t : {DType::F32, DType::BF16, DType::F16}) {
    if (dtype_name(t) == name) return t;
  }
  throw Error(Errc::Corrupt, fmt::format("'{}' is not a work dtype", name.substr(0, 32)));
}
DType dtype_from(const std::string& name) {
  for (int t = 0; t <= static_cast<int>(DType::F8E5M2); ++t) {
    if (dtype_name(static_cast<DType>(t)) == name) return static_cast<DType>(t);
  }
  throw Error(Errc::Corrupt, fmt::format("'{}' is not a dtype", name.substr(0, 32)));
}

Json parse_bounded(std::string_view text, const std::string& path) {
  return parse_json(text, path, {.error = Errc::Corrupt, .max_depth = kMaxDepth, .comments = false, .places = false})
      .root;
}

Json meta_to_json(const CheckpointMeta& meta) {
  const LossScalerState& scaler = meta.loss_scaler;
  Json j = {
      {"step", meta.step},
      {"work_dtype", dtype_name(meta.work_dtype)},
      {"layout", meta.layout_id},
      {"world_size", meta.world_size},
      {"zero_stage", meta.zero_stage},
      {"consumed_samples", meta.consumed_samples},
      {"seed", meta.seed ? Json(*meta.seed) : Json()},
      {"loss_scaler",
       {{"scale", scaler.scale},
        {"iteration", scaler.iteration},
        {"last_overflow", scaler.last_overflow},
        {"hysteresis", scaler.hysteresis}}},
      {"skipped_steps", meta.skipped_steps},
      {"optimizer_step", meta.optimizer_step},
      {"isa", meta.isa},
      {"data", embed(meta.data_json, "data identity")},
      {"config", embed(meta.config_json, "configuration")},
      {"model_config", embed(meta.model_config_json, "model configuration")},
  };
  if (const auto& mesh = meta.mesh) j["mesh"] = mesh_json(*mesh);
  if (meta.optimizer != kUsualOptimizer) j["optimizer"] = meta.optimizer;
  if (!meta.history.empty()) j["history"] = meta.history;
  if (!meta.attention_json.empty()) j["attention"] = embed(meta.attention_json, "attention");
  for (const auto& [key, numbers] : meta.numbers) j[key] = numbers;
  if (meta.metadata) j["metadata"] = std::vector(meta.metadata->begin(), meta.metadata->end());
  return j;
}

CheckpointMeta meta_from_json(const Json& j) {
  CheckpointMeta meta;
  meta.step = counter_at(j, "step");
  meta.work_dtype = work_dtype_from(j.at("work_dtype").get<std::string>());
  meta.layout_id = j.at("layout").get<std::string>();
  meta.world_size = counter_at(j, "world_size");
  meta.zero_stage = narrow<int>(counter_at(j, "zero_stage"));
  if (j.contains("mesh")) {
    const auto degree = [&](const char* axis) { return narrow<int>(counter_at(j.at("mesh"), axis)); };
    meta.mesh = {.dp = degree("dp"), .pp = degree("pp"), .tp = degree("tp"), .sp = degree("sp")};
    if (j.at("mesh").contains("workers")) meta.mesh->workers = degree("workers");
  }
  meta.consumed_samples = counter_at(j, "consumed_samples");
  if (!j.at("seed").is_null()) meta.seed = narrow<u32>(whole_at(j, "seed"));
  const Json& scaler = j.at("loss_scaler");
  meta.loss_scaler = {scaler.at("scale").get<double>(), whole_at(scaler, "iteration"),
                      whole_at(scaler, "last_overflow"), whole_at(scaler, "hysteresis")};
  meta.skipped_steps = counter_at(j, "skipped_steps");
  meta.optimizer_step = counter_at(j, "optimizer_step");
  if (j.contains("optimizer")) meta.optimizer = optimizer_from(j.at("optimizer"));
  if (j.contains("history")) meta.history = j.at("history").get<std::string>();
  if (j.contains("attention")) meta.attention_json = extract(j.at("attention"));
  for (const std::string_view key : kParamNumbers) {
    if (!j.contains(key)) continue;
    auto& of_params = meta.numbers[std::string(key)];
    j.at(std::string(key)).get_to(of_params);
    for (const auto& [name, numbers] : of_params) {
      DS_CHECK(std::ranges::all_of(numbers, [](double x) { return std::isfinite(x) && x >= 0; }), Errc::Corrupt,
               "{} of '{}' must not be negative", key, name);
    }
  }
  meta.isa = j.at("isa").get<std::string>();
  meta.data_json = extract(j.at("data"));
  meta.config_json = extract(j.at("config"));
  meta.model_config_json = extract(j.at("model_config"));
  DS_CHECK(j.at("model_config").is_null() || j.at("model_config").is_object(), Errc::Corrupt,
           "'model_config' is not an object");
  if (j.contains("metadata")) {
    const auto pairs = j.at("metadata").get<std::vector<std::pair<std::string, std::string>>>();
    meta.metadata.emplace(pairs.begin(), pairs.end());
  }
  return meta;
}

Json params_to_json(const std::vector<ParamEntry>& params) {
  Json rows = Json::array();
  for (const ParamEntry& p : params) {
    rows.push_back({{"name", p.name}, {"shape", p.shape}});
    if (!p.tied_to.empty()) rows.back()["tied_to"] = p.tied_to;
    if (p.dtype) rows.back()["dtype"] = dtype_name(*p.dtype);
    optimizer_to_json(p, rows.back());
  }
  return rows;
}

std::vector<ParamEntry> params_from_json(const Json& rows) {
  std::vector<ParamEntry> params;
  for (const Json& p : rows) {
    params.push_back(
        {p.at("name").get<std::string>(), {}, p.contains("tied_to") ? p.at("tied_to").get<std::string>() : ""});
    for (const Json& dim : p.at("shape")) params.back().shape.push_back(whole(dim));
    if (p.contains("dtype")) params.back().dtype = dtype_from(p.at("dtype").get<std::string>());
    optimizer_from_json(p, params.back());
  }
  return params;
}

int version_of(const Manifest& m) noexcept {
  if (std::ranges::any_of(m.params, &ParamEntry::frozen)) return kVersionOfFrozen;
  const auto any_piece = [&](auto&& is_new) {
    return std::ranges::any_of(m.files, [&](const FileRecord& f) { return std::ranges::any_of(f.pieces, is_new); });
  };
  const bool states =
      m.meta.optimizer != kUsualOptimizer ||
      std::ranges::any_of(m.params, [](const ParamEntry& p) { return p.optimizer_states || !p.optimizer.empty(); }) ||
      any_piece([](const PieceRecord& p) {
        return std::ranges::any_of(kStates, [&](State s) { return s > State::ExpAvgSq && p.states[s]; });
      });
  if (states) return kVersionOfStates;
  return any_piece([](const PieceRecord& p) { return !p.slice.whole(); }) ? kVersionOfSlices : kVersion;
}

Manifest from_json(const Json& j) {
  DS_CHECK(j.at("format") == kFormat, Errc::Corrupt, "not a checkpoint's manifest");
  const i64 version = whole_at(j, "version");
  DS_CHECK(version >= kVersion && version <= kVersionOfFrozen, Errc::Unavailable,
           "format version {}; this libds reads versions {} to {}", version, kVersion, kVersionOfFrozen);
  DS_CHECK(whole_at(j, "checksum_block_bytes") == kChecksumBlock, Errc::Unavailable, "unknown checksum block size");
  Manifest m;
  m.id = j.at("id").get<std::string>();
  m.meta = meta_from_json(j);
  m.params = params_from_json(j.at("parameters"));
  for (const Json& f : j.at("files")) {
    DS_CHECK(f.at("name") == rank_file_name(narrow<i64>(m.files.size())), Errc::Corrupt, "unexpected file name {}",
             f.at("name").dump().substr(0, 200));
    m.files.push_back({whole_at(f, "bytes"), parse_hex(f.at("structure").get<std::string>()), {}, {}});
    if (f.contains("rank_local")) m.files.back().rank_local = rank_local_from_json(f.at("rank_local"));
  }
  for (const Json& p : j.at("pieces")) {
    const i64 file = whole_at(p, "file");
    DS_CHECK(file >= 0 && file < narrow<i64>(m.files.size()), Errc::Corrupt, "a piece in file {} of {}", file,
             m.files.size());
    m.files[file].pieces.push_back(piece_from_json(p));
  }
  DS_CHECK(version == version_of(m), Errc::Corrupt, "format version {}, but its contents are of version {}", version,
           version_of(m));
  m.view_bytes = whole_at(j.at("view"), "bytes");
  m.view_checksum = parse_hex(j.at("view").at("xxh3").get<std::string>());
  return m;
}

i64 slice_numel(const model::ParamSlice& slice, const std::vector<i64>& shape) {
  return *checked_product(local_shape(slice, shape));
}

// For messages.
std::string of_slice(const model::ParamSlice& slice, const std::vector<i64>& shape) {
  return slice.whole() ? "" : "slice " + slice_text(slice, shape).substr(0, 200) + " of ";
}

// A piece and the rank that has it.
struct Held {
  const PieceRecord* piece;
  i64 file;
};

// Each element of the parameter exactly once: its slices divide one dim, and in each slice, in order, a piece begins
// where the one before ended. `held`: by slice, then by begin.
void check_covered(const ParamEntry& entry, i64 numel, std::span<const Held> held, const std::string& path, Errc code) {
  std::vector<const model::ParamSlice*> slices;
  for (size_t h = 0; h < held.size();) {
    const model::ParamSlice& slice = held[h].piece->slice;
    slices.push_back(&slice);
    i64 covered = 0;
    for (; h < held.size() && held[h].piece->slice == slice; ++h) {
      const i64 begin = held[h].piece->begin;
      DS_CHECK(begin == covered, code, "{}: elements {} to {} of {}'{}' are held {} (rank {})", path,
               std::min(covered, begin), std::max(covered, begin), of_slice(slice, entry.shape), entry.name,
               begin < covered ? "twice" : "by no rank", held[h].file);
      covered = begin + held[h].piece->count;
    }
    const i64 all = slice_numel(slice, entry.shape);
    DS_CHECK(covered == all, code, "{}: elements {} to {} of {}'{}' are held by no rank", path, covered, all,
             of_slice(slice, entry.shape), entry.name);
  }
  DS_CHECK(!held.empty() || numel <= 0, code, "{}: elements 0 to {} of '{}' are held by no rank", path, numel,
           entry.name);
  if (slices.empty() || (slices.size() == 1 && slices[0]->whole())) return;

  const int dim = slices.back()->dim;  // whole ones come first
  std::vector<std::pair<i64, i64>> ranges;
  for (const model::ParamSlice* slice : slices) {
    DS_CHECK(!slice->whole() && slice->dim == dim, code, "{}: '{}' is held {} and in slices of dim {}", path,
             entry.name, slice->whole() ? "whole" : fmt::format("in slices of dim {}", slice->dim), dim);
    ranges.insert(ranges.end(), slice->ranges.begin(), slice->ranges.end());
  }
  std::sort(ranges.begin(), ranges.end());
  const i64 size = entry.shape[dim];
  ranges.emplace_back(size, size);
  i64 covered = 0;
  for (const auto& [from, to] : ranges) {
    DS_CHECK(from == covered, code, "{}: indices {} to {} of dim {} of '{}' are held {}", path, std::min(covered, from),
             std::max(covered, from), dim, entry.name, from < covered ? "twice" : "by no rank");
    covered = to;
  }
}

// The rules for names and ties; returns the number of elements of each untied parameter, -1 for tied ones.
std::vector<i64> validate_params(const Manifest& m, const std::string& path, Errc code) {
  std::unordered_map<std::string_view, const ParamEntry*> by_name;
  std::vector<i64> numels;
  for (const ParamEntry& p : m.params) {
    DS_CHECK(is_hdf5_name(p.name), code, "{}: '{}' cannot be a parameter's name", path, p.name.substr(0, 200));
    DS_CHECK(by_name.emplace(p.name, &p).second, code, "{}: parameter '{}' appears twice", path, p.name);
    const std::optional<i64> numel = checked_product(p.shape, 8);
    DS_CHECK(numel.has_value() && p.shape.size() <= 32, code, "{}: impossible shape of '{}'", path, p.name);
    numels.push_back(p.tied_to.empty() ? *numel / 8 : -1);
  }
  for (const ParamEntry& p : m.params) {
    if (p.tied_to.empty()) continue;
    const auto owner = by_name.find(p.tied_to);
    DS_CHECK(owner != by_name.end() && owner->second->tied_to.empty() && owner->second->shape == p.shape, code,
             "{}: '{}' is tied to '{}', which is not an untied parameter of its shape", path, p.name,
             p.tied_to.substr(0, 200));
  }
  return numels;
}

}  // namespace

std::set<std::string> Manifest::rank_local_names() const {
  std::set<std::string> names;
  for (const FileRecord& f : files) {
    for (const RankLocalRecord& r : f.rank_local) names.insert(r.name);
  }
  return names;
}

bool Manifest::has(State s) const noexcept {
  return std::any_of(files.begin(), files.end(), [&](const FileRecord& f) {
    return std::any_of(f.pieces.begin(), f.pieces.end(), [&](const PieceRecord& p) { return p.states[s].has_value(); });
  });
}

i64 first_element(const Manifest& m, const PieceRange& p) {
  if (p.slice.whole()) return p.begin;
  return model::SliceMap(p.slice, m.params[p.param].shape).global_of(p.begin);
}

std::string rank_file_name(i64 rank) { return fmt::format("rank-{:05d}.h5", rank); }

std::string format_meta(const CheckpointMeta& meta) { return meta_to_json(meta).dump(); }

CheckpointMeta parse_meta(std::string_view text, const std::string& path) {
  try {
    return meta_from_json(parse_bounded(text, path));
  } catch (const JsonError&) {
    throw;
  } catch (const nlohmann::json::exception& e) {
    throw Error(Errc::Corrupt, fmt::format("{}: not the description of a step: {}", path, json_reason(e)));
  } catch (const Error& e) {
    throw Error(e.code() == Errc::Internal ? Errc::Corrupt : e.code(), fmt::format("{}: {}", path, e.what()));
  }
}

std::string format_params(const std::vector<ParamEntry>& params) { return params_to_json(params).dump(); }

std::vector<ParamEntry> parse_params(std::string_view text, const std::string& path) {
  const Json rows = parse_bounded(text, path);
  try {
    return params_from_json(rows);
  } catch (const nlohmann::json::exception& e) {
    throw Error(Errc::Corrupt, fmt::format("{}: not a table of parameters: {}", path, json_reason(e)));
  } catch (const Error& e) {
    throw Error(e.code() == Errc::Internal ? Errc::Corrupt : e.code(), fmt::format("{}: {}", path, e.what()));
  }
}

std::string format_optimizers(const std::vector<ParamEntry>& params) {
  Json of = Json::object();
  for (const ParamEntry& p : params) {
    Json row = Json::object();
    optimizer_to_json(p, row);
    if (!row.empty()) of[p.name] = std::move(row);
  }
  return of.empty() ? "" : of.dump();
}

void parse_optimizers(std::string_view text, const std::string& path, std::vector<ParamEntry>& params) {
  const Json of = parse_bounded(text, path);
  DS_CHECK(of.is_object(), Errc::Corrupt, "{}: the optimizers of its parameters are not an object", path);
  try {
    for (ParamEntry& p : params) {
      if (const auto it = of.find(p.name); it != of.end()) optimizer_from_json(*it, p);
    }
  } catch (const nlohmann::json::exception& e) {
    throw Error(Errc::Corrupt, fmt::format("{}: the optimizers of its parameters: {}", path, json_reason(e)));
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", path, e.what()));
  }
}

std::string format_manifest(const Manifest& m) {
  Json states = Json::array(), files = Json::array(), pieces = Json::array();
  for (State s : kStates) {
    if (m.has(s)) states.push_back(state_name(s));
  }
  for (size_t f = 0; f < m.files.size(); ++f) {
    const std::string name = rank_file_name(narrow<i64>(f));
    files.push_back({{"name", name}, {"bytes", m.files[f].bytes}, {"structure", hex(m.files[f].structure)}});
    if (!m.files[f].rank_local.empty()) files.back()["rank_local"] = rank_local_to_json(m.files[f].rank_local);
    for (const PieceRecord& p : m.files[f].pieces) {
      Json row = {{"file", f}};
      row.update(piece_to_json(p));
      pieces.push_back(std::move(row));
    }
  }
  Json rows = {{"format", kFormat}, {"version", version_of(m)}, {"libds_version", DS_VERSION}, {"id", m.id}};
  rows.update(meta_to_json(m.meta));
  rows.update({
      {"states", std::move(states)},
      {"checksum_block_bytes", kChecksumBlock},
      {"view", {{"name", kViewName}, {"bytes", m.view_bytes}, {"xxh3", hex(m.view_checksum)}}},
      {"parameters", params_to_json(m.params)},
      {"files", std::move(files)},
      {"pieces", std::move(pieces)},
  });
  std::string text = "{";
  for (const auto& [key, value] : rows.items()) {
    text += fmt::format("{}\n\"{}\": ", text.size() > 1 ? "," : "", key);
    const bool table = value.is_array() && !value.empty() && value.front().is_object();
    if (!table) {
      text += value.dump();
      continue;
    }
    for (size_t i = 0; i < value.size(); ++i) text += fmt::format("{}\n {}", i == 0 ? "[" : ",", value[i].dump());
    text += "\n]";
  }
  return fmt::format("{}{}{}{}", text, kSealBegin, hex(XXH3_64bits(text.data(), text.size())), kSealEnd);
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  DS_CHECK(text.size() > kSealBytes, Errc::Corrupt, "{}: {} bytes are too few for a manifest", path, text.size());
  const std::string_view body = text.substr(0, text.size() - kSealBytes), seal = text.substr(body.size());
  DS_CHECK(seal.starts_with(kSealBegin) && seal.ends_with(kSealEnd), Errc::Corrupt,
           "{}: does not end like a manifest (truncated?)", path);
  DS_CHECK(seal.substr(kSealBegin.size(), 16) == hex(XXH3_64bits(body.data(), body.size())), Errc::Corrupt,
           "{}: checksum mismatch: the manifest is damaged or was edited", path);
  Manifest m;
  try {
    m = from_json(parse_bounded(text, path));
  } catch (const JsonError&) {
    throw;
  } catch (const nlohmann::json::exception& e) {
    throw Error(Errc::Corrupt, fmt::format("{}: not a manifest: {}", path, json_reason(e)));
  } catch (const Error& e) {
    throw Error(e.code() == Errc::Internal ? Errc::Corrupt : e.code(), fmt::format("{}: {}", path, e.what()));
  }
  validate_manifest(m, path, Errc::Corrupt);
  return m;
}

void validate_manifest(const Manifest& m, const std::string& path, Errc code) {
  DS_CHECK(m.meta.step >= 0 && m.meta.world_size >= 1 && m.meta.world_size == narrow<i64>(m.files.size()), code,
           "{}: step {}, world size {}, {} files", path, m.meta.step, m.meta.world_size, m.files.size());
  if (const auto& mesh = m.meta.mesh) {
    const std::vector<i64> degrees = {mesh->dp, mesh->pp, mesh->tp, mesh->sp, mesh->workers};
    DS_CHECK(checked_product(degrees) == m.meta.world_size, code,
             "{}: a mesh of dp {}, pp {}, tp {}, sp {}{}, but {} ranks", path, mesh->dp, mesh->pp, mesh->tp, mesh->sp,
             mesh->workers > 1 ? fmt::format(", {} workers", mesh->workers) : "", m.meta.world_size);
  }
  const std::vector<i64> numels = validate_params(m, path, code);
  std::vector<Held> held;
  StateSet has;
  for (State s : kStates) has[s] = m.has(s);
  for (size_t f = 0; f < m.files.size(); ++f) {
    const FileRecord& file = m.files[f];
    DS_CHECK(file.bytes >= 0, code, "{}: {} has {} bytes", path, rank_file_name(narrow<i64>(f)), file.bytes);
    for (const RankLocalRecord& o : file.rank_local)
      DS_CHECK(is_hdf5_name(o.name) && o.offset <= file.bytes && o.count <= (file.bytes - o.offset) / 4, code,
               "{}: '{}' is not inside {}", path, o.name.substr(0, 64), rank_file_name(narrow<i64>(f)));
    for (const PieceRecord& p : file.pieces) {
      DS_CHECK(p.param >= 0 && p.param < narrow<i64>(m.params.size()), code, "{}: a piece of parameter {} of {}", path,
               p.param, m.params.size());
      const i64 numel = numels[p.param];
      const std::string& name = m.params[p.param].name;
      const std::string problem = slice_problem(p.slice, m.params[p.param].shape);
      DS_CHECK(problem.empty() && p.slice.ranges.size() <= kMaxSliceRanges, code,
               "{}: rank {} holds a slice of '{}': {}", path, f, name,
               problem.empty() ? fmt::format("{} ranges", p.slice.ranges.size()) : problem);
      const i64 limit = numel <= 0 ? numel : slice_numel(p.slice, m.params[p.param].shape);
      DS_CHECK(p.begin >= 0 && p.count > 0 && p.begin <= limit - p.count, code,
               "{}: rank {} holds elements {} + {} of '{}', which {}", path, f, p.begin, p.count, name,
               limit < 0 ? "is tied" : fmt::format("has {}", limit));
      for (State s : kStates) {
        const auto& d = p.states[s];
        const std::string_view state = state_name(s);
        const bool expected = has[s] && m.params[p.param].may_have(s) &&
                              (s == State::Param || is_float(m.stored_dtype(State::Param, p.param)));
        DS_CHECK(d.has_value() == expected, code, "{}: '{}' {} {}, other pieces {}", path, name,
                 d.has_value() ? "has" : "lacks", state, d.has_value() ? "lack it" : "have it");
        if (!d) continue;
        const i64 bytes = p.count * dtype_bytes(m.stored_dtype(s, p.param));
        DS_CHECK(d->offset >= 0 && d->offset <= file.bytes - bytes, code, "{}: {} of '{}' lies outside {}", path, state,
                 name, rank_file_name(narrow<i64>(f)));
        DS_CHECK(narrow<i64>(d->checksums.size()) == div_ceil(bytes, kChecksumBlock), code,
                 "{}: {} checksums for {} bytes of {} of '{}'", path, d->checksums.size(), bytes, state, name);
      }
      held.push_back({&p, narrow<i64>(f)});
    }
  }
  DS_CHECK(has[State::Param] || held.empty(), code, "{}: no parameters are stored", path);

  std::sort(held.begin(), held.end(), [](const Held& a, const Held& b) {
    return std::tie(a.piece->param, a.piece->slice, a.piece->begin, a.file) <
           std::tie(b.piece->param, b.piece->slice, b.piece->begin, b.file);
  });
  std::span<const Held> rest = held;
  for (i64 i = 0; i < narrow<i64>(numels.size()); ++i) {
    const auto mine = rest.first(
        std::find_if(rest.begin(), rest.end(), [&](const Held& h) { return h.piece->param != i; }) - rest.begin());
    rest = rest.subspan(mine.size());
    check_covered(m.params[i], numels[i], mine, path, code);
  }
}

std::string format_file_record(const FileRecord& f) {
  Json pieces = Json::array();
  for (const PieceRecord& p : f.pieces) pieces.push_back(piece_to_json(p));
  Json j = {{"bytes", f.bytes}, {"structure", hex(f.structure)}, {"pieces", std::move(pieces)}};
  if (!f.rank_local.empty()) j["rank_local"] = rank_local_to_json(f.rank_local);
  return j.dump();
}

FileRecord parse_file_record(std::string_view text) {
  const Json j = Json::parse(text);
  FileRecord f{whole_at(j, "bytes"), parse_hex(j.at("structure").get<std::string>()), {}, {}};
  for (const Json& p : j.at("pieces")) f.pieces.push_back(piece_from_json(p));
  if (j.contains("rank_local")) f.rank_local = rank_local_from_json(j.at("rank_local"));
  return f;
}

}  // namespace ds
