// Ranks with their memory, and calls of every kind with what they must give.
#pragma once
#include <array>
#include <cstdio>
#include <cstdlib>

#include "machine.h"

using namespace weft::cuda;

inline void expect(bool holds, const std::string& otherwise) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", otherwise.c_str());
  std::fflush(stderr);
  std::_Exit(1);  // threads may still wait for each other
}

// Bytes that begin `offset` after an address that is aligned to 16, with bytes before and after that must not change.
class Buffer {
 public:
  Buffer() = default;
  Buffer(size_t bytes, size_t offset) : bytes_(bytes), offset_(offset), storage_(bytes / 16 + 4) {
    std::memset(storage_.data(), untouched, storage_.size() * sizeof(Line));
  }
  char* data() { return reinterpret_cast<char*>(storage_.data()) + 16 + offset_; }
  uintptr_t address() { return reinterpret_cast<uintptr_t>(data()); }
  size_t bytes() const { return bytes_; }
  bool surroundings_are_untouched() const {
    const char* all = reinterpret_cast<const char*>(storage_.data());
    for (size_t i = 0; i < storage_.size() * sizeof(Line); ++i)
      if ((i < 16 + offset_ || i >= 16 + offset_ + bytes_) && all[i] != untouched) return false;
    return true;
  }

 private:
  static constexpr char untouched = 0x5a;
  struct alignas(16) Line {
    char bytes[16];
  };
  size_t bytes_ = 0, offset_ = 0;
  std::vector<Line> storage_;
};

struct Shape {
  int world, blocks, threads, workspace_bytes;
  double timeout_s;
  int longest_delay_us;
  Faults faults;
};

constexpr size_t symmetric_bytes = 2048;
using Record = std::array<int64_t, 16>;

struct World {
  World(const Shape& shape, unsigned seed) : shape(shape) {
    const size_t words = first_box_word(shape.world, shape.blocks) +
                         shape.blocks * box_words(shape.world, shape.threads) + 3;
    Multicast multicast{nothing_here.data(), symmetric_bytes, {}};
    for (int r = 0; r < shape.world; ++r) {
      pads.emplace_back(words, 0);
      workspaces.emplace_back(shape.workspace_bytes, 0);
      std::memset(workspaces.back().data(), 0, shape.workspace_bytes);
      symmetric.emplace_back(symmetric_bytes, 0);
      records.push_back(std::make_unique<Record>(Record{}));
      cells.push_back(std::make_unique<int>(0));
      pad_addresses.push_back(reinterpret_cast<uintptr_t>(pads.back().data()));
      workspace_addresses.push_back(workspaces.back().address());
      multicast.parts.push_back(symmetric.back().data());
    }
    multicasts.push_back(multicast);
    for (int r = 0; r < shape.world; ++r) {
      streams.push_back(std::make_unique<Stream>(multicasts, shape.blocks, shape.threads, shape.longest_delay_us,
                                                 shape.faults, seed * 16 + r));
      ranks.push_back(std::make_unique<Ranks<Threads>>(r, pad_addresses, words, workspace_addresses,
                                                       shape.workspace_bytes,
                                                       reinterpret_cast<uintptr_t>(records[r]->data()),
                                                       shape.timeout_s, shape.blocks));
      expect(ranks.back()->load(), "the machine of the tests has multimem");
    }
  }

  uintptr_t stream(int rank) { return reinterpret_cast<uintptr_t>(streams[rank].get()); }
  // A kernel of the user's own.
  void run(int rank, std::function<void()> work) {
    streams[rank]->push([work](Here& here) { if (here.thread() == 0) work(); }, 1);
  }
  void copy(int rank, Buffer& to, uintptr_t from) {
    if (to.address() == from) return;
    char* const target = to.data();
    run(rank, [=, bytes = to.bytes()] { std::memcpy(target, reinterpret_cast<const char*>(from), bytes); });
  }
  std::vector<uintptr_t> windows() {
    std::vector<uintptr_t> addresses;
    for (Buffer& buffer : symmetric) addresses.push_back(buffer.address());
    return addresses;
  }
  void drain() {
    for (auto& stream : streams) stream->drain();
  }
  void expect_idle() {
    for (int r = 0; r < shape.world; ++r) {
      for (size_t word = 0; word < word_number(shape.world, shape.blocks, 1, 0); ++word)
        expect(pads[r][word] == 0, "a flag is not zero at the end");
      for (const int64_t field : *records[r]) expect(field == 0, "a record was left though no wait gave up");
      expect(workspaces[r].surroundings_are_untouched() && symmetric[r].surroundings_are_untouched(),
             "memory beside a workspace was written");
    }
  }

