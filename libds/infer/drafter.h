// SPDX-License-Identifier: Apache-2.0
#pragma once
// A small model that proposes tokens. It continues the texts of another session in a session of its own, with their
// options and random numbers, so that both models draw the same tokens where they agree on probabilities.

#include <map>

#include "ds/model_config.h"
#include "infer/session.h"

namespace ds::infer {

// The sizes of a draft's session. Its context may be shorter: then texts that are longer have no proposals.
SessionSizes draft_sizes(const SessionSizes& sizes, const ModelConfig& draft);

class Drafter final : public Proposer, private Session::Listener {
 public:
  // `stage` has all layers of the draft, on each rank that shares the session, and outlives it. `sizes`: of the
  // session, whose model has the ids below `vocab`.
  Drafter(stage::Stage& stage, const SessionSizes& sizes, i64 vocab);

  // Proposes nothing for places whose turn it is if logits of the draft are not finite.
  void propose(std::span<Place> places) override;
  void forget(u64 id) override;

 private:
  void follow(Place& place);
  bool token(Session::Id id, i32 token, const Row& row) override;
  void scored(Session::Id, i64, const Row&) override {}
  void failed(Session::Id id, const std::string& why) override;
  void ended(Session::Id id) override;

  SessionSizes sizes_;
  i64 vocab_, own_vocab_;
  Session session_;
  std::map<u64, Session::Id> followers_;  // of sequences: their requests here
  struct Drawing {
    Place* place;
    i64 most;  // tokens that it draws
  };
  std::map<Session::Id, Drawing> drawing_;  // in a call of propose()
};

}  // namespace ds::infer
