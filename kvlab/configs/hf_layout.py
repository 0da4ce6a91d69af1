"""Which cache layout a Hugging Face config asks for, layer by layer; unknown layouts are refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.configs import families


class ConfigError(ValueError):
    """A config is missing, broken, contradictory, or of a layout that is not known; one line says which."""


def refuse_unknown_layouts(text: Mapping, name: str) -> None:
    """Raise ConfigError for a layout that stores anything but a key and a value row per token and head."""
    model_type = text["model_type"]
    listed = text.get("layer_types")
    is_listed = isinstance(listed, (list, tuple)) and not set(map(str, listed)) & set(families.LAYER_TYPE_REASONS)
    if model_type in families.REFUSED_TYPES and not (is_listed and model_type == "granitemoehybrid"):
        raise unknown(name, f"model_type {model_type!r}", families.REFUSED_TYPES[model_type])
    for field, reason in families.REFUSED_FIELDS.items():
        if text.get(field):
            raise unknown(name, f"{field} {short(text[field])}", reason)
    for field in families.STATE_FIELDS:
        if text.get(field) and not is_listed:
            raise unknown(name, f"{field} {short(text[field])}", families.STATE)


def layer_types(text: Mapping, name: str) -> tuple[str, ...]:
    """What each layer attends to: as listed, or as the model's class derives it from its window."""
    n = count(text, "num_hidden_layers", name)
    listed = text.get("layer_types")
    if listed is None:
        return _derived_layer_types(text, n, name)
    if not isinstance(listed, (list, tuple)) or len(listed) != n:
        size = len(listed) if isinstance(listed, (list, tuple)) else listed
        raise ConfigError(f"{name}: layer_types lists {size} layers, num_hidden_layers says {n}: mend the config")
    types = tuple("full_attention" if t == "attention" else str(t) for t in listed)
    for kind in types:
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            reason = families.LAYER_TYPE_REASONS.get(kind, "this layer type is not known here")
            raise unknown(name, f"layer_types has {kind!r}", reason)
    return types


def _derived_layer_types(text: Mapping, n: int, name: str) -> tuple[str, ...]:
    model_type, window = text["model_type"], text.get("sliding_window")
    if text.get("attention_chunk_size") and (model_type == "llama4_text" or text.get("no_rope_layers")):
        interval = text.get("no_rope_layer_interval") or 4
        rope = text.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(n)]  # 1 = it has RoPE
        return tuple("chunked_attention" if r else "full_attention" for r in rope[:n])
    if window is None or text.get("use_sliding_window") is False or model_type in families.IGNORES_WINDOW:
        return ("full_attention",) * n
    if model_type == "qwen2_moe":
        last = text.get("max_window_layers", n)
        return _types(i % 2 == 0 and i < last for i in range(n))
    if text.get("use_sliding_window"):
        return _types(i >= text.get("max_window_layers", 28) for i in range(n))
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern"))
    pattern = families.FULL_EVERY.get(model_type) if pattern is None else pattern
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return _types(i < n - 1 and pattern[i % len(pattern)] == "L" for i in range(n))
    if pattern is not None:
        if type(pattern) is not int or pattern < 1:
            raise ConfigError(f"{name}: sliding_window_pattern must be a positive number, not {pattern!r}")
        return _types((i + 1) % pattern != 0 for i in range(n))
    if model_type == "cwm":
        return _types(i % 4 != 0 for i in range(n))
    if model_type in families.ALL_SLIDE:
        return ("sliding_attention",) * n
    reason = f"which layers of a {model_type!r} model slide is not known: add layer_types, or sliding_window null"
    raise unknown(name, f"sliding_window {window} without layer_types", reason)


def _types(slides) -> tuple[str, ...]:
    return tuple("sliding_attention" if s else "full_attention" for s in slides)


def count(text: Mapping, field: str, name: str) -> int:
    """A field that must be a positive whole number; raises ConfigError naming field and value."""
    value = text.get(field)
    if value is None:
        raise ConfigError(f"{name}: the config lacks {field}: give a decoder's full config.json")
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}: {field} must be a positive whole number, not {value!r}: mend the config")
    return value


def unknown(name: str, what: str, reason: str) -> ConfigError:
    """The refusal of a layout, in one line."""
    return ConfigError(f"{name}: sizing does not know this layout: {what} ({reason})")


def short(value: object) -> str:
    """A value cut to fit in one line."""
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
