"""What a pattern must be like is checked where it is defined, what its functions answer where they
are asked, and a name stands for one pattern at a time.
"""

import importlib
import re
import sys

import pytest
import torch
from torch import Tensor

from fusion_backend import BackwardOnly, Pattern, Reject, Replacement
from fusion_backend.match.templates import templates
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import FUSION_RULES, OPS, clashes_left_out, unregister
from fusion_backend.reporting.reject import PatternError
from fusion_backend.testing import assert_fuses, collect

pytestmark = pytest.mark.usefixtures("scratch")
WHERE = rf"pattern mine \({re.escape(__file__)}:\d+\): "


def define(**options):
    @Pattern(**options)
    def mine(x: Tensor, y: Tensor, s: float) -> Tensor:
        return torch.tanh(x * s) + y

    return mine


def saving(x, y, s, save):
    return x


def called(x, y, s, known, training):
    return Reject("no")


def gradient(saved, dy):
    return None, None


# Each says what is wrong, with the pattern's file and line.
WRONG = {
    r"inductor is 'pointwize'; use 'pointwise', 'reduction'": lambda: define(inductor="pointwize"),
    r"reciprocal is 'no'; use True, False": lambda: define(reciprocal="no"),
    r"plain is 'yes'": lambda: define().backward(plain="yes")(gradient),
    r"result is 1;": lambda: define().backward(result=1)(gradient),
    r"saves is 'rstd'; it is a tuple of names": lambda: define().kernel(saves="rstd")(saving),
    r"saves is \('a b',\)": lambda: define().kernel(saves=("a b",))(saving),
    r"saves is \('m', 'm'\), with a name given twice": lambda: define().kernel(saves=("m", "m"))(
        saving
    ),
    r"saves names y, which the backward knows": lambda: define().kernel(saves=("y",))(saving),
    r"asks names z; its tensors are x, y": lambda: define().replacement(asks={"z": "mask"})(called),
    r"asks names s; its": lambda: define().replacement(asks={"s": "mask"})(called),
    r"same names z;": lambda: define().backward(same={"z": "x"})(gradient),
    r"same names xx;": lambda: define().backward(same={"y": "xx"})(gradient),
    r"same gives y the gradient of result 1; it has 1": lambda: define().backward(same={"y": 1})(
        gradient
    ),
    r"same gives \w the gradient of \w, which has": lambda: define().backward(
        same=dict(x="y", y="x")
    )(lambda s, d: 0),
    r"the backward at line \d+ takes \(saved\), not saved and 1 gradient$": lambda: (
        define().backward(lambda saved: 0)
    ),
    r"the backward .* takes \(s, d, e\)": lambda: define().backward(lambda s, d, e: 0),
    r"the backward .* has a default other than None": lambda: define().backward(
        lambda saved, dy=0: 0
    ),
    r"the backward must be a plain function": lambda: define().backward(torch.sin),
    r"the guard .* takes \(x, z\), not some of \(x, y, s\)": lambda: define().guard(
        lambda x, z: None
    ),
    r"the guard must be a plain function, written with def; sin is of type": lambda: define().guard(
        torch.sin
    ),
    r"the worthwhile .* takes \(train\), not": lambda: define().worthwhile(lambda train: None),
    r"the replacement .* takes \(masks\), not": lambda: define().replacement(lambda masks: None),
    r"the spelling .* takes \(y, x, s\)": lambda: define().spelling(lambda y, x, s: x),
    r"the near miss .* takes \(args\)": lambda: define().near_miss(lambda *args: 0),
    r"the kernel must be a plain function.* is a class": lambda: define().kernel(Reject),
    r"the inputs at line \d+ do not take \{'m': 3\}: .*'m'": lambda: define().inputs(dict(m=3))(
        lambda tensor: 0
    ),
    r"the seeded reference at line \d+ comes before kernel": lambda: after_the_kernel(),
}


def after_the_kernel():
    pattern = define()
    pattern.kernel(lambda x, y, s: x)
    pattern.seeded(lambda x, y, s, seed: x)


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_option_or_function(why):
    with pytest.raises(PatternError, match=WHERE + why):
        WRONG[why]()


