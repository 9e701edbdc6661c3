// SPDX-License-Identifier: Apache-2.0
// Streams: the result (stdout, or a file that appears complete or not at all) and the messages on stderr.

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <random>
#include <set>

#include "common/internal.h"
#include "common/tool.h"
#include "ds/checkpoint.h"
#include "ds/error.h"
#include "ds/limits.h"
#include "ds/printable.h"

namespace ds::tools {
namespace {

namespace fs = std::filesystem;

// A positive integer from the environment, else `fallback`.
int environment_number(const char* name, int fallback) noexcept {
  const char* text = std::getenv(name);
  if (text == nullptr) return fallback;
  int value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  return error == std::errc() && *end == '\0' && value > 0 ? value : fallback;
}

bool knows_escapes() noexcept {
  const char* term = std::getenv("TERM");
  return term != nullptr && *term != '\0' && std::string_view(term) != "dumb";
}

bool colour(int fd = STDERR_FILENO) noexcept {
  const char* no_colour = std::getenv("NO_COLOR");
  return ::isatty(fd) == 1 && (no_colour == nullptr || *no_colour == '\0') && knows_escapes();
}

// The message made printable, each line and the whole bounded, whatever names and values it contains.
std::string message_text(std::string_view message) {
  constexpr std::size_t kMostOfLine = 1024, kMost = 16384;
  const std::string text = printable(message, Breaks::Indented);
  std::string out;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    out += shortened(rest.substr(0, end), kMostOfLine);
    if (end < rest.size()) out += '\n';
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return shortened(out, kMost);
}

void report(std::string_view label, std::string_view escape, std::string_view message) {
  std::string line(message_options.tool);
  if (rank() > 0) line += fmt::format("[{}]", rank());
  line += ": ";
  if (!label.empty()) line += colour() ? fmt::format("\x1b[{}m{}:\x1b[0m ", escape, label) : fmt::format("{}: ", label);
  line += message_text(message);
  line += '\n';
  clear_progress();
  try {
    write_all(STDERR_FILENO, line, "stderr");
  } catch (...) {  // a closed stderr is no reason to stop
  }
}

Error system_error(std::string_view doing, std::string_view path) {
  return Error(Errc::Io, fmt::format("cannot {} {}: {}", doing, path, system_reason(errno)));
}

// The descriptor of a name such as "/dev/stdout" or "/dev/fd/3": writing continues at its position, as with a pipe.
std::optional<int> descriptor_of(std::string_view file) {
  if (file == "/dev/stdout") return STDOUT_FILENO;
  if (file == "/dev/stderr") return STDERR_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"}) {
    int fd = 0;
    if (!file.starts_with(folder)) continue;
    const auto [end, error] = std::from_chars(file.data() + folder.size(), file.data() + file.size(), fd);
    if (error == std::errc() && end == file.data() + file.size()) return fd;
  }
  return std::nullopt;
}

// A descriptor, a device, a pipe, a socket.
bool is_special(const std::string& file) {
  return descriptor_of(file) || (fs::exists(file) && !fs::is_regular_file(file));
}

// The place of `file` after following its links; it need not exist.
fs::path target_of(const std::string& file) {
  fs::path target = fs::absolute(file);
  while (!fs::exists(target) && fs::is_symlink(target)) target = target.parent_path() / fs::read_symlink(target);
  return fs::weakly_canonical(target);
}

// Temporary name in the same folder, fsync, rename, fsync of the folder.
void write_whole(const std::string& file, std::string_view bytes) {
  const fs::path target = target_of(file);
  const std::string name =
      target.filename().string().substr(0, 200);  // short enough for a suffix within the limit of names
  std::random_device random;                      // process ids are reused, and repeat in other containers
  const std::string temporary = target.parent_path() / fmt::format(".{}.tmp-{:08x}{:08x}", name, random(), random());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) throw system_error("create", temporary);
  try {
    struct stat replaced = {};  // keep the mode, so that the new file is not readable by more users
    if (::stat(target.c_str(), &replaced) == 0 && ::fchmod(fd, replaced.st_mode & 07777u) != 0)
      throw system_error("set the mode of", file);
    write_all(fd, bytes, file);
    if (::fsync(fd) != 0) throw system_error("sync", file);
    ::close(fd);
    if (::rename(temporary.c_str(), target.c_str()) != 0) throw system_error("rename to", file);
  } catch (...) {
    ::close(fd);
    ::unlink(temporary.c_str());
    throw;
  }
  if (const int folder = ::open(target.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
}

}  // namespace

MessageOptions message_options;

namespace {

class SaidWarnings {
 public:
  void add(std::string_view message) {
    const std::lock_guard lock(mutex_);
    if (said_.size() < kMost) said_.emplace(message);
  }
  bool has(std::string_view message) {
    const std::lock_guard lock(mutex_);
    return said_.contains(message);
  }

