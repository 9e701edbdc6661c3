// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "zero/reduction.h"

namespace ds::zero {
namespace {

class DenseReduction final : public Reduction {
 public:
  explicit DenseReduction(const ReductionParts& parts)
      : parts_(parts),
        reduce_tag_(message_text(parts.options.axis, Collective::ReduceScatter)),
        gather_tag_(message_text(parts.options.axis, Collective::AllGather)),
        under_way_(parts.fresh.num_slots()) {
    size_t most = 0;
    for (size_t b = 0; b < parts.fresh.num_buckets(); ++b) {
      size_t segments = 0;
      for (const i64 unit : parts.fresh.bucket(b).units) segments += parts.layout.segments_of(unit).size();
      most = std::max(most, segments);
    }
    reduced_.reserve(most);
    leases_.reserve(most);
    for (UnderWay& u : under_way_) u.sums.reserve(most);
    gathered_.reserve(parts.layout.segments().size());
  }

  bool add(const Segment& s, bool continues) override {
    leases_.push_back(parts_.sums.lease_owned(s, continues));
    reduced_.push_back({parts_.fresh.segment(s).data, leases_.back().values(), s.slice});
    return true;
  }
  void start(size_t bucket, bool continues) override {
    if (reduced_.empty()) return;
    UnderWay& u = under_way_[parts_.fresh.slot_of(bucket)];
    std::swap(u.sums, leases_);
    u.ticket = parts_.with.ranks.all.reduce_scatter(reduced_, parts_.options.wire, continues, reduce_tag_);
    reduced_.clear();
  }
  void release(size_t bucket) override { wait(under_way_[parts_.fresh.slot_of(bucket)]); }
  void finish() override {
    for (UnderWay& u : under_way_) wait(u);
  }
  bool gather(const Segment& s) override {
    const TensorView sum = parts_.sums.all_of(s);
    gathered_.push_back({sum.data, s.slice * dtype_bytes(sum.dtype)});
    return true;
  }
  void finish_gather() override {
    if (!gathered_.empty()) parts_.with.ranks.all.all_gather(gathered_, gather_tag_).wait();
    gathered_.clear();
  }

 private:
  // A bucket that is being reduced.
  struct UnderWay {
    Ticket ticket;
    std::vector<TierLease> sums;
  };
  static void wait(UnderWay& u) {
    u.ticket.wait();
    u.sums.clear();
  }

  const ReductionParts parts_;
  const std::string reduce_tag_, gather_tag_;
  std::vector<UnderWay> under_way_;  // by slot
  std::vector<TierLease> leases_;    // of the bucket that is being added
  std::vector<ReduceScatterSegment> reduced_;
  std::vector<AllGatherSegment> gathered_;
};

}  // namespace

std::unique_ptr<Reduction> make_dense_reduction(const ReductionParts& parts) {
  return std::make_unique<DenseReduction>(parts);
}

}  // namespace ds::zero
