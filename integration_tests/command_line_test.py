"""`python -m keras_tp`: what the commands print, and what bad input gives."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import keras
import pytest

from integration_tests import launching
from keras_tp import __main__
from keras_tp import distribution as dist
from keras_tp.command_line import doctor
from keras_tp.command_line import options
from keras_tp.distribution import accelerators

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "command_line.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(.*?)\n```", PAGE, re.DOTALL)
BACKEND = keras.config.backend()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command line in a folder with the page's script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)

    def run_command(line):
        monkeypatch.setattr(sys, "argv", ["keras-tp", *shlex.split(line)])
        try:
            code = __main__.main()
        except SystemExit as e:
            code = e.code
        sys.modules.pop("train", None)
        return code, *capsys.readouterr()

    return run_command


def command(name):
    (line,) = [c for c in COMMANDS if c.startswith(f"keras-tp {name} ")]
    return line.removeprefix("keras-tp ")


def test_plan(run, tmp_path):
    code, said, _ = run(command("plan") + " --html p.html --save p.json")
    assert code == 0
    build_fn = options.load("train.py:build_model")
    mesh = dist.DeviceMesh(
        (2, 4), ["batch", "model"], [f"cpu:{i}" for i in range(8)]
    )
    plan = dist.plan_sharding(build_fn, mesh)
    assert plan.summary() in said
    memory = plan.memory(32, 128)["total"]
    assert f"memory {memory / 2**20:.2f} MiB" in said
    count, size = plan.collectives(32, 128)["all_reduce"]
    assert f"{count} x all-reduce, {size / 2**20:.2f} MiB together" in said
    page = (tmp_path / "p.html").read_text()
    # The step of the command.
    assert "value='32'" in page and "value='128'" in page
    saved = dist.ShardingPlan.load(tmp_path / "p.json", mesh)
    assert saved.diff(plan) == {}


def test_plan_as_json_and_without_a_length(run):
    _, said, _ = run("plan train:build_model --mesh model=4 --json")
    assert json.loads(said)
    code, said, _ = run("plan train:build_model --mesh model=4")
    assert code == 0
    assert "pass --sequence-length" in said.splitlines()[-1]


def test_arguments_of_a_plan(run):
    line = "plan train:build_model --mesh batch=2,model=2 --sequence-length 8"
    _, plain, _ = run(line)
    _, full, _ = run(f"{line} --fully-shard")
    assert "reduce-scatter" in full
    assert "reduce-scatter" not in plain
    _, along, _ = run(f"{line} --sequence-parallel")
    assert "along the sequence" in along


def test_fit_on(run):
    code, said, _ = run(command("fit-on"))
    assert code == 0
    count, mesh = re.search(
        r"(\d+) device\(s\) are enough.*DeviceMesh\((\(\d+, \d+\)), "
        r'\["batch", "model"\]\)',
        said,
        re.DOTALL,
    ).groups()
    data, model = map(int, mesh[1:-1].split(","))
    assert int(count) == data * model > 1
    # This mesh fits, and no mesh of half as many devices does.
    limit = 4e6 * 0.9
    build_fn = options.load("train.py:build_model")

    def total(shape, **arguments):
        names = ["batch", "model"]
        devices = [f"cpu:{i}" for i in range(shape[0] * shape[1])]
        plan = dist.plan_sharding(
            build_fn, dist.DeviceMesh(shape, names, devices), **arguments
        )
        return plan.memory(32, 128)["total"]

    fully_shard = "fully_shard=True" in said
    assert total((data, model), fully_shard=fully_shard) <= limit
    half = int(count) // 2
    while half >= 1:
        model = 1
        while model <= half:
            for fully_shard in (False, True)[: 1 + (half > model)]:
                shape = half // model, model
                assert total(shape, fully_shard=fully_shard) > limit
            model *= 2
        half //= 2


def test_nothing_fits(run):
    line = "fit-on train:build_model --memory 10KB --sequence-length 128"
    code, said, _ = run(f"{line} --max-devices 4")
    assert code == 1
    assert "Nothing fits into 8.79 KiB with up to 4 devices" in said


def test_lint(run):
    code, said, _ = run(command("lint"))
    assert code == 1
    (line,) = re.findall(r"^    ('multi.*)", PAGE, re.MULTILINE)
    assert line in said


@pytest.mark.parametrize(
    ["old", "new", "message"],
    [
        (".*down/", ".*dwn/", "matches no variable"),
        (".*down/", ".*(up|down)/", "matches multiple layout"),
        ('("model", None)', '("model",)', "rank"),
        ('(None, "model")', '("model", "model")', "model"),
    ],
)
def test_lint_finds(old, new, message, run, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace(old, new))
    code, said, _ = run(command("lint"))
    assert code == 1
    assert message in said


def test_a_map_without_a_problem(run, tmp_path):
    (tmp_path / "maps.py").write_text(
        "from keras_tp import distribution as dist\n"
        "import train\n"
        "mesh = dist.DeviceMesh((1, 4), ['batch', 'model'],"
        " ['cpu:0', 'cpu:1', 'cpu:2', 'cpu:3'])\n"
        "layout_map = dist.plan_sharding(train.build_model, mesh).layout_map\n"
    )
    code, said, _ = run("lint train:build_model maps:layout_map")
    assert (code, said) == (0, "No problem was found.\n")


@pytest.mark.parametrize(
    ["line", "message"],
    [
        ("plan train --mesh model=4", "by its module or file"),
        ("plan missing:f --mesh model=4", "There is no module 'missing'"),
        ("plan no.py:f --mesh model=4", "There is no file no.py"),
        ("plan train:nothing --mesh model=4", "train has no 'nothing'"),
        ("plan train:keras --mesh model=4", "has to be a function"),
        ("plan train:build_model --mesh 2x4", "such as `batch=2,model=4`"),
        ("plan train:build_model --mesh model=0", "such as `batch=2,model=4`"),
        ("fit-on train:build_model --memory lots", "Memory is a number"),
        ("fit-on train:build_model --memory 1GB", "pass --sequence-length"),
        (
            "fit-on train:build_model --memory 1GB --spare 1",
            "--spare is a share",
        ),
        ("lint train:build_model train:layout_map", "pass --mesh"),
        ("lint train:build_model train:SCRIPT", "has no 'SCRIPT'"),
        ("sing", "invalid choice: 'sing'"),
    ],
)
def test_bad_input(line, message, run):
    code, _, error = run(line)
    assert code == 2
    assert message in error


@pytest.mark.parametrize(
    ["text", "size"],
    [
        ("80GB", 80e9),
        ("1.5 GiB", 1.5 * 2**30),
        ("512", 512),
        ("h100", accelerators.accelerator("h100").memory),
    ],
)
def test_sizes_of_memory(text, size):
    assert options.memory_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1..5GB", "0GB", "5XB", "-1GB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"Memory is a number with a unit"):
        options.memory_of(text)


def test_an_error_of_the_model_has_its_traceback(run, tmp_path):
    (tmp_path / "train.py").write_text(
        "def build_model():\n    raise ValueError('not yet')"
    )
    with pytest.raises(ValueError, match="not yet"):
        run(command("plan"))


def test_doctor(run, monkeypatch):
    # Each backend's own tests try it.
    monkeypatch.setattr(
        doctor.backend, "SUPPORTED_BACKENDS", (BACKEND, "nothing_like_it")
    )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    code, said, _ = run("doctor")
    assert code == 0, said
    assert re.search(rf"^{BACKEND}: .*; 1 all-reduce of 128 bytes", said, re.M)
    assert "nothing_like_it: not installed" in said
    assert f"keras {keras.__version__}" in said


def test_doctor_names_a_backend_that_fails(monkeypatch, tmp_path):
    broken = tmp_path / "check.py"
    broken.write_text("raise OSError('no network here')")
    monkeypatch.setattr(doctor, "CHECK", broken)
    works, said = doctor.check(BACKEND, 2, 300)
    assert not works
    assert "no network here" in said


def test_launch_passes_everything_on(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys\nfrom keras_tp import distribution as dist\n"
        "print(len(dist.list_devices()), sys.argv[1:])"
    )
    result = subprocess.run(
        [
            *(sys.executable, "-m", "keras_tp", "launch", "--devices", "2"),
            *("script.py", "--help", "-x"),
        ],
        cwd=tmp_path,
        env=launching.environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "2 ['--help', '-x']"
    assert "WARNING" not in result.stderr