  Shape shape;
  std::vector<std::vector<uint32_t>> pads;
  std::vector<Buffer> workspaces, symmetric;
  std::vector<std::unique_ptr<Record>> records;
  std::vector<std::unique_ptr<int>> cells;  // what barriers are tried on
  std::vector<uintptr_t> pad_addresses, workspace_addresses;
  std::vector<char> nothing_here = std::vector<char>(symmetric_bytes + 16);
  std::vector<Multicast> multicasts;
  std::vector<std::unique_ptr<Ranks<Threads>>> ranks;
  std::vector<std::unique_ptr<Stream>> streams;
};

// One call on every rank. Inputs and outputs are each rank's own; what the call must give is known before it runs.
struct Trial {
  Operation operation;
  std::string dtype;
  size_t element_bytes;
  bool average;
  float scale;
  std::vector<size_t> counts;  // one for all ranks, or one for each
  size_t offset;               // of symmetric memory, in bytes
  std::vector<size_t> offsets;  // the same where each rank has its own
  size_t unit;                 // of a gathering's elements
  bool in_place;               // the destination is (a part of) the source
  size_t rows, hidden;         // of a norm
  float eps;
  std::vector<Buffer> sources, results;
  std::vector<Buffer> residuals, weights, normalised;  // of a norm, whose result is the total
  std::vector<std::vector<Buffer>> gathered;     // [rank][from]
  std::vector<std::vector<char>> expected;       // [rank]
  std::vector<int64_t> state_after;              // the record's, when the call had ended
};

using Random = std::minstd_rand;

template <class T>
T random_element(Random& random) {
  return Convert<T>::from_float((static_cast<float>(random() % 20001) - 10000.0f) / 937.0f);
}

// The contract, written plainly.
template <class T>
std::vector<char> plain_sum(const std::vector<const T*>& parts, size_t count, bool average, float scale,
                            bool rounded_first) {
  std::vector<char> bytes(count * sizeof(T));
  for (size_t i = 0; i < count; ++i) {
    float sum = Convert<T>::to_float(parts[0][i]);
    for (size_t r = 1; r < parts.size(); ++r) sum += Convert<T>::to_float(parts[r][i]);
    if (rounded_first) sum = Convert<T>::to_float(Convert<T>::from_float(sum));
    if (average) sum = sum / static_cast<float>(parts.size());
    const T result = Convert<T>::from_float(sum * scale);
    std::memcpy(bytes.data() + i * sizeof(T), &result, sizeof(T));
  }
  return bytes;
}

// The norm of a row as threads of a block make it: each its packs, then pairs of threads. Compared with fp64.
template <class T>
std::vector<char> plain_norm(const T* total, const T* weight, size_t hidden, float eps, int threads) {
  std::vector<float> squares(threads, 0.0f);
  double exact = 0;
  const auto value = [&](size_t i) { return Convert<T>::to_float(total[i]); };
  for (size_t i = 0; i < hidden; ++i) {
    squares[i / per_pack<T> % threads] += value(i) * value(i);
    exact += static_cast<double>(value(i)) * value(i);
  }
  for (size_t left = threads; left > 1; left = (left + 1) / 2)
    for (size_t i = 0; i + (left + 1) / 2 < left; ++i) squares[i] += squares[i + (left + 1) / 2];
  const float factor = 1.0f / std::sqrt(squares[0] / static_cast<float>(hidden) + eps);
  exact = 1 / std::sqrt(exact / hidden + static_cast<double>(eps));
  std::vector<char> bytes(hidden * sizeof(T));
  for (size_t i = 0; i < hidden; ++i) {
    const float scale = Convert<T>::to_float(weight[i]);
    const T result = Convert<T>::from_float(value(i) * factor * scale);
    std::memcpy(bytes.data() + i * sizeof(T), &result, sizeof(T));
    const double rounding = sizeof(T) == 4 ? 0x1p-24 : std::is_same_v<T, Float16> ? 0x1p-11 : 0x1p-8;
    const double error = std::fabs(Convert<T>::to_float(result) - value(i) * exact * scale);
    expect(error <= std::fabs(value(i) * exact * scale) * (rounding + (hidden + 8) * 0x1p-24) + 0x1p-24,
           "a norm is not that of fp64");
  }
  return bytes;
}

