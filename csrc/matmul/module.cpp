// The product of matrices in Python: raw addresses and strides; checks are the caller's.
#include <pybind11/stl.h>

#include "../families.h"
#include "../shm/reduce.h"
#include "product.h"

namespace weft {

namespace py = pybind11;

namespace {

void multiply(py::tuple a, py::tuple b, py::tuple out, py::tuple sizes, uint32_t type, int64_t leaves, bool rounds,
              int threads, const std::string& instruction_set) {
  matmul::Product product{};
  const auto address = [](const py::handle& number) { return reinterpret_cast<void*>(number.cast<uintptr_t>()); };
  product.rows = sizes[0].cast<int64_t>();
  product.columns = sizes[1].cast<int64_t>();
  product.depth = sizes[2].cast<int64_t>();
  product.leaves = leaves;
  product.type = static_cast<shm::DType>(type);
  product.a = address(a[0]);
  product.a_row = a[1].cast<int64_t>();
  product.a_depth = a[2].cast<int64_t>();
  product.b = address(b[0]);
  product.b_depth = b[1].cast<int64_t>();
  product.b_column = b[2].cast<int64_t>();
  product.out = address(out[0]);
  product.out_row = out[1].cast<int64_t>();
  product.rounds = rounds;
  const py::gil_scoped_release no_gil;
  matmul::multiply(product, threads, instruction_set.empty() ? shm::instruction_set() : instruction_set);
}

}  // namespace

void register_matmul(py::module_& m) {
  m.def("multiply", &multiply, py::arg("a"), py::arg("b"), py::arg("out"), py::arg("sizes"), py::arg("dtype"),
        py::arg("leaves"), py::arg("rounds"), py::arg("threads"), py::arg("instruction_set") = "",
        "out = a @ b with an order of summation that no shape changes. a, b, out: (address, strides...); sizes: rows, "
        "columns, depth; rounds: out has the type of a and b instead of float32.");
}

}  // namespace weft
