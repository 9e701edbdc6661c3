// SPDX-License-Identifier: Apache-2.0
#include "ds/units.h"

#include <fmt/format.h>

namespace ds {

std::string bytes_text(i64 bytes) {
  const double b = static_cast<double>(bytes);
  if (bytes >= i64{1} << 30) return fmt::format("{:.3f} GiB", b / 0x1p30);
  if (bytes >= i64{1} << 20) return fmt::format("{:.3f} MiB", b / 0x1p20);
  return fmt::format("{:.3f} KiB", b / 0x1p10);
}

}  // namespace ds
