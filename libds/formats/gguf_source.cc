// SPDX-License-Identifier: Apache-2.0
#include "formats/gguf_source.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/gguf_model.h"
#include "formats/gguf_blocks.h"

namespace ds {
namespace {

// Where the elements of a published tensor are.
enum class GgufOrder : u8 {
  Same,
  Neighbours,  // GgufForm::neighbours_turn, by heads
  Transposed,
};
struct GgufPlace {
  size_t tensor;  // number in Gguf::tensors()
  i64 first = 0;  // its first element there
  GgufOrder order = GgufOrder::Same;
  i64 heads = 1;
};

struct GgufPublished {
  std::vector<TensorInfo> list;
  std::vector<GgufPlace> places;  // by tensor of the list
  std::vector<ForeignTensor> foreign;
};

// Turns the tensors of a file into published ones, by the tables of its family.
class GgufPublisher {
 public:
  explicit GgufPublisher(const Gguf& file)
      : file_(file),
        spec_(gguf_family(file)),
        heads_(count("attention.head_count", 1)),
        kv_heads_(count("attention.head_count_kv", heads_)) {}

  GgufPublished run() {
    for (size_t i = 0; i < file_.tensors().size(); ++i) {
      const GgufTensor& t = file_.tensors()[i];
      if (t.name == "rope_freqs.weight") continue;
      if (!add_expert_part(i, t)) add(name_of(t.name), t.shape, place_of(i, t));
    }
    std::vector<std::string_view> names;
    for (const TensorInfo& t : made_.list) names.push_back(t.name);
    std::ranges::sort(names);
    const auto twice = std::ranges::adjacent_find(names);
    DS_CHECK(twice == names.end(), Errc::Corrupt, "{}: two tensors are '{}' of the published model", file_.path(),
             *twice);
    return std::move(made_);
  }

 private:
  i64 count(std::string_view name, i64 otherwise) const {
    const std::string key = fmt::format("{}.{}", spec_.gguf.architecture, name);
    const i64 n = file_.integer(key).value_or(otherwise);
    DS_CHECK(n > 0, Errc::Corrupt, "{}: '{}' is {}", file_.path(), key, n);
    return n;
  }

  void add(std::string name, std::vector<i64> shape, const GgufPlace& place) {
    const GgufTensor& t = file_.tensors()[place.tensor];
    const GgufType* const type = gguf_type(t.type);
    const auto reading = type == nullptr ? std::nullopt : gguf_reading(*type);
    if (!reading) {
      made_.foreign.push_back({std::move(name), t.type_name()});
      return;
    }
    made_.list.push_back({std::move(name), reading->dtype, std::move(shape)});
    made_.places.push_back(place);
    if (place.order == GgufOrder::Transposed) std::ranges::reverse(made_.list.back().shape);
  }

  // "blk.7.attn_q.weight" as "blk.{}.attn_q", "7" and ".weight".
  struct Parts {
    std::string stem, layer, end;
  };
  static Parts parts_of(const std::string& name) {
    Parts p{name, "", ""};
    if (const size_t dot = name.rfind('.'); dot != name.npos && dot > 0) {
      p.end = name.substr(dot);
      p.stem.resize(dot);
    }
    constexpr std::string_view kBlock = "blk.";
    if (!p.stem.starts_with(kBlock)) return p;
    const size_t after = p.stem.find_first_not_of("0123456789", kBlock.size());
    if (after == p.stem.npos || after == kBlock.size() || p.stem[after] != '.') return p;
    p.layer = p.stem.substr(kBlock.size(), after - kBlock.size());
    p.stem.replace(kBlock.size(), p.layer.size(), "{}");
    return p;
  }
  static std::string in_layer(std::string_view pattern, const std::string& layer) {
    std::string name(pattern);
    if (const size_t at = name.find("{}"); at != name.npos) name.replace(at, 2, layer);
    return name;
  }

