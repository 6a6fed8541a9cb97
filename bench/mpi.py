"""Our collectives beside those of Open MPI, MPICH and Intel MPI on CPU ranks, from C and from Python (mpi4py).

Every contender does the same: before each call each rank writes its input, in turn one of several buffers, and all meet
in a barrier. A sample is the median over the calls of the slowest rank. Rounds alternate between the contenders, and
each starts its own processes. Ranks are pinned, one a core, if there are enough.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

import weft
from weft.bench import progress
from weft.bench.measure import Quantiles
from weft.bench.suites import RefusedError
from weft.bench.table import Row
from weft.comm.registry import communicator
from weft.testing.ranks import run_ranks
from weft.tools.rounds import in_turn

MPIS = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}  # and their packages
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
ROUNDS = 5
_PYTHON = " from Python"
_CACHED_BYTES = 64 << 20  # buffers of one kind together; at most eight

_PROGRAM_IN_C = r"""
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (atoi(argv[1])) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(rank, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
  }
  if (rank == 0) printf("{");
  for (int place = 2; place < argc; ++place) {
    long bytes = atol(argv[place]), part = bytes / 4 / world > 0 ? bytes / 4 / world : 1, count = part * world;
    long calls = (64l << 20) / bytes < 20 ? 20 : (64l << 20) / bytes > 1000 ? 1000 : (64l << 20) / bytes;
    int sets = (64l << 20) / bytes < 1 ? 1 : (64l << 20) / bytes > 8 ? 8 : (int)((64l << 20) / bytes);
    float *in[8], *out[8];
    for (int i = 0; i < sets; ++i) {
      in[i] = malloc(4 * count), out[i] = malloc(4 * count);
      memset(out[i], 0, 4 * count);
    }
    double *us = malloc(sizeof(double) * calls);
    const char *names[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"};
    for (int op = 0; op < 6; ++op) {
      for (long call = 0; call < calls; ++call) {
        float *a = in[call % sets], *b = out[call % sets];
        for (long i = 0; i < count; ++i) a[i] = 1;
        MPI_Barrier(MPI_COMM_WORLD);
        double began = MPI_Wtime();
        if (op == 0) MPI_Allreduce(MPI_IN_PLACE, a, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (op == 1) MPI_Allgather(a, part, MPI_FLOAT, b, part, MPI_FLOAT, MPI_COMM_WORLD);
        if (op == 2) MPI_Reduce_scatter_block(a, b, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (op == 3) MPI_Alltoall(a, part, MPI_FLOAT, b, part, MPI_FLOAT, MPI_COMM_WORLD);
        if (op == 4) MPI_Bcast(a, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
        if (op == 5) MPI_Barrier(MPI_COMM_WORLD);
        us[call] = 1e6 * (MPI_Wtime() - began);
      }
      qsort(us, calls, sizeof(double), compare);
      double slowest;
      MPI_Reduce(&us[calls / 2], &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
      if (rank == 0) printf("%s\"%s %ld\": %.3f", op || place > 2 ? ", " : "", names[op], bytes, slowest);
    }
    for (int i = 0; i < sets; ++i) free(in[i]), free(out[i]);
    free(us);
  }
  if (rank == 0) printf("}\n");
  MPI_Finalize();
}
"""

_PROGRAM_IN_PYTHON = r"""
import json, mmap, os, statistics, sys, time
import numpy
from mpi4py import MPI

ranks = MPI.COMM_WORLD
if sys.argv[1] == "1":
    os.sched_setaffinity(0, {ranks.rank})
found = {}

def memory(count):  # in pages of 4 KiB, as torch's is
    return numpy.frombuffer(mmap.mmap(-1, 4 * count), numpy.float32)

for size in map(int, sys.argv[2:]):
    part = max(1, size // 4 // ranks.size)
    sets = min(8, max(1, (64 << 20) // size))
    inputs, outputs = ([memory(part * ranks.size) for _ in range(sets)] for _ in range(2))
    calls = {
        "all_reduce": lambda a, b: ranks.Allreduce(MPI.IN_PLACE, a),
        "all_gather": lambda a, b: ranks.Allgather(a[:part], b),
        "reduce_scatter": lambda a, b: ranks.Reduce_scatter_block(a, b[:part]),
        "all_to_all": lambda a, b: ranks.Alltoall(a, b),
        "broadcast": lambda a, b: ranks.Bcast(a),
        "barrier": lambda a, b: ranks.Barrier(),
    }
    for name, call in calls.items():
        us = []
        for number in range(min(1000, max(20, (64 << 20) // size))):
            a, b = inputs[number % sets], outputs[number % sets]
            a.fill(1)
            ranks.Barrier()
            began = time.perf_counter()
            call(a, b)
            us.append(1e6 * (time.perf_counter() - began))
        found[f"{name} {size}"] = ranks.allreduce(statistics.median(us), MPI.MAX)
if ranks.rank == 0:
    print(json.dumps(found))
"""


def rows(folder: Path, world: int, sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    """Measure all operations at these sizes in bytes, of fp32.

    Args:
        folder: has, or gets, an environment for each MPI.
    """
    pinned = world <= len(os.sched_getaffinity(0))
    samples: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as built:
        contenders = {"weft": lambda: run_ranks(_measured, world, tuple(sizes), pinned, timeout_s=600)[0]}
        contenders |= _mpis(folder, Path(built), world, sizes, pinned)
        for contender, run, _ in in_turn(contenders, rounds, warm_up=0, report=progress.set_round):
            for subject, us in run().items():
                operation, _, way = subject.partition(", ")
                samples[operation][way or contender].append(us)
    for subject, of in samples.items():
        operation, size = subject.split()
        if operation == "barrier" and int(size) != sizes[0]:
            continue
        times = {name: Quantiles.of(us) for name, us in of.items()}
        peers = {name: time for name, time in times.items() if name.startswith(tuple(MPIS))}
        best = min(peers, key=lambda name: peers[name].p50_us)
        facts = {"ordinary_ratio": peers[best].p50_us / times["ordinary"].p50_us}
        yield Row({"operation": operation, "bytes": int(size), "dtype": "float32", "world": world}, times, best, facts)


def _mpis(folder: Path, built: Path, world: int, sizes, pinned: bool) -> dict[str, Callable[[], dict[str, float]]]:
    (built / "peer.c").write_text(_PROGRAM_IN_C)
    (built / "peer.py").write_text(_PROGRAM_IN_PYTHON)
    places = {name: _installed(folder, package) for name, package in MPIS.items()}
    # Intel's package has no compiler; MPICH's programs run on it, by their common binary interface.
    compilers = {"Open MPI": "Open MPI", "MPICH": "MPICH", "Intel MPI": "MPICH"}
    arguments = [str(int(pinned)), *map(str, sizes)]
    runs: dict[str, Callable[[], dict[str, float]]] = {}
    for name, place in places.items():
        program = built / f"peer-{MPIS[name]}"
        mpicc = places[compilers[name]] / "bin" / "mpicc"
        subprocess.run([mpicc, "-O2", built / "peer.c", "-o", program], check=True, capture_output=True)
        launch = [str(place / "bin" / "mpiexec"), "-n", str(world)]
        environment = os.environ | {"LD_LIBRARY_PATH": str(place / "lib"), "OMP_NUM_THREADS": "1"}
        if name == "Open MPI":
            launch += ["--allow-run-as-root", "--bind-to", "none"] + ["--oversubscribe"] * (not pinned)
        if not pinned:
            environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "I_MPI_THREAD_YIELD": "3"}
        environment |= {"I_MPI_PIN": "0"}
        python = [str(place / "bin" / "python"), str(built / "peer.py")]
        for suffix, command in (("", [str(program)]), (_PYTHON, python)):
            runs[name + suffix] = partial(_run, [*launch, *command, *arguments], environment)
    return runs


def _run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RefusedError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _installed(folder: Path, package: str) -> Path:
    """Return an environment with the MPI and mpi4py; make it if it is not there."""
    place = folder / package
    if not (place / "bin" / "mpiexec").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [str(place / "bin" / "pip"), "install", "--quiet", package, "mpi4py", "numpy"]
        if subprocess.run(pip).returncode != 0:
            raise RefusedError(f"{package} cannot be installed in {place}; leave --peers out")
    return place.resolve()


def _measured(rank: int, sizes: Sequence[int], pinned: bool) -> dict[str, float]:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames these functions again
    torch.set_num_threads(1)
    if pinned:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    world, found = dist.get_world_size(), {}
    ranks = communicator()
    meet = ranks.engine.barrier  # type: ignore[union-attr]
    for size in sizes:
        part = max(1, size // 4 // world)
        sets = min(8, max(1, _CACHED_BYTES // size))
        ordinary = [torch.zeros(part * world) for _ in range(sets)]
        symmetric = [weft.empty_symmetric(part * world) for _ in range(sets)]
        outputs = [torch.zeros(part * world) for _ in range(sets)]
        by_torch: dict[str, Callable] = {  # of a buffer, one that it is sent to, and the parts of both
            "all_reduce": lambda a, b, *parts: dist.all_reduce(a),
            "all_gather": lambda a, b, from_a, to_b: dist.all_gather_into_tensor(b, from_a[0]),
            "reduce_scatter": lambda a, b, from_a, to_b: dist.reduce_scatter_tensor(to_b[0], a),
            "all_to_all": lambda a, b, *parts: dist.all_to_all_single(b, a),
            "broadcast": lambda a, b, *parts: dist.broadcast(a, 0),
            "barrier": lambda *operands: dist.barrier(),
        }
        by_layers: dict[str, Callable] = {  # as weft's layers call them
            "all_reduce": lambda a, b, *parts: weft.all_reduce(a),
            "all_gather": lambda a, b, from_a, to_b: ranks.all_gather_into(from_a[0], to_b),
            "reduce_scatter": lambda a, b, from_a, to_b: ranks.reduce_scatter_into(from_a, to_b[0]),
            "all_to_all": lambda a, b, from_a, to_b: ranks.all_to_all_into(from_a, to_b),
            "broadcast": lambda a, b, *parts: weft.broadcast(a),
            "barrier": lambda *operands: weft.barrier(),
        }
        for way, inputs, calls in (("ordinary", ordinary, by_torch), ("symmetric", symmetric, by_layers)):
            operands = [(a, b, list(a.split(part)), list(b.split(part))) for a, b in zip(inputs, outputs, strict=True)]
            for name, call in calls.items():
                us = []
                for number in range(min(1000, max(20, _CACHED_BYTES // size))):
                    of = operands[number % sets]
                    of[0].fill_(1)
                    meet()
                    began = perf_counter()
                    call(*of)
                    us.append(1e6 * (perf_counter() - began))
                median = torch.tensor(us, dtype=torch.float64).median()
                dist.all_reduce(median, op=dist.ReduceOp.MAX)
                found[f"{name} {size}, {way}"] = median.item()
    return found
