// Functions that glibc 2.28 lacks, for a build that must run with it (WEFT_GLIBC in setup.py). The linker uses these
// versions, also for libstdc++, and the module does not export them.
#if defined(WEFT_GLIBC)
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern "C" {

// 2.30. Waits by the wall clock, as libstdc++ did without this function.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  constexpr long second_ns = 1'000'000'000;
  timespec now, wall;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &wall);
  wall.tv_sec += deadline->tv_sec - now.tv_sec;
  wall.tv_nsec += deadline->tv_nsec - now.tv_nsec;
  if (wall.tv_nsec < 0) {
    wall.tv_sec -= 1;
    wall.tv_nsec += second_ns;
  } else if (wall.tv_nsec >= second_ns) {
    wall.tv_sec += 1;
    wall.tv_nsec -= second_ns;
  }
  return pthread_cond_timedwait(condition, mutex, &wall);
}

// 2.32. True would mean that reference counts need no atomics. They always need them.
char __libc_single_threaded = 0;

// 2.33. On 64-bit machines the kernel and the C library have the same struct stat.
int fstat(int file, struct stat* status) { return static_cast<int>(syscall(SYS_fstat, file, status)); }

// 2.36. For std::random_device, which is part of libstdc++; weft does not use it.
uint32_t arc4random() {
  uint32_t value;
  if (getentropy(&value, sizeof value) != 0) abort();
  return value;
}
}
#endif
