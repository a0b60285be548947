"""The repository as a product: its environment, its commands, what its packages import, what its README promises."""

from __future__ import annotations

import copy
import doctest
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("sglang_ssd", "speculator_service", "ssd_proto")
ENTRY_POINT_GROUP = "sglang.srt.plugins"

needs_environment = pytest.mark.skipif(
    not (CHECKOUT / ".venv" / ".complete").exists(),
    reason="launch/env has not been run here (launch/test does it; it may install 11 GB)",
)


def run(*arguments: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=cwd, check=check, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    """launch/environment.py as a module; launch/ is not a package."""
    spec = importlib.util.spec_from_file_location("launch_environment", CHECKOUT / "launch" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def second_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what an installation needs, in another place."""
    root = tmp_path_factory.mktemp("second") / "checkout"
    root.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, root)
    for name in ("launch", "proto", "sglang_ssd", "speculator_service"):
        shutil.copytree(CHECKOUT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def imported_from(python: str, cwd: Path) -> set[Path]:
    """The folders from which this Python takes our packages."""
    script = f"import {', '.join(PACKAGES)}\nfor p in ({', '.join(PACKAGES)}): print(p.__file__)"
    return {Path(line).parent.parent for line in run(python, "-c", script, cwd=cwd).stdout.split()}


@needs_environment
class TestEnvironment:
    def test_python_imports_the_packages_of_this_checkout(self, tmp_path: Path) -> None:
        python = run(CHECKOUT / "launch" / "env", cwd=tmp_path).stdout.splitlines()[-1]
        assert imported_from(python, tmp_path) == {CHECKOUT, CHECKOUT / "proto"}

    def test_two_checkouts_share_dependencies_and_no_code(self, second_checkout: Path, tmp_path: Path) -> None:
        """Three runs at once on a fresh checkout agree; neither checkout sees the other's packages."""
        command = [str(second_checkout / "launch" / "env")]
        runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        ends = [process.communicate(timeout=120) for process in runs]
        assert [process.returncode for process in runs] == [0, 0, 0], ends
        assert len({stdout for stdout, _ in ends}) == 1
        assert sum("installing this checkout" in stderr for _, stderr in ends) == 1

        first, second = CHECKOUT / ".venv" / "bin" / "python", second_checkout / ".venv" / "bin" / "python"
        assert ends[0][0].splitlines()[-1] == str(second)
        assert imported_from(str(second), tmp_path) == {second_checkout, second_checkout / "proto"}
        assert imported_from(str(first), tmp_path) == {CHECKOUT, CHECKOUT / "proto"}
        where = "import msgspec; print(msgspec.__file__)"
        assert run(first, "-c", where, cwd=tmp_path).stdout == run(second, "-c", where, cwd=tmp_path).stdout

    def test_interrupted_environment_is_made_again(self, second_checkout: Path, tmp_path: Path) -> None:
        launch_env, thin = second_checkout / "launch" / "env", second_checkout / ".venv"
        run(launch_env, cwd=tmp_path)
        (thin / ".complete").unlink()
        shutil.rmtree(next(thin.glob("lib/python*/site-packages/sglang_ssd-*.dist-info")))
        python = run(launch_env, cwd=tmp_path).stdout.splitlines()[-1]
        assert imported_from(python, tmp_path) == {second_checkout, second_checkout / "proto"}

    def test_somebody_elses_environment_is_left_alone(self, second_checkout: Path, tmp_path: Path) -> None:
        thin = second_checkout / ".venv"
        shutil.rmtree(thin, ignore_errors=True)
        (thin / "bin").mkdir(parents=True)
        (thin / "bin" / "precious").write_text("data")
        refused = run(second_checkout / "launch" / "env", cwd=tmp_path, check=False)
        assert refused.returncode == 1
        assert "rename it or remove it" in refused.stderr
        assert (thin / "bin" / "precious").read_text() == "data"
        shutil.rmtree(thin)


class TestEnvironmentKey:
    def test_changes_with_dependencies_only(self, environment: ModuleType) -> None:
        pyproject = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
        key = environment.environment_key(pyproject)
        same = copy.deepcopy(pyproject)
        same["tool"]["ruff"]["line-length"] = 1
        same["project"]["version"] = "99"
        assert environment.environment_key(same) == key
        for change in ("dependencies", "test", "dev", "figures", "chat"):
            other = copy.deepcopy(pyproject)
            lists = other["project"] if change == "dependencies" else other["project"]["optional-dependencies"]
            lists[change].append("another-package")
            assert environment.environment_key(other) != key

    def test_failing_step_reports_the_end_of_its_output(self, environment: ModuleType, tmp_path: Path) -> None:
        script = "import sys; print('working'); print('ERROR: No space left on device'); sys.exit(3)"
        with environment.locked(tmp_path / "lock") as lock, pytest.raises(environment.SetupError) as failure:
            environment.run([sys.executable, "-c", script], lock=lock, log=tmp_path / "log", what="installing")
        assert "installing failed with exit status 3" in str(failure.value)
        assert "free about 12 GB" in str(failure.value)

    def test_lock_outlives_a_killed_parent(self, environment: ModuleType, tmp_path: Path) -> None:
        """A child that inherited the lock still holds it: a second run may not write beside a running pip."""
        with environment.locked(tmp_path / "lock") as lock:
            child = subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,), text=True
            )
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                subprocess.run(["flock", tmp_path / "lock", "true"], timeout=0.5, check=True)
            child.communicate("\n", timeout=30)
            subprocess.run(["flock", tmp_path / "lock", "true"], timeout=30, check=True)
        finally:
            child.kill()
            child.wait()


