"""A report draws what a run folder holds, and says in words what it does not."""

import hashlib
import html.parser
import json
import pathlib
import re

import pytest

from configs import nano
from configs.schema import Settings, Stage
from deepseek_jax.storage_path import storage_path
from train import report
from train.errors import UsageError
from train.evaluate_loss import EXACT, REPLAYED
from train.events import Events
from train.replay_report import FP4, GAP, KL, POOL, TOP1
from train.reporting import drawing
from train.reporting.curves import gradients, training
from train.reporting.run_data import read_run
from train.settings import resolved_json

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")

# Lines of a run of configs/nano.py: 16 steps, a validation every 4, started again after step 8.
RECORDED = pathlib.Path(__file__).with_name("report_metrics.jsonl")
LINES = RECORDED.read_text().splitlines(keepends=True)
FEW = ("step", "tokens", "loss", "router_imbalance_layer_0")  # a figure takes a fifth of a second
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' & $\\frac$ \u4e16 \ud800 \x00"
MAP = {"lengths": [64, 128, 256], "depths": [0.0, 1.0]}


def settings(**changes):
  c = nano.get_config()
  c.total_steps = 16
  c.update(changes)
  return Settings.from_dict(c.to_dict())


def make(folder, lines=LINES, *, chosen=None, starts=(0, 8)):
  """A run folder with lines of a run, its configuration if any, and the events of its starts."""
  folder.mkdir(parents=True)
  (folder / "metrics.jsonl").write_text("".join(lines))
  if chosen is not None:
    (folder / "config.json").write_text(resolved_json(chosen))
  (folder / "environment.json").write_text('{"versions": {"jax": "0.11.2"}}')
  (folder / "start.json").write_text('{"verb": "pretrain", "init": null}')
  for number, step in enumerate(starts):
    Events(folder, step).close()
    (written,) = folder.glob("events.out.tfevents.*")
    written.rename(folder / f"events.start.{number}")  # two within a second would have one name
  return folder


def some(*records):
  """Short lines, which are soon drawn."""
  return [json.dumps(record) + "\n" for record in records]


def short(**changes):
  """The recorded lines with a few of their metrics only."""
  kept = [{name: json.loads(line)[name] for name in FEW} for line in LINES]
  return some(*({**record, **changes} for record in kept))


def write(folder, *words):
  assert report.main([f"--workdir={folder}", *words]) == 0
  return (folder / "report" / "index.html").read_text()


def refusal(*words):
  with pytest.raises(UsageError) as caught:
    report.main([str(word) for word in words])
  return caught.value.problems


class Outline(html.parser.HTMLParser):
  """Elements of a page, and the texts between them."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.texts = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.texts.append(data)

  def figures(self):
    return [attributes["id"] for tag, attributes in self.elements if tag == "figure"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run folder with everything, its page, and what its files were before."""
  folder = make(tmp_path_factory.mktemp("whole") / "run", chosen=settings())
  accuracy = [[0.1, 0.2], [0.3, 0.4], [0.5, None]]
  load = {"layers": [0, 1], "experts": [0, 1, 2], "load": [[1.0, 0.5, 1.5]] * 2}
  records = [
    {"step": step, "results": {"needle": {**MAP, "accuracy": accuracy, "mean_accuracy": 0.3},
                               "perplexity": {"bits_per_byte": 2.5}, "experts": load}}
    for step in (8, 16)
  ]  # fmt: skip
  results = folder.parent / "results.json"
  results.write_text(json.dumps(records))
  before = hashes(folder)
  return folder, write(folder, "--results", str(results)), before


def hashes(folder):
  files = [p for p in folder.rglob("*") if p.is_file() and "report" not in p.parts[-2:-1]]
  return {p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_every_part_of_a_run_has_its_figure_on_the_page_and_as_a_picture(whole):
  folder, page, _ = whole
  figures = Outline(page).figures()
  wanted = {"loss", "validation", "throughput", "expert_load", "recall", "kv_bytes", "kv_cache"}
  wanted |= {"flops", "decode_cost", "prefill", "gradient_norm", "gradient_norms", "learning_rate"}
  assert wanted <= set(figures)
  assert len([name for name in figures if name.endswith("needle_accuracy")]) == 2
  assert len([name for name in figures if name.endswith("experts_load")]) == 2
  assert len(figures) == len(set(figures)) == page.count("<svg ")
  pictures = {path.stem: path.read_bytes() for path in (folder / "report").glob("*.png")}
  assert pictures.keys() == set(figures)
  assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())


def test_numbers_of_the_run_stand_on_the_page(whole):
  _, page, _ = whole
  last = json.loads(LINES[-1])
  text = " ".join(Outline(page).texts)
  assert f"{last['loss']:.4f}" in text and f"{last['validation_bits_per_byte']:.4f}" in text
  assert "after step 8" in text and "perplexity.bits_per_byte" in text
  assert "model.attention.window" in text and "0.11.2" in text


