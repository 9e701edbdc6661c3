// SPDX-License-Identifier: Apache-2.0
// A stand-in for NCCL on machines without a GPU: its entry points over threads of one process and host memory. Ranks
// meet by unique id; a thread of the communicator carries out a group of calls while the caller polls, as non-blocking
// NCCL does. Sends wait for their receiver, and calls that meet must be of one kind and size. A stream may be a
// MessageQueue (queued_device.h). On others a group is done when the communicator no longer returns InProgress, which
// suits devices whose queues run at once; on a MessageQueue it is then enqueued, and runs after the groups before it.
// ds_test_nccl_fault switches faults on.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl_api.h"
#include "queued_device.h"

namespace {

using ds::nccl::DataType;
using ds::nccl::RedOp;
using ds::nccl::Result;

enum Fault : int { kNone = 0, kNeverComes = 1, kAsyncError = 2, kNeverConnects = 3, kAbortHangs = 4 };

struct Message {
  const char* kind;
  std::vector<std::byte> data;
  bool taken = false;
};

// The ranks of one unique id.
struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> mail;  // by (from, to)
};

std::mutex registry_mutex;
std::map<std::string, std::shared_ptr<Meeting>> registry;
std::atomic<int> num_ids{0}, fault_rank{-1}, fault{kNone};

size_t bytes_of(DataType t) { return t == DataType::Int64 ? 8 : 1; }

}  // namespace

namespace ds::nccl {

struct GroupOfCalls {
  std::vector<std::function<bool(CommImpl&)>> calls;  // first sends, then what waits
  test::MessageQueue* stream = nullptr;
};

struct CommImpl {
  int rank = 0, size = 0;
  std::shared_ptr<Meeting> meeting;
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<GroupOfCalls> groups;
  bool stop = false;
  std::atomic<bool> aborted{false};
  std::atomic<int> unfinished{0};
  std::atomic<Result> error{Result::Success};
  std::thread worker;

  bool faulty(Fault f) const { return fault == f && fault_rank == rank; }

  void loop() {
    for (;;) {
      GroupOfCalls group;
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [this] { return stop || !groups.empty(); });
        if (groups.empty()) return;
        group = std::move(groups.front());
        groups.pop_front();
      }
      if (faulty(kNeverComes)) {
        std::unique_lock lock(mutex);
        wake.wait(lock, [this] { return stop || aborted; });
        finish(group);
        while (!groups.empty()) {
          finish(groups.front());
          groups.pop_front();
        }
        return;
      }
      bool fine = true;
      for (auto& call : group.calls) fine = fine && call(*this);
      if (faulty(kAsyncError)) error = Result::RemoteError;
      if (!fine && !aborted && error == Result::Success) error = Result::InvalidUsage;
      finish(group);
    }
  }

  void finish(const GroupOfCalls& group) {
    if (group.stream != nullptr) {
      group.stream->end();
    } else {
      --unfinished;
    }
  }

  std::shared_ptr<Message> post(int to, const char* kind, const void* data, size_t bytes) {
    auto m = std::make_shared<Message>();
    m->kind = kind;
    const auto* first = static_cast<const std::byte*>(data);
    m->data.assign(first, first + bytes);
    const std::lock_guard lock(meeting->mutex);
    meeting->mail[{rank, to}].push_back(m);
    meeting->changed.notify_all();
    return m;
  }
  // Null: aborted, or what came is not what was expected.
  std::shared_ptr<Message> take(int from, const char* kind, size_t bytes) {
    std::unique_lock lock(meeting->mutex);
    auto& box = meeting->mail[{from, rank}];
    meeting->changed.wait(lock, [&] { return aborted || !box.empty(); });
    if (aborted) return nullptr;
    auto m = box.front();
    box.pop_front();
    m->taken = true;
    meeting->changed.notify_all();
    return m->data.size() == bytes && std::strcmp(m->kind, kind) == 0 ? m : nullptr;
  }
  bool wait_taken(const Message& m) {
    std::unique_lock lock(meeting->mutex);
    meeting->changed.wait(lock, [&] { return aborted || m.taken; });
    return !aborted;
  }

  void end() {
    {
      const std::lock_guard lock(mutex);
      const std::lock_guard meeting_lock(meeting->mutex);
      stop = true;
    }
    wake.notify_all();
    meeting->changed.notify_all();
    if (worker.joinable()) worker.join();
  }
};

}  // namespace ds::nccl

