// SPDX-License-Identifier: Apache-2.0
#include "model/attention_pattern.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "config/named_files.h"
#include "ds/kernels/philox.h"
#include "formats/tensor_io.h"

namespace ds::model {
namespace {

struct BlockRange {
  i64 begin, end;
};

// The bits of a row.
struct RowBits {
  u64* words;

  bool has(i64 i) const noexcept { return (words[i / 64] >> (i % 64) & 1) != 0; }
  void set(i64 i) const noexcept { words[i / 64] |= u64{1} << (i % 64); }
  void set(BlockRange r) const noexcept {
    for_words(r, [](u64& word, u64 mask) { word |= mask; });
  }
  void clear(BlockRange r) const noexcept {
    for_words(r, [](u64& word, u64 mask) { word &= ~mask; });
  }
  bool any(BlockRange r) const noexcept {
    u64 seen = 0;
    for_words(r, [&](u64 word, u64 mask) { seen |= word & mask; });
    return seen != 0;
  }

 private:
  void for_words(BlockRange r, auto&& change) const noexcept {
    if (r.begin >= r.end) return;
    const i64 first = r.begin / 64, last = (r.end - 1) / 64;
    for (i64 w = first; w <= last; ++w) {
      u64 mask = ~u64{0};
      if (w == first) mask &= ~u64{0} << (r.begin % 64);
      if (w == last) mask &= ~u64{0} >> (63 - (r.end - 1) % 64);
      change(words[w], mask);
    }
  }
};

// Bit j of word i becomes bit i of word j (Warren, "Hacker's Delight", section 7-3), by exchanging halves of ever
// smaller squares.
void transpose(std::array<u64, 64>& square) noexcept {
  u64 mask = 0x00000000ffffffffu;
  for (size_t half = 32; half > 0; half /= 2, mask ^= mask << half) {
    for (size_t i = 0; i < 64; i = (i + half + 1) & ~half) {
      const u64 moved = (square[i] >> half ^ square[i + half]) & mask;
      square[i] ^= moved << half;
      square[i + half] ^= moved;
    }
  }
}

bool is_sliding(SparseAttentionMode mode) {
  using enum SparseAttentionMode;
  return mode == BigBird || mode == BSLongformer || mode == Local;
}

// The local blocks of each row: its window, its neighbours, or all.
std::vector<BlockRange> local_blocks(const SparseAttentionConfig& c, i64 count) {
  std::vector<BlockRange> rows(static_cast<size_t>(count), {0, count});
  if (is_sliding(c.mode)) {
    const i64 beside = c.num_sliding_window_blocks / 2;
    for (i64 row = 0; row < count; ++row)
      rows[static_cast<size_t>(row)] = {std::max<i64>(0, row - beside), std::min(row + beside + 1, count)};
  } else if (c.mode != SparseAttentionMode::Dense) {
    const std::vector<i64> sizes =
        c.mode == SparseAttentionMode::Fixed ? std::vector<i64>{c.num_local_blocks} : c.local_window_blocks;
    size_t window = 0;
    for (i64 begin = 0, end = 0; begin < count; begin = end) {
      end = std::min(begin + sizes[window], count);
      if (window + 1 < sizes.size()) ++window;
      for (i64 row = begin; row < end; ++row)
        rows[static_cast<size_t>(row)] = {begin, c.unidirectional ? row + 1 : end};
    }
  }
  return rows;
}

// The global blocks, which distant blocks attend to, in ascending order of their begin.
std::vector<BlockRange> global_blocks(const SparseAttentionConfig& c, i64 head, i64 count) {
  std::vector<BlockRange> blocks;
  switch (c.mode) {
    case SparseAttentionMode::Fixed: {
      const i64 global = std::min(c.num_global_blocks, count);
      const i64 place = c.num_local_blocks - (1 + head % c.num_different_global_patterns) * c.num_global_blocks;
      for (i64 window = 0; window < count; window += c.num_local_blocks) {
        const bool whole = count - window >= c.num_local_blocks;
        const i64 begin = whole ? window + place : std::min(window + place, count - global);
        blocks.push_back({begin, begin + global});
      }
      break;
    }
    case SparseAttentionMode::Variable:
    case SparseAttentionMode::BSLongformer:
      for (size_t i = 0; i < c.global_block_indices.size(); ++i) {
        const i64 begin = c.global_block_indices[i];
        const i64 end = c.global_block_end_indices.empty() ? begin + 1 : c.global_block_end_indices[i];
        if (begin < count) blocks.push_back({begin, std::min(end, count)});
      }
      std::ranges::sort(blocks, {}, &BlockRange::begin);
      break;
    case SparseAttentionMode::BigBird: blocks.push_back({0, std::min(c.num_global_blocks, count)}); break;
    default: break;
  }
  return blocks;
}

// Draws `n` blocks of [0, below), with all such sets equally likely (Floyd; Bentley, "Programming Pearls", CACM 30:9).
// `drawn` must be zero and becomes the set.
void draw_blocks(i64 n, i64 below, RngKey key, i64 row, RowBits drawn) {
  for (i64 draw = 0; draw < n; ++draw) {
    const i64 last = below - n + draw;
    const u64 word = key.bits(static_cast<u64>(row) << 32 | static_cast<u64>(draw));
    const i64 block = static_cast<i64>(word * static_cast<u64>(last + 1) >> 32);
    drawn.set(drawn.has(block) ? last : block);
  }
}

// Fills the rows of one head, which must be zero, by the rules of DeepSpeed's classes.
void fill_rows(const SparseAttentionConfig& c, const std::vector<BlockRange>& local, i64 head, u64 seed, u64* rows) {
  constexpr u32 kLayoutSites = 0x20000000u;  // distinct from those of initial values, rounding and dropout
  const i64 count = std::ssize(local);
  const size_t words = static_cast<size_t>((count + 63) / 64);
  const RngKey key = {static_cast<u32>(seed), kLayoutSites + static_cast<u32>(head), static_cast<u32>(seed >> 32)};
  // Global blocks attend to all blocks, always with sliding windows and elsewhere on request.
  const bool both_ways = is_sliding(c.mode) || c.horizontal_global_attention;
  const bool random = c.mode == SparseAttentionMode::Variable || c.mode == SparseAttentionMode::BigBird;
  const bool random_before = c.mode == SparseAttentionMode::BigBird && c.unidirectional;
  const std::vector<BlockRange> global = global_blocks(c, head, count);
  std::vector<u64> global_words(words), met_words(words), drawn_words(words);
  const RowBits is_global{global_words.data()}, met{met_words.data()}, drawn{drawn_words.data()};
  for (const BlockRange& g : global) is_global.set(g);
  size_t num_met = 0;
  for (i64 row = 0; row < count; ++row, rows += words) {
    const RowBits keys{rows};
    for (; num_met < global.size() && (!c.unidirectional || global[num_met].begin <= row); ++num_met)
      met.set(global[num_met]);
    if (random) {
      std::ranges::fill(drawn_words, 0);
      const i64 below = random_before ? row + 1 : count;
      draw_blocks(std::min(c.num_random_blocks, below), below, key, row, drawn);
    }
    for (size_t w = 0; w < words; ++w) rows[w] = met_words[w] | drawn_words[w];
    keys.set(local[static_cast<size_t>(row)]);
    if (both_ways && is_global.has(row)) keys.set({0, count});
    if (is_sliding(c.mode) && c.unidirectional) keys.clear({row + 1, count});
  }
}

// The bits of 1 in a numeric type; 0: not a numeric type.
u64 bits_of_one(DType type) {
  switch (type) {
    case DType::U8:
    case DType::I8:
    case DType::U16:
    case DType::I16:
    case DType::U32:
    case DType::I32:
    case DType::U64:
    case DType::I64:
    case DType::Bool: return 1;
    case DType::F16: return 0x3c00;
    case DType::BF16: return 0x3f80;
    case DType::F32: return std::bit_cast<u32>(1.0f);
    case DType::F64: return std::bit_cast<u64>(1.0);
    default: return 0;
  }
}

// Reads and checks the layout in a file.
class LayoutFile {
 public:
  LayoutFile(const SparseAttentionConfig& c, i64 heads, i64 count) : path_(c.layout), heads_(heads), count_(count) {
    if (format_of(path_) == FileFormat::Hdf5)
      read_hdf5();
    else
      read_json();
    check_rows(c.unidirectional);
  }

