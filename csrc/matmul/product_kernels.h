// The product for one instruction set, given as a type `Lanes` of vectors. One source file per instruction set includes
// this one; everything is in an unnamed namespace, as in shm/reduce_kernels.h.
//
// A tile of rows x columns sums stays in registers for a whole leaf. Both operands are copied to panels before, in the
// order in which the tile reads them. There they become lanes of 4 bytes, as `Element` says: a number in fp32, or two
// neighbours of bf16 for the instruction that multiplies and adds such pairs.
#pragma once
#include <cstdlib>
#include <new>
#include <optional>

#include "../shm/element_types.h"
#include "denormals.h"
#include "product.h"

namespace weft::matmul {
namespace {

constexpr int64_t most_lanes = 4096;  // of a panel's depth that are multiplied at once; if there are more,
constexpr int64_t block_lanes = 1024;  // in blocks of these, for as many tiles as there are sums that wait
constexpr int64_t most_columns = 32, most_rows = 64;  // panels of b and a
constexpr int64_t floats_in_cache = 1 << 20;  // of b's panels; about what a core has of the last-level cache
constexpr int64_t transposed_at_once = 16, read_ahead = 64;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t panels_of(int64_t size, int64_t width) { return (size + width - 1) / width; }

template <class Type>
struct Single : Type {
  using Stored = typename Type::Stored;
  static constexpr int64_t numbers = 1;
  static float load(const Stored* source, int64_t) { return Type::load(*source); }
};

struct Pair : shm::BFloat16 {
  static constexpr int64_t numbers = 2;
  static float load(const uint16_t* source, int64_t depth_stride) {
    return shm::bits_of<float>(source[0] | static_cast<uint32_t>(source[depth_stride]) << 16);
  }
};

using Four = float __attribute__((vector_size(16)));

// to[k * width + lane] = from[lane * stride + k], for 4 lanes and 4 k. The stride is in bytes.
inline void transpose(const void* from, int64_t stride, float* to, int width) {
  Four x[4], y[4];
  for (int lane = 0; lane < 4; ++lane) __builtin_memcpy(&x[lane], static_cast<const char*>(from) + lane * stride, 16);
  for (int half = 0; half < 2; ++half) {
    y[half] = __builtin_shufflevector(x[half], x[half + 2], 0, 4, 1, 5);
    y[half + 2] = __builtin_shufflevector(x[half], x[half + 2], 2, 6, 3, 7);
  }
  for (int pair = 0; pair < 4; pair += 2) {
    x[pair] = __builtin_shufflevector(y[pair], y[pair + 1], 0, 4, 1, 5);
    x[pair + 1] = __builtin_shufflevector(y[pair], y[pair + 1], 2, 6, 3, 7);
  }
  for (int k = 0; k < 4; ++k) __builtin_memcpy(to + k * width, &x[k], 16);
}

// panel[k][lane] = the element of source at lane * lane_stride + places[k] * depth_stride, and 0 from `lanes` on.
template <class Element, int width>
void pack(const typename Element::Stored* source, int64_t lane_stride, int64_t depth_stride, int64_t lanes,
          const int64_t* places, int64_t depth, float* panel) {
  if (lane_stride == 1 && lanes == width) {
    for (int64_t k = 0; k < depth; ++k)
      for (int lane = 0; lane < width; ++lane)
        panel[k * width + lane] = Element::load(source + places[k] * depth_stride + lane, depth_stride);
    return;
  }
  constexpr int64_t bytes = sizeof(typename Element::Stored);
  const bool by_fours = bytes * Element::numbers == 4 && depth_stride == 1;  // then places are in order
  for (int64_t begin = 0; begin < depth; begin += transposed_at_once) {
    const int64_t end = smaller(depth, begin + transposed_at_once), done = by_fours ? (end - begin) / 4 * 4 : 0;
    const int64_t lanes_done = done == 0 ? 0 : lanes / 4 * 4;
    if (lanes_done != 0 && begin + read_ahead < depth)
      for (int64_t lane = 0; lane < lanes; ++lane)
        __builtin_prefetch(source + lane * lane_stride + places[begin + read_ahead], 0, 2);
    for (int64_t lane = 0; lane < lanes_done; lane += 4)
      for (int64_t k = begin; k < begin + done; k += 4)
        transpose(source + lane * lane_stride + places[k], lane_stride * bytes, panel + k * width + lane, width);
    for (int lane = 0; lane < width; ++lane)
      for (int64_t k = lane < lanes_done ? begin + done : begin; k < end; ++k)
        panel[k * width + lane] =
            lane < lanes ? Element::load(source + lane * lane_stride + places[k] * depth_stride, depth_stride) : 0.0f;
  }
}

// sums[row][column] += sum over k of a[k][row] b[k][column], one fused multiply-add after the other; from 0 if first.
template <class Lanes>
void add_products(int64_t depth, const float* a, const float* b, float* sums, bool first) {
  constexpr int rows = Lanes::rows, width = Lanes::width;
  typename Lanes::Vector left[rows], right[rows];
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
    left[row] = first ? Lanes::zero() : Lanes::load(sums + 2 * width * row);
    right[row] = first ? Lanes::zero() : Lanes::load(sums + 2 * width * row + width);
  }
  for (int64_t k = 0; k < depth; ++k, a += rows, b += 2 * width) {
    const auto b_left = Lanes::load(b), b_right = Lanes::load(b + width);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const auto value = Lanes::all(a[row]);
      left[row] = Lanes::multiply_add(value, b_left, left[row]);
      right[row] = Lanes::multiply_add(value, b_right, right[row]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
    Lanes::store(sums + 2 * width * row, left[row]);
    Lanes::store(sums + 2 * width * row + width, right[row]);
  }
}

// The sums of finished leaves that wait for their neighbours in the tree, the oldest first, then the unfinished leaf.
template <int size>
struct Tree {
  float* sums;
  int64_t waiting = 0;

