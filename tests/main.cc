// SPDX-License-Identifier: Apache-2.0
// The main function of the test programs that hold many files: gtest's own, with one option more.
//
//   --file=NAME[,NAME...]    only the tests of these files ("matmul_test"), of those that --gtest_filter leaves

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  constexpr std::string_view kOption = "--file=";
  std::set<std::string, std::less<>> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (!argument.starts_with(kOption)) {
      std::fprintf(stderr, "%s: unknown argument '%s'\n", argv[0], argv[i]);
      return 2;
    }
    for (size_t at = kOption.size(); at <= argument.size();) {
      const size_t end = std::min(argument.find(',', at), argument.size());
      wanted.emplace(argument.substr(at, end - at));
      at = end + 1;
    }
  }
  if (wanted.empty()) return RUN_ALL_TESTS();

  std::set<std::string, std::less<>> found;
  std::string others;
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  for (int s = 0; s < tests.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *tests.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string file = std::filesystem::path(test.file()).stem();
      if (wanted.contains(file)) {
        found.insert(file);
      } else {
        others += std::string(others.empty() ? "" : ":") + suite.name() + "." + test.name();
      }
    }
  }
  for (const std::string& file : wanted) {
    if (!found.contains(file)) {
      std::fprintf(stderr, "%s: there is no test of %s.cc here\n", argv[0], file.c_str());
      return 2;
    }
  }
  std::string filter = GTEST_FLAG_GET(filter);
  if (!others.empty()) filter += (filter.find('-') == std::string::npos ? "-" : ":") + others;
  GTEST_FLAG_SET(filter, filter);
  return RUN_ALL_TESTS();
}
