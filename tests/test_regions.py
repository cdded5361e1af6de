"""What is cut out around a site, and what it is called."""

import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.measure.inputs import made_up
from fusion_backend.measure.region import MOST_NODES
from fusion_backend.options import Options
from tests.measured_cases import NORMS, Block, cuts_of, names_of_sites, regions_of, rms


def names(region):
    found = [str(n.target).removeprefix("aten.").split(".")[0] for n in region.nodes]
    return [n for n in found if not n.startswith("<built-in")]


def test_a_region_ends_at_library_calls():
    linear, after = nn.Linear(16, 16), nn.Linear(16, 16)

    def fn(x):
        return after(torch.tanh(F.layer_norm(linear(x) * 2, (16,)))).sin()

    _, (region,) = regions_of(fn, torch.randn(4, 16), only="layer_norm")
    assert names(region) == ["mul", "layer_norm", "tanh"]


def test_a_residual_stream_does_not_join_the_layers():
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    options = Options(gate="always", only=("add_layer_norm", "layer_norm"))
    _, found = regions_of(blocks, torch.randn(2, 8, 16), options=options)
    assert [names_of_sites(r) for r in found].count(["add_layer_norm"]) == 5
    assert all(names(r).count("layer_norm") == 1 for r in found)


def test_what_is_computed_early_for_a_later_level_is_in_the_region_that_reads_it():
    linear = nn.Linear(16, 16)

    def fn(x, y):
        scale = y.sigmoid() * 2
        return F.layer_norm(linear(x) * scale, (16,))

    _, (region,) = regions_of(fn, torch.randn(4, 16), torch.randn(4, 16), only="layer_norm")
    assert names(region) == ["sigmoid", "mul", "mul", "layer_norm"]


def test_a_site_that_is_read_at_a_later_level_alone_is_in_the_region_that_reads_it():
    linear, after = nn.Linear(16, 16), nn.Linear(16, 16)

    def fn(x, c):
        return after(F.layer_norm(x, (16,)) * (1 + linear(c)))

    _, (region,) = regions_of(fn, torch.randn(4, 16), torch.randn(4, 16), only="layer_norm")
    assert names(region) == ["layer_norm", "add", "mul"]

    def read_early(x, c):
        y = F.layer_norm(x, (16,))
        return after(y) + y * linear(after(c))

    _, (region,) = regions_of(read_early, torch.randn(4, 16), torch.randn(4, 16), only="layer_norm")
    assert names(region) == ["layer_norm", "mul"]  # at its own level


def test_what_reads_a_value_later_element_by_element_belongs_to_the_region():
    up, down = nn.Linear(16, 16), nn.Linear(16, 16)

    def fn(x, y):
        h = x + y
        return h + down(up(F.layer_norm(h, (16,))).relu())

    x = torch.randn(4, 16)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            _, (region,) = regions_of(fn, x, x + 1, only="add_layer_norm")
            (cut,) = cuts_of(fn, x, x + 1, only="add_layer_norm")
        assert names(region) == ["add", "layer_norm", "add"] and not region.problem
        assert [n.name for n in cut.inputs][-1] == "linear_1" and len(cut.outputs) == 2
        given = [torch.randn(4, 16) for _ in cut.inputs]
        torch.testing.assert_close(
            cut.graph([])(*given), cut.graph(cut.region.sites)(*given), rtol=1e-5, atol=1e-5
        )


def test_a_concatenation_that_reads_a_value_later_belongs_to_the_region():
    """As in DLRM, where Inductor computes an activation in both concatenations."""
    up, down = nn.Linear(16, 16), nn.Linear(32, 16)

    def fn(x, y):
        h = F.layer_norm(up(x), (16,))
        return torch.cat((h, down(torch.cat((h, y), 1))), 1)

    cut, *others = cuts_of(fn, torch.randn(4, 16), torch.randn(4, 16), only="layer_norm")
    assert names(cut.region) == ["layer_norm", "cat", "cat"] and not others
    assert [n.name for n in cut.outputs] == ["cat", "cat_1"]


def test_a_result_of_the_graph_stays_with_what_makes_it():
    linear = nn.Linear(16, 16)

    def fn(x):
        h = x.sin() * 2
        return F.layer_norm(h, (16,)), linear(h)

    _, (region,) = regions_of(fn, torch.randn(4, 16), only="layer_norm")
    assert names(region) == ["sin", "mul", "layer_norm"]


def test_a_product_of_two_vectors_has_no_rows():
    def fn(x, a):
        return F.layer_norm(x * (a @ a), (16,))

    _, (region,) = regions_of(fn, torch.randn(4, 16), torch.randn(9), only="layer_norm")
    assert names(region) == ["mul", "layer_norm"]


def test_a_reduction_stays_at_its_level():
    linear = nn.Linear(16, 16)

    def fn(x, y):
        return F.layer_norm(linear(x) * y.sum(0), (16,))

    _, (region,) = regions_of(fn, torch.randn(4, 16), torch.randn(4, 16), only="layer_norm")
    assert "sum" not in names(region)


