// Ranks of the driver: processes, or threads where a thread sanitizer watches them. A parent that never touches the
// engine starts them, waits for them and says what went wrong.
#pragma once
#include <dirent.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "group.h"
#include "handover.h"
#include "reduce.h"
#include "values.h"

#ifdef RANKS_ARE_THREADS
constexpr bool ranks_are_threads = true;
#else
constexpr bool ranks_are_threads = false;
#endif

constexpr int most_ranks = 5;

// What the ranks of a round share. Counts add up over the rounds of a phase.
struct Team {
  int world;
  uint64_t seed;
  bool loses_a_rank;
  std::atomic<uint32_t> arrived, meetings;
  std::atomic<uint64_t> groups, calls, messages, deaths;
  RankIdentity identities[most_ranks];
  uint64_t creator;
  int descriptor;

  void meet() {
    const uint32_t meeting = meetings;
    if (++arrived == static_cast<uint32_t>(world)) {
      arrived = 0;
      ++meetings;
    }
    while (meetings == meeting) usleep(50);
  }
};

[[noreturn]] inline void fail(const std::string& text) {
  std::fprintf(stderr, "wrong: %s\n", text.c_str());
  std::_Exit(1);
}

inline void expect(bool holds, const std::string& otherwise) {
  if (!holds) fail(otherwise);
}

// Open descriptors and mapped segments of this process.
inline size_t held_resources() {
  size_t count = 0;
  DIR* descriptors = opendir("/proc/self/fd");
  while (readdir(descriptors) != nullptr) ++count;
  closedir(descriptors);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:weft") != std::string::npos || line.find("/dev/zero") != std::string::npos;
  return count;
}

using Body = std::function<void(Team&, int rank)>;

inline void live(Team& team, int rank, const Body& body) {
  try {
    team.identities[rank] = {getpid(), process_key()};
    team.meet();
    body(team, rank);
  } catch (const std::exception& error) {
    fail("rank " + std::to_string(rank) + ": " + error.what());
  }
}

// A process of the round: one rank, or all of them.
[[noreturn]] inline void live_in_process(Team& team, int first_rank, const Body& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto sets = supported_instruction_sets();  // which all give the same bits
  setenv("WEFT_ISA", sets[(team.seed + first_rank) % sets.size()].c_str(), 1);
  process_key();  // its socket stays as long as the process
  const size_t held = held_resources();
  if (ranks_are_threads) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < team.world; ++rank) ranks.emplace_back([&team, rank, &body] { live(team, rank, body); });
    for (std::thread& rank : ranks) rank.join();
  } else {
    live(team, first_rank, body);
  }
  // A sanitizer opens a pipe for a moment when it looks at memory. Threads of callbacks may still do so.
  for (int tries = 0; held_resources() != held; ++tries, usleep(10'000))
    expect(tries < 100, "descriptors or mappings are left");
  std::exit(0);  // looks for leaks
}

// Returns what went wrong, or nothing. The rank `victim`, if there is one, must die of SIGKILL.
inline std::string run_ranks(Team& team, const Body& body, int victim = -1) {
  constexpr auto limit = std::chrono::seconds(60);
  team.arrived = 0;
  std::fflush(stdout);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < (ranks_are_threads ? 1 : team.world); ++rank) {
    processes.push_back(fork());
    if (processes.back() == 0) live_in_process(team, rank, body);
  }
  std::string wrong;
  const auto deadline = Clock::now() + limit;
  for (size_t left = processes.size(); left > 0;) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, WNOHANG);
    if (ended == 0 && wrong.empty() && Clock::now() > deadline) wrong = "the ranks hang";
    if (ended > 0) {
      --left;
      const auto rank = std::find(processes.begin(), processes.end(), ended) - processes.begin();
      processes[rank] = 0;
      const bool right = rank == victim ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0;
      if (!right && wrong.empty())
        wrong = "the process of rank " + std::to_string(rank) + " ended with status " + std::to_string(status);
    }
    if (!wrong.empty())
      for (const pid_t process : processes)
        if (process != 0) kill(process, SIGKILL);
    if (ended == 0) usleep(500);
  }
  return wrong;
}

inline std::unique_ptr<Group> join(Team& team, int rank, uint64_t key, std::function<void()> on_slice = nullptr) {
  Random plan(key);
  const size_t staging_bytes = 4096 * (1 + plan.below(4)), bytes = Group::segment_bytes(team.world, staging_bytes);
  std::unique_ptr<Segment> segment;
  if (rank == 0) {
    segment = std::make_unique<Segment>(Segment::create(bytes));
    team.creator = process_key();
    team.descriptor = segment->descriptor();
    ++team.groups;
  }
  team.meet();
  if (rank != 0) segment = std::make_unique<Segment>(Segment::open(team.creator, team.descriptor, bytes));
  Group::reserve(*segment, rank, team.world, staging_bytes);
  const std::vector<RankIdentity> ranks(team.identities, team.identities + team.world);
  GroupOptions options{staging_bytes, std::chrono::seconds(100), plan.one_in(2), std::move(on_slice)};
  options.single_copy = plan.one_in(2);
  options.threads = 1 + static_cast<int>(plan.below(3));
  options.shared_from = 256;
  auto group = std::make_unique<Group>("test", rank, std::move(*segment), ranks, std::move(options));
  constexpr uint32_t delays_us[] = {0, 0, 20, 200};
  group->inject({key_of(key, rank), delays_us[plan.below(4)], 0});
  group->record_calls(plan.below(3) * 8);
  return group;
}
