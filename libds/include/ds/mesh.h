// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many ranks a run has along each axis; the axes and the order of ranks are those of mesh/mesh.h. Workers of DiLoCo
// are beside each other: each is a mesh of the other axes.

#include <string>

namespace ds {

struct MeshShape {
  int dp = 1, pp = 1, tp = 1, sp = 1, workers = 1;
  int world() const noexcept { return workers * dp * pp * tp * sp; }
  // Ranks that see other samples.
  int data_size() const noexcept { return workers * dp; }
  bool operator==(const MeshShape&) const = default;
};

// Groups that cut dp in two: dp = outer x inner, of which `inner` ranks stand side by side (experts and what is data
// parallel beside them, nodes and the ranks of each, replicas and what is inside). A group joins the ranks along one of
// the two, with all of sp, as dp does. No rank moves.
struct DpSplit {
  std::string name;  // of the group: "edp"
  int inner = 1;     // divides dp
  enum class Along { Inner, Outer } along = Along::Outer;
  bool operator==(const DpSplit&) const = default;
};

}  // namespace ds
