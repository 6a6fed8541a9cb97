#include "product.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>

#include "../shm/reduce.h"
#include "denormals.h"

namespace weft::matmul {

extern const ProductTable product_table_baseline;
#if defined(__x86_64__)
extern const ProductTable product_table_avx2;
extern const ProductTable product_table_avx512;
extern const ProductTable product_table_avx512_bf16;
#endif

namespace {

constexpr int64_t least_work = int64_t{1} << 22;  // multiply-adds of a thread: far more time than waking it

const ProductTable& table_of(const Product& product, const std::string& instruction_set) {
#if defined(__x86_64__)
  const bool in_pairs = product.type == shm::DType::bfloat16 && product.depth / product.leaves % 2 == 0;
  if (instruction_set == "avx512_bf16" && in_pairs) return product_table_avx512_bf16;
  if (instruction_set == "avx512" || instruction_set == "avx512_bf16") return product_table_avx512;
  if (instruction_set == "avx2") return product_table_avx2;
#endif
  return product_table_baseline;
}

int64_t out_bytes(const Product& product) {
  return static_cast<int64_t>(shm::size_of(product.rounds ? product.type : shm::DType::float32));
}

// Part `number` of `parts`, cut along the rows or the columns at multiples of the tile.
Product part_of(const Product& whole, const ProductTable& table, int64_t number, int64_t parts) {
  Product part = whole;
  const bool by_columns = whole.columns >= whole.rows;
  int64_t& size = by_columns ? part.columns : part.rows;
  const int64_t tile = by_columns ? table.column_tile : table.row_tile;
  const int64_t share = (size + parts * tile - 1) / (parts * tile) * tile, begin = std::min(size, number * share);
  size = std::min(size - begin, share);
  const auto bytes = static_cast<int64_t>(shm::size_of(whole.type));
  if (by_columns)
    part.b = static_cast<const char*>(whole.b) + begin * whole.b_column * bytes;
  else
    part.a = static_cast<const char*>(whole.a) + begin * whole.a_row * bytes;
  part.out = static_cast<char*>(whole.out) + begin * (by_columns ? 1 : whole.out_row) * out_bytes(whole);
  return part;
}

// Calls `work` at once on up to `count` of OpenMP's threads, which are torch's too: after a function of torch they wait
// for the next one for a while, on the cores that other threads would need. Without OpenMP it is called here alone. In
// a forked child they are gone, and a call of several hangs as torch's own do.
template <class Work>
void on_threads(const Work& work, int64_t count) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (count == 1 || parallel == nullptr) return work();
  const auto call = [](void* data) { (*static_cast<const Work*>(data))(); };
  parallel(call, const_cast<Work*>(&work), static_cast<unsigned>(count), 0);
}

}  // namespace

void multiply(const Product& product, int threads, const std::string& instruction_set) {
  if (product.leaves < 1 || product.depth % product.leaves != 0)
    throw std::invalid_argument("a depth of " + std::to_string(product.depth) + " does not divide into " +
                                std::to_string(product.leaves) + " leaves");
  shm::reduce_table(instruction_set);  // throws if it does not run here
  const ProductTable& table = table_of(product, instruction_set);
  const ProductFunction function = table.functions[static_cast<size_t>(product.type)];
  if (function == nullptr)
    throw std::invalid_argument(std::string("no product of ") + name_of(product.type) +
                                " elements that is the same in any shape: there are float32, bfloat16 and float16");
  if (product.depth == 0) {
    const int64_t bytes = out_bytes(product);
    for (int64_t row = 0; row < product.rows; ++row)
      std::fill_n(static_cast<char*>(product.out) + row * product.out_row * bytes, product.columns * bytes, '\0');
    return;
  }
  const int64_t work = product.rows * product.columns * product.depth;
  const int64_t parts = std::clamp<int64_t>(work / least_work, 1, std::max(1, threads));
  std::atomic<int64_t> next{0};
  std::atomic<bool> no_memory{false};
  const unsigned mode = Denormals::mode();
  const auto work_on = [&] {
    const Denormals while_it_works(mode);
    for (int64_t number = next++; number < parts; number = next++) try {
        function(part_of(product, table, number, parts));
      } catch (const std::bad_alloc&) {
        no_memory = true;
      }
  };
  on_threads(work_on, parts);
  if (no_memory) throw std::bad_alloc();
}

}  // namespace weft::matmul