inline bool gathers(Operation operation) {
  return operation == Operation::all_gather || operation == Operation::all_gather_in_place ||
         operation == Operation::all_gather_by_copies;
}

// Whether sources lie in symmetric memory, and results do not.
inline bool reads_windows(Operation operation) {
  return operation == Operation::reduce_scatter_in_place || operation == Operation::all_gather_in_place ||
         operation == Operation::all_gather_by_copies;
}

// Residual and weight have the same numbers on every rank.
template <class T, class Offset>
void make_norm(Trial& trial, const World& world, Random& random, Offset offset) {
  const size_t largest = world.ranks[0]->low_latency_bytes() / sizeof(T);
  trial.hidden = 1 + random() % (random() % 2 ? std::min<size_t>(largest, 9) : largest);
  trial.rows = 1 + random() % world.ranks[0]->rms_norm_rows(trial.hidden, trial.dtype);
  trial.eps = random() % 2 ? 1e-5f : 0.25f;
  trial.counts = {trial.rows * trial.hidden};
  const size_t count = trial.counts[0];
  std::vector<T> residual(count), weight(trial.hidden);
  for (std::vector<T>* values : {&residual, &weight})
    for (T& value : *values) value = random_element<T>(random);
  const auto buffer = [&](size_t elements) { return Buffer(elements * sizeof(T), offset(sizeof(T))); };
  for (int r = 0; r < world.shape.world; ++r) {
    trial.sources.push_back(buffer(count));
    for (size_t i = 0; i < count; ++i) reinterpret_cast<T*>(trial.sources[r].data())[i] = random_element<T>(random);
    trial.residuals.push_back(buffer(count));
    std::memcpy(trial.residuals[r].data(), residual.data(), count * sizeof(T));
    trial.weights.push_back(buffer(trial.hidden));
    std::memcpy(trial.weights[r].data(), weight.data(), trial.hidden * sizeof(T));
    trial.results.push_back(buffer(count));
    trial.normalised.push_back(buffer(count));
  }
  std::vector<const T*> inputs;
  for (Buffer& source : trial.sources) inputs.push_back(reinterpret_cast<const T*>(source.data()));
  std::vector<char> expected = plain_sum<T>(inputs, count, false, 1.0f, false);
  for (size_t i = 0; i < count; ++i) {
    T& total = reinterpret_cast<T*>(expected.data())[i];
    total = Convert<T>::from_float(Convert<T>::to_float(residual[i]) + Convert<T>::to_float(total));
  }
  for (size_t row = 0; row < trial.rows; ++row) {
    const T* const total = reinterpret_cast<const T*>(expected.data()) + row * trial.hidden;
    const auto norm = plain_norm<T>(total, weight.data(), trial.hidden, trial.eps, world.shape.threads);
    expected.insert(expected.end(), norm.begin(), norm.end());
  }
  trial.expected.assign(world.shape.world, expected);
}

