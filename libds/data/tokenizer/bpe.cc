// SPDX-License-Identifier: Apache-2.0
// Byte pair encoding (Sennrich, Haddow, Birch: "Neural Machine Translation of Rare Words with Subword Units", ACL
// 2016): a word starts as characters, or bytes, and the neighbours whose merge has the least rank are joined until none
// has one. With a heap of candidates over a linked list a word of n symbols takes n log n.

#include <algorithm>
#include <array>
#include <functional>

#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/model.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

// (left id, right id) -> (rank, id of both together); open addressing, at most half full.
class Merges {
 public:
  struct Merge {
    i32 rank = -1, id = -1;
  };

  explicit Merges(size_t count) {
    size_t slots = 16;
    while (slots < 2 * count) slots *= 2;
    slots_.resize(slots);
  }
  void put(i32 left, i32 right, Merge merge) {
    const u64 key = key_of(left, right);
    size_t at = slot_of(key);
    while (slots_[at].merge.rank >= 0 && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {key, merge};  // of two equal pairs the later counts
  }
  // Null: they do not merge.
  const Merge* find(i32 left, i32 right) const noexcept {
    const u64 key = key_of(left, right);
    for (size_t at = slot_of(key); slots_[at].merge.rank >= 0; at = (at + 1) & (slots_.size() - 1))
      if (slots_[at].key == key) return &slots_[at].merge;
    return nullptr;
  }

 private:
  struct Slot {
    u64 key = 0;
    Merge merge;
  };
  static u64 key_of(i32 left, i32 right) noexcept {
    return static_cast<u64>(static_cast<u32>(left)) << 32 | static_cast<u32>(right);
  }
  size_t slot_of(u64 key) const noexcept {
    key *= 0x9E3779B97F4A7C15u;  // Fibonacci hashing
    return static_cast<size_t>((key ^ (key >> 32)) & (slots_.size() - 1));
  }
  std::vector<Slot> slots_;
};

constexpr std::string_view kMetaspace = "\u2581";

class Bpe : public Model {
 public:
  Bpe(Fields& f, Vocabulary vocabulary, bool byte_level)
      : Model(std::move(vocabulary)),
        byte_level_(byte_level),
        unk_token_(f.optional_text("unk_token")),
        prefix_(f.text("continuing_subword_prefix", "")),
        suffix_(f.text("end_of_word_suffix", "")),
        fuse_unk_(f.flag("fuse_unk", false)),
        byte_fallback_(f.flag("byte_fallback", false)),
        ignore_merges_(f.flag("ignore_merges", false)),
        merges_(0) {
    const Place& place = f.place();
    if (const Json* dropout = f.find("dropout"); dropout != nullptr && *dropout != 0)
      (place / "dropout").unsupported("only null is supported");
    if (byte_level_ && (!prefix_.empty() || !suffix_.empty() || byte_fallback_))
      place.unsupported(
          "continuing_subword_prefix, end_of_word_suffix or byte_fallback with 'ByteLevel' is not supported");
    if (unk_token_) {
      unk_ = vocabulary_.id(*unk_token_);
      if (!unk_) (place / "unk_token").corrupt(fmt::format("'{}' is not in the vocabulary", *unk_token_));
    }
    for (size_t b = 0; b < 256; ++b) {
      std::string character;
      append_char(character, byte_alphabet()[b]);
      byte_ids_[b] = vocabulary_.id(byte_level_ ? character : fmt::format("<0x{:02X}>", b)).value_or(-1);
    }
    if (byte_level_ && ignore_merges_) {
      for (const auto& [token, id] : vocabulary_.ids())
        if (auto bytes = bytes_of(token)) words_.emplace(*std::move(bytes), id);
    }
    read_merges(f.at("merges"), place / "merges");
    find_cuts();
  }