  float* leaf() const { return sums + waiting * size; }

  void finish(int64_t leaf_number) {
    for (int64_t done = leaf_number; (done & 1) != 0; done >>= 1) add_last();
    ++waiting;
  }
  void add_all() {
    for (--waiting; waiting > 0;) add_last();
  }

 private:
  void add_last() {
    --waiting;
    float* sum = sums + waiting * size;
    for (int i = 0; i < size; ++i) sum[i] += sum[size + i];
  }
};

struct Memory {
  explicit Memory(int64_t floats)
      : data(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>((floats * 4 + 63) / 64 * 64)))) {
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  float* const data;
};

template <class Element>
void write(const Product& p, int64_t row, int64_t column, int64_t count, const float* sums) {
  const int64_t at = row * p.out_row + column;
  if (p.rounds)
    for (int64_t i = 0; i < count; ++i) static_cast<typename Element::Stored*>(p.out)[at + i] = Element::store(sums[i]);
  else
    for (int64_t i = 0; i < count; ++i) static_cast<float*>(p.out)[at + i] = sums[i];
}

// As `Product` says. A leaf has a whole number of elements. `as_pairs`: single numbers are added as `Pair`s would be.
template <class Lanes, class Element, bool as_pairs = false>
void multiply(const Product& p) {
  constexpr int rows = Lanes::rows, columns = 2 * Lanes::width, size = rows * columns;
  using Stored = typename Element::Stored;
  const auto* a = static_cast<const Stored*>(p.a);
  const auto* b = static_cast<const Stored*>(p.b);
  const int64_t whole_depth = p.depth / Element::numbers, leaf_depth = whole_depth / p.leaves;
  int64_t levels = 2;  // of a tree: sums that wait, and the unfinished leaf
  while ((int64_t{1} << (levels - 2)) < p.leaves) ++levels;
  const bool at_once = whole_depth <= most_lanes;
  const int64_t block_depth = at_once ? whole_depth : block_lanes;
  const int64_t column_panels = smaller(most_columns, floats_in_cache / (columns * block_depth));
  const int64_t row_panels = at_once ? 8 : most_rows;  // b's panels are made anew for each of several blocks of depth
  const int64_t kept = at_once ? 1 : row_panels * column_panels;  // tiles whose trees are unfinished at a time
  const Memory panels_a(row_panels * rows * block_depth), panels_b(column_panels * columns * block_depth);
  const Memory trees(kept * levels * size);
  Tree<size> tree[most_rows * most_columns];
  int64_t places[most_lanes];

  for (int64_t j0 = 0; j0 < p.columns; j0 += column_panels * columns) {
    const int64_t across = panels_of(smaller(p.columns - j0, column_panels * columns), columns);
    for (int64_t i0 = 0; i0 < p.rows; i0 += row_panels * rows) {
      const int64_t down = panels_of(smaller(p.rows - i0, row_panels * rows), rows);
      for (int64_t tile = 0; tile < down * across; ++tile) tree[tile] = {trees.data + (at_once ? 0 : tile * levels * size)};
      for (int64_t begin = 0; begin < whole_depth; begin += block_depth) {
        const int64_t end = smaller(whole_depth, begin + block_depth), depth = end - begin;
        if (!at_once || i0 == 0) {
          for (int64_t k = begin; k < end; ++k) {
            const int64_t in_leaf = k % leaf_depth, other = in_leaf ^ 1;
            const bool swapped = as_pairs && other < leaf_depth;
            places[k - begin] = (swapped ? k - in_leaf + other : k) * Element::numbers;
          }
          for (int64_t panel = 0; panel < across; ++panel) {
            const int64_t j = j0 + panel * columns;
            pack<Element, columns>(b + j * p.b_column, p.b_column, p.b_depth, smaller(columns, p.columns - j), places,
                                   depth, panels_b.data + panel * columns * depth);
          }
        }
        for (int64_t panel = 0; panel < down; ++panel) {
          const int64_t i = i0 + panel * rows;
          pack<Element, rows>(a + i * p.a_row, p.a_row, p.a_depth, smaller(rows, p.rows - i), places, depth,
                              panels_a.data + panel * rows * depth);
        }
        for (int64_t tile = 0; tile < down * across; ++tile) {
          Tree<size>& of_tile = tree[tile];
          const float* panel_a = panels_a.data + tile % down * rows * depth;
          const float* panel_b = panels_b.data + tile / down * columns * depth;
          for (int64_t k = begin; k < end;) {
            const int64_t leaf = k / leaf_depth, stop = smaller(end, (leaf + 1) * leaf_depth);
            {
              std::optional<Denormals> in_leaf;  // the tree's additions are as those of sums elsewhere
              if (as_pairs) in_leaf.emplace(Denormals::mode() | Denormals::none);
              add_products<Lanes>(stop - k, panel_a + (k - begin) * rows, panel_b + (k - begin) * columns,
                                  of_tile.leaf(), k == leaf * leaf_depth);
            }
            if (stop == (leaf + 1) * leaf_depth) of_tile.finish(leaf);
            k = stop;
          }
          if (end < whole_depth) continue;
          of_tile.add_all();
          const int64_t i = i0 + tile % down * rows, j = j0 + tile / down * columns;
          for (int64_t row = 0; row < smaller(rows, p.rows - i); ++row)
            write<Element>(p, i + row, j, smaller(columns, p.columns - j), of_tile.sums + row * columns);
        }
      }
    }
  }
}

template <class Lanes>
constexpr ProductTable make_product_table() {
  ProductTable table{};
  table.functions[static_cast<size_t>(shm::DType::float32)] = multiply<Lanes, Single<shm::Native<float>>>;
  table.functions[static_cast<size_t>(shm::DType::bfloat16)] = multiply<Lanes, Single<shm::BFloat16>, true>;
  table.functions[static_cast<size_t>(shm::DType::float16)] = multiply<Lanes, Single<shm::Float16>>;
  table.row_tile = Lanes::rows;
  table.column_tile = 2 * Lanes::width;
  return table;
}

}  // namespace
}  // namespace weft::matmul
