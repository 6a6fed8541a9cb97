// A launch's arguments, read from Python: what each of them is, which makes the key of the compiled variant, and its
// value.
//
// The classes are those that Triton 3.7.1 compiles separate variants for (native_specialize_impl in its wheel): None
// and the integer 1 are constants, an integer or an address that 16 divides is known to be, and an integer is an i32
// where that holds it.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace weft::launch {

// An argument's first byte in a key. Archives hold keys, so a letter keeps its meaning.
enum class Class : char {
  none = 'N',
  one = '1',
  i32 = 'i',
  i32_by_16 = 'I',
  i64 = 'l',
  i64_by_16 = 'L',
  u64 = 'u',
  u64_by_16 = 'U',
  boolean = 'b',
  real = 'f',
  tensor = 'p',        // its element type follows
  tensor_by_16 = 'P',  // likewise
  descriptor = 'd',    // its element type, its rank and the sizes of its block follow
};

constexpr int most_arguments = 127;  // a key counts them in one byte
constexpr int most_dimensions = 5;  // of a tensor descriptor

// A jit function's parameters, and which of them it is specialised on.
struct Parameters {
  Parameters(std::string function, std::vector<std::string> names, const std::vector<std::string>& unspecialised);

  // For an error: "kernel f: argument x".
  std::string describe(size_t place) const { return "kernel " + function + ": argument " + names[place]; }

  std::string function;
  std::vector<std::string> names;
  std::vector<char> specialised;
};

// Of an argument that is no constant.
struct Value {
  union {
    int64_t integer;  // also a boolean, an address, and the bits of a u64
    double real;
    PyObject* descriptor;  // borrowed from the tuple of arguments
  };
  uint32_t place;  // among all arguments
};

// Bytes, on the stack as long as they fit there.
class Key {
 public:
  Key() = default;
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  void put(char byte) { *room(1) = byte; }
  void put(const void* bytes, size_t count) { std::memcpy(room(count), bytes, count); }
  std::string_view view() const { return {bytes_, size_}; }

 private:
  char* room(size_t count) {
    if (size_ + count > capacity_) grow(count);
    size_ += count;
    return bytes_ + size_ - count;
  }
  void grow(size_t count);

  char short_[1024];
  std::unique_ptr<char[]> long_;
  char* bytes_ = short_;
  size_t size_ = 0;
  size_t capacity_ = sizeof short_;
};

// Reads the arguments and the pairs (name, value) of the constants; both tuples must outlive it.
struct Arguments {
  Arguments(const Parameters& parameters, PyObject* arguments, PyObject* constants);

  Key key;
  int count = 0;
  Value values[most_arguments];
};

// What a key says of an argument that is no constant.
struct Described {
  Class kind;
  int rank;  // of a descriptor
};
// All of them, in order. Throws std::invalid_argument where the bytes are no key.
std::vector<Described> described(std::string_view key);

}  // namespace weft::launch
