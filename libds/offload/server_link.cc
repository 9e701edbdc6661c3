// SPDX-License-Identifier: Apache-2.0
#include "offload/server_link.h"

#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/file.h"

namespace ds::offload {

ServerLink::ServerLink(const std::string& name, Rank rank)
    : place_(name), rank_(std::move(rank)), connection_(Connection::to(place_)) {}

// The server removes the segments of an attached rank: it may need them to complete a step.
ServerLink::~ServerLink() {
  if (attached_) return;
  for (const auto& segment : segments_) segment->remove();
}

const Segment& ServerLink::new_segment(i64 bytes) {
  const std::string path =
      fmt::format("{}/mail.{}.{}.{}", place_.directory, random_hex64(), rank_.rank, segments_.size());
  return *segments_.emplace_back(std::make_unique<Segment>(Segment::create(path, bytes)));
}

i64 ServerLink::add(ServedSet set) {
  sets_.push_back(std::move(set));
  return std::ssize(sets_) - 1;
}

std::string ServerLink::request(Message kind, std::string_view payload, Message reply) {
  if (failed_) std::rethrow_exception(failed_);
  const Clock::time_point start = Clock::now();
  Connection::Received r{};
  try {
    try {
      connection_.send(kind, payload);
    } catch (const Error&) {  // it may have said why before
    }
    r = connection_.receive();
  } catch (const Error& e) {
    failed_ = std::make_exception_ptr(
        Error(Errc::Comm, fmt::format("the server '{}' has ended; its states are not lost: start it again (ds-offload "
                                      "serve {}), and then the run, which goes on from the last whole step",
                                      place_.name, place_.name)));
    std::rethrow_exception(failed_);
  }
  waited_s_ += seconds_since(start);
  if (r.kind == Message::Failed) {
    Unpacker in(r.payload);
    const Errc code = in.get<Errc>();
    throw Error(code, fmt::format("the server '{}': {}", place_.name, in.get<std::string>()));
  }
  DS_CHECK(r.kind == reply, Errc::Comm, "the server '{}' sent an unexpected answer: it is of another version",
           place_.name);
  return std::move(r.payload);
}

void ServerLink::check(const std::string& name) {
  const ServerPlace place(name);
  (void)Connection::to(place);
}

const ServerLink::Found& ServerLink::attach(bool two_versions) {
  two_versions_ = two_versions;
  Packer out;
  out.put(kServedVersion);
  out.put(rank_.run);
  out.put(i64{rank_.rank});
  out.put(i64{rank_.ranks});
  out.put(rank_.layout);
  out.put(two_versions);
  out.put(sets_);
  const std::string text = request(Message::Hello, out.text(), Message::Attached);
  attached_ = true;
  Unpacker in(text);
  in.get(found_.has);
  in.get(found_.record);
  in.get(found_.meta);
  in.get(found_.step_dir);
  return found_;
}

void ServerLink::clear() { request(Message::Clear, {}); }

namespace {

std::string range_text(i64 set, i64 param, i64 begin, i64 count, const StateSet& states) {
  Packer out;
  out.put(set);
  out.put(param);
  out.put(begin);
  out.put(count);
  out.put(states);
  return out.text();
}

}  // namespace

void ServerLink::read(i64 set, i64 param, i64 begin, i64 count, const StateSet& states) {
  request(Message::Read, range_text(set, param, begin, count, states));
}

void ServerLink::write(i64 set, i64 param, i64 begin, i64 count, const StateSet& states) {
  request(Message::Write, range_text(set, param, begin, count, states));
}

void ServerLink::publish(const ServedRecord& record, const std::string& pieces, const std::string& meta,
                         const std::string& params) {
  Packer out;
  out.put(record);
  out.put(pieces);
  out.put(meta);
  out.put(params);
  request(Message::Publish, out.text());
}

i64 ServerLink::define_tile(i64 set, const std::vector<ServedPiece>& pieces) {
  Packer out;
  out.put(set);
  out.put(pieces);
  request(Message::Tile, out.text());
  return tiles_++;
}

void ServerLink::run(ServedRun run) {
  if (!two_versions_) {
    runs_.push_back(std::move(run));
    return;
  }
  Packer out;
  out.put(run);
  request(Message::Run, out.text());
}

void ServerLink::settle(const GradVerdict& verdict, std::function<void()> bring) {
  bring_.push_back(std::move(bring));
  if (bring_.size() < sets_.size()) return;
  const std::vector<std::function<void()>> all = std::exchange(bring_, {});
  DS_ASSERT(outcome);
  Packer out;
  out.put(outcome(verdict));
  out.put(std::exchange(runs_, {}));
  request(Message::Commit, out.text());
  for (const auto& each : all) each();
}

}  // namespace ds::offload