def test_only_a_function_is_a_pattern():
    with pytest.raises(
        PatternError, match=r"must be a plain function.* is a class .*test_definitions.py:\d+"
    ):

        @Pattern
        class Mine:
            def forward(self, x: Tensor) -> Tensor:
                return x

    with pytest.raises(PatternError, match="sin is of type builtin"):
        Pattern(torch.sin)
    with pytest.raises(PatternError, match="3 is of type int"):
        Pattern(3)
    with pytest.raises(PatternError, match=r"<lambda> cannot be the name of an operator"):
        Pattern(lambda x: x)
    with pytest.raises(PatternError, match="an annotation cannot be read"):

        def mine(x: "Tensro | None") -> Tensor:  # noqa: F821
            return x

        Pattern(mine)
    assert not {"Mine", "mine", "sin"} & {*FUSION_RULES}


ADD = torch.ops.aten.add.Tensor


@pytest.mark.parametrize("what", ["guard", "worthwhile", "replacement"])
def test_what_is_no_answer_is_an_error(what):
    pattern, answers = define(), [None]
    extra = {"guard": "", "worthwhile": ", training", "replacement": ", known, training"}[what]
    getattr(pattern, what)(
        eval(f"lambda x, y, s{extra}: answer()", {"answer": lambda: answers[-1]})
    )
    given = range(3 + extra.count(","))
    half = BackwardOnly("no")
    call, typo = (
        Replacement(ADD, (torch.ones(2), 2), {}, "better"),
        Replacement(pattern, (1, 2), {}, "of three"),
    )
    right = {"guard": [None], "worthwhile": [None, half], "replacement": [call]}[what] + [
        Reject("no")
    ]
    for answer in right:
        answers.append(answer)
        assert pattern.ask(what, *given) is answer is pattern.answer(what, *given)
    wrong = [a for a in (None, half, call) if not any(a is r for r in right)]
    for answer in [*wrong, False, True, 0, "no", Reject, typo]:
        answers.append(answer)
        with pytest.raises(
            PatternError, match=rf"{WHERE}its {what} at line \d+ returned .*; it returns Reject\("
        ):
            pattern.ask(what, *given)
    with pytest.warns(
        RuntimeWarning, match=rf"{WHERE}its {what} at line \d+ returned .*; the site is left"
    ):
        refused = pattern.answer(what, *given)
    assert isinstance(refused, Reject) and refused.reason.startswith(f"its {what} at line")
    assert pattern.answer(what, *given).reason == refused.reason, "told once, refused again"


def test_a_function_that_raises_refuses_the_site():
    pattern = define()
    pattern.guard(lambda x, y, s: torch.tnah(x))
    with pytest.warns(RuntimeWarning, match=WHERE + "its guard raised AttributeError: .*'tnah'"):
        assert "AttributeError" in pattern.answer("guard", 1, 2, 3).reason
    with pytest.raises(AttributeError):
        pattern.ask("guard", 1, 2, 3)


@pytest.mark.parametrize("reason", ["", " ", None, False, 3])
def test_no_refusal_without_a_reason(reason):
    with pytest.raises(PatternError, match="a Reject needs its reason"):
        Reject(reason)


def test_an_op_called_directly_tells_of_its_guard():
    pattern = define()
    pattern.guard(lambda x, y, s: False)
    pattern.kernel(lambda x, y, s: x * 0)
    with pytest.raises(PatternError, match=WHERE + "its guard at line .* returned False"):
        operator_of(pattern).overload(torch.ones(2), torch.ones(2), 0.5)


# One name, one pattern.


def factory(factor):
    @Pattern
    def mine(x: Tensor) -> Tensor:
        return torch.tanh(x * factor)

    return mine


def test_a_factory_gives_each_pattern_a_name():
    first = factory(2.0)
    with pytest.raises(
        PatternError,
        match=WHERE + r"this definition has made a pattern before.*unregister\('mine'\)",
    ):
        factory(3.0)
    assert FUSION_RULES["mine"] is first
    assert_fuses(lambda x: torch.tanh(x * 2.0), torch.ones(3), pattern="mine")
    assert_fuses(lambda x: torch.tanh(x * 3.0), torch.ones(3), pattern="mine", count=0)
    unregister("mine")
    factory(3.0)
    assert_fuses(lambda x: torch.tanh(x * 3.0), torch.ones(3), pattern="mine")
    assert_fuses(lambda x: torch.tanh(x * 2.0), torch.ones(3), pattern="mine", count=0)


