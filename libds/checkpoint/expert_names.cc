// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/expert_names.h"

#include <charconv>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/state_source.h"
#include "formats/fp8_source.h"

namespace ds {
namespace {

// A batch, by the end of our name, and the ends of the published names of one expert's part of it.
struct Batch {
  std::string_view ours;
  size_t dims;  // of its shape
  std::vector<std::string> parts;
};
constexpr std::string_view kRouter = "mlp.gate.weight";

std::vector<Batch> batches_of(const ExpertNames& names) {
  const auto weight = [](std::string_view matrix) { return fmt::format("{}.weight", matrix); };
  if (!names.gate.empty()) {
    return {{"mlp.experts.gate_up_proj", 3, {weight(names.gate), weight(names.up)}},
            {"mlp.experts.down_proj", 3, {weight(names.down)}}};
  }
  return {{"mlp.experts.c_fc.weight", 3, {"c_fc.weight"}},
          {"mlp.experts.c_proj.weight", 3, {"c_proj.weight"}},
          {"mlp.experts.c_fc.bias", 2, {"c_fc.bias"}},
          {"mlp.experts.c_proj.bias", 2, {"c_proj.bias"}}};
}

// `name` without `end`, if it ends with that after a dot, or is that.
std::optional<std::string_view> without_end(std::string_view name, std::string_view end) {
  if (!name.ends_with(end)) return std::nullopt;
  const std::string_view begin = name.substr(0, name.size() - end.size());
  return begin.empty() || begin.ends_with('.') ? std::optional(begin) : std::nullopt;
}

std::string name_of(std::string_view prefix, const ExpertNames& names, i64 expert, std::string_view part) {
  return fmt::format("{}{}.{}.{}.{}", prefix, names.block, names.experts, expert, part);
}
std::string router_of(const ExpertNames& names) { return fmt::format("{}.{}", names.block, names.router); }

// A tensor of one expert: its part of a batch.
struct ExpertTensor {
  std::string_view prefix;  // of its block
  const ExpertNames* names;
  i64 expert;
  size_t batch, part;
};

std::optional<i64> number_of(std::string_view text) {
  i64 number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = error == std::errc() && end == text.data() + text.size() && number >= 0;
  return is_number && (text.size() == 1 || !text.starts_with('0')) ? std::optional(number) : std::nullopt;
}

// The published names of families, each once.
const std::vector<std::pair<const ExpertNames*, std::vector<Batch>>>& published() {
  static const auto all = [] {
    std::vector<std::pair<const ExpertNames*, std::vector<Batch>>> list;
    for (const FamilySpec* family : families()) {
      if (!family->experts.block.empty()) list.emplace_back(&family->experts, batches_of(family->experts));
    }
    return list;
  }();
  return all;
}

std::optional<ExpertTensor> parse_published(std::string_view name) {
  for (const auto& [names, batches] : published()) {
    for (size_t b = 0; b < batches.size(); ++b) {
      for (size_t p = 0; p < batches[b].parts.size(); ++p) {
        const auto before = without_end(name, batches[b].parts[p]);
        if (!before || before->empty()) continue;
        std::string_view rest = before->substr(0, before->size() - 1);  // without the dot
        const size_t dot = rest.rfind('.');
        const auto expert = dot == rest.npos ? std::nullopt : number_of(rest.substr(dot + 1));
        if (!expert) continue;
        rest = rest.substr(0, dot);
        if (const auto prefix = without_end(rest, fmt::format("{}.{}", names->block, names->experts)))
          return ExpertTensor{*prefix, names, *expert, b, p};
      }
    }
  }
  return std::nullopt;
}

// The shape of each part of a batch.
std::vector<i64> part_shape(const std::vector<i64>& batch, const Batch& of) {
  std::vector<i64> shape(batch.begin() + 1, batch.end());
  shape[0] /= std::ssize(of.parts);
  return shape;
}

// The shapes of a block's batches, of which blocks may have different numbers of experts.
struct BatchShapes {
  std::string prefix;  // of the block
  std::vector<std::vector<i64>> shapes{};

