"""RoPE: frequencies as transformers computes them, and the laws of a rotation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvlab.rope import inverse_frequencies, rope_tables, rotate, rotate_by

HEAD_DIMS = st.sampled_from([4, 8, 64, 80, 128, 256])
THETAS = st.sampled_from([100.0, 10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5e6])
LENGTHS = st.sampled_from([32, 2048, 4096, 8192, 32768])
FACTORS = st.floats(1.0, 64.0)


def reference(head_dim: int, theta: float, scaling: dict, max_positions: int) -> tuple[torch.Tensor, float]:
    """What transformers computes for the same fields."""
    parameters = {"rope_theta": theta, **scaling}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=parameters,
    )
    if scaling["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)


def check_equal(head_dim: int, theta: float, scaling: dict, max_positions: int) -> None:
    ours, factor = inverse_frequencies(head_dim, theta, scaling, max_positions)
    theirs, their_factor = reference(head_dim, theta, dict(scaling), max_positions)
    assert ours.dtype == torch.float32 and ours.shape == (head_dim // 2,)
    assert torch.equal(ours, theirs)
    assert factor == their_factor


@given(HEAD_DIMS, THETAS, LENGTHS)
def test_default_frequencies_equal_transformers(head_dim, theta, length):
    check_equal(head_dim, theta, {"rope_type": "default"}, length)
    assert torch.equal(
        inverse_frequencies(head_dim, theta, None, length)[0],
        inverse_frequencies(head_dim, theta, {"rope_type": "default"}, length)[0],
    )


@given(HEAD_DIMS, THETAS, FACTORS)
def test_linear_frequencies_equal_transformers(head_dim, theta, factor):
    check_equal(head_dim, theta, {"rope_type": "linear", "factor": factor}, 2048)


@given(HEAD_DIMS, THETAS, LENGTHS, FACTORS, st.floats(0.5, 2.0), st.floats(2.5, 8.0))
def test_llama3_frequencies_equal_transformers(head_dim, theta, length, factor, low, high):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
    check_equal(head_dim, theta, scaling, 4 * length)


@settings(max_examples=200)
@given(
    HEAD_DIMS,
    THETAS,
    LENGTHS,
    FACTORS,
    st.fixed_dictionaries(
        {},
        optional={
            "beta_fast": st.sampled_from([16, 32.0, 64]),
            "beta_slow": st.sampled_from([0.5, 1, 2]),
            "attention_factor": st.floats(0.5, 2.0),
            "truncate": st.booleans(),
            "mscale": st.sampled_from([0.707, 1.0]),
            "mscale_all_dim": st.sampled_from([0.707, 1.0]),
            "original_max_position_embeddings": st.sampled_from([512, 4096]),
        },
    ),
)
def test_yarn_frequencies_equal_transformers(head_dim, theta, length, factor, optional):
    check_equal(head_dim, theta, {"rope_type": "yarn", "factor": factor, **optional}, length)


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "longrope", "factor": 2.0}, "longrope"),
        ({"rope_type": "mrope"}, "mrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(scaling, word):
    with pytest.raises(ValueError, match=word):
        inverse_frequencies(64, 10_000.0, scaling, 2048)


@pytest.mark.parametrize(("head_dim", "theta"), [(0, 1e4), (7, 1e4), (-2, 1e4), (8, 0.0), (8, float("inf"))])
def test_impossible_shapes_are_refused(head_dim, theta):
    with pytest.raises(ValueError, match=r"head_dim|rope_theta"):
        inverse_frequencies(head_dim, theta, None, 2048)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype):
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=8192)
    queries = torch.randn(2, 4, 5, 16, dtype=dtype)
    positions = torch.tensor([[0, 1, 2, 3, 4], [8187, 8188, 8189, 8190, 8191]])
    cos, sin = LlamaRotaryEmbedding(config)(queries, positions)
    expected, _ = apply_rotary_pos_emb(queries, queries, cos, sin)
    tables = rope_tables(positions, *inverse_frequencies(16, 10_000.0, None, 8192), dtype)
    assert tables[0].shape == (2, 1, 5, 16) and tables[0].dtype == dtype
    assert torch.equal(tables[0].squeeze(1), cos) and torch.equal(tables[1].squeeze(1), sin)
    torch.testing.assert_close(rotate(queries, *tables), expected)


def rotated(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    inv_freq, factor = inverse_frequencies(x.shape[-1], 10_000.0, None, 4096)
    return rotate(x, *rope_tables(torch.tensor([positions]), inv_freq, factor, x.dtype))


def test_padding_gives_finite_values():
    keys = torch.randn(1, 2, 3, 8)
    assert rotated(keys, [-1, -1, 0]).isfinite().all()
    assert torch.equal(rotated(keys, [-1, -1, 0])[:, :, 2], keys[:, :, 2])


def test_attention_factor_scales_the_tables():
    inv_freq, factor = inverse_frequencies(8, 1e4, {"rope_type": "yarn", "factor": 4.0}, 64)
    assert factor > 1
    cos, _ = rope_tables(torch.zeros(1, 1), inv_freq, factor, torch.float32)
    assert torch.all(cos == torch.tensor(factor))


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 2**31))
def test_scores_depend_on_distance_only_and_norms_are_kept(p, shift, seed):
    torch.manual_seed(seed)
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    near = (rotated(query, [p + 3]) * rotated(key, [p])).sum()
    far = (rotated(query, [p + 3 + shift]) * rotated(key, [p + shift])).sum()
    torch.testing.assert_close(near, far, atol=5e-3, rtol=0)  # fp32 angles of a few thousand radians
    torch.testing.assert_close(rotated(key, [p]).norm(), key.norm())


@given(st.integers(0, 500), st.integers(-500, 500))
def test_rotate_by_moves_a_stored_key(p, delta):
    keys = torch.randn(2, 3, 2, 16)
    inv_freq, _ = inverse_frequencies(16, 10_000.0, None, 4096)
    expected = rotated(keys, [p + delta, p + 1 + delta])
    moved = rotate_by(rotated(keys, [p, p + 1]), delta, inv_freq)
    torch.testing.assert_close(moved, expected, atol=1e-3, rtol=0)


def test_rotate_by_takes_a_delta_per_row_or_per_head():
    keys, (inv_freq, _) = torch.randn(2, 3, 4, 8), inverse_frequencies(8, 10_000.0, None, 64)
    per_row = torch.randint(-9, 9, (2, 4))
    moved = rotate_by(keys, per_row, inv_freq)
    assert torch.equal(moved, rotate_by(keys, per_row[:, None].expand(2, 3, 4), inv_freq))
    assert torch.equal(moved[1, 2, 3], rotate_by(keys, int(per_row[1, 3]), inv_freq)[1, 2, 3])
    assert rotate_by(keys.bfloat16(), per_row, inv_freq).dtype == torch.bfloat16
    torch.testing.assert_close(rotate_by(rotate_by(keys, 5, inv_freq), -5, inv_freq), keys)


def test_scaling_written_the_old_way_is_read():
    old, _ = inverse_frequencies(8, 1e4, {"type": "linear", "factor": 2.0}, 64)
    new, _ = inverse_frequencies(8, 1e4, {"rope_type": "linear", "factor": 2.0}, 64)
    assert torch.equal(old, new)
