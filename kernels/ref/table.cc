// SPDX-License-Identifier: Apache-2.0
#include "ref/ref.h"

namespace ds {

const OpTable& ref_ops() noexcept {
  using namespace ref;
  static constexpr OpTable table = {
      .name = "ref",
      .codes = true,
#include "op_rows.inc"
  };
  return table;
}

}  // namespace ds
