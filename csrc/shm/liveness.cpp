#include "liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "handover.h"

namespace weft::shm {

namespace {

// Returns the pid of a pidfd's process; 0 if it has ended or is not seen from here.
pid_t pid_behind(int descriptor) {
  FILE* file = fopen(("/proc/self/fdinfo/" + std::to_string(descriptor)).c_str(), "re");
  if (file == nullptr) return 0;
  int pid = 0;
  for (char line[256]; fgets(line, sizeof line, file) != nullptr;)
    if (sscanf(line, "Pid: %d", &pid) == 1) break;
  fclose(file);
  return std::max(pid, 0);
}

// Returns the fields of /proc/<pid>/stat from the third (state) on; none if it cannot be read. The second field, the
// command, may hold spaces and parentheses.
std::vector<std::string> process_stat(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
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

std::shared_ptr<const Peer> Peer::of(uint64_t key) {
  static std::mutex mutex;
  static std::map<uint64_t, std::weak_ptr<const Peer>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<const Peer>& place = known[key];
  std::shared_ptr<const Peer> peer = place.lock();
  if (!peer) place = peer = std::make_shared<const Peer>(key);
  return peer;
}

Peer::Peer(uint64_t key) : descriptor_(descriptor_of(key, the_process_itself)), pid_(pid_behind(descriptor_)) {}

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
