"""The private environment in .venv: creates and repairs it, and installs packages."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import steps_machine
from steps_console import SetupError, Step, run_logged, tail, variables_for_children

sys.path.append(str(Path(__file__).resolve().parent.parent))  # the checkout, of which nothing is installed yet
from engine.hardware import torch_builds
from engine.hardware.torch_builds import Build, Choice

TORCH = "2.13.0"
INDEX = "https://download.pytorch.org/whl/"
PROBE_TIMEOUT_S = 4.0
LOCKED_RUNTIME, LOCKED_TESTS = "locked-runtime.txt", "locked-tests.txt"
"""Versions and hashes of all packages but PyTorch, beside this file; `lock.py` writes them."""


def prepare(checkout: Path) -> Environment:
    """A working environment with Switchyard and its dependencies; skips finished parts.

    Raises:
        SetupError: with a remedy.
    """
    environment = Environment(checkout)
    environment.make()
    environment.install_libraries()
    torch = torch_builds.chosen()
    environment.install_torch(torch)
    environment.install_switchyard()
    environment.prove_torch(torch.build)
    environment.build_kernels()
    return environment


class Environment:
    """`.venv` in the checkout.  A stamp per finished part records what it was made from."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.folder = checkout / ".venv"
        self.log = self.folder / "switchyard-setup.log"
        self.python = str(self.folder / ("Scripts/python.exe" if platform.system() == "Windows" else "bin/python"))
        self.variables = variables_for_children()
        # Inside .venv, so that an interrupted download continues and nothing is left elsewhere; removed when done.
        self._pip_cache = self.folder / "switchyard-pip-cache"

    # --- the environment itself -----------------------------------------------------------------------

    def make(self) -> None:
        """Creates the environment, or recreates it if its Python is gone or the checkout was moved."""
        if self.python_version() is not None and self._stamp("place") in (None, str(self.checkout)):
            self._set_stamp("place", str(self.checkout))
            return
        if Path(sys.prefix).resolve() == self.folder.resolve():
            raise SetupError(
                "The environment in .venv must be recreated, but it is running this script: "
                "type `deactivate`, then run the same command again."
            )
        if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
            steps_machine.install_packages(
                {"venv": "python3-venv"}, "This Python cannot create environments (no venv module)", self.log
            )
        steps_machine.need_disk(self.checkout, torch_builds.CPU.disk_gb, "Switchyard with its libraries")
        with Step("Creating a private environment in .venv") as step:
            shutil.rmtree(self.folder, ignore_errors=True)
            base = getattr(sys, "_base_executable", None) or sys.executable
            code, output = run_logged(step, [base, "-m", "venv", str(self.folder)], self.log, self.variables)
            if code != 0 or self.python_version() is None:
                raise SetupError("Python could not create an environment in .venv.  " + tail(output, self.log))
            self._set_stamp("place", str(self.checkout))

    def python_version(self) -> str | None:
        """Version of the environment's Python, or None if it or its pip does not work."""
        script = "import sys, pip; print('.'.join(map(str, sys.version_info[:3])))"
        try:
            done = subprocess.run(
                [self.python, "-c", script],
                capture_output=True,
                text=True,
                timeout=120,
                env=self.variables,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        version = done.stdout.strip()
        is_new_enough = done.returncode == 0 and tuple(map(int, version.split(".")[:2])) >= (3, 11)
        return version if is_new_enough else None

    # --- packages -------------------------------------------------------------------------------------

    def install_torch(self, choice: Choice) -> None:
        """Installs PyTorch alone: its dependencies are there, and other packages must not pull in a bigger build.

        Without hashes: the build depends on the machine and on the user's package sources.
        """
        build = choice.build
        made_from = f"{TORCH} {build.label} {self.python_version()}"
        if self._stamp("torch") == made_from:
            return
        if choice.why:
            print(f"PyTorch's build for {build.name}: {choice.why}", flush=True)
        steps_machine.need_disk(self.checkout, build.disk_gb, "PyTorch")
        if self._stamp("torch") is not None:  # possibly the other build, which pip would consider the same
            with Step("Removing the other build of PyTorch") as step:
                run_logged(step, [self.python, "-m", "pip", "uninstall", "--yes", "torch"], self.log, self.variables)
        with Step(f"Installing PyTorch {TORCH}, {build.name} build") as step:
            version = self._install_first_available(step, torch_sources(platform.system(), build, is_reachable), build)
            step.note = f" (torch {version})"
            if build is not torch_builds.CPU and version.endswith("+cpu"):
                step.note += f"; no build for {build.name} was available, so models will run on the CPU"
        self._set_stamp("torch", made_from)

    def prove_torch(self, build: Build) -> None:
        """Computes a little on each card, once for each build, and says what does not work."""
        made_from = f"{TORCH} {build.label}"
        if build is torch_builds.CPU or self._stamp("cards") == made_from:
            return
        script = (
            "from engine.devices.card_proof import prove_cards\n"
            "for card in prove_cards() or ():\n"
            "    print(card.name, card.failed or 'works', sep=': ')"
        )
        with Step("Computing on the graphics card") as step:
            code, output = run_logged(step, [self.python, "-c", script], self.log, self.variables)
            cards = output.strip().splitlines() if code == 0 else []
            step.note = f" ({'; '.join(cards) or 'PyTorch sees no card it can use'})"
            if any(card.endswith(": works") for card in cards):
                self._set_stamp("cards", made_from)
                return
            step.note += "; models run on the CPU until the card's driver works: see `switchyard doctor`"

    def _install_first_available(self, step: Step, sources: list[list[str]], build: Build) -> str:
        for source in sources:
            if build is torch_builds.CPU and platform.system() == "Linux" and source == sources[-1]:
                # Without the CPU build, PyPI has only a CUDA build, three times as big.
                steps_machine.need_disk(self.checkout, torch_builds.CUDA_130.disk_gb, "PyTorch's standard build")
            code, output = self._pip_install(step, source)
            if code == 0:
                return self._installed_version("torch")
            # With a file of constraints in the user's configuration pip calls a missing version a conflict.
            if not is_unavailable(output) and "ResolutionImpossible" not in output:
                break
        raise SetupError(
            explain_pip_failure(output, "PyTorch", platform.python_version()) + "  " + tail(output, self.log)
        )

    def _installed_version(self, package: str) -> str:
        script = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
        done = subprocess.run(
            [self.python, "-c", script, package], capture_output=True, text=True, env=self.variables, check=True
        )
        return done.stdout.strip()

    def install_libraries(self) -> None:
        """Installs Switchyard's other dependencies, in locked versions with locked hashes."""
        self._install_locked("libraries", "the libraries", LOCKED_RUNTIME)

    def install_test_tools(self) -> None:
        """Installs the dependencies of the tests, likewise."""
        self._install_locked("test", "the test tools", LOCKED_TESTS)

    def install_switchyard(self) -> None:
        """Installs the checkout itself, editable, with setuptools from the locked packages."""
        editable = ["--no-deps", "--no-build-isolation", "--editable", str(self.checkout)]
        self._install_part("switchyard", "Switchyard", self.checkout / "pyproject.toml", editable)

    def build_kernels(self) -> None:
        """Builds the engine's fast CPU kernels.  Without them it runs slower, which the step reports."""
        native = self.checkout / "engine" / "kernels" / "native"
        sources = b"".join(each.read_bytes() for each in sorted((native / "src").rglob("*")) if each.is_file())
        made_from = hashlib.sha256(sources).hexdigest()
        is_windows = platform.system() == "Windows"
        library = "*.dll" if is_windows else "*.so"  # also on macOS
        if self._stamp("kernels") == made_from and any((native / "built").glob(library)):
            return
        # On Windows the build looks for the compiler itself, including Visual Studio's Clang, and says what to install
        # if there is none.
        if not is_windows and not steps_machine.has_compiler():
            steps_machine.want_programs(steps_machine.COMPILER, "the fast CPU kernels", self.log)
            if not steps_machine.has_compiler():
                return
        with Step("Building the fast CPU kernels") as step:
            build = [self.python, "-m", "engine.kernels.native"]
            code, output = run_logged(step, build, self.log, self.variables)
            if code == 0:
                self._set_stamp("kernels", made_from)
            else:
                step.note = f"; continuing without them: {(output.strip() or 'no reason given').splitlines()[-1]}"

    def _install_locked(self, part: str, what: str, file: str) -> None:
        locked = self.checkout / "installers" / file
        # Wheels only: building from source would use tools without locked hashes.
        exactly = ["--require-hashes", "--only-binary", ":all:", "--requirement", str(locked)]
        self._install_part(part, what, locked, exactly)

    def _install_part(self, part: str, what: str, source: Path, arguments: list[str]) -> None:
        made_from = "{} {}".format(hashlib.sha256(source.read_bytes()).hexdigest(), self.python_version())
        if self._stamp(part) == made_from:
            return
        with Step(f"Installing {what}") as step:
            code, output = self._pip_install(step, arguments)
            if code != 0:
                raise SetupError(
                    explain_pip_failure(output, what, platform.python_version()) + "  " + tail(output, self.log)
                )
        self._set_stamp(part, made_from)
        shutil.rmtree(self._pip_cache, ignore_errors=True)

    def _pip_install(self, step: Step, arguments: list[str]) -> tuple[int, str]:
        options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
        command = [self.python, "-m", "pip", "install", *options, "--cache-dir", str(self._pip_cache), *arguments]
        return run_logged(step, command, self.log, self.variables)

    # --- the starter model ----------------------------------------------------------------------------

    def get_starter_model(self) -> None:
        """Puts it into the user's data folder, where the window finds it.

        Raises:
            SetupError: if it is missing and cannot be fetched; the command has printed the reason.
        """
        self._pull([self.python, "-m", "engine.cli", "models", "pull", "starter"])

    def get_starter_model_for_tests(self) -> None:
        """Puts it into .cache in the checkout, for the tests, which use neither network nor user data."""
        script = (
            "import sys; from tests.starter import lasting_home; from engine.cli import main\n"
            "with lasting_home(): sys.exit(main(['models', 'pull', 'starter']))"
        )
        self._pull([self.python, "-c", script])

    def _pull(self, command: list[str]) -> None:
        print("* Getting the starter model ...", flush=True)
        variables = {**self.variables, "PIP_NO_CACHE_DIR": "1"}  # Switchyard caches the download itself
        with self.log.open("ab") as details:  # model details; progress and errors are shown
            code = subprocess.call(command, cwd=self.checkout, env=variables, stdout=details)
        if code != 0:
            raise SetupError("The starter model is not there yet (see above): run the same command again.")

    # --- stamps ---------------------------------------------------------------------------------------

    def _stamps(self) -> dict[str, str]:
        try:
            stamps = json.loads((self.folder / "switchyard-stamps.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stamps if isinstance(stamps, dict) else {}

    def _stamp(self, part: str) -> str | None:
        return self._stamps().get(part)

    def _set_stamp(self, part: str, made_from: str) -> None:
        stamps = {**self._stamps(), part: made_from}
        temporary = self.folder / "switchyard-stamps.json.new"
        temporary.write_text(json.dumps(stamps, indent=1), encoding="utf-8")
        temporary.replace(self.folder / "switchyard-stamps.json")


def torch_sources(system: str, build: Build, reachable: Callable[[str], bool]) -> list[list[str]]:
    """pip arguments for a build of PyTorch, best first.

    The user's pip sources are always included: a mirror or a local wheel may have the right build.
    """
    anything = ["torch==" + TORCH]
    if system == "Darwin":
        return [anything]
    if build is torch_builds.CUDA_130 and system == "Linux":
        # PyPI's build is this one; `===` excludes a `+cpu` wheel from the user's sources.
        return [["torch===" + TORCH], anything]
    exact = [f"torch=={TORCH}+{build.label}"]
    index = INDEX + build.label
    return [[*exact, "--extra-index-url", index] if reachable(index) else exact, anything]


def is_reachable(index: str) -> bool:
    """Whether a package index responds soon; pip itself would retry for minutes."""
    request = urllib.request.Request(index + "/torch/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


_OFFLINE = (
    "NewConnectionError",
    "Failed to establish a new connection",
    "NameResolutionError",
    "name resolution",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "Max retries exceeded",
    "Network is unreachable",
    "Connection refused",
    "ProxyError",
)


def is_unavailable(output: str) -> bool:
    """Whether pip failed because no source has that version."""
    return "No matching distribution found" in output or "Could not find a version" in output


def explain_pip_failure(output: str, what: str, python: str) -> str:
    """One sentence: what pip failed to do, why, and a remedy."""
    again = "then run the same command again: it continues where it stopped."
    if "No space left on device" in output:
        return f"The disk is full, so pip could not install {what}: free some space, {again}"
    if any(sign in output for sign in _OFFLINE):
        return f"pip could not reach its package index to install {what}: check the network (or the proxy), {again}"
    if "DO NOT MATCH THE HASHES" in output:
        return (
            f"pip received a different file than expected (hash mismatch) while installing {what}, and discarded "
            f"it: check pip's index setting, {again}"
        )
    if is_unavailable(output):
        return f"pip found no {what} for Python {python} on this kind of machine: try Python 3.11 to 3.13, {again}"
    return f"pip could not install {what}: fix the error below, {again}"
