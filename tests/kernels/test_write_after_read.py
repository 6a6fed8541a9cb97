"""The gate's search for stores that overtake another thread's load, on small texts in Triton's GPU dialect."""

import pytest

pytest.importorskip("triton")
from weft.kernels import write_after_read

KERNEL = """
#blocked = #ttg.blocked<{sizePerThread = [8], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>
#other = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>
  tt.func public @kernel(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %d: !tt.tensordesc<tensor<64x64xf32>>, %n: i32) attributes {noinline = false} {
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
ASSEMBLY = '%z = tt.elementwise_inline_asm "PTX" {constraints = "=r"} : -> i32'
COPY_OUT = (
    "ttng.async_tma_copy_local_to_global %d[%n, %n] %m : !tt.tensordesc<tensor<64x64xf32>>, !ttg.memdesc<64x64xf32>"
)
SMALL = "#blocked>".join(["%r = tt.load %a : tensor<512x!tt.ptr<f32>, ", ""])
SMALL_STORE = "tt.store %a, %r : tensor<512x!tt.ptr<f32>, #blocked>"


IN_PLACE = [["x", "d"]]


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
        (SCALAR, ASSEMBLY.replace("PTX", "bar.red.or.pred p, 0, q;"), OWN),
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
        (SCALAR, "%o = tt.atomic_rmw exch, relaxed, gpu, %b, %w : (tensor<2048x!tt.ptr<f32>, #other>) -> f32"),
        (SCALAR, ASSEMBLY.replace("PTX", "bar.warp.sync 0xffffffff;"), OWN),
        # A warp may reduce what each warp has loaded, without a barrier.
        (SMALL, '%q = "tt.reduce"(%r) <{axis = 0 : i32}> ({', "tt.reduce.return %r : f32", "}) : -> f32", SMALL_STORE),
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


def test_the_copy_engine_stores_behind_what_it_was_given_and_nothing_else():
    alloc, store = "%m = ttg.local_alloc : () -> !ttg.memdesc<64x64xf32>", "ttg.local_store %v, %m : -> !ttg.memdesc"
    given = LOAD, alloc, store, COPY_OUT
    assert fault(*given) == "" and fault(*given, same=IN_PLACE) == ""
    assert fault(*given, "%e = ttg.local_alloc : () -> !ttg.memdesc", COPY_OUT.replace("%m", "%e"), same=IN_PLACE) == ""
    assert "d is stored" in fault(SCALAR, *given, same=[["d", "x"]])
    assert fault(SCALAR, *given) == "", "another tensor"


def test_a_pointer_that_a_loop_exchanges_is_followed():
    loop = "%k:2 = scf.for %j = %n to %n step %n iter_args(%p = %y, %q = %x) -> (!tt.ptr<f32>, !tt.ptr<f32>)  : i32 {"
    swap = "scf.yield %q, %p : !tt.ptr<f32>, !tt.ptr<f32>"
    assert "is stored" in fault(loop, "%s = tt.load %p : !tt.ptr<f32>", OWN, swap, END)
    kept = "scf.yield %y, %q : !tt.ptr<f32>, !tt.ptr<f32>"
    body = "%s = tt.load %y : !tt.ptr<f32>", OWN
    assert fault(loop, *body, kept, END) == ""


def test_a_branch_out_of_the_structure_is_a_fault():
    assert fault("cf.cond_br %n, ^bb1, ^bb2") == "cf.cond_br, a branch that is not followed"
