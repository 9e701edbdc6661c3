// SPDX-License-Identifier: Apache-2.0
#pragma once
// A fresh directory for one test, removed at its end, and whole files in one call.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace ds::testing {

class TempDirectory {
 public:
  TempDirectory() : path_(::testing::TempDir() + "ds-test-XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp " + path_);
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const noexcept { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  if (!out.flush()) throw std::runtime_error("write " + path);
}

}  // namespace ds::testing

// The statement throws ds::Error with this code and a message that contains `part`.
#define EXPECT_ERROR(statement, errc, part)                                     \
  try {                                                                         \
    statement;                                                                  \
    ADD_FAILURE() << "no error from " #statement;                               \
  } catch (const ::ds::Error& e) {                                              \
    EXPECT_EQ(e.code(), errc) << e.what();                                      \
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what(); \
  }
