// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a server has left in its directory, to be looked at and written as a checkpoint.

#include <functional>
#include <string>

#include "serve/generation.h"

namespace ds::serve {

// Where the slots of a generation are: a directory of a disk; empty: in memory.
std::string states_directory(const std::string& directory, const std::string& id);
// Removes files of a server's earlier generations from the directory of a disk.
void remove_orphans(const std::string& path, const std::string& name, const std::string& current);

void write_run(const Generation& generation, const RunTexts& texts);
RunTexts read_run(const Generation& generation);

// Writes the states, which are whole, as a step of the run directory `dir`, of one rank. The step directory.
// after_read: called when a part has been read; what it throws ends the work.
std::string write_checkpoint(Generation& generation, const std::string& dir, const std::function<void()>& after_read);

}  // namespace ds::serve
