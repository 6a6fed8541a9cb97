// How a thread's floating-point units treat numbers below the normal ones. Processors other than x86 do as they are set.
#pragma once
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace weft::matmul {
namespace {

// Sets the thread's mode while it lives.
class Denormals {
 public:
  explicit Denormals(unsigned mode) { set(mode); }
  Denormals(const Denormals&) = delete;
  ~Denormals() { set(before_); }
#if defined(__x86_64__)
  static constexpr unsigned none = 0x8040;  // flags of a mode: they are taken and made as 0
  static unsigned mode() { return _mm_getcsr(); }

 private:
  static void set(unsigned mode) { _mm_setcsr(mode); }
#else
  static constexpr unsigned none = 0;
  static unsigned mode() { return 0; }

 private:
  static void set(unsigned) {}
#endif
  const unsigned before_ = mode();
};

}  // namespace
}  // namespace weft::matmul
