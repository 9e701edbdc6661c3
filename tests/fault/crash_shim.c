// SPDX-License-Identifier: Apache-2.0
// A library to be preloaded (LD_PRELOAD) that breaks a program at one of its changes to files. It counts the calls that
// change or sync something below a directory; the N-th is where the process dies, or where the call fails. What was
// done is written to a log, with what a power failure would undo.
//
//   DS_CRASH_DIR   the directory, absolute and without links
//   DS_CRASH_AT    N, from 1; 0: count only
//   DS_CRASH_MODE  kill: die instead of the call; power: with all processes that share the log; once: the call fails;
//                  sticky: it and all after it; full: it and all after it that write or create; short: it writes half
//                  of its bytes, if it is a write of two or more; stop: the process stops before the call (SIGSTOP)
//   DS_CRASH_ERRNO of calls that fail
//   DS_CRASH_RANK  the rank ($RANK) that breaks; empty: all. "power" counts the calls of all
//   DS_CRASH_LOG   one line per call that was done: "RANK N CALL inode size path [path]", with "refused" for the second
//                  path if it was not; the file's first bytes are the count that all processes share
//
// Calls in the log: write (size: of the file, afterwards), sync (the same), create, link, rename, exchange, remove. A
// file that a rename or an exchange replaces stays as LOG.N.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kCounterBytes = 64 };

struct Shared {
  atomic_int calls;  // of all processes
  atomic_int dead;   // power has failed
};

static const char* directory;
static char log_name[PATH_MAX - 32];
static int log_fd = -1;
static struct Shared* shared;
static int at, error_number, ours;  // ours: this is a rank that breaks
static enum { kKill, kPower, kOnce, kSticky, kFull, kShort, kStop } mode;
static int rank = -1;
static atomic_int calls;

static const char* setting(const char* name) {
  const char* value = getenv(name);
  return value != NULL ? value : "";
}

__attribute__((constructor)) static void start(void) {
  const char* log = setting("DS_CRASH_LOG");
  if (*log == '\0' || getenv("RANK") == NULL) return;
  rank = atoi(getenv("RANK"));
  at = atoi(setting("DS_CRASH_AT"));
  error_number = atoi(setting("DS_CRASH_ERRNO"));
  const char* names[] = {"kill", "power", "once", "sticky", "full", "short", "stop"};
  for (int i = 0; i < (int)(sizeof names / sizeof *names); ++i) {
    if (strcmp(setting("DS_CRASH_MODE"), names[i]) == 0) mode = i;
  }
  const char* broken = setting("DS_CRASH_RANK");
  ours = *broken == '\0' || atoi(broken) == rank;
  snprintf(log_name, sizeof log_name, "%s", log);
  log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_RDWR | O_APPEND | O_CLOEXEC, 0);
  shared = mmap(NULL, kCounterBytes, PROT_READ | PROT_WRITE, MAP_SHARED, log_fd, 0);
  if (log_fd < 0 || shared == MAP_FAILED) abort();
  directory = setting("DS_CRASH_DIR");
}

#define NEXT(name)               \
  static __typeof__(&name) next; \
  if (next == NULL) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

// The absolute path of `path` at descriptor `dir`.
static const char* resolve(int dir, const char* path, char* out) {
  char base[PATH_MAX] = "";
  if (path[0] != '/') {
    char link[64];
    if (dir == AT_FDCWD) {
      snprintf(link, sizeof link, "/proc/self/cwd");
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    }
    const ssize_t n = readlink(link, base, sizeof base - 1);
    base[n < 0 ? 0 : n] = '\0';
  }
  if (path[0] == '\0') {
    snprintf(out, PATH_MAX, "%s", base);
  } else if (path[0] == '/') {
    snprintf(out, PATH_MAX, "%s", path);
  } else {
    snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, path);
  }
  return out;
}
static const char* path_of(int fd, char* out) { return resolve(fd, "", out); }

static int counts(const char* path) { return directory != NULL && strncmp(path, directory, strlen(directory)) == 0; }

