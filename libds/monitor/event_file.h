// SPDX-License-Identifier: Apache-2.0
#pragma once
// TensorBoard's event files: TFRecords (length, its CRC, data, its CRC) of the protobuf message Event, of which we
// write the fields wall_time, step, file_version and summary.value.{tag, simple_value}.

#include <memory>
#include <string>
#include <string_view>

#include "ds/kernels/dtype.h"
#include "monitor/monitor.h"
#include "monitor/scalars.h"

namespace ds::monitor {

// CRC-32C (Castagnoli).
u32 crc32c(std::string_view bytes) noexcept;

// A whole record each. wall_time: seconds since 1970.
std::string version_record(double wall_time);  // the first one of a file
std::string scalar_record(double wall_time, const Scalar& scalar);

// Whether a run writes files with names like this one.
bool is_event_file(std::string_view name) noexcept;

// Writes a new file in `directory`, which exists. Readers read all files of a directory in the order of their names, so
// a resumed run adds one.
std::unique_ptr<Monitor> make_event_file(const std::string& directory, bool has_loss_scale);

}  // namespace ds::monitor