namespace {

using ds::nccl::Comm;
using ds::nccl::CommImpl;
using Calls = std::vector<std::function<bool(CommImpl&)>>;

// In the order in which a group's calls are carried out, so that they progress together.
struct Phases {
  Calls post, take, settle;
};

struct Group {
  int depth = 0;
  Comm comm = nullptr;
  Phases phases;
  ds::test::MessageQueue* stream = nullptr;
};
thread_local Group group;

void append(Calls& to, Calls&& from) {
  for (auto& f : from) to.push_back(std::move(f));
}

Result submit(Comm comm, ds::nccl::CudaStream stream, Phases phases) {
  if (comm == nullptr || group.depth == 0 || (group.comm != nullptr && group.comm != comm))
    return Result::InvalidArgument;
  if (comm->error != Result::Success) return comm->error;
  if (comm->unfinished > 0) return Result::InvalidUsage;  // the caller has not waited
  group.comm = comm;
  group.stream = ds::test::MessageQueue::of(stream);
  append(group.phases.post, std::move(phases.post));
  append(group.phases.take, std::move(phases.take));
  append(group.phases.settle, std::move(phases.settle));
  return Result::Success;
}

// Sends to every rank if `sends`, receives from every rank of `from` and hands over what came.
template <class Take>
Result collective(Comm comm, ds::nccl::CudaStream stream, const char* kind, const void* source, size_t bytes,
                  bool sends, std::vector<int> from, Take take) {
  auto posted = std::make_shared<std::vector<std::shared_ptr<Message>>>();
  Phases phases;
  if (sends) {
    phases.post.push_back([=](CommImpl& c) {
      for (int q = 0; q < c.size; ++q) posted->push_back(c.post(q, kind, source, bytes));
      return true;
    });
  }
  phases.take.push_back([=](CommImpl& c) {
    std::vector<std::shared_ptr<Message>> came;
    for (const int q : from) {
      came.push_back(c.take(q, kind, bytes));
      if (came.back() == nullptr) return false;
    }
    take(came);
    return true;
  });
  phases.settle.push_back([=](CommImpl& c) {
    return std::all_of(posted->begin(), posted->end(), [&](const auto& m) { return c.wait_taken(*m); });
  });
  return submit(comm, stream, std::move(phases));
}

// This thread is in an entry point: its allocations are ours.
thread_local bool inside = false;
struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

std::vector<int> everyone(const CommImpl& c) {
  std::vector<int> ranks(static_cast<size_t>(c.size));
  for (int q = 0; q < c.size; ++q) ranks[q] = q;
  return ranks;
}

using Came = std::vector<std::shared_ptr<Message>>;

}  // namespace

#define DS_TEST_NCCL extern "C" __attribute__((visibility("default")))

DS_TEST_NCCL void ds_test_nccl_fault(int rank, int kind) {
  fault_rank = rank;
  fault = kind;
}

DS_TEST_NCCL bool ds_test_nccl_inside() { return inside; }

DS_TEST_NCCL Result ncclGetVersion(int* version) {
  *version = 22809;
  return Result::Success;
}

DS_TEST_NCCL Result ncclGetUniqueId(ds::nccl::UniqueId* id) {
  id->internal = {};
  const std::string name = "threads " + std::to_string(++num_ids);
  name.copy(id->internal.data(), id->internal.size() - 1);
  return Result::Success;
}

DS_TEST_NCCL const char* ncclGetErrorString(Result r) {
  switch (r) {
    case Result::Success: return "no error";
    case Result::RemoteError: return "remote process exited or there was a network error";
    case Result::InvalidUsage: return "invalid usage";
    case Result::InProgress: return "in progress";
    default: return "another error";
  }
}

DS_TEST_NCCL const char* ncclGetLastError(Comm) { return "the last words of NCCL"; }

DS_TEST_NCCL Result ncclCommInitRankConfig(Comm* comm, int size, ds::nccl::UniqueId id, int rank,
                                           ds::nccl::Config* config) {
  if (config->size != sizeof *config || config->magic != 0xcafebeef || config->blocking != 0)
    return Result::InvalidArgument;
  auto* c = new CommImpl;
  c->rank = rank;
  c->size = size;
  {
    const std::lock_guard lock(registry_mutex);
    auto& meeting = registry[id.internal.data()];
    if (meeting == nullptr) meeting = std::make_shared<Meeting>();
    c->meeting = meeting;
  }
  if (!c->faulty(kNeverConnects)) {
    const std::lock_guard lock(c->meeting->mutex);
    ++c->meeting->joined;
  }
  c->worker = std::thread([c] { c->loop(); });
  *comm = c;
  return Result::InProgress;
}

DS_TEST_NCCL Result ncclCommGetAsyncError(Comm comm, Result* r) {
  {
    const std::lock_guard lock(comm->meeting->mutex);
    *r = comm->meeting->joined < comm->size ? Result::InProgress : Result::Success;
  }
  if (comm->unfinished > 0) *r = Result::InProgress;
  if (comm->error != Result::Success) *r = comm->error;
  return Result::Success;
}

