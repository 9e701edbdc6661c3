// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/expert_names.h"

#include <charconv>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/state_source.h"

namespace ds {
namespace {

// Ends of our names.
constexpr std::string_view kGateUp = "mlp.experts.gate_up_proj", kDown = "mlp.experts.down_proj",
                           kRouter = "mlp.gate.weight";
constexpr std::string_view kWeight = ".weight";

// `name` without `end`, if it ends with that after a dot, or is that.
std::optional<std::string_view> without_end(std::string_view name, std::string_view end) {
  if (!name.ends_with(end)) return std::nullopt;
  const std::string_view begin = name.substr(0, name.size() - end.size());
  return begin.empty() || begin.ends_with('.') ? std::optional(begin) : std::nullopt;
}

enum class Place : u8 { Gate, Up, Down };

std::string_view name_at(const ExpertNames& names, Place place) {
  return place == Place::Gate ? names.gate : place == Place::Up ? names.up : names.down;
}

std::string name_of(std::string_view prefix, const ExpertNames& names, i64 expert, Place place) {
  return fmt::format("{}{}.experts.{}.{}{}", prefix, names.block, expert, name_at(names, place), kWeight);
}
std::string router_of(const ExpertNames& names) { return fmt::format("{}.gate{}", names.block, kWeight); }

// The matrix of one expert.
struct ExpertMatrix {
  std::string_view prefix;  // of its block
  const ExpertNames* names;
  i64 expert;
  Place place;
};

// Takes the last part off a name, with the dot before it.
std::string_view take_last(std::string_view& name) {
  const size_t dot = name.rfind('.'), begin = dot == name.npos ? 0 : dot + 1;
  const std::string_view last = name.substr(begin);
  name = name.substr(0, begin == 0 ? 0 : dot);
  return last;
}

std::optional<ExpertMatrix> parse_published(std::string_view name) {
  const std::string_view whole = name;
  if (!name.ends_with(kWeight)) return std::nullopt;
  name.remove_suffix(kWeight.size());
  const std::string_view matrix = take_last(name), number = take_last(name);
  if (take_last(name) != "experts") return std::nullopt;
  i64 expert = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), expert);
  const bool is_number = error == std::errc() && end == number.data() + number.size() && expert >= 0;
  if (!is_number || (number.size() > 1 && number.starts_with('0'))) return std::nullopt;
  const std::string_view block = take_last(name);
  for (const FamilySpec* family : families()) {
    const ExpertNames& names = family->experts;
    if (names.block.empty() || names.block != block) continue;
    for (const Place place : {Place::Gate, Place::Up, Place::Down})
      if (matrix == name_at(names, place))
        return ExpertMatrix{whole.substr(0, block.data() - whole.data()), &names, expert, place};
  }
  return std::nullopt;
}

// The published matrices of one block, as numbers of tensors: those of gate_up_proj in its order, then those of
// down_proj.
struct PublishedBlock {
  static constexpr size_t kMissing = static_cast<size_t>(-1);
  std::string_view prefix{};
  const ExpertNames* names = nullptr;
  size_t first = 0;  // the tensor that comes first in the file
  std::vector<size_t> matrices{};

  size_t slot(i64 expert, Place place) const {
    const i64 experts = std::ssize(matrices) / 3;
    return static_cast<size_t>(place == Place::Down ? 2 * experts + expert : 2 * expert + (place == Place::Up ? 1 : 0));
  }
};

