"""Published limits of devices, and dtypes by capability."""

import pytest

from kvlab import hardware
from kvlab.hardware import HardwareError, choose_dtype, choose_fp8, lookup


def test_published_figures_are_dense():
    h100 = lookup("H100")
    assert (h100.bandwidth(), h100.memory_bytes) == (3.35e12, 80 * 2**30)
    assert h100.peak("bf16") == (989.4e12, "bf16")  # 1,979 is with sparsity
    assert lookup("a100-80").peak("bf16")[0] == 312e12 and lookup("a100-80").bandwidth() == 2.039e12
    assert lookup("t4").peak("fp16")[0] == 65e12 and lookup("l4").peak("bf16")[0] == 121e12
    assert 290 < h100.ridge["bf16"] < 300
    for name in hardware.PRESETS:
        assert lookup(name).source and lookup(name).peak("bf16")[0] > 1e12


def test_a_dtype_without_a_peak_falls_back_and_says_so():
    assert lookup("t4").peak("bf16") == (65e12, "fp16")
    assert lookup("m2-max").peak("fp8") == (13.6e12, "fp32")


def test_unknown_names_list_the_known_ones():
    with pytest.raises(HardwareError, match=r"h999.*t4.*h200.*this"):
        lookup("h999")


def test_this_machine_has_memory_but_no_guessed_bandwidth():
    here = lookup("this")
    assert here.memory_bytes > 2**28
    with pytest.raises(HardwareError, match="bandwidth is not known"):
        here.bandwidth()
    with pytest.raises(HardwareError, match="peak in bf16 is not known"):
        here.peak("bf16")
    assert hardware.this_machine(34e9, {"fp32": 1e11}).bandwidth() == 34e9


@pytest.mark.parametrize(
    "capability, dtype, word",
    [(None, "fp32", "CPU"), ((7, 5), "fp16", "finite"), ((6, 1), "fp16", "finite"), ((8, 0), "bf16", "8.0"),
     ((8, 9), "bf16", "8.9"), ((9, 0), "bf16", "9.0"), ((10, 0), "bf16", "10.0")],
)  # fmt: skip
def test_dtype_by_capability_in_words(capability, dtype, word):
    chosen, words = choose_dtype(capability)
    assert chosen == dtype and word in words


def test_fp8_is_storage_only_below_8_9():
    assert [choose_fp8(c)[0] for c in (None, (7, 5), (8, 6), (8, 9), (9, 0))] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert "storage only" in choose_fp8((8, 6))[1] and "8.6" in choose_fp8((8, 6))[1]
