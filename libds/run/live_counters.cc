// SPDX-License-Identifier: Apache-2.0
#include "run/live_counters.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "ds/log.h"

namespace ds::run {
namespace {

// The header of a file in /dev/shm, if it has one.
std::optional<LiveHeader> read_header(const std::string& name) {
  const std::string bytes = read_shared(name, sizeof(LiveHeader));
  LiveHeader header;
  if (bytes.size() < sizeof header) return std::nullopt;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof header);
  return header;
}

}  // namespace

std::string live_name(i64 pid) { return fmt::format("{}{}", kLivePrefix, pid); }

std::vector<i64> live_pids() {
  std::vector<i64> pids;
  for (const std::string& name : shared_names(kLivePrefix)) {
    i64 pid = 0;
    const char* const digits = name.data() + kLivePrefix.size();
    const auto [end, error] = std::from_chars(digits, name.data() + name.size(), pid);
    if (error == std::errc() && pid > 0 && end == name.data() + name.size() && live_name(pid) == name)
      pids.push_back(pid);
  }
  std::ranges::sort(pids);
  return pids;
}

LiveCounters::LiveCounters(const LiveIdentity& identity, const LiveRecord& first) {
  remove_abandoned();
  const auto segment = std::make_unique<LiveSegment>();
  segment->header.bytes = sizeof(LiveSegment);
  segment->header.pid = getpid();
  segment->identity = identity;
  segment->record.store(first);
  try {
    memory_.emplace(live_name(getpid()), segment.get(), static_cast<i64>(sizeof(LiveSegment)));
  } catch (const Error& e) {
    log_message(LogLevel::Warning, fmt::format("ds-memreport will not find this rank: {}", e.what()));
  }
}

void LiveCounters::publish(const LiveRecord& record) noexcept {
  if (memory_) static_cast<LiveSegment*>(memory_->data())->record.store(record);
}

std::optional<LiveView> LiveView::open(i64 pid) {
  const std::string name = live_name(pid);
  if (remove_abandoned(name)) return std::nullopt;
  // The header first: it says what else there is.
  const std::optional<LiveHeader> header = read_header(name);
  if (header && header->magic == kLiveMagic && header->version != kLiveVersion)
    throw Error(Errc::Mismatch, fmt::format("/dev/shm/{} is of another version of ds-train: {}, this one reads {}",
                                            name, header->version, kLiveVersion));
  std::optional<SharedRecord> memory = SharedRecord::open(name, static_cast<i64>(sizeof(LiveSegment)));
  if (!memory) return std::nullopt;
  LiveView view(std::move(*memory));
  DS_CHECK(view.header().magic == kLiveMagic && view.header().version == kLiveVersion &&
               view.header().bytes == sizeof(LiveSegment) && view.header().pid == pid,
           Errc::Mismatch, "/dev/shm/{} is not what a ds-train of this version shows", name);
  return view;
}

std::optional<LiveRecord> LiveView::read() const {
  constexpr int kSpins = 100;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (int i = 0; i < kSpins || std::chrono::steady_clock::now() < deadline; ++i) {
    if (const std::optional<LiveRecord> record = segment().record.load()) return record;
    if (i >= kSpins) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return std::nullopt;
}

}  // namespace ds::run
