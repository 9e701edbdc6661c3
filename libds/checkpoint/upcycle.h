// SPDX-License-Identifier: Apache-2.0
#pragma once
// A dense model as a mixture of experts, each of which begins as a copy of the MLP of its block (Komatsuzaki et al.,
// "Sparse Upcycling", 2022).

#include <memory>
#include <string>

#include "checkpoint/state_source.h"
#include "ds/checkpoint.h"

namespace ds {

// The weights of `state` as those of the mixture that `to` names; its step is 0, and it has no optimizer states.
// Whatever the router, a model computes the same function before as after, to rounding: experts are scaled by the sum
// of the weights that a token's choices have; a shared expert, which is a copy of the MLP too, has half of the output.
// Routers begin with small random weights. Where these do not add up to a constant by themselves (weights that are not
// normalised), routers have a standard deviation of 1e-6, since the sum would depend on the token.
//
// The config.json of `state` is `named` or found by model_config_of. Throws like that; Errc::Config (a number of
// experts that a token cannot choose from, a family that has no mixture), Errc::Unavailable (an unsupported model),
// Errc::Mismatch (the mixture differs from the model in more than experts, or parameters are missing).
std::unique_ptr<StateSource> upcycle(std::unique_ptr<StateSource> state, const Upcycling& to, const std::string& named);

}  // namespace ds