def test_a_convolution_belongs_to_the_region_it_touches():
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    norm = nn.GroupNorm(2, 8)

    def fn(x):
        return second(F.silu(norm(first(x)))) + 1

    _, (region,) = regions_of(fn, torch.randn(2, 3, 9, 9), only="group_norm")
    assert names(region) == ["conv2d", "group_norm", "silu", "conv2d"]


def test_a_product_whose_rows_inductor_pads_belongs_to_the_region():
    for rows, found in ((1030, ["linear", "softmax"]), (1056, ["softmax"])):
        head = nn.Linear(16, rows)

        def fn(x, head=head):
            return torch.softmax(head(x), -1)

        _, (region,) = regions_of(fn, torch.randn(4, 16), only="softmax")
        assert names(region) == found and not region.problem
    norm, after = nn.LayerNorm(1030), nn.Linear(1030, 1030)
    _, (region,) = regions_of(
        lambda x: after(norm(x).sin()), torch.randn(4, 1030), only="layer_norm"
    )
    assert names(region) == ["layer_norm", "sin"]


def test_a_product_whose_bias_inductor_adds_in_the_region_belongs_to_it():
    norm = nn.BatchNorm1d(16).eval()

    def found(layer, after, only, dtype=torch.float32):
        fn = nn.Sequential(layer, after).to(dtype)
        _, (region,) = regions_of(fn, torch.randn(4, 16, dtype=dtype), only=only)
        assert not region.problem
        return names(region)

    assert found(nn.Linear(16, 16), norm, "batch_norm") == ["linear", "batch_norm"]
    assert found(nn.Linear(16, 16, bias=False), norm, "batch_norm") == ["batch_norm"]
    assert found(nn.Linear(16, 16), norm, "batch_norm", torch.bfloat16) == ["batch_norm"]
    # the sum with the bias has to be in memory for a reduction
    assert found(nn.Linear(16, 16), nn.LayerNorm(16), "layer_norm") == ["layer_norm"]


def test_a_convolution_on_a_shortcut_does_not():
    stem, first, second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
    norm = nn.GroupNorm(2, 8)

    def fn(x):
        shortcut = stem(x)
        return F.silu(norm(second(F.silu(first(shortcut))) + shortcut))

    _, (region,) = regions_of(fn, torch.randn(2, 8, 9, 9), only="group_norm")
    assert names(region) == ["conv2d", "add", "group_norm", "silu"] and not region.problem


def test_a_convolution_that_reads_what_is_computed_later_belongs_to_the_region():
    """The product with a gate waits for the convolutions of the gate; the next convolution decides
    how it lies in memory.
    """
    gate, after = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def fn(x):
        y = F.group_norm(x, 2)
        return after(y * gate(y.mean((2, 3), keepdim=True)).sigmoid())

    _, (region,) = regions_of(fn, torch.randn(2, 8, 4, 4), only="group_norm")
    assert names(region) == ["group_norm", "mean", "conv2d", "mul", "conv2d"]
    assert not region.problem


def test_sites_that_inductor_could_fuse_with_each_other_share_a_region():
    def fn(x, y):
        return F.layer_norm(x, (16,)) * 2, torch.softmax(x * 3 + y, -1)

    _, found = regions_of(
        fn, torch.randn(4, 16), torch.randn(4, 16), only=["layer_norm", "softmax"]
    )
    assert len(found) == 2  # they have an input in common, and nothing else

    def joined(x):
        return torch.softmax(F.layer_norm(x, (16,)) * 2, -1)

    _, (region,) = regions_of(joined, torch.randn(4, 16), only=["layer_norm", "softmax"])
    assert names_of_sites(region) == ["layer_norm", "softmax"]


def test_integers_are_not_computed_in_a_region():
    table = nn.Embedding(7, 16)

    def one(fn, *inputs):
        _, (region,) = regions_of(fn, *inputs, only="layer_norm")
        return names(region)

    i, x = torch.randint(1, 7, (4,)), torch.rand(4, 16)
    read = ["embedding", "layer_norm"]
    assert one(lambda i: F.layer_norm(table(i * 3 % 7), (16,)), i) == read
    assert one(lambda x: F.layer_norm(table(x.argmax(-1) % 7), (16,)), x) == read
    assert one(lambda x: F.layer_norm(table((x[:, 0] * 6).long()), (16,)), x) == read
    assert one(lambda i: F.layer_norm(table(i.view(-1)), (16,)), i) == read


