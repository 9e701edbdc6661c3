// SPDX-License-Identifier: Apache-2.0
#include "data/packing.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/check.h"

namespace ds {

Packing::Packing(const TokenStream& stream, i64 seq_length, i32 document_token, i64 vocab_size)
    : seq_length_(seq_length), document_token_(document_token) {
  std::vector<i32> tokens(1 << 16);
  i64 begin = 0;  // of the document that is being read
  for (i64 at = 0; at < stream.num_tokens();) {
    const i64 n = std::min(std::ssize(tokens), stream.num_tokens() - at);
    stream.read(at, std::span(tokens).first(static_cast<size_t>(n)), vocab_size);
    for (i64 i = 0; i < n; ++i) {
      if (tokens[static_cast<size_t>(i)] != document_token) continue;
      add_document(begin, at + i + 1 - begin);
      begin = at + i + 1;
    }
    at += n;
  }
  add_document(begin, stream.num_tokens() - begin);
  DS_CHECK(!pieces_.empty(), Errc::Config,
           "data.packing: there is no document of two tokens or more: each ends behind data.document_token {}",
           document_token);
  pack();
}

void Packing::add_document(i64 begin, i64 count) {
  if (count < 2) return;  // nothing of it could be predicted
  ++num_documents_;
  for (i64 done = 0; done < count;) {
    const i64 n = std::min(seq_length_, count - done);
    const bool goes_on = done + n < count;
    // The last token alone has been a target.
    if (n > 1 || goes_on) pieces_.push_back({begin + done, static_cast<i32>(n), goes_on});
    done += n;
  }
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
    if (left < 2) continue;  // no document is shorter
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
    const auto n = static_cast<size_t>(piece.count), learnt = piece.goes_on ? n : n - 1;
    stream.read(piece.begin, inputs.subspan(at, n), vocab_size);
    stream.read_targets(piece.begin + 1, targets.subspan(at, learnt), vocab_size);
    std::ranges::fill(targets.subspan(at + learnt, n - learnt), kIgnoredTarget);
    at += n;
  }
  std::ranges::fill(inputs.subspan(at), document_token_);
  std::ranges::fill(targets.subspan(at), kIgnoredTarget);
}

void Packing::will_need(const TokenStream& stream, i64 sample) const noexcept {
  const auto s = static_cast<size_t>(sample);
  for (i64 p = first_[s]; p < first_[s + 1]; ++p) {
    const Piece& piece = pieces_[static_cast<size_t>(p)];
    stream.will_need(piece.begin, piece.count + (piece.goes_on ? 1 : 0));
  }
}

}  // namespace ds
