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
    versions = ((name, value or "-") for name, value in found["versions"].items())
    say.table("Versions", ("", ""), versions, words=2)
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
        words=2,
    )
    if found["models"]:
        say.text("\n")
        say.table("Models", ("", ""), ((model["name"], model["path"]) for model in found["models"]), words=2)
    say.text("\nFindings\n")
    for finding in found["findings"]:
        say.text(f"- {finding}\n")
