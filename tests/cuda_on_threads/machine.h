// A machine that runs kernels on threads of the CPU: every rank has a stream, every thread of a block is a thread.
//
// Flags are atomic variables and everything else is plain memory, so that a thread sanitizer sees each access that no
// flag orders. Delays are put wherever ranks meet.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "conversions.h"
#include "launches.h"

// What a test breaks on purpose, to see that it would be found.
struct Faults {
  int left_out = 0;           // bit m: meeting m of every call does not take place
  bool relaxed = false;       // a flag does not publish what was written before it
  bool marks_unseen = false;  // a broken rank begins the next call as if nothing were wrong
};

struct Barrier {
  explicit Barrier(int threads) { pthread_barrier_init(&barrier, nullptr, threads); }
  ~Barrier() { pthread_barrier_destroy(&barrier); }
  void wait() { pthread_barrier_wait(&barrier); }
  pthread_barrier_t barrier;
};

// What the threads of a block share.
struct Block {
  explicit Block(int threads) : barrier(threads), numbers(threads) {}
  Barrier barrier;
  const void* shared[weft::cuda::most_ranks] = {};
  std::vector<float> numbers;
  std::atomic<int> against[3] = {};  // one for each of three votes in a row: see Here::all
};

// Memory that a multicast address stands for: one part on each rank. The address itself is never accessed.
struct Multicast {
  const char* address;
  size_t bytes;
  std::vector<char*> parts;
};

struct Stream;

struct Here {
  static constexpr bool has_multimem = true;

  Here(Stream& stream, int thread, int block);

  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int block() const { return block_; }
  int blocks() const { return blocks_; }
  bool all(bool mine);
  const void** shared() const;
  float* shared_numbers() const;
  void prefetch(const void*) const {}
  uint64_t now_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void set(uint32_t* flag, uint32_t value);
  uint32_t take(uint32_t* flag, uint32_t value);
  uint32_t read(const uint32_t* flag) const;
  void write(uint32_t* flag, uint32_t value) const { __atomic_store_n(flag, value, __ATOMIC_RELAXED); }
  void write_line(uint32_t* to, const weft::cuda::Packed<uint32_t>& line) {
    for (int k = 0; k < 4; ++k) {
      dawdle();
      __atomic_store_n(to + k, line.values[k], __ATOMIC_RELAXED);
    }
  }
  weft::cuda::Packed<uint32_t> read_line(const uint32_t* from) const {
    weft::cuda::Packed<uint32_t> line;
    for (int k = 0; k < 4; ++k) line.values[k] = __atomic_load_n(from + k, __ATOMIC_RELAXED);
    if (line.values[0] == 0) sched_yield();
    return line;
  }
  int64_t read(const int64_t* field) const { return __atomic_load_n(field, __ATOMIC_ACQUIRE); }
  void write(int64_t* field, int64_t value) const { __atomic_store_n(field, value, __ATOMIC_RELAXED); }
  bool claim(int64_t* field) const {
    int64_t nobody = 0;
    return __atomic_compare_exchange_n(field, &nobody, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  void publish(int64_t* field, int64_t value) const { __atomic_store_n(field, value, __ATOMIC_RELEASE); }
  void between_aliases() const {}
  // Like the switch: a sum that is rounded to T; the order is the ranks', since some order must be.
  template <class T>
  weft::cuda::Packed<T> load_sum(const T* multicast) const;
  template <class T>
  void store_to_all(T* multicast, const weft::cuda::Packed<T>& pack) const;

  void dawdle();

  Stream& stream_;
  int thread_, threads_, block_, blocks_ = 0;
  unsigned votes_ = 0;
  std::minstd_rand random_;
};

// Launches of one rank, in order: each begins when the one before has ended.
struct Stream {
  Stream(const std::vector<Multicast>& multicasts, int blocks, int threads, int longest_delay_us, Faults faults,
         unsigned seed)
      : multicasts(multicasts), threads(threads), longest_delay_us(longest_delay_us), faults(faults), seed(seed),
        all_threads(blocks * threads) {
    for (int b = 0; b < blocks; ++b) shared.push_back(std::make_unique<Block>(threads));
    for (int b = 0; b < blocks; ++b)
      for (int t = 0; t < threads; ++t) workers.emplace_back([this, b, t] { work(b, t); });
  }
  ~Stream() {
    push({}, 0);  // nothing to run: the end
    for (std::thread& worker : workers) worker.join();
  }

  void push(std::function<void(Here&)> body, int blocks) {
    const std::lock_guard lock(mutex);
    launches.push_back(std::make_shared<Launch>(Launch{std::move(body), blocks}));
    changed.notify_all();
  }

  void drain() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done == launches.size(); });
  }

  struct Launch {
    std::function<void(Here&)> body;
    int blocks;
  };

  void work(int block, int thread) {
    Here here(*this, thread, block);
    for (size_t next = 0;; ++next) {
      std::shared_ptr<Launch> launch;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return next < launches.size(); });
        launch = launches[next];
      }
      if (!launch->body) return;
      here.blocks_ = launch->blocks;
      if (block < launch->blocks) {
        here.dawdle();
        launch->body(here);
      }
      all_threads.wait();
      if (block == 0 && thread == 0) {
        const std::lock_guard lock(mutex);
        ++done;
        changed.notify_all();
      }
    }
  }

  const std::vector<Multicast>& multicasts;
  int threads, longest_delay_us;
  Faults faults;
  unsigned seed;
  Barrier all_threads;
  std::vector<std::unique_ptr<Block>> shared;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Launch>> launches;
  size_t done = 0;
  unsigned sleeps_after_vote = ~0u, sleep_us = 0;  // a long stop at one place
  std::vector<std::thread> workers;
};

