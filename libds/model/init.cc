// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <numbers>

#include "model/models.h"

namespace ds::model {

void init_values(const ParamRow& row, i64 param, u32 seed, i64 begin, i64 count, float* out) {
  if (row.init != Init::Normal) {
    std::fill_n(out, count, row.init == Init::Ones ? 1.0f : 0.0f);
    return;
  }
  const RngKey key{seed, static_cast<u32>(param), 0};
  for (i64 i = begin; i < begin + count;) {
    // Box-Muller on lanes (0,1) and (2,3) of the block that contains element i.
    const PhiloxBlock r = key.block(static_cast<u64>(i / 4));
    double normal[4];
    for (int pair = 0; pair < 2; ++pair) {
      const double radius = std::sqrt(-2.0 * std::log(static_cast<double>(RngKey::uniform(r[2 * pair]))));
      const double angle = 2.0 * std::numbers::pi * static_cast<double>(RngKey::uniform(r[2 * pair + 1]));
      normal[2 * pair] = radius * std::cos(angle);
      normal[2 * pair + 1] = radius * std::sin(angle);
    }
    for (i64 lane = i % 4; lane < 4 && i < begin + count; ++lane, ++i) {
      out[i - begin] = static_cast<float>(normal[lane] * static_cast<double>(row.std));
    }
  }
}

}  // namespace ds::model
