// SPDX-License-Identifier: Apache-2.0
// The folders in which NVIDIA's libraries are looked for, in a tree made here, and the choice among several.

#include "base/find_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "temp_directory.h"

namespace ds {
namespace find_library_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FindLibrary : public ::testing::Test {
 protected:
  std::string add(const std::string& file) {
    const std::filesystem::path path = root() + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << "no library";
    return path.string();
  }
  const std::string& root() const { return directory_.path(); }
  // In the order in which they are tried, without the root.
  std::vector<std::string> candidates(LibrarySurroundings s) const {
    s.root = root();
    std::vector<std::string> files = library_candidates("libx.so.1", library_folders(s));
    EXPECT_EQ(files.front(), "libx.so.1");
    files.erase(files.begin());
    for (std::string& f : files) f = f.substr(root().size());
    return files;
  }

  testing::TempDirectory directory_;
};

TEST_F(FindLibrary, LooksIntoToolkitsAndPackagesOfPython) {
  for (const char* file :
       {"/usr/local/cuda/lib64/libx.so.1", "/usr/local/cuda-13.0/lib/libx.so.1", "/srv/cuda/lib64/libx.so.1",
        "/srv/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libx.so.1",
        "/srv/venv/lib/python3.9/site-packages/nvidia/x/lib/libx.so.1",
        "/srv/other/lib/python3.11/site-packages/nvidia/x/lib/libx.so.1",
        "/srv/me/.local/lib/python3.12/site-packages/nvidia/x/lib/libx.so.1",
        "/usr/local/lib/python3.12/dist-packages/nvidia/x/lib/libx.so.1",
        "/usr/lib/python3/dist-packages/nvidia/x/lib/libx.so.1", "/srv/unused/lib64/libx.so.1"})
    add(file);
  add("/srv/other/bin/python3");
  EXPECT_THAT(
      candidates({.root = "",
                  .path = "/bin::relative:/srv/other/bin",
                  .cuda_home = "/srv/cuda",
                  .venv = "/srv/venv",
                  .conda = "",
                  .home = "/srv/me"}),
      ElementsAre("/srv/cuda/lib64/libx.so.1", "/usr/local/cuda/lib64/libx.so.1", "/usr/local/cuda-13.0/lib/libx.so.1",
                  "/srv/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libx.so.1",
                  "/srv/venv/lib/python3.9/site-packages/nvidia/x/lib/libx.so.1",
                  "/srv/other/lib/python3.11/site-packages/nvidia/x/lib/libx.so.1",
                  "/srv/me/.local/lib/python3.12/site-packages/nvidia/x/lib/libx.so.1",
                  "/usr/local/lib/python3.12/dist-packages/nvidia/x/lib/libx.so.1",
                  "/usr/lib/python3/dist-packages/nvidia/x/lib/libx.so.1"));
  EXPECT_THAT(candidates({.root = "", .path = "", .cuda_home = "", .venv = "", .conda = "", .home = ""}),
              ElementsAre("/usr/local/cuda/lib64/libx.so.1", "/usr/local/cuda-13.0/lib/libx.so.1",
                          "/usr/local/lib/python3.12/dist-packages/nvidia/x/lib/libx.so.1",
                          "/usr/lib/python3/dist-packages/nvidia/x/lib/libx.so.1"));
}

// A python3 that is a link is the prefix's that it leads to; conda's own packages lie in its lib.
TEST_F(FindLibrary, FollowsLinksAndLooksIntoConda) {
  add("/srv/python/bin/python3.12");
  const std::string of_link = "/srv/python/lib/python3.12/site-packages/nvidia/cu13/lib/libx.so.1";
  add(of_link);
  std::filesystem::create_directories(root() + "/srv/bin");
  std::filesystem::create_symlink(root() + "/srv/python/bin/python3.12", root() + "/srv/bin/python3");
  const std::string of_conda = "/srv/conda/lib/libx.so.1",
                    in_conda = "/srv/conda/lib/python3.12/site-packages/nvidia/x/lib/libx.so.1";
  add(of_conda);
  add(in_conda);
  EXPECT_THAT(
      candidates({.root = "", .path = "/srv/bin", .cuda_home = "", .venv = "", .conda = "/srv/conda", .home = ""}),
      ElementsAre(in_conda, of_conda, of_link));
}

TEST_F(FindLibrary, NothingIsThere) {
  EXPECT_THAT(candidates({.root = "",
                          .path = "/bin",
                          .cuda_home = "/nowhere",
                          .venv = "/nowhere",
                          .conda = "/nowhere",
                          .home = "/nowhere"}),
              IsEmpty());
  const OpenedLibrary none = open_library({"libthere-is-none.so.9"});
  EXPECT_EQ(none.handle, nullptr);
  EXPECT_THAT(none.error, HasSubstr("libthere-is-none.so.9: cannot open shared object file"));
}

TEST_F(FindLibrary, WhatDoesNotLoadOrServeIsPassedOver) {
  const std::string broken = add("/libm.so.6");
  const OpenedLibrary found = open_library({broken, "libm.so.6"});
  ASSERT_NE(found.handle, nullptr);
  EXPECT_TRUE(found.error.empty());
  EXPECT_THAT(found.file, HasSubstr("/libm.so.6"));
  EXPECT_NE(found.file, broken);
  EXPECT_EQ(file_of_open_library("libm.so"), found.file);
  EXPECT_EQ(file_of_open_library("libthere-is-none.so"), "");

  const OpenedLibrary refused = open_library({broken, "libm.so.6"}, [](void*) { return "is too old"; });
  EXPECT_EQ(refused.handle, nullptr);
  EXPECT_THAT(refused.error, HasSubstr(broken + ": file too short; "));
  EXPECT_THAT(refused.error, HasSubstr(found.file + " is too old"));

  const OpenedLibrary none = open_library({broken, broken});
  EXPECT_EQ(none.handle, nullptr);
  EXPECT_EQ(none.file, "");
  EXPECT_THAT(none.error, HasSubstr(broken + ": file too short; " + broken));
}

}  // namespace find_library_test
}  // namespace ds
