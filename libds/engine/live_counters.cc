// SPDX-License-Identifier: Apache-2.0
#include "engine/live_counters.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "base/process_stat.h"
#include "ds/log.h"

namespace ds::engine {
namespace {

constexpr i64 kUnfinishedSeconds = 60;  // a file without a header of this age has no maker any more

// Of a file in /dev/shm, if it has one.
std::optional<LiveHeader> read_header(const std::string& name) {
  const std::string bytes = read_shared(name, sizeof(LiveHeader));
  LiveHeader header;
  if (bytes.size() < sizeof header) return std::nullopt;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof header);
  return header;
}

// Processes of another namespace are not known here: those are left alone.
bool is_stale(const LiveHeader& header) {
  return header.magic == kLiveMagic && header.pid_namespace == pid_namespace() &&
         has_ended(process_stat(static_cast<i32>(header.pid)), header.process_start);
}

void remove_if_stale(i64 pid) {
  const std::string name = live_name(pid);
  const std::optional<LiveHeader> header = read_header(name);
  const bool stale = header ? is_stale(*header) : shared_age(name).value_or(0) > kUnfinishedSeconds;
  if (stale && remove_shared(name))
    log_message(LogLevel::Verbose, fmt::format("removed /dev/shm/{}, left by a process that was killed", name));
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

void remove_stale_live_counters() {
  for (const i64 pid : live_pids()) remove_if_stale(pid);
}

LiveCounters::LiveCounters(const LiveIdentity& identity, const LiveRecord& first) {
  remove_stale_live_counters();
  const auto segment = std::make_unique<LiveSegment>();
  segment->header.bytes = sizeof(LiveSegment);
  segment->header.pid = getpid();
  segment->header.process_start = process_stat(getpid()).start;
  segment->header.pid_namespace = pid_namespace();
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
  // The header first: it says what else there is.
  const std::optional<LiveHeader> header = read_header(name);
  if (header && header->magic == kLiveMagic && header->version != kLiveVersion && !is_stale(*header))
    throw Error(Errc::Mismatch, fmt::format("/dev/shm/{} is of another version of ds-train: {}, this one reads {}",
                                            name, header->version, kLiveVersion));
  if (header && is_stale(*header)) {
    remove_if_stale(pid);
    return std::nullopt;
  }
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

}  // namespace ds::engine
