// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives whose elements travel as 8- or 4-bit codes with an fp32 scale per block (quantize in ds/kernels/ops.h).
// Wang et al.: "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", quantised weights (qwZ)
// and quantised gradients (qgZ). A block never crosses slices, so apart from the order of sums the results do not
// depend on the number of ranks, and every rank has the same bits. A non-finite element makes its whole block NaN.
//
// Works over any communicator; `device` is where its memory is: a CPU for those over host memory. Set-up is collective
// and allocates all memory (wire buffers from the communicator); a call allocates none. Calls count the inner
// collectives' bytes under their tag: P slices of CodedSlice::bytes() instead of P slices of elements.

#include <vector>

#include "comm/coded_slice.h"
#include "device/device.h"
#include "ds/communicator.h"

namespace ds {

// The two halves of an all-gather of coded shards, in `wire` with room for P slices of CodedSlice{format, n}.bytes().
// After the first, the codes of shard [n] (work dtype) are in flight; after its ticket was waited for, the second
// decodes them into full [P*n].
Ticket start_coded_gather(Communicator& comm, Device& device, CodeFormat format, void* wire, TensorView shard,
                          std::string_view tag);
void decode_gathered(Communicator& comm, Device& device, CodeFormat format, void* wire, TensorView full);

// All-gather of coded shards. Our own shard is decoded from its codes as well, so that all ranks see the same weights;
// the shard itself stays exact. One call at a time may be in flight.
class QuantizedAllGather {
 public:
  // For shards of up to `max_elems` elements; allocates P slices. comm and device must outlive it.
  QuantizedAllGather(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 max_elems,
                     CodeFormat format = {});
  ~QuantizedAllGather();  // waits for codes in flight

  // shard [n] in the work dtype, with the same n on all ranks; it may be changed when the call returns (on a device: by
  // later work on Compute). The codes travel during computation.
  void start(TensorView shard, std::string_view tag);
  // full [P*n] in any work dtype, equal on all ranks; it may contain the shard, which is then overwritten.
  void finish(TensorView full);

 private:
  Communicator& comm_;
  Device& device_;
  const CodeFormat format_;
  Buffer wire_;  // P slices
  Ticket ticket_;
  const i64 max_elems_;
};

class LocoErrors;

// Reduce-scatter in two hops, both of which send codes: among the ranks of a node, then among the ranks with the same
// number in their nodes. Rank r = node * node_size + number in the node gets slice r of the sum over ALL ranks; for a
// mean the caller divides, as with reduce_scatter. The order of the sum is fixed: in fp32 over the ranks of a node,
// ascending, then over nodes, ascending. Each hop adds, per term, an error of at most half a scale of the blocks that
// it sends. A hop over a single rank is skipped and rounds nothing, so one node has one hop. The last hop travels
// during computation.
//
// Traffic between nodes shrinks from P slices to P/node_size slices of codes. Small or sensitive tensors (norms,
// biases) should be reduced exactly by the caller. The caller also pads: a source consists of P slices of equal size.
class QuantizedReduceScatter {
 public:
  // For slices of up to `max_elems` elements. `node`: the ranks of this node in the order of their numbers, null if
  // this rank is alone in it; `across`: the ranks with our number in all nodes, in the order of the nodes. All must
  // outlive it. Collective over both. Allocates 2 (P + nodes) coded slices, and one fp32 slice for each node.
  QuantizedReduceScatter(Communicator* node, Communicator& across, Device& device, MemoryLedger& ledger, Tag tag,
                         i64 max_elems, CodeFormat format = {.bits = 4});

  ~QuantizedReduceScatter();  // waits for codes in flight

  // source [P*n] in the work dtype. When it returns, the first hop is done and the last one has started, and source may
  // be changed (on a device: by later work on Compute), unless there is only one rank. If errors are kept, `of` is the
  // index of this source in `errors`, the same in every call. One sum at a time may be in flight.
  void start(TensorView source, std::string_view tag, LocoErrors* errors = nullptr, size_t of = 0);
  // target [n] fp32 = (accumulate ? target : 0) + the sum; done when it returns (on a device: enqueued).
  void finish(TensorView target, bool accumulate);
  // start() and finish(). target must not lie in source.
  void run(TensorView source, TensorView target, bool accumulate, std::string_view tag, LocoErrors* errors = nullptr,
           size_t of = 0) {
    start(source, tag, errors, of);
    finish(target, accumulate);
  }

 private:
  friend LocoErrors;
  i64 local_size() const noexcept { return node_ != nullptr ? node_->size() : 1; }
  i64 num_nodes() const noexcept { return across_.size(); }

  Communicator* const node_;
  Communicator& across_;
  Device& device_;
  const CodeFormat format_;
  const i64 max_elems_;
  Buffer node_send_, node_receive_;      // [local_size][num_nodes] slices for, and from, each rank of the node
  Buffer across_send_, across_receive_;  // [num_nodes] slices
  Buffer partial_;                       // [num_nodes][max_elems] fp32: the sums of this node
  TensorView source_;                    // of a single rank, which sends nothing
  Ticket ticket_;                        // of the last hop
};

struct LocoOptions {
  float decay = 0.8f;
  i64 reset_period = 1024;  // calls
};

// The accumulated quantisation errors of the two hops for some gradients, which are added to the next gradients. Xie et
// al.: "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training". On each hop e = decay e + (1 - decay) (x +
// e - sent value), and 0 every reset_period calls. In blocks that were not finite it is 0.
class LocoErrors {
 public:
  // For gradients whose slices have slice_elems[i] elements; allocates P + nodes slices of each in fp32. Throws
  // Errc::Config.
  LocoErrors(const QuantizedReduceScatter& op, MemoryLedger& ledger, Tag tag, std::vector<i64> slice_elems,
             LocoOptions = {});

  // Call this when the loss scale changes: later gradients are multiplied by `factor`.
  void rescale(float factor) noexcept;
  // The factor since errors were last added to a gradient: the stored errors do not include it yet.
  float pending_scale() const noexcept { return gradients_.empty() ? 1.0f : gradients_.front().scale; }
  // Calls since the last reset, equal for all gradients between steps.
  i64 calls() const noexcept;
  // Call this after setting errors from outside: they belong to that many calls.
  void set_calls(i64 calls) noexcept;
  // fp32, in device memory, one gradient after the other; empty without such a hop. of_node_hop: errors of source
  // [P*n]; the other: errors of the node's sums, by node [num_nodes*n].
  TensorView of_node_hop() const noexcept;
  TensorView of_across_hop() const noexcept;

 private:
  friend QuantizedReduceScatter;
  struct Gradient {
    i64 slice_elems = 0;
    i64 first = 0;  // slice elements of the preceding gradients
    i64 calls = 0;
    float scale = 1;
  };
  ErrorFeedback next(size_t of) noexcept;
  TensorView of_hop(const Buffer& hop, i64 slices, size_t of) const noexcept;

  const LocoOptions options_;
  std::vector<Gradient> gradients_;
  Buffer node_, across_;
};

}  // namespace ds