  // A tensor of no known name keeps its own, so that whoever compares it with a model reports it.
  std::string name_of(const std::string& stored) const {
    const Parts p = parts_of(stored);
    const auto row = std::ranges::find(spec_.gguf.names, p.stem, &GgufName::stored);
    return row == spec_.gguf.names.end() ? stored : in_layer(row->published, p.layer) + p.end;
  }

  GgufPlace place_of(size_t i, const GgufTensor& t) const {
    GgufPlace place{.tensor = i};
    const std::string stem = parts_of(t.name).stem;
    const bool is_query = stem == "blk.{}.attn_q", is_key = stem == "blk.{}.attn_k";
    if (spec_.gguf.neighbours_turn && (is_query || is_key)) {
      place.order = GgufOrder::Neighbours;
      place.heads = is_query ? heads_ : kv_heads_;
      DS_CHECK(!t.shape.empty() && t.shape.front() % (2 * place.heads) == 0, Errc::Corrupt,
               "{}: tensor '{}' [{}] has no even number of rows for each of {} heads", file_.path(), t.name,
               fmt::join(t.shape, ","), place.heads);
    }
    if (spec_.gguf.transposed && t.shape.size() == 2 && stem.starts_with("blk.")) place.order = GgufOrder::Transposed;
    return place;
  }

  // Parts of a block with experts. False: `t` is another part.
  bool add_expert_part(size_t i, const GgufTensor& t) {
    const ExpertNames& x = spec_.experts;
    if (x.gate.empty()) return false;
    const Parts p = parts_of(t.name);
    const std::string block = fmt::format("model.layers.{}.{}", p.layer, x.block);
    const std::pair<std::string_view, std::string_view> matrices[] = {{"gate", x.gate}, {"up", x.up}, {"down", x.down}};
    for (const auto& [stored, published] : matrices) {
      if (p.stem == fmt::format("blk.{{}}.ffn_{}_exps", stored)) {
        add_experts(i, t, fmt::format("{}.{}", block, x.experts), std::string(published) + p.end);
        return true;
      }
      if (p.stem == fmt::format("blk.{{}}.ffn_{}_shexp", stored)) {
        add(fmt::format("{}.{}.{}{}", block, x.shared, published, p.end), t.shape, {i});
        return true;
      }
    }
    if (p.stem == "blk.{}.ffn_gate_inp" && p.end == ".weight") {
      add(fmt::format("{}.{}", block, x.router), t.shape, {i});
    } else if (p.stem == "blk.{}.ffn_gate_inp_shexp") {  // a row, which may be stored as a vector
      std::vector<i64> shape = t.shape;
      if (shape.size() == 1) shape.insert(shape.begin(), 1);
      add(fmt::format("{}.{}_gate{}", block, x.shared, p.end), shape, {i});
    } else {
      return false;
    }
    return true;
  }

  // One tensor [E, R, C] as E matrices.
  void add_experts(size_t i, const GgufTensor& t, const std::string& experts, const std::string& end) {
    DS_CHECK(t.shape.size() == 3 && t.shape.front() == count("expert_count", 0), Errc::Corrupt,
             "{}: tensor '{}' [{}] is not a matrix for each of {} experts", file_.path(), t.name,
             fmt::join(t.shape, ","), count("expert_count", 0));
    const i64 elems = t.shape[1] * t.shape[2];
    // Smaller ones are no model's, and would make a small file a long list.
    constexpr i64 kLeast = 64;
    DS_CHECK(elems >= kLeast, Errc::Corrupt, "{}: tensor '{}' has {} elements for each expert (at least {} are read)",
             file_.path(), t.name, elems, kLeast);
    for (i64 e = 0; e < t.shape.front(); ++e)
      add(fmt::format("{}.{}.{}", experts, e, end), {t.shape[1], t.shape[2]}, {i, e * elems});
  }

