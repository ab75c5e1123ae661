"""Chat templates: rendered as transformers does, and hostile ones refused without running anything."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
import tokenizers

from pagedkv.api.errors import ModelError, RequestInvalid
from pagedkv.models.chat_template import render
from pagedkv.models.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'exact'."},
    {"role": "user", "content": "  háček \n"},
    {"role": "assistant", "content": "ok"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, None, True, "ž"]}}}]

TEMPLATES = {
    "loop": "{% for m in messages %}{{ loop.index0 }}{{ m.role }}{{ m['content'] | trim }}\n{% endfor %}",
    "blocks": "{%- for m in messages -%}\n    "
    "{% if m.role == 'user' %}\n  U:{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson }}{{ tools[0] | tojson(indent=2) }}{% endif %}{{ bos_token }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "controls": "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "macro": "{% macro w(x) %}[{{ x }}]{% endmacro %}{{ w('a' ~ 1 ~ none) }}{{ 'x' * 3 }}{{ 7 % 3 }}{{ 2 ** 5 }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}"
    "{{ 'ab' | replace('a', 'c') }}{{ 'a\nb' | indent(2) }}",
    "methods": "{{ 'a,b'.split(',') }}{{ 'x'.ljust(4) }}"
    "{{ '-'.join(['a', 'b']) }}{{ '{} {:>4}'.format(1, 'b') }}{{ '%03d' % 7 }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "dict": "{% for k, v in dict(a=1, b=[2]) | items %}{{ k }}{{ v }}{% endfor %}{{ undefined_name }}",
    "slices": "{% for m in messages[1:] %}{{ m.content[-3:] }}{% endfor %}{{ messages[::-1][0].role }}",
    "set block": "{% set x %}{{ messages[0].role }}!{% endset %}{{ x | upper | length }}{{ range(4) | list }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    extra = {"tools": TOOLS, "bos_token": "<s>"}
    expected = render_jinja_template([MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, **extra)[0][
        0
    ]
    assert render(TEMPLATES[name], MESSAGES, add_generation_prompt=True, **extra) == expected


def test_the_clock_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}", []) == time.strftime("%Y")


HOSTILE = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "attr filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': 1}).x.y }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "self": "{{ self.__init__.__globals__.x.y }}",
    "mutation": "{{ messages.append(1) }}",
    "clear": "{{ messages[0].clear() }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "namespace set": "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
    "syntax": "{% for m in %}",
    "unknown filter": "{{ 1 | nonsense }}",
    "no such name": "{{ a.b.c }}",
    "division": "{{ 1 / 0 }}",
    "type": "{{ 1 + 'a' }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_and_broken_templates_are_model_errors(name: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        render(HOSTILE[name], [{"role": "user", "content": "x"}])


BOMBS = {
    "repeat": "{{ 'a' * 10**12 }}",
    "repeat list": "{{ [0] * 10**9 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "adding": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "lists": "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "set block": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "range": "{{ range(10**9) | list }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format width": "{{ '{:>{}}'.format(1, 10**9) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "map": "{{ ['a'] | map('center', 10**10) | list }}",
    "join": "{{ (range(100000) | list) | join('a' * 100000) }}",
    "join method": "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace method": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "tojson": "{{ [[1]] | tojson(indent=10**9) }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "output": "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_bombs_are_refused_before_they_go_off(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="chat template"):
            render(BOMBS[name], [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 28
    finally:
        tracemalloc.stop()


def test_a_template_that_refuses_the_messages_says_so() -> None:
    with pytest.raises(RequestInvalid, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", MESSAGES)
    assert caught.value.field == "messages"


def tokenizer_with(template: str | None, **special: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    return Tokenizer(backend, special_tokens=special, chat_template=template, template_source="org/name")


def test_no_template_is_an_error_that_says_so() -> None:
    with pytest.raises(ModelError, match="org/name has no chat template"):
        tokenizer_with(None).apply_chat_template(MESSAGES)


def test_the_tokenizer_passes_its_special_tokens_and_the_callers_variables() -> None:
    template = "{{ bos_token }}|{{ add_generation_prompt }}|{{ thinking }}|{{ tools is none }}|{{ eos_token }}"
    tokenizer: Any = tokenizer_with(template, bos_token="<s>", eos_token="</s>")
    assert tokenizer.apply_chat_template([], add_generation_prompt=False, thinking=7) == "<s>|False|7|True|</s>"