  i64 experts() const { return shapes[0][0]; }
};

// The published tensors of one block, by number: for each batch those of its parts, in its order.
struct PublishedBlock {
  static constexpr size_t kMissing = static_cast<size_t>(-1);
  std::string_view prefix{};
  const ExpertNames* names = nullptr;
  const BatchShapes* wanted = nullptr;
  std::vector<Batch> batches{};
  size_t first = 0;  // the tensor that comes first in the file
  std::vector<std::vector<size_t>> tensors{};

  PublishedBlock() = default;
  PublishedBlock(const ExpertTensor& t, size_t number, const BatchShapes& shapes)
      : prefix(t.prefix), names(t.names), wanted(&shapes), batches(batches_of(*t.names)), first(number) {
    for (const Batch& b : batches)
      tensors.emplace_back(static_cast<size_t>(shapes.experts()) * b.parts.size(), kMissing);
  }
  size_t& slot(i64 expert, size_t batch, size_t part) {
    return tensors[batch][static_cast<size_t>(expert) * batches[batch].parts.size() + part];
  }
};

// Joins the tensors of a file for a model whose blocks with experts have these shapes.
class Joining {
 public:
  Joining(std::vector<BatchShapes> shapes, std::span<const TensorInfo> tensors)
      : shapes_(std::move(shapes)), tensors_(tensors), block_of_(tensors.size(), nullptr) {
    for (const TensorInfo& t : tensors) names_.insert(t.name);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::optional<ExpertTensor> t = parse_published(tensors[i].name);
      // One too many, or beside batches, or of another form, is none of the model's; match_weights says so.
      if (!t) continue;
      const BatchShapes& wanted = shapes_of(t->prefix);
      if (t->expert >= wanted.experts() || batches_of(*t->names).size() != wanted.shapes.size() || has_batches(*t))
        continue;
      PublishedBlock& block = blocks_.try_emplace(t->prefix, *t, i, wanted).first->second;
      size_t& slot = block.slot(t->expert, t->batch, t->part);
      if (slot != PublishedBlock::kMissing) continue;
      slot = i;
      block_of_[i] = &block;
    }
  }

  void check(std::span<const ForeignTensor> foreign, const std::string& path) {
    std::vector<std::string> problems;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (starts_block(i)) check_block(*block_of_[i], foreign, path, problems);
    }
    DS_CHECK(problems.empty(), Errc::Mismatch, "{} does not fit the model:\n  {}", path, first_lines(problems));
  }

  std::vector<Rearranged> result() const {
    std::vector<Rearranged> result;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (starts_block(i)) {
        const PublishedBlock& block = *block_of_[i];
        for (size_t b = 0; b < block.batches.size(); ++b) {
          Rearranged batch{fmt::format("{}{}", block.prefix, block.batches[b].ours), block.wanted->shapes[b], {}};
          for (const size_t tensor : block.tensors[b]) batch.parts.push_back({tensor, 0});
          result.push_back(std::move(batch));
        }
      }
      if (block_of_[i] == nullptr) result.push_back({our_name(tensors_[i].name), tensors_[i].shape, {{i, 0}}});
    }
    return result;
  }

 private:
  bool has(std::string_view prefix, std::string_view end) const {
    return names_.contains(fmt::format("{}{}", prefix, end));
  }
  bool starts_block(size_t tensor) const { return block_of_[tensor] != nullptr && block_of_[tensor]->first == tensor; }

  void check_block(PublishedBlock& block, std::span<const ForeignTensor> foreign, const std::string& path,
                   std::vector<std::string>& problems) const {
    const TensorInfo& first = tensors_[block.first];
    for (i64 e = 0; e < block.wanted->experts(); ++e) {
      for (size_t b = 0; b < block.batches.size(); ++b) {
        for (size_t p = 0; p < block.batches[b].parts.size(); ++p) {
          const size_t i = block.slot(e, b, p);
          const std::string name = name_of(block.prefix, *block.names, e, block.batches[b].parts[p]);
          if (i == PublishedBlock::kMissing) {
            const auto it = std::ranges::find(foreign, name, &ForeignTensor::name);
            DS_CHECK(it == foreign.end(), Errc::Unavailable,
                     "{}: tensor '{}' has elements of type {}, which cannot be read", path, it->name, it->type);
            problems.push_back(fmt::format("{} is missing", name));
            continue;
          }
          const TensorInfo& t = tensors_[i];
          const std::vector<i64> wanted = part_shape(block.wanted->shapes[b], block.batches[b]);
          if (t.shape != wanted)
            problems.push_back(fmt::format("{} has shape [{}], the model needs [{}]", name, fmt::join(t.shape, ","),
                                           fmt::join(wanted, ",")));
          if (t.dtype == DType::F8E4M3) {  // later messages would name the batch
            problems.push_back(fmt::format("{} is {}{}", name, dtype_name(t.dtype), missing_scales(name, t.dtype)));
          } else if (t.dtype != first.dtype) {
            problems.push_back(fmt::format("{} is {}, but {} is {}: the experts of a block need one type", name,
                                           dtype_name(t.dtype), first.name, dtype_name(first.dtype)));
          }
        }
      }
    }
  }

  // Those of the block whose name in the model, or the end of it, this is; of a block that the model lacks, any.
  const BatchShapes& shapes_of(std::string_view prefix) const {
    const auto it = std::ranges::find_if(shapes_, [&](const BatchShapes& s) {
      return without_end(s.prefix, prefix).has_value() || without_end(prefix, s.prefix).has_value();
    });
    return it == shapes_.end() ? shapes_.front() : *it;
  }

  std::string our_name(const std::string& name) const {
    for (const FamilySpec* family : families()) {
      if (family->experts.block.empty()) continue;
      const auto prefix = without_end(name, router_of(family->experts));
      if (prefix && !has(*prefix, kRouter)) return fmt::format("{}{}", *prefix, kRouter);
    }
    return name;
  }

  bool has_batches(const ExpertTensor& t) const {
    return std::ranges::any_of(batches_of(*t.names), [&](const Batch& b) { return has(t.prefix, b.ours); });
  }

  std::vector<BatchShapes> shapes_;
  std::span<const TensorInfo> tensors_;
  std::unordered_set<std::string_view> names_;
  std::unordered_map<std::string_view, PublishedBlock> blocks_;  // by prefix
  std::vector<PublishedBlock*> block_of_;                        // of each tensor; null: none
};

