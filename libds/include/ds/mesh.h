// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many ranks a run has along each axis; the axes and the order of ranks are those of mesh/mesh.h.

namespace ds {

struct MeshShape {
  int dp = 1, pp = 1, tp = 1, sp = 1;
  int world() const noexcept { return dp * pp * tp * sp; }
  bool operator==(const MeshShape&) const = default;
};

}  // namespace ds
