// The product for one instruction set, given as a type `Lanes` of vectors. One source file per instruction set includes
// this one; everything is in an unnamed namespace, as in shm/reduce_kernels.h.
//
// A tile of rows x columns sums stays in registers for a whole leaf. Both operands are copied to panels before, in the
// order in which the tile reads them, and converted to fp32 there.
#pragma once
#include <cstdlib>
#include <new>

#include "../shm/element_types.h"
#include "product.h"

namespace weft::matmul {
namespace {

constexpr int64_t block_depth = 4096;
constexpr int64_t most_panels = 32;
constexpr int64_t floats_in_cache = 1 << 20;  // of b's panels; about what a core has of the last-level cache
constexpr int64_t transposed_at_once = 16;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t panels_of(int64_t size, int64_t width) { return (size + width - 1) / width; }

// panel[k][lane] = source[lane * lane_stride + k * depth_stride], and 0 from `lanes` on.
template <class Type, int width>
void pack(const typename Type::Stored* source, int64_t lane_stride, int64_t depth_stride, int64_t lanes, int64_t depth,
          float* panel) {
  if (lane_stride == 1 && lanes == width) {
    for (int64_t k = 0; k < depth; ++k)
      for (int lane = 0; lane < width; ++lane) panel[k * width + lane] = Type::load(source[k * depth_stride + lane]);
    return;
  }
  for (int64_t begin = 0; begin < depth; begin += transposed_at_once) {
    const int64_t end = smaller(depth, begin + transposed_at_once);
    for (int lane = 0; lane < width; ++lane)
      for (int64_t k = begin; k < end; ++k)
        panel[k * width + lane] = lane < lanes ? Type::load(source[lane * lane_stride + k * depth_stride]) : 0.0f;
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

template <class Lanes, class Type>
void multiply(const Product& p) {
  constexpr int rows = Lanes::rows, columns = 2 * Lanes::width, size = rows * columns;
  using Stored = typename Type::Stored;
  const auto* a = static_cast<const Stored*>(p.a);
  const auto* b = static_cast<const Stored*>(p.b);
  const int64_t leaf_depth = p.depth / p.leaves;
  int64_t levels = 2;  // of a tree: sums that wait, and the unfinished leaf
  while ((int64_t{1} << (levels - 2)) < p.leaves) ++levels;
  const bool at_once = p.depth <= block_depth;
  const int64_t depth_of_panels = smaller(p.depth, block_depth);
  const int64_t column_panels = smaller(most_panels, floats_in_cache / (columns * depth_of_panels));
  const int64_t row_panels = at_once ? 8 : most_panels;  // b's panels are made anew for each of several blocks of depth
  const int64_t kept = at_once ? 1 : row_panels * column_panels;  // tiles whose trees are unfinished at a time
  const Memory panels_a(row_panels * rows * depth_of_panels), panels_b(column_panels * columns * depth_of_panels);
  const Memory trees(kept * levels * size);
  Tree<size> tree[most_panels * most_panels];

  for (int64_t j0 = 0; j0 < p.columns; j0 += column_panels * columns) {
    const int64_t across = panels_of(smaller(p.columns - j0, column_panels * columns), columns);
    for (int64_t i0 = 0; i0 < p.rows; i0 += row_panels * rows) {
      const int64_t down = panels_of(smaller(p.rows - i0, row_panels * rows), rows);
      for (int64_t tile = 0; tile < down * across; ++tile) tree[tile] = {trees.data + (at_once ? 0 : tile * levels * size)};
      for (int64_t begin = 0; begin < p.depth; begin += block_depth) {
        const int64_t end = smaller(p.depth, begin + block_depth), depth = end - begin;
        if (!at_once || i0 == 0)
          for (int64_t panel = 0; panel < across; ++panel) {
            const int64_t j = j0 + panel * columns;
            pack<Type, columns>(b + begin * p.b_depth + j * p.b_column, p.b_column, p.b_depth,
                                smaller(columns, p.columns - j), depth, panels_b.data + panel * columns * depth);
          }
        for (int64_t panel = 0; panel < down; ++panel) {
          const int64_t i = i0 + panel * rows;
          pack<Type, rows>(a + i * p.a_row + begin * p.a_depth, p.a_row, p.a_depth, smaller(rows, p.rows - i), depth,
                           panels_a.data + panel * rows * depth);
        }
        for (int64_t tile = 0; tile < down * across; ++tile) {
          Tree<size>& of_tile = tree[tile];
          const float* panel_a = panels_a.data + tile % down * rows * depth;
          const float* panel_b = panels_b.data + tile / down * columns * depth;
          for (int64_t k = begin; k < end;) {
            const int64_t leaf = k / leaf_depth, stop = smaller(end, (leaf + 1) * leaf_depth);
            add_products<Lanes>(stop - k, panel_a + (k - begin) * rows, panel_b + (k - begin) * columns, of_tile.leaf(),
                                k == leaf * leaf_depth);
            if (stop == (leaf + 1) * leaf_depth) of_tile.finish(leaf);
            k = stop;
          }
          if (end < p.depth) continue;
          of_tile.add_all();
          const int64_t i = i0 + tile % down * rows, j = j0 + tile / down * columns;
          for (int64_t row = 0; row < smaller(rows, p.rows - i); ++row)
            for (int64_t column = 0; column < smaller(columns, p.columns - j); ++column)
              p.out[(i + row) * p.out_row + j + column] = of_tile.sums[row * columns + column];
        }
      }
    }
  }
}

template <class Lanes>
constexpr ProductTable make_product_table() {
  ProductTable table{};
  table.functions[static_cast<size_t>(shm::DType::float32)] = multiply<Lanes, shm::Native<float>>;
  table.functions[static_cast<size_t>(shm::DType::bfloat16)] = multiply<Lanes, shm::BFloat16>;
  table.functions[static_cast<size_t>(shm::DType::float16)] = multiply<Lanes, shm::Float16>;
  table.row_tile = Lanes::rows;
  table.column_tile = 2 * Lanes::width;
  return table;
}

}  // namespace
}  // namespace weft::matmul
