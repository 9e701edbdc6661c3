// SPDX-License-Identifier: Apache-2.0
// self and staged: communicators over device memory.

#include <array>
#include <exception>
#include <optional>

#include "comm/make_communicator.h"
#include "comm/slice_sizes.h"
#include "comm/staging.h"

namespace ds {
namespace {

class DeviceSelfCommunicator final : public BaseCommunicator {
 public:
  // world: null if this is a world itself.
  DeviceSelfCommunicator(Communicator* world, const CommOptions& options)
      : BaseCommunicator("self", 0, 1, world != nullptr ? world_ranks(*world) : std::vector<int>()),
        own_world_(world == nullptr ? make_self_communicator(options) : nullptr),
        world_(world == nullptr ? *own_world_ : *world),
        device_(*options.device),
        uncaught_at_birth_(std::uncaught_exceptions()) {}
  ~DeviceSelfCommunicator() override {
    if (std::uncaught_exceptions() > uncaught_at_birth_)
      abort(Error(Errc::Comm, "an error unwound the owner of its communicator"));
  }

  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override {
    make_operation(OpKind::Allocate, "allocate", 0);
    return device_buffer(device_, ledger, tag, bytes);
  }
  void throw_if_failed() const override { world_.throw_if_failed(); }
  void look_for_failures() override { world_.look_for_failures(); }
  void abort(const Error& why) noexcept override { world_.abort(why); }
  i64 staging_bytes() const noexcept override { return 0; }

 private:
  Ticket submit(Operation&& op) override {
    throw_if_failed();
    if (op.kind == OpKind::ReduceScatter) {
      for (const OpSegment& s : op.segments) {
        const i64 elems = s.slice_bytes / dtype_bytes(op.dtype);
        const TensorView target = TensorView::of(s.target, DType::F32, {elems}),
                         source = TensorView::of(const_cast<std::byte*>(s.source), op.dtype, {elems});
        if (elems > 0) device_.ops().fold(target, {&source, 1}, op.accumulate, device_.stream());
      }
    } else if (op.kind == OpKind::AllToAllV) {
      const std::array<i64, 2> sizes = {std::ssize(op.out[0]), std::ssize(op.in[0])};
      if (const std::optional<Error> mismatch = size_mismatch(sizes, world_, op.tag)) {
        abort(*mismatch);
        throw Error(*mismatch);
      }
      if (!op.out[0].empty()) device_.copy(op.in[0].data(), op.out[0].data(), std::ssize(op.out[0]));
    } else if (op.kind == OpKind::AllToAll || op.kind == OpKind::Gather || op.kind == OpKind::Scatter) {
      const OpSegment& s = op.segments[0];
      if (s.source != s.target && s.slice_bytes > 0) device_.copy(s.target, s.source, s.slice_bytes);
    }
    return {};
  }

  const std::unique_ptr<Communicator> own_world_;
  Communicator& world_;
  Device& device_;
  const int uncaught_at_birth_;
};

class StagedCommunicator final : public BaseCommunicator {
 public:
  StagedCommunicator(Communicator& world, Device& device)
      : BaseCommunicator("staged", world.rank(), world.size(), world_ranks(world)),
        world_(world),
        device_(device),
        staging_(world, device),
        uncaught_at_birth_(std::uncaught_exceptions()) {}
  ~StagedCommunicator() override {
    if (std::uncaught_exceptions() > uncaught_at_birth_)
      abort(Error(Errc::Comm, "an error unwound the owner of its communicator"));
  }

  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override {
    make_operation(OpKind::Allocate, "allocate", 0);
    return device_buffer(device_, ledger, tag, bytes);
  }
  void throw_if_failed() const override { world_.throw_if_failed(); }
  void look_for_failures() override { world_.look_for_failures(); }
  void abort(const Error& why) noexcept override { world_.abort(why); }
  i64 staging_bytes() const noexcept override { return staging_.bytes(); }

 private:
  Ticket submit(Operation&& op) override {
    throw_if_failed();
    return staging_.run(op);
  }

  Communicator& world_;
  Device& device_;
  Staging staging_;
  const int uncaught_at_birth_;
};

}  // namespace

std::unique_ptr<Communicator> make_device_self_communicator(const CommOptions& options) {
  DS_ASSERT(options.device != nullptr);
  return std::make_unique<DeviceSelfCommunicator>(nullptr, options);
}

std::unique_ptr<Communicator> make_device_self_communicator(Communicator& world, const CommOptions& options) {
  DS_ASSERT(options.device != nullptr && world.size() == 1);
  return std::make_unique<DeviceSelfCommunicator>(&world, options);
}

std::unique_ptr<Communicator> make_staged_communicator(Communicator& world, const CommOptions& options) {
  DS_ASSERT(options.device != nullptr);
  return std::make_unique<StagedCommunicator>(world, *options.device);
}

}  // namespace ds
