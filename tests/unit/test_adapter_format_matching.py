"""Targets, ranks and alphas against PEFT's own functions, and patterns that could run away."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapter_format.matching import alpha_of, is_target, rank_of
from loraplex.adapter_format.options import LoraOptions
from loraplex.adapter_format.regexes import checked_pattern
from loraplex.base_model import LAYER_MODULES, module_path
from loraplex.status import AdapterRefused

NAMES = [module_path(layer, module) for layer in (0, 1, 11) for module in LAYER_MODULES]
NAMES += ["model.embed_tokens", "lm_head", "model.norm", "layers.3.self_attn.q_proj"]

#: written by trainers in the wild, or by people who try
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
SAFE = [
    UNSLOTH,
    r".*\.(q|k|v)_proj",
    r"^(?!.*vision).*\.layers\.\d+\.(mlp|self_attn)\.[a-z]+_proj$",
    r"model\.layers\.(1[0-9]|2[0-3])\.self_attn\.(q_proj|v_proj)",
    r"(.*\.)?layers\.[0-9]\..*",
    r"q_proj|.*mlp\.(up|down)_proj",
]
RUNAWAY = [
    r"(a+)+$", r"(.*)*x", r"(a|a)*b", r"(a|ab)*c", r"(?:a?){40}a{40}", r"(\w+\.?)+x", r"(x*y*)*z",
    r"a?" * 40 + "a" * 40, r".*" * 9 + "x", r"((.*a){8}){8}", r"(.+)\1+",
]  # fmt: skip

modules = st.sampled_from(
    [*LAYER_MODULES, "proj", "lm_head", "mlp.up_proj", "layers.1.mlp.up_proj", NAMES[0], "model"]
)
layer_patterns = st.sampled_from([(), ("layers",), ("h",), ("h", "layers"), ("model.layers",)])
keys = st.sampled_from(
    [
        "q_proj",
        "mlp.*",
        r"layers\.1\..*",
        "^model.layers.0.mlp.up_proj",
        "proj",
        NAMES[3],
        "v|q_proj",
    ]
)


def options(**fields) -> LoraOptions:
    base = {
        "r": 8, "lora_alpha": 16.0, "use_rslora": False, "target_modules": (),
        "exclude_modules": (), "layers_to_transform": None, "layers_pattern": (),
        "rank_pattern": (), "alpha_pattern": (),
    }  # fmt: skip
    return LoraOptions(**{**base, **fields})


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


def peft_targets(peft, given_options: LoraOptions) -> list[str]:
    from peft.tuners.tuners_utils import check_target_module_exists

    def plain(value):
        return value if isinstance(value, str) else list(value)

    layers = given_options.layers_to_transform
    config = SimpleNamespace(
        target_modules=plain(given_options.target_modules),
        exclude_modules=plain(given_options.exclude_modules),
        layers_to_transform=None if layers is None else list(layers),
        layers_pattern=list(given_options.layers_pattern),
        modules_to_save=None,
        target_parameters=None,
    )
    found = {name: check_target_module_exists(config, name) for name in NAMES}
    # an excluded module is a truthy marker of PEFT's own
    return [n for n, hit in found.items() if hit and type(hit).__name__ != "_ExcludedModule"]


@settings(deadline=None, max_examples=300)
@given(
    targets=st.one_of(st.sets(modules, min_size=1).map(sorted).map(tuple), st.sampled_from(SAFE)),
    exclude=st.one_of(st.just(()), st.sets(modules).map(sorted).map(tuple), st.sampled_from(SAFE)),
    layers=st.one_of(st.none(), st.sets(st.integers(0, 12), min_size=1).map(sorted).map(tuple)),
    patterns=layer_patterns,
)
def test_targets_are_those_of_peft(peft, targets, exclude, layers, patterns):
    chosen = options(
        target_modules=targets,
        exclude_modules=exclude,
        layers_to_transform=None if isinstance(targets, str) else layers,
        layers_pattern=patterns,
    )
    ours = [name for name in NAMES if is_target(chosen, name)]
    assert ours == peft_targets(peft, chosen)


@settings(deadline=None, max_examples=200)
@given(st.lists(keys, unique=True, max_size=4), st.sampled_from(NAMES))
def test_rank_and_alpha_are_those_of_peft(peft, patterns, name):
    from peft.utils.other import get_pattern_key

    ranks = {pattern: index + 1 for index, pattern in enumerate(patterns)}
    chosen = options(rank_pattern=tuple(ranks.items()), alpha_pattern=tuple(ranks.items()))
    expected = ranks.get(get_pattern_key(ranks.keys(), name))
    assert rank_of(chosen, name) == (8 if expected is None else expected)
    assert alpha_of(chosen, name) == (16.0 if expected is None else expected)


@pytest.mark.parametrize("pattern", SAFE)
def test_patterns_of_trainers_pass(pattern):
    assert checked_pattern("target_modules", pattern) == pattern


@pytest.mark.parametrize("pattern", RUNAWAY)
def test_patterns_that_could_run_away_are_refused(pattern):
    with pytest.raises(AdapterRefused, match=r"too many ways|characters"):
        checked_pattern("target_modules", pattern)


@pytest.mark.parametrize("pattern", ["(", "[", "a" * 8001, "(" * 5000 + ")" * 5000, "(?P<a"])
def test_patterns_that_are_none_are_refused(pattern):
    with pytest.raises(AdapterRefused) as raised:
        checked_pattern("target_modules", pattern)
    assert raised.value.reason == "CONFIG_INVALID"


@settings(deadline=None, max_examples=300)
@given(
    st.recursive(
        st.sampled_from(["a", "b", ".", r"\w", "[ab]", "ab", "a?", "a*"]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
            inner.map(lambda text: f"({text})*"),
            inner.map(lambda text: f"(?:{text})+?"),
            inner.map(lambda text: f"(?:{text}){{2,9}}"),
            inner.map(lambda text: f"({text})?"),
        ),
        max_leaves=12,
    )
)
def test_what_is_let_through_ends_soon_on_names_made_to_hurt(pattern):
    import re

    try:
        checked_pattern("target_modules", pattern)
    except AdapterRefused:
        return
    started = time.perf_counter()
    for name in ("a" * 45 + "!", "ab" * 22 + "!", "aab" * 15 + "!"):
        re.fullmatch(pattern, name)
        re.match(rf"(.*\.)?({pattern})$", name)
    assert time.perf_counter() - started < 5
