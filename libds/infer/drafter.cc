// SPDX-License-Identifier: Apache-2.0
#include "infer/drafter.h"

#include <algorithm>
#include <utility>

namespace ds::infer {

SessionSizes draft_sizes(const SessionSizes& sizes, const ModelConfig& draft) {
  SessionSizes own = sizes;
  own.draft_tokens = 0;
  if (!draft.any_length()) own.context = std::min(sizes.context, draft.max_positions);
  // Layers with windows have room for the tokens of a pass, and so for those that a draft takes back.
  own.chunk = std::max(sizes.chunk, sizes.draft_tokens);
  return own;
}

Drafter::Drafter(stage::Stage& stage, const SessionSizes& sizes, i64 vocab)
    : sizes_(draft_sizes(sizes, stage.model_config())),
      vocab_(vocab),
      own_vocab_(stage.model().vocab),
      session_(stage, sizes_) {}

void Drafter::propose(std::span<Place> places) {
  drawing_.clear();
  for (Place& place : places) follow(place);
  while (session_.step(*this)) {
  }
  // Those that found no room in the caches wait no longer: later they would draw for a place that is gone.
  for (const auto& [id, drawing] : std::exchange(drawing_, {})) {
    if (std::ssize(drawing.place->tokens) < drawing.most) forget(drawing.place->id);
  }
  for (Place& place : places)
    place.tokens.erase(std::ranges::find_if(place.tokens, [&](i32 id) { return id >= vocab_; }), place.tokens.end());
}

void Drafter::follow(Place& place) {
  const i64 prompt = std::ssize(place.request.tokens), size = std::ssize(place.text),
            most = std::min(place.most, sizes_.context - size);
  // Models of one tokenizer may differ in the number of ids that no token has.
  const auto is_unknown = [&](i32 id) { return id >= own_vocab_; };
  if (most <= 0 || (own_vocab_ < vocab_ && std::ranges::any_of(place.text, is_unknown))) return forget(place.id);
  auto found = followers_.find(place.id);
  if (found == followers_.end()) {
    Request request{.tokens = place.request.tokens,
                    .max_tokens = std::min(place.request.max_tokens, sizes_.context - prompt),
                    .sampling = place.request.sampling,
                    .follows = true};
    found = followers_.emplace(place.id, session_.add(std::move(request))).first;
  }
  session_.follow(found->second, place.text, most);
  drawing_.emplace(found->second, Drawing{&place, most});
}

bool Drafter::token(Session::Id id, i32 token, const Row&) {
  drawing_.at(id).place->tokens.push_back(token);
  return true;
}

// Nothing is proposed, as if there were no draft.
void Drafter::failed(Session::Id id, const std::string&) { drawing_.at(id).place->tokens.clear(); }
void Drafter::ended(Session::Id id) {
  std::erase_if(followers_, [&](const auto& one) { return one.second == id; });
}

void Drafter::forget(u64 id) {
  const auto found = followers_.find(id);
  if (found == followers_.end()) return;
  session_.cancel(found->second);
  followers_.erase(found);
}

}  // namespace ds::infer
