// SPDX-License-Identifier: Apache-2.0
#pragma once
// DeepSpeed's csv_monitor: one file per tag, one line per number.

#include <memory>
#include <string>
#include <string_view>

#include "monitor/monitor.h"

namespace ds::monitor {

// Throws Errc::Config, with `key`, if a file in `directory` that a run may write is not one of these files: a link, a
// pipe, a table of something else.
void check_csv_files(const std::string& directory, std::string_view key);

// Whether a run may write a file of this name in a directory of csv_monitor.
bool is_csv_file(std::string_view name);

// Adds to the files in `directory`, which exists, or makes them: TAG.csv with "/" and blanks as "_", the header
// "step,LAST" (the last part of the tag), lines that end as those of Python's csv do. A file has one header, whatever
// number of runs write to it.
std::unique_ptr<Monitor> make_csv_files(const std::string& directory, bool has_loss_scale);

}  // namespace ds::monitor
