// SPDX-License-Identifier: Apache-2.0
#pragma once
// A stored training state: named parameters, their fp32 masters and optimizer states, and the counters of the run. A
// saved step, a DeepSpeed checkpoint and a file of whole tensors are each a StateSource; merging and sharding read
// nothing else.

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "formats/tensor_io.h"

namespace ds {

class StateSource {
 public:
  virtual ~StateSource() = default;

  virtual const std::string& path() const noexcept = 0;  // for messages
  virtual const CheckpointMeta& meta() const noexcept = 0;
  // In the order of the source; tied parameters are other names of their owners, and have no elements of their own.
  virtual const std::vector<ParamEntry>& params() const noexcept = 0;

  // Tensors whose elements cannot be read.
  virtual const std::vector<ForeignTensor>& foreign() const noexcept;

  // Whether the source has this state. It always has Param. It has each other state, in fp32, for every untied
  // parameter of a float type with ParamEntry::may_have(), or for none.
  virtual bool has(State) const noexcept = 0;
  bool has_optimizer_state() const noexcept {
    return std::any_of(kOptimizerStates.begin(), kOptimizerStates.end(), [this](State s) { return has(s); });
  }
  DType stored_dtype(State s, i64 param) const noexcept {
    return s == State::Param ? params()[param].dtype.value_or(meta().work_dtype) : DType::F32;
  }

  bool stores(State s, i64 param) const noexcept {
    return has(s) && params()[param].may_have(s) && (s == State::Param || is_float(stored_dtype(State::Param, param)));
  }

  // Elements [first, first + count) of an untied parameter's state, as `dtype`. Weights are converted from the most
  // exact source: Param in a dtype other than the stored one from Master; Master, if there is none, from Param. Throws
  // Errc::Corrupt (file and what is wrong), Errc::Io, Errc::Unavailable (no such conversion).
  void read(State state, DType dtype, i64 param, i64 first, i64 count, void* out) {
    read(state, dtype, param, {}, first, count, out);
  }
  // The same for a slice of the parameter: elements [first, first + count) of the flattened slice.
  void read(State state, DType dtype, i64 param, const model::ParamSlice& slice, i64 first, i64 count, void* out);
  // Elements that read() has rounded to infinity so far, and the first parameter that had one.
  struct Overflow {
    i64 elems = 0, first_param = -1;
  };
  const Overflow& overflow() const noexcept { return overflow_; }

  // The same state for another thread to read; nothing if that is not worthwhile.
  virtual std::unique_ptr<StateSource> reopen() const { return nullptr; }

  // The files of tensors that an output must not replace.
  virtual std::vector<std::string> files() const { return {}; }

  // Throws Errc::Corrupt, naming the file, if anything but the bulk differs from what was written.
  virtual void check() {}
  // Reads everything that has a checksum; returns one line for each file that differs from what was written.
  virtual std::vector<std::string> verify(const Tick& tick) = 0;

 protected:
  // Elements as they are stored.
  virtual void read_stored(State state, i64 param, i64 first, i64 count, char* out) = 0;
  // The same for a slice; by default through read_stored().
  virtual void read_stored_slice(State state, i64 param, const model::ParamSlice& slice, i64 first, i64 count,
                                 char* out);

 private:
  Overflow overflow_;
};

// Runs `check` and appends its error to `lines`. An error of the system (Errc::Io) says nothing about the file; it is
// passed on, like a Tick's Errc::Interrupted.
template <class Check>
void note_damage(std::vector<std::string>& lines, Check&& check) {
  try {
    check();
  } catch (const Error& e) {
    if (e.code() == Errc::Io || e.code() == Errc::Interrupted) throw;
    lines.emplace_back(e.what());
  }
}

// At most 20 lines, and the number of further ones.
std::string first_lines(const std::vector<std::string>& lines, std::string_view separator = "\n  ");

// Throws Errc::Unavailable, naming the tensor and its type, if a tensor selected by `only` (glob patterns; empty: all)
// cannot be read.
void check_readable(const StateSource&, const std::vector<std::string>& only = {});

// Warns, naming `output`, if weights became infinite by conversion.
void warn_of_overflow(std::initializer_list<const StateSource*> readers, const std::string& output);

// Whether `path` is a run directory, a step, or a DeepSpeed checkpoint.
bool is_checkpoint(const std::string& path);

// Opens `path`: a run directory or a step; a DeepSpeed checkpoint, ZeRO or universal; or anything that open_source()
// reads, whose tensors are the parameters (optimizer.<state>.<name> are the states of <name>). `tag`: the step of a
// directory of several (ours: "step-00000100"; DeepSpeed's: the name of the subdirectory); empty: the latest one.
// Throws Errc::Io (it does not exist), Errc::Unavailable (an unsupported kind), Errc::Corrupt.
std::unique_ptr<StateSource> open_state(const std::string& path, const std::string& tag = {});

}  // namespace ds
