// Collectives over the memory of peers: the launches of one rank's host on its device.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace weft::cuda {

struct Group;
struct Call;
struct Epilogue;
struct Window;
enum class Operation : int;

// Machine launches bodies (bodies.h): a GPU here, threads of the CPU in the tests.
//
// Every method but `load` puts one launch on the stream, or one for each piece that fits the workspace. It does not
// allocate, wait or count, so a CUDA graph can capture and replay it. All ranks make the same calls in the same order,
// each rank on one stream or ordered by events. Every sum but all_reduce_multimem's has the bits of rank_order_sum.
template <class Machine>
class Ranks {
 public:
  // pads[r] and workspace[r] are rank r's memory as mapped here, aligned to 16 bytes; pads are zero. record: 16 int64 in host memory, zero,
  // which the device writes to. blocks: the largest number in a launch, each with flags for each rank.
  Ranks(int rank, const std::vector<uintptr_t>& pads, size_t pad_words, const std::vector<uintptr_t>& workspace,
        size_t workspace_bytes, uintptr_t record, double timeout_s, int blocks);
  ~Ranks();

  // Loads every kernel onto the current device, and throws if it cannot. A load may wait for kernels that run, which
  // may wait for a peer: call this before the first launch. Returns whether all_reduce_multimem runs on the device.
  bool load() const;

  // The largest tensor of the algorithm "low_latency", for which the pads need room behind the flags (boxes.h).
  size_t low_latency_bytes() const;

  // The most rows of all_reduce_rms_norm, each of `hidden` elements; 0 if a row does not fit the boxes.
  size_t rms_norm_rows(size_t hidden, const std::string& dtype) const;

  // Numbers of the words of this rank's pad that are not 0 once a wait of the rank has given up.
  std::vector<size_t> marks() const;

  void barrier(uintptr_t stream) const;
  // Every sum is divided by the number of ranks if `average`, then multiplied by the scale, then rounded.
  void all_reduce(uintptr_t source, uintptr_t destination, size_t count, const std::string& dtype, bool average,
                  float scale, const std::string& algorithm, uintptr_t stream) const;
  // An all_reduce of `partial`, an addition of `residual` to `total`, and the RMS norm of that, of `rows` rows of `hidden`
  // elements. Results may lie where inputs do. The norm sums in an order of its own, the same on every rank.
  void all_reduce_rms_norm(uintptr_t partial, uintptr_t residual, uintptr_t weight, uintptr_t normalised,
                           uintptr_t total, size_t rows, size_t hidden, const std::string& dtype, float eps,
                           uintptr_t stream) const;
  void all_reduce_in_place(const std::vector<uintptr_t>& addresses, size_t count, const std::string& dtype,
                           bool average, float scale, uintptr_t stream, size_t offset) const;
  void all_reduce_multimem(uintptr_t multicast, size_t count, const std::string& dtype, bool average, float scale,
                           uintptr_t stream, size_t offset, uintptr_t own) const;
  void reduce_scatter(uintptr_t source, uintptr_t destination, const std::vector<size_t>& counts,
                      const std::string& dtype, bool average, float scale, uintptr_t stream) const;
  void all_gather(uintptr_t source, const std::vector<uintptr_t>& destinations, const std::vector<size_t>& bytes,
                  uintptr_t stream) const;

  // The same for sources in symmetric memory, which peers read where they lie. window[r]: rank r's part as mapped here.
  // offset: of this rank's source there, in bytes; each rank has its own. number: of the window, equal on all ranks.
  void reduce_scatter_in_place(const std::vector<uintptr_t>& window, size_t offset, uintptr_t destination,
                               const std::vector<size_t>& counts, const std::string& dtype, bool average, float scale,
                               uintptr_t stream, size_t number) const;
  void all_gather_in_place(const std::vector<uintptr_t>& window, size_t offset,
                           const std::vector<uintptr_t>& destinations, const std::vector<size_t>& bytes, size_t unit,
                           uintptr_t stream, size_t number) const;
  // By copy engines, which leave the multiprocessors free: a barrier, a copy from each rank, and two meetings.
  // sources[r]: rank r's source as mapped here. number: of the window and its place there, equal on all ranks.
  void all_gather_by_copies(const std::vector<uintptr_t>& sources, const std::vector<uintptr_t>& destinations,
                            const std::vector<size_t>& bytes, uintptr_t stream, size_t number) const;

 private:
  // Returns the operation with a hash of all that the ranks must agree on, including counts of each rank and this object's
  // parameters.
  Call sign(Operation operation, std::vector<uint64_t> agreed, const std::vector<size_t>& counts = {}) const;
  // Launches a body on as many blocks as have work on `count` elements; the same on every rank, because counts are.
  template <class T, class Body>
  void launch(const Body& body, size_t count, uintptr_t stream) const;
  Epilogue epilogue(bool average, float scale) const;
  Window window_at(const std::vector<uintptr_t>& window, size_t offset, size_t alignment) const;

  std::unique_ptr<Group> group_;
  size_t workspace_bytes_;
};

}  // namespace weft::cuda
