"""Run every chapter once through nbval and compare its outputs: `make notebooks`.

The notebooks are copied away from the checkout, so that their kernels import kvlab from the installed wheel,
as a reader's would; that is checked before anything runs.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from chapters import FOLDER, KERNEL_ENVIRONMENT, chapters
from stamps import BUILD, ROOT

STAGE = BUILD / "nbval"
# A kernel starts as this does: in the notebook's folder, with that folder first on the path.
WHERE_IS_KVLAB = "import importlib.util as u; print(u.find_spec('kvlab').origin)"


def stage() -> list[Path]:
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(parents=True)
    (STAGE / "pytest.ini").write_text("[pytest]\n")
    for source in [*chapters(), FOLDER / "conftest.py"]:
        shutil.copy2(source, STAGE)
    return chapters(STAGE)


def check_that_the_wheel_is_used() -> None:
    found = subprocess.run(
        [sys.executable, "-c", WHERE_IS_KVLAB], cwd=STAGE, capture_output=True, text=True, check=True
    ).stdout.strip()
    if "site-packages" not in found or Path(found).is_relative_to(ROOT / "kvlab"):
        sys.exit(f"notebooks: kvlab must come from the installed wheel, but it comes from {found}")


def main() -> int:
    paths = stage()
    check_that_the_wheel_is_used()
    if not paths:
        print("notebooks: none yet")
        return 0
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--rootdir", STAGE, "-c", STAGE / "pytest.ini"),
        *("--nbval", "--nbval-current-env", "--nbval-cell-timeout", "120"),
        *("--nbval-sanitize-with", ROOT / ".ci" / "nbval_sanitize.cfg"),
        *paths,
    ]
    environment = os.environ | KERNEL_ENVIRONMENT
    return subprocess.run([str(part) for part in command], cwd=STAGE, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
