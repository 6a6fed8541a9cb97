"""The site of the documentation: it builds without a warning, every public name stands on it, every page fits."""

import html
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft

pages = pytest.mark.slow("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "pytorch_ext")
ROOT = Path(__file__).parent.parent
LOOK = """<!doctype html><body><script>
const found = {}, pages = PAGES, width = WIDTH;
async function look(page) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const inside = frame.contentDocument;
  const broken = [...inside.images].filter(image => !image.naturalWidth).map(image => image.src);
  found[page] = {width: inside.documentElement.scrollWidth, images: inside.images.length, broken};
  frame.remove();
}
(async () => {
  for (const page of pages) await look(page);
  document.body.textContent = JSON.stringify(found);
  document.title = "done";
})();
</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pages
def test_every_public_name_has_its_docstring_on_the_site(site):
    text = "\n".join(path.read_text() for path in (site / "reference").glob("*.html"))
    for name in weft.__all__:
        if name == "__version__":
            continue
        place = f"{getattr(weft, name).__module__}.{name}"
        home = re.search(rf'<h2 id="(weft\.[\w.]+\.{name})"', text)
        assert home, f"{place} is on no page of reference"
        assert text.split(f'id="{home[1]}"', 1)[1].split("<h2", 1)[0].count("<p>"), f"{place} says nothing"


@pages
def test_the_site_can_be_searched(site):
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any("row layer" in page["text"] for page in index if page["location"].startswith("tensor_parallel"))
    assert any(page["title"].startswith("ParallelLinear") for page in index)


def test_pictures_are_those_that_the_script_draws():
    folder = ROOT / "docs" / "pictures"
    drawn = {picture.__name__: picture().svg() for picture in runpy.run_path(str(folder / "draw.py"))["PICTURES"]}
    assert {path.stem: path.read_text() for path in folder.glob("*.svg")} == drawn


@pages
@pytest.mark.parametrize("width", [1280, 400])
def test_pages_fit_and_their_pictures_load(site, width, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium here")
    pages = sorted(path.as_uri() for path in site.rglob("*.html") if path.name != "404.html")
    look = tmp_path / "look.html"
    look.write_text(LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--timeout=60000"]
    done = subprocess.run(
        [browser, *options, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--dump-dom",
         "--virtual-time-budget=60000", look.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = re.search(r"<body>(.*)</body>", done.stdout, re.S)
    assert said and "<title>done</title>" in done.stdout, done.stdout[:500] + done.stderr[-500:]
    found = json.loads(html.unescape(said[1]))
    assert sorted(found) == pages
    assert {page: at["broken"] for page, at in found.items() if at["broken"]} == {}
    assert {page: at["width"] for page, at in found.items() if at["width"] > width} == {}
    assert sum(at["images"] for at in found.values()) > 8
