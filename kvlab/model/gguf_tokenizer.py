"""A byte-level BPE tokenizer rebuilt from a GGUF file, which holds all but the rule for splitting text."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from kvlab.model.gguf_file import GGUFFile
from kvlab.model.weights import CheckpointError

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_TAIL = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
# How text is split before merging, by tokenizer.ggml.pre; None is GPT-2's rule, built into ByteLevel.
# SmolLM's own rule also cuts digits off one by one first. transformers leaves that out when it reads a GGUF,
# and kvlab does as transformers does, so that both give the same ids. The rules differ only where two or more
# spaces, tabs or newlines stand before a digit; a tokenizer.json, as on the hub, carries the full rule.
SPLITS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _CONTRACTIONS + _TAIL % r"\p{N}{1,3}",
    "qwen2": _CONTRACTIONS + _TAIL % r"\p{N}",
}
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def backend_from_gguf(file: GGUFFile) -> tuple[Tokenizer, dict[str, str], str | None]:
    """Return the tokenizer, its special tokens by role, and the chat template.

    Raises CheckpointError for a tokenizer that is not byte-level BPE, or a splitting rule not listed here.
    """
    prefix = "tokenizer.ggml."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    rule = values.get("pre", "gpt-2")
    _check(values, rule, file)
    tokens = values["tokens"]
    try:
        backend = _byte_level_bpe(tokens, values["merges"], SPLITS[rule])
    except Exception as error:  # the library raises nothing narrower
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{file.path}: tokens and merges do not fit ({reason}): download it again") from None
    _add_special_tokens(backend, tokens, values.get("token_type", ()))
    specials = {role: tokens[values[key]] for role, key in _ROLES.items() if values.get(key, -1) in range(len(tokens))}
    if values.get("add_bos_token") and "bos_token" in specials:
        bos = specials["bos_token"]
        opening = [(bos, values["bos_token_id"])]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=opening)
    template = file.metadata.get("tokenizer.chat_template")
    return backend, specials, template if isinstance(template, str) else None


def _check(values: Mapping, rule: str, file: GGUFFile) -> None:
    instead = "load the model from a directory with tokenizer.json"
    if values.get("model") != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizer {values.get('model')!r} is not supported in GGUF "
            f"(only 'gpt2', byte-level BPE): {instead}"
        )
    if rule not in SPLITS:
        known = ", ".join(SPLITS)
        raise CheckpointError(f"{file.path}: tokenizer rule {rule!r} is not known (kvlab knows {known}): {instead}")
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        found = values.get(key, [])
        if not isinstance(found, list) or not all(type(entry) is kind for entry in found):
            raise CheckpointError(f"{file.path}: metadata {key} must be a list of {kind.__name__}: convert it again")
    missing = [key for key in ("tokens", "merges") if not values.get(key)]
    if missing:
        raise CheckpointError(f"{file.path}: metadata tokenizer.ggml.{missing[0]} is missing: convert it again")


def _byte_level_bpe(tokens: list[str], merges: list[str], split: str | None) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    absent = next((merge for merge in merges if merge.replace(" ", "", 1) not in vocab), None)
    if absent is not None:  # the library would panic
        raise ValueError(f"merge {absent!r} makes no token")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        by_rule = pre_tokenizers.Split(Regex(split), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([by_rule, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special_tokens(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Whole wherever they stand in a text; only control tokens can be skipped when decoding."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    for token, kind in zip(tokens, kinds, strict=False):
        # Real control tokens are spelled in the byte alphabet; others were mislabelled.
        if kind == CONTROL and set(token) <= alphabet:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
