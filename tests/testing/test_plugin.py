"""The pytest plugin: bodies on ranks, one report for all ranks, and nothing left behind for the next test."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

from weft.testing.ranks import run_ranks


@pytest.fixture
def run(tmp_path):
    """Run pytest on the text of a test module; return its exit code and output."""

    def run(text, *options, anew=False):
        (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
        options = ["-W", "ignore", "-p", "no:cacheprovider", "-q", *options, "test_it.py"]
        if not anew:  # a process that has imported everything starts in no time
            return run_ranks(run_pytest, 1, tmp_path, options, backend=None, timeout_s=250)[0]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, env=environment)
        return done.returncode, done.stdout + done.stderr

    return run


def run_pytest(rank, folder, options):
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    with open("printed", "w+") as printed:
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        code = pytest.main(options)
        sys.stdout.flush()
        sys.stderr.flush()
        printed.seek(0)
        return int(code), printed.read()


def test_a_body_runs_on_ranks_with_fixtures_and_parameters(run):
    code, text = run(
        """
        import os
        import pytest, torch, torch.distributed as dist

        @pytest.fixture
        def three():
            return 3

        @pytest.mark.ranks(3)
        @pytest.mark.parametrize("factor", [1, 2])
        def test_sum(rank, three, factor, tmp_path):
            assert dist.get_backend() == "weft" and (rank, three) == (dist.get_rank(), dist.get_world_size())
            x = torch.full((2,), float(rank * factor))
            dist.all_reduce(x)
            assert (x == 3 * factor).all()
            (tmp_path / f"{rank}").write_text(str(torch.rand(1).item()))
            dist.barrier()
            assert len({path.read_text() for path in tmp_path.iterdir()}) == 1, "seeds are the same"

        @pytest.mark.ranks(2, backend="gloo")
        class TestGloo:
            def test_backend(self, rank):
                assert dist.get_backend() == "gloo"

        @pytest.mark.ranks(2, backend=None)
        def test_no_group():
            assert not dist.is_initialized()

        def test_without_ranks(rank):
            assert rank == -1 and not dist.is_initialized()

        @pytest.mark.ranks(2)
        def test_skipped_by_all():
            pytest.skip("not here")
        """,
        "-o",
        "faulthandler_timeout=100",
    )
    assert code == 0 and "5 passed, 1 skipped" in text, text


def test_a_failure_is_one_report_of_all_ranks(run):
    code, text = run(
        """
        import os, signal, time
        import pytest, torch, torch.distributed as dist

        @pytest.mark.ranks(4)
        def test_fails(rank):
            print(f"printed by {rank}")
            if rank in (0, 2):
                raise ValueError("even")
            assert rank == 1

        @pytest.mark.ranks(2)
        def test_dies(rank):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

        @pytest.mark.ranks(2, timeout_s=2)
        def test_hangs(rank):
            time.sleep(100 * rank)
        """
    )
    assert code == 1 and "3 failed" in text, text
    assert "ranks 0, 2: Traceback" in text and "ValueError: even" in text and "printed by 3" in text
    assert "rank 3: Traceback" in text and "assert 3 == 1" in text and "rank 1: Traceback" not in text
    assert "rank 1: ended by SIGKILL" in text and "RankLostError" in text
    assert "rank 1: ended with exit code 1" in text and "Timeout (0:00:02)!" in text, text


def test_no_test_after_a_bad_one_is_touched_by_it(run):
    """Deaths, hangs, leaks and patches, and a good test after each."""
    code, text = run(
        """
        import os, signal, threading, time
        import pytest, torch, torch.distributed as dist

        BAD = ["dies", "hangs", "raises", "patches", "leaks a group", "leaks a thread", "environment", "exits"]

        @pytest.mark.parametrize("number", range(16))
        @pytest.mark.ranks(2, timeout_s=20)
        def test_number(number, rank):
            if number % 2:
                assert os.getpid() != PARENT and "BAD" not in os.environ and torch.add is ADD
                assert torch.get_default_dtype() == torch.float32 and threading.active_count() < 4
                x = torch.ones(3)
                dist.all_reduce(x)
                assert (x == 2).all()
                return
            what = BAD[number // 2]
            if what == "dies" and rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hangs" and rank:
                time.sleep(1)
                os._exit(7)
            if what == "raises":
                raise RuntimeError("bad")
            if what == "patches":
                torch.add = None
                torch.set_default_dtype(torch.float64)
            if what == "leaks a group":
                dist.new_group([0, 1])
            if what == "leaks a thread":
                threading.Thread(target=time.sleep, args=(100,)).start()
            if what == "environment":
                os.environ["BAD"] = "1"
            if what == "exits":
                os._exit(0)
            pytest.fail("bad")

        PARENT, ADD = os.getpid(), torch.add
        """,
        "-rf",
    )
    failed = {int(line.split("[")[1].split("]")[0]) for line in text.splitlines() if line.startswith("FAILED")}
    assert code == 1 and failed == set(range(0, 14, 2)), text  # who exits with 0 has passed


SPAWNED = """
    import os, time
    import torch, torch.distributed as dist, torch.multiprocessing as mp

    def body(rank, store, parent):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        x = torch.ones(1 << 20)
        dist.all_reduce((x @ x).view(1))
        dist.destroy_process_group()
        time.sleep(0.3)  # gloo's threads drop the last tensors under the interpreter's lock; else it may abort

    def test_spawned(tmp_path):
        torch.ones(1 << 22).sum()  # this process has a pool of threads
        mp.spawn(body, (tmp_path / "store", os.getpid()), nprocs=2)

    def test_who_forks(tmp_path):
        mp.spawn(note, (tmp_path,), nprocs=2)
        assert [path.read_text() for path in tmp_path.iterdir()] == [EXPECTED] * 2

    def note(rank, folder):
        (folder / str(rank)).write_text(mp.current_process().name.split("-")[0])
"""


@pytest.mark.slow("pytorch_ext/testing")
def test_processes_of_others_are_forked_where_asked(run):
    code, text = run(SPAWNED.replace("EXPECTED", "'ForkProcess'"), "--fork-ranks", anew=True)
    assert code == 0 and "2 passed" in text, text


def test_processes_of_others_start_anew_where_nobody_asks(run):
    code, text = run(SPAWNED.replace("EXPECTED", "'SpawnProcess'"), "-k", "who_forks")
    assert code == 0 and "1 passed" in text, text


@pytest.mark.skipif(
    importlib.util.find_spec("expecttest") is None, reason="torch's MultiProcessTestCase needs expecttest"
)
def test_torchs_own_test_case_forks(run):
    code, text = run(
        """
        import multiprocessing
        import torch, torch.distributed as dist
        from torch.testing._internal.common_distributed import MultiProcessTestCase

        class TestSum(MultiProcessTestCase):
            world_size = 2

            def setUp(self):
                super().setUp()
                self._spawn_processes()

            def test_sum(self):
                assert multiprocessing.current_process().name.startswith("process")
                dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
                x = torch.ones(3)
                dist.all_reduce(x)
                self.assertEqual(x, torch.full((3,), 2.0))
        """,
        "--fork-ranks",
    )
    assert code == 0 and "1 passed" in text, text


def test_a_fixture_compares_training_on_ranks_with_one_process(run):
    code, text = run(
        """
        import pytest, torch, torch.distributed as dist
        from torch import nn

        def train(rank, world_size, forgets=False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(2):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
                model(x).square().mean().backward()
                for name, p in model.named_parameters() if world_size > 1 else ():
                    if not (forgets and name == "2.bias"):
                        dist.all_reduce(p.grad)
                        p.grad /= world_size
                optimizer.step()
                optimizer.zero_grad()

        def test_right(compare_ranks):
            assert compare_ranks(train, 2).compared > 50

        def test_wrong(compare_ranks):
            compare_ranks(lambda *rank: train(*rank, forgets=True), 2)
        """
    )
    assert code == 1 and "1 failed, 1 passed" in text, text
    assert "the runs part in 2.bias" in text and "the mean over ranks 0, 1 is the reference's" in text, text
