#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small templates for every construct that a chat template may use, rendered by transformers 5.24 and jinja2 3.1.6.

    make_chat_templates.py          # writes chat_templates.json beside this script, for chat_template_test
"""

import json
import os
import pathlib
import time

from compare_chat_templates import ARGUMENTS, CONVERSATIONS, Clock, USER, collection, render
from transformers.utils import chat_template_utils

VARIABLES = {
    "n": 7, "neg": -3, "x": 2.5, "yes": True, "no": False, "nothing": None, "s": "Hello World", "e": "",
    "u": "Straße ÇA ﬁn ΟΔΟΣ İz ǆ 你好🎉", "list": [3, 1, 2, 1], "words": ["b", "A", "c", "a"], "empty": [], "d": {"b": 1, "A": [1, None], "items": 5},
    "rows": [{"k": "x", "v": 1, "in": {"z": 9}}, {"k": "y", "v": 2, "in": {"z": 8}}, {"k": "X", "v": 3}], "args": ARGUMENTS,
    "deep": [[1, [2, [3]]], {"a": {"b": [4]}}],
}

# One line each: {{ EXPRESSION }}.
EXPRESSIONS = """
1 + 2 * 3 - 4
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7 % -3, 7 / 2, 2 ** 10, 2 ** -1, 7.5 // 2, -7.5 % 2, 7.5 % -2
-2 ** 2, - n, + n, -x, 1_000, 0x1F, 0b101, 0o17, 1e3, 1.5e-7, 1e16, 123456789012345680.0, 0.1 + 0.2, 1e22, 5e-324, 1e15
true + true, 1 == 1.0, true == 1, '1' == 1, none == none, nope == nope, [1] == [1.0], (1,) == [1]
1 < 2 < 3, 1 < 3 < 2, 'a' < 'b', [1, 2] < [1, 3], 2 >= 2, 'B' < 'a'
'a' in s, 'lo W' in s, 3 in list, 'b' in d, 9 in list, 'x' not in s, 1 in nope, none in [none], nope in d, {nope: 1}[nope]
not true, not empty, yes and n, no and n, e or 'x', none or e, 1 or nope.x
s ~ 1 ~ none ~ true ~ 2.0 ~ [1, 'a'], 'a' 'b' "c"
s[0], s[-1], s[1:3], s[::-1], s[:-3], s[20:], s[-3:], s[1::2], u[0:4], u[-1], u[::-1], s[5:1:-1]
list[0], list[-1], list[1:], list[::2], list[99] is defined, (1, 2)[1], d['b'], d.b, d.items is callable, d['items'], rows.1.k
d.nope is defined, nope is defined, d['nope'], none.x is defined, n.x is defined, s.x is defined
n if yes else s, n if no, 1 if no else 2 if no else 3
(1 if yes), (), (1,), (1, 'a'), [1, [2]], {'a': 1, 'b': [none]}, {}, {1: 2, true: 3, none: 4, (1, 2): 5}
[true, none, 1.0, 'it\\'s', "say \\"x\\"", "it's \\"x\\"", '\\n\\t\\\\', 'é\\x00\\u200b你\\x7f\\xa0']
'tab\\tnew\\nquote\\'\\"back\\\\hex\\x41oct\\101uni\\u00e9big\\U0001F389\\d'
[1] + [2, 3], (1,) + (2,), [0] * 3, 'ab' * 3, 3 * 'x', 'a' * -1, 'a' + 'b'
'%s is %d, %5.2f|%-5s|%05d|%x|%+d|%%|%r' % (s, 3, 2.345, 'l', 42, 255, 5, 'q'), '%s' % n, '%(a)s' % {'a': 1}
'{} {}'.format(1, s), '{1}{0}'.format('a', 'b'), '{a!r:>8}|{b:08.3f}|{c:^7}|{d:,}|{e:+d}|{f:x}|{{}}'.format(a='q', b=2.5, c='m', d=1234567, e=5, f=255)
'{0[b]} {1.k} {2[0]}'.format(d, rows[0], list), '{:.2f} {:>5} {:<5}| {:*^9} {:.3} {:%} {:e}'.format(2.345, 'r', 'l', 'mid', 'abcdef', 0.25, 12345.678), '{k}'.format_map({'k': 1})
s.upper(), s.lower(), u.upper(), u.lower(), u.title(), u.capitalize(), s.title(), "they're o'neil".title(), 'ΑΣ ΑΣΑ Σ'.lower(), 'ßŉᾲ ᾳ ß'.title(), 'ⅰª'.islower(), 'Ⅰ'.isupper(), 'ﬀ'.capitalize()
'  a b '.strip(), 'xxaxx'.strip('x'), 'xyaxy'.lstrip('xy'), 'abcabc'.rstrip('bc'), '\\u3000a\\u00a0'.strip() ~ '|'
'a,b,,c'.split(','), 'a,b,c'.split(',', 1), 'a,b,c'.rsplit(',', 1), ' a  b c '.split(), ' a  b c '.split(none, 1), ' a  b c '.rsplit(none, 1), ''.split(), ''.split(',')
'a\\nb\\r\\nc\\u2028d\\x0be\\n'.splitlines(), 'a\\nb'.splitlines(true), 'a-b-c'.partition('-'), 'a-b-c'.rpartition('-'), 'abc'.partition('x'), 'abc'.rpartition('x')
s.startswith('He'), s.startswith(('x', 'H')), s.endswith('ld'), s.startswith('l', 2), s.endswith('l', 0, -1), ''.startswith('')
s.replace('l', 'L'), s.replace('l', 'L', 1), 'aaa'.replace('', '-'), 'abc'.replace('', '-', 2), s.find('o'), s.rfind('o'), s.find('q'), s.index('W'), s.count('l'), 'é你é'.find('é', 1), 'aaa'.count('')
'-'.join(['a', 'b']), ''.join([]), 'a'.center(4, '*'), 'ab'.center(5), 'a'.ljust(3) ~ '|', 'a'.rjust(3), '42'.zfill(5), '-42'.zfill(5)
'abc'.removeprefix('a'), 'abc'.removesuffix('c'), 'abc'.isalpha(), 'ab1'.isalnum(), '12'.isdigit(), ''.isdigit(), 'ab'.islower(), 'AB1'.isupper(), ' \\t'.isspace()
d.get('b'), d.get('q'), d.get('q', 0), d.keys(), d.values() | list, d.items() | list, d.copy(), list.index(2), list.count(1)
s | upper, s | lower, 'foo bar-baz (x) o\\'x' | title, 'hELLO' | capitalize, s | length, list | length, d | length, nope | length, u | length
list | sort, words | sort, words | sort(case_sensitive=true), words | sort(reverse=true), rows | sort(attribute='k') | map(attribute='v') | list, rows | sort(attribute='k,v', reverse=true) | map(attribute='v') | list
list | unique | list, words | unique | list, list | sum, rows | sum(attribute='v'), list | min, list | max, words | min, rows | max(attribute='v'), empty | min
list | first, list | last, s | first, s | last, empty | first, d | first, d | last, list | reverse | list, s | reverse, u | reverse
rows | map(attribute='k') | join(', '), rows | map(attribute='in.z', default='-') | list, list | join, list | join('-'), rows | join('/', attribute='k'), words | map('upper') | list, list | map('string') | join
rows | selectattr('v', '>', 1) | map(attribute='k') | list, rows | rejectattr('in') | list, rows | selectattr('k', 'equalto', 'x') | list | length, [0, 1, none, 2] | select | list, [1, 2, 3] | select('odd') | list, [1, 2, 3] | reject('odd') | list, rows | selectattr('in', 'defined') | list | length
nope | last, nope | first, none | map('upper') | list, none | selectattr('a') | list
d | dictsort, d | dictsort(true), d | dictsort(false, 'key', true), {'a': 2, 'b': 1} | dictsort(by='value'), d | items | list, nope | items | list
'3.7' | int, '42' | int, 'x' | int, 'x' | int(-1), 3.9 | int, -3.9 | int, ' 1_000 ' | int, '0x1f' | int(base=16), 'ff' | int(0, 16), none | int, yes | int, '1e3' | int
'3.7' | float, 'x' | float, 'x' | float(1.5), 3 | float, ' -1e3 ' | float, 'inf' | float, '1_0.5' | float
2.5 | round, 3.5 | round, 2.567 | round(2), 2.1 | round(method='ceil'), 2.19 | round(1, 'floor'), 7 | round, -5 | abs, -2.5 | abs
nope | default('x'), none | default('x'), none | default('x', true), e | default('x', boolean=true), 0 | d(1), nope | default
'  x ' | trim, 'xxaxx' | trim('x'), 5 | string, none | string, 'a\\nb\\n\\nc' | indent, 'a\\nb\\n\\nc' | indent(2, true, true), 'a\\nb' | indent('> ', first=true), '' | indent ~ '|', 'a\\n' | indent ~ '|'
'a<b' | replace('<', '>'), 'aXbX' | replace('X', 'y', 1), 123 | replace('2', 5), '%s-%s' | format('a', 1), '%(x)s' | format(x=2), s | center(15) ~ '|'
'a<b>&"\\'' | escape, '<' | e, '<b>' | safe, ('<b>' | safe) + '<i>', '<i>' + ('<b>' | safe), ('<' | safe) ~ '<', ('<b>' | safe).upper() + '&', 'x' | safe | upper
s | list, d | list, 'é你' | list, range(3) | list, range(2, 8, 3) | list, range(3, 0, -1) | list, range(0) | list, dict(a=1, **{'b': 2}), dict([('a', 1)]), dict({'a': 1}, a=2)
args | tojson, d | tojson, u | tojson, [1, 2.0, none, true, 'a"b\\n\\x01\\u2028'] | tojson, (1, 2) | tojson, '<&>\\'' | tojson, {1: 2, none: 3, true: 4, 1.5: 5} | tojson
args | tojson(indent=2), deep | tojson(indent=1), [] | tojson(indent=2), {} | tojson(indent=2), [1] | tojson(indent=0), [1] | tojson(indent='--')
args | tojson(ensure_ascii=true), u | tojson(ensure_ascii=true), {'b': 1, 'a': 2} | tojson(sort_keys=true), [1, {'a': 2}] | tojson(separators=(',', ':')), [1, 2] | tojson(indent=2, separators=(';', '= '))
1e999 | tojson, -1e999 | tojson, 1e21 | tojson, 1e-7 | tojson, 100.0 | tojson, '\\x7f' | tojson
nope is undefined, none is none, 1 is number, true is number, 1.5 is float, 1 is integer, true is integer, true is boolean, true is true, false is false, 1 is true
'a' is string, d is mapping, list is mapping, list is sequence, s is sequence, d is sequence, nope is sequence, 1 is sequence, list is iterable, 1 is iterable, nope is iterable, d.items() is sequence, d.items() is iterable, range(2) is sequence
3 is odd, 3 is even, 6 is divisibleby 3, 6 is divisibleby(4), 'a' is lower, 'A' is upper, 1 is eq 1, 1 is ne(2), 2 is gt 1, 2 is lessthan 1, 1 is in [1], 1 is not in [1], 1 is sameas 1, 1 is sameas true, none is sameas none
range is callable, n is callable, nope is callable, 'upper' is filter, 'qqq' is filter, 'odd' is test, 'qqq' is test, n is not none, not n is none
-7 | abs, (-7) | abs, 'a' ~ 'b' | upper, [1, 2] | first + 1, n | string | length
list | map('string') | map('int') | sum, (list | map('string') | list)[0] is string, list | select('gt', 1) | first
strftime_now('%d %b %Y, %H:%M:%S %A %B %j %y %%'), strftime_now('%Y-%m-%d'), strftime_now('%Z|%z|%f'), strftime_now('')
namespace(a=1, b='x').b, namespace({'q': 3}).q, namespace().x is defined
'a' is string and 'b' is string or nope, (1 is number) if yes else 2, 1 is number and 2
nope, [nope], nope ~ 'x', nope == 1, nope != 1, nope is defined and nope.x
rows[0]['k'], rows[0]['in'].z, rows[-1].v, rows | length, deep[1].a.b[0], deep[0][1][1][0]
loop is defined, messages | length, messages[0].content, tools is none, documents is none, add_generation_prompt, bos_token, eos_token, unk_token, cls_token is defined
""".strip("\n").split("\n")

STATEMENTS = {
    "if": "{% if no %}a{% elif nothing %}b{% elif n %}c{% else %}d{% endif %}{% if e %}x{% endif %}|{% if n > 5: %}y{% endif %}",
    "for": "{% for i in list %}{{ i }}{% if not loop.last %}, {% endif %}{% endfor %}|{% for i in empty %}x{% else %}none{% endfor %}|{% for i in nope %}x{% else %}no{% endfor %}",
    "loop": "{% for c in 'abc' %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }}[{{ loop.previtem }}{{ loop.nextitem }}]{{ loop.cycle('x', 'y') }}{{ loop.changed(c == 'b') }};{% endfor %}",
    "unpack": "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for a, b in ['xy'] %}{{ b }}{% endfor %}",
    "filtered": "{% for r in rows if r.v > 1 %}{{ loop.index }}/{{ loop.length }}{{ r.k }}{{ loop.last }};{% else %}none{% endfor %}{% for r in rows if r.v > 9 %}{% else %}none{% endfor %}",
    "lazy": "{% set ns = namespace(stop=false) %}{% for i in list if not ns.stop %}{{ i }}{% set ns.stop = i == 1 %}{% endfor %}|{% set ns.stop = false %}{% for i in list if not ns.stop %}{{ i }}{{ loop.last }}{% set ns.stop = i == 1 %}{% endfor %}",
    "controls": "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}{% for i in [1, 2] %}{% for j in [1, 2] %}{% if j == 2 %}{% break %}{% endif %}{{ i }}{{ j }}{% endfor %}{% endfor %}",
    "else-after-continue": "{% for i in [1] %}{% continue %}{% else %}none{% endfor %}{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{% else %}none{% endfor %}{% for i in [1] %}{% break %}{% else %}none{% endfor %}",
    "recursive": "{% for x in [1, [2, [3]], 4] recursive %}{% if x is sequence %}({{ loop(x) }}){% else %}{{ x }}:{{ loop.depth }}{% endif %}{% endfor %}",
    "scopes": "{% set a = 1 %}{% for i in [1, 2] %}{{ a }}{% set a = a + 10 %}{{ a }};{% endfor %}{{ a }}{% if yes %}{% set a = 5 %}{% endif %}{{ a }}{% with a = 7, b = a %}{{ a }}{{ b }}{% set a = 8 %}{% endwith %}{{ a }}{% with %}{% set q = 1 %}{% endwith %}{{ q is defined }}",
    "namespaces": "{% set ns = namespace(n=0, l=[]) %}{% for i in list %}{% set ns.n = ns.n + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.n }}{{ ns.l }}{{ ns['n'] }}{{ ns.q is defined }}{% set ns.q, z = 1, 2 %}{{ ns.q }}{{ z }}",
    "set": "{% set a, b = 1, [2] %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}{% set (x1, y1) = 'pq' %}{{ y1 }}{% set t %}  text {{ n }}\n{% endset %}[{{ t }}]{% set t | upper | trim %} up {{ s }} {% endset %}[{{ t }}]",
    "macros": "{% macro m(a, b='B', c=a) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(b=2, a=1) }}{{ m() }}{{ m(1, 2, 3) | length }}{{ m.name }}",
    "macro-more": "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}{{ m() }}{% macro o() %}{{ caller is defined }}{% endmacro %}{{ o() }}",
    "macro-recursive": "{% macro tree(x) %}{% if x is mapping %}{ {%- for k, v in x.items() %}{{ k }}:{{ tree(v) }}{% endfor %} }{% elif x is iterable and x is not string %}[{% for i in x %}{{ tree(i) }}{% endfor %}]{% else %}{{ x }}{% endif %}{% endmacro %}{{ tree(deep) }}",
    "macro-scope": "{% set a = 1 %}{% macro m() %}{{ a }}{{ i }}{% set a = 9 %}{{ a }}{% endmacro %}{% for i in [1] %}{{ m() }}{% endfor %}{% set a = 2 %}{{ m() }}{{ a }}{% if yes %}{% macro inner() %}in{% endmacro %}{% endif %}{{ inner() }}",
    "macro-spread": "{% macro m(a, b) %}{{ a }}-{{ b }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(**{'a': 3, 'b': 4}) }}{{ m(1, *[2]) }}{{ m(*'xy') }}",
    "call": "{% macro box(t) %}[{{ t }}:{{ caller() }}]{% endmacro %}{% call box('a') %}in {{ n }}{% endcall %}{% macro each(l) %}{% for i in l %}{{ caller(i, loop.index) }}{% endfor %}{% endmacro %}{% call(x, i=0) each(words) %}{{ i }}{{ x }} {% endcall %}",
    "filter-block": "{% filter upper %}a{{ s }}{% endfilter %}{% filter replace('a', 'b') | trim %}  banana {% endfilter %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% set z = 1 %}{% endgeneration %}{{ z is defined }}{% endfor %}{%- generation -%} x {%- endgeneration -%}",
    "print": "{% print 1, s %}{% print n %}",
    "comments": "a{# c #}b {#- c -#} d\n{# line #}\n  {# indented #}\nx{#+ k +#}\ny {# {{ n }} {% if %} #}z",
    "blanks": "a\n  {% if yes %}\n    b\n  {% endif %}\n  c {% if yes %} d {% endif %}\n\n{% if yes %}\n\ne{% endif %}\n",
    "blank-signs": "  a  {%- if yes %}  b  {% endif -%}  c  {{- n }}  d  {{ n -}}  e\n{%- if yes -%}\n  f\n  {%- endif +%}\n  g\n  {%+ if yes %}h{% endif %}\n  {{+ n }}",
    "blank-lines": "x\n\t {% set a = 1 %}\n\u00a0{% set b = 2 %}\n{{ a }}\n\n{{ b }}\r\n{% set c = 3 %}\r\nend\r\n",
    "raw": "a {% raw %} {{ n }} {% if %} {# c #} {% endraw %} b\n  {%- raw -%}  {{ x }}\n  {%- endraw %}\n c{% raw %}\n{% endraw %}\nd",
    "raw-open": "a{% raw %}",
    "comment-open": "a{#",
    "trailing": "a\n\n",
    "braces": "{ {{ {'a': {'b': 1}}['a']['b'] }} } {{ '}}' }} {{ \"{{\" }} {%if yes%}%}{%endif%} }} %} #}",
    "generators": "{% set g = rows | map(attribute='v') %}{% for i in g %}{{ i }}{% endfor %}|{% for i in g %}{{ i }}{% endfor %}|{% if g %}true{% endif %}{{ [1] | select | list }}{{ d.items() | list | length }}",
    "soft-filter": "{% if 'from_json' is filter %}{{ '1' | from_json }}{% else %}no{% endif %}{{ ('1' | nope) if no else 2 }}",
    "shadow": "{% set range = 5 %}{{ range }}{% for messages in [1] %}{{ messages }}{% endfor %}{{ messages | length }}{% set namespace = 1 %}{{ namespace }}",
    "sorted-json": "{% for k, v in args | dictsort %}{{ k }}={{ v | tojson if v is not string else v }};{% endfor %}",
    "date": "{{ strftime_now('%d %B %Y') }}",
    "long": "{% for i in range(1000) %}{{ i }}{% endfor %}",
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "bos": "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}{% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}{{ eos_token }}{% endfor %}{% if tools %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}{% for doc in documents or [] %}{{ doc.title }}{% endfor %}{{ enable_thinking }}",
    "strict": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported: ' ~ messages[0].content) }}{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}

# Python raises an exception for each.
WRONG = """
{{ nope.x }}
{{ nope['x'] }}
{{ nope[1:] }}
{{ nope() }}
{{ nope + 1 }}
{{ 'a' + nope }}
{{ nope < 1 }}
{{ -nope }}
{{ nope | abs }}
{{ nope | int }}
{{ d.x.y }}
{{ none + 1 }}
{{ 'a' + 1 }}
{{ 1 + 'a' }}
{{ [1] + (1,) }}
{{ 'a' - 'b' }}
{{ 'a' * 'b' }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ 1 / 0 }}
{{ 1 % 0 }}
{{ 1 // 0 }}
{{ 1 in 'a' }}
{{ 1 in 5 }}
{{ {[1]: 2} }}
{{ [1] in d }}
{{ d[1:] }}
{{ nothing[1:] }}
{{ n[1:] }}
{{ list['a':] }}
{{ list[::0] }}
{{ 5 | length }}
{{ none | length }}
{{ rows | map('upper') | length }}
{{ 5 | list }}
{{ none | join }}
{{ s | sort(attribute='x', zzz=1) }}
{{ [1, 'a'] | sort }}
{{ rows | map('nope') | list }}
{{ rows | selectattr('k', 'nope') | list }}
{{ s | nope }}
{{ s is nope }}
{{ s.nope() }}
{{ list.append(1) }}
{{ d.pop('b') }}
{{ d.update({}) }}
{{ s.__class__.x }}
{{ s.split('') }}
{{ s.replace('a') }}
{{ s.strip(1) }}
{{ s.index('q') }}
{{ ''.join([1]) }}
{{ '{}'.format() }}
{{ '{a}'.format(b=1) }}
{{ '{} {0}'.format(1, 2) }}
{{ '{'.format() }}
{{ '%d' % 'a' }}
{{ '%s %s' % (1,) }}
{{ '%s' % (1, 2) }}
{{ range(100001) | list }}
{{ range() }}
{{ range(1, 2, 0) }}
{{ range('a') }}
{{ range | tojson }}
{{ nope | tojson }}
{{ rows | map(attribute='k') | tojson }}
{{ {(1, 2): 3} | tojson }}
{{ d.keys() | tojson }}
{{ raise_exception('no') }}
{{ raise_exception() }}
{{ namespace(_a=1) }}
{{ namespace(1) }}
{{ dict(1) }}
{{ strftime_now() }}
{{ strftime_now(1) }}
{{ '2.5' | round }}
{{ none | round }}
{{ 5 | first }}
{{ list | items | list }}
{{ list | dictsort }}
{{ d | dictsort(by='x') }}
{{ 1e999 | int }}
{{ 5 | indent }}
{{ [] | sum(1, 2, 3) }}
{{ loop(1) }}
{% for a, b in [1] %}{% endfor %}
{% for a, b in [[1, 2, 3]] %}{% endfor %}
{% for a in 5 %}{% endfor %}
{% for a in none %}{% endfor %}
{% for a in [1] %}{{ loop([2]) }}{% endfor %}
{% for a in [1] %}{{ loop.cycle() }}{% endfor %}
{% set n.x = 1 %}
{% set nope.x = 1 %}
{% set ns = namespace() %}{% set ns._x = 1 %}
{% set a, b = [1] %}
{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{% endmacro %}{{ m(b=1) }}
{% macro m(a) %}{% endmacro %}{{ m(1, a=1) }}
{% macro m() %}{% endmacro %}{% call m() %}{% endcall %}
{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}
{% macro m(a=1, b) %}{% endmacro %}
{{ n(*5) }}
{{ dict(**5) }}
{% break %}
{% for i in [1] %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}
{% for i in [1] %}{% generation %}{% continue %}{% endgeneration %}{% endfor %}
{% if yes %}
{% for i in list %}
{% endif %}
{% if yes %}{% endfor %}
{% for i in list %}{% endif %}
{% else %}
{% nope %}
{% do list %}
{% if %}{% endif %}
{% for in list %}{% endfor %}
{% for i list %}{% endfor %}
{% set = 1 %}
{% set 1 = 1 %}
{% set true = 1 %}
{% set a = %}
{% set a %}x
{% macro %}{% endmacro %}
{% macro m(%}{% endmacro %}
{% call 5 %}{% endcall %}
{% filter %}{% endfilter %}
{% filter nope %}{% endfilter %}
{% filter length %}x{% endfilter %}
{% include 'x' %}
{% extends 'x' %}
{% import 'x' as y %}
{% from 'x' import y %}
{{ }}
{{ 1 + }}
{{ (1 }}
{{ 1) }}
{{ [1 }}
{{ {1} }}
{{ {'a' 1} }}
{{ 'a }}
{{ 1
{{ a. }}
{{ a.'b' }}
{{ a[] }}
{{ f(a=1, 2) }}
{{ f(**{}, 1) }}
{{ f(*[], *[]) }}
{{ x is }}
{{ x is number is number }}
{{ x | }}
{{ x if }}
{{ 1 2 }}
{{ not }}
{{ @ }}
{{ a ! b }}
{{ $ }}
{{ '\\x4' }}
{{ '\\u12' }}
{{ 01 }}
{% raw %} x
{# open
{% if yes
{%
{{
{% for i in list if %}{% endfor %}
{% with a %}{% endwith %}
{% with a = 1 %}
{% endif %}
{% generation %}
{% for i in list recursive if i %}{% endfor %}
{{ x is not }}
{{ "a" "b }}
{{ f(a for a in b) }}
{{ lambda: 1 }}
{{ a = 1 }}
{{ a := 1 }}
{{ a; b }}
""".strip("\n").split("\n")


def main():
    os.environ["TZ"] = "UTC"
    time.tzset()
    chat_template_utils.datetime = Clock
    templates = {f"expression {i:02}": "".join(f"{{{{ {part} }}}}\n" for part in [line]) for i, line in enumerate(EXPRESSIONS)}
    templates |= STATEMENTS | {f"wrong {i:03}": line for i, line in enumerate(WRONG)}
    cases = []
    for name, source in templates.items():
        if name in ("chatml", "bos", "strict"):
            for conversation in ("one", "system", "turns", "unicode", "blanks", "empty", "null", "reasoning", "call", "assistant-first"):
                for setting in ({}, {"add_generation_prompt": True}, {"continue_final_message": True},
                                {"tools": [], "documents": [{"title": "T", "text": "t"}], "variables": {"enable_thinking": False}}):
                    cases.append({"template": name, **render(source, CONVERSATIONS[conversation], setting)})
            continue
        case = render(source, [USER], {"variables": VARIABLES})
        del case["variables"]
        cases.append({"template": name, **case})
        if ("error" in case) != name.startswith("wrong"):
            print(name, source, case)
    data = {"variables": VARIABLES, **collection(templates, cases)}
    text = json.dumps(data, ensure_ascii=False, indent=0)
    pathlib.Path(__file__).with_name("chat_templates.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(templates)} templates, {len(cases)} cases")


if __name__ == "__main__":
    main()
