// Runs callbacks on threads of their own: a callback may itself start a call and wait for it, so it must not run on the
// thread that would carry that call out, nor behind another callback that waits.
#pragma once
#include <functional>

namespace weft::shm {

// At once on an idle thread, or else on a new one; threads are kept for the next.
void run_on_a_thread(std::function<void()> callback);

}  // namespace weft::shm
