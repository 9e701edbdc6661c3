// SPDX-License-Identifier: Apache-2.0
#include "config/sparse_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "config/model_config.h"

namespace ds {
namespace {

constexpr std::string_view kSection = "sparse_attention.";
constexpr std::string_view kMode = "sparse_attention.mode", kSparseBlock = "sparse_attention.block",
                           kPerHead = "sparse_attention.different_layout_per_head",
                           kLocalBlocks = "sparse_attention.num_local_blocks",
                           kGlobalBlocks = "sparse_attention.num_global_blocks",
                           kAttention = "sparse_attention.attention",
                           kHorizontal = "sparse_attention.horizontal_global_attention",
                           kPatterns = "sparse_attention.num_different_global_patterns",
                           kRandomBlocks = "sparse_attention.num_random_blocks",
                           kWindows = "sparse_attention.local_window_blocks",
                           kIndices = "sparse_attention.global_block_indices",
                           kEndIndices = "sparse_attention.global_block_end_indices",
                           kSliding = "sparse_attention.num_sliding_window_blocks", kLayout = "sparse_attention.layout";

// THE list: which modes use a key.
using Mode = SparseAttentionMode;
struct Uses {
  std::string_view key;
  std::initializer_list<Mode> modes;
};
const Uses kUses[] = {
    {kMode, {Mode::Dense, Mode::Fixed, Mode::Variable, Mode::BigBird, Mode::BSLongformer, Mode::Local, Mode::Layout}},
    {kSparseBlock,
     {Mode::Dense, Mode::Fixed, Mode::Variable, Mode::BigBird, Mode::BSLongformer, Mode::Local, Mode::Layout}},
    {kPerHead, {Mode::Fixed, Mode::Variable, Mode::BigBird, Mode::BSLongformer}},
    {kLocalBlocks, {Mode::Fixed}},
    {kGlobalBlocks, {Mode::Fixed, Mode::BigBird}},
    {kAttention, {Mode::Fixed, Mode::Variable, Mode::BigBird, Mode::BSLongformer, Mode::Local}},
    {kHorizontal, {Mode::Fixed, Mode::Variable}},
    {kPatterns, {Mode::Fixed}},
    {kRandomBlocks, {Mode::Variable, Mode::BigBird}},
    {kWindows, {Mode::Variable}},
    {kIndices, {Mode::Variable, Mode::BSLongformer}},
    {kEndIndices, {Mode::Variable, Mode::BSLongformer}},
    {kSliding, {Mode::BigBird, Mode::BSLongformer, Mode::Local}},
    {kLayout, {Mode::Layout}},
};

bool takes(Mode mode, std::string_view path) {
  const auto* uses = std::ranges::find(kUses, path, &Uses::key);
  return uses != std::end(kUses) && std::ranges::count(uses->modes, mode) > 0;
}

// "\"fixed\" and \"variable\"": the modes that use a key.
std::string takers(std::string_view path) {
  const auto& modes = std::ranges::find(kUses, path, &Uses::key)->modes;
  std::string names;
  for (const Mode& mode : modes)
    names += fmt::format("{}\"{}\"",
                         names.empty()              ? ""
                         : &mode + 1 == modes.end() ? " and "
                                                    : ", ",
                         sparse_attention_name(mode));
  return names;
}

void reset(const Key& key, Config& c) {
  Config defaults;
  const Slot from = key.slot(&defaults);
  std::visit(
      [&]<class T>(T to) {
        if constexpr (std::is_same_v<T, EnumSlot>)
          *to.value = *std::get<EnumSlot>(from).value;
        else if constexpr (std::is_pointer_v<T>)
          *to = *std::get<T>(from);
      },
      key.slot(&c));
}

void reset_unused(Config& c, Reader& r) {
  const Mode mode = c.sparse_attention.mode;
  for (const Key& key : config_keys()) {
    if (key.kind != KeyKind::Effect || !key.path.starts_with(kSection) || key.path == kMode || takes(mode, key.path))
      continue;
    if (r.given(key.path) && key.path == kLayout && mode != Mode::None)
      r.error(key.path,
              fmt::format("is a file for {} \"layout\", which is \"{}\"", kMode, sparse_attention_name(mode)));
    else if (r.given(key.path))
      r.warning(key.path, mode == Mode::None ? fmt::format("has no effect: {} is \"none\"", kMode)
                                             : fmt::format("has no effect: {} is \"{}\", and this is for {}", kMode,
                                                           sparse_attention_name(mode), takers(key.path)));
    reset(key, c);
  }
}

void resolve_direction(Config& c, Reader& r) {
  SparseAttentionConfig& s = c.sparse_attention;
  const bool given = takes(s.mode, kAttention) && r.given(kAttention);
  if (r.broken(kAttention) || (!given && r.broken("model"))) return;
  if (!given) s.unidirectional = c.model.causal();
  if (given && s.unidirectional && c.model.layers > 0 && !c.model.causal())
    r.error(kAttention, fmt::format("a model of type \"{}\" attends to what comes before and after: \"bidirectional\" "
                                    "is its attention",
                                    type_name(c.model)));
  if (s.horizontal_global_attention && s.unidirectional && !r.broken(kHorizontal))
    r.error(kHorizontal, fmt::format("needs {} \"bidirectional\", which a causal model takes, too: its own mask holds "
                                     "besides",
                                     kAttention));
}

void check_fixed(const SparseAttentionConfig& s, Reader& r) {
  if (r.any_broken({kLocalBlocks, kGlobalBlocks})) return;
  if (s.num_local_blocks % s.num_global_blocks != 0)
    return r.error(
        r.given(kGlobalBlocks) ? kGlobalBlocks : kLocalBlocks,
        fmt::format("the {} blocks of a window are no multiple of {} global ones; {} would do", s.num_local_blocks,
                    s.num_global_blocks, std::gcd(s.num_local_blocks, s.num_global_blocks)));
  if (r.any_broken({kPatterns, kPerHead})) return;
  const i64 most = s.num_local_blocks / s.num_global_blocks;
  if (s.num_different_global_patterns > 1 && !s.different_layout_per_head)
    r.error(kPatterns, fmt::format("more than 1 are for heads with layouts of their own: set {} to true", kPerHead));
  if (s.num_different_global_patterns > most)
    r.error(kPatterns, fmt::format("{} patterns are more than places of {} global blocks in a window of {}: at most {}",
                                   s.num_different_global_patterns, s.num_global_blocks, s.num_local_blocks, most));
}

void check_lists(const SparseAttentionConfig& s, Reader& r) {
  if (s.local_window_blocks.empty()) r.error(kWindows, "is empty: it has the size of at least one window");
  if (s.global_block_indices.empty()) r.error(kIndices, "is empty: it has at least one block");
  if (r.any_broken({kIndices, kEndIndices}) || !r.given(kEndIndices)) return;
  const std::vector<i64>&begins = s.global_block_indices, &ends = s.global_block_end_indices;
  if (begins.size() != ends.size())
    return r.error(kEndIndices, fmt::format("has {} ends of the {} ranges that begin in {}; without it each of these "
                                            "is one block",
                                            ends.size(), begins.size(), kIndices));
  for (size_t i = 0; i < begins.size(); ++i) {
    if (ends[i] <= begins[i])
      return r.error(json_element(kEndIndices, i), fmt::format("{} is not above the {} at which the range begins: an "
                                                               "end is the block behind the last one",
                                                               ends[i], begins[i]));
  }
}

void check_length(const Config& c, Reader& r) {
  const SparseAttentionConfig& s = c.sparse_attention;
  if (r.any_broken({kSparseBlock, "data.seq_length"})) return;
  const i64 blocks = (c.data.seq_length + s.block - 1) / s.block;
  const std::string sequence =
      fmt::format("a sequence has {} ({} tokens in blocks of {})", blocks, c.data.seq_length, s.block);
  // A sliding window that is wider than the sequence sees all of it.
  for (const auto& [key, count] :
       {std::pair{kRandomBlocks, s.num_random_blocks}, {kGlobalBlocks, s.num_global_blocks}}) {
    if (takes(s.mode, key) && r.given(key) && !r.broken(key) && count > blocks)  // a default fits any length
      r.error(key, fmt::format("{} blocks are too many: {}", count, sequence));
  }
  if (const i64 sp = c.sequence_parallel.size; sp > 1 && c.sequence_parallel.mode == SequenceParallelMode::Ring) {
    const i64 chunk = c.data.seq_length / (2 * sp);
    if (chunk % s.block != 0)
      r.error(kSparseBlock,
              fmt::format("blocks of {} tokens do not meet in ring attention, which cuts a sequence of {} "
                          "into chunks of {}; sequence_parallel_mode \"ulysses\" has no chunks",
                          s.block, c.data.seq_length, chunk));
  }
  if (!r.any_broken({kIndices, kEndIndices})) {
    for (const i64 index : s.global_block_indices) {
      if (index >= blocks) {
        r.warning(kIndices, fmt::format("block {} has no effect: {}", index, sequence));
        break;
      }
    }
  }
  const bool one_each = c.model.layers > 0 && (s.different_layout_per_head || s.mode == Mode::Layout);
  const i64 layouts = one_each ? std::max<i64>(1, c.model.heads) : 1;
  constexpr double kMostBytes = 0x1p30;
  const double bytes = static_cast<double>(layouts) * static_cast<double>(blocks) * static_cast<double>(blocks) / 4;
  if (bytes > kMostBytes)
    r.error(kSparseBlock,
            fmt::format("{} layouts of {} x {} blocks take {:.1f} GiB, beyond {:.0f} GiB; larger blocks or "
                        "one layout of all heads take less",
                        layouts, blocks, blocks, bytes / 0x1p30, kMostBytes / 0x1p30));
}

}  // namespace

bool sparse_attention_takes(Mode mode, std::string_view key) { return takes(mode, fmt::format("{}{}", kSection, key)); }

void resolve_sparse_attention(Config& c, const ConfigText& text, Reader& r) {
  SparseAttentionConfig& s = c.sparse_attention;
  const auto section = text.root().find("sparse_attention");
  if (section == text.root().end() || !section->is_object() || r.broken(kMode)) return;
  if (!r.given(kMode)) s.mode = Mode::Fixed;
  reset_unused(c, r);
  if (s.mode == Mode::None) return;
  if (!r.given(kRandomBlocks) && s.mode == Mode::BigBird) s.num_random_blocks = 1;
  if (s.mode == Mode::Layout && s.layout.empty() && !r.broken(kLayout))
    r.error(kLayout, fmt::format("is missing: the file that has it, with {} \"layout\"", kMode));
  if (constexpr std::array<i64, 4> kBlocks = {16, 32, 64, 128};
      std::ranges::count(kBlocks, s.block) == 0 && !r.broken(kSparseBlock))
    r.error(kSparseBlock, fmt::format("{} tokens are no block; 16, 32, 64 and 128 are", s.block));
  resolve_direction(c, r);
  if (s.mode == Mode::Fixed) check_fixed(s, r);
  if (s.num_sliding_window_blocks % 2 == 0 && !r.broken(kSliding))
    r.error(kSliding,
            fmt::format("{} is even, and as many blocks are seen before as behind: {} or {}",
                        s.num_sliding_window_blocks, s.num_sliding_window_blocks - 1, s.num_sliding_window_blocks + 1));
  check_lists(s, r);
  check_length(c, r);
}

}  // namespace ds