def test_a_page_loads_nothing_and_runs_its_own_script_only(whole):
  _, page, _ = whole
  outline = Outline(page)
  pictures = {f"{name}.png" for name in outline.figures()}
  for tag, attributes in outline.elements:
    for name in ("src", "href", "xlink:href", "action", "data"):
      link = attributes.get(name) or "#"
      assert link in pictures or link.startswith(("#", "data:")), (tag, name, link)
  assert "://" not in page and "@import" not in page
  assert "default-src 'none'" in page and page.count("<script") == 1


def test_ids_are_unique_and_what_svg_refers_to_is_there(whole):
  _, page, _ = whole
  ids = [attributes["id"] for _, attributes in Outline(page).elements if "id" in attributes]
  used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
  assert len(ids) == len(set(ids)) and used <= set(ids)


def test_the_run_folder_is_only_read(whole):
  folder, _, before = whole
  assert hashes(folder) == before
  assert not [path for path in folder.rglob("*.tmp")]


def test_the_same_run_gives_the_same_page(tmp_path):
  folder = make(tmp_path / "run", short())
  pictures = lambda: {path.name: path.read_bytes() for path in (folder / "report").iterdir()}
  page, before = write(folder), pictures()
  assert write(folder) == page and pictures() == before


@pytest.mark.slow
def test_a_run_of_400_steps_is_a_small_page(tmp_path):
  lines = [json.loads(LINES[step % len(LINES)]) | {"step": step + 1} for step in range(400)]
  page = write(make(tmp_path / "run", some(*lines), chosen=settings()))
  assert len(page.encode()) < 2e6


def test_restarts_and_borders_of_stages_are_marked(tmp_path):
  slots = nano.get_config().data.slots * nano.get_config().data.batch_rows
  name = "<script>$late"
  stage = Stage(name=name, tokens=12 * slots, changes={"optim.bias_speed": 0.0})
  chosen = settings(stages=(stage,))
  run = read_run(make(tmp_path / "run", short(), chosen=chosen, starts=(0, 4, 8, 6, 6)))
  assert run.restarts == [4, 6, 6]  # the start after step 8 was hidden by the one after step 6
  assert run.borders == {12: name}
  with drawing.style():
    loss = next(training(run))
  assert ">&lt;script&gt;$late</text>" in loss.svg and ">restart</text>" in loss.svg


def test_text_of_files_never_becomes_html(tmp_path):
  lines = short(**{HOSTILE: 1.0, "grad_norm_" + HOSTILE: 1.0, "tokens": HOSTILE})
  folder = make(tmp_path / "<b>run", lines)
  nested = json.dumps({HOSTILE: {HOSTILE: HOSTILE}})
  for name in ("config", "environment", "start"):
    (folder / f"{name}.json").write_text(nested)
  task = {**MAP, "accuracy": [[0, 1]] * 3, "text": HOSTILE, HOSTILE: 1}
  results = folder.parent / "<b>results.json"
  results.write_text(json.dumps([{"step": HOSTILE, "results": {HOSTILE: task}}] * 2))
  assert harmless(write(folder, "--results", str(results)))


def harmless(page):
  """Whether HOSTILE stands in a page as text, and no element is there that pages do not have."""
  outline = Outline(page)
  tags = [tag for tag, _ in outline.elements]
  assert not {"img", "b"} & set(tags) and tags.count("script") == 1
  assert not any(name.startswith("on") for _, names in outline.elements for name in names)
  return "<script>alert(1)</script><img src=x" in " ".join(outline.texts)


def test_numbers_that_are_not_finite_are_gaps_that_the_page_names(tmp_path):
  lines = short()
  lines[4:6] = some({"step": 5, "loss": None}, {"step": 6, "loss": None})
  lines[9] = '{"step": 10, "loss": NaN}\n'
  page = write(make(tmp_path / "run", lines))
  assert "The loss is not finite in 3 steps: 5, 6, 10." in page
  assert "not finite</text>" in page


def test_a_run_of_one_step_is_drawn(tmp_path):
  wanted = {"loss", "expert_load", "recall", "gradient_norms", "learning_rate", "step_time"}
  names = (*FEW, "recall_layer_1", "grad_norm_embed", "lr", "step_seconds", "data_wait_seconds")
  line = {name: json.loads(LINES[0])[name] for name in names}
  assert set(Outline(write(make(tmp_path / "run", some(line)))).figures()) == wanted


def test_what_replay_and_serving_cost_is_drawn_where_a_run_measures_it(tmp_path):
  """Names as train/replay_report.py writes them, on validation steps; a bucket may be empty."""
  names = (EXACT, REPLAYED, GAP, KL, TOP1, FP4, POOL, f"{GAP}_first_16")
  lines = [{"step": step, "nll": 1.0} for step in range(1, 9)]
  for number in (3, 7):
    lines[number] |= {name: 0.5 - 0.01 * number for name in names}
  page = write(make(tmp_path / "run", some(*lines)))
  wanted = ["replay_loss", "replay_gap", "replay_kl", "replay_top1", "serving_delta"]
  assert Outline(page).figures() == wanted
  assert ">first 16</text>" in page and ">to 128</text>" not in page


