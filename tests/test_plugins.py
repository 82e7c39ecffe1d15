"""Discovery, probing and choice, with real installed distributions: every broken plugin has its own outcome."""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelbridge import hookspecs, plugins, probing
from accelbridge.backend import DeviceInfo, Probe
from accelbridge.errors import BackendError, ConfigError
from accelbridge.plugins import Candidate
from tests.plugins_env import Plugin, backend_source, install, once, refusal, run_cli, write_tokens

OURS = {p.name for p in distribution("accelbridge").entry_points.select(group=hookspecs.ENTRY_POINT_GROUP)}
"""Backends of this distribution; "cpu" is the only one of them that is available wherever these tests run."""
RECIPE = """\
model: {vocab_size: 64, dim: 32, layers: 1, heads: 2}
data: {train: tokens}
train: {steps: 2, global_batch_size: 2, seq_len: 16}
"""


def broken(name: str, outcome: str, **changes: Any) -> tuple[Plugin, str]:
    return Plugin(name, backend_source(name, **changes)), outcome


def raw(name: str, outcome: str, source: str | None, **fields: Any) -> tuple[Plugin, str]:
    return Plugin(name, source, **fields), outcome


UNSPEAKABLE = "class Mute:\n    def __repr__(self): raise RuntimeError('no')\n"
BROKEN = [
    # ---- import
    raw("importerror", r"vendor-importerror 1\.0 failed to load: ModuleNotFoundError.*nosdk", "import nosdk"),
    raw("exits", r"vendor-exits 1\.0 failed to load: SystemExit: 3", "import sys; sys.exit(3)"),
    raw("aborts", r"ended its process \(SIGABRT", "import os; os.abort()"),
    raw("quits", r"ended its process \(exit code 7", "import os; os._exit(7)"),
    raw("interrupts", r"ended its process .*KeyboardInterrupt", "raise KeyboardInterrupt"),
    raw("nomodule", r"failed to load: ModuleNotFoundError: No module named 'vendor_nomodule'", None),
    raw("noattribute", r"failed to load: AttributeError.*absent", "", value="vendor_noattribute:absent"),
    raw("novalue", r"vendor-novalue 1\.0 failed to load", "", value="not a module!"),
    # ---- hook
    raw("nohook", r"vendor_nohook has no hook; .*marked @accelbridge\.hookimpl", "x = 1"),
    broken("hookraises", r"failed to load: ValueError: bad day", hook='raise ValueError("bad day")'),
    broken("hooknothing", r"must return a subclass .* it returned nothing", hook="return None"),
    broken("hooktext", r"it returned 'vendor'", hook="return 'vendor'"),
    broken("hookmute", r"it returned an object of Mute that cannot be shown", before=UNSPEAKABLE, hook="return Mute()"),
    broken("hookinstance", r"it returned <vendor_hookinstance\.Made object", hook="return Made()"),
    broken("hooksignature", r"failed to load: PluginValidationError", changes=(
        "@hookimpl(specname='accelbridge_backend')\ndef other(unknown): return Made")),
    # ---- class
    broken("abstract", r"Half lacks capabilities, .*probe; its author adds them", changes=(
        "class Half(Backend):\n    name = 'abstract'\n    device_type = 'cpu'\n    api_version = (1, 0)"),
        hook="return Half"),
    broken("othername", r'entry point "othername" returned a backend named .different.', changes=(
        "Made.name = 'different'")),
    broken("tooold", r"written for interface 0\.9, too old: .*1\.0 to 1\.0; update vendor-tooold", api="(0, 9)"),
    broken("toonew", r"needs interface 1\.99, too new: .*update accelbridge", api="(1, 99)"),
    broken("nextmajor", r"needs interface 2\.0, too new", api="(2, 0)"),
    broken("apitext", r"api_version must be \(major, minor\), such as \(1, 0\); it is '1\.0'", api="'1.0'"),
    broken("apishort", r"api_version must be .* it is \(1,\)", api="(1,)"),
    broken("badoptions", r"Made\.options_model must be a pydantic model or None", changes=(
        "Made.options_model = dict")),
    broken("notbool", r"Made\.accelerator must be True or False; it is 'yes'", changes="Made.accelerator = 'yes'"),
    # ---- probe
    broken("probeabsent", r"^no chip on the bus$", probe='return Probe(False, "no chip on the bus")'),
    broken("probemute", r"^its probe gives no reason$", probe='return Probe(False, "")'),
    broken("proberaises", r"its probe raised OSError: bus (is )?gone", probe='raise OSError("bus is gone")'),
    broken("probeunspeakable", r"its probe raised Bad: \(its message cannot be shown\)", probe="raise Bad", before=(
        "class Bad(Exception):\n    def __str__(self): raise RuntimeError('no')\n")),
    broken("probeexits", r"its probe raised SystemExit: 5", probe="sys.exit(5)"),
    broken("probeaborts", r"ended its process \(SIGABRT", probe="os.abort()"),
    broken("probebool", r"its probe returned True, not an accelbridge\.backend\.Probe", probe="return True"),
    broken("probenone", r"its probe returned None", probe="return None"),
    broken("probeyes", r"not plain data: available must be True or False", probe='return Probe("yes", "")'),
    broken("probedevices", r"not plain data: devices\[0\] must be a DeviceInfo", probe=(
        'return Probe(True, "here", ({"index": 0},))')),
    broken("probememory", r"devices\[0\] must be a DeviceInfo of plain", probe=(
        'return Probe(True, "here", (DeviceInfo(0, "c", object()),))')),
    broken("probesoftware", r"not plain data: software must map text to text; it holds", probe=(
        'return Probe(True, "here", software={"lib": {1, 2}})')),
    broken("probefacts", r"not plain data: facts must be a mapping", probe='return Probe(True, "here", facts=[1])'),
    # ---- manners
    broken("noisy", r"^no chip \(noisy\)$", before="import os\nprint('{]')\nos.write(1, b'rubbish')\n", probe=(
        'print("}"); return Probe(False, "no chip (noisy)")')),
    broken("closes", r"^no chip \(closes\)$", before="import os\nos.close(1)\n", probe=(
        'return Probe(False, "no chip (closes)")')),
    broken("lingers", r"^no chip \(lingers\)$", probe=(
        'threading.Thread(target=time.sleep, args=(300,)).start(); return Probe(False, "no chip (lingers)")')),
    # ---- metadata
    raw("unnamed", r"unknown distribution.* failed to load", "import nosdk", distribution="vendor-nometadata"),
]  # fmt: skip
TWINS = [Plugin("twin", backend_source("twin"), d, v) for d, v in (("vendor-one", "1.0"), ("vendor-two", "2.5"))]
OUTCOMES = {plugin.name: outcome for plugin, outcome in BROKEN}
OUTCOMES["twin"] = (
    r'^2 distributions provide a backend named "twin": vendor-(one 1\.0|two 2\.5) \(vendor_\w+\) and '
    r"vendor-(one 1\.0|two 2\.5) \(vendor_\w+\); uninstall all but one$"
)


