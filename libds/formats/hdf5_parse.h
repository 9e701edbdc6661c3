// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lists the contents of an HDF5 file with the library, which is not safe against hostile files: to be called in a child
// process (read_hdf5), or in tests on valid files.

#include "formats/hdf5_driver.h"
#include "formats/safetensors.h"

namespace ds::hdf5 {

inline constexpr i64 kMaxDatasets = 1 << 22;        // in a file
inline constexpr i64 kMaxName = 4096;               // of a path
inline constexpr i64 kMaxCompactBytes = 64 << 10;   // HDF5's own limit
inline constexpr i64 kMaxMetadataBytes = 16 << 20;  // names and values of all attributes of the root

// See read_hdf5. The caller holds library(). Throws Errc::Corrupt, Errc::Unavailable.
TensorTable parse(const Bytes& bytes);

}  // namespace ds::hdf5
