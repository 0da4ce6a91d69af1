"""Rendering a chat template: a checkpoint's Jinja program that turns messages into the text of its training.

Templates come with downloaded files, so they run in Jinja's sandbox; the helpers are those of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from json import dumps

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    specials: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """Return the conversation as text; raises ValueError where the template refuses the messages."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    variables = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    try:
        program = environment.from_string(template)
        return program.render(**specials, **variables, tools=None, documents=None)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; here it changes nothing."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return dumps(value, ensure_ascii=ensure_ascii, indent=indent)  # jinja's own filter escapes for HTML


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