@pytest.fixture(scope="session")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every broken plugin in one environment, beside the core."""

    def make(folder: Path) -> None:
        site = install(folder, [*(plugin for plugin, _ in BROKEN), *TWINS])
        (site / "vendor_nometadata-1.0.dist-info" / "METADATA").unlink()

    return once(tmp_path_factory, "broken", make) / "site"


@pytest.fixture(scope="session")
def listing(broken_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What ``accelbridge devices --json`` says there, by name."""

    def make(folder: Path) -> None:
        done = run_cli("devices", "--json", sites=[broken_site], cwd=folder)
        assert (done.returncode, done.stderr) == (0, "")
        (folder / "rows").write_text(done.stdout)

    rows = json.loads((once(tmp_path_factory, "listing", make) / "rows").read_text())
    return {row["name"]: row for row in rows}


@pytest.fixture
def surveyed(listing: dict[str, dict[str, Any]]) -> list[Candidate]:
    """The same as the survey that was printed."""
    return [
        Candidate(
            row["name"],
            row["distribution"],
            row["version"],
            row["api_version"],
            Probe(row["available"], row["reason"], tuple(DeviceInfo(**device) for device in row["devices"])),
        )
        for row in listing.values()
    ]


@pytest.fixture(scope="session")
def good_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One accelerator that is available; it prints when it is imported."""
    source = backend_source("virtual", before="print('welcome to virtual')\n")
    return once(tmp_path_factory, "good", lambda folder: install(folder, [Plugin("virtual", source)])) / "site"


@pytest.fixture(scope="session")
def second_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another available accelerator, without options, and a shy one: it cannot be imported in the main process."""
    plain = "Made.options_model = None"
    shy = "import sys\nif not sys.argv[0].endswith('probing.py'): raise ImportError('only in a child')\n"
    both = [
        Plugin("second", backend_source("second", changes=plain)),
        Plugin("shy", backend_source("shy", before=shy)),
    ]
    return once(tmp_path_factory, "second", lambda folder: install(folder, both)) / "site"


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put folders on the import path of this process, and forget their modules afterwards."""
    monkeypatch.delenv(plugins.ENVIRONMENT, raising=False)
    monkeypatch.setenv(probing.PROBE_SECONDS_ENVIRONMENT, "60")
    yield lambda *sites: [monkeypatch.syspath_prepend(str(site)) for site in sites]
    for name in [name for name in sys.modules if name.startswith("vendor_")]:
        del sys.modules[name]


# ------------------------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize("name", OUTCOMES)
def test_each_broken_plugin_has_its_own_outcome(name: str, listing: dict[str, dict[str, Any]]) -> None:
    row = listing[name]
    assert row["available"] is False
    assert re.search(OUTCOMES[name], row["reason"]), row["reason"]
    assert row["devices"] == []


def test_the_others_are_unhurt(listing: dict[str, dict[str, Any]]) -> None:
    assert listing["cpu"]["available"] is True
    assert listing["cpu"]["distribution"] == "accelbridge"
    assert [name for name, row in listing.items() if row["available"]] == ["cpu"]


def test_a_duplicate_names_both_distributions(listing: dict[str, dict[str, Any]]) -> None:
    assert set(listing["twin"]["distribution"].split(" and ")) == {"vendor-one", "vendor-two"}


def test_unreadable_entry_points_name_their_distribution(tmp_path: Path, on_path: Any) -> None:
    # The rest of a Python environment suffers too (pydantic reads every entry point): so it matters who it is.
    site = install(tmp_path, [Plugin("garbled", backend_source("garbled"))])
    (site / "vendor_garbled-1.0.dist-info" / "entry_points.txt").write_text("[accelbridge.backends]\n???\n")
    done = run_cli("devices", "--json", sites=[site], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert "the entry_points.txt of vendor-garbled 1.0 cannot be read" in rows["vendor-garbled"]["reason"]
    on_path(site)
    with pytest.raises(BackendError, match=r"installed: cpu, .*vendor-garbled"):
        plugins.choose("garbled")
    with pytest.raises(BackendError, match="cannot be read"):
        plugins.choose("vendor-garbled")


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_broken_plugin_stops_whoever_asks_for_it(
    name: str, surveyed: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "survey", lambda names: [c for c in surveyed if c.name in names])
    with pytest.raises(BackendError) as caught:
        plugins.choose(name)
    message = str(caught.value)
    assert message.startswith(f'backend "{name}" asked by argument; it cannot be used here: ')
    assert re.search(OUTCOMES[name].strip("^$"), message), message


@pytest.mark.parametrize("name", ["quits", "hooknothing", "tooold", "proberaises", "probesoftware", "twin"])
def test_asking_probes_the_broken_plugin_alone(name: str, broken_site: Path, on_path: Any) -> None:
    on_path(broken_site)
    with pytest.raises(BackendError) as caught:
        plugins.choose(name)
    assert re.search(OUTCOMES[name].strip("^$"), str(caught.value))


@pytest.mark.parametrize(
    ("name", "how"),
    [("importerror", "argument"), ("aborts", "environment"), ("twin", "recipe"), ("toonew", "argument")],
)
def test_train_refuses_a_broken_plugin(name: str, how: str, broken_site: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE + (f"backend: {{name: {name}}}\n" if how == "recipe" else ""))
    arguments = ["--backend", name] if how == "argument" else []
    env = {"ACCELBRIDGE_BACKEND": name} if how == "environment" else {}
    message = refusal(run_cli("train", str(recipe), *arguments, sites=[broken_site], cwd=tmp_path, env=env))
    by = {"argument": "argument", "environment": "ACCELBRIDGE_BACKEND", "recipe": "recipe (backend.name)"}[how]
    assert f'backend "{name}" asked by {by}; it cannot be used here: ' in message
    assert re.search(OUTCOMES[name].strip("^$"), message)
    assert not (tmp_path / "runs").exists()


def test_automatic_choice_passes_over_the_broken_ones(
    surveyed: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {c.name for c in surveyed} == {*OUTCOMES, *OURS}
    monkeypatch.delenv(plugins.ENVIRONMENT, raising=False)
    monkeypatch.setattr(plugins, "survey", lambda _: surveyed)
    selection = plugins.choose()
    assert (selection.backend.name, selection.selected_by) == ("cpu", "automatic")
    assert len(selection.candidates) == len(surveyed)


def test_a_second_cpu_is_a_duplicate(tmp_path: Path, on_path: Any) -> None:
    on_path(install(tmp_path, [Plugin("cpu", backend_source("cpu"), "vendor-cpu")]))
    with pytest.raises(BackendError, match=r"accelbridge 0\.1\.0 .*vendor-cpu 1\.0|vendor-cpu 1\.0.* accelbridge 0"):
        plugins.choose("cpu")
    with pytest.raises(BackendError, match="no backend asked; none can be used here"):
        plugins.choose()


# -------------------------------------------------------------------------------------------------------- hangs

LIMIT_S = 2.5


def hanging(folder: Path) -> Path:
    """Plugins that never finish, in every way; one leaves the id of its own child in a file."""
    tool = 'tool = subprocess.Popen(["sleep", "300"]); '
    tool += f'open({str(folder / "grandchild")!r}, "w").write(str(tool.pid)); tool.wait()'
    flood = "[print('x' * 4096) for _ in range(500)]; time.sleep(300)"
    stubborn = "import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
    return install(
        folder,
        [
            Plugin("importhangs", "import time; time.sleep(300)"),
            Plugin("probehangs", backend_source("probehangs", probe="time.sleep(300)", before=stubborn)),
            Plugin("toolhangs", backend_source("toolhangs", probe=tool)),
            Plugin("floods", backend_source("floods", probe=flood)),
        ],
    )


def test_hanging_plugins_cost_one_limit_together(tmp_path: Path, on_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site = hanging(tmp_path)
    start = time.monotonic()
    done = run_cli("devices", "--json", sites=[site], cwd=tmp_path, env={"ACCELBRIDGE_PROBE_SECONDS": str(LIMIT_S)})
    seconds = time.monotonic() - start
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows.pop("cpu")["available"] is True
    rows = {name: row for name, row in rows.items() if name not in OURS}
    assert set(rows) == {"importhangs", "probehangs", "toolhangs", "floods"}
    for row in rows.values():
        assert row["reason"].startswith("loading or probing it did not finish in 2.5 s")
    assert seconds < 4 * LIMIT_S, "the limit is shared"
    assert not _alive(tmp_path / "grandchild")
    on_path(site)
    monkeypatch.setattr(probing, "PROBE_SECONDS", 0.5)
    monkeypatch.delenv(probing.PROBE_SECONDS_ENVIRONMENT)
    with pytest.raises(BackendError, match=r"did not finish in 0\.5 s; .*set ACCELBRIDGE_PROBE_SECONDS"):
        plugins.choose("importhangs")


SHARED = """
def __getattr__(name):
    if name == "beta":
        {fault}
    raise AttributeError(name)

