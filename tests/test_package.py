"""What a person gets who installs bitcycle: a wheel that needs no checkout, light imports, and the command `bitcycle`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import bitcycle
from bitcycle import cli, files, optional_imports
from bitcycle.door import sub_commands
from bitcycle.errors import RunError
from bitcycle.optional_imports import explain_missing, require
from bitcycle.sweep.local import train_command
from bitcycle.training.run_folder import RunFolder
from tests.conftest import ROOT, plan

SOURCES = (".py", ".cpp", ".h", ".typed")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this checkout, unpacked as an installer unpacks it."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    copy = folder / "source"  # setuptools would leave its build folder in the checkout
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"], capture_output=True, check=True
    )
    for name in filter(None, names.stdout.decode().split("\0")):
        if name.split("/")[0] in {"src", "conf", "sweeps", "results"} or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                (copy / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], check=True)
    [file] = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_wheel_has_everything_that_a_checkout_has(wheel):
    inside = wheel / "bitcycle" / "resources"
    for folder in ("conf", "sweeps", "results/published", "results/manifest"):
        ours = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.suffix in (".yaml", ".csv")}
        assert ours and ours <= {p.relative_to(inside) for p in inside.rglob("*")}, folder
    sources = {p.relative_to(ROOT / "src") for p in (ROOT / "src" / "bitcycle").rglob("*") if p.suffix in SOURCES}
    assert all((wheel / path).is_file() for path in sources)
    [metadata] = wheel.glob("bitcycle-*.dist-info")
    assert "License-Expression: MIT" in (metadata / "METADATA").read_text()
    assert (metadata / "licenses" / "LICENSE").is_file()
    entry_points = ConfigParser()
    entry_points.read(metadata / "entry_points.txt")
    assert dict(entry_points["console_scripts"]) == {"bitcycle": "bitcycle.cli:main"}


def test_installed_command_trains_from_an_empty_folder(wheel, tmp_path):
    """And knows the sweeps, with configuration and plugins of the wheel alone."""
    run = ["dataset=digits", "model=resnet8", "scale=smoke", "training.steps=2", "training.evaluation_steps=null"]
    environment = {**os.environ, "PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", TWO_COMMANDS, *run]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    [summary] = (tmp_path / "results" / "runs").rglob("summary.json")
    assert json.loads(summary.read_text())["total_steps"] == 2
    assert "did you mean 'cpt/table2'" in done.stderr, done.stderr


TWO_COMMANDS = """
import sys
from bitcycle.cli import main
sys.argv[0] = "bitcycle"
assert main() == 0
sys.argv[1:] = ["-m", "+sweeps=cpt/table22"]
sys.exit(main())
"""


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


LIGHT = {
    "import bitcycle": set(),
    "import bitcycle.schedule": set(),
    # of the papers, the command line reads only the table of their sub-commands
    "import bitcycle.cli": {"cli", "door", "reproduction"},
    "import bitcycle.training.naming": {"training"},
}


@pytest.mark.parametrize("statement", LIGHT)
def test_light_imports(statement):
    loaded = imported_by(statement)
    assert not loaded & {"torch", "numpy", "hydra", "omegaconf", "rich", "scipy", "pandas"}
    ours = {name.split(".")[1] for name in loaded if name.startswith("bitcycle.")}
    assert ours <= {
        "precision",
        "schedule",
        "settings",
        "presets",
        "errors",
        "files",
        "signals",
        "threads",
        *LIGHT[statement],
    }
    assert not [name for name in loaded if name.startswith("bitcycle.reproduction.")]


OPTIONAL = {
    *(
        "torchvision",
        "transformers",
        "dgl",
        "ogb",
        "datasets",
        "wandb",
        "pandas",
        "pyarrow",
        "scipy",
        "sklearn",
        "statsmodels",
    ),
    *(
        "matplotlib",
        "jinja2",
        "torchmetrics",
        "PIL",
        "lightning",
        "accelerate",
        "timm",
        "onnx",
        "onnxruntime",
        "onnxscript",
    ),
    *("tokenizers", "soundfile", "tensorboard", "submitit", "optuna", "huggingface_hub", "pycocotools", "sqlalchemy"),
}


def test_the_interface_imports_little_besides_torch():
    """All of it together stays within 1.15 times the time of `import torch`."""
    everything = (
        "import torch; before = set(sys.modules); import bitcycle; [getattr(bitcycle, n) for n in bitcycle.__all__]"
    )
    code = f"import sys; {everything}; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    roots = {name.split(".")[0].lstrip("_") for name in loaded}
    assert "bitcycle.layer.conversion.convert" in loaded
    assert roots - set(sys.stdlib_module_names) <= {"bitcycle", "numpy", "safetensors", "decimal"}


DRY_RUN = """
import sys, torch
before = set(sys.modules)
from bitcycle import cli
sys.argv[1:] = ["schedule=RTH", "model=resnet74", "dry_run=json"]
assert cli.main() == 0
print(*set(sys.modules) - before)
"""


def test_a_dry_run_imports_little_besides_torch_and_hydra():
    """It stays within 1.6 times the time of `import torch` if the network's products are in the cache, as after a first run: to
    list them, PyTorch imports its compiler."""
    assert plan("schedule=RTH", "model=resnet74").workload
    done = subprocess.run([sys.executable, "-c", DRY_RUN], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"sympy", "torch._dynamo", "torch._inductor", "torch.utils.flop_counter"}
    assert not {name.split(".")[0] for name in loaded} & OPTIONAL
    assert "bitcycle.training.plan" in loaded
    assert len(loaded) < 450


def test_few_packages_are_required():
    required = {re.split(r"[<>=]", line)[0] for line in PROJECT["dependencies"]}
    assert required == {"torch", "numpy", "hydra-core", "omegaconf", "pyyaml", "rich", "safetensors", "filelock"}


WITHOUT_OPTIONAL = f"""
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {OPTIONAL} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]

