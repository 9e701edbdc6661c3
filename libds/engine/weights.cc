// SPDX-License-Identifier: Apache-2.0
#include "engine/weights.h"

#include <filesystem>
#include <set>

#include "formats/tensor_io.h"

namespace ds::engine {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPrefix = "transformer.";

// Buffers that old files carry along.
bool is_known_extra(std::string_view name, bool tied) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
}

}  // namespace

std::string published_weights(const std::string& model_path) {
  if (model_path.empty() || !fs::is_directory(model_path)) return "";
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    if (fs::exists(fs::path(model_path) / name)) return model_path;
  }
  return "";
}

void load_weights(Engine& engine, const std::string& path) {
  const std::unique_ptr<TensorSource> source = open_source(path);
  std::vector<const TensorInfo*> tensors;  // by parameter number
  std::set<std::string_view> used;
  std::string problems;
  for (const auto& unit : engine.plan().rows) {
    for (const model::ParamRow& row : unit) {
      const TensorInfo* t = source->find(row.name);
      if (t == nullptr && row.name.starts_with(kPrefix))
        t = source->find(std::string_view(row.name).substr(kPrefix.size()));
      tensors.push_back(t);
      if (t == nullptr) {
        problems += fmt::format("\n  {} is missing", row.name);
        continue;
      }
      used.insert(t->name);
      if (t->shape != row.shape) {
        problems += fmt::format("\n  {} has shape [{}], the model wants [{}]", t->name, fmt::join(t->shape, ","),
                                fmt::join(row.shape, ","));
      }
    }
  }
  for (const TensorInfo& t : source->list()) {
    if (!used.contains(t.name) && !is_known_extra(t.name, engine.model().tied)) {
      problems += fmt::format("\n  {} is not a parameter of the model", t.name);
    }
  }
  DS_CHECK(problems.empty(), Errc::Mismatch, "{} does not fit the model:{}", source->path(), problems);

  std::vector<char> raw;
  engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
    const TensorInfo& t = *tensors[static_cast<size_t>(param)];
    raw.resize(static_cast<size_t>(count * dtype_bytes(t.dtype)));
    source->read(t.name, begin, count, raw.data());
    convert_elements(DType::F32, out, t.dtype, raw.data(), count);
  });
}

}  // namespace ds::engine
