"""Which cache layout a Hugging Face config asks for, layer by layer; unknown layouts are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvlab.configs import families

MOST_LAYERS = 10_000  # a list with an entry for each is kept; the deepest published models have under 200


class ConfigError(ValueError):
    """A config is missing, broken, contradictory, or of a layout that is not known; one line says which."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


def one_line(text: str, most: int = 600) -> str:
    """What came from a file or a user, safe to print: no line breaks or control characters, and an end."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def refuse_unknown_layouts(text: Mapping, name: str) -> None:
    """Raise ConfigError for a layout that stores anything but a key and a value row per token and head."""
    model_type = text["model_type"]
    listed = text.get("layer_types")
    is_listed = isinstance(listed, (list, tuple)) and not set(map(str, listed)) & set(families.LAYER_TYPE_REASONS)
    if model_type in families.REFUSED_TYPES and not (is_listed and model_type == "granitemoehybrid"):
        raise unknown(name, f"model_type {model_type!r}", families.REFUSED_TYPES[model_type])
    for pattern, reason in families.REFUSED_NAMES.items():
        if re.search(pattern, model_type):
            raise unknown(name, f"model_type {short(model_type)!r}", reason)
    _refuse_encoders(text, name)
    for field, reason in families.REFUSED_FIELDS.items():
        if text.get(field):
            raise unknown(name, f"{field} {short(text[field])}", reason)
    for field, reason in families.REFUSED_UNLESS_LISTED.items():
        if text.get(field) and not is_listed and not _all_softmax(field, text[field]):
            raise unknown(name, f"{field} {short(text[field])}", reason)


def _all_softmax(field: str, value: object) -> bool:
    """MiniMax-M2 lists its layers as MiniMax-01 does, where 0 is a recurrent state and 1 attention: all are 1."""
    return field == "attn_type_list" and isinstance(value, (list, tuple)) and all(kind == 1 for kind in value)


def _refuse_encoders(text: Mapping, name: str) -> None:
    """Models that read everything at once keep no cache, however much their fields look like a decoder's."""
    classes = text.get("architectures")
    found = [c for c in classes if str(c).endswith(families.ENCODER_CLASSES)] if isinstance(classes, list) else []
    if found:
        raise unknown(name, f"architectures has {short(found[0])}", families.ENCODER)
    if text.get("patch_size") and (text.get("image_size") or text.get("num_channels")):
        raise unknown(name, f"patch_size {short(text['patch_size'])}", families.ENCODER)


def layer_types(text: Mapping, name: str) -> tuple[str, ...]:
    """What each layer attends to: as listed, or as the model's class derives it from its window."""
    n = count(text, "num_hidden_layers", name)
    if n > MOST_LAYERS:
        raise ConfigError(f"{name}: num_hidden_layers {short(n)} is more than {MOST_LAYERS:,}: mend the config")
    listed = text.get("layer_types")
    if listed is None:
        return _derived_layer_types(text, n, name)
    if not isinstance(listed, (list, tuple)) or len(listed) != n:
        size = len(listed) if isinstance(listed, (list, tuple)) else short(listed)
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
        return _chunked_unless_no_rope(text, n, name)
    if "sliding_window" not in text and model_type in families.HAS_WINDOW:
        raise ConfigError(f"{name}: a {model_type!r} config lacks sliding_window (or layer_types): give the full one")
    if window is None or text.get("use_sliding_window") is False or model_type in families.IGNORES_WINDOW:
        return ("full_attention",) * n
    first = text.get("max_window_layers", n if model_type == "qwen2_moe" else 28)
    if type(first) is not int:
        raise ConfigError(f"{name}: max_window_layers must be a whole number, not {short(repr(first))}")
    if model_type == "qwen2_moe":
        return _types(i % 2 == 0 and i < first for i in range(n))
    if text.get("use_sliding_window"):
        return _types(i >= first for i in range(n))
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


def _chunked_unless_no_rope(text: Mapping, n: int, name: str) -> tuple[str, ...]:
    """Llama 4: layers with RoPE attend in chunks."""
    interval, rope = text.get("no_rope_layer_interval") or 4, text.get("no_rope_layers")
    if type(interval) is not int or interval < 1:
        raise ConfigError(f"{name}: no_rope_layer_interval must be a positive number, not {short(interval)}")
    rope = rope or [(i + 1) % interval != 0 for i in range(n)]  # 1 = it has RoPE
    if not isinstance(rope, (list, tuple)) or len(rope) != n:
        raise ConfigError(f"{name}: no_rope_layers must list {n} layers, as num_hidden_layers says: mend the config")
    return tuple("chunked_attention" if r else "full_attention" for r in rope)


def _types(slides) -> tuple[str, ...]:
    return tuple("sliding_attention" if s else "full_attention" for s in slides)


def count(text: Mapping, field: str, name: str) -> int:
    """A field that must be a positive whole number; raises ConfigError naming field and value."""
    value = text.get(field)
    if value is None:
        raise ConfigError(f"{name}: the config lacks {field}: give a decoder's full config.json")
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}: {field} must be a positive whole number, not {short(repr(value))}: mend the config")
    return value


def unknown(name: str, what: str, reason: str) -> ConfigError:
    """The refusal of a layout, in one line."""
    return ConfigError(f"{name}: sizing does not know this layout: {what} ({reason})")


def short(value: object) -> str:
    """A value cut to fit in one line."""
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
