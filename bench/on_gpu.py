"""`make gpu`: runs the tests marked gpu and measures what there is to measure, into a folder named after the device."""

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

import weft
from weft.bench.environment import environment
from weft.bench.rank_order_sum import measure


def main(out: str) -> int:
    if not torch.cuda.is_available():
        print(f"no CUDA device here: {weft.build_info()['gpu']}", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name()
    folder = Path(out) / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"], capture_output=True, text=True
    )
    (folder / "pytest.txt").write_text(tests.stdout + tests.stderr)
    print(tests.stdout[-4000:])
    results = {
        "command": "make gpu",
        "device": device,
        "environment": environment(),
        "build": weft.build_info(),
        "tests_exit_code": tests.returncode,
        "rows": measure(),
    }
    (folder / "rank_order_sum.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results["rows"], indent=2))
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
