// SPDX-License-Identifier: Apache-2.0
// The unigram language model (Kudo, "Subword Regularization: Improving Neural Network Translation Models with Multiple
// Subword Candidates", ACL 2018): of all ways to cut a word into pieces, the one whose scores have the largest sum,
// found by Viterbi's algorithm. A character without a piece is unknown, and unknown neighbours are one piece.

#include <algorithm>
#include <array>
#include <limits>

#include "data/tokenizer/identity.h"
#include "data/tokenizer/model.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

// Pieces by their bytes. Nodes stand in the order of their depth, so the children of each lie side by side:
//
//     children of node k     [first(k), first(k + 1)), in the order of their bytes
class PieceTrie {
 public:
  explicit PieceTrie(std::vector<std::pair<std::string_view, i32>> pieces) {
    std::ranges::sort(pieces);
    struct Range {
      size_t low, high, depth;  // the pieces that begin with the bytes that lead to a node
    };
    std::vector<Range> ranges = {{0, pieces.size(), 0}};
    nodes_.push_back({});
    for (size_t node = 0; node < nodes_.size(); ++node) {
      auto [low, high, depth] = ranges[node];
      nodes_[node].first = static_cast<u32>(nodes_.size());
      if (low < high && pieces[low].first.size() == depth) nodes_[node].id = pieces[low++].second;
      while (low < high) {
        const char byte = pieces[low].first[depth];
        size_t end = low;
        while (end < high && pieces[end].first[depth] == byte) ++end;
        nodes_.push_back({.byte = static_cast<u8>(byte)});
        ranges.push_back({low, end, depth + 1});
        low = end;
      }
    }
    nodes_.push_back({.first = static_cast<u32>(nodes_.size())});
  }

  // Calls found(end, id) for the pieces that stand at text[at], the shortest one first.
  template <class Found>
  void each(std::string_view text, size_t at, Found&& found) const {
    size_t node = 0;
    while (at < text.size()) {
      const auto begin = nodes_.begin() + nodes_[node].first, end = nodes_.begin() + nodes_[node + 1].first;
      const auto child = std::ranges::lower_bound(begin, end, static_cast<u8>(text[at]), {}, &Node::byte);
      if (child == end || child->byte != static_cast<u8>(text[at])) return;
      node = static_cast<size_t>(child - nodes_.begin());
      ++at;
      if (nodes_[node].id >= 0) found(at, nodes_[node].id);
    }
  }

 private:
  struct Node {
    u32 first = 0;
    i32 id = -1;  // of the piece that ends here
    u8 byte = 0;
  };
  std::vector<Node> nodes_;
};

class Unigram : public Model {
 public:
  Unigram(Fields& f, std::vector<std::string> pieces, std::vector<double> scores)
      : Model(Vocabulary(pieces, f.place() / "vocab")),
        scores_(std::move(scores)),
        byte_fallback_(f.flag("byte_fallback", false)),
        trie_(numbered(pieces)) {
    if (f.find("unk_id") == nullptr) (f.place() / "unk_id").unsupported("null is not supported");
    const i64 unk = f.integer("unk_id");
    if (unk < 0 || unk >= std::ssize(pieces)) (f.place() / "unk_id").corrupt(fmt::format("{} is no piece's id", unk));
    unk_ = static_cast<i32>(unk);
    constexpr double kPenalty = 10;  // the reference's
    unk_score_ = *std::ranges::min_element(scores_) - kPenalty;
    for (size_t b = 0; b < 256; ++b) byte_ids_[b] = vocabulary_.id(fmt::format("<0x{:02X}>", b)).value_or(-1);
  }

