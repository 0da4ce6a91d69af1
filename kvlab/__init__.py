"""KV Cache Lab's companion package: names and modules load when first used, torch not before."""

_NAMES = {
    "ConfigError": "kvlab.config",
    "ModelConfig": "kvlab.config",
    "resolve": "kvlab.config",
    "bytes_allocated": "kvlab.sizing",
    "bytes_ideal": "kvlab.sizing",
    "bytes_per_token": "kvlab.sizing",
    "load": "kvlab.model.zoo",
}


def __getattr__(name: str):
    """A lazy name, a module of the package, or `__version__`."""
    import sys

    if name == "__version__":
        from importlib import metadata

        return metadata.version("kvlab")
    module = _NAMES.get(name, f"kvlab.{name}")
    try:
        __import__(module)  # not importlib: -X importtime, by which a test measures, sees only this one
    except ModuleNotFoundError as error:
        if error.name != f"kvlab.{name}":
            raise
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}") from None
    return getattr(sys.modules[module], name) if name in _NAMES else sys.modules[module]


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES, "__version__"])
