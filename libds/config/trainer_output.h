// SPDX-License-Identifier: Apache-2.0
#pragma once
// The output directory of Hugging Face's Trainer, which holds no model itself but a directory checkpoint-N for each
// save.

#include <string>

namespace ds {

// "checkpoint-500, checkpoint-1000": the saves in `dir`, in ascending order, the newest ones where there are many.
// Empty if there is none.
std::string trainer_checkpoints(const std::string& dir);

// The end of an error that finds nothing in `dir`: which of its directories can be named instead. Empty if it holds no
// such saves.
std::string trainer_hint(const std::string& dir);

}  // namespace ds