  const Gguf& file_;
  const FamilySpec& spec_;
  const i64 heads_, kv_heads_;
  GgufPublished made_;
};

class GgufSource final : public TensorSource {
 public:
  GgufSource(Gguf file, GgufPublished published)
      // transformers reads a safetensors file that is made of this one only if it states its format.
      : TensorSource(file.path(), std::move(published.list), std::move(published.foreign), {{"format", "pt"}}),
        file_(std::move(file)),
        places_(std::move(published.places)),
        four_bits_(places_.size()) {}

  std::vector<std::string> files() const override { return file_.files(); }
  void close() const override { open_.reset(); }

  CodedForm codes_of(std::string_view name) const override {
    const size_t tensor = index_of(name);
    const Stored s = stored(tensor);
    const GgufPlace& place = places_[tensor];
    const std::vector<i64>& shape = list()[tensor].shape;
    // Whole blocks make up each row, in the order of the file.
    const bool has_rows = shape.size() > 1 && shape.back() > 0 && shape.back() % s.type.elems == 0 &&
                          place.first % shape.back() == 0 && place.order != GgufOrder::Transposed;
    if (s.reading.unpack == nullptr || !has_rows) return {};
    std::optional<bool>& fits = four_bits_[tensor];
    if (!fits) fits = s.reading.four_bits && all_fit(s, place.first, list()[tensor].numel());
    return form_of(s.reading, *fits);
  }

  void read_codes(std::string_view name, i64 first_row, i64 count, void* out) const override {
    const size_t tensor = index_of(name);
    const Stored s = stored(tensor);
    const GgufPlace& place = places_[tensor];
    const i64 cols = list()[tensor].shape.back();
    const CodedForm form = codes_of(name);
    DS_ASSERT(form && first_row >= 0 && count >= 0 && first_row <= list()[tensor].numel() / cols - count);
    auto* to = static_cast<u8*>(out);
    for (i64 row = first_row; row < first_row + count; ++row) {
      const i64 stored_row = place.order == GgufOrder::Neighbours ? neighbour_row(s, place.heads, row) : row;
      for_each_block(s, place.first + stored_row * cols, cols,
                     [&](i64, const GgufBlock& block) { to = put_block(s.reading, s.type.elems, block, form, to); });
    }
  }

 private:
  // Elements of one tensor in the order of the file.
  struct Stored {
    const GgufTensor& tensor;
    const GgufType& type;
    GgufReading reading;
    i64 size;  // of an element
  };

  void read_elements(size_t tensor, i64 first, i64 count, void* out) const override {
    const GgufPlace& place = places_[tensor];
    const Stored s = stored(tensor);
    auto* const to = static_cast<char*>(out);
    switch (place.order) {
      case GgufOrder::Same: return read_stored(s, place.first + first, count, to);
      case GgufOrder::Neighbours: return read_neighbours(s, place.heads, first, count, to);
      case GgufOrder::Transposed: return read_transposed(s, first, count, to);
    }
  }

  Stored stored(size_t tensor) const {
    const GgufTensor& t = file_.tensors()[places_[tensor].tensor];
    const GgufType& type = *gguf_type(t.type);
    const GgufReading reading = *gguf_reading(type);
    return {t, type, reading, dtype_bytes(reading.dtype)};
  }

  // The row of the file that is row `row` of the published matrix.
  static i64 neighbour_row(const Stored& s, i64 heads, i64 row) {
    const i64 dims = s.tensor.shape.front() / heads, dim = row % dims;
    return row - dim + dim % (dims / 2) * 2 + dim / (dims / 2);
  }

  void read_neighbours(const Stored& s, i64 heads, i64 first, i64 count, char* out) const {
    const i64 cols = s.tensor.numel() / s.tensor.shape.front();
    for (i64 done = 0; done < count;) {
      const i64 row = (first + done) / cols, col = (first + done) % cols, n = std::min(count - done, cols - col);
      read_stored(s, neighbour_row(s, heads, row) * cols + col, n, out + done * s.size);
      done += n;
    }
  }

