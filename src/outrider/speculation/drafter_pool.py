"""The drafters that an engine has loaded, and the choice of one for each request."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ..catalog import shipped
from ..errors import UserError
from ..types import SamplingParams
from .adaptive import AdaptiveController
from .config import SpeculationPlan, read_options
from .interface import MethodOptions, Proposer, Target
from .options import hint
from .registry import available, build, drafts_from, has_model, members


class DrafterPool:
    """The drafters that are loaded: the engine's own, and those that requests named and that need no model."""

    def __init__(self, plan: SpeculationPlan, target: Target, controller: AdaptiveController) -> None:
        """controller: gets the names of the drafters that can be suspended."""
        self.plan, self.target, self.controller = plan, target, controller
        self.methods: dict[str, Proposer] = {}
        names = [*available(), plan.method] if plan.method else available()  # the engine's own overrides the others
        self._by_parameter = {parameter: name for name in names if (parameter := drafts_from(name))}
        if plan.method:
            assert plan.options is not None
            self._load(plan.method, plan.options)

    def choose(self, params: SamplingParams) -> str:
        """Return the method that a request names, or that reads one of its parameters, or the engine's; empty: none."""
        if params.speculate is False or params.speculate == "none":
            return ""
        parameter = next((name for name in self._by_parameter if getattr(params, name) is not None), None)
        if not isinstance(params.speculate, str):
            return self.plan.method if parameter is None else self._by_parameter[parameter]
        if parameter is not None and params.speculate in available() and drafts_from(params.speculate) != parameter:
            raise UserError(f"the method `{params.speculate}` does not read `{parameter}`: leave out one of them")
        return params.speculate

    def get(self, name: str) -> Proposer:
        """Return a loaded drafter, or load it for a request if it needs no model."""
        if name not in self.methods:
            self._check_loadable(name)
            self._load(name, read_options(name, {}))
            if self.methods[name].needs.has_kv:
                del self.methods[name]
                raise UserError(f"`{name}` has KV of its own: start the engine with `speculate={name}`")
        return self.methods[name]

    def _check_loadable(self, name: str) -> None:
        """Refuse methods that are not loaded for a request."""
        loaded = ", ".join(f"`{known}`" for known in self.methods) or "none"
        if "." in name:  # a request may not choose which code is imported
            raise UserError(
                f"`speculate` names `{name}`, which was not loaded (loaded: {loaded}): "
                f"start the engine with `speculate={name}`"
            )
        for member in members(name):
            if member not in available():
                near, known = hint(member.lower(), available(), {}), ", ".join(available())
                raise UserError(f"`speculate` is wrong: no method called `{member}`{near}, expected one of {known}")
            if has_model(member):
                need, model = (
                    ("has a head that ships", "") if member in self._shipped else ("needs a model", ":model=...")
                )
                raise UserError(
                    f"`speculate` names `{member}`, which {need} and was not loaded (loaded: {loaded}): "
                    f"start the engine with `speculate={name}{model}`"
                )

    @cached_property
    def _shipped(self) -> frozenset[str]:
        """Return the methods whose head for this model ships with the package."""
        return frozenset(name for name in available() if shipped.find(self.target.source, name) is not None)

    def _load(self, name: str, options: MethodOptions) -> None:
        """Build a drafter, and refuse it if it does not fit the model or the verification mode."""
        most = self.plan.max_context or self.target.max_context
        proposer = build(name, options, replace(self.target, max_context=min(self.target.max_context, most)))
        needs, layers, block = proposer.needs, self.target.model.config.layers, self.plan.verification == "block"
        for layer in needs.aux_layers:
            if not 0 <= layer <= layers:
                raise UserError(
                    f"`{name}` reads the state entering layer {layer}, but the model has {layers} layers: "
                    "pass other `aux_layers`, or a head that was made for this model"
                )
        if needs.trees and block:
            raise UserError(f"`{name}` drafts trees, but `verify=block` verifies only chains: use `verify=rejection`")
        # `draft=probabilistic` applies to the engine's method; a request may name another one beside it.
        if not needs.has_probs and (block or (self.plan.probabilistic and name == self.plan.method)):
            option = "verify=block" if block else "draft=probabilistic"
            raise UserError(
                f"`{name}` copies its drafts and has no distribution to sample them from: leave out `{option}`"
            )
        self.methods[name] = proposer
        if self.target.can_suspend and needs.suspendable and needs.costs_time:
            self.controller.suspendable.add(name)
