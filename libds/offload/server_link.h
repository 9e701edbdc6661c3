// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's end of the connection to a server of states (served.h). Calls that wait for all ranks of the run are marked
// collective.

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
    std::string run{};     // random, the same on all ranks
    std::string layout{};  // which rank has which parameters: equal texts mean equal cuts
  };
  // Throws Errc::Unavailable if there is no such server.
  ServerLink(const std::string& name, Rank rank);
  ~ServerLink();
  ServerLink(const ServerLink&) = delete;

  // Throws what attaching to the server now would throw: there is none, or it is in use.
  static void check(const std::string& name);

  const std::string& name() const noexcept { return place_.name; }
  // Memory shared with the server until the run ends.
  const Segment& new_segment(i64 bytes);
  // To be called before attach(). Returns the number of the set.
  i64 add(ServedSet set);

  // The state of the server: none; one of this layout, with which the run can continue at once; or one of another
  // layout, which the server has written as a step of a checkpoint and keeps until the run has published its own.
  enum class Has : u8 { Nothing, Same, Other };
  struct Found {
    Has has = Has::Nothing;
    ServedRecord record = {};
    std::string meta = {};      // as it was published
    std::string step_dir = {};  // of Other
  };
  // Collective. Throws Errc::Unavailable if another run is attached, or the state does not fit the server.
  const Found& attach(bool two_versions);
  const Found& found() const noexcept { return found_; }
  // Discards the state of the server; all states are zeros. Collective.
  void clear();

  // Copies between places of a set's window and the chunks of a piece.
  void read(i64 set, i64 param, i64 begin, i64 count, const StateSet& states);
  void write(i64 set, i64 param, i64 begin, i64 count, const StateSet& states);
  // Declares the state complete, and discards the previous one. The texts describe this rank's pieces and the run, for
  // ds-offload dump. Collective.
  void publish(const ServedRecord& record, const std::string& pieces, const std::string& meta,
               const std::string& params);

  // Returns the number of a tile.
  i64 define_tile(i64 set, const std::vector<ServedPiece>& pieces);
  // Runs a pass: at once if the run has two versions of states; else when the step is committed.
  void run(ServedRun run);
  // Sets the record of the step that ends with this verdict.
  std::function<ServedRecord(const GradVerdict&)> outcome;
  // To be called once for each set in a step. The call for the last set commits the step, which is collective; then
  // every set's `bring` is called.
  void settle(const GradVerdict& verdict, std::function<void()> bring);
  double waited_s() const noexcept { return waited_s_; }
  // Keeps an error for the next call.
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
