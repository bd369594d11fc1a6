"""Fetch the JavaScript libraries that the playground ships, and check them against their recorded hashes.

    python tools/vendor_page.py              write the files that vendor/manifest.json lists
    python tools/vendor_page.py --axe FILE   write axe-core, which only the browser tests use

Packages come from npm at the versions of the manifest. To update one, change its version, run this, look at the changes
of the package, and record the hashes that the error names. Needs npm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parent.parent / "src/outrider/server/page/vendor"
AXE: dict[str, Any] = {
    "package": "axe-core",
    "version": "4.14.0",
    "files": [
        {
            "from": "axe.min.js",
            "sha256": "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878",
        }
    ],
}


def read_package(entry: dict[str, Any]) -> dict[str, bytes]:
    """Return the listed files of a package, by their path in it; exit if a hash differs from the recorded one."""
    name = f"{entry['package']}@{entry['version']}"
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as packed:
            contents = {}
            for file in entry["files"]:
                member = packed.extractfile(f"package/{file['from']}")
                assert member is not None
                contents[file["from"]] = member.read()
    for file in entry["files"]:
        found = hashlib.sha256(contents[file["from"]]).hexdigest()
        if found != file["sha256"]:
            sys.exit(f"{name}: {file['from']} has the hash {found}, the recorded one is {file['sha256']}")
    return contents


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axe", type=Path, metavar="FILE", help="write axe-core to this file and nothing else")
    target = parser.parse_args().axe
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(read_package(AXE)["axe.min.js"])
        return 0
    for entry in json.loads((VENDOR / "manifest.json").read_text()):
        contents = read_package(entry)
        for file in entry["files"]:
            (VENDOR / file["to"]).write_bytes(contents[file["from"]])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
