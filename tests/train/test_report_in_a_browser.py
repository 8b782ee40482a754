"""The page of a run, as a browser without a network shows it."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from train.errors import Exit

from .conftest import ROOT

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
# The host of a request that a local page asks for; the browser has requests of its own.
FOR_A_FILE = re.compile(r'"network_isolation_key":"file:.*"url":"(?:https?|wss?)://([^/"]+)')

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"),
]


@pytest.fixture
def browse(tmp_path):
  """(page, more arguments) -> its elements after scripts ran, console messages, hosts asked for."""

  def browse(page, *words):
    log = tmp_path / "net.json"
    done = subprocess.run(
      [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *("--virtual-time-budget=5000", "--enable-logging=stderr", f"--log-net-log={log}"),
        *(f"--user-data-dir={tmp_path / 'browser'}", *words, page.as_uri()),
      ],
      capture_output=True,
      text=True,
      timeout=120,
      check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console, FOR_A_FILE.findall(log.read_text())

  return browse


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
  """That of a run which was interrupted and went on."""
  folder = tmp_path_factory.mktemp("reported") / "run"
  for words, steps in (((), 4), (("--allow-change",), 8)):
    code, output = runs.finish(folder, *words, total_steps=steps)
    assert code == Exit.DONE, output
  command = [sys.executable, "-m", "train", "report", f"--workdir={folder}"]
  subprocess.run(command, cwd=ROOT, check=True)
  return folder / "report" / "index.html"


def test_figures_are_there_without_errors_and_without_a_network(page, browse):
  elements, console, hosts = browse(page)
  for name in ("loss", "validation", "throughput", "expert_load", "recall", "kv_bytes", "flops"):
    assert re.search(rf'<figure id="{name}"><svg ', elements), name
  assert ">restart</text>" in elements
  shown = re.search(r"(\d+) of (\d+) shown", elements)
  assert shown and shown[1] == shown[2]  # the script of the search has run
  assert console == [] and hosts == []


def test_the_browser_would_tell(browse, tmp_path):
  """Of a page that loads a picture and has an error."""
  bad = tmp_path / "bad.html"
  bad.write_text('<img src="http://somewhere.invalid/x.png"><script>missing()</script>')
  _, console, hosts = browse(bad)
  assert any("missing is not defined" in line for line in console)
  assert "somewhere.invalid" in hosts


def test_a_script_in_a_name_does_not_run(page, browse):
  """Even where escaping failed: the policy of the page forbids it."""
  text = page.read_text()
  broken = page.with_name("broken.html")
  attack = "<script>document.title = 'attacked'</script><h1 onclick=x()>"
  broken.write_text(text.replace("<main>", f"<main>{attack}"))
  elements, console, _ = browse(broken)
  broken.unlink()
  assert "<title>attacked" not in elements and any("Content Security" in c for c in console)


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_window(page, browse, width, tmp_path):
  outside = tmp_path / "outside.html"
  outside.write_text(f"""<iframe id="page" width="{width}" height="900" src="{page.as_uri()}">
    </iframe><script>
      const frame = document.getElementById("page");
      frame.onload = () => {{
        const root = frame.contentDocument.documentElement;
        document.title = JSON.stringify([root.scrollWidth, root.clientWidth]);
      }};
    </script>""")
  elements, _, _ = browse(outside, "--allow-file-access-from-files")
  scroll, client = json.loads(re.search(r"<title>(.*?)</title>", elements)[1])
  assert 0 < scroll <= client
