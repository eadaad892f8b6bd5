// Line charts in plain SVG: axes, lines with gaps, marks, a tooltip that follows the pointer. report.js uses them.
// No library, and no markup made of strings: every text goes in as textContent, so a name can be anything.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = document.querySelector("svg").namespaceURI;
const DASHES = ["", "7 4", "2 4", "10 3 2 3"];
const redraw = new Map(); // chart element -> the function that draws it at the present width

function make(parent, tag, attributes = {}, text = "") {
  const space = tag === "svg" ? SVG : parent.namespaceURI;
  const node = document.createElementNS(space, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  return parent.appendChild(node);
}

const superscript = (n) => String(n).replace(/./g, (c) => ({ "-": "⁻" })[c] ?? "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const exponent = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
  if (exponent >= -4 && exponent < 6) {
    const short = Number(value.toPrecision(Math.max(digits, exponent + 1)));
    return short.toLocaleString("en", { maximumFractionDigits: 9 });
  }
  const mantissa = Number((value / 10 ** exponent).toPrecision(digits));
  return `${mantissa === 1 ? "" : `${mantissa} × `}10${superscript(exponent)}`;
}
const percent = (value, digits = 3) => (value === null ? "–" : `${number(100 * value, digits)} %`);
const signedPercent = (value) => (value > 0 ? "+" : "") + percent(value);

function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 1) return linearTicks(low, high, 5);
  const every = Math.ceil(decades / 6);
  const factors = decades < 2.5 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++) {
    if (e % every === 0) ticks.push(...factors.map((factor) => Number(`${factor}e${e}`)));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

function valueRange(spec) {
  let [low, high] = [Infinity, -Infinity];
  for (const { y } of spec.lines) {
    for (const value of y) {
      if (value === null || (spec.log && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return null;
  if (spec.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (spec.log) {
    const pad = low === high ? 1.5 : (high / low) ** 0.05;
    return [low / pad, high * pad];
  }
  const pad = low === high ? Math.abs(low) * 0.05 || 1e-3 : (high - low) * 0.05;
  return [spec.zero && low === 0 ? 0 : low - pad, high + pad];
}

function frameOf(host, spec) {
  const range = valueRange(spec);
  if (!range) return null;
  const [low, high] = range;
  const width = Math.max(260, host.clientWidth);
  const height = spec.height ?? 210;
  const ticks = spec.log ? logTicks(low, high) : linearTicks(low, high, 5);
  const powers = spec.log && ticks.every((tick) => Number.isInteger(Math.log10(tick)));
  const labels = ticks.map((tick) => (powers ? `10${superscript(Math.log10(tick))}` : spec.format(tick)));
  const left = 16 + 6.7 * Math.max(3, ...labels.map((label) => label.length));
  const steps = spec.lines.flatMap(({ x }) => [x[0], x[x.length - 1]]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [right, top, bottom] = [width - 12, 12, height - 24];
  const across = (step) => left + ((right - left) * (step - first)) / (last - first || 1);
  const share = spec.log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
  const up = (value) => bottom - (bottom - top) * share(value);
  const svg = make(host, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.label });
  return { svg, width, height, left, right, top, bottom, first, last, ticks, labels, across, up };
}

function drawAxes(frame) {
  const { svg, left, right, bottom, first, last, ticks, labels, across, up } = frame;
  ticks.forEach((tick, i) => {
    const y = up(tick);
    make(svg, "line", { class: tick === 0 ? "gridline zero" : "gridline", x1: left, x2: right, y1: y, y2: y });
    make(svg, "text", { x: left - 7, y: y + 4, "text-anchor": "end" }, labels[i]);
  });
  const fitting = Math.max(2, Math.floor((right - left) / 75));
  for (const tick of linearTicks(first, last > first ? last : first + 1, fitting).filter(Number.isInteger)) {
    const anchor = across(tick) > right - 24 ? "end" : "middle";
    const x = anchor === "end" ? Math.min(across(tick) + 12, right + 12) : across(tick);
    make(svg, "text", { x, y: bottom + 18, "text-anchor": anchor }, tick.toLocaleString("en"));
  }
  make(svg, "line", { class: "gridline", x1: left, x2: right, y1: bottom, y2: bottom });
  make(svg, "text", { x: left - 7, y: bottom + 18, "text-anchor": "end" }, "step");
}

// spec: lines [{name, series, x, y, and perhaps weight, dash}], format (of a value), label (for screen readers),
// and perhaps log, zero (the axis includes it), height, marks [{kind, name, spans}].
function lineChart(host, spec) {
  redraw.set(host, () => {
    host.replaceChildren();
    const frame = frameOf(host, spec);
    if (!frame) return make(host, "div", { class: "empty" }, "Nothing finite to draw.");
    drawAxes(frame);
    for (const mark of spec.marks ?? []) drawMarks(frame, mark);
    for (const line of spec.lines) drawLine(frame, line, spec.log);
    return followPointer(frame, spec);
  });
  redraw.get(host)();
}

function drawLine({ svg, across, up }, line, log) {
  const drawable = (value) => typeof value === "number" && (!log || value > 0);
  let path = "";
  line.x.forEach((step, i) => {
    if (!drawable(line.y[i])) return;
    const [x, y] = [across(step).toFixed(1), up(line.y[i]).toFixed(1)];
    const [before, after] = [drawable(line.y[i - 1]), drawable(line.y[i + 1])];
    path += `${before ? "L" : "M"}${x} ${y}`;
    if (!before && !after) make(svg, "circle", { class: `dot s${line.series}`, cx: x, cy: y, r: 2 });
  });
  const dash = DASHES[line.dash ?? 0];
  make(svg, "path", { class: `line s${line.series} ${line.weight ?? ""}`, d: path, "stroke-dasharray": dash });
}

function drawMarks({ svg, across, top, bottom }, { kind, spans }) {
  for (const [from, to] of spans) {
    const [x0, x1] = [across(from), across(to)];
    const middle = (x0 + x1) / 2;
    if (kind === "skipped") {
      make(svg, "path", { class: kind, d: `M${middle - 4} ${bottom}h8l-4 -7z` });
    } else {
      make(svg, "rect", { class: `${kind} band`, x: x0 - 1, width: x1 - x0 + 2, y: top, height: bottom - top });
      make(svg, "path", { class: `${kind} cross`, d: `M${middle - 4} ${top + 2}l8 8m0 -8l-8 8` });
    }
  }
}

function nearest(x, step) {
  let [low, high] = [0, x.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < step) low = middle;
    else high = middle;
  }
  return step - x[low] < x[high] - step ? low : high;
}

function followPointer({ svg, width, left, right, top, bottom, first, last, across }, spec) {
  const cursor = make(svg, "line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const px = ((event.clientX - box.left) * width) / box.width;
    const wanted = first + ((px - left) / (right - left)) * (last - first);
    const x = spec.lines[0].x;
    const step = x[nearest(x, wanted)];
    cursor.setAttribute("transform", `translate(${across(step)} 0)`);
    cursor.setAttribute("visibility", "visible");
    const rows = spec.lines.map((line) => {
      const index = nearest(line.x, step);
      const [at, value] = [line.x[index], line.y[index]];
      // Thinned lines do not all keep the same steps.
      const elsewhere = at === step ? "" : ` (step ${at.toLocaleString("en")})`;
      return [line.name, (value === null ? "not finite" : spec.format(value)) + elsewhere, line.series];
    });
    const reach = (4 / (right - left)) * (last - first);
    for (const { name, spans } of spec.marks ?? []) {
      const hit = spans.find(([from, to]) => wanted >= from - reach && wanted <= to + reach);
      if (hit) rows.push([name, hit[0] === hit[1] ? `step ${hit[0]}` : `steps ${hit[0]} to ${hit[1]}`, ""]);
    }
    showTip(event, `Step ${step.toLocaleString("en")}`, rows);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    byId("tip").hidden = true;
  });
}

function showTip(event, title, rows) {
  const tip = byId("tip");
  tip.replaceChildren();
  make(tip, "b", {}, title);
  for (const [name, value, series] of rows) {
    const row = make(tip, "div");
    make(row, "span", { class: `key s${series}` }, name);
    row.append(` ${value}`);
  }
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

function legend(host, entries) {
  host.replaceChildren();
  for (const { name, series, dash, mark } of entries) {
    const entry = make(host, "span");
    const key = make(entry, "svg", { "aria-hidden": "true" });
    if (mark === "lost") make(key, "path", { class: "lost cross", d: "M9 1l8 8m0 -8l-8 8" });
    else if (mark === "skipped") make(key, "path", { class: "skipped", d: "M9 9h8l-4 -7z" });
    else make(key, "path", { class: `line s${series}`, d: "M1 5h24", "stroke-dasharray": DASHES[dash ?? 0] });
    entry.append(name);
  }
}

function toggle(host, choices, chosen, act) {
  for (const [key, text] of Object.entries(choices)) {
    const button = make(host, "button", { type: "button", "aria-pressed": key === chosen }, text);
    button.addEventListener("click", () => {
      for (const other of host.children) other.setAttribute("aria-pressed", other === button);
      act(key);
    });
  }
  act(chosen);
}