static void note(int number, const char* call, const struct stat* st, const char* path, const char* other) {
  const int error = errno;
  char line[3 * PATH_MAX];
  const int n = snprintf(line, sizeof line, "%d %d %s %lu %ld %s%s%s\n", rank, number, call,
                         st != NULL ? (unsigned long)st->st_ino : 0, st != NULL ? (long)st->st_size : 0, path,
                         other != NULL ? "\t" : "", other != NULL ? other : "");
  syscall(SYS_write, log_fd, line, (size_t)n);
  errno = error;
}
// One call that counts. Its number; minus it if the call must fail, with errno set.
static int arrive(const char* call, const char* path) {
  if (atomic_load(&shared->dead)) kill(getpid(), SIGKILL);
  const int all = atomic_fetch_add(&shared->calls, 1) + 1;
  const int mine = atomic_fetch_add(&calls, 1) + 1;
  if (at == 0) return mine;
  if (mode == kPower && all == at) {
    atomic_store(&shared->dead, 1);
    kill(getpid(), SIGKILL);
  }
  if (!ours) return mine;
  if (mode == kKill && mine == at) kill(getpid(), SIGKILL);
  if (mode == kStop && mine == at) kill(getpid(), SIGSTOP);
  const int takes_space = strcmp(call, "write") == 0 || strcmp(call, "create") == 0;
  if ((mode == kOnce && mine == at) || (mode == kSticky && mine >= at) ||
      (mode == kFull && mine >= at && takes_space)) {
    note(mine, call, NULL, path, "refused");
    errno = error_number;
    return -mine;
  }
  return mine;
}

static void note_fd(int number, const char* call, int fd, const char* path) {
  struct stat st;
  const int error = errno;
  note(number, call, fstat(fd, &st) == 0 ? &st : NULL, path, NULL);
  errno = error;
}
static void note_path(int number, const char* call, const char* path, const char* other) {
  struct stat st;
  const int error = errno;
  note(number, call, lstat(other != NULL ? other : path, &st) == 0 ? &st : NULL, path, other);
  errno = error;
}

// ---- opening

static int opened(int dir, const char* path, int flags, mode_t bits) {
  char full[PATH_MAX];
  const int makes = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  if (!makes || !counts(resolve(dir, path, full))) return (int)syscall(SYS_openat, dir, path, flags, bits);
  struct stat st;
  const int is_new = (flags & O_TMPFILE) != O_TMPFILE && lstat(full, &st) != 0;
  const int number = arrive("create", full);
  if (number < 0) return -1;
  const int fd = (int)syscall(SYS_openat, dir, path, flags, bits);
  if (fd >= 0 && is_new) note_fd(number, "create", fd, full);
  return fd;
}
#define OPEN(name, dir, ...)                                                             \
  int name(__VA_ARGS__, int flags, ...) {                                                \
    va_list args;                                                                        \
    va_start(args, flags);                                                               \
    const mode_t bits = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(args, mode_t) : 0; \
    va_end(args);                                                                        \
    return opened(dir, path, flags, bits);                                               \
  }
OPEN(open, AT_FDCWD, const char* path)
OPEN(open64, AT_FDCWD, const char* path)
OPEN(openat, dir, int dir, const char* path)
OPEN(openat64, dir, int dir, const char* path)

// ---- data

// A call that writes `bytes` at most, of which `write(n)` writes the first n.
#define WRITES(fd, bytes, call)                                              \
  char path[PATH_MAX];                                                       \
  if (!counts(path_of(fd, path))) return call(bytes);                        \
  const int number = arrive("write", path);                                  \
  if (number < 0) return -1;                                                 \
  const int halved = mode == kShort && ours && number == at && (bytes) >= 2; \
  const ssize_t done = call(halved ? (bytes) / 2 : (bytes));                 \
  if (halved) note(number, "short", NULL, path, NULL);                       \
  if (done >= 0) note_fd(number, "write", fd, path);                         \
  return done