def test_what_is_written_at_an_index_is_not_in_a_region():
    def one(fn, *inputs):
        _, (region,) = regions_of(fn, *inputs, only="layer_norm")
        return names(region)

    i, x, keep = torch.randint(1, 4, (4,)), torch.rand(16, 16), torch.arange(16) < 3
    norm = ["layer_norm"]
    assert one(lambda x, i: F.layer_norm(x.index_add(0, i - 1, x[:4]), (16,)), x, i) == norm
    assert one(lambda x, i: F.layer_norm(x.scatter(0, i[None] + 2, 1.0), (16,)), x, i) == norm
    assert one(lambda x, i: F.layer_norm(x.index_put((i,), x[0, 0]), (16,)), x, i) == norm
    assert one(lambda x, m: F.layer_norm(x.masked_scatter(m, x[:4]), (16,)), x, keep) == norm
    assert one(lambda x: F.layer_norm(torch.bernoulli(x), (16,)), x) == norm


def test_a_cast_of_an_argument_that_is_read_before_is_computed_again():
    first, second = (nn.Linear(16, 16, bias=False) for _ in range(2))
    norm = nn.LayerNorm(16)

    def fn(x):
        h = F.dropout(norm(first(x)), 0.1, False)
        return norm(F.dropout(second(F.relu(h)), 0.1, False) + h)

    cut, _ = cuts_of(fn, torch.randn(4, 16), only="add_layer_norm")
    assert not cut.region.problem and len(cut.outputs) == 1
    assert names(cut.region) == ["dropout", "dropout", "add", "layer_norm"]
    inputs = made_up(cut, torch.device("cpu"))
    torch.testing.assert_close(cut.graph([])(*inputs), cut.graph(cut.region.sites)(*inputs))


def test_what_backward_computes_again_does_so_in_a_region():
    """An activation, that is; not the matrix product that it is part of."""
    x = torch.randn(4, 16, requires_grad=True)

    def marked(fn, *patterns):
        (cut,) = cuts_of(fn, x, only=("layer_norm", *patterns))
        assert len(cut.region.sites) == 1 + len(patterns)
        for d in cut.region.sites:
            d.backward = "kernel"
        nodes = cut.graph(cut.region.sites).graph.nodes
        return [str(n.target) for n in nodes if "recompute" in n.meta]

    assert marked(lambda x: F.layer_norm(F.gelu(x), (16,))) == ["aten.gelu.default"]
    assert marked(lambda x: F.layer_norm(F.gelu(x), (16,)), "gelu") == ["fusion.gelu.default"]
    weight = torch.randn(16, 16)
    assert marked(lambda x: F.layer_norm(F.gelu(x @ weight), (16,)), "linear_act") == []


def test_what_is_written_to_is_an_input():
    def fn(x, y):
        y = y[:]  # memory that others know
        y[:, 0] = 0
        return F.layer_norm(y * 2 + x, (16,))

    _, (region,) = regions_of(fn, torch.randn(4, 16), torch.randn(4, 16), only="layer_norm")
    assert names(region) == ["mul", "add", "layer_norm"]


def test_a_change_of_grad_mode_ends_a_region():
    def fn(x):
        with torch.no_grad():
            y = x * 2
        return F.layer_norm(y.sin(), (16,))

    _, (region,) = regions_of(fn, torch.randn(4, 16, requires_grad=True), only="layer_norm")
    assert names(region) == ["sin", "layer_norm"]


def test_a_region_of_too_many_operators_says_so():
    def fn(x):
        for _ in range(MOST_NODES):
            x = x.sin() + 1
        return F.layer_norm(x, (16,))

    _, (region,) = regions_of(fn, torch.randn(4, 16), only="layer_norm")
    assert "more than 256 operators" in region.problem


def test_layers_that_are_alike_have_one_text_and_others_have_others():
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(2, 8, 16)
    texts = [c.text() for c in cuts_of(blocks, x)]
    assert len(texts) > len({*texts}) >= 4
    again = [c.text() for c in cuts_of(blocks, x)]
    assert texts == again
    assert {*texts}.isdisjoint(c.text() for c in cuts_of(blocks, x.double().float()[:1]))
    with torch.no_grad():  # nobody wants gradients
        assert {*texts}.isdisjoint(c.text() for c in cuts_of(blocks, x))


def test_a_dynamic_size_is_named_by_the_power_of_two_above_it():
    def fn(x):
        return F.layer_norm(x.sin(), (16,))

    def text(rows):
        (cut,) = cuts_of(fn, torch.randn(rows, 16), only="layer_norm", dynamic=True)
        return cut.text()

    assert text(9) == text(16) != text(17)
    (static,) = cuts_of(fn, torch.randn(16, 16), only="layer_norm", dynamic=False)
    assert static.text() != text(16)


def test_a_cast_that_two_sites_read_joins_no_levels():
    linear = nn.Linear(16, 16)

    def fn(x, w):
        x = x.float()  # nothing, under another name
        x = x + linear(rms(x, w))
        return linear(rms(x, w)) + x

    _, found = regions_of(fn, torch.randn(4, 16), torch.ones(16), options=NORMS)
    assert len(found) == 2 and not any(r.problem for r in found)