SOURCE = """
from torch import Tensor
from fusion_backend import Op, Pattern

@Pattern
def mine(x: Tensor) -> Tensor:
    return (x * FACTOR).tanh()
"""


def test_two_of_one_name_in_one_file(tmp_path, monkeypatch):
    (tmp_path / "twice.py").write_text(
        SOURCE.replace("FACTOR", "2") + SOURCE.replace("FACTOR", "3")
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        PatternError, match=r"mine \(.*twice.py:12\): .* taken by pattern mine \(.*twice.py:5\)"
    ):
        importlib.import_module("twice")


def test_another_file_may_not_take_a_name(tmp_path, monkeypatch):
    define()
    (tmp_path / "elsewhere.py").write_text(SOURCE.replace("FACTOR", "2"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        PatternError,
        match=r"elsewhere.py:5\): the name is taken by pattern mine \(.*definitions.py",
    ):
        importlib.import_module("elsewhere")


def test_the_name_of_a_gradient_is_taken():
    """The operator of `mine_backward` would replace that of the gradient of `mine`."""
    define()
    with pytest.raises(PatternError, match=r"the name is that of the gradient of pattern mine"):

        @Pattern
        def mine_backward(x: Tensor) -> Tensor:
            return x.sin()


def cells(tmp_path, monkeypatch):
    """A notebook, whose cells have files that are not there, other ones when they are edited."""
    notebook = {"__name__": "__main__"}
    for i, factor in enumerate((2.0, 3.0)):
        exec(
            compile(SOURCE.replace("FACTOR", str(factor)), f"<ipython-input-{i}>", "exec"), notebook
        )
        yield notebook["mine"]


def reloaded(tmp_path, monkeypatch):
    """A module that is edited and loaded again: the pattern stands elsewhere in it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "again.py"
    file.write_text(SOURCE.replace("FACTOR", "2.0"))
    module = importlib.import_module("again")
    yield module.mine
    file.write_text("\n" + SOURCE.replace("FACTOR", "3.0"))
    yield importlib.reload(module).mine


def run_as_script(tmp_path, monkeypatch):
    import runpy

    file = tmp_path / "script.py"
    for factor in (2.0, 3.0):
        file.write_text(SOURCE.replace("FACTOR", str(factor)))
        yield runpy.run_path(str(file))["mine"]


@pytest.mark.parametrize("again", [cells, reloaded, run_as_script])
def test_a_definition_that_is_run_again_replaces_the_first(again, tmp_path, monkeypatch):
    x = torch.linspace(-1, 1, 5)
    twice, thrice = (lambda x: torch.tanh(x * 2.0)), (lambda x: torch.tanh(x * 3.0))
    definitions = again(tmp_path, monkeypatch)
    first = next(definitions)
    before = collect(twice, x)
    assert [s.pattern for s in before.report.fused] == ["mine"]
    torch.testing.assert_close(torch.ops.fusion.mine(x), twice(x))
    second = next(definitions)
    assert FUSION_RULES["mine"] is second is not first
    assert not hasattr(torch.ops.fusion, "mine"), "nobody calls the old one by its name"
    torch.compiler.reset()
    after = [collect(fn, x) for fn in (twice, thrice)]
    assert [[s.pattern for s in a.report.fused] for a in after] == [[], ["mine"]]
    torch.testing.assert_close(after[1].graphs[0](x)[0], thrice(x))
    torch.testing.assert_close(torch.ops.fusion.mine(x), thrice(x))
    with pytest.raises(PatternError, match="another definition has its name"):
        operator_of(first)


def test_a_second_definition_may_be_one_that_is_not_looked_for():
    notebook = {"__name__": "__main__"}
    source = SOURCE.replace("FACTOR", "2")
    exec(compile(source, "<cell 1>", "exec"), notebook)
    exec(compile(source.replace("@Pattern", "@Op"), "<cell 2>", "exec"), notebook)
    assert "mine" not in FUSION_RULES and OPS["mine"] is notebook["mine"]
    unregister("mine")
    assert "mine" not in OPS


def test_a_clash_costs_one_pattern_of_a_file(tmp_path, monkeypatch):
    mine = define()
    both = SOURCE.replace("FACTOR", "2") + SOURCE.replace("FACTOR", "3").replace(
        "def mine", "def other"
    )
    (tmp_path / "installed.py").write_text(both)
    monkeypatch.syspath_prepend(tmp_path)
    told = (
        r"mine \(.*installed.py:5\): the name is taken by "
        r"pattern mine \(.*definitions.py:\d+\); it is left out"
    )
    with clashes_left_out(), pytest.warns(RuntimeWarning, match=told):
        installed = importlib.import_module("installed")
    assert FUSION_RULES["mine"] is mine and FUSION_RULES["other"] is installed.other
    with pytest.raises(PatternError, match="another definition has its name"):
        operator_of(installed.mine)


@pytest.fixture
def no_patterns(monkeypatch):
    """As in a process where none is loaded yet; afterwards as before, in the same order."""
    import fusion_backend.patterns as rooms

    before = dict(FUSION_RULES), dict(OPS)
    FUSION_RULES.clear(), OPS.clear()
    for room in ("gelu", "rms_norm", "rotary"):
        monkeypatch.setattr(rooms, room, getattr(rooms, room))
        monkeypatch.delitem(sys.modules, f"fusion_backend.patterns.{room}")
    yield rooms
    for registry, patterns in zip((FUSION_RULES, OPS), before, strict=True):
        registry.clear()
        registry.update(patterns)


def test_a_user_may_define_a_built_in_pattern_first(no_patterns, monkeypatch):
    """Of its file the other patterns are loaded, and so is every other file, but for one that
    cannot be.
    """
    monkeypatch.setitem(sys.modules, "fusion_backend.patterns.rotary", None)

    @Pattern
    def gelu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.7 * x)

    with pytest.warns(RuntimeWarning) as told:
        importlib.reload(no_patterns)
    assert FUSION_RULES == {
        "gelu": gelu,
        "rms_norm": sys.modules["fusion_backend.patterns.rms_norm"].rms_norm,
    }
    assert {*OPS} == {"gelu", "rms_norm", "branchless_gelu"}
    clash, failure = sorted((str(w.message) for w in told), key=len, reverse=True)
    assert re.search(
        r"\(.*gelu.py:\d+\): the name is taken by pattern gelu \(.*definitions.py:\d+\); it is",
        clash,
    )
    assert "the built-in patterns of rotary.py cannot be loaded" in failure


def test_a_global_that_is_bound_again_counts():
    """What a name means is asked at every compilation, and a helper may stand below the pattern."""
    notebook = {"__name__": "__main__"}
    source = SOURCE.replace("FACTOR", "factor()") + "\ndef factor(): return FACTOR\nFACTOR = 2.0\n"
    exec(compile(source, "<cell>", "exec"), notebook)
    assert_fuses(lambda x: torch.tanh(x * 2.0), torch.ones(3), pattern="mine")
    notebook["FACTOR"] = 3.0
    torch.compiler.reset()
    assert_fuses(lambda x: torch.tanh(x * 2.0), torch.ones(3), pattern="mine", count=0)
    found = collect(lambda x: torch.tanh(x * 3.0), torch.ones(3))
    assert len(found.report.fused) == 1 and templates(notebook["mine"])
    torch.testing.assert_close(found.graphs[0](torch.ones(3))[0], torch.tanh(torch.full((3,), 3.0)))


def test_a_definition_with_other_arguments_is_called_with_its_own():
    """torch remembers the arguments of an operator by its name."""
    x = torch.randn(3)
    torch.library.opcheck(operator_of(define()).overload, (x, x, 2.0), test_utils="test_schema")
    unregister("mine")

    @Pattern
    def mine(x: Tensor) -> Tensor:
        return torch.tanh(x)

    torch.library.opcheck(operator_of(mine).overload, (x,), test_utils="test_schema")
