#include "handover.h"

#include <pthread.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "errors.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace weft::shm {

namespace {

constexpr timeval question_limit{1, 0};  // who is silent for longer does not hold up others
constexpr timeval answer_limit{60, 0};   // a process that is stopped answers late

struct Listener {
  std::mutex mutex;
  uint64_t key = 0;
  int socket = -1, itself = -1;  // the second a pidfd
};
Listener& listener = *new Listener;  // never destroyed: its thread outlives main()

struct Name {
  sockaddr_un address{};
  socklen_t bytes;

  explicit Name(uint64_t key) {  // a first byte of zero: not a file
    address.sun_family = AF_UNIX;
    const int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "weft-%016lx", key);
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

struct Descriptor {
  int number;

  explicit Descriptor(int opened) : number(opened) {}
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

// A message of one number, which a descriptor may accompany.
struct Message {
  int32_t number = 0;
  iovec part{&number, sizeof number};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};

  Message() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
};

bool may_ask(int connection) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
         (peer.uid == geteuid() || peer.uid == 0);
}

void answer(int connection, int itself) {
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &question_limit, sizeof question_limit);
  Message message;
  if (!may_ask(connection) || recv(connection, &message.number, sizeof message.number, 0) != sizeof message.number) return;
  const int sent = message.number == the_process_itself ? itself : message.number;
  cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof sent);
  memcpy(CMSG_DATA(control), &sent, sizeof sent);
  sendmsg(connection, &message.header, MSG_NOSIGNAL);  // EBADF: the other sees the connection end
}

void answer_all(int socket, int itself) {
  for (;;) {
    const Descriptor connection(accept4(socket, nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.number >= 0)
      answer(connection.number, itself);
    else if (errno != EINTR && errno != ECONNABORTED)
      usleep(1000);  // no descriptor is left; one may become free
  }
}

// A child has its parent's socket, which must end with the parent, and not its thread.
void end_in_child() {
  for (const int inherited : {listener.socket, listener.itself})
    if (inherited >= 0) ::close(inherited);
  new (&listener) Listener;
}
const int fork_handler = pthread_atfork(nullptr, nullptr, end_in_child);

// Returns a connection, or -1 if the process has ended.
int connect_to(uint64_t key) {
  const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection < 0) throw_errno(errno, "cannot make a socket");
  const Name name(key);
  int error = 0;
  do {
    error = connect(connection, name.get(), name.bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == 0) return connection;
  ::close(connection);
  if (error != ECONNREFUSED) throw_errno(error, "cannot connect to another rank of this machine");
  return -1;
}

}  // namespace

uint64_t process_key() {
  const std::lock_guard<std::mutex> lock(listener.mutex);
  if (listener.socket >= 0) return listener.key;
  uint64_t key = 0;
  while (getrandom(&key, sizeof key, 0) != sizeof key) {
  }
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const Name name(key);
  if (socket.number < 0 || bind(socket.number, name.get(), name.bytes) != 0 || listen(socket.number, 4096) != 0)
    throw_errno(errno, "cannot make a socket for the other ranks of this machine");
  Descriptor itself(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (itself.number < 0) throw_errno(errno, "cannot watch processes (pidfd_open)");
  sigset_t all, before;  // signals are for the program's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(answer_all, socket.number, itself.number).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  listener.key = key;
  listener.socket = std::exchange(socket.number, -1);
  listener.itself = std::exchange(itself.number, -1);
  return key;
}

int descriptor_of(uint64_t key, int number) {
  const Descriptor connection(connect_to(key));
  const std::string what = number == the_process_itself ? "watch another rank of this machine" : "open the group's shared memory";
  if (connection.number < 0) throw_errno(ESRCH, "cannot " + what + ": its process has ended");
  setsockopt(connection.number, SOL_SOCKET, SO_RCVTIMEO, &answer_limit, sizeof answer_limit);
  const int32_t question = number;
  Message message;
  ssize_t received = send(connection.number, &question, sizeof question, MSG_NOSIGNAL);
  while (received > 0 && (received = recvmsg(connection.number, &message.header, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {
    received = 1;
  }
  if (received < 0 && errno != ECONNRESET && errno != EPIPE) throw_errno(errno, "cannot " + what);
  if (received <= 0)
    throw_errno(has_ended(key) ? ESRCH : EACCES, "cannot " + what + ": the ranks of a group must run as one user");
  const cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  if (control == nullptr || (message.header.msg_flags & MSG_CTRUNC) != 0) throw_errno(EMFILE, "cannot " + what);
  int opened = -1;
  memcpy(&opened, CMSG_DATA(control), sizeof opened);
  return opened;
}

bool has_ended(uint64_t key) { return Descriptor(connect_to(key)).number < 0; }

}  // namespace weft::shm