  i64 layouts() const noexcept { return layouts_; }
  const std::vector<u64>& keys() const noexcept { return keys_; }

 private:
  void check_shape(const std::vector<i64>& shape) {
    const bool fits =
        shape.size() == 3 && (shape[0] == 1 || shape[0] == heads_) && shape[1] == count_ && shape[2] == count_;
    DS_CHECK(fits, Errc::Config, "{}: the layout is [{}], not [{}, {}, {}]: heads, and blocks of queries and of keys",
             path_, fmt::join(shape, ", "), heads_ == 1 ? "1" : fmt::format("{} or 1", heads_), count_, count_);
    layouts_ = shape[0];
    keys_.assign(static_cast<size_t>(layouts_ * count_ * words()), 0);
  }
  void check_entry(bool good, i64 layout, i64 query, i64 key) const {
    DS_CHECK(good, Errc::Config, "{}: layout[{}][{}][{}] is neither 0 nor 1", path_, layout, query, key);
  }
  RowBits row(i64 layout, i64 query) {
    return {keys_.data() + static_cast<size_t>((layout * count_ + query) * words())};
  }
  i64 words() const noexcept { return (count_ + 63) / 64; }

  void read_hdf5() {
    const std::unique_ptr<TensorSource> source = open_source(path_);
    constexpr const char* kName = "layout";
    DS_CHECK(source->find(kName) != nullptr || std::ranges::count(source->foreign(), kName, &ForeignTensor::name) > 0,
             Errc::Config, "{}: has no dataset \"{}\"", path_, kName);
    const TensorInfo& info = source->at(kName);
    const u64 one = bits_of_one(info.dtype);
    DS_CHECK(one != 0, Errc::Config, "{}: entries of type {} are not 0 and 1", path_, dtype_name(info.dtype));
    check_shape(info.shape);
    const size_t bytes = static_cast<size_t>(dtype_bytes(info.dtype));
    std::vector<std::byte> entries(static_cast<size_t>(count_) * bytes);
    for (i64 layout = 0; layout < layouts_; ++layout) {
      for (i64 query = 0; query < count_; ++query) {
        source->read(kName, (layout * count_ + query) * count_, count_, entries.data());
        for (i64 key = 0; key < count_; ++key) {
          u64 entry = 0;
          std::memcpy(&entry, entries.data() + static_cast<size_t>(key) * bytes, bytes);
          check_entry(entry == 0 || entry == one, layout, query, key);
          if (entry != 0) row(layout, query).set(key);
        }
      }
    }
  }

