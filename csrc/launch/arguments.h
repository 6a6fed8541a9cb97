// Arguments of a launch, read from Python: the class of each, which goes into the key of the compiled variant, and its
// value.
//
// Triton 3.7.1 compiles a separate variant for each class (native_specialize_impl in its wheel). None and the integer
// 1 are constants. Integers and addresses divisible by 16 have their own classes. An integer is an i32 if an i32 holds
// it.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace weft::launch {

// First byte of an argument in a key. Archives contain keys, so a letter never changes its meaning.
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
  tensor_by_16 = 'P',  // its element type follows
  descriptor = 'd',    // its element type, its rank and the sizes of its block follow
};

constexpr int most_arguments = 127;  // a key counts them in one byte
constexpr int most_dimensions = 5;  // of a tensor descriptor

// Parameters of a jit function, with a mark on those that it is specialised on.
struct Parameters {
  Parameters(std::string function, std::vector<std::string> names, const std::vector<std::string>& unspecialised);

  // Returns the start of an error: "kernel f: argument x".
  std::string describe(size_t place) const { return "kernel " + function + ": argument " + names[place]; }

  std::string function;
  std::vector<std::string> names;
  std::vector<char> specialised;
};

// Value of an argument that is not a constant.
struct Value {
  union {
    int64_t integer;  // also a boolean, an address, and the bits of a u64
    double real;
    PyObject* descriptor;  // borrowed from the tuple of arguments
  };
  uint32_t place;  // among all arguments
};

// Bytes of a key, on the stack unless they are too many.
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

// Reads the arguments and the pairs (name, value) of the constants. Both tuples must outlive this object.
struct Arguments {
  Arguments(const Parameters& parameters, PyObject* arguments, PyObject* constants);

  Key key;
  int count = 0;
  Value values[most_arguments];
};

// Description of an argument that is not a constant, read from a key.
struct Described {
  Class kind;
  int rank;  // of a descriptor
};
// Returns the descriptions in order. Throws std::invalid_argument if the bytes are not a key.
std::vector<Described> described(std::string_view key);

}  // namespace weft::launch
