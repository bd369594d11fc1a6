"""The methods that are open: the engine's own since the start, and others that a request asks for and that need no more
than its text.
"""

from __future__ import annotations

from dataclasses import fields

from ..errors import UserError
from ..types import SamplingParams
from .adaptive import AdaptiveController
from .config import SpeculationPlan, one, several
from .interface import MethodOptions, Proposer, Target
from .registry import available, build, drafts_from, find, members


class DrafterPool:
    def __init__(self, plan: SpeculationPlan, target: Target, controller: AdaptiveController) -> None:
        """control: is told who may rest."""
        self.plan, self.target, self.controller = plan, target, controller
        self.methods: dict[str, Proposer] = {}
        names = [*available(), plan.method] if plan.method else available()  # the engine's own comes before the others
        self._brought = {parameter: name for name in names if (parameter := drafts_from(name))}
        if plan.method:
            assert plan.options is not None
            self._open(plan.method, plan.options)

    def asked(self, params: SamplingParams) -> str:
        """The method that a request names, the one that what it brings is for, or the engine's; empty: none."""
        if params.speculate is False or params.speculate == "none":
            return ""
        brought = next((one for one in self._brought if getattr(params, one) is not None), None)
        if not isinstance(params.speculate, str):
            return self.plan.method if brought is None else self._brought[brought]
        if brought is not None and params.speculate in available() and drafts_from(params.speculate) != brought:
            raise UserError(f"the method `{params.speculate}` does not read `{brought}`: leave out one of them")
        return params.speculate

    def find(self, name: str) -> Proposer:
        """A method that is open, or can be opened for a request: then it needs no model."""
        if name not in self.methods:
            self._refuse_unloaded(name)
            self._open(name, several(name, {}) if "+" in name else one(name, {}))
            if self.methods[name].needs.has_kv:
                del self.methods[name]
                raise UserError(f"`{name}` keeps states of its own: start the engine with `speculate={name}`")
        return self.methods[name]

    def _refuse_unloaded(self, name: str) -> None:
        loaded = ", ".join(f"`{known}`" for known in self.methods) or "none"
        if "." in name:  # whoever sends requests does not choose what code is imported
            raise UserError(
                f"`speculate` names `{name}`, which was not loaded (loaded: {loaded}): "
                f"start the engine with `speculate={name}`"
            )
        for member in members(name):
            if member not in available():
                known = ", ".join(available())
                raise UserError(f"`speculate` is wrong: no method called `{member}`, expected one of {known}")
            if any(field.name == "model" for field in fields(find(member).Options)):
                raise UserError(
                    f"`speculate` names `{member}`, which needs a model and was not loaded (loaded: {loaded}): "
                    f"start the engine with `speculate={name}:model=...`"
                )

    def _open(self, name: str, options: MethodOptions) -> None:
        proposer = build(name, options, self.target)
        needs, layers, block = proposer.needs, self.target.model.config.layers, self.plan.verification == "block"
        for tap in needs.aux_layers:
            if not 0 <= tap <= layers:
                raise UserError(
                    f"`{name}` reads the state entering layer {tap}, but the model has {layers} layers: "
                    "pass other `aux_layers`, or a head that was made for this model"
                )
        if needs.trees and block:
            raise UserError(f"`{name}` drafts trees, and `verify=block` checks chains alone: use `verify=rejection`")
        # Beside a method that draws, one that finds its drafts is no contradiction.
        if not needs.has_probs and (block or (self.plan.drawn and name == self.plan.method)):
            asked = "verify=block" if block else "draft=probabilistic"
            raise UserError(
                f"`{name}` finds its drafts and has no distribution that they are drawn from: leave out `{asked}`"
            )
        self.methods[name] = proposer
        if self.target.can_suspend and needs.suspendable and needs.costs_time:
            self.controller.suspendable.add(name)
