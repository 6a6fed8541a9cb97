// Runs the collectives' kernels on threads of the CPU. Prints what it saw; leaves with 1 at the first wrong result.

#include "world.h"

namespace {

void conversions_are_right() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float a = Convert<Float16>::to_float({half}), b = Convert<BFloat16>::to_float({half});
    expect(std::isnan(a) || Convert<Float16>::from_float(a).bits == half, "a float16 does not come back");
    expect(std::isnan(b) || Convert<BFloat16>::from_float(b).bits == half, "a bfloat16 does not come back");
    // Half way to the next one: to the even one of the two.
    if ((bits & 0x7fff) >= 0x7bff || (bits & 0x8000)) continue;
    const uint16_t next = half + 1, even = half & 1 ? next : half;
    const float middle = a + (Convert<Float16>::to_float({next}) - a) / 2;
    expect(Convert<Float16>::from_float(middle).bits == even, "a float16 is not rounded to even");
    expect(Convert<Float16>::from_float(std::nextafter(middle, INFINITY)).bits == next, "a float16 is rounded down");
  }
}

// Random calls back to back, with no other order than each rank's stream.
void random_calls(unsigned seed, int rounds, int calls) {
  for (int round = 0; round < rounds; ++round) {
    Random random(seed * 1000 + round + 1);
    random.discard(10);
    const int ranks = 2 + random() % 4;
    const Shape shape{ranks,
                      static_cast<int>(1 + random() % 3),
                      static_cast<int>(4 + random() % 5),
                      static_cast<int>(16 * (ranks + random() % 60)),
                      60,
                      300,
                      {}};
    World world(shape, random());
    std::vector<std::unique_ptr<Trial>> trials;
    for (int call = 0; call < calls; ++call) {
      const Operation operation = all_operations[random() % std::size(all_operations)];
      trials.push_back(make_trial(world, operation, random, 1200));
      const int first = random() % ranks;
      for (int r = 0; r < ranks; ++r) enqueue(world, *trials.back(), (first + r) % ranks);
    }
    world.drain();
    for (auto& trial : trials)
      for (int r = 0; r < ranks; ++r) check(*trial, r, false);
    world.expect_idle();
  }
  std::printf("%d rounds of %d calls\n", rounds, calls);
}

// Sums with a norm and small sums in turns, which share their boxes, in worlds of any number of blocks.
void norms(int ranks, int rounds) {
  size_t longer = 0;  // rows that take the boxes of several blocks
  for (int round = 0; round < rounds; ++round) {
    Random random(ranks * 1000 + round + 1);
    random.discard(10);
    World world({ranks, 1 + round % 4, static_cast<int>(4 + random() % 5), 16 * (ranks + 16), 60, 300, {}}, random());
    std::vector<std::unique_ptr<Trial>> trials;
    for (int call = 0; call < 20; ++call) {
      const Operation small = random() % 4 ? Operation::all_reduce_rms_norm : Operation::all_reduce_low_latency;
      trials.push_back(make_trial(world, small, random, 1200));
      const Trial& trial = *trials.back();
      const size_t row_bytes = trial.hidden * trial.element_bytes;
      longer += small == Operation::all_reduce_rms_norm && row_bytes > 16u * world.shape.threads;
      for (int r = 0; r < ranks; ++r) enqueue(world, *trials.back(), r);
    }
    world.drain();
    for (auto& trial : trials)
      for (int r = 0; r < ranks; ++r) check(*trial, r, false);
    world.expect_idle();
  }
  std::printf("%d rounds, %s\n", rounds, longer > 0 ? "with long rows" : "without long rows");
}

// "23": bits 2 and 3.
Faults without_meetings(const std::string& digits) {
  Faults faults;
  for (const char digit : digits) faults.left_out |= 1 << (digit - '0');
  return faults;
}

// One operation again and again, with a fault: for a thread sanitizer to find. It does so in most worlds, and ends the
// program then.
void faulty(const std::string& name, Faults faults) {
  constexpr unsigned worlds = 30;
  for (const Operation operation : all_operations) {
    if (name_of(operation) != name) continue;
    for (unsigned seed = 1; seed <= worlds; ++seed) {
      World world({3, 2, 4, 512, 60, 300, faults}, seed);
      Random random(seed);
      std::vector<std::unique_ptr<Trial>> trials;
      for (int call = 0; call < 10; ++call) {
        trials.push_back(make_trial(world, operation, random, 500));
        for (int r = 0; r < 3; ++r) enqueue(world, *trials.back(), r);
      }
      world.drain();
    }
    std::printf("%s ran, and its fault was not found\n", name.c_str());
    return;
  }
  expect(false, "no operation is called " + name);
}

