"""What a user installs: one top-level package, found by name, whatever folders lie about where the
user works.
"""

import email
import os
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import fusion_backend
from fusion_backend.frontends.loading import patterns

ROOT = Path(__file__).parent.parent
SHIPPED = ("pyproject.toml", "README.md", "fusion_backend", "patterns")

# Once torch has found the backend, all patterns are loaded, and two of them are kept: to trace the
# others takes time.
KEPT = """
    assert "fusion_backend" in sys.modules
    from fusion_backend.frontends.loading import patterns
    from fusion_backend.ops.registry import unregister

    known = {p.name for p in patterns()}
    assert "add_mul" in known and len(known) > 10, known
    for name in known - {"add_mul", "tanh_gate"}:
        unregister(name)
"""

# What Inductor would compile runs operator by operator, as under tests/eager_kernels.py.
EAGER = """
    import torch._functorch.config
    import torch._inductor.compile_fx
    from functorch.compile import make_boxed_func

    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.compile_fx._compile_fx_inner = lambda gm, *_, **__: make_boxed_func(gm.forward)
    assert "fusion_backend" not in sys.modules
"""

# Run from a folder with a patterns/ of its own. The backend is found by its name alone, through the
# entry point.
USER_SCRIPT = f"""
    import sys
    import torch
    {EAGER.strip()}

    options = {{"fusion.gate": "always"}}
    f = torch.compile(lambda x, y: (x + y) * 0.5, backend="fusion", options=options)
    {KEPT.strip()}
    x = torch.arange(24.0).reshape(4, 6)
    torch.testing.assert_close(f(x, x + 1), x + 0.5)
    assert "patterns" not in sys.modules
    fusion_backend = sys.modules["fusion_backend"]
    report = fusion_backend.report()
    assert [site.pattern for site in report.sites if site.fused] == ["add_mul"], report
    print(fusion_backend.__file__)
    print(sys.modules["fusion_backend.patterns"].__file__)
"""

# All commands in one process.
COMMANDS_SCRIPT = """
    import contextlib, io, json, sys
    import torch
    import fusion_backend
    from fusion_backend.frontends.command_line import main
    from fusion_backend.frontends.loading import patterns
    from fusion_backend.ops.registry import unregister

    assert "benchmarks" not in sys.modules and CHECKOUT not in sys.path
    everything = {p.name for p in patterns()}
    for name in everything - {"add_mul", "layer_norm"}:  # all are loaded, tracing them takes time
        unregister(name)

    def run(*argv):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([*argv])
        return status, out.getvalue(), err.getvalue()

    site = fusion_backend.explain(
        lambda x, y: (x + y) * 0.5, *torch.ones(2, 4), options={"fusion.gate": "always"}
    ).fused[0]
    assert site.pattern == "add_mul", site
    status, out, err = run("doctor", "--json")
    found = {c["name"]: c for c in json.loads(out)["checks"]}
    assert status == 0 and json.loads(out)["ready"], out
    assert found["fusion"]["found"] == fusion_backend.__version__
    assert "compiled for" in found["kernel"]["found"], found["kernel"]
    status, out, err = run("catalogue")
    assert status == 0 and "| [layer_norm](#layer_norm) |" in out, out[:2000]
    status, out, err = run("gate", "show", "layer_norm")
    assert status == 0 and "which is not installed here" in out, out
    status, out, err = run("bench", "--model", "plain_vit")
    assert status == 2 and "clone the repository" in err, err
    print(fusion_backend.__file__)
"""

THEIR_PATTERN = '''
from torch import Tensor
import torch
from fusion_backend import Pattern

@Pattern
def tanh_gate(x: Tensor, y: Tensor) -> Tensor:
    """x tanh(y)"""
    return x * torch.tanh(y)
'''

# In the process of the other script, where theirs is installed as well.
THEIR_SCRIPT = """
    fusion_backend.reset()
    f = torch.compile(lambda x, y: torch.tanh(y) * x, backend="fusion", options=options)
    x = torch.linspace(-2, 2, 12).requires_grad_()
    y = f(x, x)
    y.sum().backward()
    torch.testing.assert_close(y, x * x.tanh())
    torch.testing.assert_close(x.grad, (x.tanh() + x * (1 - x.tanh() ** 2)).detach())
    report = fusion_backend.report()
    assert [site.pattern for site in report.sites if site.fused] == ["tanh_gate"], report
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is packaged, so that a build leaves nothing in the checkout."""
    # By metadata: merely looking for the module pip makes setuptools give up its distutils in this
    # process.
    installed = {
        name: int(version(name).split(".")[0])
        for name in ("pip", "setuptools")
        if is_installed(name)
    }
    if installed.get("setuptools", 0) < 77 or "pip" not in installed:
        pytest.skip(
            "pip or setuptools >= 77 is not installed here, and a build would have to download them"
        )
    folder = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    call(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            str(source),
        ]
    )
    (file,) = folder.glob("*.whl")
    return file


def is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def call(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def environment(folder: Path) -> str:
    """The Python of a new environment that sees this one's packages, but not a project installed
    here as editable.
    """
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "packages_of_the_parent.pth").write_text("\n".join(packages))
    return str(folder / "bin" / "python")