DS_TEST_NCCL Result ncclCommFinalize(Comm comm) {
  return comm->unfinished > 0 ? Result::InvalidUsage : Result::Success;
}

DS_TEST_NCCL Result ncclCommDestroy(Comm comm) {
  comm->end();
  delete comm;
  return Result::Success;
}

DS_TEST_NCCL Result ncclCommAbort(Comm comm) {
  {
    const std::lock_guard lock(comm->mutex);
    const std::lock_guard meeting_lock(comm->meeting->mutex);
    comm->aborted = true;
  }
  if (comm->faulty(kAbortHangs)) std::this_thread::sleep_for(std::chrono::seconds(5));
  return ncclCommDestroy(comm);
}

DS_TEST_NCCL Result ncclGroupStart() {
  ++group.depth;
  return Result::Success;
}

DS_TEST_NCCL Result ncclGroupEnd() {
  const Inside guard;
  if (--group.depth > 0) return Result::Success;
  Group all = std::move(group);
  group = {};
  if (all.comm == nullptr) return Result::Success;
  if (all.comm->error != Result::Success) return all.comm->error;
  Calls calls = std::move(all.phases.post);
  append(calls, std::move(all.phases.take));
  append(calls, std::move(all.phases.settle));
  if (all.stream != nullptr) {
    all.stream->begin();
  } else {
    ++all.comm->unfinished;
  }
  {
    const std::lock_guard lock(all.comm->mutex);
    all.comm->groups.push_back({std::move(calls), all.stream});
  }
  all.comm->wake.notify_all();
  return all.stream != nullptr ? Result::Success : Result::InProgress;
}

DS_TEST_NCCL Result ncclSend(const void* source, size_t count, DataType type, int peer, Comm comm,
                             ds::nccl::CudaStream stream) {
  const Inside guard;
  auto sent = std::make_shared<std::shared_ptr<Message>>();
  Phases phases;
  phases.post.push_back([=](CommImpl& c) {
    *sent = c.post(peer, "send", source, count * bytes_of(type));
    return true;
  });
  phases.settle.push_back([=](CommImpl& c) { return c.wait_taken(**sent); });
  return submit(comm, stream, std::move(phases));
}

DS_TEST_NCCL Result ncclRecv(void* target, size_t count, DataType type, int peer, Comm comm,
                             ds::nccl::CudaStream stream) {
  const Inside guard;
  Phases phases;
  phases.take.push_back([=](CommImpl& c) {
    const auto m = c.take(peer, "send", count * bytes_of(type));
    if (m != nullptr) std::memcpy(target, m->data.data(), m->data.size());
    return m != nullptr;
  });
  return submit(comm, stream, std::move(phases));
}

DS_TEST_NCCL Result ncclAllGather(const void* source, void* target, size_t count, DataType type, Comm comm,
                                  ds::nccl::CudaStream stream) {
  const Inside guard;
  const size_t bytes = count * bytes_of(type);
  return collective(comm, stream, "all_gather", source, bytes, true, everyone(*comm), [=](const Came& came) {
    for (size_t i = 0; i < came.size(); ++i)
      std::memcpy(static_cast<std::byte*>(target) + i * bytes, came[i]->data.data(), bytes);
  });
}

DS_TEST_NCCL Result ncclBroadcast(const void* source, void* target, size_t count, DataType type, int root, Comm comm,
                                  ds::nccl::CudaStream stream) {
  const Inside guard;
  const size_t bytes = count * bytes_of(type);
  return collective(comm, stream, "broadcast", source, bytes, root == comm->rank, {root},
                    [=](const Came& came) { std::memcpy(target, came[0]->data.data(), bytes); });
}

DS_TEST_NCCL Result ncclAllReduce(const void* source, void* target, size_t count, DataType type, RedOp op, Comm comm,
                                  ds::nccl::CudaStream stream) {
  const Inside guard;
  if (type != DataType::Int64) return Result::InvalidArgument;
  return collective(comm, stream,
                    op == RedOp::Sum   ? "sum"
                    : op == RedOp::Max ? "max"
                                       : "min",
                    source, count * 8, true, everyone(*comm), [=](const Came& came) {
                      auto* out = static_cast<long long*>(target);
                      // Backwards: any order must do.
                      std::memcpy(out, came.back()->data.data(), count * 8);
                      for (size_t q = came.size() - 1; q-- > 0;) {
                        const auto* in = reinterpret_cast<const long long*>(came[q]->data.data());
                        for (size_t i = 0; i < count; ++i) {
                          if (op == RedOp::Sum)
                            out[i] = static_cast<long long>(static_cast<unsigned long long>(out[i]) +
                                                            static_cast<unsigned long long>(in[i]));
                          else
                            out[i] = (op == RedOp::Max) == (in[i] > out[i]) ? in[i] : out[i];
                        }
                      }
                    });
}
