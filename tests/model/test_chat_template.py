"""Chat templates render as in transformers, inside a sandbox."""

import json

import pytest
from transformers import AutoTokenizer

from kvlab.model.tokenizer import Tokenizer
from tests.model.factory import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(gguf_path) -> Tokenizer:
    return Tokenizer.load(gguf_path)


CONVERSATIONS = [
    [{"role": "user", "content": "What is a KV cache?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  hi\n"}],
    [
        {"role": "user", "content": "<b>&\"'</b>"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": ""},
    ],
    [{"role": "user", "content": "안녕 🙂 {{ 7 * 7 }} {% if x %}"}],
]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chats_equal_transformers(tokenizer, reference_tokenizer, messages, prompt):
    theirs = reference_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert tokenizer.chat(messages, add_generation_prompt=prompt) == theirs


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}{{ eos_token }}",
    "{%- for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% if tools is not none %}T{% endif %}{% if add_generation_prompt %}G{% endif %}{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_features_equal_transformers(tmp_path, template):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CONVERSATIONS[1], tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer.load(tmp_path).chat(CONVERSATIONS[1]) == theirs


@pytest.mark.parametrize("template", [
    "{{ raise_exception('no system role') }}", "{% for %}", "{{ messages.__class__.__mro__ }}",
    "{{ messages.append(1) }}", "{{ missing.field }}",
])  # fmt: skip
def test_templates_that_fail_or_reach_out_are_refused(tmp_path, template):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="chat template refuses"):
        Tokenizer.load(tmp_path).chat(CONVERSATIONS[0])


def test_templates_are_found_where_checkpoints_keep_them(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.load(tmp_path).chat(CONVERSATIONS[0])
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"bos_token": {"content": "<s>"}}
    path.write_text(json.dumps(config | {"chat_template": "one {{ bos_token }}"}))
    assert Tokenizer.load(tmp_path).chat([]) == "one <s>"
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "two"}]
    path.write_text(json.dumps(config | {"chat_template": named}))
    assert Tokenizer.load(tmp_path).chat([]) == "two"