inline std::unique_ptr<Trial> make_trial(World& world, Operation operation, Random& random, size_t most) {
  auto trial = std::make_unique<Trial>();
  const int ranks = world.shape.world;
  const char* dtypes[] = {"float32", "float16", "bfloat16"};
  trial->operation = operation;
  trial->dtype = dtypes[random() % 3];
  trial->average = random() % 2;
  trial->scale = random() % 2 ? 1.0f : 0.37f;
  trial->in_place = random() % 3 == 0;
  trial->state_after.assign(ranks, 0);
  trial->offset = 0;
  if (operation == Operation::barrier) return trial;

  const auto offset = [&](size_t unit) { return random() % 2 ? 0 : random() % (16 / unit) * unit; };
  if (gathers(operation)) {
    const size_t unit = trial->unit = size_t{1} << random() % 3;
    if (reads_windows(operation)) most = std::min(most, symmetric_bytes - 64);
    for (int r = 0; r < ranks; ++r) trial->counts.push_back(random() % 4 == 0 ? 0 : random() % (most / unit) * unit);
    for (int r = 0; r < ranks; ++r) trial->offsets.push_back(offset(unit));
    for (int r = 0; r < ranks; ++r) {
      trial->sources.emplace_back(trial->counts[r], offset(unit));
      for (size_t i = 0; i < trial->counts[r]; ++i) trial->sources[r].data()[i] = static_cast<char>(random());
      trial->gathered.emplace_back();
      for (int from = 0; from < ranks; ++from) trial->gathered[r].emplace_back(trial->counts[from], offset(unit));
    }
    for (int r = 0; r < ranks; ++r) {
      std::vector<char> all;
      for (int from = 0; from < ranks; ++from)
        all.insert(all.end(), trial->sources[from].data(), trial->sources[from].data() + trial->counts[from]);
      trial->expected.push_back(all);
      if (trial->in_place) std::memcpy(trial->gathered[r][r].data(), trial->sources[r].data(), trial->counts[r]);
    }
    return trial;
  }

  with_element<Threads>("a trial", trial->dtype, [&](auto zero, int) {
    using T = decltype(zero);
    trial->element_bytes = sizeof(T);
    const bool multimem = operation == Operation::all_reduce_multimem;
    const bool symmetric = multimem || operation == Operation::all_reduce_in_place;
    const bool scattered =
        operation == Operation::reduce_scatter || operation == Operation::reduce_scatter_in_place;
    if (reads_windows(operation)) most = std::min(most, (symmetric_bytes - 64) / ranks);
    if (operation == Operation::all_reduce_rms_norm) {
      make_norm<T>(*trial, world, random, offset);
      return;
    }
    if (operation == Operation::all_reduce_low_latency) most = std::min(most, world.ranks[0]->low_latency_bytes() + 1);
    size_t total = 0;
    for (int r = 0; r < (scattered ? ranks : 1); ++r) {
      size_t count = random() % 8 == 0 ? random() % 2 : random() % (most / sizeof(T));
      if (symmetric) count = std::min(count, symmetric_bytes / sizeof(T) - 32);
      if (multimem) count = count / per_pack<T> * per_pack<T>;
      trial->counts.push_back(count);
      total += count;
    }
    for (int r = 0; r < ranks; ++r) trial->offsets.push_back(offset(sizeof(T)));
    if (symmetric) trial->offset = multimem ? random() % 4 * 16 : random() % 16 * sizeof(T);
    std::vector<const T*> inputs;
    for (int r = 0; r < ranks; ++r) {
      trial->sources.emplace_back(total * sizeof(T), offset(sizeof(T)));
      T* values = reinterpret_cast<T*>(trial->sources[r].data());
      for (size_t i = 0; i < total; ++i) values[i] = random_element<T>(random);
      trial->results.emplace_back((scattered ? trial->counts[r] : total) * sizeof(T), offset(sizeof(T)));
    }
    for (int r = 0; r < ranks; ++r) inputs.push_back(reinterpret_cast<const T*>(trial->sources[r].data()));
    for (int r = 0; r < ranks; ++r) {
      const size_t count = trial->counts[scattered ? r : 0];
      trial->expected.push_back(plain_sum<T>(inputs, count, trial->average, trial->scale, multimem));
      if (scattered)
        for (const T*& input : inputs) input += count;
    }
  });
  return trial;
}

