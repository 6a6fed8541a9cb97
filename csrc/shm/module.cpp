// Binds the shared-memory engine. Every function that can wait releases the interpreter lock.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "../families.h"
#include "collectives.h"
#include "reduce.h"

namespace py = pybind11;
using namespace weft::shm;

namespace {

using Address = uintptr_t;
using NoGil = py::call_guard<py::gil_scoped_release>;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

std::vector<void*> pointers(const std::vector<Address>& addresses) {
  std::vector<void*> result;
  result.reserve(addresses.size());
  for (const Address address : addresses) result.push_back(pointer(address));
  return result;
}

std::vector<const void*> const_pointers(const std::vector<Address>& addresses) {
  const auto result = pointers(addresses);
  return {result.begin(), result.end()};
}

void check_ranks(const Group& group, size_t items) {
  if (items != static_cast<size_t>(group.world()))
    throw std::invalid_argument("expected one entry per rank (" + std::to_string(group.world()) + "), got " +
                                std::to_string(items));
}

DType dtype_of(uint32_t code) {
  if (code >= dtype_count) throw std::invalid_argument("no element type has the code " + std::to_string(code));
  return static_cast<DType>(code);
}

ReduceOp op_of(uint32_t code) {
  if (code >= reduce_op_count) throw std::invalid_argument("no reduction has the code " + std::to_string(code));
  return static_cast<ReduceOp>(code);
}

// Ctrl-C must end a wait.
void raise_pending_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}

void register_errors(py::module_& m) {
  static const py::exception<CommError> comm_error(m, "CommError", PyExc_RuntimeError);
  static const py::exception<RankLostError> rank_lost(m, "RankLostError", comm_error.ptr());
  static const py::exception<CollectiveMismatchError> mismatch(m, "CollectiveMismatchError", comm_error.ptr());
  static const py::exception<CollectiveTimeoutError> timeout(m, "CollectiveTimeoutError", comm_error.ptr());
  for (const py::handle error : {py::handle(comm_error), py::handle(rank_lost), py::handle(mismatch),
                                 py::handle(timeout)})
    error.attr("__module__") = "weft";  // the name under which users know them
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const RankLostError& error) {
      py::set_error(rank_lost, error.what());
    } catch (const CollectiveMismatchError& error) {
      py::set_error(mismatch, error.what());
    } catch (const CollectiveTimeoutError& error) {
      py::set_error(timeout, error.what());
    } catch (const CommError& error) {
      py::set_error(comm_error, error.what());
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
}

void register_reductions(py::module_& m) {
  py::dict dtypes, ops;
  for (size_t i = 0; i < dtype_count; ++i) dtypes[dtype_names[i]] = i;
  for (size_t i = 0; i < reduce_op_count; ++i) ops[reduce_op_names[i]] = i;
  m.attr("dtypes") = dtypes;
  m.attr("reduce_ops") = ops;
  m.def("instruction_sets", &supported_instruction_sets, "Instruction sets that run on this machine, fastest first.");
  m.def(
      "reduce",
      [](const std::vector<Address>& sources, Address destination, size_t count, uint32_t dtype, uint32_t op,
         const std::string& instruction_set) {
        const auto function = reduce_function(reduce_table(instruction_set), dtype_of(dtype), op_of(op));
        function(const_pointers(sources).data(), sources.size(), pointer(destination), count);
      },
      py::arg("sources"), py::arg("destination"), py::arg("count"), py::arg("dtype"), py::arg("op"),
      py::arg("instruction_set"), NoGil(),
      "destination = op over sources, in order, accumulated in fp32 and rounded once; all in this process.");
}

void register_group(py::module_& m) {
  m.def("process_start_time", &process_start_time, py::arg("pid"));

  py::class_<Segment>(m, "Segment", "Shared memory of a group: created by one rank, opened by the others.")
      .def_static("create", &Segment::create, py::arg("bytes"))
      .def_static("open", &Segment::open, py::arg("creator"), py::arg("descriptor"), py::arg("bytes"))
      .def_property_readonly("descriptor", &Segment::descriptor);

  py::class_<Group>(m, "Group", "A group of ranks over one segment. Addresses are integers, counts are elements.")
      .def(py::init([](std::string name, int rank, Segment& segment,
                       const std::vector<std::pair<pid_t, uint64_t>>& ranks, size_t staging_bytes, double timeout_s,
                       bool oversubscribed) {
             std::vector<RankIdentity> identities;
             for (const auto& [pid, start_time] : ranks) identities.push_back({pid, start_time});
             GroupOptions options{staging_bytes, seconds(timeout_s), oversubscribed, raise_pending_signals};
             const py::gil_scoped_release no_gil;
             return std::make_unique<Group>(std::move(name), rank, std::move(segment), identities,
                                            std::move(options));
           }),
           py::arg("name"), py::arg("rank"), py::arg("segment"), py::arg("ranks"), py::arg("staging_bytes"),
           py::arg("timeout_s"), py::arg("oversubscribed"))
      .def_static("segment_bytes", &Group::segment_bytes, py::arg("world"), py::arg("staging_bytes"))
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("world", &Group::world)
      .def_property_readonly("calls", &Group::calls)
      .def("rename", &Group::rename, py::arg("name"), NoGil())
      .def(
          "set_timeout", [](Group& group, double timeout_s) { group.set_timeout(seconds(timeout_s)); },
          py::arg("timeout_s"), NoGil())
      .def("lost_ranks", &Group::lost_ranks, "Ranks that have died or left.")
      .def("leave", &Group::leave, NoGil())
      .def(
          "inject_faults",
          [](Group& group, uint64_t seed, uint32_t longest_delay_us, uint64_t die_at_point) {
            group.inject({seed, longest_delay_us, die_at_point});
          },
          py::arg("seed") = 0, py::arg("longest_delay_us") = 0, py::arg("die_at_point") = 0, NoGil(),
          "For tests: random delays wherever ranks meet, and death by SIGKILL at the n-th such point.")
      .def("barrier", &barrier, NoGil())
      .def(
          "all_reduce",
          [](Group& group, Address input, Address output, size_t count, uint32_t dtype, uint32_t op) {
            all_reduce(group, pointer(input), pointer(output), count, dtype_of(dtype), op_of(op));
          },
          py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"), py::arg("op"), NoGil())
      .def(
          "all_gather",
          [](Group& group, Address input, const std::vector<Address>& outputs, const std::vector<size_t>& counts,
             uint32_t dtype) {
            check_ranks(group, outputs.size());
            check_ranks(group, counts.size());
            all_gather(group, pointer(input), pointers(outputs), counts, dtype_of(dtype));
          },
          py::arg("input"), py::arg("outputs"), py::arg("counts"), py::arg("dtype"), NoGil())
      .def(
          "reduce_scatter",
          [](Group& group, const std::vector<Address>& inputs, Address output, const std::vector<size_t>& counts,
             uint32_t dtype, uint32_t op) {
            check_ranks(group, inputs.size());
            check_ranks(group, counts.size());
            reduce_scatter(group, const_pointers(inputs), pointer(output), counts, dtype_of(dtype), op_of(op));
          },
          py::arg("inputs"), py::arg("output"), py::arg("counts"), py::arg("dtype"), py::arg("op"), NoGil())
      .def(
          "broadcast",
          [](Group& group, Address data, size_t count, uint32_t dtype, int root) {
            broadcast(group, pointer(data), count, dtype_of(dtype), root);
          },
          py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("root"), NoGil());
}

}  // namespace

namespace weft {

void register_shm(py::module_& m) {
  register_errors(m);
  register_reductions(m);
  register_group(m);
}

}  // namespace weft
