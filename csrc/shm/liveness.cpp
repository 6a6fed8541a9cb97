#include "liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "errors.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace weft::shm {

namespace {

std::string stat_path(pid_t pid) { return "/proc/" + std::to_string(pid) + "/stat"; }

// Returns the fields of /proc/<pid>/stat from the third (state) on; none, with errno set, if it cannot be read. The
// second field, the command, may hold spaces and parentheses.
std::vector<std::string> process_stat(pid_t pid) {
  const std::string path = stat_path(pid);
  std::vector<std::string> fields;
  FILE* file = fopen(path.c_str(), "re");
  if (file == nullptr) return fields;
  char line[2048];
  const size_t length = fread(line, 1, sizeof line - 1, file);
  fclose(file);
  line[length] = '\0';
  char* rest = strrchr(line, ')');
  if (rest == nullptr) return fields;
  char* saved = nullptr;
  for (char* word = strtok_r(rest + 1, " \n", &saved); word != nullptr; word = strtok_r(nullptr, " \n", &saved))
    fields.emplace_back(word);
  return fields;
}

// Exit information of a reaped process, for the holder of a pidfd (struct pidfd_info, version 0). Linux 6.15 and later.
struct PidfdInfo {
  uint64_t mask;
  uint64_t cgroup;
  uint32_t ids[11];
  int32_t exit_code;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr uint64_t pidfd_info_exit = 1 << 3;

std::string describe(int status) {
  if (WIFSIGNALED(status)) return "signal " + std::to_string(WTERMSIG(status));
  return "exit code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

uint64_t process_start_time(pid_t pid) {
  constexpr size_t start_time_field = 22 - 3;
  errno = 0;
  const auto fields = process_stat(pid);
  // Other errors, for example no descriptor left, do not mean that the process is gone.
  if (fields.empty() && errno != 0 && errno != ENOENT && errno != ESRCH) throw_errno(errno, "cannot read " + stat_path(pid));
  return fields.size() > start_time_field ? std::stoull(fields[start_time_field]) : 0;
}

std::shared_ptr<const Peer> Peer::of(pid_t pid, uint64_t start_time) {
  static std::mutex mutex;
  static std::map<std::pair<pid_t, uint64_t>, std::weak_ptr<const Peer>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<const Peer>& place = known[{pid, start_time}];
  std::shared_ptr<const Peer> peer = place.lock();
  if (!peer) place = peer = std::make_shared<const Peer>(pid, start_time);
  return peer;
}

Peer::Peer(pid_t pid, uint64_t start_time)
    : pid_(pid), descriptor_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  if (descriptor_ < 0) throw_errno(errno, "cannot watch process " + std::to_string(pid) + " (pidfd_open)");
  try {  // after the open, because the pid cannot be reused from then on
    if (process_start_time(pid) != start_time)
      throw_errno(ESRCH, "process " + std::to_string(pid) + " is no longer the rank that announced itself");
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

Peer::~Peer() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool Peer::alive() const {
  pollfd poll_descriptor{descriptor_, POLLIN, 0};
  // The pidfd is readable once the process has ended, reaped or not. A poll that a signal interrupts proves nothing.
  return poll(&poll_descriptor, 1, 0) != 1;
}

std::string Peer::exit_status() const {
  PidfdInfo info{};
  info.mask = pidfd_info_exit;
  if (ioctl(descriptor_, _IOWR(0xFF, 11, PidfdInfo), &info) == 0 && (info.mask & pidfd_info_exit) != 0)
    return describe(info.exit_code);
  const auto fields = process_stat(pid_);  // not reaped yet: the last field is the exit status
  if (!fields.empty() && fields.front() == "Z") return describe(std::stoi(fields.back()));
  return "unknown";
}

}  // namespace weft::shm