class TestPackaging:
    def test_entry_point_is_registered_once(self) -> None:
        ours = [p for p in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if p.name == "sglang_ssd"]
        assert [point.value for point in ours] == ["sglang_ssd.plugin:register"]

    def test_service_explains_its_flags(self, tmp_path: Path) -> None:
        text = run(sys.executable, "-m", "speculator_service", "--help", cwd=tmp_path).stdout
        assert "--model-path" in text
        assert "--endpoint" in text

    def test_no_large_file(self) -> None:
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=CHECKOUT).stdout
        files = [CHECKOUT / name for name in listed.split("\0") if name]
        assert files
        assert [file for file in files if file.is_file() and file.stat().st_size > 20 * 1024**2] == []


@pytest.mark.parametrize(
    ("package", "walk", "forbidden"),
    [
        ("ssd_proto", True, ("torch", "sglang", "transformers", "sglang_ssd", "speculator_service")),
        ("speculator_service.saguaro", True, ("sglang", "zmq", "sglang_ssd")),
        ("speculator_service", False, ("torch", "sglang")),
        ("sglang_ssd", False, ("torch", "sglang")),
    ],
)
def test_imports_stay_light(package: str, walk: bool, forbidden: tuple[str, ...], tmp_path: Path) -> None:
    """Importing the package (with `walk` every module of it) loads none of the forbidden ones."""
    script = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
if {walk}:
    for module in pkgutil.walk_packages(package.__path__, {package!r} + "."):
        importlib.import_module(module.name)
print(*sorted(set({forbidden!r}) & set(sys.modules)))
"""
    assert run(sys.executable, "-c", script, cwd=tmp_path).stdout.split() == []


@pytest.mark.parametrize("package", ["ssd_proto", "speculator_service.saguaro"])
def test_examples_in_docstrings_are_true(package: str) -> None:
    folder = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(folder, package + "."):
        assert doctest.testmod(importlib.import_module(module.name)).failed == 0, module.name


class TestReadme:
    readme = (CHECKOUT / "README.md").read_text()

    def test_its_commands_exist(self) -> None:
        scripts = set(re.findall(r"\blaunch/[a-z]+\b(?!\.)", self.readme))
        assert {"launch/quickstart", "launch/test", "launch/env"} <= scripts
        assert [name for name in sorted(scripts) if not os.access(CHECKOUT / name, os.X_OK)] == []
        modules = set(re.findall(r"-m ([\w.]+)", self.readme)) - {"pytest"}
        assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []

    def test_its_service_flags_exist(self, tmp_path: Path) -> None:
        table = self.readme.split("### Flags of the service")[1].split("\n#")[0]
        flags = set(re.findall(r"^\| `(--[a-z-]+)`", table, re.MULTILINE))
        text = run(sys.executable, "-m", "speculator_service", "--help", cwd=tmp_path).stdout
        offered = set(re.findall(r"^ +(--[a-z-]+)", text, re.MULTILINE))
        assert flags
        assert flags <= offered
        assert offered - {"--help"} <= flags, "a flag of the service is missing from the README"

    def test_its_links_exist(self) -> None:
        links = [target for target in re.findall(r"\]\(([^)#]+)", self.readme) if "://" not in target]
        assert [target for target in links if not (CHECKOUT / target).exists()] == []
