"""The gate's search for stores that overtake another thread's load, on small texts in Triton's GPU dialect."""

import pytest

pytest.importorskip("triton")
from weft.kernels import write_after_read

KERNEL = """
#blocked = #ttg.blocked<{sizePerThread = [8], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>
#other = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>
  tt.func public @kernel(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %i = tt.make_range {end = 2048 : i32, start = 0 : i32} : tensor<2048xi32, #blocked>
    %a = tt.splat %x : !tt.ptr<f32> -> tensor<2048x!tt.ptr<f32>, #blocked>
    %b = tt.splat %x : !tt.ptr<f32> -> tensor<2048x!tt.ptr<f32>, #other>
    %c = tt.splat %y : !tt.ptr<f32> -> tensor<2048x!tt.ptr<f32>, #other>
BODY
    tt.return
  }
"""
LOAD, STORE = (
    "%v = tt.load %a : tensor<2048x!tt.ptr<f32>, #blocked>",
    "tt.store %b, %w : tensor<2048x!tt.ptr<f32>, #other>",
)
SCALAR, OWN = "%s = tt.load %x : !tt.ptr<f32>", "tt.store %a, %w : tensor<2048x!tt.ptr<f32>, #blocked>"
CHANGE = "%w = ttg.convert_layout %v : tensor<2048xf32, #blocked> -> tensor<2048xf32, #other>"
LOOP, TEST, OTHERWISE, END = "scf.for %k = %n to %n step %n  : i32 {", "scf.if %n {", "} else {", "}"
BARRIER = "ttg.barrier all"
SMALL = "#blocked>".join(["%r = tt.load %a : tensor<512x!tt.ptr<f32>, ", ""])
SMALL_STORE = "tt.store %a, %r : tensor<512x!tt.ptr<f32>, #blocked>"


def fault(*body: str, same=()) -> str:
    return write_after_read.fault(KERNEL.replace("BODY", "\n".join(body)), same)


@pytest.mark.parametrize(
    "body",
    [
        (LOAD, OWN),  # each element's thread loads it and stores it
        (LOAD, CHANGE, STORE),  # the threads exchange what they loaded
        (SCALAR, BARRIER, OWN),
        (SCALAR, TEST, BARRIER, OTHERWISE, BARRIER, END, OWN),
        (OWN, SCALAR),  # a load after a store is another matter
        (TEST, SCALAR, OTHERWISE, OWN, END),  # never both
        (LOOP, LOAD, CHANGE, STORE, END),
    ],
)
def test_what_threads_order_is_right(body):
    assert fault(*body) == ""


@pytest.mark.parametrize(
    "body",
    [
        (SCALAR, OWN),
        (SCALAR, LOOP, OWN, END),
        (SCALAR, LOOP, BARRIER, END, OWN),  # the loop may have no turn
        (SCALAR, TEST, BARRIER, END, OWN),
        (SCALAR, TEST, BARRIER, OTHERWISE, END, OWN),
        (LOOP, OWN, SCALAR, END),  # the next turn stores
        (LOAD, STORE),
        (LOAD, CHANGE, SCALAR, STORE),  # an exchange of one value says nothing of another
        (SMALL, SMALL_STORE),  # several threads have each element
        (SCALAR, "tt.store %x, %s : !tt.ptr<f32>"),
    ],
)
def test_a_store_that_overtakes_a_load_is_named(body):
    assert fault(*body).startswith("x is stored before all threads have loaded it (")


def test_arguments_share_memory_only_where_they_are_one_tensor():
    body = SCALAR, "tt.store %c, %w : tensor<2048x!tt.ptr<f32>, #other>"
    assert fault(*body) == ""
    assert "x is stored" in fault(*body, same=[["x", "y"]])


def test_memory_is_followed_through_offsets_and_not_through_loaded_numbers():
    there = "%p = tt.addptr %y, %s : !tt.ptr<f32>, i32", "tt.store %p, %s : !tt.ptr<f32>"
    assert fault(SCALAR, *there) == ""
    assert "y is stored" in fault("%s = tt.load %y : !tt.ptr<f32>", *there)
