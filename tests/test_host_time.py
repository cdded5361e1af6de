"""The host's time a call: the timers, what is counted in generated code, and the summary."""

from types import SimpleNamespace

import pytest

from benchmarks import host
from benchmarks.host_runs import layers as timers
from benchmarks.host_runs.generated import Counts, counted
from benchmarks.host_runs.layers import Layers
from benchmarks.host_runs.measuring import Measured
from benchmarks.host_runs.summary import only_counted, slower, summarized, table

CODE = '''
norm_kernel_0 = async_compile.triton('norm_kernel', """kernel.run(nothing)""")
triton_poi_fused_full_1 = async_compile.triton('triton_poi_fused_full_1', "")
    def call(self, args):
        x, w = args
            buf0 = empty_strided_cuda((4, 8), (8, 1), torch.bfloat16)
            norm_kernel_0.run(x, -1, w, buf0, 4, 1, 1, stream=stream0)
            buf1 = empty_strided_cuda((), (), torch.float32)
            triton_poi_fused_full_1.run(buf1, 1, stream=stream0)
            triton_red_fused_sum_2.run(buf0, buf1, 8, stream=stream0)
            extern_kernels.mm(buf0, w, out=buf1)
            buf2 = torch.ops.aten.convolution.default(buf0, w)
            buf3 = torch.ops.fusion.specialised_linear.default.python_function(buf0, w)
'''


def test_counts_of_generated_code():
    assert counted(CODE, {"norm_kernel"}) == Counts(
        ours=2, inductors=2, fills=1, allocations=2, library=2
    )
    both = counted(CODE, {"norm_kernel"}) + counted(CODE, set())
    assert (both.ours, both.inductors, both.launches, both.allocations) == (3, 5, 8, 4)


def test_a_layer_is_timed_without_the_layers_below(monkeypatch):
    """A clock of the calls' own: a launch takes 3 µs, a wrapper with two of them 10, all 25."""
    now = SimpleNamespace(ns=0)

    def wait(us):
        now.ns += us * 1000

    monkeypatch.setattr(timers.time, "perf_counter_ns", lambda: now.ns)
    layers = Layers()
    launch = layers.timed("launch", lambda: wait(3))
    phase = SimpleNamespace(name="forward")
    wrapper = layers.timed(lambda: f"wrapper {phase.name}", lambda: (wait(4), launch(), launch()))
    guards = layers.timed("guards", lambda: (wait(15), wrapper()))
    guards(), guards()
    assert layers.microseconds(calls=2) == {"launch": 6, "wrapper forward": 4, "guards": 15}
    layers.inside, layers.outside = 100, 500  # ns that a timer adds to its layer, and its caller's
    found = layers.microseconds(calls=2)
    assert found == {"launch": 5.8, "wrapper forward": 2.9, "guards": 14.4}


def test_a_call_that_raises_ends_its_layer():
    layers = Layers()

    def fails():
        raise ValueError

    with pytest.raises(ValueError):
        layers.timed("outer", layers.timed("inner", fails))()
    assert not layers.open and layers.calls == {"inner": 1, "outer": 1}


def row(name: str, fusion: list[float]) -> dict:
    inductor = [100.0, 110.0, 100.0, 300.0, 100.0]
    found = {
        "inductor": Measured(inductor, Counts(inductors=5), {"guards": 3.25}, []),
        "fusion": Measured(fusion, Counts(ours=3, allocations=7), {}, []),
        "inductor-again": Measured([us + 0.5 for us in inductor], Counts(inductors=5), {}, []),
    }
    return summarized(name, "train", found)


def test_differences_are_taken_within_turns():
    """A turn in which everything was slow (300 µs) moves neither the difference nor its error."""
    one = row("slow", [105.0, 115.0, 105.0, 305.0, 105.0])
    assert (one["more_us"], one["error_us"], one["again_us"]) == (5.0, 0.0, 0.5)
    assert [c["us"] for c in one["contenders"]] == [100.0, 105.0, 100.5]
    assert slower([one]) == ["slow train: 5.0 µs more than plain Inductor"]
    assert not slower([one], allowed=5.0)


def test_an_uncertain_difference_is_no_loss():
    one = row("noisy", [105.0, 115.0, 60.0, 340.0, 105.0])
    assert one["more_us"] == 5.0 and one["error_us"] > 3 and not slower([one])


def test_the_table_has_a_line_for_each_contender():
    lines = table(
        [
            row("a", [105.0, 115.0, 105.0, 305.0, 105.0]),
            only_counted("b", "infer", {"fusion": Counts(ours=2)}),
        ]
    ).splitlines()
    assert len(lines) == 5 and lines[1].endswith("guards 3.2")
    assert lines[2].split()[:9] == "a train fusion 105.0 5.0 0.0 3 3 0".split()
    assert lines[4].split() == "b infer fusion - - - 2 2 0 0 0".split()


def test_interpreted_kernels_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(host, "machine", lambda *_: pytest.fail("it went on"))
    with pytest.raises(SystemExit) as stopped:
        host.main([])
    assert stopped.value.code == 2 and "unset TRITON_INTERPRET" in capsys.readouterr().err
