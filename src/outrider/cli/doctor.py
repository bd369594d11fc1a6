"""`outrider doctor`: the command and its output."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import console, options

Head = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Describe this draft head (folder or hub name) instead of the machine"),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Describe this model (name, folder or GGUF file): whether it runs here, its memory, the heads that fit. "
        "With --head: check that the head fits it",
    ),
]


def doctor(head: Head = None, model: Model = None, json: options.Json = False) -> None:
    """Report versions, processor, GPU, memory, models, and what is fast here; or describe a model or a draft head."""
    from ..diagnostics.doctor import examine, examine_head

    if head is not None:
        described = examine_head(head, model)
        console.json_line(described) if json else show_head(described)
        return
    if model is not None:
        from ..diagnostics.model_check import examine_model

        facts = examine_model(model)
        console.json_line(facts) if json else show_model(facts)
        if facts["problem"] is not None:
            raise typer.Exit(1)
        return
    found = examine()
    if json:
        console.json_line(found)
        return
    show(found)


def show(found: dict[str, Any]) -> None:
    machine, gpu = found["machine"], found["gpu"]
    versions = ((name, value or "-") for name, value in found["versions"].items())
    console.table("Versions", ("", ""), versions, words=2)
    console.text("\n")
    console.table(
        "Machine",
        ("", ""),
        (
            ("processor", machine["processor"]),
            ("system", machine["system"]),
            ("cores", str(machine["cores"])),
            ("threads", str(machine["threads"])),
            ("instruction set", f"{machine['level']} of {', '.join(machine['available_levels'])}"),
            ("memory", console.size(machine["memory_bytes"])),
            ("memory bandwidth", f"{machine['bandwidth_gb_per_second']:.1f} GB/s"),
            ("backend", found["backend"]),
        ),
        words=2,
    )
    if gpu is not None:
        console.text("\n")
        console.table(
            "GPU",
            ("", ""),
            (
                ("name", gpu["name"]),
                ("compute capability", gpu["capability"]),
                ("multiprocessors", str(gpu["processors"])),
                ("memory", console.size(gpu["memory_bytes"])),
                ("driver", gpu["driver"] or "-"),
                ("CUDA of torch", gpu["cuda"] or "-"),
            ),
            words=2,
        )
    if found["models"]:
        console.text("\n")
        console.table("Models", ("", ""), ((model["name"], model["path"]) for model in found["models"]), words=2)
    console.text("\nFindings\n")
    for finding in found["findings"]:
        console.text(f"- {finding}\n")


def show_model(facts: dict[str, Any]) -> None:
    from ..diagnostics.model_check import title
    from .show import count, heads_line, memory

    rows = [("model", facts.get("title") or facts["name"])]
    if "architecture" in facts:
        layers = f", {facts['layers']} layers" if facts.get("layers") else ""
        rows.append(("architecture", f"{title(facts['architecture'])}{layers}"))
    stored = f", {facts['quantization']}" if facts.get("quantization") else ""
    rows.append(("format", facts["format"] + stored))
    if "parameters" in facts:
        parameters = facts["parameters"]
        rows.append(("parameters", parameters if isinstance(parameters, str) else count(parameters)))
    if "context" in facts:
        rows.append(("context length", f"{facts['context']} tokens"))
    if "memory" in facts:
        rows.append(("memory", memory(facts)))
    machine = facts.get("machine")
    if machine is not None:
        fits = machine.get("tokens_that_fit")
        beside = "" if fits is None else f", room for {fits} tokens beside the weights" if fits else ", too little"
        if fits and fits < facts["context"]:
            beside += f" ({machine['tokens_that_fit_int8']} with `--kv-dtype int8`)"
        rows.append(("this machine", f"{machine['backend']}, {console.size(machine['free_bytes'])} free{beside}"))
    if "heads" in facts:
        rows.append(("heads that fit", heads_line(facts)))
    problem = facts["problem"]
    runs = "yes" if "path" in facts else f"yes, after `outrider pull {facts['name']}`"
    rows.append(("runs", runs if problem is None else f"no: {problem}"))
    console.table("Model", ("", ""), rows, words=2)


def show_head(described: dict[str, Any]) -> None:
    console.table("Head", ("", ""), described["head"].items(), words=2)
    usage = (
        f"It drafts for {described['model']}" if described["model"] else "To use it with the model it was trained for"
    )
    console.text(f"\n{usage}:\n{described['use']}\n")