  void read_json() {
    constexpr i64 kMostBytes = i64{64} << 20;
    const std::string text = read_text_file(path_, kMostBytes, Errc::Config);
    const Json root = parse_json(text, path_, {.places = false}).root;
    const auto member = root.is_object() ? root.find("layout") : root.end();
    DS_CHECK(root.is_array() || member != root.end(), Errc::Config,
             "{}: must be an array [heads or 1, blocks, blocks], or an object with one as \"layout\"", path_);
    const Json& layout = root.is_array() ? root : *member;
    std::vector<i64> shape;
    for (const Json* at = &layout; at->is_array(); at = &at->front()) {
      shape.push_back(std::ssize(*at));
      if (at->empty()) break;
    }
    check_shape(shape);
    for (i64 l = 0; l < layouts_; ++l) {
      const Json& head = layout[static_cast<size_t>(l)];
      DS_CHECK(head.is_array() && std::ssize(head) == count_, Errc::Config, "{}: layout[{}] does not have {} rows",
               path_, l, count_);
      for (i64 query = 0; query < count_; ++query) {
        const Json& entries = head[static_cast<size_t>(query)];
        DS_CHECK(entries.is_array() && std::ssize(entries) == count_, Errc::Config,
                 "{}: layout[{}][{}] does not have {} entries", path_, l, query, count_);
        for (i64 key = 0; key < count_; ++key) {
          const Json& entry = entries[static_cast<size_t>(key)];
          check_entry(entry == 0 || entry == 1, l, query, key);
          if (entry == 1) row(l, query).set(key);
        }
      }
    }
  }

