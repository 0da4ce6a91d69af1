"""What fits in a memory, and the lines that launch engines."""

import shutil
import subprocess
import sys

import pytest

from kvlab.config import resolve
from kvlab.planning import ENGINES, launch_line, make_plan
from kvlab.sizing import GIB, SizingError, bytes_ideal

LLAMA = resolve("llama-3-8b")


def test_weights_first_then_the_cache():
    p = make_plan(LLAMA, 24 * GIB, 8192, batch=2)
    assert p.cache_budget_bytes == 24 * GIB - 16_060_522_496
    assert p.max_batch == p.cache_budget_bytes // GIB == 9  # 8,192 tokens are 1 GiB
    assert p.max_context == p.cache_budget_bytes // 2 // 131_072 and p.fits
    assert bytes_ideal(LLAMA, p.max_context, 2) <= p.cache_budget_bytes < bytes_ideal(LLAMA, p.max_context + 1, 2)


def test_reserve_and_other_weights():
    p = make_plan(LLAMA, 24 * GIB, 8192, weights=5 * GIB, reserve_bytes=2 * GIB)
    assert p.cache_budget_bytes == 17 * GIB and p.max_batch == 17


def test_weights_that_do_not_fit_are_refused_with_both_numbers():
    with pytest.raises(SizingError, match=r"141,107,412,992 bytes.*85,899,345,920 bytes"):
        make_plan(resolve("llama-3-70b"), 80 * GIB, 8192)


def test_what_does_not_fit_is_launched_at_what_does():
    p = make_plan(resolve("llama-3-70b"), 150 * GIB, 131_072)
    assert p.max_batch == 0 and not p.fits and f"--max-model-len {p.max_context} " in p.command


def test_where_every_layer_slides_the_model_sets_the_limit():
    p = make_plan(resolve("mistral-7b"), 24 * GIB, 8192)
    assert (p.max_context, p.context_limited_by) == (32_768, "model")
    assert make_plan(LLAMA, 24 * GIB, 8192).context_limited_by == "memory"


@pytest.mark.parametrize(
    "engine, dtype, line",
    [
        ("vllm", "bf16", "vllm serve meta-llama/Meta-Llama-3-8B --max-model-len 4096 --max-num-seqs 3"),
        ("vllm", "fp8", "... --max-num-seqs 3 --kv-cache-dtype fp8"),
        ("vllm", "fp16", "... --max-num-seqs 3 --dtype float16"),
        ("sglang", "bf16", "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B"
                           " --context-length 4096 --max-running-requests 3"),
        ("sglang", "fp8_e5m2", "... --kv-cache-dtype fp8_e5m2"),
        ("sglang", "fp8", "... --kv-cache-dtype fp8_e4m3"),
        ("llama.cpp", "q8_0", "llama-server -m Meta-Llama-3-8B.gguf -c 12288 -np 3 -ctk q8_0 -ctv q8_0 -fa on"),
        ("llama.cpp", "fp16", "... -ctk f16 -ctv f16 -fa on"),
        ("transformers", "bf16", "transformers serve meta-llama/Meta-Llama-3-8B --continuous-batching"
                                 " --cb-block-size 256 --cb-num-blocks 48 --dtype bfloat16"),
    ],
)  # fmt: skip
def test_launch_lines(engine, dtype, line):
    command = launch_line(LLAMA, engine, dtype, 4096, 3)
    assert command.endswith(line[3:]) if line.startswith("...") else command == line


def test_a_dtype_that_an_engine_lacks_is_refused_naming_what_it_has():
    for engine, dtype in (("vllm", "q8_0"), ("sglang", "int4"), ("llama.cpp", "fp8"), ("transformers", "kivi2-g32")):
        with pytest.raises(SizingError) as error:
            launch_line(LLAMA, engine, dtype, 8, 1)
        assert dtype in str(error.value) and ", ".join(ENGINES[engine]) in str(error.value)
    with pytest.raises(SizingError, match=r"vllm, sglang, llama\.cpp, transformers"):
        launch_line(LLAMA, "tgi", "bf16", 8, 1)


def test_engines_are_told_that_a_longer_context_is_meant():
    assert launch_line(LLAMA, "vllm", "bf16", 8193, 1).startswith("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve")


def test_the_options_of_transformers_serve_exist():
    """The one engine that is installed here; the others' options are from their documentation."""
    command = shutil.which("transformers", path=str(__import__("pathlib").Path(sys.executable).parent))
    if command is None:
        pytest.skip("transformers has no command here")
    text = subprocess.run([command, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    line = launch_line(LLAMA, "transformers", "bf16", 4096, 3)
    assert all(word in text for word in line.split() if word.startswith("--"))