import torch
from torch import nn
import bitcycle
from bitcycle import cli

def command(*arguments):
    sys.argv[:] = ["bitcycle", *arguments]
    return cli.main()

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
model = bitcycle.quantize_model(model, sample=torch.zeros(1, 4))
control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", q_min=3, q_max=8, cycles=1, total_steps=2))
for step in range(2):
    control.step(step)
    model(torch.randn(4, 4)).sum().backward()
assert 0 < control.cost().relative_to_static < 1
bitcycle.conversion_report(model, torch.zeros(1, 4))
bitcycle.finalize(model.eval(), path="model.safetensors")
bitcycle.load_finalized(model, "model.safetensors")
try:
    bitcycle.export_onnx(model, "model.onnx", torch.zeros(1, 4))
except RuntimeError as error:
    print(error, file=sys.stderr)

assert command("schedule=RTH", "model=resnet74", "dry_run=true") == 0
assert [command("--help", group) for group in ("dataset", "model", "task", "quantizer", "schedule")] == [0] * 5
assert command("dataset=digits", "model=resnet8", "scale=smoke") == 1
assert command("advise") == 1
"""


def test_what_needs_no_optional_package_works_without_any(wheel, tmp_path):
    """And what needs one names it, and the extra that includes it."""
    environment = {**os.environ, "PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-P", "-c", WITHOUT_OPTIONAL]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "60.1 %" in done.stdout
    assert re.search(
        r"^onnxscript is not installed: pip install .*'onnx>=.*\(the extra export\)$", done.stderr, re.MULTILINE
    )
    words = r"^run failed: torchmetrics is not installed: pip install 'torchvision>=.*\(the extra images\)$"
    assert re.search(words, done.stderr, re.MULTILINE)
    assert re.search(
        r"^run failed: pandas is not installed: pip install 'pandas>=.*extras .*reproduction", done.stderr, re.M
    )


def test_every_optional_module_belongs_to_an_extra(monkeypatch):
    extras = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name not in ("all", "dev")}
    declared = [f"{line.split(';')[0]}; extra == '{name}'" for name, lines in extras.items() for line in lines]
    monkeypatch.setattr(optional_imports, "requires", lambda _: declared)
    for module in (
        "torchvision",
        "PIL.Image",
        "sklearn",
        "datasets",
        "pandas",
        "pyarrow.parquet",
        "scipy",
        "torchmetrics",
    ):
        sentence = explain_missing(ModuleNotFoundError("", name=module))
        assert sentence is not None and "the extra" in sentence, module
    assert explain_missing(ModuleNotFoundError("", name="no_such_module")) is None


def test_every_public_name_is_there():
    assert set(bitcycle.__all__) <= set(dir(bitcycle))
    for name in bitcycle.__all__:
        assert callable(getattr(bitcycle, name)), name
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = bitcycle.quantise


def test_schedule_is_the_function_whatever_was_imported_first():
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import bitcycle.schedule.cyclic, bitcycle; print(bitcycle.schedule('CR', total_steps=8)(0))",
        ],
        capture_output=True,
        text=True,
    )
    assert loaded.stdout.startswith("Precision("), loaded.stderr


@pytest.mark.parametrize("word", sub_commands())
def test_sub_commands_are_modules_that_run(word):
    module = sub_commands()[word].module
    spec = importlib.util.find_spec(f"{module}.__main__") if _is_package(module) else importlib.util.find_spec(module)
    assert spec is not None and '__name__ == "__main__"' in Path(spec.origin).read_text(), word


def _is_package(module: str) -> bool:
    return importlib.util.find_spec(module).submodule_search_locations is not None


def test_unknown_sub_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bitcycle", "statsu"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert cli.main() == 2
    assert "did you mean 'status'" in capsys.readouterr().err


@pytest.mark.parametrize("word", sub_commands())
def test_sub_commands_explain_themselves(word, monkeypatch, capsys):
    """The benchmark's help once failed on a percent sign."""
    monkeypatch.setattr(sys, "argv", ["bitcycle", word, "--help"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with contextlib.suppress(SystemExit):
        assert cli.main() == 0
    out = capsys.readouterr().out
    assert len(out) > 60 and "python -m" not in out, "the command has a name of its own"


@pytest.mark.parametrize("word", ["status", "collect", "manifest"])
def test_arguments_of_sub_commands_are_explained(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bitcycle", word, "--help"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit):
        cli.main()
    assert "default:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("figures", "better"), "unrecognized arguments: better"),
        (("collect", "no/such/folder"), ""),
        (("status", "huge"), "scale"),
    ],
)
def test_sub_commands_refuse_arguments_that_they_do_not_have(words, remedy, monkeypatch, tmp_path, capsys):
    """`figures better` once replaced the verdicts on all papers with those on one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bitcycle", *words])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main())
    assert ended.value.code not in (0, None) and not list(tmp_path.iterdir())
    assert remedy in capsys.readouterr().err


def test_help_that_nobody_reads_to_the_end():
    done = subprocess.run(
        f"{sys.executable} -m bitcycle --help schedule | head -n 1", shell=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("SCHEDULE:") and done.stderr == ""


def test_resources_of_a_package_without_any(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "__file__", str(tmp_path / "lib" / "bitcycle" / "files.py"))
    with pytest.raises(FileNotFoundError, match="no configuration files"):
        files.resource_root()


def test_runs_of_a_sweep_are_started_with_or_without_a_checkout(tmp_path):
    assert train_command(ROOT, ["seed=1"]) == [str(ROOT / "train.py"), "seed=1"]
    assert train_command(tmp_path, ["seed=1"]) == ["-m", "bitcycle", "seed=1"]


def test_missing_library_names_what_to_install():
    """bitcycle itself is on no index: an extra is named by its packages."""
    with pytest.raises(RunError, match=r"pip install .*'soundfile>=[\d.]+") as error:
        require("no_such_module", "speech")
    assert "bitcycle[" not in str(error.value)


def test_no_text_advises_to_install_an_unpublished_name():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("conf/**/*.yaml"), *ROOT.glob("src/**/*.py")]
    advice = [
        path for path in texts if "install 'bitcycle[" in (text := path.read_text()) or "install bitcycle" in text
    ]
    assert advice == []


def test_citation_names_software_and_five_papers():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (bitcycle.__version__, "MIT")
    assert len(citation["references"]) == 5
    assert all(
        reference["authors"] and reference["title"] and reference["year"] for reference in citation["references"]
    )
    assert PROJECT["version"] == bitcycle.__version__
    assert f"## {bitcycle.__version__}" in (ROOT / "CHANGELOG.md").read_text()


WITHOUT_UNIX = """
import os, signal, sys
for name in ("SIGUSR1", "SIGUSR2", "SIGKILL"):
    delattr(signal, name)
for name in ("sched_getaffinity", "setpgrp", "fork", "setsid"):
    delattr(os, name)
sys.argv = ["bitcycle", *sys.argv[1:]]
from bitcycle.cli import main
sys.exit(main())
"""


def test_single_run_on_a_system_without_unix_signals(tmp_path):
    """What Windows and macOS lack is taken away; nothing else of them is tried here."""
    run = ["dataset=digits", "model=resnet8", "scale=smoke", "training.steps=2", "training.evaluation_steps=null"]
    command = [sys.executable, "-c", WITHOUT_UNIX, *run, f"results_root={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_lock_that_was_just_taken_names_no_process(tmp_path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with first.lock():
        with pytest.raises(RunError, match="just begun") as error, second.lock():
            pass
        assert "None" not in str(error.value)
        assert second.is_in_use()
    assert not second.is_in_use()


READS = """
import sys
from pathlib import Path
from bitcycle.files import read_csv, read_json, write_csv
from bitcycle.reproduction.measurement.artifacts import Result, read_result, write_result
folder, name = Path(sys.argv[1]), chr(0xe4)
write_csv(folder / "a.csv", ["name"], [{"name": name}])
(folder / "a.json").write_bytes(b'["' + name.encode() + b'"]')
write_result(folder / "b.csv", Result({"columns": ["noise"]}, [{"noise": name}]))
assert read_csv(folder / "a.csv") == [{"name": name}]
assert read_json(folder / "a.json") == [name]
assert read_result(folder / "b.csv").rows == [{"noise": name}]
"""


def test_files_are_read_in_utf8_in_every_locale(tmp_path):
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", READS, tmp_path], env=ascii_only, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_removes_no_folder_but_that_of_an_environment(tmp_path):
    """A setup that failed, and clean, removed whatever VENV named."""
    python, kept = tmp_path / "python", tmp_path / "folder"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && mkdir -p "$3" && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    kept.mkdir()
    (kept / "thesis.txt").touch()
    for target, venv in (("setup", kept), ("clean", kept), ("setup", tmp_path / "new")):
        words = ["make", target, f"VENV={venv}", f"PYTHON={python}"]
        assert subprocess.run(words, cwd=ROOT, capture_output=True).returncode != 0
    assert (kept / "thesis.txt").exists() and not (tmp_path / "new").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("words", "is_dry"), [((), False), (("DRY=0",), False), (("DRY=1",), True)])
def test_a_day_on_a_gpu_is_planned_only_if_asked_for(words, is_dry):
    """DRY=0 planned it, too."""
    done = subprocess.run(["make", "-n", "gpu-day", *words], cwd=ROOT, capture_output=True, text=True)
    assert ("--dry-run" in done.stdout) == is_dry and " gpu-day " in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_builds_of_pytorch_are_chosen_by_the_command_line_and_kept(tmp_path):
    """A variable CPU of the system's, as of SUSE's, chose them, and an update brought the others."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "cpu.lock").touch()
    for words, exported, is_cpu in (
        (["VENV=.new", "CPU=1"], "", True),
        (["VENV=.new", "CPU=0"], "", False),
        (["VENV=.new"], "x86_64", False),
        ([f"VENV={tmp_path}/kept"], "", True),
    ):
        environment = {**os.environ, **({"CPU": exported} if exported else {})}
        done = subprocess.run(
            ["make", "-n", "setup", *words], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert ("--torch-backend cpu" in done.stdout) == is_cpu, (words, done.stderr)