std::vector<Rearranged> as_they_are(std::span<const TensorInfo> tensors) {
  std::vector<Rearranged> result;
  for (size_t i = 0; i < tensors.size(); ++i) result.push_back({tensors[i].name, tensors[i].shape, {{i, 0}}});
  return result;
}

// The shapes of batches in each block that has them, all of one published form.
std::vector<BatchShapes> shapes_in(const model::Model& model) {
  const std::vector<const model::ParamRow*> rows = model.params();
  for (const auto& [names, batches] : published()) {
    std::vector<BatchShapes> blocks;
    for (const Batch& b : batches) {
      for (const model::ParamRow* row : rows) {
        const auto prefix = row->whole_shape().size() == b.dims ? without_end(row->name, b.ours) : std::nullopt;
        if (!prefix) continue;
        auto block = std::ranges::find(blocks, *prefix, &BatchShapes::prefix);
        if (block == blocks.end()) block = blocks.insert(block, {.prefix = std::string(*prefix)});
        block->shapes.push_back(row->whole_shape());
      }
    }
    std::erase_if(blocks, [&](const BatchShapes& block) { return block.shapes.size() != batches.size(); });
    if (!blocks.empty()) return blocks;
  }
  return {};
}

class JoinedSource final : public TensorSource {
 public:
  JoinedSource(std::unique_ptr<TensorSource> source, std::vector<TensorInfo> list, std::vector<Rearranged> tensors)
      : TensorSource(source->path(), std::move(list), source->foreign(), source->metadata()),
        source_(std::move(source)),
        rearranged_(std::move(tensors)) {}

  std::vector<std::string> files() const override { return source_->files(); }
  void close() const override { source_->close(); }
  std::vector<std::string> verify(const Tick& tick) const override { return source_->verify(tick); }