def test_before_the_first_step_the_configuration_is_drawn(tmp_path):
  page = write(make(tmp_path / "run", [], chosen=settings()))
  assert "There are no metrics of a step yet" in page
  assert Outline(page).figures() == ["kv_bytes", "kv_cache", "flops", "decode_cost", "prefill"]


def test_what_is_missing_or_torn_is_said(tmp_path):
  lines = [*short()[:6], "no json\n", '{"step": 7, "lo']
  folder = make(tmp_path / "run", lines, chosen=settings(), starts=())
  for name in ("environment.json", "start.json"):
    (folder / name).unlink()
  page = write(folder)
  for said in (
    "The last line of the metrics is incomplete and was left out.",
    "1 lines of the metrics are no JSON of a step and were left out.",
    "The run has taken 6 of its 16 steps.",
    "Restarts are not marked: the folder has no events of a start.",
    "The folder has no environment.json.",
    "No results were given",
  ):
    assert said in page
  assert "validation" not in Outline(page).figures()


NO_CONFIGS = ["[]", "{", "3", '{"model": 3}', '{"stages": 3}', '{"no": 1}']
NO_CONFIGS += ['{"model": {"dim": "x"}}', '{"model": {"dim": 0}}']


@pytest.mark.parametrize("config", NO_CONFIGS)
def test_a_configuration_that_is_none_leaves_out_what_needs_one(config, tmp_path):
  folder = make(tmp_path / "run", short()[:2])
  (folder / "config.json").write_text(config)
  run = read_run(folder)
  assert run.settings is None and any("config.json" in note for note in run.notes)
  assert len(run.metrics.steps_N) == 2


def test_segments_of_a_store_are_read_there_and_as_a_copy(s3, tmp_path):
  folder = make(tmp_path / "run", [])
  (folder / "metrics.jsonl").unlink()
  for number, part in ((1, short()[:10]), (2, short()[10:])):
    (folder / f"metrics-00000{number}.jsonl").write_text("".join(part))
  remote = storage_path(f"{s3}/run")
  for path in folder.iterdir():
    (remote / path.name).write_bytes(path.read_bytes())
  there, copy = read_run(remote), read_run(folder)
  assert there.metrics.steps_N.tolist() == copy.metrics.steps_N.tolist() == list(range(1, 17))
  assert there.restarts == copy.restarts == [8]
  assert report.main([f"--workdir={remote}"]) == 0
  assert set(remote.names_below("report/")) > {"report/index.html", "report/loss.png"}


def test_a_folder_that_is_no_run_and_files_that_are_no_results_are_refused(tmp_path):
  (problem,) = refusal("--workdir", tmp_path / "no")
  assert problem.startswith(f"--workdir {tmp_path / 'no'} is no run folder")
  folder = make(tmp_path / "run", short()[:1])
  (tmp_path / "broken.json").write_text("{")
  (tmp_path / "other.json").write_text('[{"results": 3}]')
  names = [tmp_path / name for name in ("broken.json", "other.json", "none.json")]
  assert refusal("--workdir", folder, "--results", *names) == (
    f"--results {names[0]} holds no results of evaluate.",
    f"--results {names[1]} holds no results of evaluate.",
    f"--results {names[2]} cannot be read: No such file or directory.",
  )
  assert not (folder / "report").exists()


def test_an_output_that_cannot_be_written_leaves_the_old_page(tmp_path):
  folder = make(tmp_path / "run", some({"step": 1, "loss": 1.0}))
  (tmp_path / "file").write_text("")
  (problem,) = refusal("--workdir", folder, "--output", tmp_path / "file" / "inside")
  assert problem.startswith(f"--output {tmp_path / 'file' / 'inside'} cannot be written")
  page = write(folder)
  (folder / "report" / "loss.png").unlink()
  (folder / "report" / "loss.png").mkdir()
  assert "cannot be written" in refusal("--workdir", folder)[0]
  assert (folder / "report" / "index.html").read_text() == page


@pytest.mark.parametrize("norms", [(0.85, 0.9), (0.5, 50.0), (0.0, 0.0), (1e-7, 2e-7)], ids=str)
def test_an_axis_has_numbers_however_far_apart_the_values_are(norms, tmp_path):
  lines = [{"step": step + 1, "grad_norm": norm} for step, norm in enumerate(norms)]
  with drawing.style():
    drawn = next(gradients(read_run(make(tmp_path / "run", some(*lines)))))
  axis = drawn.svg[drawn.svg.index("matplotlib.axis_2") :]
  assert len(re.findall(r">[-\u2212]?[0-9.e-]+</text>", axis)) >= 2


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
  monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda name: None)
  (problem,) = refusal("--workdir", tmp_path)
  assert problem.endswith("matplotlib, which is not installed; `pip install '.[plots]'` does it.")
