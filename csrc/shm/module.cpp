// Binds the shared-memory engine. Every function that can wait releases the interpreter lock.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <tuple>
#include <type_traits>

#include "../families.h"
#include "collectives.h"
#include "gil.h"
#include "handover.h"
#include "methods.h"
#include "reduce.h"
#include "streaming.h"

namespace py = pybind11;
using namespace weft::shm;

namespace {

using Address = uintptr_t;
using NoGil = py::call_guard<WithoutGil>;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

void check_ranks(const Group& group, size_t items) {
  if (items != static_cast<size_t>(group.world()))
    throw std::invalid_argument("expected one entry per rank (" + std::to_string(group.world()) + "), got " +
                                std::to_string(items));
}

void check_rank(const Group& group, int rank, const char* what) {
  if (rank < 0 || rank >= group.world())
    throw std::invalid_argument(std::string(what) + " " + std::to_string(rank) + " is not a rank of a group of " +
                                std::to_string(group.world()));
}

DType dtype_of(uint32_t code) {
  if (code >= dtype_count) throw std::invalid_argument("no element type has the code " + std::to_string(code));
  return static_cast<DType>(code);
}

ReduceOp op_of(uint32_t code) {
  if (code >= reduce_op_count) throw std::invalid_argument("no reduction has the code " + std::to_string(code));
  return static_cast<ReduceOp>(code);
}

void wait_for_callbacks_at_exit() {
  ends_the_interpreter = true;
  interpreter_is_ending.store(true);
  const WithoutGil no_gil;
  for (int ms = 0; ms < 5000 && threads_in_python.load() > 0; ++ms) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

const std::thread::id importing_thread = std::this_thread::get_id();

// Lets Ctrl-C end a wait. Python delivers signals on the main thread only.
void raise_pending_signals() {
  if (std::this_thread::get_id() != importing_thread || interpreter_is_ending.load()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

Clock::duration seconds(double value) {
  constexpr double longest = 1e9;  // thirty years; the clock counts nanoseconds in 64 bits
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(value, longest)));
}

// The Python exception types.
struct {
  py::handle comm, rank_lost, mismatch, timeout;
} errors;

py::handle type_of(const CommError& error) {
  if (dynamic_cast<const RankLostError*>(&error) != nullptr) return errors.rank_lost;
  if (dynamic_cast<const CollectiveMismatchError*>(&error) != nullptr) return errors.mismatch;
  if (dynamic_cast<const CollectiveTimeoutError*>(&error) != nullptr) return errors.timeout;
  return errors.comm;
}

// Called with the text of each error between ranks before Python sees it; null if nobody asked.
PyObject* error_hook = nullptr;

void call_error_hook(const CommError& error) {
  if (error_hook == nullptr) return;
  try {
    py::handle{error_hook}(error.what());
  } catch (py::error_already_set& raised) {
    raised.discard_as_unraisable("the hook of weft._C.on_comm_error");
  }
}

void register_errors(py::module_& m) {
  static const py::exception<CommError> comm(m, "CommError", PyExc_RuntimeError);
  static const py::exception<RankLostError> rank_lost(m, "RankLostError", comm.ptr());
  static const py::exception<CollectiveMismatchError> mismatch(m, "CollectiveMismatchError", comm.ptr());
  static const py::exception<CollectiveTimeoutError> timeout(m, "CollectiveTimeoutError", comm.ptr());
  errors = {comm, rank_lost, mismatch, timeout};
  errors.comm.attr("__doc__") = "A collective or a message failed. The subclasses say how.";
  errors.rank_lost.attr("__doc__") =
      "A rank died or left the group. The text names it, its process and the call that waited for it.";
  errors.mismatch.attr("__doc__") =
      "Ranks called different operations, types or sizes. Every rank raises it with the same text.";
  errors.timeout.attr("__doc__") = "A rank was silent for longer than the group's timeout. The text names it.";
  for (const py::handle error : {errors.comm, errors.rank_lost, errors.mismatch, errors.timeout})
    error.attr("__module__") = "weft";  // the name under which users know them
  m.def(
      "on_comm_error", [](const py::function& hook) { error_hook = hook.inc_ref().ptr(); }, py::arg("hook"),
      "Call hook(text) for each error between ranks of this process, before it is raised.");
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const CommError& error) {
      call_error_hook(error);
      py::set_error(type_of(error), error.what());
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
}

py::object as_python(const std::exception_ptr& raised) {
  if (!raised) return py::none();
  try {
    std::rethrow_exception(raised);
  } catch (const CommError& error) {
    call_error_hook(error);
    return type_of(error)(error.what());
  } catch (const std::exception& error) {
    return errors.comm(error.what());
  }
}

void register_work(py::module_& m) {
  py::module_::import("atexit").attr("register")(py::cpp_function(&wait_for_callbacks_at_exit));
  py::class_<Work, std::shared_ptr<Work>>(m, "Work", "Operation that runs in the background.")
      .def("done", &Work::done)
      .def(
          "wait",
          [](Work& work, std::optional<double> timeout_s) {
            std::optional<Clock::duration> limit;
            if (timeout_s) limit = seconds(*timeout_s);
            return work.wait(limit, raise_pending_signals);
          },
          py::arg("timeout_s") = py::none(), NoGil(),
          "Wait until it is done; False if the time passes first. Raises the operation's error.")
      .def(
          "then",
          [](Work& work, py::function callback) {
            // The thread that releases it last must hold the interpreter lock.
            const std::shared_ptr<py::function> held(new py::function(std::move(callback)), [](py::function* function) {
              const MayUsePython may;
              if (!may) return;
              const py::gil_scoped_acquire gil;
              delete function;
            });
            const WithoutGil no_gil;
            work.then([held](const std::exception_ptr& raised) {
              const MayUsePython may;
              if (!may) return;
              const py::gil_scoped_acquire gil;
              try {
                (*held)(as_python(raised));
              } catch (py::error_already_set& error) {
                error.discard_as_unraisable("a callback of a weft Work");
              }
            });
          },
          py::arg("callback"), "Call callback(error or None) once it is done, at once or on another thread.");
}

void register_reductions(py::module_& m) {
  py::dict dtypes, moved_dtypes, ops;
  for (size_t i = 0; i < dtype_count; ++i) (i < reduced_dtype_count ? dtypes : moved_dtypes)[dtype_names[i]] = i;
  for (size_t i = 0; i < reduce_op_count; ++i) ops[reduce_op_names[i]] = i;
  m.attr("dtypes") = dtypes;
  m.attr("moved_dtypes") = moved_dtypes;
  m.attr("reduce_ops") = ops;
  m.def(
      "set_purpose",
      [](const std::string& text) { Purpose::of_this_thread() = Purpose(text); }, py::arg("text"),
      "Set what this thread's calls are made for, which errors name and ranks compare; \"\" is nothing.");
  m.def("instruction_sets", &supported_instruction_sets, "Instruction sets that run on this machine, fastest first.");
  m.def(
      "check_reduction",
      [](uint32_t dtype, uint32_t op) { reduce_function(reduce_table(), dtype_of(dtype), op_of(op)); },
      py::arg("dtype"), py::arg("op"), "Raise ValueError if the operator has no meaning for the type.");
  m.def(
      "copy_past_cache",
      [](Address source, Address destination, size_t bytes) {
        copy_past_cache(pointer(destination), pointer(source), bytes);
      },
      py::arg("source"), py::arg("destination"), py::arg("bytes"), NoGil(),
      "Copy that bypasses the cache, for data that is not read again soon.");
  m.def(
      "reduce",
      [](const std::vector<Address>& sources, Address destination, size_t count, uint32_t dtype, uint32_t op,
         const std::string& instruction_set) {
        const auto function = reduce_function(reduce_table(instruction_set), dtype_of(dtype), op_of(op));
        std::vector<const void*> pointers;
        for (const Address source : sources) pointers.push_back(pointer(source));
        function(pointers.data(), pointers.size(), pointer(destination), count);
      },
      py::arg("sources"), py::arg("destination"), py::arg("count"), py::arg("dtype"), py::arg("op"),
      py::arg("instruction_set"), NoGil(),
      "destination = op over sources, in order, accumulated in fp32 and rounded once; all in this process.");
}

// Deletes a group without the interpreter lock: it joins its threads, which may be about to ask for that lock.
struct EndWithoutGil {
  void operator()(Group* group) const {
    const WithoutGil no_gil;
    if (!group->postpone([group] { delete group; })) delete group;
  }
};
using GroupHolder = std::unique_ptr<Group, EndWithoutGil>;

GroupHolder make_group(std::string name, int rank, Segment& segment,
                       const std::vector<std::pair<pid_t, uint64_t>>& ranks, size_t staging_bytes, double timeout_s,
                       bool oversubscribed, std::vector<int> labels, bool single_copy, int threads) {
  std::vector<RankIdentity> identities;
  for (const auto& [pid, key] : ranks) identities.push_back({pid, key});
  GroupOptions options{staging_bytes, seconds(timeout_s), oversubscribed, raise_pending_signals, std::move(labels),
                       single_copy, threads};
  if (!options.labels.empty() && options.labels.size() != identities.size())
    throw std::invalid_argument("labels: one a rank, or none");
  const WithoutGil no_gil;
  return GroupHolder(new Group(std::move(name), rank, std::move(segment), identities, std::move(options)));
}

// What Python gives for an argument of a collective: addresses and codes are integers.
template <class T>
struct Given {
  using Type = std::decay_t<T>;
  static const Type& read(const Type& value) { return value; }
};
template <class T>
struct Given<T*> {
  using Type = Address;
  static T* read(Address address) { return static_cast<T*>(pointer(address)); }
};
template <class T>
struct Given<const std::vector<T*>&> {
  using Type = std::vector<Address>;
  static std::vector<T*> read(const Type& addresses) {
    std::vector<T*> result;
    result.reserve(addresses.size());
    for (const Address address : addresses) result.push_back(pointer(address));
    return result;
  }
};
template <>
struct Given<DType> {
  using Type = uint32_t;
  static DType read(uint32_t code) { return dtype_of(code); }
};
template <>
struct Given<ReduceOp> {
  using Type = uint32_t;
  static ReduceOp read(uint32_t code) { return op_of(code); }
};

// The root's rank is the only `int`. Lists have an entry for each rank; those of a root have them only there.
template <class... Arguments>
void check_arguments(const Group& group, const Arguments&... arguments) {
  int root = group.rank();
  [[maybe_unused]] const auto note_root = [&](const auto& argument) {
    if constexpr (std::is_same_v<decltype(argument), const int&>) check_rank(group, root = argument, "root");
  };
  [[maybe_unused]] const auto check_list = [&](const auto& argument) {
    if constexpr (std::is_class_v<std::decay_t<decltype(argument)>>) check_ranks(group, argument.size());
  };
  (note_root(arguments), ...);
  if (root == group.rank()) (check_list(arguments), ...);
}

// Adds a collective as a method. It runs after all calls submitted earlier, and returns null, or the Work if
// `asynchronous`. `more`: the names of its arguments, and its docstring.
template <class... Arguments, class... More>
void add(py::class_<Group, GroupHolder>& group, const char* name, void (*collective)(Group&, Arguments...),
         const More&... more) {
  const auto method = [collective](Group& g, const typename Given<Arguments>::Type&... given,
                                   bool asynchronous) -> std::shared_ptr<Work> {
    check_arguments(g, given...);
    auto call = [&g, collective, arguments = std::make_tuple(Given<Arguments>::read(given)...)] {
      std::apply([&](const auto&... argument) { collective(g, argument...); }, arguments);
    };
    const WithoutGil no_gil;
    if (asynchronous) return g.submit(std::move(call));
    g.run(call);
    return nullptr;
  };
  group.def(name, method, more..., py::arg("asynchronous") = false);
}

void register_collectives(py::class_<Group, GroupHolder>& group) {
  const py::arg input("input"), output("output"), inputs("inputs"), outputs("outputs"), count("count"),
      counts("counts"), dtype("dtype"), op("op"), root("root");
  add(group, "barrier", barrier);
  add(group, "all_reduce", all_reduce, input, output, count, dtype, op);
  add(group, "all_reduce_fused", all_reduce_fused, input, output, count, dtype, op, py::arg("wire"), py::arg("scale"),
      py::arg("squared_norm"),
      "Sum or average that also casts, scales and measures. squared_norm: the address of a double, or 0.");
  add(group, "all_gather", all_gather, input, outputs, counts, dtype);
  add(group, "reduce_scatter", reduce_scatter, inputs, output, counts, dtype, op);
  add(group, "broadcast", broadcast, py::arg("data"), count, dtype, root);
  add(group, "reduce", reduce, input, output, count, dtype, op, root);
  add(group, "gather", gather, input, outputs, count, dtype, root);
  add(group, "scatter", scatter, inputs, output, count, dtype, root);
  add(group, "all_to_all", all_to_all, inputs, py::arg("input_counts"), outputs, py::arg("output_counts"), dtype);
}

// Source rank of a receive from any rank. Python keeps it alive until the work is done.
struct Source {
  int rank = any_rank;
};

void register_messages(py::module_& m, py::class_<Group, GroupHolder>& group) {
  py::class_<Source, std::shared_ptr<Source>>(m, "Source").def(py::init<>()).def_readonly("rank", &Source::rank);
  group
      .def(
          "send",
          [](Group& g, int destination, Address data, size_t count, uint32_t dtype, uint32_t tag) {
            check_rank(g, destination, "destination");
            return g.messenger().send(destination, pointer(data), MessageHeader{count, dtype_of(dtype), tag});
          },
          py::arg("destination"), py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("tag"), NoGil(),
          py::keep_alive<0, 1>())
      .def(
          "receive",
          [](Group& g, int source, Address data, size_t count, uint32_t dtype, uint32_t tag, Source& from) {
            if (source != any_rank) check_rank(g, source, "source");
            return g.messenger().receive(source, pointer(data), MessageHeader{count, dtype_of(dtype), tag}, &from.rank);
          },
          py::arg("source"), py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("tag"), py::arg("heard_from"),
          NoGil(), py::keep_alive<0, 1>());
}

void register_group(py::module_& m) {
  m.def("process_key", &process_key, NoGil());
  m.def("has_ended", &has_ended, py::arg("key"), NoGil());
  m.def("descriptor_of", &descriptor_of, py::arg("key"), py::arg("number"), NoGil());

  py::class_<Segment>(m, "Segment", "Shared memory of a group: created by one rank, opened by the others.")
      .def_static("create", &Segment::create, py::arg("bytes"))
      .def_static("open", &Segment::open, py::arg("creator"), py::arg("descriptor"), py::arg("bytes"), NoGil())
      .def_property_readonly("descriptor", &Segment::descriptor);

  py::class_<Region, std::shared_ptr<Region>>(m, "Region", py::buffer_protocol(),
                                              "Symmetric memory; the buffer is this rank's part.")
      .def_buffer([](Region& region) {
        return py::buffer_info(region.part(region.rank), 1, "B", 1, {region.bytes}, {1});
      })
      .def_property_readonly(
          "addresses",
          [](const Region& region) {
            std::vector<uintptr_t> addresses;
            for (size_t at = 0; at < region.segment.bytes(); at += region.bytes)
              addresses.push_back(reinterpret_cast<uintptr_t>(region.segment.data() + at));
            return addresses;
          },
          "Addresses of each rank's part as mapped here.");

  py::class_<Group, GroupHolder> group(m, "Group", "Ranks over one segment. Addresses are integers, counts elements.");
  group
      .def(py::init(&make_group), py::arg("name"), py::arg("rank"), py::arg("segment"), py::arg("ranks"),
           py::arg("staging_bytes"), py::arg("timeout_s"), py::arg("oversubscribed"), py::arg("labels"),
           py::arg("single_copy"), py::arg("threads"))
      .def_static("reserve", &Group::reserve, py::arg("segment"), py::arg("rank"), py::arg("world"),
                  py::arg("staging_bytes"), NoGil())
      .def_static("segment_bytes", &Group::segment_bytes, py::arg("world"), py::arg("staging_bytes"))
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("world", &Group::world)
      .def_property_readonly("calls", &Group::calls)
      .def("record_calls", &Group::record_calls, py::arg("kept"),
           "Remember the last collectives and messages from now on; returns how many were kept before.")
      .def(
          "last_calls",
          [](const Group& g) {
            py::list calls;
            for (const CallRecord& record : g.last_calls())
              calls.append(py::make_tuple(record.number, name_of(record.kind), name_of(record.dtype), record.count,
                                          record.submitted_ns, record.begun_ns, record.met_ns, record.ended_ns));
            return calls;
          },
          "The recorded collectives, oldest first: number, operation, type, elements (0 where ranks may have different\n"
          "ones), and the times of time.monotonic_ns() at which it was submitted (0 if the caller waited), began, at which\n"
          "all ranks had come, and at which it ended; 0 if it has not.")
      .def(
          "last_messages",
          [](const Group& g) {
            py::list messages;
            for (const MessageRecord& record : g.last_messages())
              messages.append(py::make_tuple(record.sent, record.peer, record.bytes, record.tag, record.posted_ns,
                                             record.ended_ns));
            return messages;
          },
          "The recorded messages, oldest first: whether sent, to or from which rank of the group, bytes, tag, and the\n"
          "times at which it was posted and ended.")
      .def(
          "waiting",
          [](const Group& g) -> std::optional<py::tuple> {
            const auto found = g.waiting();
            if (!found) return {};
            return py::make_tuple(found->call, found->seconds, found->missing);
          },
          "The call that waits for other ranks, or else the message that has waited longest: its text, for how many\n"
          "seconds, the ranks that have not come.")
      .def_property_readonly("single_copy", &Group::single_copy, "Whether ranks read one another's memory.")
      .def("rename", &Group::rename, py::arg("name"), NoGil())
      .def(
          "set_timeout", [](Group& g, double timeout_s) { g.set_timeout(seconds(timeout_s)); }, py::arg("timeout_s"))
      .def(
          "create_region",
          [](Group& g, size_t bytes) {
            std::shared_ptr<Region> region;
            g.run([&] { region = g.create_region(bytes); });
            return region;
          },
          py::arg("bytes"), NoGil())
      .def("lost_ranks", &Group::lost_ranks, "Ranks that have died or left.")
      .def("abort", &Group::abort, NoGil(), "End every call under way, on every rank, with an error.")
      .def("leave", &Group::leave, NoGil())
      .def(
          "inject_faults",
          [](Group& g, uint64_t seed, uint32_t longest_delay_us, uint64_t die_at_point, bool wait_for_death) {
            g.inject({seed, longest_delay_us, die_at_point, wait_for_death});
          },
          py::arg("seed") = 0, py::arg("longest_delay_us") = 0, py::arg("die_at_point") = 0,
          py::arg("wait_for_death") = false, NoGil(),
          "For tests: random delays at every point where ranks meet, death by SIGKILL at the n-th such point, and a\n"
          "messenger that waits for the death of a rank between its checks for messages and for lost ranks.");
  register_collectives(group);
  register_messages(m, group);
}

}  // namespace

namespace weft {

void register_shm(py::module_& m) {
  register_errors(m);
  register_reductions(m);
  register_work(m);
  register_group(m);
  register_methods(m);
}

}  // namespace weft
