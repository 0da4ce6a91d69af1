"""Compile the C++ kernels where there is a compiler, and say so where there is none.

They are built once a process, in one to two seconds, without PyTorch's headers, and called through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("decode.cpp", "encode.cpp", "paged.cpp"))
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-std=c++17")
FUNCTIONS = {  # what each takes
    "decode": [*[c_void_p] * 5, *[c_int64] * 4, c_float, c_int64],
    "encode": [*[c_void_p] * 2, *[c_int64] * 3],
    "encode_paged": [*[c_void_p] * 4, *[c_int64] * 4],
    "decode_paged": [*[c_void_p] * 7, *[c_int64] * 8, c_float, c_int64],
}
FEWEST_SLOTS = 512  # with fewer, attention is a small part of a step, and no eager call starts a compiler


@cache
def library() -> ctypes.CDLL | str:
    """The compiled kernels; where they cannot be had, why, in words: PyTorch's own kernels do their work then."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler was found"
    try:
        return _built(shlex.split(compiler))
    except subprocess.CalledProcessError as error:
        why = error.stderr
    except OSError as error:  # no such compiler, or a folder for temporary files that runs nothing
        why = f"{error}"
    return f"{compiler} could not build the C++ kernels: {(why.strip() or 'no message').splitlines()[0]}"


def _built(compiler: list[str]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:  # once loaded, the file is no longer needed
        target = Path(folder) / "kernels.so"
        command = [*compiler, *FLAGS, *SOURCES, "-o", target]
        subprocess.run(command, capture_output=True, text=True, check=True)
        loaded = ctypes.CDLL(str(target))
    for name, takes in FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = c_int64, takes
    return loaded
