// SPDX-License-Identifier: Apache-2.0
#pragma once
// States: the values stored for each element of a parameter, with the names used in steps and files. This is the only
// list of them; all code that allocates, predicts, saves, loads, merges or shows states loops over it.

#include <array>
#include <string_view>

#include "ds/kernels/dtype.h"

namespace ds {

// The parameter in the work dtype, its fp32 master if the work dtype is another, then the states of optimizers.
enum class State : u8 {
  Param,
  Master,
  ExpAvg,
  ExpAvgSq,
  MomentumBuffer,
  Sum,
  ExpAvgSqFresh,
  OuterParam,
  OuterMomentum
};
inline constexpr std::array<std::string_view, 9> kStateNames = {
    "param", "master",           "exp_avg",     "exp_avg_sq",    "momentum_buffer",
    "sum",   "exp_avg_sq_fresh", "outer_param", "outer_momentum"};
inline constexpr size_t kNumStates = kStateNames.size();
inline constexpr std::array<State, kNumStates> kStates = {
    State::Param, State::Master,        State::ExpAvg,     State::ExpAvgSq,     State::MomentumBuffer,
    State::Sum,   State::ExpAvgSqFresh, State::OuterParam, State::OuterMomentum};
// States of optimizers, including those of DiLoCo's outer optimizer: the parameters that the workers share, and their
// momentum.
inline constexpr std::array<State, 7> kOptimizerStates = {
    State::ExpAvg,        State::ExpAvgSq,   State::MomentumBuffer, State::Sum,
    State::ExpAvgSqFresh, State::OuterParam, State::OuterMomentum};
constexpr bool is_outer_state(State s) noexcept { return s >= State::OuterParam; }

constexpr std::string_view state_name(State s) noexcept { return kStateNames[static_cast<size_t>(s)]; }
constexpr bool is_optimizer_state(State s) noexcept { return s > State::Master; }

// One value for each state.
template <class T>
struct PerState {
  std::array<T, kNumStates> values{};
  constexpr T& operator[](State s) noexcept { return values[static_cast<size_t>(s)]; }
  constexpr const T& operator[](State s) const noexcept { return values[static_cast<size_t>(s)]; }
  bool operator==(const PerState&) const = default;
};
using StateSet = PerState<bool>;

// How a state is stored in memory: in fp32, or encoded (ds/kernels/state_codes.h).
struct KeptAs {
  DType dtype = DType::F32;
  float* scales = nullptr;  // of codes
};

constexpr StateSet state_set(std::initializer_list<State> states) noexcept {
  StateSet set;
  for (const State s : states) set[s] = true;
  return set;
}

}  // namespace ds
