// Whether a peer process still lives, asked of the kernel through a pidfd and not guessed from a timeout.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <string>

namespace weft::shm {

// Ticks since boot at which a process started: with the pid, a name that is not used twice. 0 where there is no such
// process.
uint64_t process_start_time(pid_t pid);

class Peer {
 public:
  // Throws std::system_error where the process is gone, or is another one that got its number.
  Peer(pid_t pid, uint64_t start_time);
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
