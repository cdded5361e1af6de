"""Numbers, axes and the image of README.md, as the pages of runs and the README show them."""

import xml.etree.ElementTree
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.html_pages import document, lanes, models_image, pattern_charts, units
from benchmarks.pages.markdown import Wrong
from tests.test_benchmark_pages import model_run, pattern_run, spread

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "form, value, words",
    [
        (units.time, 0.0651, "65.1 µs"),
        (units.time, 1.4753, "1.48 ms"),
        (units.time, 0.9999, "1.00 ms"),
        (units.time, 12345.0, "12.3 s"),
        (units.bandwidth, 2.82606e12, "2.83 TB/s"),
        (units.size, 8, "8 B"),
        (units.size, 150109880320, "150 GB"),
        (units.operations, 2.82606e12, "2.83 TFLOP"),
        (units.speed, 8.02882e14, "803 TFLOP/s"),
        (units.times, 2.1437, "2.14×"),
        (units.times, 292.49, "292×"),
        (units.tick, 0.05, "0.05×"),
        (units.tick, 10.0, "10×"),
        (units.error, 0.00165806, "0.17%"),
        (units.error, 1.2e-7, "0.12 ppm"),
        (units.share, 0.957, "96%"),
        (units.time, None, "–"),
    ],
)
def test_units(form, value, words):
    assert form(value) == words


def test_labels_of_an_axis_have_room():
    for low, high, log in ((0.9, 12, True), (0.05, 1.05, True), (0.98, 1.03, True), (0, 1, False)):
        axis = lanes.Axis(low, high, units.tick, log=log, line=1.0)
        places = [axis.at(tick) for tick in axis.ticks()]
        assert len(places) >= 3 and 1.0 in axis.ticks()
        assert all(b - a >= axis.gap - 1e-9 for a, b in zip(places, places[1:], strict=False))
        assert all(0 <= place <= 100 for place in places)


def test_what_is_far_away_does_not_flatten_the_rest():
    ratios = [1.0 + i / 100 for i in range(100)]
    assert pattern_charts.limit([*ratios, 94.0, 292.0]) == pytest.approx(1.99)
    assert pattern_charts.limit([*ratios, 3.5]) == 3.5
    run = pattern_run()
    few = next(row for row in run.rows if row.pattern == "add_mul" and row.train)
    few.of("fusion").kernel = spread(few.of("inductor").kernel.median / 300)
    assert "300× →" in document.page(run)


def test_the_image_of_the_models(tmp_path):
    """It is written from the results, and --check says when it is not."""
    path = tmp_path / models_image.RESULTS
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / models_image.RESULTS).read_text())
    assert readme.main(["--check"], tmp_path) == 1
    assert readme.main([], tmp_path) == 0 == readme.main(["--check"], tmp_path)
    image = tmp_path / "docs" / "images" / "models.svg"
    tree = xml.etree.ElementTree.fromstring(image.read_text())
    words = ["".join(part.itertext()) for part in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "ViT inference" in words and "2.41×" in words and "1.29×" in words
    assert any("NVIDIA H200" in word for word in words)
    assert any(models_image.RESULTS in word for word in words)
    described = tree.find("{http://www.w3.org/2000/svg}desc").text
    assert "ViT inference: fusion 2.41× plain Inductor and 1.29× eager" in described
    assert "prefers-color-scheme: dark" in image.read_text()
    image.write_text(image.read_text().replace("2.41×", "2.42×"))
    assert readme.main(["--check"], tmp_path) == 1


def test_an_image_of_models_that_were_not_timed():
    with pytest.raises(Wrong, match="no row nobody"):
        models_image.models_image(model_run(), ("nobody",))
    with pytest.raises(Wrong, match="no times of eager.*mine:build train"):
        models_image.models_image(model_run(), ("plain_llama train", "mine:build train"))
