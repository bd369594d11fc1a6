"""Parse `METHOD:key=value,...` or vLLM's `speculative_config` into a SpeculationPlan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ..errors import UserError
from .combined import Options as CombinedOptions
from .interface import MethodOptions, TreeOptions
from .options import Setting, fill, hint, whole
from .registry import find, members
from .verifier import Mode
from .vllm_config import BY_REQUESTS, CALLED, translate

BRANCHING = {field.name for field in fields(TreeOptions)} - {field.name for field in fields(MethodOptions)}
Widths = tuple[tuple[int, int, int], ...]
DEPRECATED = {"taps": "aux_layers", "levels": "max_depth"}  # deprecated alias: its field


@dataclass(frozen=True)
class Common:
    """Options that every method has, beside its own Options."""

    verify: Mode = "exact"  # how drafts are verified
    draft: Literal["greedy", "probabilistic"] | None = None  # argmax or sampled; default: sampled with verify=exact
    replacement: bool = False  # sample siblings of a tree independently; for verify=rejection
    adaptive: bool | None = None  # shorten drafts that do not pay; default: yes, but with verify=synthetic no
    max_context: int | None = None  # longer texts are not drafted for; default: what the drafter was made for
    eager: bool = False  # run the drafter without CUDA graphs
    rates: tuple[float, ...] = ()  # for synthetic: share of steps that accept the token at each depth
    length: float | None = None  # for synthetic: mean tokens per step, including the target's own


@dataclass(frozen=True)
class SpeculationPlan:
    """The resolved speculation settings of an engine."""

    method: str = ""  # empty: plain decoding
    options: MethodOptions | None = None  # of the method itself
    verification: Mode = "exact"
    sampled: bool = False  # drafts are sampled at the request's temperature; else they are argmax tokens
    probabilistic: bool = False  # the user passed `draft=probabilistic`
    replacement: bool = False  # siblings of a sampled tree are sampled independently
    rates: tuple[float, ...] = ()  # synthetic: acceptance rate by depth, given that the tokens before it are accepted
    adaptive: bool = True  # shorten drafts that do not pay
    max_context: int | None = None  # longer texts are not drafted for
    eager: bool = False  # the drafter runs without CUDA graphs
    widths: Widths = ()  # (first, last, width) by number of requests in a step; without gaps, from 1 on

    @property
    def shapes_text(self) -> bool:
        """Return whether a seed gives another text with other drafts; its distribution is the target's in any case."""
        return self.verification in ("rejection", "block")

    def width(self, requests: int) -> int:
        """Return how many tokens may be drafted per request in a step of `requests` requests."""
        if self.options is None:
            return 0
        for _, last, width in self.widths:
            if requests <= last:
                return width
        return self.widths[-1][2] if self.widths else self.options.width


def parse(
    speculate: str, speculative_config: Mapping[str, Any] | None = None, always_draft: bool = False
) -> SpeculationPlan:
    """Parse the user's settings; only one of the first two arguments may name a method.

    always_draft: the same as `adaptive=no`, for any method and for those that requests name.
    """
    result = parse_method(speculate, speculative_config)
    if not always_draft:
        return result
    if result.adaptive and speculative_config is None and "adaptive" in read(speculate)[1]:
        raise UserError("`always_draft` contradicts `adaptive` of `speculate`: leave out one of them")
    return replace(result, adaptive=False)


def parse_method(speculate: str, speculative_config: Mapping[str, Any] | None) -> SpeculationPlan:
    if speculative_config is None:
        method, settings = read(speculate)
        return plan(method, settings) if method else SpeculationPlan()
    if speculate != "none":
        raise UserError("`speculate` and `speculative_config` are both given and set the same: pass one of them")
    if not isinstance(speculative_config, Mapping):
        raise UserError(f"`speculative_config` is `{speculative_config}`: expected keys and values")
    method, settings = translate(speculative_config)
    by_requests = speculative_config.get(BY_REQUESTS)
    result = plan(method, settings)
    return result if by_requests is None else replace(result, widths=schedule(by_requests, result.width(1)))


def read(speculate: str) -> tuple[str, dict[str, Setting]]:
    """Split `none`, `METHOD` or `METHOD:key=value,key=value` into method and settings; `none` gives an empty method."""
    if not isinstance(speculate, str) or not speculate.strip():
        raise UserError(f"`speculate` is `{speculate}`: pass a method, or `none` for plain decoding")
    method, _, rest = speculate.strip().partition(":")
    if method == "none":
        if rest:
            raise UserError(f"`none` is plain decoding and takes no options: leave out `{rest}`, or name a method")
        return "", {}
    settings: dict[str, Setting] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UserError(f"`{part}` of `speculate` sets nothing: write METHOD:key=value,key=value")
        if key in settings:
            raise UserError(f"`{key}` is given twice in `speculate`: keep one of them")
        settings[key] = Setting(key, value)
    return method, settings


