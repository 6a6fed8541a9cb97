"""The site's pages that do not stand in docs/: README.md and its like, and a page of reference for each topic."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
# Files of the repository that are pages of the site, by their path from docs/.
PAGES = {
    "../README.md": "index.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changes.md",
    "../bench/README.md": "benches.md",
}
# Title of a page of reference to the modules, in pytorch_ext/__init__.pyi, whose public names stand on it.
TOPICS = {
    "A model on a mesh": [
        "parallelization",
        "pretrained",
        "mesh",
        "tools.explanation",
        "tools.verification",
        "tools.compare.compare_command",
        "tools.compare.recorder",
        "tools.tracing.trace_recorder",
        "tools.tuning",
        "replicas",
        "tools.diagnosis",
        "build",
    ],
    "Layers": ["nn", "ops", "ops.topk_gating", "ops.router_losses"],
    "Collectives": ["ops.collectives", "comm.registry", "comm.symmetric_tensor", "_C"],
    "Sequences": ["ops.context_attention", "ops.sequence_layout", "ops.attention_chunk"],
    "Data parallelism": ["data_parallel", "clip_grad"],
    "Pipelines": ["pipeline"],
    "Checkpoints": ["checkpoint"],
    "Shards": ["sharding.shard", "sharding.sizes", "sharding.dtensors"],
    "Optimizers": ["optim"],
    "The planner": ["tools.planner"],
}
_WHERE = (
    "Every example runs in each of two processes, with the same random numbers, after `import copy`, "
    "`import torch, weft`, `import torch.distributed as dist`, `from torch import nn` and "
    '`dist.init_process_group("weft")`. `path` is a new folder.'
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_PUBLIC = re.compile(r"^from weft\.(\S+) import (\w+) as", re.MULTILINE)


def on_config(config):
    reference = next(entry for entry in config.nav if "Reference" in entry)
    reference["Reference"] = [{title: _address(title)} for title in TOPICS]
    return config


def on_files(files, config):
    for source, address in PAGES.items():
        text = (ROOT / "docs" / source).read_text()
        files.append(File.generated(config, address, content=_moved(text, posixpath.dirname(source))))
    for title, names in _reference().items():
        text = "\n\n".join([f"# {title}", _WHERE, *(f"::: weft.{module}.{name}" for module, name in names)])
        files.append(File.generated(config, _address(title), content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    return markdown if page.file.src_uri in PAGES.values() else _moved(markdown, "")


def _reference() -> dict[str, list[tuple[str, str]]]:
    """Return for each topic the public names with their modules."""
    topic_of = {module: title for title, modules in TOPICS.items() for module in modules}
    topics: dict[str, list[tuple[str, str]]] = {title: [] for title in TOPICS}
    for module, name in _PUBLIC.findall((ROOT / "pytorch_ext" / "__init__.pyi").read_text()):
        topics[topic_of[module]].append((module, name))
    return topics


def _address(title: str) -> str:
    return f"reference/{title.lower().replace(' ', '_')}.md"


def _moved(text: str, folder: str) -> str:
    """Return a page's text with its links as they are on the site. A file that is not on the site is not linked."""

    def link(match: re.Match) -> str:
        image, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        place = posixpath.normpath(posixpath.join(folder, path))
        place = place.removeprefix("../docs/")
        place = PAGES.get(place, place)
        if place.startswith("../"):
            return words
        return f"{image}[{words}]({place}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, text)
