// SPDX-License-Identifier: Apache-2.0
#include "commbench/check.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"

namespace ds::commbench {
namespace {

constexpr i64 kChunkBytes = i64{1} << 20;  // on the host at a time

// Calls f(address, first element, count) for the parts of a region.
template <class F>
void for_each_chunk(const Region& r, F&& f) {
  const i64 bytes = dtype_bytes(r.type);
  for (i64 at = 0; at < r.count; at += kChunkBytes / bytes)
    f(r.data + at * bytes, at, std::min(kChunkBytes / bytes, r.count - at));
}

struct FirstWrong {
  i64 num_wrong, index;
  std::array<char, 32> got, expected;
};

void put(std::array<char, 32>& to, const std::string& text) {
  std::memcpy(to.data(), text.data(), std::min(text.size(), to.size() - 1));
}

}  // namespace

Pattern Checker::pattern(const Operation& operation, const Task& task) const {
  return {.ranks = task.ranks(), .dtype = task.dtype, .reduced = operation.reduces, .op = task.redop, .salt = salt_};
}

void Checker::prepare(const Operation& operation, const Task& task) {
  ++salt_;
  const Pattern p = pattern(operation, task);
  std::vector<std::byte> chunk(static_cast<size_t>(kChunkBytes), std::byte{0xA5});
  for (const Region& r : operation.outputs(task)) {
    for_each_chunk(r, [&](std::byte* to, i64, i64 count) {
      endpoint_.device->upload(to, chunk.data(), count * dtype_bytes(r.type));
    });
  }
  for (const Region& r : operation.inputs(task)) {
    for_each_chunk(r, [&](std::byte* to, i64 at, i64 count) {
      const std::span<std::byte> part(chunk.data(), static_cast<size_t>(count * dtype_bytes(r.type)));
      p.send(r.rank, r.first + at, part);
      endpoint_.device->upload(to, part.data(), std::ssize(part));
    });
  }
  endpoint_.device->synchronize();
}

Checker::Verdict Checker::check(const Operation& operation, const Task& task) {
  prepare(operation, task);
  endpoint_.world->barrier("bench");
  Tickets tickets;
  operation.issue(task, tickets);
  for (Ticket& t : tickets) t.wait();
  endpoint_.device->synchronize();
  endpoint_.comm().throw_if_failed();

  const Pattern p = pattern(operation, task);
  const std::vector<Region> outputs = operation.outputs(task);
  if (options_.fault_rank == task.rank()) {
    DS_CHECK(!outputs.empty(), Errc::Config, "rank {} receives nothing in {}, so no fault can be injected", task.rank(),
             operation.name);
    std::byte byte{};
    endpoint_.device->download(&byte, outputs.front().data, 1);
    byte ^= std::byte{1};
    endpoint_.device->upload(outputs.front().data, &byte, 1);
  }
  FirstWrong own{};
  std::vector<std::byte> got(static_cast<size_t>(kChunkBytes)), expected(got.size());
  for (const Region& r : outputs) {
    const i64 width = dtype_bytes(r.type);
    for_each_chunk(r, [&](std::byte* from, i64 at, i64 count) {
      const std::span<std::byte> part(expected.data(), static_cast<size_t>(count * width));
      r.reduced ? p.reduce(r.first + at, r.type, part) : p.send(r.rank, r.first + at, part);
      endpoint_.device->download(got.data(), from, count * width);
      if (std::memcmp(got.data(), expected.data(), part.size()) == 0) return;
      for (i64 i = 0; i < count; ++i) {
        const std::byte *g = got.data() + i * width, *e = expected.data() + i * width;
        if (std::memcmp(g, e, static_cast<size_t>(width)) == 0 || own.num_wrong++ > 0) continue;
        own.index = r.first + at + i;
        put(own.got, element_text(g, r.type, operation.reduces));
        put(own.expected, element_text(e, r.type, operation.reduces));
      }
    });
  }
  std::vector<FirstWrong> all(static_cast<size_t>(task.ranks()));
  all[task.rank()] = own;
  const AllGatherSegment segment{all.data(), sizeof(FirstWrong)};
  endpoint_.world->all_gather({&segment, 1}, "bench").wait();
  Verdict verdict;
  for (size_t q = 0; q < all.size(); ++q) {
    verdict.num_wrong += all[q].num_wrong;
    if (all[q].num_wrong > 0 && !verdict.first)
      verdict.first = {.op = std::string(operation.name),
                       .form = task.in_place ? "in place" : "out of place",
                       .size = operation.size(task.count, task.dtype, task.ranks()),
                       .rank = static_cast<int>(q),
                       .index = all[q].index,
                       .got = all[q].got.data(),
                       .expected = all[q].expected.data()};
  }
  return verdict;
}

}  // namespace ds::commbench
