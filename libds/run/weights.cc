// SPDX-License-Identifier: Apache-2.0
#include "run/weights.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "base/gguf.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/match_weights.h"
#include "checkpoint/tensor_state.h"
#include "config/named_files.h"
#include "config/trainer_output.h"
#include "ds/log.h"
#include "formats/tensor_io.h"

namespace ds::run {
namespace fs = std::filesystem;
namespace {

// Files of other frameworks, and of ours under other names. What transformers' Trainer and nanoGPT put beside a model
// is none.
bool is_other_weights(std::string_view name) {
  for (const std::string_view prefix :
       {"training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state", "train.", "val."}) {
    if (name.starts_with(prefix)) return false;
  }
  if (name.ends_with(".index.json")) name.remove_suffix(std::string_view(".index.json").size());
  for (const std::string_view suffix : {".bin", ".pt", ".pth", ".safetensors", ".h5", ".msgpack", ".ckpt", ".gguf",
                                        ".distcp", ".onnx", ".ot", ".tflite"}) {
    if (name.ends_with(suffix)) return true;
  }
  return false;
}

// Folders in which other programs write a model: FSDP's shards, Megatron's checkpoints, exports, and
// the files of Meta beside those of transformers.
bool is_folder_of_weights(std::string_view name) {
  for (const std::string_view known : {"onnx", "openvino", "coreml", "tflite", "original"}) {
    if (name == known) return true;
  }
  for (const std::string_view prefix : {"pytorch_model_fsdp", "iter_"}) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

// Paths, from `dir` on, of weights that are not read.
std::set<std::string> other_weights(const fs::path& dir) {
  std::set<std::string> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(dir)) {
    const fs::path name = entry.path().filename();
    if (is_other_weights(name.string())) others.insert(name.string());
    if (!entry.is_directory() || !is_folder_of_weights(name.string())) continue;
    for (const fs::directory_entry& inner : fs::recursive_directory_iterator(entry.path())) {
      if (is_other_weights(inner.path().filename().string()))
        others.insert((name / inner.path().lexically_relative(entry.path())).string());
    }
  }
  return others;
}

// Elements [begin, begin + count) in fp32.
void read_floats(const TensorSource& source, const TensorInfo& t, i64 begin, i64 count, std::vector<char>& raw,
                 float* out) {
  raw.resize(count * dtype_bytes(t.dtype));
  source.read(t.name, begin, count, raw.data());
  convert_elements(DType::F32, out, t.dtype, raw.data(), count);
}

bool equal_values(const TensorSource& source, const TensorInfo& a, const TensorInfo& b) {
  if (a.shape != b.shape || !can_convert(DType::F32, a.dtype) || !can_convert(DType::F32, b.dtype)) return false;
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

}  // namespace

std::string published_weights(const std::string& model_path) {
  if (model_path.empty()) return "";
  if (is_gguf(model_path)) return model_path;
  const fs::path path(model_path);
  const bool is_dir = fs::is_directory(path);
  if (!is_dir && path.filename() != "config.json") return "";
  const fs::path dir = is_dir ? path : path.has_parent_path() ? path.parent_path() : ".";
  if (const std::vector<std::string> files = published_weights_in(dir.string()); !files.empty()) {
    const std::string file = dir / files.front(), why = why_not_input({"model.path", file});
    DS_CHECK(why.empty(), Errc::Config, "model.path: {} {}", file, why);
    return dir.string();
  }
  const std::string saves = trainer_checkpoints(dir.string());
  DS_CHECK(saves.empty(), Errc::Config,
           "model.path {}: there are no weights in it, but Hugging Face's Trainer has saved {} there: name one of them",
           model_path, saves);
  DS_CHECK(!is_checkpoint(dir.string()), Errc::Unavailable,
           "model.path {}: its weights are in a checkpoint; name {} with --weights, too", model_path, dir.string());
  const std::set<std::string> others = other_weights(dir);
  const auto stored = std::ranges::find_if(others, [](const std::string& name) { return name.ends_with(".gguf"); });
  DS_CHECK(stored == others.end(), Errc::Unavailable,
           "model.path {}: its weights are in a GGUF file; name that, {}, in model.path", model_path,
           (dir / *stored).string());
  DS_CHECK(
      others.empty(), Errc::Unavailable,
      "model.path {}: there are weights in {}, but only {} are read; convert them, name a file with --weights, or put "
      "config.json alone elsewhere to start from random weights",
      model_path, *others.begin(), fmt::join(kPublishedWeights, ", "));
  return "";
}

namespace {

struct Match : WeightMatch {
  std::unique_ptr<TensorSource> source;
};

Match match(const model::Model& model, const std::string& path, bool new_head) {
  std::unique_ptr<TensorSource> source = join_experts(model, open_weights(path));
  WeightMatch found = match_weights(model, *source, new_head);
  const char* const types =
      is_gguf(path) ? "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K" : "fp64, fp32, bf16 and fp16";
  DS_CHECK(found.unreadable.empty(), Errc::Unavailable, "{}: only {} are read:\n  {}", source->path(), types,
           first_lines(found.unreadable, "\n  "));
  DS_CHECK(found.unfit.empty() && found.extra.empty(), Errc::Mismatch, "{} does not fit the model:\n  {}",
           source->path(), found.misfits(true));
  // transformers unties such a model: to drop the tied name would train another one.
  for (const auto& [own, alias, tie] : found.both_of_tie) {
    DS_CHECK(equal_values(*source, *alias, *own), Errc::Mismatch,
             "{}: {} differs from {}, but tie_word_embeddings makes them one{}", source->path(), tie->alias, tie->name,
             model.causal ? ": set it to false" : "");
  }
  return {std::move(found), std::move(source)};
}

// Throws Errc::Numeric if a number among rows from `first` on is not finite.
void check_codes(const model::ParamRow& row, const std::string& path, const std::string& name, i64 first, i64 count,
                 const u8* rows) {
  const CodedForm& form = row.codes;
  const i64 K = row.whole_shape().back(), row_bytes = form.row_bytes(K);
  const auto is_nan = [&](u8 code) { return form.kind == CodeKind::E4M3 && (code & 0x7F) == 0x7F; };
  for (i64 n = 0; n < count; ++n) {
    for (i64 k = 0; k < K; k += form.group) {
      const CodedForm::Place at = form.place({}, 1, K, 0, k);
      const u8* const bytes = rows + n * row_bytes;
      const bool finite = std::isfinite(CodedForm::scale_at(form.scales, bytes + at.scale)) &&
                          (!form.offsets || std::isfinite(CodedForm::scale_at(DType::F32, bytes + at.offset))) &&
                          std::none_of(bytes + at.code, bytes + at.code + form.code_bytes(), is_nan);
      DS_CHECK(finite, Errc::Numeric, "{}: elements {} to {} of row {} of {} are not finite", path, k,
               k + form.group - 1, first + n, name);
    }
  }
}

void tell_removed(const Match& found) {
  if (!found.removed.empty()) log_message(LogLevel::Warning, removed_text(found.source->path(), found.removed));
}

}  // namespace

void load_weights(engine::Engine& engine, const std::string& path) {
  const bool new_head = engine.config().published.new_head;
  const Match found = match(engine.model(), path, new_head);
  if (engine.mesh().rank() == 0) tell_removed(found);
  if (!found.left_out.empty() && engine.mesh().rank() == 0)
    log_message(LogLevel::Warning, left_out_text(engine.model(), found.source->path(), found.left_out));
  if (new_head && engine.mesh().rank() == 0)
    log_message(LogLevel::Warning,
                found.anew.empty()
                    ? fmt::format("model.new_head has no effect: {} contains the whole head", found.source->path())
                    : fmt::format("{} lacks the head: random values for {}", found.source->path(),
                                  fmt::join(found.anew, ", ")));
  std::vector<char> raw;
  const auto values = [&](i64 param, i64 begin, i64 count, float* out) {
    if (found.tensors[param] == nullptr) return engine.init_values(param, begin, count, out);
    const TensorInfo& t = *found.tensors[param];
    read_floats(*found.source, t, begin, count, raw, out);
    const float* const bad = std::find_if_not(out, out + count, [](float x) { return std::isfinite(x); });
    DS_CHECK(bad == out + count, Errc::Numeric, "{}: element {} of {} is {} in fp32; no model computes with that",
             found.source->path(), begin + (bad - out), t.name, *bad);
  };
  if (engine.config().weights.form != WeightsConfig::Form::Stored) return engine.set_weights(values);
  engine.set_weights(values, [&](i64 param, i64 first, i64 count, void* out) {
    const std::string& name = found.tensors[param]->name;
    found.source->read_codes(name, first, count, out);
    check_codes(engine.row_of(param), found.source->path(), name, first, count, static_cast<const u8*>(out));
  });
}

std::map<std::string, CodedForm> codes_of_weights(const model::Model& model, const std::string& path) {
  std::map<std::string, CodedForm> codes;
  const std::unique_ptr<TensorSource> source = open_weights(path);
  const auto is_coded = [&](const TensorInfo& t) { return static_cast<bool>(source->codes_of(t.name)); };
  if (std::ranges::none_of(source->list(), is_coded)) return codes;  // tied tensors need not be compared, either
  const Match found = match(model, path, false);
  const std::vector<const model::ParamRow*> rows = model.params();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (found.tensors[i] == nullptr) continue;
    if (const CodedForm form = found.source->codes_of(found.tensors[i]->name)) codes[rows[i]->name] = form;
  }
  return codes;
}

void check_weights(const model::Model& model, const std::string& path, bool new_head, bool warns) {
  const Match found = match(model, path, new_head);
  if (warns) tell_removed(found);
}

}  // namespace ds::run