  // The form of a batch is that which all its parts have, if they consist of rows of the batch.
  CodedForm codes_of(std::string_view name) const override {
    const Rearranged& t = rearranged_[index_of(name)];
    CodedForm form;
    for (const Rearranged::Part& part : t.parts) {
      const TensorInfo& stored = source_->list()[part.tensor];
      const CodedForm own = source_->codes_of(stored.name);
      const i64 cols = stored.shape.empty() ? 0 : stored.shape.back();
      const bool has_rows = cols > 0 && cols == t.shape.back() && part.first % cols == 0;
      if (!own || !has_rows || (&part != &t.parts.front() && own != form)) return {};
      form = own;
    }
    return form;
  }
  void read_codes(std::string_view name, i64 first_row, i64 count, void* out) const override {
    const Rearranged& t = rearranged_[index_of(name)];
    const i64 cols = t.shape.back();
    const i64 row_bytes = source_->codes_of(source_->list()[t.parts.front().tensor].name).row_bytes(cols);
    t.for_each_range(first_row * cols, count * cols, [&](size_t part, i64 first, i64 n, i64 done) {
      source_->read_codes(source_->list()[part].name, first / cols, n / cols,
                          static_cast<char*>(out) + done / cols * row_bytes);
    });
  }

 private:
  void read_elements(size_t tensor, i64 first_elem, i64 count, void* out) const override {
    const i64 size = dtype_bytes(list()[tensor].dtype);
    rearranged_[tensor].for_each_range(first_elem, count, [&](size_t part, i64 first, i64 n, i64 done) {
      source_->read(source_->list()[part].name, first, n, static_cast<char*>(out) + done * size);
    });
  }

  std::unique_ptr<TensorSource> source_;
  std::vector<Rearranged> rearranged_;
};

}  // namespace

std::vector<Rearranged> join_experts(const model::Model& model, std::span<const TensorInfo> tensors,
                                     std::span<const ForeignTensor> foreign, const std::string& path) {
  const std::vector<BatchShapes> shapes = shapes_in(model);
  if (shapes.empty()) return as_they_are(tensors);
  Joining joining(shapes, tensors);
  joining.check(foreign, path);
  return joining.result();
}

std::unique_ptr<TensorSource> join_experts(const model::Model& model, std::unique_ptr<TensorSource> source) {
  std::vector<Rearranged> tensors = join_experts(model, source->list(), source->foreign(), source->path());
  if (std::ranges::equal(tensors, source->list(), {}, &Rearranged::name, &TensorInfo::name)) return source;
  std::vector<TensorInfo> list;
  for (const Rearranged& t : tensors) list.push_back({t.name, source->list()[t.parts.front().tensor].dtype, t.shape});
  return std::make_unique<JoinedSource>(std::move(source), std::move(list), std::move(tensors));
}

namespace {

// The published name of a matrix of one expert under the name that most families have; empty: it is none.
std::string named_as(const ExpertNames& names, std::string_view name) {
  constexpr std::string_view kExperts = "mlp.experts.";
  const size_t at = name.rfind(kExperts);
  if (at == name.npos || names.gate.empty()) return "";
  const std::string_view after = name.substr(at + kExperts.size());
  const size_t dot = std::min(after.find('.'), after.size());
  const std::optional<i64> expert = number_of(after.substr(0, dot));
  if (!expert) return "";
  for (const auto& [common, own] :
       {std::pair{".gate_proj.weight", names.gate}, {".up_proj.weight", names.up}, {".down_proj.weight", names.down}}) {
    if (after.substr(dot) == common) return name_of(name.substr(0, at), names, *expert, fmt::format("{}.weight", own));
  }
  return "";
}

}  // namespace

std::vector<Rearranged> part_experts(const ExpertNames& names, std::span<const TensorInfo> tensors) {
  const std::vector<Batch> batches = batches_of(names);
  std::vector<Rearranged> result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& t = tensors[i];
    const auto batch = std::ranges::find_if(batches, [&](const Batch& b) {
      return t.shape.size() == b.dims && without_end(t.name, b.ours) && t.shape[1] % std::ssize(b.parts) == 0;
    });
    if (batch == batches.end()) {
      const auto router = without_end(t.name, kRouter);
      const std::string own = router ? fmt::format("{}{}", *router, router_of(names)) : named_as(names, t.name);
      result.push_back({own.empty() ? t.name : own, t.shape, {{i, 0}}});
      continue;
    }
    const std::string_view prefix = *without_end(t.name, batch->ours);
    const std::vector<i64> shape = part_shape(t.shape, *batch);
    i64 first = 0;
    for (i64 e = 0; e < t.shape[0]; ++e) {
      for (const std::string& part : batch->parts) {
        result.push_back({name_of(prefix, names, e, part), shape, {{i, first}}});
        first += model::ParamRow::product(shape);
      }
    }
  }
  return result;
}

}  // namespace ds
