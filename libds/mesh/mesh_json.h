// SPDX-License-Identifier: Apache-2.0
#pragma once
// A mesh as written in steps, records and reports; `workers` only if there are several.

#include "base/json.h"
#include "ds/mesh.h"

namespace ds {

inline Json mesh_json(const MeshShape& m) {
  Json j = {{"dp", m.dp}, {"pp", m.pp}, {"tp", m.tp}, {"sp", m.sp}};
  if (m.workers > 1) j["workers"] = m.workers;
  return j;
}

}  // namespace ds