 private:
  static constexpr size_t kMost = 1000;
  std::mutex mutex_;
  std::set<std::string, std::less<>> said_;
};

SaidWarnings& said_warnings() {
  static SaidWarnings said;
  return said;
}

}  // namespace

int rank() noexcept {
  static const int value = environment_number("RANK", 0);
  return value;
}
bool quiet() noexcept { return message_options.quiet; }
bool verbose() noexcept { return message_options.verbose; }
void report_error(std::string_view message) { report("error", "1;31", message); }
void report_warning(std::string_view message) {
  if (quiet()) return;
  said_warnings().add(message);
  report("warning", "1;33", message);
}
void report_new_warning(std::string_view message) {
  if (!said_warnings().has(message)) report_warning(message);
}
void report_note(std::string_view message) {
  if (!quiet()) report("", "", message);
}
void report_hint(std::string_view message) { report("", "", message); }

int terminal_columns() noexcept {
  if (!knows_escapes()) return 0;
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0) return size.ws_col > 0 ? size.ws_col : 80;
  return environment_number("DS_COLUMNS", 0);
}

int stdout_columns() noexcept {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) return size.ws_col;
  struct stat st = {};  // a pipe to the process that shows it, not a file
  const bool piped = ::fstat(STDOUT_FILENO, &st) == 0 && (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode));
  return piped ? environment_number("DS_STDOUT_COLUMNS", 0) : 0;
}

void write_all(int fd, std::string_view bytes, std::string_view what) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EPIPE) {
      throw BrokenPipe{};
    } else if (errno != EINTR) {
      throw system_error("write", what);
    }
  }
}

Output::Output(const ToolInfo& tool, std::string file, bool json, std::string_view option)
    : tool_(tool), file_(std::move(file)), option_(option), json_(json) {
  if (file_.empty() || rank() > 0) return;
  // Check now, not after hours of work.
  const auto refuse = [&](const std::string& why) {
    throw Error(Errc::Config, fmt::format("{} {}: {}", option_, file_, why));
  };
  try {
    if (const std::optional<int> fd = descriptor_of(file_)) {
      if (::fcntl(*fd, F_GETFD) < 0) refuse(system_reason(errno));
      return;
    }
    if (fs::is_directory(file_)) refuse("is a directory");
    const fs::path place = is_special(file_) ? fs::path(file_) : target_of(file_).parent_path();
    if (::access(place.c_str(), is_special(file_) ? W_OK : W_OK | X_OK) != 0)
      refuse(
          fmt::format("cannot write {} {}: {}", is_special(file_) ? "to" : "in", place.string(), system_reason(errno)));
    if (is_special(file_)) return;
    check_place(target_of(file_));
    if (is_model_file(file_) && fs::exists(file_)) refuse("is a file of a model, which a report may not replace");
  } catch (const fs::filesystem_error& e) {
    refuse(e.code().message());
  }
}

bool Output::to_terminal() const noexcept {
  return !to_file() && (::isatty(STDOUT_FILENO) == 1 || stdout_columns() > 0);
}

bool Output::colour() const noexcept { return !to_file() && tools::colour(STDOUT_FILENO); }

int Output::columns() const noexcept {
  const int columns = to_file() ? 0 : stdout_columns();
  return columns > 0 ? columns : 80;
}

std::string Output::replaced() const { return to_file() && !is_special(file_) ? file_ : ""; }

bool Output::replaces(const std::string& path) const {
  std::error_code ignored;
  if (!to_file() || (is_special(file_) && !fs::is_directory(file_))) return false;
  return fs::equivalent(file_, path, ignored) || target_of(path) == target_of(file_);
}

void Output::write(std::string_view text) { data(printable(text, Breaks::All)); }

void Output::data(std::string_view bytes) {
  if (rank() > 0) return;
  if (to_file()) {
    pending_ += bytes;
  } else {
    clear_progress();
    write_all(STDOUT_FILENO, bytes, "the result to stdout");
  }
}

namespace {

std::string dump(const nlohmann::ordered_json& json, bool compact = true) {
  return json.dump(compact ? -1 : 2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

std::string Output::text_of(const nlohmann::ordered_json& fields, bool compact, std::string_view members) const {
  nlohmann::ordered_json whole = {{"schema", fmt::format("{}/{}", tool_.name, tool_.schema)}};
  if (members.empty()) {
    whole.update(fields);
    return printable_json(dump(whole, compact)) + "\n";
  }
  const std::string begin = dump(whole), end = dump(fields);
  return printable_json(fmt::format("{},{}{}{}", std::string_view(begin).substr(0, begin.size() - 1), members,
                                    fields.empty() ? "" : ",", std::string_view(end).substr(1))) +
         "\n";
}

std::string Output::line(const nlohmann::ordered_json& fields, std::string_view members) const {
  return text_of(fields, true, members);
}

void Output::document(const nlohmann::ordered_json& fields, bool compact, std::string_view members) {
  data(text_of(fields, compact, members));
}

void Output::commit() {
  if (rank() > 0 || !to_file()) return;
  if (!is_special(file_)) return write_whole(file_, pending_);
  if (const std::optional<int> fd = descriptor_of(file_)) return write_all(*fd, pending_, file_);
  const int fd = ::open(file_.c_str(), O_WRONLY | O_CLOEXEC);  // a device or a pipe cannot be replaced as a whole
  if (fd < 0) throw system_error("open", file_);
  write_all(fd, pending_, file_);
  ::close(fd);
}

}  // namespace ds::tools
