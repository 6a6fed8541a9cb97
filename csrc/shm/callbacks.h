// Threads for callbacks. A callback may start a call and wait for it. So it must not run on the thread that carries out
// that call, nor wait behind another callback.
#pragma once
#include <functional>

namespace weft::shm {

// Runs the callback at once, on an idle thread or on a new one. Threads are kept for later callbacks.
void run_on_a_thread(std::function<void()> callback);

}  // namespace weft::shm
