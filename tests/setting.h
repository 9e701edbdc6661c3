// SPDX-License-Identifier: Apache-2.0
#pragma once
// An environment variable for as long as this lives.

#include <cstdlib>
#include <string>

namespace ds::testing {

class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
  ~Setting() { unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

}  // namespace ds::testing
