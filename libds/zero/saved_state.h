// SPDX-License-Identifier: Apache-2.0
#pragma once
// State that a rank keeps beside parameters and the states of optimizers, and that a checkpoint holds: the errors that
// a compression adds to the next gradients, for example. Each kind implements SavedState. update::Update has the list
// of all of them, over which saving, loading, monitors and predictions of memory loop.

#include <span>
#include <string>
#include <vector>

#include "device/device.h"

namespace ds::zero {

// fp32 values in device memory, under their name in checkpoints.
struct SavedArray {
  std::string name;
  TensorView values;
};

// A kind overrides the functions of the parts that it has. `update` is the number of the last update that was applied.
class SavedState {
 public:
  virtual ~SavedState() = default;

  // Arrays of this rank alone. A run with another layout of ranks, or without a use for them, does not get them: it
  // begins as after forget(), with a warning.

  // Whether any rank has arrays after that update. All ranks answer alike.
  virtual bool has_arrays(i64 update) const noexcept { return static_cast<void>(update), false; }
  // Appends this rank's arrays, perhaps none: for the same update the same names and sizes in the same order. They stay
  // valid until the next step, and may be overwritten. `elements` names the elements that this rank holds; the name of
  // an array that does not name its own ends with it, so that a rank with other elements does not take the array.
  virtual void read(i64 update, const std::string& elements, std::vector<SavedArray>& arrays) {
    static_cast<void>(update), static_cast<void>(elements), static_cast<void>(arrays);
  }
  // The arrays of read() were overwritten with those of a checkpoint made after that update.
  virtual void was_set(i64 update) { static_cast<void>(update); }
  // Parameters and states were set from outside: no error is left of them.
  virtual void forget() {}

  // Numbers of each parameter as a whole, equal on all ranks that update a part of it: a run with any layout gets them.

  // The key under which a checkpoint holds them (CheckpointMeta::numbers); empty: none are kept.
  virtual std::string_view numbers_key() const noexcept { return {}; }
  // How many of a parameter; all ranks answer alike.
  virtual i64 num_numbers(i64 param) const noexcept { return static_cast<void>(param), 0; }
  // By number of the parameter, all of them: on the host, not negative, to be read or overwritten; empty if this rank
  // does not update the parameter, or it has none.
  virtual std::vector<std::span<double>> numbers() { return {}; }

  // Euclidean norms over all parameters and ranks of a worker, for monitors.
  struct Norm {
    std::string_view name;  // lasts as long as the program
    double divisor = 1;
  };
  // Those of this state as the update of that number leaves it; none if it does not change the state. All ranks have
  // the same ones.
  virtual std::span<const Norm> norms(i64 update) { return static_cast<void>(update), std::span<const Norm>(); }
  // Calls visit(index in norms(), values) for all values of this rank that count.
  virtual void for_each_norm(FunctionRef<void(size_t norm, const TensorView& values)> visit) {
    static_cast<void>(visit);
  }
};

}  // namespace ds::zero