  void encode(std::string_view word, std::vector<i32>& ids) const override {
    if (ignore_merges_) {
      if (const auto id = whole_word(word)) {
        ids.push_back(*id);
        return;
      }
    }
    thread_local Scratch scratch;
    scratch.symbols.clear();
    if (byte_level_) {
      read_bytes(word, scratch.symbols);
    } else {
      read_characters(word, scratch.symbols);
    }
    merge(scratch);
    for (i32 at = scratch.symbols.empty() ? -1 : 0; at >= 0; at = scratch.symbols[at].next)
      ids.push_back(scratch.symbols[at].id);
    if (scratch.symbols.capacity() > kKept) scratch = {};
  }

  std::string_view kind() const noexcept override { return "BPE"; }
  std::optional<std::string> unk_token() const override { return unk_token_; }
  std::string_view cuts_before() const noexcept override { return cuts_before_; }
  void digest(Digest& digest) const override {
    Model::digest(digest);
    digest.add(static_cast<i64>(merges_digest_.value()));
    for (const std::string& text : {unk_token_.value_or(""), prefix_, suffix_}) digest.add(text);
    for (const bool flag : {byte_level_, fuse_unk_, byte_fallback_, ignore_merges_}) digest.add(flag);
  }

 private:
  static constexpr size_t kKept = 1 << 16;  // symbols whose memory a thread keeps