  // The published matrix [R, C] is stored as [C, R]: of each stored row, the part that lies in the wanted rows.
  void read_transposed(const Stored& s, i64 first, i64 count, char* out) const {
    const i64 cols = s.tensor.shape[0], rows = s.tensor.shape[1];
    const i64 last = first + count - 1;
    std::vector<char> part(static_cast<size_t>((last / cols - first / cols + 1) * s.size));
    for (i64 c = 0; c < cols; ++c) {
      const i64 begin = first / cols + (first % cols > c ? 1 : 0), end = last / cols + (last % cols >= c ? 1 : 0);
      if (begin >= end) continue;
      read_stored(s, c * rows + begin, end - begin, part.data());
      for (i64 r = begin; r < end; ++r)
        std::memcpy(out + (r * cols + c - first) * s.size, part.data() + (r - begin) * s.size,
                    static_cast<size_t>(s.size));
    }
  }

  void read_stored(const Stored& s, i64 first, i64 count, char* out) const {
    if (s.reading.unpack == nullptr)
      return open(s.tensor.file).read_at(s.tensor.offset + first * s.size, out, count * s.size);
    const i64 elems = s.type.elems, end = first + count;
    std::array<float, kMostBlockElems> values;
    auto* to = reinterpret_cast<float*>(out);
    for_each_block(s, first, count, [&](i64 begin, const GgufBlock& block) {
      const i64 from = std::max(begin, first), until = std::min(begin + elems, end);
      if (until - from == elems) {
        decode_block(s.reading, elems, block, to);
      } else {
        decode_block(s.reading, elems, block, values.data());
        std::copy_n(values.data() + (from - begin), until - from, to);
      }
      to += until - from;
    });
  }

  bool all_fit(const Stored& s, i64 first, i64 count) const {
    if (!s.reading.offsets) return true;
    bool fit = true;
    for_each_block(s, first, count,
                   [&](i64, const GgufBlock& block) { fit = fit && fits_four_bits(s.reading, s.type.elems, block); });
    return fit;
  }

  // Calls f(first element, block) for the blocks that elements [first, first + count) of a tensor lie in.
  template <class F>
  void for_each_block(const Stored& s, i64 first, i64 count, F&& f) const {
    constexpr i64 kAtOnce = 256;  // blocks
    const File& file = open(s.tensor.file);
    const i64 elems = s.type.elems, bytes = s.type.bytes, last_block = div_ceil(first + count, elems);
    GgufBlock unpacked{};  // offsets stay 0 where a type has none
    for (i64 block = first / elems; block < last_block; block += kAtOnce) {
      const i64 blocks = std::min(kAtOnce, last_block - block);
      raw_.resize(static_cast<size_t>(blocks * bytes));
      file.read_at(s.tensor.offset + block * bytes, raw_.data(), blocks * bytes);
      for (i64 b = 0; b < blocks; ++b) {
        s.reading.unpack(raw_.data() + b * bytes, unpacked);
        f((block + b) * elems, unpacked);
      }
    }
  }

  // One file of several is open at a time.
  const File& open(size_t number) const {
    if (!open_ || open_number_ != number) {
      open_.reset();
      open_ = File::open_read(file_.files()[number]);
      open_number_ = number;
    }
    return *open_;
  }

  Gguf file_;
  std::vector<GgufPlace> places_;
  mutable std::vector<std::optional<bool>> four_bits_;  // by tensor: all blocks fit Int4, if that is known
  mutable std::optional<File> open_;
  mutable size_t open_number_ = 0;
  mutable std::vector<u8> raw_;
};

}  // namespace

std::unique_ptr<TensorSource> open_gguf(const std::string& path) {
  Gguf file(path);
  GgufPublished published = GgufPublisher(file).run();
  return std::make_unique<GgufSource>(std::move(file), std::move(published));
}

}  // namespace ds