def with_settings(drafter: str, **settings: str) -> str:
    """Return the specification with those `settings` added that it does not set itself."""
    _, given = read(drafter)
    added = [f"{key}={value}" for key, value in settings.items() if key not in given]
    return drafter if not added else f"{drafter}{',' if given else ':'}{','.join(added)}"


def without_setting(drafter: str, key: str) -> str:
    """Return the specification without the setting `key`."""
    method, given = read(drafter)
    rest = [f"{name}={setting.value}" for name, setting in given.items() if name != key]
    return f"{method}:{','.join(rest)}" if rest else method


def short_spec(drafter: str) -> str:
    """Return the specification with model paths cut to their last component, for tables."""
    method, colon, settings = drafter.partition(":")
    parts = [part.partition("=") for part in settings.split(",")]
    cut = [(key, equals, value.rpartition("/")[2] if key.endswith("model") else value) for key, equals, value in parts]
    return f"{method}{colon}{','.join(''.join(part) for part in cut)}"


def plan(method: str, settings: Mapping[str, Setting]) -> SpeculationPlan:
    """Build the plan of a method from its settings, and refuse combinations that cannot work."""
    given = dict(settings)
    shared = names(Common)
    common = fill(Common, {key: setting for key, setting in given.items() if key in shared})
    if common.rates and "width" not in given:
        given["width"] = Setting("width", len(common.rates))
    own = {key: setting for key, setting in given.items() if key not in shared}
    options = read_options(method, own)
    rates = synthetic(common, options.width, {key: setting.name for key, setting in given.items()})
    if common.replacement and (common.verify != "rejection" or common.draft != "probabilistic"):
        raise UserError(
            "`replacement` applies only to sampled trees that are verified by rejection: "
            "add `verify=rejection` and `draft=probabilistic`, or leave it out"
        )
    if common.max_context is not None and common.max_context < 1:
        raise UserError(f"`{given['max_context'].name}` is {common.max_context}: it must be at least 1")
    return SpeculationPlan(
        method=method,
        options=options,
        verification=common.verify,
        # Tokens sampled with the target's noise are accepted more often; at temperature 0 they are the argmax.
        sampled=common.draft == "probabilistic" or (common.draft is None and common.verify == "exact"),
        probabilistic=common.draft == "probabilistic",
        replacement=common.replacement,
        rates=rates,
        max_context=common.max_context,
        eager=common.eager,
        adaptive=common.verify != "synthetic" if common.adaptive is None else common.adaptive,
    )


def read_options(method: str, given: Mapping[str, Setting]) -> MethodOptions:
    """Build the options of a method, or of `a+b`; options that are not given have their defaults."""
    return combined_options(method, given) if "+" in method else method_options(method, given)


def method_options(method: str, given: Mapping[str, Setting]) -> MethodOptions:
    """Build the options of one method."""
    kind: type[MethodOptions] = find(method).Options
    own = names(kind)
    settings: dict[str, Setting] = {}
    for key, setting in given.items():
        name = current_name(key, own)
        if name in settings:
            raise UserError(f"`{key}` and `{settings[name].name}` set the same option: keep one of them")
        settings[name] = setting
    check_names(method, settings, own, names(Common))
    try:
        options = fill(kind, settings)
    except UserError as error:
        raise UserError(as_spelled(str(error), settings)) from None
    check_width(options, settings)
    return options


def as_spelled(message: str, given: Mapping[str, Setting]) -> str:
    """Return a message with the options under the names that the user gave them: vLLM's, or deprecated aliases."""
    for field, setting in given.items():
        message = message.replace(f"`{field}`", f"`{setting.name}`")
    return message


def current_name(key: str, own: Sequence[str]) -> str:
    """Return the field that an option key sets; a method's own field of a deprecated name comes first."""
    current = DEPRECATED.get(key, key)
    return current if key not in own and (current in own or current in BRANCHING) else key


def check_width(options: MethodOptions, given: Mapping[str, Setting]) -> None:
    """Refuse a given width below 1."""
    if options.width < 1 and "width" in given:
        raise UserError(
            f"`{given['width'].name}` is {options.width}: it must be at least 1, and `none` as method is plain decoding"
        )


