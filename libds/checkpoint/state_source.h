// SPDX-License-Identifier: Apache-2.0
#pragma once
// A training state, wherever it stands: named parameters, their fp32 masters and Adam moments, the counters of the run.
// One of our saved steps, a DeepSpeed checkpoint and a file of whole tensors are each a StateSource; merging, sharding
// and resuming read nothing else.

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
  // In the order of the source; tied ones are other names of what they are tied to, and have no elements of their own.
  virtual const std::vector<ParamEntry>& params() const noexcept = 0;

  // Tensors that are there, but whose elements cannot be read.
  virtual const std::vector<ForeignTensor>& foreign() const noexcept;

  // Whether there is such state. Param is always there. The others are there, in fp32, for every untied parameter of a
  // float type that ParamEntry::may_have it, or for none.
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

  // Elements [first, first + count) of an untied parameter's state, as `dtype`. Weights come from where they are exact:
  // Param in another dtype than the stored one from Master; Master, where there is none, from Param.
  // Throws Errc::Corrupt (file and what is wrong), Errc::Io, Errc::Unavailable (no such conversion).
  void read(State state, DType dtype, i64 param, i64 first, i64 count, void* out) {
    read(state, dtype, param, {}, first, count, out);
  }
  // The same of a slice of the parameter: elements [first, first + count) of the flattened slice.
  void read(State state, DType dtype, i64 param, const model::ParamSlice& slice, i64 first, i64 count, void* out);
  // Elements that read() has rounded to infinity so far, and the first parameter that had one.
  struct Overflow {
    i64 elems = 0, first_param = -1;
  };
  const Overflow& overflow() const noexcept { return overflow_; }

  // The same state, to be read by another thread; nothing where that is not worth while.
  virtual std::unique_ptr<StateSource> reopen() const { return nullptr; }

  // The files of tensors, where whoever writes beside them must know.
  virtual std::vector<std::string> files() const { return {}; }

  // Throws Errc::Corrupt, naming the file, unless everything but the bulk is as it was written.
  virtual void check() {}
  // Reads everything that carries a checksum; one line for each file that is not as it was written.
  virtual std::vector<std::string> verify(const Tick& tick) = 0;

 protected:
  // Elements as they are stored.
  virtual void read_stored(State state, i64 param, i64 first, i64 count, char* out) = 0;
  // Of a slice; by read_stored, unless the source knows better.
  virtual void read_stored_slice(State state, i64 param, const model::ParamSlice& slice, i64 first, i64 count,
                                 char* out);

 private:
  Overflow overflow_;
};

// Runs `check`; what it finds is one more of `lines`. That the system refuses to read a file (Errc::Io) says nothing
// about the file, and ends the work, as a Tick's Errc::Interrupted does.
template <class Check>
void note_damage(std::vector<std::string>& lines, Check&& check) {
  try {
    check();
  } catch (const Error& e) {
    if (e.code() == Errc::Io || e.code() == Errc::Interrupted) throw;
    lines.emplace_back(e.what());
  }
}

// At most 20 of them, and how many more there are.
std::string first_lines(const std::vector<std::string>& lines, std::string_view separator = "\n  ");

// Throws Errc::Unavailable, naming it and its type, if one of the tensors that `only` (glob patterns; empty: all)
// chooses cannot be read.
void check_readable(const StateSource&, const std::vector<std::string>& only = {});

// A warning that names `output` where weights became infinite on the way into it.
void warn_of_overflow(std::initializer_list<const StateSource*> readers, const std::string& output);

// Whether `path` is a run directory or a step of ours, or a DeepSpeed checkpoint.
bool is_checkpoint(const std::string& path);

// Opens what `path` is: a run directory or a step of ours; a DeepSpeed checkpoint, ZeRO or universal; or whatever
// open_source() reads, whose tensors are the parameters (optimizer.<state>.<name> the states of <name>). `tag`: the
// step of a directory of several (ours: "step-00000100"; DeepSpeed's: the name of the sub-directory); empty: the latest
// one. Throws Errc::Io (nothing there), Errc::Unavailable (not a kind that is read), Errc::Corrupt.
std::unique_ptr<StateSource> open_state(const std::string& path, const std::string& tag = {});

}  // namespace ds
