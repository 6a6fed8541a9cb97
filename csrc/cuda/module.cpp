// Binds the CUDA family. Without nvcc the module's attribute `cuda` is None, and nothing else changes.
#include "../families.h"
#include "flags.h"

namespace weft {

namespace {

// Every build has this: kernels in Triton's interpreter leave the same records.
void register_records(pybind11::module_& m) {
  namespace py = pybind11;
  py::module_ record = m.def_submodule("wait_record", "Layout of the records that failed waits leave.");
  py::dict fields, states, names;
  for (int i = 0; i < cuda::RecordField::count; ++i) fields[cuda::record_fields[i]] = i;
  int state = 0;
  for (const char* name : cuda::record_states) states[name] = state++;
  for (const cuda::WaitName& known : cuda::wait_names) names[py::int_(known.code)] = known.name;
  record.attr("words") = cuda::record_words;
  record.attr("fields") = fields;
  record.attr("states") = states;
  record.attr("names") = names;  // names of the operations and phases, by their codes
}

}  // namespace

}  // namespace weft

#if defined(WEFT_CUDA_VERSION)
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "collectives.h"
#include "copies.h"
#include "reduce.h"

namespace py = pybind11;

namespace weft {

namespace cuda {
struct Gpu;
extern template class Ranks<Gpu>;  // defined in collectives.cu, which only nvcc can compile
}  // namespace cuda

namespace {

// A launch waits if the stream's queue is full, and that may be behind a kernel that only another thread can end.
using NoGil = py::call_guard<py::gil_scoped_release>;

py::dict state() {
  py::dict result;
  int driver = 0, devices = 0;
  cudaDriverGetVersion(&driver);  // 0 if there is no driver
  const cudaError_t error = cudaGetDeviceCount(&devices);
  result["driver"] = driver == 0 ? py::object(py::none()) : py::object(py::int_(driver));
  result["devices"] = error == cudaSuccess ? devices : 0;
  result["error"] = error == cudaSuccess ? py::object(py::none()) : py::object(py::str(cudaGetErrorString(error)));
  cudaGetLastError();  // clears "no device", which the next call of other code would report
  return result;
}

void rank_order_sum(const std::vector<uintptr_t>& sources, uintptr_t destination, size_t count,
                    const std::string& dtype, float scale, uintptr_t stream) {
  cuda::Element element;
  if (dtype == "float32")
    element = cuda::Element::float32;
  else if (dtype == "float16")
    element = cuda::Element::float16;
  else if (dtype == "bfloat16")
    element = cuda::Element::bfloat16;
  else
    throw std::invalid_argument("rank_order_sum takes float32, float16 and bfloat16, got " + dtype);
  if (sources.empty() || sources.size() > cuda::most_sources)
    throw std::invalid_argument("rank_order_sum takes 1 to " + std::to_string(cuda::most_sources) + " sources, got " +
                                std::to_string(sources.size()));
  std::vector<const void*> pointers;
  for (const uintptr_t source : sources) pointers.push_back(reinterpret_cast<const void*>(source));
  cuda::check(
      cuda::rank_order_sum(pointers.data(), static_cast<int>(pointers.size()), reinterpret_cast<void*>(destination),
                           count, element, scale, reinterpret_cast<cudaStream_t>(stream)),
      "rank_order_sum");
}

void register_collectives(py::module_& m) {
  using Ranks = cuda::Ranks<cuda::Gpu>;
  py::class_<Ranks>(m, "Ranks",
                    "Collectives of one rank on one device, over memory of its peers that is mapped here. Every method "
                    "but `load` only launches, on the given stream, and may be captured in a CUDA graph.")
      .def(py::init<int, const std::vector<uintptr_t>&, size_t, const std::vector<uintptr_t>&, size_t, uintptr_t,
                    double, int>(),
           py::arg("rank"), py::arg("pads"), py::arg("pad_words"), py::arg("workspace"), py::arg("workspace_bytes"),
           py::arg("record"), py::arg("timeout_s"), py::arg("blocks"))
      .def("load", &Ranks::load, NoGil(),
           "Load every kernel onto the current device; return whether all_reduce_multimem runs on it.")
      .def_property_readonly("low_latency_bytes", &Ranks::low_latency_bytes,
                             "The largest tensor of all_reduce's algorithm \"low_latency\", in bytes.")
      .def("rms_norm_rows", &Ranks::rms_norm_rows, py::arg("hidden"), py::arg("dtype"),
           "The most rows of all_reduce_rms_norm, each of `hidden` elements; 0 if a row does not fit.")
      .def_property_readonly("marks", &Ranks::marks,
                             "Numbers of the words of this rank's pad that are not 0 once a wait has given up.")
      .def("barrier", &Ranks::barrier, NoGil(), py::arg("stream"))
      .def("all_reduce", &Ranks::all_reduce, NoGil(), py::arg("source"), py::arg("destination"), py::arg("count"),
           py::arg("dtype"), py::arg("average"), py::arg("scale"), py::arg("algorithm"), py::arg("stream"),
           "algorithm: \"low_latency\", \"one_shot\" or \"two_shot\". The source may be the destination.")
      .def("all_reduce_rms_norm", &Ranks::all_reduce_rms_norm, NoGil(), py::arg("partial"), py::arg("residual"),
           py::arg("weight"), py::arg("normalised"), py::arg("total"), py::arg("rows"), py::arg("hidden"),
           py::arg("dtype"), py::arg("eps"), py::arg("stream"),
           "total = residual + all_reduce(partial); normalised = RMS norm of total. Results may lie where inputs do.")
      .def("all_reduce_in_place", &Ranks::all_reduce_in_place, NoGil(), py::arg("addresses"), py::arg("count"),
           py::arg("dtype"), py::arg("average"), py::arg("scale"), py::arg("stream"), py::arg("offset") = 0,
           "addresses[r]: address of rank r's symmetric memory as mapped here. offset: offset of that part in the "
           "allocation; ranks that pass different parts then raise an error.")
      .def("all_reduce_multimem", &Ranks::all_reduce_multimem, NoGil(), py::arg("multicast"), py::arg("count"),
           py::arg("dtype"), py::arg("average"), py::arg("scale"), py::arg("stream"), py::arg("offset") = 0,
           py::arg("own") = 0,
           "Sums in the order of the switch, not of the ranks. own: this rank's own address of the memory, which is "
           "filled with NaN if a wait gives up; without it the memory of every rank is.")
      .def("reduce_scatter", &Ranks::reduce_scatter, NoGil(), py::arg("source"), py::arg("destination"),
           py::arg("counts"), py::arg("dtype"), py::arg("average"), py::arg("scale"), py::arg("stream"))
      .def("all_gather", &Ranks::all_gather, NoGil(), py::arg("source"), py::arg("destinations"), py::arg("bytes"),
           py::arg("stream"))
      .def("reduce_scatter_in_place", &Ranks::reduce_scatter_in_place, NoGil(), py::arg("window"), py::arg("offset"),
           py::arg("destination"), py::arg("counts"), py::arg("dtype"), py::arg("average"), py::arg("scale"),
           py::arg("stream"), py::arg("number") = 0,
           "window[r]: address of rank r's symmetric memory as mapped here. offset: of this rank's source there, in "
           "bytes; ranks may have different ones. number: of the window; ranks that pass different ones raise an error.")
      .def("all_gather_in_place", &Ranks::all_gather_in_place, NoGil(), py::arg("window"), py::arg("offset"),
           py::arg("destinations"), py::arg("bytes"), py::arg("unit"), py::arg("stream"), py::arg("number") = 0,
           "As reduce_scatter_in_place. unit: size of an element in bytes.")
      .def("all_gather_by_copies", &Ranks::all_gather_by_copies, NoGil(), py::arg("sources"), py::arg("destinations"),
           py::arg("bytes"), py::arg("stream"), py::arg("number") = 0,
           "By copy engines. sources[r]: address of rank r's source as mapped here.");
}

}  // namespace

void register_cuda(py::module_& m) {
  register_records(m);
  py::module_ cuda = m.def_submodule("cuda", "CUDA kernels on raw pointers, sizes and stream handles.");
  cuda.def("state", &state, "Driver version, number of devices, and the error of that query.");
  cuda.def("rank_order_sum", &rank_order_sum, NoGil(), py::arg("sources"), py::arg("destination"), py::arg("count"),
           py::arg("dtype"), py::arg("scale") = 1.0f, py::arg("stream") = 0,
           "destination = scale * sum(sources), in order, accumulated in fp32 and rounded once.");
  register_collectives(cuda);
  register_copies(cuda);
}

}  // namespace weft
#else

namespace weft {

void register_cuda(pybind11::module_& m) {
  register_records(m);
  m.attr("cuda") = pybind11::none();
}

}  // namespace weft
#endif
