// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/deepspeed_files.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "base/file.h"
#include "checkpoint/deepspeed.h"
#include "checkpoint/run_names.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

enum class Role : u8 { Other, Model, ZeroModel, Optim, Pipeline, Expert, ExpertOptim };
struct FileName {
  Role role = Role::Other;
  i64 rank = 0;             // data-parallel; of an expert's optimizer, that of ep
  i64 layer = -1;           // of an expert; -1: files of old versions have none
  std::string_view mp;      // "00" where there is no tensor parallelism
  std::string_view family;  // "", "bf16_" or "fp16_"
};

bool eat(std::string_view& s, std::string_view prefix) noexcept {
  if (!s.starts_with(prefix)) return false;
  s.remove_prefix(prefix.size());
  return true;
}

// Takes a number off the front.
bool eat(std::string_view& s, i64& number) noexcept {
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), number);
  if (error != std::errc() || number < 0) return false;
  s.remove_prefix(static_cast<size_t>(end - s.data()));
  return true;
}

// The role of a file, from its name: engine.py's _get_ckpt_name, _get_rank_zero_ckpt_name and their kin.
FileName parse_name(std::string_view name) noexcept {
  constexpr std::string_view kModel = "_model_states.pt", kOptim = "_optim_states.pt";
  if (name.starts_with("layer_") && name.ends_with("-model_states.pt"))
    return {.role = Role::Pipeline, .mp = {}, .family = {}};
  const bool model = name.ends_with(kModel), optim = name.ends_with(kOptim);
  if (!model && !optim) return {};
  std::string_view s = name.substr(0, name.size() - kModel.size());
  FileName f;
  if (s.find("expert_") != std::string_view::npos || s.starts_with("expp_rank_")) {
    f.role = s.starts_with("expp_rank_") ? Role::ExpertOptim : Role::Expert;
    const bool known = f.role == Role::Expert
                           ? eat(s, "layer_") && eat(s, f.layer) && eat(s, "_expert_") && eat(s, f.rank)
                           : eat(s, "expp_rank_") && eat(s, f.rank);
    if (known && eat(s, "_mp_rank_")) f.mp = s;
    return f;
  }
  for (const std::string_view family : {"bf16_", "fp16_"}) {
    if (eat(s, family)) f.family = family;
  }
  if (eat(s, "zero_pp_rank_")) {
    if (!eat(s, f.rank) || !eat(s, "_mp_rank_")) return {};
    f.role = model ? Role::ZeroModel : Role::Optim;
  } else if (model && eat(s, "mp_rank_")) {
    f.role = Role::Model;
  } else {
    return {};
  }
  f.mp = s;
  return f;
}

// The paths in order of rank; every rank from 0 on must be there.
std::vector<std::string> by_rank(const std::map<i64, std::string>& files, std::string_view what,
                                 const std::string& dir) {
  std::vector<std::string> paths;
  for (const auto& [rank, path] : files) {
    const i64 expected = narrow<i64>(paths.size());
    if (rank != expected) {
      throw Error(Errc::Corrupt,
                  fmt::format("{}: the {} of rank {} are missing (those of rank {} exist)", dir, what, expected, rank),
                  static_cast<int>(expected));
    }
    paths.push_back(path);
  }
  return paths;
}

bool is_plain(std::string_view name) noexcept {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

// For messages: what could be chosen.
std::string tags_of(const std::string& dir) {
  const std::vector<std::string> tags = list_deepspeed_tags(dir);
  return tags.empty() ? "there is no tag" : fmt::format("tags: {}", fmt::join(tags, ", "));
}

// The tag that dir/<pointer> names; nothing where there is no such file.
std::optional<std::string> read_pointer(const std::string& dir, std::string_view pointer) {
  const std::string path = fmt::format("{}/{}", dir, pointer);
  if (!fs::exists(path)) return std::nullopt;
  std::string name = read_text_file(path, 4096);
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r' || name.back() == ' ')) name.pop_back();
  DS_CHECK(is_plain(name), Errc::Corrupt, "{}: names '{}', which is not a directory next to it ({})", path,
           name.substr(0, 64), tags_of(dir));
  return name;
}

constexpr std::string_view kPointers[] = {kLatestName, kLatestUniversalName};

}  // namespace

bool is_deepspeed_shard(const std::string& path) noexcept {
  const Role role = parse_name(std::string_view(path).substr(path.rfind('/') + 1)).role;
  return role != Role::Other && role != Role::Model;
}

bool is_deepspeed_tag(const std::string& dir) noexcept {
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    if (parse_name(it->path().filename().string()).role != Role::Other) return true;
  }
  return false;
}

std::vector<std::string> list_deepspeed_tags(const std::string& dir) {
  std::vector<std::string> tags;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    if (is_deepspeed_tag(it->path())) tags.push_back(it->path().filename());
  }
  std::sort(tags.begin(), tags.end());
  return tags;
}