  void encode(std::string_view word, std::vector<i32>& ids) const override {
    thread_local Scratch scratch;
    auto& [best, path] = scratch;
    best.assign(word.size() + 1, {});
    for (size_t at = 0; at < word.size();) {
      const size_t next = at + char_bytes(word, at);
      bool has_character = false;
      const auto consider = [&](size_t end, i32 id, double score) {
        score += best[at].score;
        Best& b = best[end];
        if (b.id < 0 || score > b.score) b = {score, id, narrow<u32>(at)};
      };
      trie_.each(word, at, [&](size_t end, i32 id) {
        consider(end, id, scores_[static_cast<size_t>(id)]);
        has_character |= end == next;
      });
      if (!has_character) consider(next, unk_, unk_score_);
      at = next;
    }
    path.clear();
    for (size_t end = word.size(); end > 0; end = best[end].begin) {
      const Best& b = best[end];
      if (b.id == unk_ && !path.empty() && path.back().id == unk_) {
        path.back().begin = b.begin;
      } else {
        path.push_back({b.begin, end, b.id});
      }
    }
    for (auto piece = path.rbegin(); piece != path.rend(); ++piece) {
      if (piece->id == unk_) {
        push_unknown(word.substr(piece->begin, piece->end - piece->begin), ids);
      } else {
        ids.push_back(piece->id);
      }
    }
    if (best.capacity() > kKept) scratch = {};
  }

  std::string_view kind() const noexcept override { return "Unigram"; }
  std::optional<std::string> unk_token() const override { return *vocabulary_.token(unk_); }
  void digest(Digest& digest) const override {
    Model::digest(digest);
    for (const double score : scores_) digest.add(score);
    digest.add(unk_);
    digest.add(byte_fallback_);
  }

 private:
  static constexpr size_t kKept = 1 << 16;  // places whose memory a thread keeps

  struct Best {  // the path that ends at a place, by its last piece
    double score = 0;
    i32 id = -1;
    u32 begin = 0;
  };
  struct Piece {
    size_t begin, end;
    i32 id;
  };
  struct Scratch {
    std::vector<Best> best;
    std::vector<Piece> path;  // the last piece first
  };

  static std::vector<std::pair<std::string_view, i32>> numbered(const std::vector<std::string>& pieces) {
    std::vector<std::pair<std::string_view, i32>> all;
    for (size_t id = 0; id < pieces.size(); ++id)
      if (!pieces[id].empty()) all.emplace_back(pieces[id], static_cast<i32>(id));
    return all;
  }

  // Unknown pieces that are one together may be a piece that has a name.
  void push_unknown(std::string_view piece, std::vector<i32>& ids) const {
    if (const auto id = vocabulary_.id(piece)) {
      ids.push_back(*id);
    } else if (byte_fallback_ &&
               std::ranges::all_of(piece, [&](char c) { return byte_ids_[static_cast<u8>(c)] >= 0; })) {
      for (const char c : piece) ids.push_back(byte_ids_[static_cast<u8>(c)]);
    } else {
      ids.push_back(unk_);
    }
  }

  std::vector<double> scores_;
  bool byte_fallback_;
  PieceTrie trie_;
  i32 unk_ = 0;
  double unk_score_ = 0;
  std::array<i32, 256> byte_ids_{};  // of "<0xFF>"; -1: none
};

}  // namespace

std::unique_ptr<Model> make_unigram(Fields& fields) {
  const Json& list = fields.at("vocab");
  const Place place = fields.place() / "vocab";
  if (!list.is_array() || list.empty()) place.corrupt("must be a list of pieces and their scores");
  std::vector<std::string> pieces;
  std::vector<double> scores;
  for (const Json& entry : list) {
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number())
      place.corrupt(fmt::format("entry {} must be a piece and its score", pieces.size()));
    pieces.push_back(entry[0].get<std::string>());
    constexpr size_t kLongest = 4096;  // bytes; a search takes at most so many steps per character of text
    if (pieces.back().size() > kLongest) place.unsupported(fmt::format("a piece of {} bytes", pieces.back().size()));
    scores.push_back(entry[1].get<double>());
  }
  return std::make_unique<Unigram>(fields, std::move(pieces), std::move(scores));
}

}  // namespace ds::tokenizer
