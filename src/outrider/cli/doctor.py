"""`outrider doctor`: what this machine is, and what is fast on it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import console, options

Head = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Say what this draft head is instead, by folder or hub name")
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="With --head: whether the head fits this model")]


def doctor(head: Head = None, model: Model = None, json: options.Json = False) -> None:
    """Versions, processor, GPU, memory, models: what is fast here and why. With --head: what a head is."""
    from ..diagnostics.doctor import examine, examine_head

    if head is not None:
        told = examine_head(head, model)
        console.json_line(told) if json else tell_head(told)
        return
    if model is not None:
        raise typer.BadParameter("says whether a head fits: pass the head as `--head`", param_hint="--model")
    found = examine()
    if json:
        console.json_line(found)
        return
    tell(found)


def tell(found: dict[str, Any]) -> None:
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


def tell_head(told: dict[str, Any]) -> None:
    console.table("Head", ("", ""), told["head"].items(), words=2)
    fits = f"It drafts for {told['model']}" if told["model"] else "To use it with the model that it was made for"
    console.text(f"\n{fits}:\n{told['use']}\n")