void print_record(const Record& record) {
  for (int field = 0; field < 8; ++field) std::printf("%lld ", static_cast<long long>(record[field]));
  std::printf("\n");
}

// Two of three ranks call, each operation in a world of its own. Prints the record of rank 0, a line for each.
void missing_rank(Faults faults) {
  for (const Operation operation : all_operations) {
    World world({3, 2, 4, 512, 0.2, 0, faults}, 1);
    Random random(7);
    auto trial = make_trial(world, operation, random, 500);
    while (std::any_of(trial->counts.begin(), trial->counts.end(), [](size_t count) { return count < 16; }))
      trial = make_trial(world, operation, random, 500);
    const auto start = std::chrono::steady_clock::now();
    for (int r = 0; r < 2; ++r) enqueue(world, *trial, r);
    for (int r = 0; r < 2; ++r) world.streams[r]->drain();
    // A later call ends at once. It leaves staging memory alone: a peer may still be reading what is there.
    Buffer staged = world.workspaces[0];
    auto later = make_trial(world, Operation::all_reduce_two_shot, random, 500);
    for (int r = 0; r < 2; ++r) enqueue(world, *later, r);
    for (int r = 0; r < 2; ++r) world.streams[r]->drain();
    expect(std::memcmp(staged.data(), world.workspaces[0].data(), staged.bytes()) == 0,
           "a call after the one that gave up has changed staging memory");
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    expect(seconds < 3, "the ranks that were there took " + std::to_string(seconds) + " s to end");
    // The rank that was missing comes at last.
    enqueue(world, *trial, 2);
    world.streams[2]->drain();
    for (int r = 0; r < 3; ++r) {
      if (r == 2 && has_boxes(operation)) {  // it needs only what the others sent before
        check(*trial, r, false);
        continue;
      }
      expect((*world.records[r])[0] == 1, "rank " + std::to_string(r) + " left no record");
      if (operation == Operation::barrier) continue;
      for (const char byte : received(*trial, r)) {
        const bool own = gathers(operation);  // a rank's own part needs no other rank
        expect(byte == static_cast<char>(0xff) || own, "a result of " + words(*trial, r) + " is not NaN");
      }
    }
    for (int r = 0; r < 2; ++r)
      for (const char byte : received(*later, r)) expect(byte == static_cast<char>(0xff), "a later result is not NaN");
    print_record(*world.records[0]);
  }
}

// Rank 1 calls something else than ranks 0 and 2. Prints the three records.
void different_calls() {
  World world({3, 2, 4, 512, 30, 0, {}}, 1);
  std::vector<float> values(3 * 64, 1.0f);
  const auto address = [&](int r) { return reinterpret_cast<uintptr_t>(values.data() + 64 * r); };
  for (int r = 0; r < 3; ++r)
    world.ranks[r]->all_reduce(address(r), address(r), r == 1 ? 60 : 64, "float32", false, 1.0f, "one_shot",
                               world.stream(r));
  world.drain();
  for (int r = 0; r < 3; ++r) print_record(*world.records[r]);
}

// Words of ones alone, which are NaN: a rank that has sent them is not waited for.
void all_ones() {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    World world({2, 1, 4, 512, 2, 0, {}}, 1);
    std::vector<uint32_t> values(2 * 16, ~0u);
    for (int r = 0; r < 2; ++r) {
      const auto address = reinterpret_cast<uintptr_t>(values.data() + 16 * r);
      world.ranks[r]->all_reduce(address, address, 14, dtype, false, 1.0f, "low_latency", world.stream(r));
    }
    world.drain();
    world.expect_idle();
    with_element<Threads>("all ones", dtype, [&](auto zero, int) {
      using T = decltype(zero);
      for (int r = 0; r < 2; ++r)
        for (int i = 0; i < 14; ++i)
          expect(std::isnan(Convert<T>::to_float(reinterpret_cast<const T*>(values.data() + 16 * r)[i])), "not NaN");
    });
  }
}