// Brings the source to symmetric memory if the call wants it there. Returns where it will lie.
inline uintptr_t put_source(World& world, Trial& trial, int rank) {
  Buffer& source = trial.sources[rank];
  if (!reads_windows(trial.operation)) return source.address();
  char *to = world.symmetric[rank].data() + trial.offsets[rank], *from = source.data();
  world.run(rank, [=, bytes = source.bytes()] { std::memcpy(to, from, bytes); });
  return reinterpret_cast<uintptr_t>(to);
}

// Puts the trial on one rank's stream.
inline void enqueue(World& world, Trial& trial, int rank) {
  const Ranks<Threads>& ranks = *world.ranks[rank];
  const uintptr_t stream = world.stream(rank);
  const auto source = [&] { return trial.sources[rank].address(); };
  switch (trial.operation) {
    case Operation::barrier: {
      // Everybody writes, everybody meets, everybody sees what all wrote, and meets again before the next write.
      world.run(rank, [&world, rank] { ++*world.cells[rank]; });
      ranks.barrier(stream);
      Trial* mine = &trial;
      world.run(rank, [&world, rank, mine] {
        for (auto& cell : world.cells)  // more than this rank's only where a peer has given up and gone on
          if (*cell < *world.cells[rank] && (*world.records[rank])[0] == 0) mine->state_after[rank] = -1;
      });
      ranks.barrier(stream);
      break;
    }
    case Operation::all_reduce_low_latency:
    case Operation::all_reduce_one_shot:
    case Operation::all_reduce_two_shot: {
      const std::string name = name_of(trial.operation);  // "all_reduce (one_shot)"
      const std::string algorithm = name.substr(name.find('(') + 1, name.size() - name.find('(') - 2);
      ranks.all_reduce(source(), trial.in_place ? source() : trial.results[rank].address(), trial.counts[0],
                       trial.dtype, trial.average, trial.scale, algorithm, stream);
      break;
    }
    case Operation::all_reduce_rms_norm: {
      const uintptr_t normalised = (trial.in_place ? trial.sources : trial.normalised)[rank].address();
      const uintptr_t total = (trial.in_place ? trial.residuals : trial.results)[rank].address();
      ranks.all_reduce_rms_norm(source(), trial.residuals[rank].address(), trial.weights[rank].address(), normalised,
                                total, trial.rows, trial.hidden, trial.dtype, trial.eps, stream);
      break;
    }
    case Operation::all_reduce_in_place:
    case Operation::all_reduce_multimem: {
      char* own = world.symmetric[rank].data() + trial.offset;
      char *from = trial.sources[rank].data(), *to = trial.results[rank].data();
      const size_t bytes = trial.sources[rank].bytes();
      world.run(rank, [=] { std::memcpy(own, from, bytes); });
      if (trial.operation == Operation::all_reduce_in_place) {
        std::vector<uintptr_t> addresses = world.windows();
        for (uintptr_t& address : addresses) address += trial.offset;
        ranks.all_reduce_in_place(addresses, trial.counts[0], trial.dtype, trial.average, trial.scale, stream,
                                  trial.offset);
      } else {
        ranks.all_reduce_multimem(reinterpret_cast<uintptr_t>(world.multicasts[0].address) + trial.offset,
                                  trial.counts[0], trial.dtype, trial.average, trial.scale, stream, trial.offset,
                                  reinterpret_cast<uintptr_t>(own));
      }
      world.run(rank, [=] { std::memcpy(to, own, bytes); });
      break;
    }
    case Operation::reduce_scatter:
    case Operation::reduce_scatter_in_place: {
      size_t before = 0;
      for (int r = 0; r < rank; ++r) before += trial.counts[r] * trial.element_bytes;
      const uintptr_t from = put_source(world, trial, rank);
      const uintptr_t to = trial.in_place ? from + before : trial.results[rank].address();
      if (trial.operation == Operation::reduce_scatter)
        ranks.reduce_scatter(from, to, trial.counts, trial.dtype, trial.average, trial.scale, stream);
      else
        ranks.reduce_scatter_in_place(world.windows(), trial.offsets[rank], to, trial.counts, trial.dtype,
                                      trial.average, trial.scale, stream, 1);
      world.copy(rank, trial.results[rank], to);
      break;
    }
    case Operation::all_gather:
    case Operation::all_gather_in_place:
    case Operation::all_gather_by_copies: {
      std::vector<uintptr_t> destinations, sources;
      for (Buffer& buffer : trial.gathered[rank]) destinations.push_back(buffer.address());
      const bool staged = trial.operation == Operation::all_gather;
      const uintptr_t from = staged && trial.in_place ? destinations[rank] : put_source(world, trial, rank);
      if (trial.in_place) destinations[rank] = from;
      for (int r = 0; r < world.shape.world; ++r) sources.push_back(world.windows()[r] + trial.offsets[r]);
      if (staged)
        ranks.all_gather(from, destinations, trial.counts, stream);
      else if (trial.operation == Operation::all_gather_in_place)
        ranks.all_gather_in_place(world.windows(), trial.offsets[rank], destinations, trial.counts, trial.unit, stream,
                                  1);
      else
        ranks.all_gather_by_copies(sources, destinations, trial.counts, stream, 1);
      world.copy(rank, trial.gathered[rank][rank], destinations[rank]);
      break;
    }
  }
  Trial* mine = &trial;
  Record* record = world.records[rank].get();
  world.run(rank, [=] {
    if (mine->state_after[rank] == 0) mine->state_after[rank] = __atomic_load_n(record->data(), __ATOMIC_ACQUIRE);
  });
}

