"""Token ids equal transformers' for all kinds of text, nothing is lost on the way back or in a stream."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from kvlab.model.gguf_file import GGUFFile
from kvlab.model.tokenizer import Tokenizer
from kvlab.model.weights import CheckpointError
from tests.model.factory import write_checkpoint, write_gguf

HAND_PICKED = [
    "", " ", "  ", "a", " a", "a ", "\n", "\n\n\n", "\t\tx", "\r\n", "Hello, world!",
    "it's we'll they've I'M DON'T",
    "def f(x):\n    return x ** 2  # square\n", "for (int i = 0; i < n; ++i) { s += a[i]; }",
    "SELECT * FROM t WHERE a=1;",
    '{"key": [1, 2.5, null], "text": "a\\nb"}', "<div class='a'>&nbsp;</div>",
    "https://example.org/a?b=c&d=%20#e", "캐시는 키와 값을 저장합니다.",
    "한국어와 English를 섞은 문장 123", "ㄱㄴㄷ ㅏㅑ", "漢字とかなとカナ", "Привет, мир",
    "مرحبا ١٢٣",     "हिन्दी", "ไทย", "🙂",
    "👩‍👩‍👧‍👦", "🏳️‍🌈🇰🇷", "a🙂b 🙃", "e\u0301 é", "\u200b\u200d\ufeff", "naïve café",
    "½ ² ³ ① Ⅷ", "٣٤",     "0", "12345678901234567890", "3.14159", "1,000,000", "2026-11-29", "0x1F", "a1b2",
    "v1.2.3", "50% of $5.00",

    " " * 100, "a" + " " * 37 + "b", "x\t \t y", "  \n  \n", "\n 7", "x  12", "\t5",
    "<|im_start|>user\nhi<|im_end|>", "a<|im_end|>b", "<|im_start",
    "<|endoftext|><|endoftext|>", " <|im_end|> ",
    "<repo_name>x<file_sep>", "<|nothing|>", "\x00\x01\x7f", "\ufffd", "…“quoted” — dash",
    "A" * 300, "ab" * 200,
]  # fmt: skip
POOLS = ["abcdefgh ", "ABC xyz.,;:!?", "한국어 텍스트는 ",
         "🙂👩‍👩‍👧‍👦🏳️‍🌈👍🏽", "    \t\n\r\n",
         "0123456789", "²½٣Ⅷ①", " <|im_start|><|im_end|>",
         "def f(x):\n    return {x: [1]}  # ok", "\u200d\u0301é\ufffd\x00\x7f",
         "漢字かなカナ", "العربية", "Привет "]  # fmt: skip


def generated(count: int, seed: int = 0) -> list[str]:
    """Mixtures of single characters and whole pools, as short and long as they come."""
    rng = random.Random(seed)
    pick = lambda: rng.choice(rng.choice(POOLS)) if rng.random() < 0.8 else rng.choice(POOLS)  # noqa: E731
    return ["".join(pick() for _ in range(rng.randint(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer(gguf_path) -> Tokenizer:
    return Tokenizer.load(gguf_path)


def test_ids_equal_transformers(tokenizer, reference_tokenizer):
    texts = HAND_PICKED + generated(600)
    assert len(set(texts)) >= 500
    for text in texts:
        assert tokenizer.encode(text) == reference_tokenizer(text).input_ids, repr(text)


def test_special_tokens_equal_transformers(tokenizer, reference_tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id) == (
        reference_tokenizer.bos_token_id, reference_tokenizer.eos_token_id) == (1, 2)  # fmt: skip
    assert tokenizer.vocab_size == len(reference_tokenizer)
    assert tokenizer.encode("hi", add_bos=True) == [1, *tokenizer.encode("hi")]
    assert tokenizer.decode([1, 6403, 2], skip_special=True) == tokenizer.decode([6403])


# SmolLM2 has no token for 21 of the 256 bytes: six control characters and what starts planes 4 to 11.
UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
SPELLABLE = st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=UNKNOWN))


@settings(max_examples=300)
@given(SPELLABLE)
def test_nothing_is_lost(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_without_a_token_are_left_out_as_in_transformers(tokenizer, reference_tokenizer):
    for character in [*UNKNOWN, "\U00040000", "\U0009ffff"]:
        text = f"a{character}b"
        assert tokenizer.encode(text) == reference_tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text)) != text


@pytest.mark.parametrize("text", [*HAND_PICKED, *generated(100, seed=1)])
def test_a_stream_adds_up_and_splits_no_character(tokenizer, text):
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + decoder.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 49151), max_size=40))
def test_a_stream_of_any_tokens_equals_decoding_them_at_once(tokenizer, ids):
    decoder = tokenizer.stream_decoder()
    assert "".join(map(decoder.push, ids)) + decoder.finish() == tokenizer.decode(ids)


def test_a_stream_shows_text_at_once(tokenizer):
    decoder = tokenizer.stream_decoder()
    first, second = tokenizer.encode("Hello world")
    assert (decoder.push(first), decoder.push(second)) == ("Hello", " world")
    halves = tokenizer.encode("🧿")
    assert len(halves) > 1 and [decoder.push(half) for half in halves][-1] == "🧿"
    assert decoder.push(halves[0]) == "" and "\ufffd" in decoder.finish()


@pytest.mark.parametrize("bad", [-1, 49152, 10**9])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, bad):
    with pytest.raises(ValueError, match=str(bad)):
        tokenizer.decode([0, bad])


def test_a_directory_keeps_its_own_rules(tmp_path, tokenizer):
    """A tokenizer.json with SmolLM's full rule, digits first: runs of spaces stay whole before a digit."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    rules = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(rules)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    full = Tokenizer.load(tmp_path)
    assert full.encode("x  12") != tokenizer.encode("x  12")
    assert full.encode("x 12 of 345, a1b2") == tokenizer.encode("x 12 of 345, a1b2")
    assert len(full.encode("no truncation of longer texts, no padding of short ones")) == 12
    assert full.bos_id is None and full.eos_id is None
    with pytest.raises(ValueError, match="bos"):
        full.encode("x", add_bos=True)


