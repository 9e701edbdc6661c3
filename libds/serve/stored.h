// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads the states in a server's directory, and writes them as a checkpoint.

#include <functional>
#include <string>

#include "serve/generation.h"

namespace ds::serve {

// The directory of a disk with the slots of a generation; empty: they are in memory.
std::string states_directory(const std::string& directory, const std::string& id);
// Removes the generations of a server except `current`, which may be empty, and its steps. The caller holds the lock.
// Throws like Generation::remove().
void remove_leftovers(const std::string& directory, const std::string& current);
// The directory of a step for a run of another layout: in the server's directory or, if `path` is not empty, in that
// directory of a disk, with a link to it. Only its owner may open it. `entry`: its name in the server's directory.
struct StepPlace {
  std::string entry, path;
};
StepPlace make_step_place(const std::string& directory, const std::string& path, const std::string& server);
// Throws as Generation::remove().
void remove_step(const std::string& entry);
// The files in the directory of a disk that servers of this name have made, except those of generation `id`, each with
// its user and host.
std::vector<std::string> states_of_others(const std::string& path, const std::string& server, const std::string& id);

void write_run(const Generation& generation, const RunTexts& texts);
RunTexts read_run(const Generation& generation);

// Writes the states, which must be complete, as a step of one rank to the run directory `dir`. Returns the step
// directory. after_read: called when a part has been read; an exception ends the work.
std::string write_checkpoint(Generation& generation, const std::string& dir, const std::function<void()>& after_read);

}  // namespace ds::serve
