"""`outrider doctor`: what this machine is, and what is fast on it."""

from __future__ import annotations

from . import options, say


def doctor(json: options.Json = False) -> None:
    """Versions, instruction set, threads, memory, models: what is fast here and why."""
    from ..bench.doctor import examine

    found = examine()
    if json:
        say.json_line(found)
        return
    machine = found["machine"]
    say.table("Versions", ("package", "version"), ((name, value or "-") for name, value in found["versions"].items()))
    say.text("\n")
    say.table(
        "Machine",
        ("", ""),
        (
            ("processor", machine["processor"]),
            ("system", machine["system"]),
            ("cores", str(machine["cores"])),
            ("threads", str(machine["threads"])),
            ("instruction set", f"{machine['level']} of {', '.join(machine['available_levels'])}"),
            ("memory", say.size(machine["memory_bytes"])),
            ("memory bandwidth", f"{machine['bandwidth_gb_per_second']:.1f} GB/s"),
        ),
    )
    say.text("\n")
    for model in found["models"]:
        say.text(f"{model['name']}: {model['path']}\n")
    for finding in found["findings"]:
        say.text(f"- {finding}\n")