@pytest.fixture(scope="module")
def rebuilt(gguf_path, tmp_path_factory):
    """Writes a GGUF with the first 3,000 tokens of the offline model and other rules."""
    directory, model = tmp_path_factory.mktemp("rules"), None
    metadata = GGUFFile(gguf_path).metadata
    tokens = metadata["tokenizer.ggml.tokens"][:3000]
    known = set(tokens)
    merges = [m for m in metadata["tokenizer.ggml.merges"] if m.replace(" ", "") in known]
    keys = {"tokens": tokens, "token_type": metadata["tokenizer.ggml.token_type"][:3000], "merges": merges}
    keys = {f"tokenizer__ggml__{key}": value for key, value in keys.items()}

    def write(**changes) -> Path:
        nonlocal model
        model = model or write_checkpoint(directory, "llama", num_hidden_layers=1)
        ids = {f"tokenizer__ggml__{role}_token_id": i for i, role in enumerate(["unknown", "bos", "eos"])}
        kind = {"tokenizer__ggml__model": "gpt2"}
        path = directory / "alone" / "rules.gguf"  # apart from the checkpoint's own tokenizer.json
        path.parent.mkdir(exist_ok=True)
        write_gguf(path, model, **(keys | ids | kind | changes))
        return path

    return write


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2", "gpt-2"])
def test_other_splitting_rules_equal_transformers(rebuilt, rule):
    path = rebuilt(tokenizer__ggml__pre=rule)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    cut = ours.backend.pre_tokenizer.pre_tokenize_str
    cut_theirs = theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for text in HAND_PICKED + generated(200, seed=2):
        assert ours.encode(text) == theirs(text).input_ids, repr(text)
        assert cut(text) == cut_theirs(text), repr(text)  # the small vocabulary hides some cuts


def test_an_opening_token_is_added_where_the_file_asks_for_it(rebuilt):
    path = rebuilt(tokenizer__ggml__pre="qwen2", tokenizer__ggml__add_bos_token=True)
    ours = Tokenizer.load(GGUFFile(path))
    assert ours.encode("hi") == [1, *ours.encode("hi", add_bos=False)] == ours.encode("hi", add_bos=True)


@pytest.mark.parametrize(("changes", "words"), [
    ({"tokenizer__ggml__model": "llama"}, "'llama' is not supported"),
    ({"tokenizer__ggml__model": None}, "None is not supported"),
    ({"tokenizer__ggml__pre": "poro-chat"}, "'poro-chat' is not known"),
    ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
    ({"tokenizer__ggml__merges": ["Ġ"]}, "merges"),
    ({"tokenizer__ggml__merges": ["qqqq zzzz"]}, "merges"),
    ({"tokenizer__ggml__merges": ["J Q"]}, "merges"),  # both are tokens, together they are none: the library panics
    ({"tokenizer__ggml__tokens": [1, 2, 3]}, "tokens must be a list of str"),
    ({"tokenizer__ggml__token_type": 5}, "token_type must be a list of int"),
])  # fmt: skip
def test_tokenizers_that_are_not_known_are_refused(rebuilt, changes, words):
    path = rebuilt(**changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 3}', '{"version": "1.0", "model": {"type": "X"}}'])
def test_broken_tokenizer_files_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"bos_token": 5}, {"eos_token": ["x"]}, {"eos_token": {"content": 7}}, {"chat_template": 5},
     {"chat_template": [{"name": "default", "template": 5}]}],
)  # fmt: skip
def test_settings_of_the_wrong_kind_are_refused(tmp_path, tokenizer, settings):
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: \w+ must be a text"):
        Tokenizer.load(tmp_path)


def test_files_that_make_the_library_panic_or_are_no_text_are_refused(tmp_path, tokenizer):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}  # "ab" is no token
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.load(tmp_path)


def test_text_that_is_no_unicode_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no Unicode"):
        tokenizer.encode("caf\udce9")


def test_ids_without_a_text_are_known(tokenizer):
    assert tokenizer.knows(0) and not any(tokenizer.knows(i) for i in (-1, tokenizer.vocab_size, 2**40))