// The bytes that the rank got, wherever they went.
inline std::vector<char> received(Trial& trial, int rank) {
  const bool reduced = trial.operation == Operation::all_reduce_low_latency ||
                       trial.operation == Operation::all_reduce_one_shot ||
                       trial.operation == Operation::all_reduce_two_shot;
  std::vector<char> bytes;
  const auto append = [&](Buffer& buffer) {
    expect(buffer.surroundings_are_untouched(), "memory beside a result was written");
    bytes.insert(bytes.end(), buffer.data(), buffer.data() + buffer.bytes());
  };
  if (gathers(trial.operation))
    for (Buffer& buffer : trial.gathered[rank]) append(buffer);
  else if (trial.operation == Operation::all_reduce_rms_norm) {
    append((trial.in_place ? trial.residuals : trial.results)[rank]);
    append((trial.in_place ? trial.sources : trial.normalised)[rank]);
  } else if (trial.operation != Operation::barrier)
    append(reduced && trial.in_place ? trial.sources[rank] : trial.results[rank]);
  return bytes;
}

inline std::string words(const Trial& trial, int rank) {
  std::string text = name_of(trial.operation) + " of " + trial.dtype + " on rank " + std::to_string(rank) + ", counts";
  for (const size_t count : trial.counts) text += " " + std::to_string(count);
  return text;
}

// How many of the rank's bytes are right; all others must be spoiled, and any others only where a wait gave up.
inline size_t check(Trial& trial, int rank, bool gave_up) {
  expect(trial.state_after[rank] != -1, "a barrier let a rank through too early");
  if (trial.operation == Operation::barrier) return 0;
  const std::vector<char> got = received(trial, rank);
  const std::vector<char>& wanted = trial.expected[rank];
  expect(got.size() == wanted.size(), "sizes differ in the test itself");
  size_t right = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == wanted[i])
      ++right;
    else
      expect(gave_up && got[i] == static_cast<char>(0xff), "byte " + std::to_string(i) + " of " + words(trial, rank));
  }
  return right;
}

// Whether a rank needs no more than what its peers have sent before they wait.
inline bool has_boxes(Operation operation) {
  return operation == Operation::all_reduce_low_latency || operation == Operation::all_reduce_rms_norm;
}

inline const Operation all_operations[] = {
    Operation::barrier,           Operation::all_reduce_one_shot, Operation::all_reduce_two_shot,
    Operation::all_reduce_in_place, Operation::all_reduce_multimem, Operation::reduce_scatter,
    Operation::all_gather,        Operation::reduce_scatter_in_place, Operation::all_gather_in_place,
    Operation::all_gather_by_copies, Operation::all_reduce_low_latency, Operation::all_reduce_rms_norm,
};
