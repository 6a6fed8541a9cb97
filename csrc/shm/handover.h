// Descriptors that the processes of one machine hand to one another, through a unix socket each.
//
// A process that asks need not see the other in /proc: containers of one pod have process namespaces of their own, and
// some processes may not be looked into. Both must be in one network namespace and run as one user.
#pragma once
#include <cstdint>

namespace weft::shm {

// Returns the key of this process, random and never used by another. From the first call on a thread answers for it.
uint64_t process_key();

constexpr int the_process_itself = -1;  // in place of a descriptor's number: a pidfd

// Returns a descriptor for what `number` is in the process with that key. Throws std::system_error: ESRCH if that
// process has ended.
int descriptor_of(uint64_t key, int number);

bool has_ended(uint64_t key);

}  // namespace weft::shm
