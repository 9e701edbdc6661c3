// SPDX-License-Identifier: Apache-2.0
#pragma once
// The table of operations: the name of each one, its forms and types, its cost on a link, the code that it runs, and
// its expected results. Everything else reads this table.

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "commbench/pattern.h"

namespace ds::commbench {

// An operation of one size on the buffers of a rank.
struct Task {
  Communicator& comm;
  Device& device;
  std::byte *source, *target;  // source_bytes(), target_bytes()
  DType dtype;
  ReduceOp redop;
  int root;
  i64 count;  // elements of the whole buffer, or of a rank's slice
  bool in_place;
  i64 bucket_elems;                                      // of a slice, for zero_step
  std::vector<AllToAllSlice> slices_out{}, slices_in{};  // of source and target, for all_to_allv

  int rank() const noexcept { return comm.rank(); }
  int ranks() const noexcept { return comm.size(); }
  i64 bytes(i64 elems) const noexcept { return elems * dtype_bytes(dtype); }
};

// Elements in a buffer: the data that `rank` sends (Pattern::send), or the reduction over all ranks.
struct Region {
  std::byte* data;
  i64 count;
  DType type;
  bool reduced;
  int rank;   // if not reduced
  i64 first;  // index in the pattern
};

using Tickets = std::vector<Ticket>;

struct Operation {
  std::string_view name;
  bool has_slices;  // each rank owns one: Task::count is a slice's
  bool reduces, has_root, has_data;
  int fewest_ranks;
  // Messages of the size that an iteration sends one after the other; times are those of one message.
  int messages;
  bool copies;       // the out-of-place form begins with a copy, since the communicator works in place
  bool is_exchange;  // an iteration contains an answer, so it ends before the next begins
  bool measures_overlap;
  double (*bus_factor)(int ranks);
  bool (*offers)(DType, ReduceOp);
  bool (*has_form)(bool in_place, DType);
  void (*issue)(const Task&, Tickets&);
  std::vector<Region> (*inputs)(const Task&);
  std::vector<Region> (*outputs)(const Task&);

  // Whether iterations cannot be enqueued one after the other.
  bool is_serial(bool in_place) const noexcept { return is_exchange || (copies && !in_place); }
  i64 count(i64 bytes, DType dtype, int ranks) const noexcept;
  i64 size(i64 count, DType dtype, int ranks) const noexcept;
};

std::span<const Operation> operation_table();

// Sets the slices of all_to_allv: uneven_share().
void set_uneven_slices(Task& task);

// The sizes of the buffers of a task with these numbers.
i64 source_bytes(i64 size) noexcept;
i64 target_bytes(i64 size, int ranks) noexcept;

// Whether a rank takes part: in operations on pairs the last of an odd number has no partner and is idle.
bool takes_part(const Operation& operation, int rank, int ranks) noexcept;

// From which ranks to which it sends messages.
std::vector<MessageLink> message_links(const Operation& operation, int ranks);

}  // namespace ds::commbench