std::string find_deepspeed_tag(const std::string& dir, const std::string& tag) {
  if (!tag.empty()) {
    DS_CHECK(is_plain(tag), Errc::Config, "'{}' is not a tag, that is a directory in {}", tag, dir);
    const std::string path = fmt::format("{}/{}", dir, tag);
    DS_CHECK(fs::is_directory(path), Errc::Io, "{}: there is no tag '{}' ({})", dir, tag, tags_of(dir));
    return path;
  }
  if (is_deepspeed_tag(dir)) return dir;
  for (const std::string_view pointer : kPointers) {
    const std::optional<std::string> name = read_pointer(dir, pointer);
    if (!name) continue;
    const std::string path = fmt::format("{}/{}", dir, *name);
    DS_CHECK(is_deepspeed_tag(path), Errc::Corrupt,
             "{}/{}: names '{}', which does not exist or contains no model states ({})", dir, pointer, *name,
             tags_of(dir));
    return path;
  }
  throw Error(Errc::Config, fmt::format("{}: there is no file 'latest' to choose a tag ({})", dir, tags_of(dir)));
}

namespace {

// All experts of all layers, from 0 on.
std::vector<DeepspeedExpert> all_experts(const std::map<std::pair<i64, i64>, std::string>& files,
                                         const std::string& dir) {
  std::vector<DeepspeedExpert> experts;
  for (const auto& [number, path] : files) {
    const auto [layer, expert] = number;
    const bool same = !experts.empty() && experts.back().layer == layer;
    const i64 next_layer = experts.empty() ? 0 : experts.back().layer + 1;
    DS_CHECK(same || layer == next_layer, Errc::Corrupt, "{}: the experts of layer {} are missing", dir, next_layer);
    const i64 next = same ? experts.back().expert + 1 : 0;
    DS_CHECK(expert == next, Errc::Corrupt, "{}: expert {} of layer {} is missing", dir, next, layer);
    experts.push_back({layer, expert, path});
  }
  return experts;
}

}  // namespace

DeepspeedFiles list_deepspeed_files(const std::string& tag_dir) {
  DeepspeedFiles files;
  files.dir = tag_dir;
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(tag_dir)) {
    names.insert(entry.path().filename().string());
  }
  std::map<i64, std::string> zero_model, optim, expert_optim;
  std::map<std::pair<i64, i64>, std::string> experts;
  std::string model, first_optim;
  std::string_view family;
  for (const std::string& name : names) {
    const FileName f = parse_name(name);
    const std::string path = fmt::format("{}/{}", tag_dir, name);
    const bool of_experts = f.role == Role::Expert || f.role == Role::ExpertOptim;
    DS_CHECK(!of_experts || !f.mp.empty(), Errc::Unavailable,
             "{}: experts as an old version of DeepSpeed has named them, which are not supported", path);
    DS_CHECK(f.role != Role::Pipeline, Errc::Unavailable,
             "{}: a layer of a pipeline-parallel run, which is not supported; convert it with ds_to_universal.py",
             path);
    if (f.role == Role::Other) continue;
    DS_CHECK(f.mp == "00", Errc::Unavailable,
             "{}: a part of a tensor- or pipeline-parallel run, which is not supported (only mp_rank_00 is)", path);
    if (f.role == Role::Expert) {
      experts[{f.layer, f.rank}] = path;
    } else if (f.role == Role::ExpertOptim) {
      expert_optim[f.rank] = path;
    } else if (f.role == Role::Model) {
      model = path;
    } else if (f.role == Role::ZeroModel) {
      zero_model[f.rank] = path;
    } else {
      DS_CHECK(optim.empty() || family == f.family, Errc::Corrupt, "{} and {}: two checkpoints in one directory", path,
               first_optim);
      if (optim.empty()) first_optim = name;
      family = f.family;
      optim[f.rank] = path;
    }
  }
  DS_CHECK(!names.contains("offloaded_tensors"), Errc::Unavailable,
           "{}/offloaded_tensors: states that were swapped to NVMe, which are not supported", tag_dir);
  DS_CHECK(model.empty() || zero_model.empty(), Errc::Corrupt, "{} and {}: two checkpoints in one directory", model,
           fs::path(zero_model.begin()->second).filename().string());
  files.model = model.empty() ? by_rank(zero_model, "model states", tag_dir) : std::vector<std::string>{model};
  files.optim = by_rank(optim, "optimizer states", tag_dir);
  files.experts = all_experts(experts, tag_dir);
  files.expert_optim = by_rank(expert_optim, "optimizer states of experts", tag_dir);
  files.universal = files.optim.empty() && fs::is_directory(tag_dir + "/zero");
  DS_CHECK(files.experts.empty() || (!files.universal && zero_model.empty()), Errc::Unavailable,
           "{}: experts in a checkpoint of {}, which are not supported", tag_dir,
           files.universal ? "the universal format" : "stage 3");
  DS_CHECK(!files.model.empty(), Errc::Corrupt, "{}: the model states are missing", tag_dir);
  return files;
}

}  // namespace ds
