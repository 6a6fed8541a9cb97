// Liveness of peer processes: the kernel reports it through a pidfd, so no timeout has to guess it.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace weft::shm {

// Returns the start time of a process in ticks since boot; 0 if there is no such process. A pid and a start time
// together identify one process.
uint64_t process_start_time(pid_t pid);

class Peer {
 public:
  // Returns the process, which all groups of this one share. Throws std::system_error if it is gone, or if another
  // process has its pid now.
  static std::shared_ptr<const Peer> of(pid_t pid, uint64_t start_time);

  Peer(pid_t pid, uint64_t start_time);  // use `of`
  Peer(const Peer&) = delete;
  ~Peer();

  pid_t pid() const { return pid_; }
  bool alive() const;
  std::string exit_status() const;  // "signal 9", "exit code 1" or "unknown"

 private:
  pid_t pid_;
  int descriptor_;
};

}  // namespace weft::shm
