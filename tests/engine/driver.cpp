// Runs the shared-memory engine without Python, for sanitizers to watch. Everything follows from a seed.
//
//   driver                 controls, then random calls, groups that fail, groups that come and go, and products
//   driver control FAULT   commits a fault, which the sanitizer must report
//
// Round r of a phase has the seed WEFT_SANITIZE_SEED + r; WEFT_SANITIZE_ROUNDS multiplies the rounds.
#include "endings.h"
#include "products.h"

namespace {

// Groups of one set of ranks, one after another, and random calls on them.
void call_at_random(Team& team, int rank) {
  constexpr int groups = 3, steps = 40;
  for (int number = 0; number < groups; ++number) {
    const uint64_t key = key_of(team.seed, number);
    const auto group = join(team, rank, key);
    Session session(team, *group, key, true);
    for (int step = 0; step < steps; ++step) session.step(step);
    session.finish();
  }
}

// Groups that are let go of while messages and calls are under way.
void come_and_go(Team& team, int rank) {
  constexpr int groups = 25;
  for (int number = 0; number < groups; ++number) {
    Random plan(key_of(team.seed, number));
    auto group = join(team, rank, plan());
    int from[2];
    Bytes memory(100'000), own(8);
    std::vector<std::shared_ptr<Work>> works;
    std::shared_ptr<Region> region;
    try {
      if (plan.one_in(2)) group->run([&] { region = group->create_region(plan.below(10'000)); });
      Messenger& messenger = group->messenger();
      const int next = (rank + 1) % team.world;
      works.push_back(messenger.receive(any_rank, own.data(), {8, DType::uint8, 9}, &from[0]));  // is never sent
      works.push_back(messenger.receive(next, own.data(), {0, DType::int64, 1}, &from[1]));
      works.push_back(messenger.send(next, own.data(), {0, DType::int64, plan.below(2) > 0 ? 1u : 2u}));
      works.push_back(messenger.send(next, memory.data(), {memory.size(), DType::uint8, 3}));  // nobody takes it
      for (size_t call = plan.below(3); call > 0; --call)
        works.push_back(group->submit([&group = *group] { barrier(group); }));
    } catch (const CommError&) {  // another rank has left already
    }
    group.reset();
    if (region != nullptr) memset(region->part(rank), rank, region->bytes);  // it outlives the group
  }
}

// Something that a sanitizer, or this driver, must report.
void commit_fault(const std::string& fault, Team& team, int rank) {
  auto group = join(team, rank, 1);
  const volatile int shift = 40;
  void* volatile nothing = nullptr;
  std::shared_ptr<Region> region;
  group->run([&] { region = group->create_region(64); });
  usleep(10'000 * rank);  // two accesses at the very same time may be missed
  if (fault == "race") region->part(0)[0] = std::byte(rank);  // every rank writes there, with no barrier between
  team.meet();  // a rank that ends before the other writes would be seen as in order with it
  if (fault == "overflow") {
    std::vector<float> input(100), output(99);
    all_reduce(*group, input.data(), output.data(), 100, DType::float32, ReduceOp::sum);
  }
  if (fault == "leak") new Work;
  if (fault == "group") group.release();
  if (fault == "shift") std::printf("%d\n", 1 << shift);
  if (fault == "null") memcpy(nothing, &team, shift - 40);
}

struct Control {
  const char *fault, *report;
};

void check_controls(const std::string& program, const char* sanitizers) {
  std::vector<Control> controls = {{"group", "descriptors or mappings are left"}};
  if (ranks_are_threads)
    controls.insert(controls.end(), {{"race", "data race"}});
  else
    controls.insert(controls.end(), {{"overflow", "heap-buffer-overflow"},
                                     {"leak", "detected memory leaks"},
                                     {"shift", "shift exponent 40 is too large"},
                                     {"null", "null pointer passed as argument"}});
  for (const auto& [fault, report] : controls) {
    FILE* output = popen((program + " control " + fault + " 2>&1").c_str(), "r");
    std::string text;
    for (int character; (character = fgetc(output)) != EOF;) text += static_cast<char>(character);
    const bool seen = pclose(output) != 0 && text.find(report) != std::string::npos;
    expect(seen, std::string("the fault \"") + fault + "\" is not reported (" + sanitizers + "):\n" + text);
  }
}

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

#ifdef RANKS_ARE_THREADS
extern "C" const char* __tsan_default_options() { return "halt_on_error=1:atexit_sleep_ms=0"; }
// libstdc++ counts the owners of an exception in code that is not instrumented: that the last one frees it after the
// others have read it is not seen.
extern "C" const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\nrace:__cxa_end_catch\n";
}
#else
extern "C" const char* __asan_default_options() { return "detect_leaks=1:detect_stack_use_after_return=1"; }
#endif

int main(int count, char** arguments) {
  void* memory = mmap(nullptr, sizeof(Team), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Team& team = *new (memory) Team();
  const char* const name = ranks_are_threads ? "threads, thread sanitizer" : "processes, address and undefined";
  if (count == 3) {
    team.world = 2;
    const std::string wrong = run_ranks(team, [&](Team& t, int rank) { commit_fault(arguments[2], t, rank); });
    std::printf("%s\n", wrong.c_str());
    return wrong.empty() ? 0 : 1;
  }

  const uint64_t first_seed = setting("WEFT_SANITIZE_SEED", 1), factor = setting("WEFT_SANITIZE_ROUNDS", 1);
  const auto phase = [&](const char* what, uint64_t rounds, const std::function<std::string(Random&)>& round) {
    const auto start = Clock::now();
    team.groups = team.calls = team.messages = team.deaths = 0;
    for (uint64_t number = 0; number < rounds; ++number) {
      team.seed = first_seed + number;
      Random plan(team.seed);
      team.world = 1 + static_cast<int>(plan.below(most_ranks));
      const std::string wrong = round(plan);
      const std::string seed = std::to_string(team.seed);
      expect(wrong.empty(), std::string(name) + ", " + what + ": " + wrong + "; again: WEFT_SANITIZE_SEED=" + seed);
    }
    std::printf("%s: %-8s %5.1f s %5d groups %6d calls %6d messages %4d deaths\n", name, what,
                std::chrono::duration<double>(Clock::now() - start).count(), static_cast<int>(team.groups),
                static_cast<int>(team.calls), static_cast<int>(team.messages), static_cast<int>(team.deaths));
  };

  phase("controls", 1, [&](Random&) { return check_controls(arguments[0], name), std::string(); });
  phase("calls", 20 * factor, [&](Random&) { return run_ranks(team, call_at_random); });
  phase("endings", 60 * factor, [&](Random& plan) {
    const auto last = static_cast<uint64_t>(Ending::death);  // of a process; it takes three of eight rounds
    const auto ending = static_cast<Ending>(ranks_are_threads ? team.seed % last : std::min(team.seed % 8, last));
    team.world = 2 + static_cast<int>(plan.below(most_ranks - 1));
    const int victim = static_cast<int>(plan.below(team.world));
    const bool dies = ending == Ending::death;
    team.deaths += dies;
    team.loses_a_rank = dies || ending == Ending::leave;
    return run_ranks(team, [&](Team& t, int rank) { Failing(t, rank, ending, victim).run(); }, dies ? victim : -1);
  });
  phase("groups", 6 * factor, [&](Random&) { return run_ranks(team, come_and_go); });
  phase("products", 20 * factor, multiply_at_random);
}
