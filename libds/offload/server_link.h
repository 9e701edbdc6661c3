// SPDX-License-Identifier: Apache-2.0
#pragma once
// The end that a rank of a run has of its connection with a server of states (served.h). What waits for all ranks of
// the run is named collective.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "offload/segment.h"
#include "offload/served.h"

namespace ds::offload {

class ServerLink {
 public:
  struct Rank {
    int rank = 0, ranks = 1;
    std::string run{};     // random, alike on all ranks
    std::string layout{};  // who has what of the parameters: equal texts, equal cuts
  };
  // Throws Errc::Unavailable: there is no such server.
  ServerLink(const std::string& name, Rank rank);
  ~ServerLink();
  ServerLink(const ServerLink&) = delete;

  // Throws what a run that attached to the server now would: there is none, or it is in use.
  static void check(const std::string& name);

  const std::string& name() const noexcept { return place_.name; }
  // Memory that the server has, too, until the run ends.
  const Segment& new_segment(i64 bytes);
  // Before attach(). Its number.
  i64 add(ServedSet set);

  // The state that the server has: none; one of this layout, with which the run can go on at once; or another, which it
  // has written as a step of a checkpoint, for as long as the run has not published its own.
  enum class Has : u8 { Nothing, Same, Other };
  struct Found {
    Has has = Has::Nothing;
    ServedRecord record = {};
    std::string meta = {};      // as it was published
    std::string step_dir = {};  // of Other
  };
  // Collective. Throws Errc::Unavailable: another run has the server, or the state does not fit it.
  const Found& attach(bool two_versions);
  const Found& found() const noexcept { return found_; }
  // What the server has is given up, and all states are zeros. Collective.
  void clear();

  // Between places of a set's window and the chunks of a piece.
  void read(i64 set, i64 param, i64 begin, i64 count, const StateSet& states);
  void write(i64 set, i64 param, i64 begin, i64 count, const StateSet& states);
  // From now on the state is whole, and what the server had before is given up. Texts are for ds-offload dump: of this
  // rank's pieces, and of the run. Collective.
  void publish(const ServedRecord& record, const std::string& pieces, const std::string& meta,
               const std::string& params);

  // A tile's number.
  i64 define_tile(i64 set, const std::vector<ServedPiece>& pieces);
  // A pass: at once, where the run has two versions of states; else when the step is committed.
  void run(ServedRun run);
  // The record of the step that ends with this verdict.
  std::function<ServedRecord(const GradVerdict&)> outcome;
  // For each set once in a step. The last one commits it: collective; then every set's `bring` is called.
  void settle(const GradVerdict& verdict, std::function<void()> bring);
  double waited_s() const noexcept { return waited_s_; }
  // Keeps an error for whoever asks next.
  void fail(std::exception_ptr why) noexcept {
    if (!failed_) failed_ = std::move(why);
  }

 private:
  std::string request(Message kind, std::string_view payload, Message reply = Message::Done);

  const ServerPlace place_;
  const Rank rank_;
  Connection connection_;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<ServedSet> sets_;
  bool attached_ = false, two_versions_ = false;
  Found found_;
  i64 tiles_ = 0;
  std::vector<ServedRun> runs_;  // of the step
  std::vector<std::function<void()>> bring_;
  double waited_s_ = 0;
  std::exception_ptr failed_;
};

}  // namespace ds::offload
