"""The report: figures computed right, hostile or broken input kept harmless, the page whole and of bounded size."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.tools import charts
from octavo.tools.html_report import write_report

HOSTILE = "</script></pre><img src=x onerror=alert(1)>{{config}}"


def row(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    speed = {"tokens": 1024 * step, "tokens_per_s": 980.0}
    return {"step": step, "loss": loss, "lr": 1e-3, "grad_norm": 1.2, "skipped": False, **speed, **more}


def scaling(names: list[str], **readings: float) -> dict[str, dict[str, float]]:
    return {name: {"scale": 0.0012, "amax": 0.55, "saturated": 0.0, "underflow": 0.013, **readings} for name in names}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def make_run(folder: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    write_rows(folder / "metrics.jsonl", rows)
    (folder / "config.json").write_text(json.dumps({"model": "bdh", "precision": "fp8", **config}))
    return folder


def embedded(page: str) -> dict[str, Any]:
    actual = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert actual

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON: a browser would stop at it")

    data: dict[str, Any] = json.loads(actual[1], parse_constant=refuse)
    return data


def card(page: str, label: str) -> str:
    actual = re.search(rf"<dt>{re.escape(label)}</dt><dd>(.*?)<small", page)
    assert actual, f"no card {label!r}"
    return actual[1]


def report(folder: Path) -> str:
    return write_report(folder).read_text("utf-8")


def test_page_holds_the_run(tmp_path: Path) -> None:
    names = ["layer0.x@encoder.a", "layer0.x@encoder.g", "matmul 3 [bdh.py:88].b"]
    rows = [row(1, 5.5, scaling=scaling(names)), row(2, 5.0), row(3, 4.5, scaling=scaling(names, saturated=0.02))]
    make_run(tmp_path, rows, steps=3, emulated=True, fp8={"format": "HYBRID"})
    products = [
        {"name": "layer0.x@encoder", "precision": "fp8"},
        {"name": "head", "precision": "bf16", "reason": "head"},
    ]
    (tmp_path / "products.json").write_text(json.dumps({"products": products}))
    page = report(tmp_path)
    data = embedded(page)
    assert [(each["product"], each["operand"]) for each in data["scaling"]["rows"]] == [
        ("layer0.x@encoder", "a"),
        ("layer0.x@encoder", "g"),
        ("matmul 3 [bdh.py:88]", "b"),
    ]
    assert data["scaling"]["steps"] == [1, 3]
    assert data["runs"][0]["lines"]["loss"] == {"x": [1, 2, 3], "y": [5.5, 5.0, 4.5]}
    assert card(page, "Products in FP8") == "1 of 2"
    assert card(page, "Highest saturation") == "2 %"
    assert card(page, "FP8 arithmetic") == "Emulated"
    assert "complete, 3 of 3 steps" in page
    assert "<th scope=row>fp8.format</th><td>HYBRID</td>" in page


def test_held_out_loss_and_units(tmp_path: Path) -> None:
    make_run(tmp_path, [row(1, 5.5), row(2, 5.0)], steps=2)
    page = report(tmp_path)
    assert "Held-out loss" not in page and "Loss, nats per byte" in page
    results = {"fp8": {"held_out_loss": 2.02}, "bf16": {"held_out_loss": 2.0}}
    (tmp_path / "summary.json").write_text(json.dumps(results))
    page = report(tmp_path)
    assert card(page, "Held-out loss") == "2.02"
    assert "nats per byte; on text never trained on; BF16 2, +1.00 %" in page
    assert "tokens per second; median over the steps" in page
    results["fp8"]["held_out_loss"] = None  # it diverged
    (tmp_path / "summary.json").write_text(json.dumps(results))
    assert card(report(tmp_path), "Held-out loss") == "not finite"


def test_the_prompt_is_told_apart_from_what_the_model_wrote(tmp_path: Path) -> None:
    make_run(tmp_path, [row(1, 5.5)])
    (tmp_path / "sample.json").write_text(json.dumps({"prompt": "def f(x):\n", "written": "    return x"}))
    page = report(tmp_path)
    assert '<pre class="prompt" aria-label="prompt">def f(x):\n</pre>' in page
    assert '<pre class="written" aria-label="written by the model">    return x</pre>' in page


def test_every_placeholder_and_element_is_there(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, [row(1, 5.5)]))
    assert not re.search(r"\{\{\w+\}\}", page)
    for element in re.findall(r'byId\("([\w-]+)"\)', page):
        assert f'id="{element}"' in page, element


def test_page_loads_nothing(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, [row(1, 5.5, scaling=scaling(["p.a"]))]))
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|\bsrc=", page)
    assert re.findall(r"<link[^>]*>", page) == ['<link rel="icon" href="data:,">']


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    make_run(tmp_path, [row(1, 5.5, scaling=scaling([f"{HOSTILE}.a"], saturated=0.5))], name=HOSTILE, note=HOSTILE)
    product = dict.fromkeys(("name", "op", "precision", "reason", "shapes", "formats", "where", "calls"), HOSTILE)
    (tmp_path / "products.json").write_text(json.dumps({"products": [product]}))
    (tmp_path / "sample.json").write_text(json.dumps({"prompt": HOSTILE, "written": HOSTILE + "\ufffd\x00"}))
    page = report(tmp_path)
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert page.count("</pre>") == 2
    assert "{{config}}\ufffd" in page  # the sample's own braces are no placeholder
    assert embedded(page)["scaling"]["rows"][0]["product"] == HOSTILE


def test_lone_surrogate_does_not_stop_the_page(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, [row(1, 5.5, scaling=scaling(["\ud800.a"], saturated=0.5))], name="\ud800"))
    assert embedded(page)["scaling"]["rows"]


def test_broken_losses_are_marked(tmp_path: Path) -> None:
    losses = [5.0, math.nan, math.inf, None, 4.0, math.nan]
    rows = [row(step, loss, skipped=step == 2) for step, loss in enumerate(losses, start=1)]
    rows[1] |= {"grad_norm": math.inf, "scaling": scaling(["p.a"], amax=math.inf, scale=math.nan)}
    page = report(make_run(tmp_path, rows))
    data = embedded(page)
    assert data["runs"][0]["lines"]["loss"]["y"] == [5.0, None, None, None, 4.0, None]
    assert data["runs"][0]["lost"] == [[2, 4], [6, 6]]
    assert data["runs"][0]["skipped"] == [[2, 2]]
    assert data["scaling"]["rows"][0]["series"][:2] == [None, None]
    assert card(page, "Final loss") == "not finite"
    assert card(page, "Broken steps") == "4"
    assert "ended at step 6 without a finite loss" in page


def test_difference_is_of_the_last_tenth(tmp_path: Path) -> None:
    make_run(tmp_path, [row(step, 9.0 if step <= 90 else 2.02) for step in range(1, 101)])
    write_rows(tmp_path / "metrics_bf16.jsonl", [row(step, 7.0 if step <= 90 else 2.0) for step in range(1, 101)])
    page = report(tmp_path)
    assert card(page, "FP8 against BF16") == "+1.00 %"
    assert card(page, "Final loss") == "2.02"
    assert card(page, "Start loss") == "9"


def test_difference_pairs_the_steps(tmp_path: Path) -> None:
    """A baseline that ran on, and a step lost in one run only: neither may pass for a difference."""
    rows = [row(step, 10.0 - 0.1 * step) for step in range(1, 51)]
    rows[47]["loss"] = math.nan
    make_run(tmp_path, rows)
    write_rows(tmp_path / "metrics_bf16.jsonl", [row(step, 10.0 - 0.1 * step) for step in range(1, 101)])
    page = report(tmp_path)
    assert card(page, "FP8 against BF16") == "+0.00 %"
    assert {value for value in embedded(page)["difference"]["y"] if value is not None} == {0.0}


def test_run_that_diverged_has_no_difference(tmp_path: Path) -> None:
    make_run(tmp_path, [row(step, 2.0 if step < 50 else math.nan) for step in range(1, 51)])
    write_rows(tmp_path / "metrics_bf16.jsonl", [row(step, 2.0) for step in range(1, 51)])
    assert card(report(tmp_path), "FP8 against BF16") == "no figure"


def test_resumed_run_counts_its_second_pass(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, [row(1, 5.0), row(2, 4.0), row(3, 9.0), row(2, 3.0)]))
    assert embedded(page)["runs"][0]["lines"]["loss"] == {"x": [1, 2], "y": [5.0, 3.0]}


def test_plain_run_needs_two_files_only(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, [row(1, 5.0), row(2, 4.0)], precision="bf16"))
    assert embedded(page)["scaling"] == {"steps": [], "rows": []}
    assert "Products in FP8" not in page
    assert "Highest saturation" not in page


def test_write_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path, [row(1, 5.0)])
    assert write_report(folder) == folder / "report.html"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl", "report.html"]
    before = (folder / "report.html").read_bytes()

    def disk_full(self: Path, target: Path) -> Path:
        raise OSError(f"no space left for {self} as {target}")

    monkeypatch.setattr(Path, "replace", disk_full)
    with pytest.raises(OSError, match="no space left"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl", "report.html"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"step": 2, "loss": 4.', "Expecting|Unterminated|delimiter"),
        ("", "Expecting value"),
        ("[1, 2]", "expected a JSON object"),
        ('{"loss": 4.0}', "'step' must be an integer"),
        ('{"step": 2}', "'loss' is missing"),
        ('{"step": 2, "loss": "low"}', "'loss' must be a number"),
        ('{"step": 2, "loss": 4.0, "scaling": [1]}', "'scaling' must be"),
        ('{"step": 2, "loss": 4.0, "scaling": {"p.a": {"amax": "big"}}}', "p.a: amax"),
    ],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics_bf16.jsonl"])
def test_malformed_line_is_named(tmp_path: Path, name: str, line: str, complaint: str) -> None:
    make_run(tmp_path, [row(1, 5.0)])
    (tmp_path / name).write_text(json.dumps(row(1, 5.0)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"{re.escape(name)}:2: .*({complaint})"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no such file"):
        write_report(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [])
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no steps"):
        write_report(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [row(1, 5.0)])
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        write_report(tmp_path)
    (tmp_path / "config.json").write_text('{\n"model": }')
    with pytest.raises(ValueError, match=r"config\.json:2: "):
        write_report(tmp_path)


def test_huge_run_stays_small(tmp_path: Path) -> None:
    """The worst case: 10,000 steps, 900 operands, and no two readings alike."""
    noise = np.random.default_rng(0)
    names = [f"model.layers.{i // 3}.self_attn.q_proj.{'xwg'[i % 3]}" for i in range(900)]
    rows = [row(step, 2.0 + noise.random()) for step in range(1, 10_001)]
    for each in rows[::100]:
        exponents = noise.uniform(-9, -1, size=(900, len(charts.READINGS))).tolist()
        each["scaling"] = {
            name: dict(zip(charts.READINGS, (10**e for e in four), strict=True))
            for name, four in zip(names, exponents, strict=True)
        }
    page = write_report(make_run(tmp_path, rows))
    assert page.stat().st_size < 2_000_000
    data = embedded(page.read_text("utf-8"))
    assert len(data["runs"][0]["lines"]["loss"]["x"]) <= charts.LINE_POINTS
    assert len(data["scaling"]["steps"]) == charts.SCALING_POINTS
    assert len(data["scaling"]["rows"]) == 900


def test_thinning_keeps_spikes() -> None:
    steps = np.arange(1, 20_001)
    values = np.ones(20_000)
    values[[777, 12_345]] = 50.0, -3.0
    thinned = charts.line(steps, values)
    points = dict(zip(thinned["x"], thinned["y"], strict=True))
    assert (points[778], points[12_346]) == (50.0, -3.0)
    assert len(points) <= charts.LINE_POINTS


def test_thinning_keeps_the_worst_reading(tmp_path: Path) -> None:
    rows = [row(step, 2.0, scaling=scaling(["p.a"], saturated=0.1 if step == 77 else 0.0)) for step in range(1, 301)]
    scale, _, saturated, *_ = embedded(report(make_run(tmp_path, rows)))["scaling"]["rows"][0]["series"]
    assert scale == -2921  # round(1000 * log10(0.0012)), and one number because it never changed
    assert [code for code in saturated if code != charts.ZERO_CODE] == [-1000]


def test_smoothing_follows_a_slope_and_leaves_gaps_alone() -> None:
    values = np.arange(20.0)
    np.testing.assert_allclose(charts.smooth(values, 5), values)
    values[[0, 10]] = np.nan
    smoothed = charts.smooth(values, 5)
    assert np.flatnonzero(np.isnan(smoothed)).tolist() == [0, 10]
    assert smoothed[11] == pytest.approx((9 + 11 + 12 + 13) / 4)


def test_scripts_know_the_code_for_zero() -> None:
    script = (Path(charts.__file__).parent / "report.js").read_text("utf-8")
    assert f"const ZERO_CODE = {charts.ZERO_CODE};" in script
