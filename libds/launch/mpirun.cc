// SPDX-License-Identifier: Apache-2.0
#include "launch/mpirun.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string_view>

#include "base/check.h"
#include "base/limits.h"
#include "base/process_stat.h"
#include "ds/log.h"
#include "ds/printable.h"
#include "launch/environment.h"
#include "launch/host_shim.h"
#include "launch/process.h"

namespace ds::launch {
namespace {

constexpr std::size_t kKeptText = 4096;  // of what mpirun said last

}  // namespace

std::vector<std::string> mpirun_command(const std::string& mpirun, const LaunchPlan& plan, bool oversubscribed,
                                        const std::string& folder) {
  const std::string own = own_executable().string();
  std::vector<std::string> command = {mpirun, "-n", std::to_string(plan.ranks), "--oversubscribe", "--bind-to", "none"};
  const auto setting = [&](const char* name, const std::string& value) {
    command.insert(command.end(), {"--mca", name, value});
  };
  if (plan.hosts.empty()) {
    setting("plm", "isolated");
    setting("btl_vader_backing_directory", folder);
    setting("shmem", "^posix");  // it tries itself with a segment that stays in /dev/shm if it is killed meanwhile
    if (oversubscribed) setting("mpi_yield_when_idle", "1");
  } else {
    command[0] = "mpirun";  // by its path it would have a shell set paths on every host
    command.insert(command.end(), {"--hostfile", folder + "/hosts", "--nolocal", "--map-by", "slot"});
    setting("plm", "rsh");
    setting("plm_rsh_agent", own + " --agent-shim");
    setting("plm_rsh_no_tree_spawn", "1");
    setting("plm_rsh_num_concurrent", std::to_string(plan.hosts.size()));  // it refuses fewer
    setting("orte_leave_session_attached", "1");
    setting("opal_if_do_not_resolve", "1");
  }
  setting("orte_tmpdir_base", folder);
  setting("ras", "^slurm,tm,loadleveler,gridengine,lsf,alps");
  setting("odls_base_sigkill_timeout", "20");
  command.insert(command.end(), {own, "--rank-shim", folder + "/socket"});
  return command;
}

void Mpirun::start(const std::vector<std::string>& command, const std::vector<std::string>& inherited,
                   const std::vector<std::string>& added) {
  Pipe chatter = make_pipe();
  chatter_ = std::move(chatter.read);
  const Fd write_end = std::move(chatter.write);
  const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  Environment environment = parse_environment(inherited);
  forget_other_jobs(environment);
  add(environment, added);
  environment.try_emplace(kTracedSignals, "");
  int error = 0;
  pid_ = spawn({.program = plan_.mpirun_program,
                .argv = command,
                .environment = environment,
                .stdin_fd = null.get(),
                .stdout_fd = write_end.get(),
                .stderr_fd = write_end.get(),
                .death_signal = SIGKILL},
               &error);
  DS_CHECK(error == 0, Errc::Unavailable, "cannot execute {}: {}", plan_.mpirun_program, system_reason(error));
}

void Mpirun::kill() {
  if (!is_running()) return;
  killed_ = true;
  ::kill(pid_, SIGKILL);
}

void Mpirun::ended(int wait_status) {
  pid_ = -1;
  end_ = wait_status;
}

bool Mpirun::is_exiting() const { return is_running() && process_stat(pid_).exiting; }

bool Mpirun::read_chatter() {
  char buffer[4096];
  const ssize_t n = ::read(chatter_.get(), buffer, sizeof buffer);
  if (n > 0) {
    const std::string_view text(buffer, static_cast<std::size_t>(n));
    said_.append(text);
    gave_up_ |= said_.find("the job has been aborted") != std::string::npos;
    if (said_.size() > 2 * kKeptText) said_.erase(0, said_.size() - kKeptText);
    log_message(LogLevel::Verbose, "mpirun said:" + quoted_lines(text));
  } else if (n == 0 || errno != EINTR) {
    chatter_.reset();
  }
  return n > 0;
}

std::string Mpirun::quoted() const {
  std::string text = said_;
  for (std::size_t i = plan_.hosts.size(); i-- > 0;) {  // 12 before 1
    const std::string alias = fmt::format("{}{}", kHostAlias, i), &name = plan_.hosts[i].name;
    for (std::size_t at = 0; (at = text.find(alias, at)) != std::string::npos; at += name.size())
      text.replace(at, alias.size(), name);
  }
  return text.empty() ? "" : "; it said:" + quoted_lines(text);
}

}  // namespace ds::launch
