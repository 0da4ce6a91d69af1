"""Text to token ids and back, from a tokenizer.json or from a GGUF file's metadata, and the chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Backend

from kvlab.model.gguf_file import GGUFFile
from kvlab.model.gguf_tokenizer import backend_from_gguf
from kvlab.model.safetensors_files import read_json
from kvlab.model.weights import CheckpointError


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    specials   role -> token's text ("bos_token", "eos_token", ...), as templates name them
    """

    backend: Backend
    specials: Mapping[str, str]
    chat_template: str | None = None

    @classmethod
    def load(cls, source: Path | str | GGUFFile) -> Tokenizer:
        """Read a directory with tokenizer.json, or a GGUF file (a path or an open one).

        Raises CheckpointError where there is none or its type is not supported.
        """
        if isinstance(source, GGUFFile):
            return cls(*backend_from_gguf(source))
        path = Path(source)
        return cls(*backend_from_gguf(GGUFFile(path))) if path.is_file() else _from_directory(path)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return self.backend.get_vocab_size()

    @property
    def bos_id(self) -> int | None:
        """The id that opens a text, where the model has one."""
        return self._id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text or a turn."""
        return self._id("eos_token")

    def _id(self, role: str) -> int | None:
        return self.backend.token_to_id(self.specials[role]) if role in self.specials else None

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Return token ids; special tokens written in the text become themselves.

        A byte for which the vocabulary has no token is left out, as transformers does.
        `add_bos`: put the opening token first; None does what the checkpoint asks. A chat template writes its
        own, so encode its text with False. Raises ValueError where the model has no such token.
        """
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError("the text holds bytes or surrogates that are no Unicode: give it as valid UTF-8")
        if add_bos is None:
            return self.backend.encode(text).ids
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos: this tokenizer has no opening token (bos)")
        opening = [self.bos_id] if add_bos else []
        return opening + self.backend.encode(text, add_special_tokens=False).ids

    def knows(self, token_id: int) -> bool:
        """Whether an id has a text: a model's vocabulary is often padded beyond its tokenizer's."""
        return 0 <= token_id < 2**32 and self.backend.id_to_token(token_id) is not None

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id outside."""
        ids = [int(i) for i in ids]
        outside = [i for i in ids if not self.knows(i)]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the tokenizer's {self.vocab_size} tokens")
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def stream_decoder(self, *, skip_special: bool = False) -> StreamDecoder:
        """Return a decoder to which tokens are given one by one as they are generated."""
        return StreamDecoder(self, skip_special)

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Return a conversation as the text that the model was trained on.

        messages: {"role": "system" | "user" | "assistant", "content": text} each. Raises ValueError where
        there is no template, or where it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template: encode plain text, or use an instruct model")
        from kvlab.model.chat_template import render  # here: only chats need jinja2

        return render(self.chat_template, messages, self.specials, add_generation_prompt)


class StreamDecoder:
    """Turns single tokens into pieces of text that split no character and add up to `decode`."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []  # the last piece's tokens, then those not shown yet
        self._shown = 0  # how many of them make the last piece

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character's bytes are still coming."""
        self._ids.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        """Return what is left at the end: bytes that never became a character, as U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        # The last piece is decoded along, because some tokenizers write a space only between two tokens.
        before = self._decode(self._ids[: self._shown])
        text = self._decode(self._ids)
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def _from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    read_json(path)  # names a file that is missing or no JSON
    try:
        backend = Backend.from_file(str(path))
    except BaseException as error:  # the library raises Exception, or panics, which is not even that
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise CheckpointError(f"{path} is not a tokenizer ({error}); download it again") from None
    backend.no_truncation()  # some files carry the limits of their training run
    backend.no_padding()
    settings = directory / "tokenizer_config.json"
    config = read_json(settings) if settings.exists() else {}
    specials = {
        role: text
        for role in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text_of(config.get(role), f"{settings}: {role}"))
    }
    return Tokenizer(backend, specials, _text_of(_template(directory, config), f"{settings}: chat_template"))


def _text_of(token: object, where: str) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{where} must be a text, not {type(text).__name__}: download it again")
    return text


def _template(directory: Path, config: Mapping) -> str | None:
    """A file of its own in newer checkpoints, a field or a list of named ones in older."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); download it again") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping)]
        return next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template