inline Here::Here(Stream& stream, int thread, int block)
    : stream_(stream), thread_(thread), threads_(stream.threads), block_(block),
      random_(stream.seed * 1000 + block * 100 + thread + 1) {}

inline const void** Here::shared() const { return stream_.shared[block_]->shared; }
inline float* Here::shared_numbers() const { return stream_.shared[block_]->numbers.data(); }

inline void Here::dawdle() {
  if (stream_.longest_delay_us > 0 && random_() % 8 == 0) usleep(random_() % stream_.longest_delay_us);
}

// Three counters take turns, so that one is cleared only when all have read it: after the barrier of the next vote.
inline bool Here::all(bool mine) {
  dawdle();
  Block& block = *stream_.shared[block_];
  const unsigned vote = votes_++;
  if (!mine) ++block.against[vote % 3];
  block.barrier.wait();
  const bool agreed = block.against[vote % 3] == 0;
  if (thread_ == 0) block.against[(vote + 2) % 3] = 0;
  if (vote == stream_.sleeps_after_vote) usleep(stream_.sleep_us);
  return agreed;
}

inline void Here::set(uint32_t* flag, uint32_t value) {
  if (stream_.faults.left_out >> (value & 3) & 1) return;
  dawdle();
  const bool was_free = (stream_.faults.relaxed ? __atomic_exchange_n(flag, value, __ATOMIC_RELAXED)
                                                : __atomic_exchange_n(flag, value, __ATOMIC_RELEASE)) == 0;
  if (was_free || stream_.faults.left_out != 0 || stream_.faults.marks_unseen) return;
  std::fprintf(stderr, "wrong: a flag was set again before its owner had taken it\n");
  std::_Exit(1);
}

inline uint32_t Here::take(uint32_t* flag, uint32_t value) {
  if (stream_.faults.left_out >> (value & 3) & 1) return value;
  dawdle();
  const uint32_t seen = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
  if (seen == value)
    __atomic_store_n(flag, 0, __ATOMIC_RELAXED);
  else
    sched_yield();
  return seen;
}

inline uint32_t Here::read(const uint32_t* flag) const {
  return stream_.faults.marks_unseen ? 0 : __atomic_load_n(flag, __ATOMIC_RELAXED);
}

template <class T, class Then>
void for_each_part(const std::vector<Multicast>& multicasts, const T* address, Then then) {
  const char* const at = reinterpret_cast<const char*>(address);
  for (const Multicast& multicast : multicasts)
    if (at >= multicast.address && at < multicast.address + multicast.bytes)
      for (char* part : multicast.parts) then(reinterpret_cast<T*>(part + (at - multicast.address)));
}

template <class T>
weft::cuda::Packed<T> Here::load_sum(const T* multicast) const {
  using Convert = weft::cuda::Convert<T>;
  float sums[weft::cuda::per_pack<T>] = {};
  for_each_part(stream_.multicasts, multicast, [&](const T* part) {
    for (int k = 0; k < weft::cuda::per_pack<T>; ++k) sums[k] += Convert::to_float(part[k]);
  });
  weft::cuda::Packed<T> result;
  for (int k = 0; k < weft::cuda::per_pack<T>; ++k) result.values[k] = Convert::from_float(sums[k]);
  return result;
}

template <class T>
void Here::store_to_all(T* multicast, const weft::cuda::Packed<T>& pack) const {
  for_each_part(stream_.multicasts, multicast, [&](T* part) {
    for (int k = 0; k < weft::cuda::per_pack<T>; ++k) part[k] = pack.values[k];
  });
}

// The stream's handle is its address. The threads of a block are the stream's; `threads` only says how calls are cut.
struct Threads {
  using float16 = Float16;
  using bfloat16 = BFloat16;
  static constexpr int threads = 4;

  template <class Body>
  inline static std::atomic<bool> loaded = false;

  template <class Body>
  static int load(const std::string&) {
    loaded<Body> = true;
    return 90;
  }
  template <class Body>
  static void launch(const std::string& operation, const Body& body, int blocks, uintptr_t stream) {
    if (!loaded<Body>) throw std::logic_error(operation + " is launched before it was loaded");
    reinterpret_cast<Stream*>(stream)->push([body](Here& here) { body(here); }, blocks);
  }
  static void copy(const std::string&, uintptr_t to, uintptr_t from, size_t bytes, uintptr_t stream) {
    const auto copied = [=](Here& here) {
      if (here.thread() == 0) std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    };
    reinterpret_cast<Stream*>(stream)->push(copied, 1);
  }
};
