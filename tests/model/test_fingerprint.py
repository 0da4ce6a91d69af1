"""What makes another model, for those who store keys and values: any weight, its dtype, its name, any setting."""

from dataclasses import replace

import torch

from kvlab.model.fingerprint import fingerprint
from kvlab.model.transformer import Transformer
from tests.harness import tiny_config


def model(config=None, dtype=torch.float32) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config or tiny_config()).to(dtype)


def test_the_same_weights_and_settings_are_the_same_model():
    assert fingerprint(model()) == fingerprint(model()) and len(fingerprint(model())) == 64


def test_everything_that_changes_keys_and_values_makes_another_model():
    config, changed = tiny_config(), model()
    with torch.no_grad():
        changed.model.layers[-1].mlp.down_proj.weight[-1, -1] += 1e-3
    others = [changed, model(dtype=torch.bfloat16), model(replace(config, rms_norm_eps=2 * config.rms_norm_eps))]
    names = {fingerprint(other) for other in (model(), *others)}
    assert len(names) == 4
