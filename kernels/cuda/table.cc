// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops.h"

#include "cuda/context.h"

namespace ds::cuda {

const OpTable& ops() noexcept {
  static constexpr OpTable table = {
      .name = "cuda",
      .codes = true,
#include "op_rows.inc"
  };
  return table;
}

}  // namespace ds::cuda
