// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives whose elements travel as codes of 8 or 4 bits with an fp32 scale per block (quantize in
// ds/kernels/ops.h). Wang et al.: "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
// quantised weights (qwZ) and quantised gradients (qgZ). A block of a slice is never of two slices, so the numbers do
// not depend on how many ranks there are beside the order of sums, and every rank has the same bits. What is not finite
// stays visible: NaN in all of its block.
//
// Over any communicator; `device` is where its memory is: a CPU for those over host memory. Set-up is collective and
// takes all memory, on the wire from the communicator; a call takes none. Calls count under their tag what the inner
// collectives send: P slices of CodedSlice::bytes() instead of P slices of elements.

#include <vector>

#include "comm/coded_slice.h"
#include "comm/communicator.h"

namespace ds {

// The two halves of an all-gather of shards, each as its codes say, in memory for P slices of
// CodedSlice{format, n}.bytes(): codes of shard [n] work dtype are on their way when the first returns, and full [P*n]
// has what they say behind the second, when the ticket has been waited for.
Ticket start_coded_gather(Communicator& comm, Device& device, CodeFormat format, void* wire, TensorView shard,
                          std::string_view tag);
void decode_gathered(Communicator& comm, Device& device, CodeFormat format, void* wire, TensorView full);

// All-gather of shards, each as its codes say: also our own, so that all ranks see the same weights. The shard itself
// stays exact. One call at a time is under way.
class QuantizedAllGather {
 public:
  // For shards of up to `max_elems` elements; takes P slices. comm and device outlive it.
  QuantizedAllGather(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 max_elems,
                     CodeFormat format = {});
  ~QuantizedAllGather();  // waits for codes that are on their way

  // shard [n] work dtype, the same n on all ranks; it may be changed when the call returns (over a device: by what is
  // enqueued on Compute behind it). The codes are on their way while others compute.
  void start(TensorView shard, std::string_view tag);
  // full [P*n], any work dtype, equal on all ranks; the shard may lie in it, and is overwritten then.
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

// Reduce-scatter in two hops, each of which sends codes: among the ranks of a node, then among the ranks with the same
// number in their nodes. Rank r = node * node_size + number in the node gets slice r of the sum over ALL ranks; a mean
// is the caller's division, as of reduce_scatter. The order of the sum is fixed: in fp32 over the ranks of a node,
// ascending, and then over nodes, ascending. Each hop adds, per term, at most half a scale of the blocks it sends. A
// hop among one rank is none, and rounds nothing: so one node has one hop. The last hop is on its way while others
// compute.
//
// Of a node's traffic with others, P slices shrink to P/node_size slices of codes. What is small or sensitive (norms,
// biases) is the caller's to reduce exactly instead, and so is padding: a source is P slices of equal size.
class QuantizedReduceScatter {
 public:
  // For slices of up to `max_elems` elements. `node`: the ranks of this node in the order of their numbers, null if
  // this one is alone in it; `across`: those with our number, in the order of their nodes. All outlive it. Collective
  // over both. Takes 2 (P + nodes) coded
  // slices, and one fp32 slice for each node.
  QuantizedReduceScatter(Communicator* node, Communicator& across, Device& device, MemoryLedger& ledger, Tag tag,
                         i64 max_elems, CodeFormat format = {.bits = 4});

  ~QuantizedReduceScatter();  // waits for codes that are on their way

  // source [P*n] work dtype; the first hop is done and the last one begun when it returns, and source may be changed
  // (over a device: by what is enqueued on Compute behind it), unless there is one rank alone. errors, where kept, are
  // number `of` among those of `errors`, and of this very source from call to call. One sum at a time is under way.
  void start(TensorView source, std::string_view tag, LocoErrors* errors = nullptr, size_t of = 0);
  // target [n] fp32 = (accumulate ? target : 0) + the sum; done when it returns (over a device: enqueued).
  void finish(TensorView target, bool accumulate);
  // Both. target may not lie in source.
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
  Buffer node_send_, node_receive_;      // [local_size][num_nodes] slices: for, and from, each rank of the node
  Buffer across_send_, across_receive_;  // [num_nodes] slices
  Buffer partial_;                       // [num_nodes][max_elems] fp32: the sums of this node
  TensorView source_;                    // of one rank, which sends nothing
  Ticket ticket_;                        // of the last hop
};

struct LocoOptions {
  float decay = 0.8f;
  i64 reset_period = 1024;  // calls
};

// What the two hops of some gradients have lost so far; it is added to what comes next. Xie et al.: "LoCo: Low-Bit
// Communication Adaptor for Large-scale Model Training". On each hop e = decay e + (1 - decay) (x + e - what was sent),
// and 0 every reset_period calls. Where a block was not finite it is 0.
class LocoErrors {
 public:
  // For a gradient in slices of slice_elems[i] elements each; takes P + nodes of them in fp32. Throws Errc::Config.
  LocoErrors(const QuantizedReduceScatter& op, MemoryLedger& ledger, Tag tag, std::vector<i64> slice_elems,
             LocoOptions = {});

  // Gradients come multiplied by `factor` from now on: the loss scale has changed.
  void rescale(float factor) noexcept;
  // By what gradients have been rescaled since errors were last added to some: errors are without it yet.
  float pending_scale() const noexcept { return gradients_.empty() ? 1.0f : gradients_.front().scale; }
  // Calls so far since the last reset, which are the same for all gradients between steps.
  i64 calls() const noexcept;
  // Errors were set from outside, behind so many calls.
  void set_calls(i64 calls) noexcept;
  // fp32, of the device, gradient behind gradient; without elements where there is no such hop. Of source [P*n], and of
  // the sums of the node, by node [num_nodes*n].
  TensorView of_node_hop() const noexcept;
  TensorView of_across_hop() const noexcept;

 private:
  friend QuantizedReduceScatter;
  struct Gradient {
    i64 slice_elems = 0;
    i64 first = 0;  // slice elements of the gradients before it
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