def combined_options(method: str, given: Mapping[str, Setting]) -> CombinedOptions:
    """Build the options of `a+b`: `a.key` sets one method, `key` all that have it, `width` the merged tree."""
    methods = members(method)
    if len(set(methods)) < len(methods) or not all(methods) or "none" in methods:
        raise UserError(f"`{method}` must name different methods: write them as in `suffix+eagle3`")
    known = {member: names(find(member).Options) for member in methods}
    settings_of: dict[str, dict[str, Setting]] = {member: {} for member in methods}
    for key, setting in given.items():
        owner = next((member for member in methods if key.startswith(f"{member}.")), None)
        receivers = (
            [owner]
            if owner
            else [name for name in methods if key != "width" and current_name(key, known[name]) in known[name]]
        )
        if not receivers and key != "width":
            raise UserError(f"none of `{method}` has an option `{key}`: leave it out, or write `{methods[0]}.option`")
        for member in receivers:
            settings_of[member][key.removeprefix(f"{owner}.")] = setting
    options = tuple((member, method_options(member, settings_of[member])) for member in methods)
    merged = fill(CombinedOptions, {key: setting for key, setting in given.items() if key == "width"})
    check_width(merged, given)
    return replace(merged, members=options)


def names(kind: type) -> list[str]:
    """Return the field names of a dataclass."""
    return [field.name for field in fields(kind)]


def check_names(method: str, given: Mapping[str, Setting], own: Sequence[str], shared: Sequence[str]) -> None:
    """Refuse keys that a method does not have, and methods that redefine a common option."""
    for key in own:
        if key in shared:
            raise UserError(f"the method `{method}` defines the option `{key}`, which every method has: rename it")
    for key, setting in given.items():
        if key in own or key in shared:
            continue
        if key in BRANCHING:
            raise UserError(f"the method `{method}` drafts chains, no trees: leave out `{setting.name}`")
        if setting.name != key:
            raise UserError(f"`{setting.name}` is not an option of the method `{method}`: leave it out")
        near = hint(key, [*own, *shared], CALLED)
        raise UserError(
            f"the method `{method}` has no option `{key}`{near}: "
            f"expected {', '.join(own)}, or one of every method: {', '.join(shared)}"
        )


def synthetic(common: Common, width: int, spelled: Mapping[str, str]) -> tuple[float, ...]:
    """Return the acceptance rate by depth, given that the tokens before are accepted, from `rates` or `length`."""
    rates, length = common.rates, common.length
    keys = [f"`{spelled[key]}`" for key in ("rates", "length") if key in spelled]
    if common.verify != "synthetic":
        if keys:
            raise UserError(f"{keys[0]} is for synthetic verification alone: add `verify=synthetic`, or leave it out")
        return ()
    if len(keys) != 1:
        raise UserError("synthetic verification takes either `rates` or `length`: pass one of them")
    if length is not None:
        if width < 1:
            raise UserError(f"{keys[0]} is {length}, but the number of draft tokens is unknown: pass `width` as well")
        if not 1 <= length <= width + 1:
            raise UserError(f"{keys[0]} is {length}: with a width of {width} it must lie between 1 and {width + 1}")
        # Every step accepts the whole part of the mean: no other distribution with this mean varies less.
        full = int(length - 1)
        return (*[1.0] * full, length - 1 - full, *[0.0] * width)[:width]
    if len(rates) != width:
        raise UserError(f"{keys[0]} has {len(rates)} values and the width is {width}: give one for each token")
    before = (1.0, *rates)
    if not all(0 <= rate <= above <= 1 for rate, above in zip(rates, before, strict=False)):
        raise UserError(f"{keys[0]} is {list(rates)}: shares of steps lie between 0 and 1 and never rise with depth")
    return tuple(rate / above if above else 0.0 for rate, above in zip(rates, before, strict=False))


def schedule(value: Any, width: int) -> Widths:
    """Parse [[first, last, tokens], ...] by number of requests; a gap takes the width of the range before it."""
    try:
        ranges = sorted((whole(first), whole(last), whole(tokens)) for first, last, tokens in value)
    except (TypeError, ValueError):
        raise UserError(f"`{BY_REQUESTS}` is `{value}`: expected [[from, to, tokens], ...]") from None
    if not ranges or ranges[0][0] != 1:
        raise UserError(f"`{BY_REQUESTS}` must start at 1 request: its first range is [1, to, tokens]")
    filled: list[tuple[int, int, int]] = []
    for index, (first, last, tokens) in enumerate(ranges):
        if last < first or tokens < 0:
            raise UserError(f"`{BY_REQUESTS}` holds [{first}, {last}, {tokens}]: from <= to, and 0 tokens or more")
        following = ranges[index + 1][0] if index + 1 < len(ranges) else last + 1
        if following <= last:
            raise UserError(f"`{BY_REQUESTS}` has two ranges for {following} requests: make them disjoint")
        filled.append((first, following - 1, min(tokens, width or tokens)))
    return tuple(filled)
