"""Pictures of the README: `python -m tests.e2e.film resources/screenshots/monitor.webp`, or `…/batch-light.png`.

Starts the real window with the starter model on a private screen.  For a moving picture it asks something that is
answered well, asks for a long text, opens the Monitor, and keeps a picture of the window several times a second; for a
still one it has the rows of a file answered, and keeps one of the Batch page.  Needs Xvfb, xdotool and dbus-daemon, and
Pillow (`pip install pillow`) to put the pictures together.  Run it while nothing else runs, since they show that too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine.batch_files.journal import known_jobs
from tests.e2e.batch_form import choose_file, limit_answers
from tests.e2e.screen import SHUTTER, Screen, missing_programs, private_screen
from tests.e2e.waiting import eventually
from tests.e2e.window_process import RealWindow, real_window
from tests.starter import starter_for_tests

ANSWERED_WELL = "What is the capital of France? Answer in one sentence."
_COUNTRIES = (
    "Belgium Brazil Canada Chile China Cuba Cyprus Denmark Egypt Finland France Germany Greece Hungary Iceland India "
    "Ireland Italy Japan Jordan Kenya Latvia Malta Mexico Morocco Nepal Norway Peru Poland Portugal Romania Spain "
    "Sweden Switzerland Thailand Tunisia Turkey Ukraine Uruguay Vietnam"
)
_PATIENCE_S = 600.0
LONG = "Write a long story about a lighthouse keeper and the sea, with many chapters."


def main(argv: list[str]) -> int:
    """Films; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.film", description=__doc__)
    parser.add_argument("output", type=Path, help="an animated .webp of the Monitor, or a .png of a batch job")
    parser.add_argument("--theme", choices=("light", "dark"), help="dark for the Monitor, light for a job")
    parser.add_argument("--size", default="1280x800")
    parser.add_argument("--seconds", type=float, default=9.0, help="of the Monitor")
    parser.add_argument("--rate", type=float, default=4.0, help="pictures a second")
    args = parser.parse_args(argv)
    if missing := missing_programs():
        sys.stderr.write(f"{', '.join(missing)} not found: sudo apt-get install xvfb xdotool dbus\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="f-") as folder, private_screen(Path(folder)) as screen:
        frames = Path(folder) / "frames"
        frames.mkdir()
        os.environ["SWITCHYARD_HOME"] = str(Path(folder) / "home")
        names = _film(args, screen, Path(folder) / "home", frames)
        _put_together([frames / f"{name}.png" for name in names], args.output, round(1000 / args.rate))
    sys.stdout.write(f"{args.output}: {len(names)} pictures, {args.output.stat().st_size / 1e6:.1f} MB\n")
    return 0


def _film(args: argparse.Namespace, screen: Screen, home: Path, frames: Path) -> list[str]:
    """Names of the pictures, in order."""
    starter = starter_for_tests()
    settings = home / "config" / "settings.json"
    settings.parent.mkdir(parents=True)
    is_still = args.output.suffix == ".png"
    theme = args.theme or ("light" if is_still else "dark")
    settings.write_text(
        json.dumps({"default_model": str(starter), "theme": theme, "monitor_details": True}), encoding="utf-8"
    )
    width, height = args.size.split("x")
    shutter = subprocess.Popen(
        [sys.executable, "-c", SHUTTER, str(frames), width, height],
        env=screen.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    names: list[str] = []

    def shoot(seconds: float) -> None:
        assert shutter.stdin is not None
        assert shutter.stdout is not None
        end, due = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < end:
            names.append(f"{len(names):04}")
            shutter.stdin.write(names[-1] + "\n")
            shutter.stdin.flush()
            shutter.stdout.readline()
            due += 1 / args.rate
            time.sleep(max(0.0, due - time.monotonic()))

    try:
        with real_window(screen, home, starter) as window:
            if is_still:
                _answer_rows(window, home.parent / "countries.csv")
                shoot(0.1)
                return names[-1:]
            window.click("Message")
            screen.type(ANSWERED_WELL)
            screen.press("Return")
            window.wait_for_answer(1, "complete")
            eventually(lambda: "Paris" in window.transcript(), "the answer showed")
            shoot(1.5)
            window.click("Message")
            screen.type(LONG)
            screen.press("Return")
            window.wait_for_text(2)
            window.click("Monitor")
            window.click("Show 10 seconds")
            time.sleep(1.0)  # until there is something to show
            shoot(args.seconds)
    finally:
        shutter.stdin.close()
        shutter.wait(timeout=30)
    return names


def _answer_rows(window: RealWindow, file: Path) -> None:
    """Returns when most of the rows of a file have been answered."""
    countries = 3 * _COUNTRIES.split()
    file.write_text("\n".join(["country", *countries, ""]), encoding="utf-8")
    window.click("Batch")
    choose_file(window, file)
    eventually(lambda: window.shows("Start"), "the form showed")
    window.screen.type("What is the capital of ")  # before the column, which is in the prompt already
    window.screen.press("End")
    window.screen.type("? Answer in one sentence.")
    limit_answers(window, 60)
    window.click("Start")
    enough = len(countries) * 6 // 10
    eventually(lambda: any(job.done >= enough for job in known_jobs()), "rows were answered", _PATIENCE_S)


def _put_together(pictures: list[Path], output: Path, each_ms: int) -> None:
    from PIL import Image

    frames = [Image.open(path).convert("RGB") for path in pictures]
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".png":
        frames[0].save(output, optimize=True)
        return
    frames[0].save(
        output,
        save_all=True,
        append_images=frames[1:],
        duration=each_ms,
        loop=0,
        quality=70,
        method=4,
        minimize_size=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