  void check_rows(bool unidirectional) {
    for (i64 layout = 0; layout < layouts_; ++layout) {
      for (i64 query = 0; query < count_; ++query)
        DS_CHECK(row(layout, query).any({0, unidirectional ? query + 1 : count_}), Errc::Config,
                 "{}: head {}, block row {}: {}", path_, layout, query,
                 unidirectional ? "no key at or before it, and a causal model sees no others" : "no key");
    }
  }

  const std::string& path_;
  i64 heads_, count_, layouts_ = 0;
  std::vector<u64> keys_;
};

// Calls f(block) for each present block in [begin, end); bits null: all are present.
template <class F>
void for_each_there(const u64* bits, i64 begin, i64 end, F&& f) {
  for (i64 block = begin; block < end;) {
    const u64 rest = bits == nullptr ? 1 : bits[block / 64] >> (block % 64);
    if (rest == 0) {
      block += 64 - block % 64;
      continue;
    }
    block += std::countr_zero(rest);
    if (block >= end) return;
    f(block++);
  }
}

}  // namespace

AttentionLayout::AttentionLayout(i64 block, i64 count, i64 layouts, std::vector<u64> keys)
    : block_(block), count_(count), layouts_(layouts), keys_(std::move(keys)), queries_(keys_.size()) {
  DS_ASSERT(std::ssize(keys_) == layouts * count * words());
  // In squares of 64 x 64 bits.
  std::array<u64, 64> square;
  for (i64 layout = 0; layout < layouts; ++layout) {
    for (i64 down = 0; down < words(); ++down) {
      for (i64 across = 0; across < words(); ++across) {
        const i64 rows = std::min<i64>(64, count - 64 * down), columns = std::min<i64>(64, count - 64 * across);
        square.fill(0);
        for (i64 i = 0; i < rows; ++i)
          square[static_cast<size_t>(i)] = keys_[row(layout, 64 * down + i) + static_cast<size_t>(across)];
        transpose(square);
        for (i64 j = 0; j < columns; ++j)
          queries_[row(layout, 64 * across + j) + static_cast<size_t>(down)] = square[static_cast<size_t>(j)];
      }
    }
  }
}

i64 AttentionLayout::present(bool causal) const noexcept {
  i64 n = 0;
  for (i64 layout = 0; layout < layouts_; ++layout) {
    for (i64 query = 0; query < count_; ++query) {
      const u64* const words = keys_.data() + row(layout, query);
      const i64 end = causal ? query + 1 : count_;
      for (i64 w = 0; w < end / 64; ++w) n += std::popcount(words[w]);
      if (end % 64 != 0) n += std::popcount(words[end / 64] << (64 - end % 64));
    }
  }
  return n;
}

AttentionLayout make_attention_layout(const SparseAttentionConfig& c, i64 heads, i64 tokens, u64 seed) {
  DS_ASSERT(c.mode != SparseAttentionMode::None && c.block > 0 && heads > 0 && tokens > 0);
  const i64 count = (tokens + c.block - 1) / c.block;
  if (c.mode == SparseAttentionMode::Layout) {
    return read_named("sparse_attention.layout", [&] {
      const LayoutFile file(c, heads, count);
      return AttentionLayout(c.block, count, file.layouts(), file.keys());
    });
  }
  // By these rules every block of queries attends to the keys at its own position.
  const i64 layouts = c.different_layout_per_head ? heads : 1, of_head = count * ((count + 63) / 64);
  const std::vector<BlockRange> local = local_blocks(c, count);
  std::vector<u64> keys(static_cast<size_t>(layouts * of_head));
  for (i64 head = 0; head < layouts; ++head)
    fill_rows(c, local, head, seed, keys.data() + static_cast<size_t>(head * of_head));
  return AttentionLayout(c.block, count, layouts, std::move(keys));
}

AttentionPattern::AttentionPattern(std::shared_ptr<const AttentionLayout> layout, i64 block, i64 tokens, bool causal,
                                   i64 window)
    : layout_(std::move(layout)), block_(block), tokens_(tokens), window_(window), causal_(causal) {
  DS_ASSERT(layout_ == nullptr || (layout_->block() == block && layout_->count() == count()));
}

std::optional<AttentionPattern::Met> AttentionPattern::met(i64 head, i64 query, i64 key, i64 named) const noexcept {
  if (layout_ != nullptr && !layout_->has(layout_->layouts() == 1 ? 0 : head, query, key)) return std::nullopt;
  const Tokens q = tokens_of(query), k = tokens_of(key);
  if (causal_ && k.first > q.last) return std::nullopt;
  if (window_ > 0 && k.last <= q.first - window_) return std::nullopt;
  return Met{named, (!causal_ || k.last <= q.first) && (window_ == 0 || k.first > q.last - window_)};
}

std::vector<AttentionPattern::Met> AttentionPattern::keys_of(i64 head, i64 query) const {
  const Tokens q = tokens_of(query);
  const i64 begin = window_ > 0 ? std::max<i64>(0, q.first - window_ + 1) / block_ : 0;
  std::vector<Met> all;
  for_each_there(layout_ == nullptr ? nullptr : layout_->keys_of(layout_->layouts() == 1 ? 0 : head, query), begin,
                 causal_ ? query + 1 : count(), [&](i64 key) {
                   if (const std::optional<Met> m = met(head, query, key, key)) all.push_back(*m);
                 });
  return all;
}

std::vector<AttentionPattern::Met> AttentionPattern::queries_of(i64 head, i64 key) const {
  std::vector<Met> all;
  for_each_there(layout_ == nullptr ? nullptr : layout_->queries_of(layout_->layouts() == 1 ? 0 : head, key),
                 causal_ ? key : 0, count(), [&](i64 query) {
                   if (const std::optional<Met> m = met(head, query, key, query)) all.push_back(*m);
                 });
  return all;
}

void AttentionPattern::check_rows() const {
  for (i64 head = 0; layout_ != nullptr && window_ > 0 && head < layout_->layouts(); ++head) {
    for (i64 i = 0; i < tokens_; ++i) {
      i64 key = std::max<i64>(0, i - window_ + 1) / block_;
      while (key <= i / block_ && !layout_->has(head, i / block_, key)) ++key;
      DS_CHECK(
          key <= i / block_, Errc::Config,
          "sparse_attention: token {} sees no key in head {}: its layout has no block within the sliding window of "
          "{}",
          i, head, window_);
    }
  }
}

double AttentionPattern::share(i64 head) const {
  i64 pairs = 0;
  for (i64 query = 0; query < count(); ++query) {
    const Tokens q = tokens_of(query);
    for (const Met& m : keys_of(head, query)) {
      const Tokens k = tokens_of(m.block);
      if (m.whole) {
        pairs += (q.last - q.first + 1) * (k.last - k.first + 1);
        continue;
      }
      for (i64 i = q.first; i <= q.last; ++i) {
        const i64 begin = window_ > 0 ? std::max(k.first, i - window_ + 1) : k.first;
        pairs += std::max<i64>(0, (causal_ ? std::min(k.last, i) : k.last) + 1 - begin);
      }
    }
  }
  return static_cast<double>(pairs) / (static_cast<double>(tokens_) * static_cast<double>(tokens_));
}

// The last layout is cached, since parts of one model are created one after the other.
std::shared_ptr<const AttentionLayout> attention_layout_of(const Config& config) {
  static std::mutex mutex;
  static SparseAttentionConfig known;
  static std::array<i64, 3> shape;
  static std::weak_ptr<const AttentionLayout> last;
  const SparseAttentionConfig& wanted = config.sparse_attention;
  const std::array<i64, 3> of = {config.model.heads, config.data.seq_length, config.seed};
  const std::lock_guard lock(mutex);
  std::shared_ptr<const AttentionLayout> layout = last.lock();
  // The file may have changed.
  if (layout == nullptr || wanted != known || of != shape || wanted.mode == SparseAttentionMode::Layout) {
    layout =
        std::make_shared<const AttentionLayout>(make_attention_layout(wanted, of[0], of[1], static_cast<u64>(of[2])));
    known = wanted, shape = of, last = layout;
  }
  return layout;
}

}  // namespace ds::model
