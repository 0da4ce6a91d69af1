"""Telling models apart by what they compute with."""

from __future__ import annotations

import hashlib

import torch

from kvlab.model.transformer import Transformer


def fingerprint(model: Transformer) -> str:
    """SHA-256 of configuration and weights, 64 hexadecimal digits: one changed weight makes another model.

    Reads every weight once. Two machines may still round differently; that is not told apart.
    """
    digest = hashlib.sha256(repr(model.config).encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().flatten().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()
