// SPDX-License-Identifier: Apache-2.0
#include "data/packing.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/check.h"

namespace ds {

Packing::Packing(const TokenStream& stream, i64 seq_length)
    : seq_length_(seq_length), filling_(narrow<i32>(std::max<i64>(stream.documents().token, 0))) {
  const DocumentRule& rule = stream.documents();
  stream.for_each_document([&](i64 begin, i64 end) {
    const i64 after = end < stream.num_tokens() ? stream.token_at(end) : -1;
    const bool is_marked = rule.marks(stream.token_at(end - 1), after);
    const bool at_end = rule.at == DocumentTokenAt::End;
    const i64 pieces = add_document(begin, end - begin, is_marked && !at_end, is_marked && at_end);
    if (pieces > 1 || stream.cuts(begin, end)) ++num_cut_;
  });
  DS_CHECK(!pieces_.empty(), Errc::Config, "data.packing: there is no document of two tokens or more{}",
           rule.token >= 0 ? fmt::format(" (data.document_token is {})", rule.token) : "");
  pack();
}

i64 Packing::add_document(i64 begin, i64 count, bool has_next, bool has_end) {
  if (count < 2 && !has_next) return 0;  // it predicts nothing
  ++num_documents_;
  const i64 before = std::ssize(pieces_);
  for (i64 done = 0; done < count;) {
    const i64 n = std::min(seq_length_, count - done);
    const bool goes_on = done + n < count;
    const bool next = goes_on || has_next;
    // The last token alone has been a target.
    if (n > 1 || next) pieces_.push_back({begin + done, static_cast<i32>(n), next, !goes_on && has_end});
    done += n;
  }
  return std::ssize(pieces_) - before;
}

i64 Packing::num_tokens() const noexcept {
  return std::accumulate(pieces_.begin(), pieces_.end(), i64{0}, [](i64 sum, const Piece& p) { return sum + p.count; });
}

i64 Packing::num_exposed() const noexcept {
  i64 exposed = 0;
  for (size_t s = 0; s + 1 < first_.size(); ++s) {
    for (i64 p = first_[s]; p + 1 < first_[s + 1]; ++p) exposed += pieces_[static_cast<size_t>(p)].has_end ? 0 : 1;
  }
  return exposed;
}

void Packing::pack() {
  std::ranges::stable_sort(pieces_, std::greater<>(), &Piece::count);
  std::vector<i64> sample_of(pieces_.size());
  std::vector<std::vector<i64>> with_room(static_cast<size_t>(seq_length_) + 1);  // samples, by tokens that are free
  std::set<i64> rooms;                                                            // that there are
  i64 samples = 0;
  for (size_t p = 0; p < pieces_.size(); ++p) {
    const i64 n = pieces_[p].count;
    i64 room = seq_length_, sample = samples;
    if (const auto found = rooms.lower_bound(n); found != rooms.end()) {
      room = *found;
      std::vector<i64>& same = with_room[static_cast<size_t>(room)];
      sample = same.back();
      same.pop_back();
      if (same.empty()) rooms.erase(found);
    } else {
      ++samples;
    }
    sample_of[p] = sample;
    const i64 left = room - n;
    if (left < 1) continue;
    with_room[static_cast<size_t>(left)].push_back(sample);
    rooms.insert(left);
  }
  // Piece behind piece, sample by sample.
  first_.assign(static_cast<size_t>(samples) + 1, 0);
  for (const i64 sample : sample_of) ++first_[static_cast<size_t>(sample) + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  std::vector<i64> next(first_.begin(), first_.end() - 1);
  std::vector<Piece> sorted(pieces_.size());
  for (size_t p = 0; p < pieces_.size(); ++p)
    sorted[static_cast<size_t>(next[static_cast<size_t>(sample_of[p])]++)] = pieces_[p];
  pieces_ = std::move(sorted);
}

void Packing::make_sample(const TokenStream& stream, i64 sample, i64 vocab_size, std::span<i32> inputs,
                          std::span<i32> targets) const {
  const auto s = static_cast<size_t>(sample);
  size_t at = 0;
  for (i64 p = first_[s]; p < first_[s + 1]; ++p) {
    const Piece& piece = pieces_[static_cast<size_t>(p)];
    const auto n = static_cast<size_t>(piece.count), learnt = piece.has_next ? n : n - 1;
    stream.read(piece.begin, inputs.subspan(at, n), vocab_size);
    stream.read_targets(piece.begin + 1, targets.subspan(at, learnt), vocab_size);
    std::ranges::fill(targets.subspan(at + learnt, n - learnt), kIgnoredTarget);
    at += n;
  }
  std::ranges::fill(inputs.subspan(at), filling_);
  std::ranges::fill(targets.subspan(at), kIgnoredTarget);
}

void Packing::find_documents(i64 sample, std::span<i32> begins) const noexcept {
  const auto s = static_cast<size_t>(sample);
  size_t at = 0;
  for (i64 p = first_[s]; p < first_[s + 1]; ++p) {
    const auto n = static_cast<size_t>(pieces_[static_cast<size_t>(p)].count);
    std::ranges::fill(begins.subspan(at, n), static_cast<i32>(at));
    at += n;
  }
  for (; at < begins.size(); ++at) begins[at] = static_cast<i32>(at);
}

void Packing::will_need(const TokenStream& stream, i64 sample) const noexcept {
  const auto s = static_cast<size_t>(sample);
  for (i64 p = first_[s]; p < first_[s + 1]; ++p) {
    const Piece& piece = pieces_[static_cast<size_t>(p)];
    stream.will_need(piece.begin, piece.count + (piece.has_next ? 1 : 0));
  }
}

}  // namespace ds