// Joins the tensors of a file for a model whose gate_up_proj has this shape.
class Joining {
 public:
  Joining(const std::vector<i64>& gate_up, std::span<const TensorInfo> tensors)
      : experts_(gate_up[0]),
        inner_(gate_up[1] / 2),
        hidden_(gate_up[2]),
        tensors_(tensors),
        block_of_(tensors.size(), nullptr) {
    for (const TensorInfo& t : tensors) names_.insert(t.name);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::optional<ExpertMatrix> m = parse_published(tensors[i].name);
      // A matrix too many, or beside batches, is none of the model's; match_weights says so.
      if (!m || m->expert >= experts_ || has(m->prefix, kGateUp) || has(m->prefix, kDown)) continue;
      PublishedBlock& block = blocks_.try_emplace(m->prefix).first->second;
      if (block.names == nullptr)
        block = {m->prefix, m->names, i, std::vector(static_cast<size_t>(3 * experts_), PublishedBlock::kMissing)};
      size_t& slot = block.matrices[block.slot(m->expert, m->place)];
      if (slot != PublishedBlock::kMissing) continue;
      slot = i;
      block_of_[i] = &block;
    }
  }

  void check(std::span<const ForeignTensor> foreign, const std::string& path) const {
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
        const auto middle = block.matrices.begin() + 2 * experts_;
        result.push_back(
            batch(block.prefix, kGateUp, {experts_, 2 * inner_, hidden_}, {block.matrices.begin(), middle}));
        result.push_back(batch(block.prefix, kDown, {experts_, hidden_, inner_}, {middle, block.matrices.end()}));
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

  void check_block(const PublishedBlock& block, std::span<const ForeignTensor> foreign, const std::string& path,
                   std::vector<std::string>& problems) const {
    const TensorInfo& first = tensors_[block.first];
    for (i64 e = 0; e < experts_; ++e) {
      for (const Place place : {Place::Gate, Place::Up, Place::Down}) {
        const size_t i = block.matrices[block.slot(e, place)];
        const std::string name = name_of(block.prefix, *block.names, e, place);
        if (i == PublishedBlock::kMissing) {
          const auto it = std::ranges::find(foreign, name, &ForeignTensor::name);
          DS_CHECK(it == foreign.end(), Errc::Unavailable,
                   "{}: tensor '{}' has elements of type {}, which cannot be read", path, it->name, it->type);
          problems.push_back(fmt::format("{} is missing", name));
          continue;
        }
        const TensorInfo& t = tensors_[i];
        const std::vector<i64> wanted =
            place == Place::Down ? std::vector{hidden_, inner_} : std::vector{inner_, hidden_};
        if (t.shape != wanted)
          problems.push_back(fmt::format("{} has shape [{}], the model needs [{}]", name, fmt::join(t.shape, ","),
                                         fmt::join(wanted, ",")));
        if (t.dtype != first.dtype)
          problems.push_back(fmt::format("{} is {}, but {} is {}: the experts of a block need one type", name,
                                         dtype_name(t.dtype), first.name, dtype_name(first.dtype)));
      }
    }
  }

  static Rearranged batch(std::string_view prefix, std::string_view end, std::vector<i64> shape,
                          const std::vector<size_t>& matrices) {
    Rearranged batch{fmt::format("{}{}", prefix, end), std::move(shape), {}};
    for (const size_t tensor : matrices) batch.parts.push_back({tensor, 0});
    return batch;
  }

  std::string our_name(const std::string& name) const {
    for (const FamilySpec* family : families()) {
      if (family->experts.block.empty()) continue;
      const auto prefix = without_end(name, router_of(family->experts));
      if (prefix && !has(*prefix, kRouter)) return fmt::format("{}{}", *prefix, kRouter);
    }
    return name;
  }

  i64 experts_, inner_, hidden_;
  std::span<const TensorInfo> tensors_;
  std::unordered_set<std::string_view> names_;
  std::unordered_map<std::string_view, PublishedBlock> blocks_;  // by prefix
  std::vector<const PublishedBlock*> block_of_;                  // of each tensor; null: none
};

std::vector<Rearranged> as_they_are(std::span<const TensorInfo> tensors) {
  std::vector<Rearranged> result;
  for (size_t i = 0; i < tensors.size(); ++i) result.push_back({tensors[i].name, tensors[i].shape, {{i, 0}}});
  return result;
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
  const std::vector<const model::ParamRow*> rows = model.params();
  const auto batch = std::ranges::find_if(rows, [](const model::ParamRow* row) {
    return row->whole_shape().size() == 3 && without_end(row->name, kGateUp).has_value();
  });
  if (batch == rows.end()) return as_they_are(tensors);
  const Joining joining((*batch)->whole_shape(), tensors);
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

std::vector<Rearranged> part_experts(const ExpertNames& names, std::span<const TensorInfo> tensors) {
  std::vector<Rearranged> result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& t = tensors[i];
    const auto gate_up = without_end(t.name, kGateUp), down = without_end(t.name, kDown),
               router = without_end(t.name, kRouter);
    const bool is_batch = t.shape.size() == 3 && ((gate_up && t.shape[1] % 2 == 0) || down);
    if (!is_batch) {
      result.push_back({router ? fmt::format("{}{}", *router, router_of(names)) : t.name, t.shape, {{i, 0}}});
      continue;
    }
    const std::vector<i64> shape = {gate_up ? t.shape[1] / 2 : t.shape[1], t.shape[2]};
    const i64 numel = shape[0] * shape[1];
    i64 first = 0;
    for (i64 e = 0; e < t.shape[0]; ++e) {
      for (const Place place : gate_up ? std::vector{Place::Gate, Place::Up} : std::vector{Place::Down}) {
        result.push_back({name_of(gate_up ? *gate_up : *down, names, e, place), shape, {{i, first}}});
        first += numel;
      }
    }
  }
  return result;
}

}  // namespace ds
