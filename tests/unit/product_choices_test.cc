// SPDX-License-Identifier: Apache-2.0
// The file of what autotuning chose: written by one run, read by the next, shared by ranks, refused if it is another.

#include "device/product_choices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>

#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "ds/log.h"
#include "temp_directory.h"

namespace ds {
namespace product_choices_test {

using ::testing::HasSubstr;

class ProductChoicesTest : public ::testing::Test {
 protected:
  void write(const std::string& text) const { std::ofstream(file_) << text; }
  std::string read() const {
    std::ifstream in(file_);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  testing::TempDirectory directory_;
  const std::string file_ = directory_ / "choices";
};

TEST_F(ProductChoicesTest, AreThereForTheNextRun) {
  {
    ProductChoices first(file_);
    EXPECT_FALSE(std::filesystem::exists(file_)) << "nothing was chosen";
    EXPECT_EQ(first.find("H200\t130000\t1,2"), "");
    first.add("H200\t130000\t1,2", "ab");
    first.add("H200\t130000\t1,2", "cd");
    first.add("H200\t130000\t1,3", "ef");
    EXPECT_EQ(first.find("H200\t130000\t1,2"), "ab");
  }
  EXPECT_EQ(read(), "# ds-autotune/1\nH200\t130000\t1,2\tab\nH200\t130000\t1,3\tef\n");
  const ProductChoices second(file_);
  EXPECT_EQ(second.find("H200\t130000\t1,2"), "ab");
  EXPECT_EQ(second.find("H200\t130000\t1,3"), "ef");
  EXPECT_EQ(second.find("H100\t130000\t1,3"), "");
}

TEST_F(ProductChoicesTest, AFileThatNoRunIsToMakeMustExist) {
  try {
    const ProductChoices choices(file_, /*may_be_new=*/false);
    ADD_FAILURE() << "there is no file";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    EXPECT_THAT(e.what(), HasSubstr("there is no " + file_));
  }
}

// One file may serve several GPUs and versions of the library; none for this one is a warning.
TEST_F(ProductChoicesTest, ChoicesOfOtherGpusOrVersionsAreAWarning) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel, std::string_view text) { warnings.emplace_back(text); });
  const ProductChoices empty(file_);
  empty.check_machine("NVIDIA H200\t130002\t");
  write("# ds-autotune/1\nNVIDIA H200\t130002\t1,2\tab\nNVIDIA H200\t130002\t1,3\tab\nNVIDIA A100\t130002\t1,2\tcd\n");
  const ProductChoices choices(file_);
  choices.check_machine("NVIDIA H200\t130002\t");
  choices.check_machine("NVIDIA A100\t130002\t");
  EXPECT_THAT(warnings, ::testing::IsEmpty());
  choices.check_machine("NVIDIA H200\t130100\t");
  choices.check_machine("NVIDIA H100\t130002\t");
  set_log_sink(nullptr);
  EXPECT_THAT(warnings,
              ::testing::ElementsAre(HasSubstr("has choices for NVIDIA A100 with cuBLASLt 130002, NVIDIA H200 with "
                                               "cuBLASLt 130002, and none for NVIDIA H200 with cuBLASLt 130100"),
                                     HasSubstr("none for NVIDIA H100 with cuBLASLt 130002")));
}

TEST_F(ProductChoicesTest, OfTwoTheFirstCounts) {
  write("# ds-autotune/1\na\tb\tc\t1\na\tb\tc\t2\n");
  EXPECT_EQ(ProductChoices(file_).find("a\tb\tc"), "1");
}

TEST_F(ProductChoicesTest, RanksShareAFile) {
  std::vector<std::jthread> ranks;
  for (int r = 0; r < 8; ++r) {
    ranks.emplace_back([&, r] {
      ProductChoices own(file_);
      for (int i = 0; i < 50; ++i) own.add(fmt::format("gpu\tlibrary\t{},{}", r, i), std::string(128, 'a'));
    });
  }
  ranks.clear();
  const ProductChoices all(file_);
  for (int r = 0; r < 8; ++r) {
    for (int i = 0; i < 50; ++i) EXPECT_EQ(all.find(fmt::format("gpu\tlibrary\t{},{}", r, i)).size(), 128u);
  }
}

// A full disk may cut a line off: the rest is no line, and the next line replaces it.
TEST_F(ProductChoicesTest, ALineThatIsCutOffIsPassedOverAndReplaced) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel, std::string_view text) { warnings.emplace_back(text); });
  write("# ds-autotune/1\na\tb\tc\t1\na\tb\td");
  ProductChoices choices(file_);
  EXPECT_THAT(warnings, ::testing::ElementsAre(HasSubstr("ignoring its incomplete last line")));
  EXPECT_EQ(choices.find("a\tb\tc"), "1");
  choices.add("a\tb\te", "2");
  EXPECT_EQ(read(), "# ds-autotune/1\na\tb\tc\t1\na\tb\te\t2\n");
  write("# ds-auto");
  ProductChoices begun(file_);
  begun.add("a\tb\te", "2");
  EXPECT_EQ(read(), "# ds-autotune/1\na\tb\te\t2\n");
  set_log_sink(nullptr);
}

// Nor is a line added to a file of something else, which has appeared meanwhile.
TEST_F(ProductChoicesTest, AnotherFileIsLeftAsItIs) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel, std::string_view text) { warnings.emplace_back(text); });
  for (const std::string text : {"a diary", "a diary\nof two lines", "a diary\n"}) {
    std::filesystem::remove(file_);
    ProductChoices choices(file_);
    write(text);
    choices.add("a\tb\tc", "1");
    EXPECT_EQ(read(), text);
  }
  set_log_sink(nullptr);
  EXPECT_EQ(warnings.size(), 3u);
}

// A limit of file size acts as a full disk.
TEST_F(ProductChoicesTest, WhatCannotBeWrittenWholeIsNotWritten) {
  write("# ds-autotune/1\na\tb\tc\t1\n");
  const std::string before = read();
  const auto fills = [&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{before.size() + 10, before.size() + 10};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int warnings = 0;
    set_log_sink([&](LogLevel, std::string_view) { ++warnings; });
    ProductChoices(file_).add("a\tb\td", std::string(100, 'x'));
    std::_Exit(warnings);
  };
  EXPECT_EXIT(fills(), ::testing::ExitedWithCode(1), "");
  EXPECT_EQ(read(), before);
}

TEST_F(ProductChoicesTest, AnotherFileIsRefusedWithItsLine) {
  const auto refused = [&](const std::string& text) {
    write(text);
    try {
      const ProductChoices choices(file_);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Config);
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused(""), "");
  EXPECT_THAT(refused("{}\n"), HasSubstr("is not an autotune file"));
  for (const char* line : {"a\tb\tc\n", "a\tb\tc\td\te\n", "a\tb\tc\t\n", "\n"})
    EXPECT_THAT(refused(std::string("# ds-autotune/1\na\tb\tc\td\n") + line), HasSubstr("choices:3: expected GPU"))
        << line;
}

TEST_F(ProductChoicesTest, WhatCannotBeWrittenIsSaidOnce) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel level, std::string_view message) {
    if (level == LogLevel::Warning) said.emplace_back(message);
  });
  ProductChoices choices(directory_ / "nowhere/choices");
  choices.add("a\tb\tc", "d");
  choices.add("a\tb\te", "f");
  set_log_sink({});
  EXPECT_EQ(choices.find("a\tb\te"), "f");
  ASSERT_EQ(said.size(), 1u);
  EXPECT_THAT(said[0], HasSubstr("cannot be written: No such file or directory"));
}

}  // namespace product_choices_test
}  // namespace ds
