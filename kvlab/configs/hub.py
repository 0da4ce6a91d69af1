"""Fetches single files from the Hugging Face hub through its ordinary client, with one-line errors."""

from __future__ import annotations

import os
from pathlib import Path

from kvlab.configs.hf_layout import ConfigError

PATIENCE_S = 5.0  # to learn whether the hub answers at all: the client itself would try six times, for 23 s


def fetch(repo: str, file: str, revision: str | None = None) -> Path:
    """Where `file` of `repo` lies on this machine, downloaded when needed.

    Raises ConfigError in one line: not installed, offline and not cached, no such model, or gated.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise ConfigError(f"{repo}: reading from the hub needs huggingface_hub: pip install huggingface_hub") from None
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise ConfigError(f"{repo}: no such file, and not a hub id: {str(error).splitlines()[0]}") from None
    cached = hub.try_to_load_from_cache(repo, file, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    if constants.HF_HUB_OFFLINE or not is_reachable(constants.ENDPOINT):
        raise ConfigError(
            f"{repo}: not a preset, no such directory, not cached, and {constants.ENDPOINT} does not answer: "
            "connect, or give a preset name, a directory or a config.json"
        )
    try:
        return Path(hub.hf_hub_download(repo, file, revision=revision, etag_timeout=2 * PATIENCE_S))
    except errors.GatedRepoError:
        raise ConfigError(f"{repo}: gated: accept its licence on the hub and log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(f"{repo}: no such model on {constants.ENDPOINT} (or it is private)") from None
    except (OSError, errors.HfHubHTTPError, errors.EntryNotFoundError) as error:
        raise ConfigError(f"{repo}: {file} could not be fetched: {str(error).strip().splitlines()[0]}") from None


def is_reachable(endpoint: str) -> bool:
    """Whether the hub answers at all, asked once and briefly (through the proxy, where one is set)."""
    import urllib.error
    import urllib.request

    if os.environ.get("KVLAB_OFFLINE"):
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PATIENCE_S).close()
    except urllib.error.HTTPError:
        return True  # it answered
    except (OSError, ValueError):
        return False
    return True