def install(python: str, *what: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
    ]
    call([*command, "--no-build-isolation", "--ignore-installed", *what])


def run_script(python: str, folder: Path, text: str, **variables: str) -> list[str]:
    """Run a user's script in a folder with a patterns package that must never be imported; what it
    prints, by line.
    """
    (folder / "patterns").mkdir()
    (folder / "patterns" / "__init__.py").write_text(
        "raise AssertionError('the user\\'s own patterns was imported')\n"
    )
    (folder / "script.py").write_text(textwrap.dedent(text))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return call([python, "script.py"], cwd=folder, env=clean | variables).splitlines()


def test_the_wheel_has_one_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"{wheel.name.partition('-py3')[0]}.dist-info"
    assert {name.split("/")[0] for name in names} == {"fusion_backend", info}
    shipped = {name for name in names if name.endswith(".py")}
    core = {str(path.relative_to(ROOT)) for path in (ROOT / "fusion_backend").rglob("*.py")}
    patterns = ROOT / "patterns"
    rooms = {f"fusion_backend/patterns/{p.relative_to(patterns)}" for p in patterns.rglob("*.py")}
    assert shipped == core | rooms
    assert "fusion_backend/py.typed" in names


def test_what_a_package_index_shows(wheel):
    """The licence and the addresses are not in the repository, so none is claimed."""
    (name,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    about = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    classifiers = about.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    assert "Programming Language :: Python :: 3.11" in classifiers
    assert about["Requires-Python"] == ">=3.11" and about["Summary"] and about.get_payload()
    assert set(about.get_all("Provides-Extra")) == {"test", "bench", "dev"}
    core = {r for r in about.get_all("Requires-Dist") if "extra" not in r}
    assert core == {"torch>=2.11", "triton>=3.6"}
    licences = [ROOT / name for name in ("LICENSE", "LICENSE.txt", "COPYING")]
    assert any(map(Path.exists, licences)) or not [
        key for key in about if key.startswith("License")
    ]


def test_public_names():
    """What `dir` shows is there, and no more than the names that are documented."""
    assert sorted(dir(fusion_backend)) == sorted([*fusion_backend.__all__, "__version__"])
    assert all(getattr(fusion_backend, name) is not None for name in dir(fusion_backend))
    assert fusion_backend.__version__ == version("fusion-backend")
    with pytest.raises(AttributeError, match="module 'fusion_backend' has no attribute 'explian'"):
        fusion_backend.explian  # noqa: B018


def test_every_file_of_patterns_is_loaded():
    """A new pattern is a new file, and no entry in a list."""
    patterns()
    loaded = {
        name.rpartition(".")[2]
        for name in sys.modules
        if name.startswith("fusion_backend.patterns.")
    }
    assert {path.stem for path in (ROOT / "patterns").glob("*.py")} - {"__init__"} <= loaded


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The interpreter of an environment that has the wheel."""
    python = environment(tmp_path_factory.mktemp("installed") / "venv")
    install(python, str(wheel))
    return python


def test_a_wheel_works_beside_a_folder_named_patterns(installed, tmp_path):
    """And another package adds a pattern, by its entry point."""
    theirs = tmp_path / "theirs"
    info = theirs / "their_patterns-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-patterns\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fusion_backend.patterns]\ngates = their_patterns\n")
    (theirs / "their_patterns.py").write_text(THEIR_PATTERN)
    script = USER_SCRIPT + THEIR_SCRIPT
    package, patterns = run_script(installed, tmp_path, script, PYTHONPATH=str(theirs))
    assert (
        package.startswith(str(Path(installed).parents[1]))
        and Path(patterns) == Path(package).parent / "patterns" / "__init__.py"
    )


def test_the_commands_of_a_wheel(installed, tmp_path):
    """Without the checkout: no benchmarks, no results, and a kernel that is really compiled."""
    script = f"CHECKOUT = {str(ROOT)!r}\n{textwrap.dedent(COMMANDS_SCRIPT)}"
    (package,) = run_script(installed, tmp_path, script, TRITON_INTERPRET="0")
    assert package.startswith(str(Path(installed).parents[1]))
    command = Path(installed).parent / "fusion"  # the console script
    assert "from fusion_backend.frontends.command_line import main" in command.read_text()


@pytest.mark.full
def test_an_editable_install_works_beside_a_folder_named_patterns(source, tmp_path):
    python = environment(tmp_path / "venv")
    install(python, "-e", str(source))
    package, patterns = run_script(python, tmp_path, USER_SCRIPT)
    assert package == str(source / "fusion_backend" / "__init__.py")
    assert patterns == str(source / "patterns" / "__init__.py")


def test_a_bare_import_of_patterns_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", "import patterns"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode and "ImportError: import fusion_backend.patterns" in done.stderr, (
        done.stderr
    )


def test_import_costs_little_beyond_torch():
    code = """
        import time
        started = time.process_time()
        import torch
        with_torch = time.process_time()
        import fusion_backend
        print((time.process_time() - with_torch) / (with_torch - started))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    # somebody else's load? look again
    assert any(float(call(command)) <= 0.1 for _ in range(2))