  struct Symbol {
    i32 id;          // -1: joined to the one before
    i32 prev, next;  // -1: none
  };
  struct Candidate {
    u64 order;  // rank, then place: what is merged first
    i32 id;     // of both together
    bool operator>(const Candidate& o) const noexcept { return order > o.order; }
    i32 place() const noexcept { return static_cast<i32>(order & 0xFFFFFFFFu); }
  };
  struct Scratch {
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  void read_merges(const Json& list, const Place& place) {
    if (!list.is_array()) place.corrupt("must be an array");
    merges_ = Merges(list.size());
    for (size_t rank = 0; rank < list.size(); ++rank) {
      const auto bad = [&](const std::string& what) { place.corrupt(fmt::format("merge {}: {}", rank, what)); };
      const Json& merge = list[rank];
      std::string left, right;
      if (merge.is_string()) {  // "left right"
        const auto& text = merge.get_ref<const std::string&>();
        if (text.starts_with("#version")) continue;
        const size_t blank = text.find(' ');
        if (blank == text.npos || text.find(' ', blank + 1) != text.npos) bad("is not two tokens and a blank");
        left = text.substr(0, blank);
        right = text.substr(blank + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        merge[0].get_to(left);
        merge[1].get_to(right);
      } else {
        bad("is neither a string nor a pair of strings");
      }
      if (!right.starts_with(prefix_)) bad(fmt::format("'{}' does not begin with '{}'", right, prefix_));
      const auto id_of = [&](const std::string& token) {
        const auto id = vocabulary_.id(token);
        if (!id) bad(fmt::format("'{}' is not in the vocabulary", token));
        return *id;
      };
      const i32 left_id = id_of(left), right_id = id_of(right), both = id_of(left + right.substr(prefix_.size()));
      merges_.put(left_id, right_id, {static_cast<i32>(rank), both});
      for (const i32 id : {left_id, right_id, both}) merges_digest_.add(id);
      merged_.push_back(both);
    }
  }

  // If no merge makes a token in which U+2581 comes after another character, nothing is ever joined across such a
  // place, and a text that comes as one word may be cut there.
  void find_cuts() {
    const auto tokens = std::move(merged_);
    if (byte_level_ || ignore_merges_ || !prefix_.empty() || !suffix_.empty() || !vocabulary_.id(kMetaspace)) return;
    for (const i32 id : tokens) {
      const std::string& token = *vocabulary_.token(id);
      for (size_t at = token.find(kMetaspace, 1); at != token.npos; at = token.find(kMetaspace, at + 1))
        if (!std::string_view(token).substr(0, at).ends_with(kMetaspace)) return;
    }
    cuts_before_ = kMetaspace;
  }

  std::optional<i32> whole_word(std::string_view word) const {
    if (!byte_level_) return vocabulary_.id(word);
    const auto it = words_.find(word);
    if (it == words_.end()) return std::nullopt;
    return it->second;
  }

  static void push(std::vector<Symbol>& symbols, i32 id) {
    const i32 at = narrow<i32>(symbols.size());
    if (at > 0) symbols.back().next = at;
    symbols.push_back({id, at - 1, -1});
  }

  // A byte without a token is dropped, or unknown, as in the reference.
  void read_bytes(std::string_view word, std::vector<Symbol>& symbols) const {
    bool after_unk = false;
    for (const char c : word) {
      const i32 id = byte_ids_[static_cast<u8>(c)];
      push_or_unk(id, after_unk, symbols);
    }
  }

  void read_characters(std::string_view word, std::vector<Symbol>& symbols) const {
    bool after_unk = false;
    std::string affixed;
    for (size_t at = 0; at < word.size();) {
      const size_t begin = at;
      at += char_bytes(word, at);
      std::string_view token = word.substr(begin, at - begin);
      const bool first = begin == 0, last = at == word.size();
      if ((!first && !prefix_.empty()) || (last && !suffix_.empty())) {
        affixed = first ? "" : prefix_;
        affixed += token;
        if (last) affixed += suffix_;
        token = affixed;
      }
      const auto id = vocabulary_.id(token);
      if (!id && byte_fallback_ &&
          std::all_of(token.begin(), token.end(), [&](char c) { return byte_ids_[static_cast<u8>(c)] >= 0; })) {
        for (const char c : token) push(symbols, byte_ids_[static_cast<u8>(c)]);
        continue;
      }
      push_or_unk(id.value_or(-1), after_unk, symbols);
    }
  }

  void push_or_unk(i32 id, bool& after_unk, std::vector<Symbol>& symbols) const {
    if (id >= 0) {
      push(symbols, id);
    } else if (unk_ && !(after_unk && fuse_unk_)) {
      push(symbols, *unk_);
    }
    after_unk = id < 0 && unk_;
  }

  void merge(Scratch& scratch) const {
    auto& [symbols, heap] = scratch;
    const auto consider = [&](i32 left) {
      const Symbol& s = symbols[left];
      const Merges::Merge* m = merges_.find(s.id, symbols[s.next].id);
      if (m == nullptr) return false;
      heap.push_back({static_cast<u64>(m->rank) << 32 | static_cast<u32>(left), m->id});
      return true;
    };
    const auto sift = [&](bool pushed) {
      if (pushed) std::push_heap(heap.begin(), heap.end(), std::greater<>());
    };
    heap.clear();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) consider(static_cast<i32>(i));
    std::make_heap(heap.begin(), heap.end(), std::greater<>());
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      const Candidate top = heap.back();
      heap.pop_back();
      Symbol& left = symbols[top.place()];
      if (left.id < 0 || left.next < 0) continue;
      Symbol& right = symbols[left.next];
      // Neighbours may have changed since; the candidate holds if they still become what it says.
      const Merges::Merge* m = merges_.find(left.id, right.id);
      if (m == nullptr || m->id != top.id) continue;
      left.id = top.id;
      right.id = -1;
      left.next = right.next;
      if (left.next >= 0) symbols[left.next].prev = top.place();
      if (left.prev >= 0) sift(consider(left.prev));
      if (left.next >= 0) sift(consider(top.place()));
    }
  }

  bool byte_level_;
  std::optional<std::string> unk_token_;
  std::string prefix_, suffix_;
  bool fuse_unk_, byte_fallback_, ignore_merges_;
  std::optional<i32> unk_;
  std::array<i32, 256> byte_ids_{};  // of bytes, or of "<0xFF>"; -1: none
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const noexcept { return std::hash<std::string_view>()(s); }
  };
  std::unordered_map<std::string, i32, Hash, std::equal_to<>> words_;  // byte-level with ignore_merges
  Merges merges_;
  Digest merges_digest_;     // in their order
  std::vector<i32> merged_;  // while reading
  std::string_view cuts_before_;
};

}  // namespace

std::unique_ptr<Model> make_bpe(Fields& fields, Vocabulary vocabulary, bool byte_level) {
  return std::make_unique<Bpe>(fields, std::move(vocabulary), byte_level);
}

}  // namespace ds::tokenizer
