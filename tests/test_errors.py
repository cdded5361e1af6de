"""What is said to a user who calls something in a wrong way: what to do instead."""

import pytest
import torch
from torch import Tensor, nn

import fusion_backend
from fusion_backend import Pattern, PatternError
from fusion_backend.compat.torch import inductor
from fusion_backend.frontends.dynamo import FusionBackend
from fusion_backend.options import parse
from fusion_backend.testing import check_pattern


@pytest.fixture(scope="module")
def program():
    return torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),))


@pytest.mark.parametrize("given", [nn.Linear(2, 2), torch.sin, torch.fx.symbolic_trace(nn.ReLU())])
def test_fuse_takes_an_exported_program(given):
    with pytest.raises(TypeError) as told:
        fusion_backend.fuse(given)
    assert str(told.value) == (
        f"fuse takes a torch.export.ExportedProgram, not {type(given).__name__}: call "
        "torch.export.export(model, inputs) first, or compile the model with "
        'torch.compile(model, backend="fusion")'
    )


@pytest.mark.parametrize(
    "options", [{"max_autotune": True}, {"options": {}}, {"fusion.gate": "always"}]
)
def test_fuse_has_no_options_of_a_compiler(program, options):
    (name,) = options
    with pytest.raises(ValueError) as told:
        fusion_backend.fuse(program, **options)
    assert str(told.value).startswith(
        f"fuse has no option {name}; it has only, skip, limit, gate, exact_masks, dump. "
    )


class NormModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_class_as_a_pattern():
    with pytest.raises(PatternError) as told:
        Pattern(NormModule)
    said = str(told.value)
    assert "a pattern must be a plain function, written with def; NormModule is a class (" in said
    assert said.endswith("decorate a function of tensors that computes what it computes")


@pytest.mark.parametrize(
    "given, said",
    [
        (nn.Sequential(nn.ReLU(), nn.ReLU()), "what is decorated is of type Sequential"),
        ("soft_clip", "'soft_clip' is of type str"),
        (staticmethod(torch.sin), "sin is of type staticmethod"),
    ],
)
def test_something_else_as_a_pattern(given, said):
    with pytest.raises(PatternError) as told:
        Pattern(given)
    assert str(told.value) == f"a pattern must be a plain function, written with def; {said}"


def of_two_rows():
    @Pattern
    def of_two_rows(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x) * y

    return of_two_rows


def test_a_missing_comma_in_the_inputs(scratch):
    """A tensor of two rows would be two arguments."""
    pattern = of_two_rows()

    @pattern.inputs(dict(n=4))
    def _(tensor, n):
        return tensor(2, n)

    with pytest.raises(PatternError) as told:
        check_pattern(pattern)
    assert str(told.value).startswith(f"{pattern.where}: the inputs at line ")
    assert str(told.value).endswith(
        "returned FakeTensor, not a tuple of arguments; a single argument needs a comma, "
        "`return (tensor(4, 8),)`"
    )


def test_inputs_without_their_call(scratch):
    """`@pattern.inputs` would take the function for a dict of sizes, and forget it."""
    pattern = of_two_rows()
    with pytest.raises(PatternError) as told:

        @pattern.inputs
        def _(tensor):
            return tensor(3), tensor(3)

    assert f"{pattern.where}: inputs takes a dict of sizes for each example" in str(told.value)


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"max_autotune": "yes"}])
def test_an_option_of_inductors_is_refused_in_its_words(options):
    """By Inductor's own checker, before anything of ours runs."""
    with pytest.raises(RuntimeError) as theirs:
        torch.compile(torch.sin, options=options)
    with pytest.raises(RuntimeError) as ours:
        FusionBackend()(None, [], options={"fusion.gate": "never", **options})
    assert str(ours.value) == str(theirs.value)
    assert str(ours.value).startswith("Unexpected ")


def test_a_mode_goes_with_options_as_options():
    """torch.compile refuses both before it looks at the backend; docs/debugging.md says this."""
    both = {**torch._inductor.list_mode_options("max-autotune"), "fusion.gate": "always"}
    ours, theirs = parse(both, [])
    assert ours.gate == "always"
    assert inductor(None, theirs).config == inductor("max-autotune", None).config != {}
    with pytest.raises(RuntimeError, match="^Either mode or options can be specified"):
        torch.compile(torch.sin, backend="fusion", mode="max-autotune", options=both)
