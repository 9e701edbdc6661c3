// SPDX-License-Identifier: Apache-2.0
#pragma once
// The number of ranks of a run along each axis. mesh/mesh.h defines the axes and the order of ranks. Each DiLoCo worker
// is a mesh of the other axes of its own.

#include <string>

namespace ds {

struct MeshShape {
  int dp = 1, pp = 1, tp = 1, sp = 1, workers = 1;
  int world() const noexcept { return workers * dp * pp * tp * sp; }
  // Groups of ranks that train on different samples.
  int data_size() const noexcept { return workers * dp; }
  bool operator==(const MeshShape&) const = default;
};

// A rank's place along each axis.
struct MeshCoord {
  int dp = 0, pp = 0, tp = 0, sp = 0, worker = 0;
  bool operator==(const MeshCoord&) const = default;
};

// A split of dp into two factors, dp = outer x inner, with `inner` neighbouring ranks. It serves experts and their data
// parallelism, nodes and the ranks of each, replicas and the ranks inside. A group joins the ranks along one of the two
// factors, and like dp all ranks of sp. Ranks keep their places.
struct DpSplit {
  std::string name;  // of the group: "edp"
  int inner = 1;     // divides dp
  enum class Along { Inner, Outer } along = Along::Outer;
  bool operator==(const DpSplit&) const = default;
};

}  // namespace ds