ssize_t write(int fd, const void* data, size_t bytes) {
  NEXT(write);
#define CALL(n) next(fd, data, n)
  WRITES(fd, bytes, CALL);
#undef CALL
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  NEXT(pwrite);
#define CALL(n) next(fd, data, n, offset)
  WRITES(fd, bytes, CALL);
#undef CALL
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) { return pwrite(fd, data, bytes, offset); }
ssize_t writev(int fd, const struct iovec* parts, int count) {
  NEXT(writev);
#define CALL(n) next(fd, parts, (int)(n))
  WRITES(fd, (size_t)count, CALL);
#undef CALL
}
static int resized(int fd, int (*resize)(int, off_t), off_t size) {
  char path[PATH_MAX];
  if (!counts(path_of(fd, path))) return resize(fd, size);
  const int number = arrive("write", path);
  if (number < 0) return -1;
  const int failed = resize(fd, size);
  if (failed == 0) note_fd(number, "write", fd, path);
  return failed;
}
int ftruncate(int fd, off_t size) {
  NEXT(ftruncate);
  return resized(fd, next, size);
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int fallocate(int fd, int how, off_t offset, off_t bytes) {
  NEXT(fallocate);
  char path[PATH_MAX];
  if (!counts(path_of(fd, path))) return next(fd, how, offset, bytes);
  const int number = arrive("write", path);
  if (number < 0) return -1;
  const int failed = next(fd, how, offset, bytes);
  if (failed == 0) note_fd(number, "write", fd, path);
  return failed;
}
int posix_fallocate(int fd, off_t offset, off_t bytes) { return fallocate(fd, 0, offset, bytes) == 0 ? 0 : errno; }

static int synced(int fd, int (*sync_it)(int)) {
  char path[PATH_MAX];
  if (!counts(path_of(fd, path))) return sync_it(fd);
  const int number = arrive("sync", path);
  if (number < 0) return -1;
  const int failed = sync_it(fd);
  if (failed == 0) note_fd(number, "sync", fd, path);
  return failed;
}
int fsync(int fd) {
  NEXT(fsync);
  return synced(fd, next);
}
int fdatasync(int fd) {
  NEXT(fdatasync);
  return synced(fd, next);
}

// ---- names

int mkdirat(int dir, const char* path, mode_t bits) {
  NEXT(mkdirat);
  char full[PATH_MAX];
  if (!counts(resolve(dir, path, full))) return next(dir, path, bits);
  const int number = arrive("create", full);
  if (number < 0) return -1;
  const int failed = next(dir, path, bits);
  if (failed == 0) note_path(number, "create", full, NULL);
  return failed;
}
int mkdir(const char* path, mode_t bits) { return mkdirat(AT_FDCWD, path, bits); }

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  NEXT(renameat2);
  char source[PATH_MAX], target[PATH_MAX], kept[PATH_MAX];
  resolve(from_dir, from, source);
  if (!counts(resolve(to_dir, to, target))) return next(from_dir, from, to_dir, to, flags);
  const int number = arrive("rename", target);
  if (number < 0) return -1;
  // Our own link, not one of the program's.
  snprintf(kept, sizeof kept, "%s.%d.%d", log_name, rank, number);
  if ((flags & RENAME_EXCHANGE) == 0) syscall(SYS_linkat, AT_FDCWD, target, AT_FDCWD, kept, 0);
  const int failed = next(from_dir, from, to_dir, to, flags);
  if (failed == 0) note_path(number, (flags & RENAME_EXCHANGE) != 0 ? "exchange" : "rename", source, target);
  return failed;
}
int renameat(int from_dir, const char* from, int to_dir, const char* to) {
  return renameat2(from_dir, from, to_dir, to, 0);
}
int rename(const char* from, const char* to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int from_dir, const char* from, int to_dir, const char* to, int flags) {
  NEXT(linkat);
  char target[PATH_MAX];
  if (!counts(resolve(to_dir, to, target))) return next(from_dir, from, to_dir, to, flags);
  const int number = arrive("create", target);
  if (number < 0) return -1;
  const int failed = next(from_dir, from, to_dir, to, flags);
  if (failed == 0) note_path(number, "create", target, NULL);
  return failed;
}
int link(const char* from, const char* to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int dir, const char* path, int flags) {
  NEXT(unlinkat);
  char full[PATH_MAX];
  if (!counts(resolve(dir, path, full))) return next(dir, path, flags);
  const int number = arrive("remove", full);
  if (number < 0) return -1;
  const int failed = next(dir, path, flags);
  if (failed == 0) note_path(number, "remove", full, NULL);
  return failed;
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) {
  struct stat st;
  return lstat(path, &st) == 0 && S_ISDIR(st.st_mode) ? rmdir(path) : unlink(path);
}