// The host wants a rank that waits to give up, and says so in its record.
void stopped() {
  World world({2, 1, 4, 512, 60, 0, {}}, 1);
  world.ranks[0]->barrier(world.stream(0));
  usleep(50'000);
  __atomic_store_n(&(*world.records[0])[4], int64_t{1}, __ATOMIC_RELAXED);
  __atomic_store_n(&(*world.records[0])[0], int64_t{3}, __ATOMIC_RELEASE);
  world.streams[0]->drain();
  print_record(*world.records[0]);
}

// In symmetric memory, rank 0 gives up and goes on to write new values while rank 2 still reads the old ones, which lets
// rank 1 wait a little longer. Neither rank 2 nor rank 1 may take what comes of them for right.
void overtaken(const std::string& name, Faults faults) {
  for (const Operation operation : all_operations) {
    if (name_of(operation) != name) continue;
    World world({3, 1, 4, 512, 0.8, 0, faults}, 1);
    Random random(1);
    auto trial = make_trial(world, operation, random, 500);
    const auto is_short = [&] {
      return std::any_of(trial->counts.begin(), trial->counts.end(), [](size_t count) { return count < 60; });
    };
    while (is_short() || (!gathers(operation) && trial->dtype != "float32"))
      trial = make_trial(world, operation, random, 500);
    for (int r = 0; r < 3; ++r) {
      world.streams[r]->sleeps_after_vote = 1;  // the second vote is the end of the first meeting
      world.streams[r]->sleep_us = std::array{100'000, 600'000, 1'150'000}[r];  // 0: until its flags have been taken
    }
    for (int r = 0; r < 3; ++r) enqueue(world, *trial, r);
    world.run(0, [&world] { std::memset(world.symmetric[0].data(), 0, symmetric_bytes); });
    world.drain();
    for (int r = 1; r < 3; ++r) {
      if (trial->state_after[r] == 0) check(*trial, r, false);
      print_record(*world.records[r]);
    }
    return;
  }
  expect(false, "no operation is called " + name);
}

// Ranks that are often later than the others wait for, so that waits give up anywhere. Whatever a call returns while
// no wait of its rank has given up is right; later on it is right or NaN. Symmetric memory is only looked at before:
// peers that are late may write to it long after.
void late_ranks(unsigned seed, int rounds) {
  size_t right = 0, spoiled = 0;
  for (int round = 0; round < rounds; ++round) {
    Random random(seed * 1000 + round + 1);
    random.discard(10);
    const int ranks = 2 + random() % 3;
    World world({ranks, static_cast<int>(1 + random() % 2), 4, static_cast<int>(16 * (ranks + random() % 60)), 0.02,
                 6000, {}},
                random());
    std::vector<std::unique_ptr<Trial>> trials;
    const Operation only = all_operations[random() % std::size(all_operations)];
    for (int call = 0; call < 8; ++call) {
      const Operation operation = random() % 2 ? only : all_operations[random() % std::size(all_operations)];
      trials.push_back(make_trial(world, operation, random, 400));
      for (int r = 0; r < ranks; ++r) {
        if (random() % 4 == 0) world.run(r, [delay_us = random() % 20'000] { usleep(delay_us); });
        enqueue(world, *trials.back(), r);
      }
    }
    world.drain();
    for (auto& trial : trials) {
      const bool symmetric = trial->operation == Operation::all_reduce_in_place ||
                             trial->operation == Operation::all_reduce_multimem ||
                             (reads_windows(trial->operation) && trial->in_place);
      for (int r = 0; r < ranks; ++r) {
        const bool gave_up = trial->state_after[r] > 0;
        if (gave_up && (symmetric || trial->operation == Operation::barrier)) continue;
        const size_t rights = check(*trial, r, gave_up);
        right += rights;
        if (trial->operation != Operation::barrier) spoiled += trial->expected[r].size() - rights;
      }
    }
  }
  std::printf("%zu bytes right, %zu spoiled\n", right, spoiled);
}

}  // namespace

int main(int count, char** words) {
  const auto word = [&](int i) { return std::string(count > i ? words[i] : ""); };
  const auto number = [&](int i) { return std::atoi(word(i).c_str()); };
  const std::string what = word(1);
  conversions_are_right();
  if (what == "random")
    random_calls(number(2), number(3), number(4));
  else if (what == "norms")
    norms(number(2), number(3));
  else if (what == "without")
    faulty(word(2), without_meetings(word(3)));
  else if (what == "relaxed")
    faulty(word(2), {0, true});
  else if (what == "missing")
    missing_rank({0, false, word(2) == "marks"});
  else if (what == "different")
    different_calls();
  else if (what == "ones")
    all_ones();
  else if (what == "stopped")
    stopped();
  else if (what == "overtaken")
    overtaken(word(2), without_meetings(word(3)));
  else if (what == "late")
    late_ranks(number(2), number(3));
  else
    expect(false, "nothing to run is called \"" + what + "\"");
  return 0;
}
