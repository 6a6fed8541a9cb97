// Liveness of peer processes: the kernel reports it through a pidfd, so no timeout has to guess it.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace weft::shm {

class Peer {
 public:
  // Returns the process of that key (handover.h), which all groups of this one share. Throws std::system_error: ESRCH
  // if it has ended.
  static std::shared_ptr<const Peer> of(uint64_t key);

  explicit Peer(uint64_t key);  // use `of`
  Peer(const Peer&) = delete;
  ~Peer();

  pid_t pid() const { return pid_; }  // as this process sees it; 0 in a process namespace that it does not see
  bool alive() const;
  std::string exit_status() const;  // "signal 9", "exit code 1" or "unknown"

 private:
  int descriptor_;
  pid_t pid_;
};

}  // namespace weft::shm
