// The interpreter lock at the end of the interpreter. Python ends a thread that asks for it then, inside a destructor of
// C++, which aborts the process. So threads that come back to Python once it ends stay in C++ instead.
#pragma once
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>

namespace weft::shm {

inline std::atomic<bool> interpreter_is_ending{false};
inline std::atomic<int> threads_in_python{0};
inline thread_local bool ends_the_interpreter = false;  // this thread runs Python's exit handlers

// True while it lives if this thread may ask for the lock. Callbacks that may not are dropped, and their captures never
// released.
class MayUsePython {
 public:
  MayUsePython() { threads_in_python.fetch_add(1); }
  MayUsePython(const MayUsePython&) = delete;
  ~MayUsePython() { threads_in_python.fetch_sub(1); }
  explicit operator bool() const { return !interpreter_is_ending.load(); }
};

// Gives the lock back while it lives.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() {
    {
      const MayUsePython may;
      if (may || ends_the_interpreter) {
        PyEval_RestoreThread(state_);
        return;
      }
    }
    while (true) pause();
  }

 private:
  PyThreadState* const state_;
};

}  // namespace weft::shm