class Gamma(Made):
    name = "gamma"

class gamma:
    @staticmethod
    @hookimpl
    def accelbridge_backend():
        return Gamma
"""
"""Three plugins of one distribution, of which the second ends or keeps the child that they share."""


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("os.abort()", r"ended its process \(SIGABRT"), ("time.sleep(300)", r"did not finish in 2\.5 s")],
    ids=["aborts", "hangs"],
)
def test_a_plugin_that_ends_a_shared_child_hurts_no_other(
    tmp_path: Path, on_path: Any, monkeypatch: pytest.MonkeyPatch, fault: str, outcome: str
) -> None:
    source = backend_source("alpha") + SHARED.format(fault=fault)
    lines = "vendor_shared\nbeta = vendor_shared:beta\ngamma = vendor_shared:gamma"
    on_path(install(tmp_path, [Plugin("alpha", source, distribution="vendor-shared", value=lines)]))
    monkeypatch.setenv(probing.PROBE_SECONDS_ENVIRONMENT, str(LIMIT_S))
    started: list[list[str]] = []
    real = plugins.start_child

    def start_child(points: Any) -> probing.Child:
        started.append([point.name for point in points])
        return real(points)

    monkeypatch.setattr(plugins, "start_child", start_child)
    found = {candidate.name: candidate for candidate in plugins.survey(["alpha", "beta", "gamma"])}
    assert [found[name].available for name in ("alpha", "gamma")] == [True, True]
    assert re.search(outcome, found["beta"].probe.reason)
    assert started == [["alpha", "beta", "gamma"], ["gamma"]]


def _alive(file: Path) -> bool:
    """Whether the process whose id is in ``file`` still runs a second after it should have ended."""
    if not file.exists():
        return False
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_the_limit_must_be_a_positive_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probing.PROBE_SECONDS_ENVIRONMENT, text)
    with pytest.raises(ConfigError, match=f'ACCELBRIDGE_PROBE_SECONDS="{text}" asked; it is no positive number'):
        probing.probe_seconds()


def test_the_limit_is_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(probing.PROBE_SECONDS_ENVIRONMENT, raising=False)
    assert probing.probe_seconds() == 10.0


# --------------------------------------------------------------------------------------------------------- good


def test_an_available_accelerator_is_chosen_over_the_cpu(good_site: Path, tmp_path: Path) -> None:
    done = run_cli("explain", "--json", sites=[good_site], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)  # the plugin's greeting is on stderr
    assert "welcome to virtual" in done.stderr
    assert (plan["backend"], plan["selected_by"]) == ("virtual", "automatic")
    assert plan["contract"]["plugin"] == "vendor-virtual 1.0"
    assert plan["contract"]["chip"] == "virtual1"
    assert plan["contract"]["software"] == {"virtual": "3.2"}
    available = {c["name"]: c["available"] for c in plan["candidates"]}
    assert available == {name: name in ("cpu", "virtual") for name in (*OURS, "virtual")}


def test_an_out_of_tree_backend_trains(good_site: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    (tmp_path / "recipe.yaml").write_text(RECIPE + "backend: {name: virtual, options: {level: 3}}\n")
    done = run_cli("train", "recipe.yaml", "--nproc", "1", sites=[good_site], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "backend virtual (by" in done.stdout
    assert "done: step 2" in done.stdout
    assert json.loads((tmp_path / "runs/default/plan.json").read_text())["backend"] == "virtual"


def test_two_available_accelerators_are_an_error(good_site: Path, second_site: Path, tmp_path: Path) -> None:
    message = refusal(run_cli("explain", sites=[good_site, second_site], cwd=tmp_path))
    assert 'no backend asked; "second" (1 virtual chip) and "shy" (1 virtual chip) and "virtual"' in message
    assert "name one by argument, ACCELBRIDGE_BACKEND or backend.name" in message


def test_survey_imports_no_plugin(good_site: Path, on_path: Any) -> None:
    on_path(good_site)
    rows = {c.name: c for c in plugins.survey()}
    assert rows["virtual"].available
    assert rows["virtual"].accelerator
    assert rows["virtual"].backend is None
    assert "vendor_virtual" not in sys.modules


def test_a_named_backend_is_the_only_one_probed(good_site: Path, broken_site: Path, on_path: Any) -> None:
    on_path(good_site, broken_site)
    assert [c.name for c in plugins.choose("virtual").candidates] == ["virtual"]


def test_a_plugin_that_only_works_in_a_child(second_site: Path, on_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(second_site)
    with pytest.raises(BackendError, match=r'backend "shy" asked by argument; .*only in a child'):
        plugins.choose("shy")
    survey = plugins.survey
    monkeypatch.setattr(plugins, "survey", lambda names: [c for c in survey(names) if c.name != "second"])
    selection = plugins.choose()  # automatic goes on, and says why
    assert selection.backend.name == "cpu"
    assert "only in a child" in next(c for c in selection.candidates if c.name == "shy").probe.reason


def test_options_are_those_of_the_plugin(good_site: Path, second_site: Path, on_path: Any) -> None:
    on_path(good_site, second_site)
    backend = plugins.load_backend("virtual", {"level": 2})
    assert backend.options is not None
    assert backend.options.model_dump() == {"level": 2}
    with pytest.raises(ConfigError, match=r"backend\.options\.depth asked as .*; known: level"):
        plugins.load_backend("virtual", {"depth": 2})
    with pytest.raises(ConfigError, match=r"backend\.options\.level asked as .*greater than or equal to 0"):
        plugins.load_backend("virtual", {"level": -1})
    with pytest.raises(ConfigError, match='backend "second" has no options'):
        plugins.load_backend("second", {"level": 2})


def test_a_backend_that_cannot_be_made_names_its_distribution(tmp_path: Path, on_path: Any) -> None:
    changes = "def start(self, options=None): raise OSError('no licence')\nMade.__init__ = start"
    on_path(install(tmp_path, [Plugin("refuses", backend_source("refuses", changes=changes))]))
    with pytest.raises(BackendError, match=r"vendor-refuses 1\.0 failed to start: OSError: no licence"):
        plugins.load_backend("refuses")


# ------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("argument", "environment", "recipe", "chosen"),
    [
        ("virtual", "cpu", "cpu", ("virtual", "argument")),
        (None, "cpu", "virtual", ("cpu", "environment")),
        (None, None, "cpu", ("cpu", "recipe")),
        (None, "", "cpu", ("cpu", "recipe")),
        (None, None, None, ("virtual", "automatic")),
        (None, "", None, ("virtual", "automatic")),
        ("", "", "", ("virtual", "automatic")),
    ],
)
def test_argument_beats_environment_beats_recipe_beats_automatic(
    argument: str | None,
    environment: str | None,
    recipe: str | None,
    chosen: tuple[str, str],
    good_site: Path,
    on_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_path(good_site)
    if environment is not None:
        monkeypatch.setenv(plugins.ENVIRONMENT, environment)
    selection = plugins.choose(argument, recipe)
    assert (selection.backend.name, selection.selected_by) == chosen


def test_an_unknown_backend_names_the_closest_and_the_installed(good_site: Path, tmp_path: Path) -> None:
    message = refusal(run_cli("explain", "--backend", "virtuall", sites=[good_site], cwd=tmp_path))
    assert 'backend "virtuall" asked by argument; no installed distribution provides it' in message
    assert 'did you mean "virtual"?' in message
    assert f"installed: {', '.join(sorted([*OURS, 'virtual']))}" in message


def test_a_choice_that_fails_is_not_replaced_by_the_next(good_site: Path, on_path: Any, monkeypatch: Any) -> None:
    on_path(good_site)
    monkeypatch.setenv(plugins.ENVIRONMENT, "gone")
    with pytest.raises(BackendError, match='backend "gone" asked by ACCELBRIDGE_BACKEND'):
        plugins.choose(recipe="cpu")


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugins.ENVIRONMENT, raising=False)
    monkeypatch.setattr(plugins, "distributions", lambda: iter(()))
    with pytest.raises(BackendError, match=r"none can be used here \(none is installed\)"):
        plugins.choose()
    with pytest.raises(BackendError, match="installed: none"):
        plugins.choose("cpu")


def test_a_child_that_cannot_start_is_a_reason(good_site: Path, on_path: Any, monkeypatch: Any) -> None:
    on_path(good_site)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    rows = {c.name: c for c in plugins.survey()}
    assert rows["virtual"].probe.reason.startswith("no process could be started to probe it: FileNotFoundError")
    assert rows["cpu"].available


def test_a_distribution_seen_twice_is_no_duplicate(good_site: Path, tmp_path: Path, on_path: Any) -> None:
    again = Plugin("virtual", backend_source("virtual"), "vendor.virtual", "0.9", "vendor_virtual")
    on_path(good_site, install(tmp_path, [again]))
    assert plugins.choose("virtual").candidate.version == "0.9"  # the first on the path, as for imports
