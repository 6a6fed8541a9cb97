// Errors between ranks. Each type is a Python exception of the same name (weft.CommError and its subclasses).
#pragma once
#include <stdexcept>
#include <string>
#include <system_error>

namespace weft::shm {

struct CommError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct RankLostError : CommError {
  using CommError::CommError;
};
struct CollectiveMismatchError : CommError {
  using CommError::CommError;
};
struct CollectiveTimeoutError : CommError {
  using CommError::CommError;
};

[[noreturn]] inline void throw_errno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace weft::shm
