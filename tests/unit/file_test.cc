// SPDX-License-Identifier: Apache-2.0
// Files: writes past the cache arrive as written, outputs appear whole or not at all, errors name the path.

#include "base/file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>

#include "temp_directory.h"

namespace ds {
namespace file_test {

using testing::read_file;
using testing::TempDirectory;
using testing::write_file;

TEST(DirectWriter, RaggedPiecesAtAnyOffsetArriveAsWritten) {
  const TempDirectory dir;
  std::mt19937 rng(5);
  for (int round = 0; round < 20; ++round) {
    const std::string path = dir / std::to_string(round);
    const File file = File::create(path);
    std::string want;
    {
      DirectWriter writer(file);
      for (int piece = 0; piece < 12; ++piece) {
        // Gaps of nothing, a few bytes, or pages; sizes from a byte to several windows.
        const size_t gap = piece % 3 == 0 ? 0 : rng() % (piece % 3 == 1 ? 50 : 20000);
        const size_t bytes = 1 + rng() % (piece % 4 == 0 ? 9'000'000 / (round + 1) : 10000);
        want.resize(want.size() + gap, '\0');
        std::string data(bytes, '\0');
        for (char& c : data) c = static_cast<char>(rng());
        writer.write(static_cast<i64>(want.size()), data.data(), static_cast<i64>(bytes));
        want += data;
      }
      writer.flush();
      writer.flush();
    }
    ASSERT_EQ(file.size(), static_cast<i64>(want.size()));
    ASSERT_TRUE(read_file(path) == want) << "round " << round;

    PageBuffer pages;
    const size_t from = rng() % want.size(), bytes = want.size() - from;
    std::string got(bytes, '?');
    read_bulk(file, static_cast<i64>(from), got.data(), static_cast<i64>(bytes), pages);
    ASSERT_TRUE(got == want.substr(from)) << "round " << round;
    EXPECT_ERROR(read_bulk(file, static_cast<i64>(from) + 1, got.data(), static_cast<i64>(bytes), pages), Errc::Corrupt,
                 "1 more are missing");
  }
}

TEST(DirectWriter, BackwardWritesAndFileSystemsWithoutDirectWrites) {
  for (const std::string& where : {::testing::TempDir(), std::string("/dev/shm/")}) {
    const std::string path = where + "ds-direct-" + random_hex64();
    {
      const File file = File::create(path);
      DirectWriter writer(file);
      const std::string a(100000, 'a'), b(5000, 'b');
      writer.write(4000, a.data(), 100000);
      writer.write(0, b.data(), 4000);
      writer.flush();
      EXPECT_TRUE(read_file(path) == b.substr(0, 4000) + a);
    }
    std::filesystem::remove(path);
  }
}

TEST(PendingFile, AppearsWholeOrNotAtAll) {
  const TempDirectory dir;
  const std::string path = dir / "x";
  {
    const PendingFile pending(path);
    pending.file().write_at(0, "lost", 4);
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  {
    PendingFile pending(path);
    pending.file().write_at(2, "kept", 4);
    pending.commit();
  }
  EXPECT_EQ(read_file(path), std::string("\0\0kept", 6));
  replace_text_file(path, "short");
  EXPECT_EQ(read_file(path), "short");
  EXPECT_EQ(read_text_file(path, 5), "short");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

// The directory is opened for its sync before it changes: a commit that fails has changed nothing.
TEST(PendingFile, WithoutDescriptorsNothingIsCommitted) {
  const TempDirectory dir;
  PendingFile file(dir / "file");
  file.file().write_at(0, "new", 3);
  PendingDirectory directory(dir / "directory");
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_ERROR(file.commit(), Errc::Io, "Too many open files");
  EXPECT_ERROR(directory.commit(), Errc::Io, "Too many open files");
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_FALSE(std::filesystem::exists(dir / "file"));
  EXPECT_FALSE(std::filesystem::exists(dir / "directory"));
  file.commit();
  directory.commit();
  EXPECT_EQ(read_file(dir / "file"), "new");
  EXPECT_TRUE(std::filesystem::is_directory(dir / "directory"));
}

TEST(PendingFile, KeepsThePermissionsOfWhatItReplaces) {
  namespace fs = std::filesystem;
  const TempDirectory dir;
  const std::string path = dir / "x";
  replace_text_file(path, "one");
  for (const fs::perms mode : {fs::perms(0600), fs::perms(0664)}) {
    fs::permissions(path, mode);
    replace_text_file(path, "two");
    EXPECT_EQ(fs::status(path).permissions(), mode);
  }
}

// A signal that cannot be caught, or the end of the machine.
TEST(PendingFile, AKilledWriterLeavesNothing) {
  const TempDirectory dir;
  if (!File::create_unnamed(dir / "x")) GTEST_SKIP() << "this file system has no files without a name";
  const pid_t pid = ::fork();
  if (pid == 0) {
    const PendingFile pending(dir / "x");
    pending.file().write_at(0, "lost", 4);
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(File, LinksAreFollowedToWhatNeedNotExist) {
  const TempDirectory dir;
  namespace fs = std::filesystem;
  EXPECT_EQ(follow_links(dir / "x"), dir / "x");
  fs::create_symlink("b", dir / "a");
  fs::create_symlink(dir / "c", dir / "b");
  EXPECT_EQ(follow_links(dir / "a"), dir / "c");
  fs::create_symlink("loop", dir / "loop");
  EXPECT_ERROR(follow_links(dir / "loop"), Errc::Io, "Too many levels of symbolic links");
}

TEST(File, ErrorsNameThePathAndTheReason) {
  const TempDirectory dir;
  const std::string path = dir / "x";
  EXPECT_ERROR(File::open_read(path), Errc::Io, "x: No such file or directory");
  EXPECT_ERROR(File::open_read(dir.path()), Errc::Io, "not a regular file");
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_ERROR(File::open_read(dir / "pipe"), Errc::Io, "not a regular file");  // and does not wait for a writer
  EXPECT_ERROR(PendingFile(dir / "no/x"), Errc::Io, "No such file or directory");
  EXPECT_ERROR(sync_directory(dir / "no"), Errc::Io, "No such file or directory");
  write_file(path, "12345");
  EXPECT_ERROR(File::create(path), Errc::Io, "File exists");
  EXPECT_ERROR(read_text_file(path, 4), Errc::Corrupt, "5 bytes, at most 4");
  char c[8];
  EXPECT_ERROR(File::open_read(path).read_at(3, c, 4), Errc::Corrupt, "ends at byte 5, 2 more are missing");
}

// A device, a pipe, a file of any length: the data held in memory has a bound.
TEST(File, WhatSomebodyNamesIsReadToABound) {
  const TempDirectory dir;
  write_file(dir / "x", "some text");
  EXPECT_EQ(read_named_text(dir / "x", 9), "some text");
  EXPECT_ERROR(read_named_text(dir / "x", 8), Errc::Config, "is larger than 0 MiB");
  EXPECT_ERROR(read_named_text("/dev/zero", i64{3} << 20), Errc::Config, "is larger than 3 MiB");
  EXPECT_EQ(read_named_text("/dev/null", 1), "");
  EXPECT_ERROR(read_named_text(dir / "no", 9), Errc::Config, "cannot be opened: No such file or directory");
  EXPECT_ERROR(read_named_text(dir.path(), 9), Errc::Config, "cannot be read: Is a directory");
}

TEST(File, LinesComeOneByOneAndHaveABound) {
  const TempDirectory dir;
  const auto lines = [&](const std::string& text, i64 most) {
    write_file(dir / "x", text);
    std::string seen;
    for_each_line(File::open_read(dir / "x"), most, [&](std::string_view line, bool is_ended) {
      seen += fmt::format("{}{}", line, is_ended ? "|" : "...");
    });
    return seen;
  };
  EXPECT_EQ(lines("", 5), "");
  EXPECT_EQ(lines("a\n\nbc\n", 5), "a||bc|");
  EXPECT_EQ(lines("a\nbc", 5), "a|bc...");
  const std::string large((3 << 20) + 1, 'x');  // over several blocks
  EXPECT_EQ(lines(large + "\ny\n", 4 << 20), large + "|y|");
  EXPECT_ERROR(lines("a\nbcdefg\n", 5), Errc::Corrupt, "x:2: the line is longer than 5 bytes");
  std::filesystem::resize_file(dir / "x", std::uintmax_t{1} << 40);  // mostly a hole
  EXPECT_ERROR(for_each_line(File::open_read(dir / "x"), 1 << 20, [](std::string_view, bool) {}), Errc::Corrupt,
               "the line is longer than 1048576 bytes");
}

TEST(File, ParentDirectories) {
  EXPECT_EQ(parent_directory("x"), ".");
  EXPECT_EQ(parent_directory("/x"), "/");
  EXPECT_EQ(parent_directory("a/b/x"), "a/b");
}

}  // namespace file_test
}  // namespace ds
